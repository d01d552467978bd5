"""How a worker process ends: its exit codes, and exits that no hanging thread and no destructor can delay."""

from __future__ import annotations

import os
import sys
import threading
from typing import NoReturn

EXIT_FENCED = 3
EXIT_GRACE = 4
# The worker's surroundings lack what it needs; neither it nor the user's code has failed.
EXIT_UNFIT = 5


class WorkerExit(BaseException):
    """Unwinds the user's code when the worker is to end. Not an Exception, so that no user code swallows it."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def exit_now(code: int) -> NoReturn:
    """Flush what was printed and end the process at once, without destructors and without waiting for threads."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def exit_at(grace_s: float) -> None:
    """However deep the training thread hangs, the process is gone when its grace is over."""
    timer = threading.Timer(grace_s, os._exit, (EXIT_GRACE,))
    timer.daemon = True
    timer.start()
