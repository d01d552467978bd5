"""Exit codes of worker processes, and exits that no hanging thread or destructor can delay."""

from __future__ import annotations

import os
import sys
import threading
from typing import NoReturn

EXIT_CRASHED = 1
EXIT_FENCED = 3
EXIT_GRACE = 4
# The worker's environment lacks something (a key, a store); neither the worker nor user code has failed.
EXIT_UNFIT = 5


class WorkerExit(BaseException):
    """Unwinds user code when the worker must exit. Not an Exception, so that `except Exception` does not catch it."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def exit_now(code: int) -> NoReturn:
    """Flush output and end the process at once, without running destructors or waiting for threads."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def exit_at(grace_s: float) -> None:
    """Schedule the process's end in `grace_s` seconds, even if the training thread hangs until then."""
    timer = threading.Timer(grace_s, os._exit, (EXIT_GRACE,))
    timer.daemon = True
    timer.start()
