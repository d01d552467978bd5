"""The state of a study, on disk: its trials, what each may cost, what they cost, which are worse than the others."""

from __future__ import annotations

import fcntl
import math
import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from springtide.core.errors import BackendError, InvalidRequest
from springtide.core.status.platform import ProgressPoint
from springtide.storage.files import write_durable

Direction = Literal["minimize", "maximize"]
TrialState = Literal["begun", "running", "succeeded", "pruned", "failed"]
ParamValue = str | int | float | bool | None
# A trial's training is looked at in tenths: the loss of single steps says too little.
NUM_PARTS = 10
# The median rule (Vizier, section 3.5.2) judges no trial before two tenths, and by no fewer than four others.
MIN_PARTS = 2
MIN_OTHERS = 4
_MAX_BYTES = 64 << 20


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One trial. `params` are what its job gets; `suggested` and `distributions` are Optuna's (names of parameters).

    `cap_usd` is its job's budget, taken out of the study's; `spent_usd` what the job cost so far. `losses` are the
    means of each tenth of its training that is over. `submit_key` is that of its submission: it is never taken in
    twice.
    """

    number: int
    params: dict[str, str]
    suggested: dict[str, ParamValue] = {}
    distributions: dict[str, str] = {}
    submit_key: str
    cap_usd: float
    state: TrialState = "begun"
    job_id: str = ""
    spent_usd: float = 0.0
    value: float | None = None
    losses: tuple[float, ...] = ()
    progress_fraction: float = 0.0
    reason: str = ""
    artifact_path: str = ""

    @property
    def is_over(self) -> bool:
        """Whether nothing of it runs or will."""
        return self.state not in ("begun", "running")

    @property
    def held_usd(self) -> float:
        """What is not free for others: all it may cost while it runs, what it cost afterwards."""
        return self.spent_usd if self.is_over else max(self.cap_usd, self.spent_usd)


class Study(msgspec.Struct, frozen=True, kw_only=True):
    """A search over jobs, and what it may cost together. `source_sha256` is that of the file whose trials these are.

    `reason` says why it ended; empty while it goes on.
    """

    format: Literal["springtide-study-1"] = "springtide-study-1"
    name: str
    num_trials: int
    budget_usd: float
    direction: Direction = "minimize"
    metric: str = "loss"
    source_sha256: str = ""
    trials: tuple[Trial, ...] = ()
    reason: str = ""

    @property
    def spent_usd(self) -> float:
        """What all trials cost so far."""
        return math.fsum(trial.spent_usd for trial in self.trials)

    @property
    def free_usd(self) -> float:
        """What is left of the budget after what was spent and what trials that run may still spend."""
        return self.budget_usd - math.fsum(trial.held_usd for trial in self.trials)

    @property
    def open_trials(self) -> tuple[Trial, ...]:
        """Those that are not over."""
        return tuple(trial for trial in self.trials if not trial.is_over)

    @property
    def best(self) -> Trial | None:
        """The trial with the best value; the first of equals."""
        valued = [trial for trial in self.trials if trial.state == "succeeded" and trial.value is not None]
        sign = 1.0 if self.direction == "minimize" else -1.0
        return min(valued, key=lambda trial: sign * (trial.value or 0.0), default=None)

    def share_usd(self) -> float:
        """The cap of the next trial: an even share of what is free for each trial that has not begun; 0 for none.

        Where a trial has cost more than its cap (a platform that lost count), later ones get so much less that the
        same excess stays within the budget.
        """
        num_left = self.num_trials - len(self.trials)
        if num_left <= 0:
            return 0.0
        excess = max((trial.spent_usd / trial.cap_usd - 1.0 for trial in self.trials if trial.cap_usd > 0), default=0.0)
        # Rounded down, so that shares never add up to more than there is.
        return max(0.0, math.floor(self.free_usd / num_left / (1.0 + max(0.0, excess)) * 1e9) / 1e9)

    def with_trial(self, trial: Trial) -> Study:
        """The study with this trial in the place of its number."""
        trials = (*self.trials[: trial.number], trial, *self.trials[trial.number + 1 :])
        return msgspec.structs.replace(self, trials=trials)

    def is_worse_than_median(self, trial: Trial) -> bool:
        """The median rule: whether its newest tenth has a larger loss than the median of the trials that succeeded."""
        part = len(trial.losses) - 1
        if not MIN_PARTS <= part + 1 < NUM_PARTS:
            return False
        others = [
            other.losses[part] for other in self.trials if other.state == "succeeded" and len(other.losses) > part
        ]
        if len(others) < MIN_OTHERS:
            return False
        return not trial.losses[part] <= statistics.median(others)


def losses_by_part(points: Sequence[ProgressPoint], total_steps: int, *, is_over: bool) -> tuple[float, ...]:
    """The mean loss of each tenth of the training that is over, up to the first one without a loss."""
    parts: list[list[float]] = [[] for _ in range(NUM_PARTS)]
    newest = 0
    for point in points:
        if point.loss is not None and point.step > 0:
            part = min(NUM_PARTS - 1, (point.step - 1) * NUM_PARTS // total_steps)
            newest = max(newest, part)
            parts[part].append(point.loss)
    means: list[float] = []
    for losses in parts[: newest + is_over]:
        if not losses:
            break
        means.append(math.fsum(losses) / len(losses))
    return tuple(means)


def read_study(path: Path) -> Study | None:
    """The study that the file holds; None where there is none. Raises InvalidRequest for what is no study."""
    try:
        data = path.read_bytes() if path.stat().st_size <= _MAX_BYTES else b""
        found = msgspec.json.decode(data, type=Study)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidRequest(f"{path} is no study ({error}); move it away to begin anew") from None
    if [trial.number for trial in found.trials] != list(range(len(found.trials))):
        raise InvalidRequest(f"{path} is no study (trials are missing); move it away to begin anew")
    return found


def write_study(path: Path, study: Study) -> None:
    """Write it, whole or not at all. Raises StorageError."""
    write_durable(path, msgspec.json.format(msgspec.json.encode(study), indent=1) + b"\n")


@contextmanager
def holding_study(path: Path) -> Iterator[None]:
    """While it is open no other process works on the study of that file. Raises BackendError if one does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BackendError(
                f"another process works on the study {path.stem}; wait for it, or name another with --study"
            ) from None
        yield
    finally:
        os.close(descriptor)
