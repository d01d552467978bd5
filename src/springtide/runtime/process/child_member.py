"""The child's side of a measurement: it exits with its parent, and reports an error to the parent as one sentence."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from springtide.core.errors import InvalidRequest
from springtide.runtime.process.child_processes import MemberError, MemberFiles
from springtide.runtime.process.entry import describe_error
from springtide.runtime.process.exits import exit_now

_PARENT_POLL_S = 0.5


class LostPeer(Exception):
    """Another member is gone. That member's error has the cause."""


def run_member(files: MemberFiles, work: Callable[[], None], *, source_path: str = "") -> NoReturn:
    """Call `work` and end the process: exit code 0 on success, 1 with an error file otherwise.

    An error's sentence names the line of `source_path`, the user's file, that raised it.
    """
    _end_with_parent()
    try:
        work()
        code = 0
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        is_refused = isinstance(error, InvalidRequest)
        sentence = str(error) if is_refused else describe_error(error, source_path)
        files.fail(MemberError(sentence=sentence, is_refused=is_refused, is_cause=not isinstance(error, LostPeer)))
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of process groups may still run: one that wakes up during interpreter shutdown aborts the process.
    exit_now(code)


def _end_with_parent() -> None:
    """Exit once the parent is gone: a parent killed by SIGKILL cannot end its children itself."""
    parent = os.environ.get("SPRINGTIDE_MEASUREMENT_PARENT")

    def watch() -> None:
        while os.getppid() == int(parent or 0):
            time.sleep(_PARENT_POLL_S)
        exit_now(1)

    if parent:
        threading.Thread(target=watch, name="springtide-parent", daemon=True).start()
