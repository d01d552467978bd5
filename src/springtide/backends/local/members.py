"""A worker that is a process of this machine."""

from __future__ import annotations

from dataclasses import dataclass

from springtide.backends.control_channel.members import Replica
from springtide.backends.processes import ProcessIdentity


@dataclass(eq=False)
class ProcessHandle:
    """A worker's process. `share_slot` is the slot of shared memory it reports in, if it shares its device."""

    share_slot: int | None = None
    identity: ProcessIdentity | None = None
    pidfd: int | None = None

    @property
    def exists(self) -> bool:
        """Whether the process is known."""
        return self.identity is not None


Worker = Replica[ProcessHandle]
