"""The exclusive use of a state directory by one platform."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import struct
import sys
from pathlib import Path

from springtide.core.errors import BackendError
from springtide.storage.files import lock_file


class StateClaim:
    """Holds a state directory, which exists, until it is closed or the process ends.

    It is a lock on a file in it and, on Linux, an abstract socket for its path: that also holds when the directory is
    removed and made again below a running platform, whose zygote another one would then take away again and again.
    """

    def __init__(self, state_dir: Path) -> None:
        """Raises BackendError, which names the process and its address as far as known, if another one holds it."""
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if sys.platform == "linux":
                _claim_path(claim, state_dir.resolve())
            self._lock = lock_file(state_dir / "lock", _in_use(state_dir))
        except BackendError:
            claim.close()
            raise
        self._path = claim.detach()

    def close(self) -> None:
        """Let another platform have the directory."""
        os.close(self._lock)
        os.close(self._path)


def _claim_path(claim: socket.socket, path: Path) -> None:
    # By the folder that it is in: containers that share a network may have different directories of one path.
    above = path.parent.stat()
    known_by = f"{os.getuid()} {above.st_dev} {above.st_ino} {path.name}".encode()
    address = f"\0springtide-{hashlib.blake2b(known_by, digest_size=16).hexdigest()}"
    try:
        claim.bind(address)
        claim.listen(socket.SOMAXCONN)
    except OSError:
        raise BackendError(_in_use(path, _holder_of(address))) from None


def _holder_of(address: str) -> int:
    """The process that listens at this abstract address; 0 where that is not known."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.setblocking(False)
        try:
            asking.connect(address)
            credentials = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        except OSError:
            return 0
    return int(struct.unpack("3i", credentials)[0])


def _in_use(state_dir: Path, pid: int = 0) -> str:
    try:
        written = json.loads((state_dir / "platform.json").read_bytes())
        known = {"pid": int(written["pid"]), "url": str(written["url"])}
    except (OSError, ValueError, KeyError, TypeError):
        known = {}
    if pid and known.get("pid") != pid:
        # What is written is of another one: the directory was removed, or it has not come so far.
        return (
            f"another platform (pid {pid}) runs on {state_dir} and has written no address there, as it just starts or "
            f"the directory was removed below it; stop it with `kill {pid}` or choose another --state"
        )
    told = f" (pid {known['pid']}, {known['url']})" if known else ""
    return f"another platform{told} runs on {state_dir}; stop it with `springtide down` or choose another --state"
