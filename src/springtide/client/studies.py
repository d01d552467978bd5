"""The saved state of a study: its trials with their caps, costs and losses, and the rule that prunes trials."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from springtide.core.decoding import decode_json
from springtide.core.errors import InvalidRequest
from springtide.core.status.platform import ProgressPoint
from springtide.storage.files import lock_file, write_durable

Direction = Literal["minimize", "maximize"]
TrialState = Literal["begun", "running", "succeeded", "pruned", "failed"]
ParamValue = str | int | float | bool | None
# Trials are compared by the mean loss of each tenth of their training: the loss of single steps is too noisy.
NUM_PARTS = 10
# The median rule (Vizier, section 3.5.2) needs two tenths of the trial's training, and four other trials.
MIN_PARTS = 2
MIN_OTHERS = 4
_MAX_BYTES = 64 << 20


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One trial of a study.

    `params` are its job's params; `suggested` are Optuna's values and `distributions` their distributions as JSON, by
    parameter. `cap_usd` is the job's budget, reserved from the study's; `spent_usd` its cost so far. `value` is the
    metric of a trial that succeeded. `losses` are the mean losses of the completed tenths of the training. `submit_key`
    is the idempotency key of the submission.
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
        """Whether the trial has ended."""
        return self.state not in ("begun", "running")

    @property
    def held_usd(self) -> float:
        """The part of the study's budget that the trial uses: its cap while it runs, then its cost."""
        return self.spent_usd if self.is_over else max(self.cap_usd, self.spent_usd)


class Study(msgspec.Struct, frozen=True, kw_only=True):
    """A search over jobs with a common budget; `st.tune` returns it.

    `best` is the trial with the best value of `metric`. `source_sha256` identifies the file that declares the task.
    `reason` says why the study ended; it is empty until then.
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
        """The cost of all trials so far."""
        return math.fsum(trial.spent_usd for trial in self.trials)

    @property
    def free_usd(self) -> float:
        """The budget left after the cost of ended trials and the caps of running ones."""
        return self.budget_usd - math.fsum(trial.held_usd for trial in self.trials)

    @property
    def open_trials(self) -> tuple[Trial, ...]:
        """The trials that have not ended."""
        return tuple(trial for trial in self.trials if not trial.is_over)

    @property
    def best(self) -> Trial | None:
        """The trial with the best value, the first of equals; None before one has succeeded."""
        valued = [trial for trial in self.trials if trial.state == "succeeded" and trial.value is not None]
        sign = 1.0 if self.direction == "minimize" else -1.0
        return min(valued, key=lambda trial: sign * (trial.value or 0.0), default=None)

    def share_usd(self) -> float:
        """The cap of the next trial: an even part of the free budget; 0 if all trials have begun.

        If an earlier trial exceeded its cap, caps are reduced so that the same relative excess stays within the budget.
        """
        num_left = self.num_trials - len(self.trials)
        if num_left <= 0:
            return 0.0
        excess = max((trial.spent_usd / trial.cap_usd - 1.0 for trial in self.trials if trial.cap_usd > 0), default=0.0)
        # Rounded down, so that the caps never add up to more than the budget.
        return max(0.0, math.floor(self.free_usd / num_left / (1.0 + max(0.0, excess)) * 1e9) / 1e9)

    def with_trial(self, trial: Trial) -> Study:
        """A copy with this trial added, or replacing the one with its number."""
        trials = (*self.trials[: trial.number], trial, *self.trials[trial.number + 1 :])
        return msgspec.structs.replace(self, trials=trials)

    def is_worse_than_median(self, trial: Trial) -> bool:
        """The median rule: whether the trial's newest tenth has a larger loss than the median of successful trials."""
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
    """The mean loss of each completed tenth of the training, up to the first one without a loss.

    With `is_over` the newest tenth counts as completed.
    """
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
    """The saved study, None if there is no file. Raises InvalidRequest if the file is not a study."""
    try:
        data = path.read_bytes() if path.stat().st_size <= _MAX_BYTES else b""
        found = decode_json(data, Study)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidRequest(f"{path} is no study ({error}); move it away to begin anew") from None
    if [trial.number for trial in found.trials] != list(range(len(found.trials))):
        raise InvalidRequest(f"{path} is no study (trials are missing); move it away to begin anew")
    return found


def write_study(path: Path, study: Study) -> None:
    """Replace the file atomically and durably. Raises StorageError."""
    write_durable(path, msgspec.json.format(msgspec.json.encode(study), indent=1) + b"\n")


@contextmanager
def locked_study(path: Path) -> Iterator[None]:
    """Hold the study's lock, so that only one process runs it. Raises BackendError if another one holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = lock_file(
        path.with_suffix(".lock"),
        f"another process works on the study {path.stem}; wait for it, or name another with --study",
    )
    try:
        yield
    finally:
        os.close(descriptor)
