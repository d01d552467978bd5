"""What a process that loads samples does first: it drops what belongs to the training process that forked it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import stat
from collections.abc import Callable
from dataclasses import dataclass

from torch.utils.data import get_worker_info

# From linux/prctl.h.
_PR_SET_PDEATHSIG = 1
_STANDARD = 2
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")


@dataclass(frozen=True, slots=True)
class LoaderStart:
    """The `worker_init_fn` of a DataLoader's processes; `then` is that of its user."""

    parent_pid: int
    then: Callable[[int], None] | None = None

    def __call__(self, number: int) -> None:
        """End with the training process, give up its sockets, locks and devices, and run the user's function."""
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self.parent_pid:
            os._exit(1)
        if callable(signal.getsignal(signal.SIGTERM)):
            # The training process leaves in order on SIGTERM, which goes to its process group, and reads samples
            # until then.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        give_up_descriptors()
        info = get_worker_info()
        if info is not None:
            # Users look for their own dataset here.
            object.__setattr__(info, "dataset", info.dataset.dataset)  # type: ignore[attr-defined]
        if self.then is not None:
            self.then(number)


def give_up_descriptors() -> None:
    """Replace inherited sockets, lock files and devices of accelerators by /dev/null.

    The numbers stay in use, because objects that own them may still close them.
    """
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        for name in os.listdir("/proc/self/fd"):
            descriptor = int(name)
            if descriptor > _STANDARD and descriptor != nothing and _is_of_the_parent(descriptor):
                os.dup2(nothing, descriptor, inheritable=False)
    finally:
        os.close(nothing)


def _is_of_the_parent(descriptor: int) -> bool:
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return True
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        # A lock is held as long as any process has its file open.
        return path.startswith(_DEVICES) or path.endswith("lock")
    return False
