"""The elastic part of a loop that a library runs: the library believes that it is alone, with the global batch as its.

Whatever the library counts (steps, epochs, learning rates, checkpoints) is then that of one process, and does not
change when workers come and go. Each worker runs the same loop over the same ids, and reads its part of each batch.
What the library does after its optimizer's step (schedulers, validation, saving) belongs to the step, which is
committed when the next one begins.
"""

from __future__ import annotations

import copy
import enum
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from springtide.core.errors import CollectiveError, InvalidRequest
from springtide.runtime.data.shards import GlobalBatch, rank_bounds, seed_everything
from springtide.runtime.elastic.steps.library import LibrarySteps
from springtide.runtime.elastic.steps.library_turns import LibraryTurns
from springtide.runtime.elastic.steps.loss_graph import not_by_samples
from springtide.runtime.elastic.trainer import Trainer
from springtide.runtime.libraries.carried import CarriedTensors
from springtide.runtime.libraries.epoch_range import is_repeated
from springtide.runtime.libraries.loop_variables import program_frames
from springtide.runtime.libraries.loss_terms import LossTerms
from springtide.runtime.process.exits import WorkerExit

COMPUTED_AGAIN = (
    "the optimizer has the loss computed several times in a step, as L-BFGS does, and decides by a loss that is of one "
    "worker's part of the batch; use another one"
)

# In how many of its first steps a program is looked at for what cannot be divided.
_NUM_LOOKS = 3
# What a sum is divided by is a constant if it was the same in so many steps before.
_NUM_TOTALS_BEFORE = 4


