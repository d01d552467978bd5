"""The child's side of a measurement: it ends with its parent, and an error becomes one sentence for the parent."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from springtide.core.errors import InvalidRequest
from springtide.runtime.process.child_processes import ErrandError, ErrandFiles
from springtide.runtime.process.entry import describe_error
from springtide.runtime.process.exits import exit_now

_LOOK_S = 0.5


class LostPeer(Exception):
    """Another member is gone: the cause is in that member's error."""


def run_member(files: ErrandFiles, work: Callable[[], None], *, source_path: str = "") -> NoReturn:
    """Do the work and end the process: 0 if it is done, 1 with an error file if not.

    `source_path` is the user's file, whose line an error names.
    """
    _end_with_parent()
    try:
        work()
        code = 0
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        is_refused = isinstance(error, InvalidRequest)
        sentence = str(error) if is_refused else describe_error(error, source_path)
        files.fail(ErrandError(sentence=sentence, is_refused=is_refused, is_cause=not isinstance(error, LostPeer)))
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of process groups may still be about: one that wakes up amid the interpreter's end aborts it.
    exit_now(code)


def _end_with_parent() -> None:
    """Exit once the parent is gone: a parent that was killed by SIGKILL cannot end its children."""
    parent = os.environ.get("SPRINGTIDE_ERRAND_PARENT")

    def look() -> None:
        while os.getppid() == int(parent or 0):
            time.sleep(_LOOK_S)
        exit_now(1)

    if parent:
        threading.Thread(target=look, name="springtide-parent", daemon=True).start()
