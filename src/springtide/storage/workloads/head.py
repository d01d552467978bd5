"""What counts of a workload's objects in a store: one small object, replaced as a whole or not at all."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

NUM_CHECKPOINTS_KEPT = 2
# No workload is ever formed anew so often: the fence of one that was retired.
NOBODYS_GENERATION = 1 << 53


class KeptCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that is whole: all of its objects were there before it was named."""

    generation: int
    step: int
    num_bytes: int

    @property
    def name(self) -> str:
        """The last part of its prefix, as a directory of checkpoints would have it."""
        return version_name(self.generation, self.step)


class KeptArtifact(msgspec.Struct, frozen=True, kw_only=True):
    """Which version of an artifact is the one that counts, and how long it is."""

    generation: int
    step: int
    num_bytes: int


class LoggedSteps(msgspec.Struct, frozen=True, kw_only=True):
    """How far the step log goes that was written as `generation`: what is above `step` there does not count."""

    generation: int
    step: int


class Departure(msgspec.Struct, frozen=True, kw_only=True):
    """When a workload is to be retired, in seconds of Unix time, and whether what it made stays."""

    at_unix_s: float
    keeps_artifacts: bool = True


class WorkloadHead(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The present state of a workload's objects. `generation` is the lowest that may still change anything.

    Whatever is in the store and not named here does not exist: it was written by a worker of an older generation, or is
    about to be named. `checkpoints` are newest first, `logged` in the order of writing. `departure` is when all of it
    goes, where that has been decided, until it has gone.
    """

    generation: int = 0
    checkpoints: tuple[KeptCheckpoint, ...] = ()
    logged: tuple[LoggedSteps, ...] = ()
    artifacts: dict[str, KeptArtifact] = {}
    departure: Departure | None = None

    def holds_checkpoint(self, generation: int, step: int) -> KeptCheckpoint | None:
        """The checkpoint of that generation and step, if it is one of those kept."""
        return next((kept for kept in self.checkpoints if (kept.generation, kept.step) == (generation, step)), None)

    def with_checkpoint(self, kept: KeptCheckpoint) -> WorkloadHead:
        """With one more checkpoint; only the newest ones stay."""
        others = [other for other in self.checkpoints if other.name != kept.name]
        newest = sorted([kept, *others], key=lambda other: (other.generation, other.step), reverse=True)
        return replace(self, checkpoints=tuple(newest[:NUM_CHECKPOINTS_KEPT]))

    def last_logged(self, generation: int, after: int | None) -> int:
        """The last step that the log holds, for a writer of `generation`.

        `after` is where a job that goes on from a checkpoint begins to log again, until it has logged something.
        """
        last = self.logged[-1] if self.logged else None
        if last is not None and (after is None or last.generation >= generation):
            return last.step
        return after or 0

    def with_logged(self, generation: int, step: int) -> WorkloadHead:
        """With the log as far as this."""
        others = [entry for entry in self.logged if entry.generation != generation]
        return replace(self, logged=(*others, LoggedSteps(generation=generation, step=step)))

    def with_artifact(self, name: str, kept: KeptArtifact) -> WorkloadHead:
        """With this version of an artifact."""
        return replace(self, artifacts={**self.artifacts, name: kept})


def version_name(generation: int, step: int) -> str:
    """What is published as `generation` after `step` steps is called so: names sort as the versions do."""
    return f"{generation:08d}-{step:010d}"


def parse_version(name: str) -> tuple[int, int] | None:
    """Generation and step in such a name; None where it is none."""
    generation, _, step = name.partition("-")
    return (int(generation), int(step)) if generation.isdigit() and step.isdigit() else None