class NotDivisible(InvalidRequest):
    """What a program does cannot be divided among workers; on one it runs. `reason` says what it is, and what to do."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}; or give the job one number of workers, as --workers 1")
        self.reason = reason


class Exchanged(enum.Enum):
    """How an exchange ended.

    AGAIN: a member was lost, the loop is in another group, and the step is to be done again with other parts of the
    batch. ELSEWHERE: the same, but another member had completed the step and this one has its state: the optimizer must
    change nothing, which it does not without gradients.
    """

    DONE = "done"
    AGAIN = "again"
    ELSEWHERE = "elsewhere"


class LibraryLoop:
    """One worker's part of a library's loop. `attach`; for each step `begin`, its passes, `exchange`; at last `end`.

    Several passes on parts of a batch (accumulation) are one step, and only the last of them exchanges.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.is_attached = False
        self.is_in_step = False
        # Of the present step: whether anything of it is exchanged, and whether another member has completed it.
        self._is_exchanged = False
        self._is_elsewhere = False
        self._steps: LibrarySteps | LibraryTurns | None = None
        self._passes: list[tuple[int, ...]] = []
        self._pass_size, self._epoch = 1, 0
        # What failed before the exchange of the present step; empty if nothing did.
        self._broken = ""
        # How this worker was told to exit; the library's program may have caught that.
        self.exit: WorkerExit | None = None
        # Called after each change of the group.
        self.on_group: Callable[[], None] = lambda: None
        # Whether the program's own code decides when its loop ends.
        self.ends_by_program = False
        # Called before gradients of these parameters are clipped.
        self.before_clip: Callable[[list[torch.Tensor]], None] = lambda parameters: None
        self._state: LibraryState | None = None
        # Whether the program has read a batch of another DataLoader since it got the present pass.
        self._reads_another = False
        # In the first steps: how many more the program is looked at in, and what it carries from batch to batch.
        self._num_looks = _NUM_LOOKS
        self._carried = CarriedTensors()
        # Of each loss of a step, what members have added up; and how many losses the present step has had.
        self._totals_before: dict[int, deque[list[float]]] = {}
        self._num_losses = 0
        self._model: torch.nn.Module | None = None

    @property
    def seed(self) -> int:
        return self._trainer.job.seed

    @property
    def step(self) -> int:
        """How many steps are committed."""
        return self._trainer.step

    @property
    def rank(self) -> int:
        return self._trainer.rank

    @property
    def world_size(self) -> int:
        return self._trainer.world_size

    @property
    def metrics(self) -> dict[str, float]:
        """What is reported beside the loss; the library's part adds to it."""
        return self._trainer.metrics

    def check_first(self) -> None:
        """Raise InvalidRequest if the program has trained already, or will again: only one training is elastic."""
        if self.is_attached or is_repeated(program_frames()):
            raise NotDivisible(
                "the program trains several times, as in a cross-validation, and only one call of fit() or train() can "
                "be elastic; make each a program of its own"
            )

    def attach(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        state: LibraryState,
        *,
        takes_turns: bool = False,
    ) -> None:
        """Take over the model and its optimizers; returns once this worker is in a group and has its training state.

        `state` is the rest of the library's state. `takes_turns`: the program calls its optimizers' steps itself.
        Raises InvalidRequest where it cannot move.
        """
        self.is_attached, self._state, self._model = True, state, model
        self._left(lambda: self._trainer.attach(model, optimizers, [state], takes_turns=takes_turns))
        self._steps = self._trainer.library_steps
        self.on_group()

    def begin(self, passes: Sequence[Sequence[int]], pass_size: int, epoch: int, num_left: int | None) -> None:
        """Commit the step before, and begin one on these ids, a sequence for each pass.

        A full pass has `pass_size` samples. `num_left` counts the steps to the end, this one too; None: not known.
        """
        if self.is_under_way and not isinstance(self._steps, LibraryTurns):
            raise InvalidRequest(
                "a step of this program ended without a backward pass on its last batch, as when training_step returns "
                "None, or a loop is left in the midst of accumulation; other workers would wait for it: give the job "
                "one worker, --workers 1"
            )
        self.end()
        num_before = len(self.part(len(self._passes) - 1)) if self._passes else 0
        self._passes = [tuple(ids) for ids in passes]
        self._pass_size, self._epoch = pass_size, epoch
        batch = self._batch()
        generation = self._trainer.membership.generation
        self._left(lambda: self._trainer.begin_offered(batch, num_left))
        if self.world_size > 1:
            assert self._state is not None
            self._state.keep()
        self.is_in_step, self._is_exchanged, self._is_elsewhere = True, False, False
        self._num_looks -= 1
        self._num_losses = 0
        self._carried.used()
        if self._num_looks >= 0 and self._model is not None:
            self._carried.watch(self._model, program_frames(), num_before)
        if self._trainer.membership.generation != generation:
            self.on_group()

    @property
    def is_under_way(self) -> bool:
        """Whether a step was begun of which nothing is exchanged yet."""
        return self.is_in_step and not self._is_exchanged

    def steps_of(self, num_batches: float, num_done: int) -> int:
        """The steps of so many further batches, if they are as those of the first `num_done`; at least 1."""
        num_begun = self.step + self.is_in_step
        return max(1, round(num_batches * (num_begun / num_done if num_done else 1.0)))

    def extend(self, ids: Sequence[int]) -> None:
        """Where optimizers take turns: the present step, none of whose turns has come yet, has one more pass."""
        self._passes.append(tuple(ids))
        self._trainer.extend_offered(self._batch())

    def _batch(self) -> GlobalBatch:
        ids = np.fromiter((index for part in self._passes for index in part), dtype=np.int64)
        size = self._pass_size * len(self._passes)
        return GlobalBatch(step=self.step, epoch=self._epoch, ids=ids, global_batch_size=size)

    def part(self, number: int) -> tuple[int, ...]:
        """The ids of this worker's part of a pass."""
        return self.part_of(self._passes[number], self._pass_size)

    def part_of(self, ids: Sequence[int], pass_size: int) -> tuple[int, ...]:
        """This worker's part of the ids of any pass, as long as the group stays.

        Where it has none, those of the first worker's, which then count for nothing.
        """
        low, high = rank_bounds(len(ids), self.rank, self.world_size, pass_size)
        if high == low:
            low, high = rank_bounds(len(ids), 0, self.world_size, pass_size)
        return tuple(ids[low:high])

    def is_last(self, number: int) -> bool:
        """Whether a pass is the step's last one."""
        return number == len(self._passes) - 1

    def part_of_step(self, number: int) -> float:
        """Which part of the step's samples a pass has."""
        return len(self._passes[number]) / sum(len(ids) for ids in self._passes)

    def seed_pass(self, number: int) -> None:
        """A pass begins: seed the random generators for it, by its step and this worker's rank."""
        self._reads_another = False
        seed_everything(self.seed, self.step, number * self.world_size + self.rank)

    def has_part(self, number: int) -> bool:
        """Whether this worker has samples of a pass that count."""
        low, high = rank_bounds(len(self._passes[number]), self.rank, self.world_size, self._pass_size)
        return high > low

    def total(self, value: float) -> float:
        """The sum of a number of each worker, before the passes of a step.

        Where a member was lost, it is this worker's own, and `exchange` will say that the step is to be done again.
        """
        return self._totals([value])[0]

    def _totals(self, values: list[float]) -> list[float]:
        assert self._steps is not None
        if not self._broken:
            try:
                return self._steps.totals(values)
            except CollectiveError as error:
                self._broken = str(error)
        return values

    def weigh(self, number: int, loss: torch.Tensor, told: float, *, is_summed: bool = False) -> None:
        """Before the backward pass of `loss`: have its gradients weighted by this worker's part of the pass.

        The loss of the step that is told is the sum over passes of `told` times the loss, weighted by the same part.
        `is_summed`: the losses of all workers are parts of one sum already, so that no part has another weight.
        """
        assert isinstance(self._steps, LibrarySteps)
        if self._is_exchanged:
            raise NotDivisible(COMPUTED_AGAIN)
        self._check_pass(number, loss)
        share = self._share(number)
        weight = share * self.part_of_step(number)
        if is_summed:
            part = float(share > 0.0)
            _weight_root(loss, part)
            own = loss.detach() * part
        else:
            own = self._weigh_terms(number, loss, share)
        self._steps.passes(own * told, weight, is_last=self.is_last(number))

    def weigh_turn(self, number: int, loss: torch.Tensor, told: float) -> None:
        """Where optimizers take turns, before the backward pass of a loss of pass `number`: as `weigh`."""
        assert isinstance(self._steps, LibraryTurns)
        self._check_pass(number, loss)
        if self._is_exchanged:
            self._trainer.turn_begins()
        self._steps.add_loss(self._weigh_terms(number, loss, self._share(number)) * told)

    def _weigh_terms(self, number: int, loss: torch.Tensor, share: float) -> torch.Tensor:
        """Weight the gradients of a loss by this worker's part of the samples, or of what the loss is a mean over.

        Returns the same part of the loss.
        """
        _weight_root(loss, share)
        if self._broken or self.world_size == 1:
            return loss.detach() * share
        terms = LossTerms(loss, len(self.part(number)), len(self._passes[number]), counts=share > 0.0)
        totals = self._totals(terms.said)
        if self._broken:
            return loss.detach() * share
        before = self._totals_before.setdefault(self._num_losses, deque(maxlen=_NUM_TOTALS_BEFORE))
        self._num_losses += 1
        is_known = len(before) == _NUM_TOTALS_BEFORE
        if is_known and (divisor := terms.constant_divisor(totals, before)) is not None:
            raise NotDivisible(
                f"the loss is a sum over the samples of a batch, divided by {divisor:g}, which is the same for "
                "parts of it; divide it by the number of samples or tokens that it is of"
            )
        before.append(totals)
        return torch.as_tensor(terms.weigh(share, totals), dtype=loss.dtype, device=loss.device)

    def note_other_batch(self) -> None:
        """The program has read a batch of a DataLoader that is not divided."""
        self._reads_another = self.is_in_step and torch.is_grad_enabled()

    def _check_pass(self, number: int, loss: torch.Tensor) -> None:
        """Raise NotDivisible for a loss that is not that of parts of the batch."""
        if self._reads_another:
            raise NotDivisible(
                "the program trains on batches of several DataLoaders at once, of which only one can be divided; join "
                "their datasets in one, of which a sample has a part of each"
            )
        if self._num_looks < 0:
            return
        if name := self._carried.used():
            raise NotDivisible(
                f"the program carries a tensor with a row for each sample from one batch to the next, in {name!r}, as "
                "a hidden state; a worker has other rows of each batch once the group has changed"
            )
        if reason := not_by_samples(loss, len(self.part(number))):
            raise NotDivisible(reason)

    def exchange_turn(self, place: int | None) -> Exchanged:
        """Before the optimizer at `place` updates: make the gradients of its parameters those of the whole batch.

        With AGAIN all that the step has updated is taken back. None: no optimizer updates.
        """
        assert isinstance(self._steps, LibraryTurns)
        if self._is_elsewhere:
            self.drop_gradients()
            return Exchanged.ELSEWHERE
        num_own = sum(self._share(number) * len(ids) for number, ids in enumerate(self._passes))
        self._steps.begin_turn(place, num_own / sum(map(len, self._passes)))
        return self.exchange()

    def _share(self, number: int) -> float:
        """Which part of the samples of a pass this worker has."""
        num_samples = len(self._passes[number])
        low, high = rank_bounds(num_samples, self.rank, self.world_size, self._pass_size)
        return (high - low) / num_samples

    def exchange(self) -> Exchanged:
        """After the last backward pass of the step: make the gradients those of the whole batch."""
        step = self.step
        kept = [_copied(group) for group in self._trainer.state.groups]
        broken, self._broken = self._broken, ""
        if self._left(lambda: self._trainer.exchange_offered(broken)):
            self._is_exchanged = True
            return Exchanged.DONE
        self.on_group()
        self._is_exchanged = self._is_elsewhere = self.step != step
        if not self._is_elsewhere:
            return Exchanged.AGAIN
        # The library takes this step's rates further by itself, from where they were.
        for group, values in zip(self._trainer.state.groups, kept, strict=True):
            group.update(values)
        self.drop_gradients()
        return Exchanged.ELSEWHERE

    def drop_gradients(self) -> None:
        """Leave no parameter a gradient."""
        for parameter in self._trainer.state.parameters.values():
            parameter.grad = None

    @property
    def loss(self) -> float | None:
        """The mean loss over the global batch of the step that was exchanged last."""
        return self._trainer.exchanged_loss

    def drop(self) -> None:
        """Take back that a step was begun, on all workers: the program uses none of its batches."""
        self.is_in_step = False

    def agree_on_end(self) -> None:
        """Commit the last step, and hear from all members that they have left their loops, too.

        Raises InvalidRequest if one of them is in another step.
        """
        self.end()
        if self.world_size == 1:
            return
        assert self._steps is not None
        # A sample that no dataset has.
        self._passes, self._pass_size, self._epoch = [(-1,)], 1, 0
        self._left(lambda: self._trainer.begin_offered(self._batch(), 0))
        is_agreed = False
        while not is_agreed:
            if isinstance(self._steps, LibraryTurns):
                self._steps.begin_turn(None, 0.0)
            else:
                self._steps.passes(torch.zeros(()), 0.0, is_last=True)
            is_agreed = self._left(self._trainer.exchange_offered)
        self._trainer.drop_offered()

    def end(self) -> None:
        """Commit the last step, once the library is done with it."""
        while self.is_under_way and isinstance(self._steps, LibraryTurns):
            # No optimizer has updated anything, so that nothing is to be done again.
            self.exchange_turn(None)
        self.is_in_step = False
        self._trainer.update()

    def _left(self, call: Callable[[], Any]) -> Any:
        """The call's result; that the worker is to exit is remembered."""
        try:
            return call()
        except WorkerExit as stop:
            self.exit = stop
            raise


