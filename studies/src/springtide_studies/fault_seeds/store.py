"""A model of one job's directory: the fence, the log of committed steps and the checkpoints."""

from __future__ import annotations

from collections.abc import Callable

from springtide.core.errors import Fenced, StorageError
from springtide.core.workload import Checkpoint


class JobStore:
    """What a job's writers publish. It refuses fenced writers, and calls `complain` for what must never happen.

    `num_steps` is the length of the accepted step log; `commits` are its entries (generation, first step, end step).
    `seen_at` says how many samples lie behind a step at which an entry ends, `cursors` the same of each checkpoint.
    """

    def __init__(self, job_id: str, complain: Callable[[str, str], None]) -> None:
        self.job_id = job_id
        self.fence = 0
        self.num_steps = 0
        self.commits: list[tuple[int, int, int]] = []
        self.seen_at: dict[int, int] = {0: 0}
        self.cursors: dict[str, int] = {}
        self.blobs: set[str] = set()
        self.manifests: dict[str, Checkpoint] = {}
        self.damaged: set[str] = set()
        self.formed_generation = 0
        self.num_refused = 0
        self.is_full = False
        self._writer_generation = 0
        self._complain = complain

    def raise_fence(self, generation: int) -> None:
        """Refuse every writer below `generation` from now on."""
        self.fence = max(self.fence, generation)

    def admit(self, generation: int) -> None:
        """Let a writer of this generation publish. Raises Fenced if a newer one has been here."""
        if generation < self.fence:
            self.num_refused += 1
            raise Fenced(f"generation {generation} may not write: generation {self.fence} owns {self.job_id}")
        self.fence = generation

    def _accepted(self, generation: int) -> None:
        if generation < self._writer_generation:
            self._complain(
                "one-writer",
                f"{self.job_id}: generation {generation} wrote after generation {self._writer_generation}",
            )
        self._writer_generation = max(self._writer_generation, generation)

    def commit(self, generation: int, first_step: int, end_step: int, num_seen: int = 0) -> None:
        """Commit the steps [first_step, end_step), after which `num_seen` samples lie behind. Raises Fenced."""
        self.admit(generation)
        self._accepted(generation)
        if first_step != self.num_steps:
            self._complain(
                "samples-once",
                f"{self.job_id}: generation {generation} committed steps {first_step}..{end_step - 1}, "
                f"but {self.num_steps} steps are in the log",
            )
        self.num_steps = end_step
        self.seen_at[end_step] = num_seen
        self.commits.append((generation, first_step, end_step))

    def begin(self, generation: int, step: int, num_seen: int = 0, *, is_fresh: bool, born_generation: int) -> None:
        """A group begins at `step`, `num_seen` samples behind it: a fresh one has restored it, any other carried it on.

        Raises Fenced.
        """
        self.admit(generation)
        self._accepted(generation)
        if is_fresh:
            if self.formed_generation >= born_generation:
                self._complain(
                    "state-carried",
                    f"{self.job_id}: generation {generation} was formed of workers that hold no state",
                )
            self._roll_back(step)
        elif step != self.num_steps:
            self._complain(
                "state-carried",
                f"{self.job_id}: generation {generation} goes on at step {step}, the log ends at {self.num_steps}",
            )
        if is_fresh:
            # Its checkpoint may be of other batches than those that were logged since: then these are void.
            self.seen_at[step] = num_seen
        elif num_seen != self.seen_at[step]:
            self._complain(
                "samples-once",
                f"{self.job_id}: generation {generation} goes on after {num_seen} samples, {self.seen_at[step]} lie "
                f"behind step {step}",
            )
        self.formed_generation = generation

    def _roll_back(self, step: int) -> None:
        """What was committed after the restored checkpoint is void: it will be trained again."""
        if step > self.num_steps:
            self._complain("samples-once", f"{self.job_id}: restored step {step}, the log ends at {self.num_steps}")
        self.commits = [(g, first, min(end, step)) for g, first, end in self.commits if first < step]
        self.num_steps = step

    def write_blobs(self, path: str) -> None:
        """Put a checkpoint's tensors in place; no reader sees them yet. Raises StorageError on a full disk."""
        if self.is_full:
            raise StorageError(f"no space left for {path}")
        self.blobs.add(path)

    def write_manifest(self, checkpoint: Checkpoint, num_seen: int = 0) -> None:
        """Make a checkpoint visible, of a state that has seen so many samples. Raises Fenced or StorageError."""
        self.admit(checkpoint.generation)
        if self.is_full:
            raise StorageError(f"no space left for {checkpoint.path}")
        self._accepted(checkpoint.generation)
        self.manifests[checkpoint.path] = checkpoint
        self.cursors[checkpoint.path] = num_seen

    def newest(self) -> Checkpoint | None:
        """The visible checkpoint with the highest step."""
        return max(self.manifests.values(), key=lambda c: (c.step, c.generation), default=None)

    def intact(self, checkpoint: Checkpoint) -> Checkpoint | None:
        """The checkpoint, or the newest one before it whose files fit their hashes."""
        older = [other for other in self.manifests.values() if other.step <= checkpoint.step]
        whole = [other for other in (checkpoint, *older) if other.path not in self.damaged]
        return whole[0] if whole[:1] == [checkpoint] else max(whole, key=lambda c: (c.step, c.generation), default=None)
