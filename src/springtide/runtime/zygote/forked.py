"""What a process that the zygote, or a process with libraries, has forked does first."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import setproctitle

from springtide.core.wire.workers import WorkerSpec
from springtide.runtime.process.exits import EXIT_CRASHED
from springtide.runtime.zygote.output import redirect_output

# From linux/prctl.h.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def fork(run: Callable[[], NoReturn]) -> int:
    """Fork a process that runs `run`, and return its id. Its end is that of the process, whatever it raises."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        run()
    except BaseException:
        traceback.print_exc()
    finally:
        # Not sys.exit: the parent's stack frames must not unwind in the child.
        os._exit(EXIT_CRASHED)


def reset_signals() -> None:
    """Give up the session and the signal handlers of the zygote."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    for name in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_DFL)


def end_with(parent: int) -> None:
    """Have this process end with its parent."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(EXIT_CRASHED)


def adopt_orphans() -> bool:
    """Have the kernel make this process the parent of those of its descendants whose own has ended; False if not."""
    return int(ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)) == 0


def show_title(title: str) -> None:
    """Set what `ps` and `pgrep -f` show. Call it early: it is written where the environment lies until that changes."""
    setproctitle.setproctitle(f"springtide {title}")


def become_worker(spec: WorkerSpec, libraries: tuple[tuple[str, str], ...]) -> NoReturn:
    """Run the worker, whose program imports these of its libraries, and end."""
    code = EXIT_CRASHED
    try:
        redirect_output(spec.log_path)
        raise_oom_score()
        show_title(f"worker {spec.replica_id}")
        os.environ.update(spec.environment)
        from springtide.runtime.worker import main

        code = main(spec, libraries)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def raise_oom_score() -> None:
    """Make the kernel's OOM killer prefer this process: a job survives losing a worker, but all need the platform."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")