class LibraryState:
    """What a library's loop knows beside weights and optimizer, as it was at the last boundary."""

    def __init__(
        self, loop: LibraryLoop, read: Callable[[], dict[str, Any]], load: Callable[[dict[str, Any]], None]
    ) -> None:
        """`read` gives the state now, `load` sets it before the loop begins."""
        self._loop = loop
        self._read = read
        self._load = load
        self._kept: dict[str, Any] = {}

    @property
    def kept(self) -> dict[str, Any]:
        """The state that was kept last."""
        return self._kept

    def keep(self) -> None:
        """Keep the state of this boundary: within the step members may come to need it."""
        self._kept = self._read()

    def hold(self) -> None:
        """Copy what was kept: its tensors are the program's own, which may change them in a step that is given up."""
        self._kept = copy.deepcopy(self._kept)

    def state_dict(self) -> dict[str, Any]:
        """The state at the last boundary."""
        found: dict[str, Any] = _plain(self._kept if self._loop.is_in_step else self._read())
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state over, unless the library is in the midst of a step: it then comes to the same by itself."""
        if not self._loop.is_in_step:
            self._load(state)


def _plain(value: Any) -> Any:
    """The value with numbers of NumPy and paths as Python has them, which can move."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Path):
        return str(value)
    if type(value) in (dict, list, tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        parts = {key: _plain(item) for key, item in items}
        return parts if isinstance(value, dict) else type(value)(parts.values())
    return value


def _weight_root(loss: torch.Tensor, part: float) -> None:
    if part != 1.0:
        # Weighting the root weights every gradient, and the loss that the program shows stays as it is.
        loss.register_hook(lambda gradient: gradient * part)  # type: ignore[no-untyped-call]


def _copied(group: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


class LoopChannel:
    """Where a library's part finds the loop of this process; None where the platform does not run an elastic one."""

    def __init__(self) -> None:
        self.loop: LibraryLoop | None = None


LOOP = LoopChannel()
