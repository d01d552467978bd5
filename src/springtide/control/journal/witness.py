"""A file beside the journal that says how far it was written: a journal that ends earlier has lost acknowledged steps.

SQLite drops the rest of its write-ahead log without a word at the first page that was damaged.
"""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path
from struct import Struct

from springtide.control.journal.chain import JournalMark
from springtide.core.errors import JournalDamaged, JournalError
from springtide.storage.files import fsync_directory

_SLOT = Struct(">8sQ16s8s")
_MAGIC = b"stide-j1"
# Written alternately: the other one stays whole if a write is torn. Far enough apart for two sectors.
_SLOTS_AT = (0, 4096)
SYNC_EVERY_S = 1.0


class Witness:
    """The newest place of a journal, in a file of its own.

    Exact after a crash of the process. After a loss of power it may be up to a second old, but never ahead.
    """

    def __init__(self, path: Path) -> None:
        """Open for writing; the file is made if it is missing. Raises JournalError."""
        self._path = path
        self._synced_at_s = -SYNC_EVERY_S
        try:
            is_new = not path.exists()
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if is_new:
                fsync_directory(path.parent)
        except OSError as error:
            raise JournalError(f"{path} cannot be written: {error.strerror}") from error

    def note(self, mark: JournalMark, now_s: float) -> None:
        """Note the newest place, on the platform's clock; what fails is repeated with the next one. Raises nothing."""
        try:
            os.pwrite(self._descriptor, _packed(mark), _SLOTS_AT[mark.seq % 2])
            if now_s - self._synced_at_s >= SYNC_EVERY_S:
                self.sync()
                self._synced_at_s = now_s
        except OSError:
            # A full disk stops the journal as well, which says so.
            return

    def reset(self, mark: JournalMark) -> None:
        """Note a place that may be an earlier one, and no other. Raises OSError."""
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, _packed(mark), _SLOTS_AT[mark.seq % 2])
        self.sync()

    def sync(self) -> None:
        """Make it durable. Raises OSError."""
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        """Make it durable and close the file."""
        try:
            self.sync()
        except OSError:
            pass
        finally:
            os.close(self._descriptor)


def read_witness(path: Path) -> JournalMark | None:
    """The newest place that was noted; None if there is none that can be read."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    marks = []
    for at in _SLOTS_AT:
        slot = data[at : at + _SLOT.size]
        if len(slot) == _SLOT.size:
            magic, seq, chain, check = _SLOT.unpack(slot)
            if magic == _MAGIC and check == _checksum(seq, chain):
                marks.append(JournalMark(seq, chain))
    return max(marks, default=None)


def compare(witness: JournalMark, newest: JournalMark, at_witness: bytes | None) -> None:
    """Compare what was noted with the journal: its newest place, and the chain's value at the noted step.

    Raises JournalDamaged if the journal ends before it or has another step there.
    """
    if witness.seq > newest.seq:
        missing = witness.seq - newest.seq
        steps = "the last step is" if missing == 1 else f"the last {missing:,} steps are"
        raise JournalDamaged(
            newest.seq + 1,
            f"the journal ends at step {newest.seq}, but step {witness.seq} was acknowledged: {steps} missing",
        )
    if at_witness is not None and at_witness != witness.chain:
        raise JournalDamaged(
            min(witness.seq, newest.seq), f"step {witness.seq} of the journal is not the one that was acknowledged"
        )


def _packed(mark: JournalMark) -> bytes:
    return _SLOT.pack(_MAGIC, mark.seq, mark.chain, _checksum(mark.seq, mark.chain))


def _checksum(seq: int, chain: bytes) -> bytes:
    return blake2b(b"%d" % seq + chain, digest_size=8).digest()
