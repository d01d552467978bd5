"""The head of a workload in a store: one small object, replaced atomically, that names the objects that count."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

NUM_CHECKPOINTS_KEPT = 2
# The fence of a retired workload: higher than any generation that a worker can have.
RETIRED_GENERATION = 1 << 53


class KeptCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A complete checkpoint: all of its objects existed before the head named it."""

    generation: int
    step: int
    num_bytes: int

    @property
    def name(self) -> str:
        """The last part of its objects' prefix, which is also its name in a directory of checkpoints."""
        return version_name(self.generation, self.step)


class KeptArtifact(msgspec.Struct, frozen=True, kw_only=True):
    """The version of an artifact that counts, and its size."""

    generation: int
    step: int
    num_bytes: int


class LoggedSteps(msgspec.Struct, frozen=True, kw_only=True):
    """The last step that counts in the part of the step log that was written as `generation`."""

    generation: int
    step: int


class Departure(msgspec.Struct, frozen=True, kw_only=True):
    """When a workload is to be retired (Unix time), and whether its artifacts stay."""

    at_unix_s: float
    keeps_artifacts: bool = True


class WorkloadHead(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The present state of a workload's objects. `generation` is the lowest that may still write.

    Objects that are not named here do not count: they were written by a worker of an older generation, or will be named
    next. `checkpoints` are newest first, `logged` in the order of writing. `departure` says when the workload is to be
    retired, if that has been decided and has not happened yet.
    """

    generation: int = 0
    checkpoints: tuple[KeptCheckpoint, ...] = ()
    logged: tuple[LoggedSteps, ...] = ()
    artifacts: dict[str, KeptArtifact] = {}
    departure: Departure | None = None

    def holds_checkpoint(self, generation: int, step: int) -> KeptCheckpoint | None:
        """The checkpoint of this generation and step, or None if it is not kept."""
        return next((kept for kept in self.checkpoints if (kept.generation, kept.step) == (generation, step)), None)

    def with_checkpoint(self, kept: KeptCheckpoint) -> WorkloadHead:
        """The head with one more checkpoint; only the newest ones are kept."""
        others = [other for other in self.checkpoints if other.name != kept.name]
        newest = sorted([kept, *others], key=lambda other: (other.generation, other.step), reverse=True)
        return replace(self, checkpoints=tuple(newest[:NUM_CHECKPOINTS_KEPT]))

    def last_logged(self, generation: int, after: int | None) -> int:
        """The last step that the log holds, for a writer of `generation`.

        `after` is the step of the checkpoint that the job was restored from; it counts until the writer has logged.
        """
        last = self.logged[-1] if self.logged else None
        if last is not None and (after is None or last.generation >= generation):
            return last.step
        return after or 0

    def with_logged(self, generation: int, step: int) -> WorkloadHead:
        """The head with a log up to `step`."""
        others = [entry for entry in self.logged if entry.generation != generation]
        return replace(self, logged=(*others, LoggedSteps(generation=generation, step=step)))

    def with_artifact(self, name: str, kept: KeptArtifact) -> WorkloadHead:
        """The head with this version of an artifact."""
        return replace(self, artifacts={**self.artifacts, name: kept})


def version_name(generation: int, step: int) -> str:
    """The name of what is published as `generation` after `step` steps; names sort in the order of versions."""
    return f"{generation:08d}-{step:010d}"


def parse_version(name: str) -> tuple[int, int] | None:
    """Generation and step of a version name; None for any other text."""
    generation, _, step = name.partition("-")
    return (int(generation), int(step)) if generation.isdigit() and step.isdigit() else None
