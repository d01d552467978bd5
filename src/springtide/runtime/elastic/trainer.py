"""The elastic trainer: what happens at a step boundary, and what happens when a step cannot be completed.

Everything here runs on the training thread. The control thread receives orders; the training thread reads them at step
boundaries. A step is committed on every member or replayed on every member: the reduction is the only point where
members agree, and control flags travel in it, so switching the group needs no extra round of communication.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from springtide.core.errors import CollectiveError, Fenced, StorageError
from springtide.core.wire.workers import CheckpointWritten, Finished, GroupBrokenReport, Left, Ready, WorkerSpec
from springtide.core.workload import TrainingJob
from springtide.runtime.data.shards import GlobalBatch, SampleOrder, seed_everything
from springtide.runtime.elastic.catchup import CatchupReceiver, CatchupSources, Lease, supports_catchup
from springtide.runtime.elastic.checkpoint import CheckpointWriter
from springtide.runtime.elastic.evaluation import Compute, Evaluations, PartScores, scores_of_all
from springtide.runtime.elastic.group import Group
from springtide.runtime.elastic.job_storage import open_storage
from springtide.runtime.elastic.membership import Formation, Membership
from springtide.runtime.elastic.reporting import Reporter
from springtide.runtime.elastic.step_log import StepRecord
from springtide.runtime.elastic.steps.choice import step_method
from springtide.runtime.elastic.steps.gradients import LossScaling, clip_gradients, divided_by_weight, weighted
from springtide.runtime.elastic.steps.library import LibrarySteps
from springtide.runtime.elastic.steps.library_turns import LibraryTurns
from springtide.runtime.elastic.steps.loss_means import LossWeights
from springtide.runtime.elastic.steps.method import Flags, Reduced, parts_ahead
from springtide.runtime.elastic.steps.patience import FIRST_STEP_TIMEOUT_S, StepPatience
from springtide.runtime.elastic.steps.state_check import first_difference
from springtide.runtime.elastic.steps.turns import Turns
from springtide.runtime.elastic.training_cursor import Cursor, TrainingCursor
from springtide.runtime.elastic.transfer import synchronise
from springtide.runtime.libraries.library_cursor import LibraryCursor
from springtide.runtime.models.named_tensors import TrainingState
from springtide.runtime.process.control_link import ControlLink
from springtide.runtime.process.device_seen import device_seen
from springtide.runtime.process.exits import WorkerExit
from springtide.runtime.process.memory import touch_gradients
from springtide.runtime.process.share_slot import open_slot

_BATCH_NORM = (
    "the model has batch normalisation, which each worker computes over its part of a batch, so that losses depend on "
    "how many workers there are; those of GroupNorm or LayerNorm do not, nor do those of one worker, --workers 1"
)
_FORM_POLL_S = 0.01
_LEAVE_WAIT_S = 5.0
# How long after its return before the last step a function is expected to have returned everywhere.
_ALONE_S = 1.0


class Trainer:
    """One worker's part of an elastic training job.

    The context calls `attach`, `start`, then in turn `next_shard`, `backward` and `update`; the worker calls `finish`.
    What members have agreed on in a step they do at the boundary, the next call of `next_shard`: prepared objects then
    are as user code has left them after the step (a scheduler has been stepped).
    """

    def __init__(
        self,
        spec: WorkerSpec,
        link: ControlLink,
        device: torch.device,
        *,
        catchup: bool = True,
        checks_state: bool = False,
        measures_noise: bool | None = None,
        library_cursor: LibraryCursor | None = None,
    ) -> None:
        """`library_cursor` is given where a library runs the loop."""
        assert isinstance(spec.workload, TrainingJob)
        self.job = spec.workload
        self._spec = spec
        self._link = link
        self._device = device
        self._catchup = catchup
        self._checks_state = checks_state
        self.storage = open_storage(spec)
        self.membership = Membership(spec.replica_id, device, spec.listen_host)
        self._library_cursor = library_cursor
        self.training_cursor = library_cursor or TrainingCursor(self.job, measures_noise=measures_noise)
        self._has_state = False
        # Whether another member's function has returned before the last step, which ends the training for all.
        self._is_ended = False
        self._group: Group | None = None
        self._old_group: Group | None = None
        self._receiver: CatchupReceiver | None = None
        self._sources = CatchupSources()
        self._tried_generation = 0
        self._batch: GlobalBatch | None = None
        self._part_size = 0
        self._evaluations = Evaluations()
        # The step's outcome between its exchange and its update.
        self._reduced: Reduced | None = None
        self._turns = Turns()
        # What to do at the next boundary: the flags agreed on, and the formation that was pending in the exchange.
        self._boundary: tuple[Flags, Formation | None] | None = None
        # After a step that is to be done again: undoes what user code then does to prepared objects.
        self._undo: Callable[[], None] | None = None
        self.loss: float | None = None
        self._loss_weights = LossWeights()
        self._patience = StepPatience()
        self._step_log = self.storage.step_log
        self._reporter = Reporter(link, open_slot(spec))
        self._writer = CheckpointWriter(
            self.storage.write_checkpoint,
            lambda written: link.send(CheckpointWritten(checkpoint=written)),
            _log,
            interval_s=self.job.checkpoint_interval_s,
        )

    # --- what the context and the worker call -----------------------------------------------------------------

    def attach(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        objects: Sequence[Any] = (),
        micro_batch: int = 0,
        takes_turns: bool = False,
    ) -> None:
        """Take over the model, its optimizers and other prepared objects, report readiness and wait for a first group.

        `micro_batch` is the most samples of one pass (0: no limit). `takes_turns`: of a library's loop, the program
        calls the optimizers' steps itself. Raises InvalidRequest for what the job cannot do, and for objects whose
        state cannot be moved.
        """
        self.state = TrainingState(model, optimizers, self._device, objects)
        self._scaling = LossScaling(self.state)
        measures_noise = self.training_cursor.measures_noise
        self._method = step_method(
            self.job,
            self.state,
            measures_noise=measures_noise,
            micro_batch=micro_batch,
            metrics=self.metrics,
            takes_turns=takes_turns,
        )
        if (
            self.job.max_workers > 1
            and not self.job.exact
            and any(isinstance(one, _BatchNorm) for one in model.modules())
        ):
            _log(_BATCH_NORM)
        # Touch memory pages while no other member waits for this one: here, and while a group is being formed.
        touch_gradients(self._method.payload.parameters)
        self.membership.prepare = self._method.warm
        self._link.update(is_ready=True)
        phases_s = self._link.phases.ended("load")
        seen = device_seen(self._spec.device_kind, self._spec.num_devices)
        self._link.send(Ready(phases_s=phases_s, device_seen=seen))
        self._enter_next()

    def start(self, num_samples: int, order: SampleOrder | None = None) -> None:
        """Set the dataset's length, from which all steps of the training follow. Raises InvalidRequest."""
        assert isinstance(self.training_cursor, TrainingCursor), "the samples of a library's loop are its own"
        self.training_cursor.start(num_samples, order)

    def set_epochs(self, num_epochs: int | None) -> int:
        """Set how many epochs a script has; returns how many there are. Raises InvalidRequest."""
        assert isinstance(self.training_cursor, TrainingCursor)
        return self.training_cursor.set_epochs(num_epochs)

    def take_batch_size(self, size: int) -> bool:
        """Set the samples of a full batch as a script's DataLoader has them; whether this is a script.

        Raises InvalidRequest.
        """
        assert isinstance(self.training_cursor, TrainingCursor)
        return self.training_cursor.take_batch_size(size)

    @property
    def num_passes(self) -> int:
        """How many passes over the data are complete."""
        assert isinstance(self.training_cursor, TrainingCursor)
        return self.training_cursor.num_passes

    def end_step(self) -> None:
        """Commit a step in which several optimizers have taken turns, before its boundary."""
        if self._turns.last is not None:
            self._take_back()
            self._commit_turns()

    def parts_ahead(self, part: int) -> Iterator[tuple[GlobalBatch, int, tuple[int, int]]]:
        """What `next_shard` will return, from this part of the current step on, if group and batch size stay."""
        assert isinstance(self.training_cursor, TrainingCursor)
        return parts_ahead(self.training_cursor, self._method, self._group, part)

    @property
    def step(self) -> int:
        return self.training_cursor.step

    @property
    def progress(self) -> float:
        """Committed work, in optimizer steps of the initial batch size."""
        return self.training_cursor.progress

    @property
    def epoch(self) -> int:
        """The epoch of the next step (of the last one, at the end)."""
        return self.training_cursor.epoch

    @property
    def metrics(self) -> dict[str, float]:
        return self._reporter.metrics

    @property
    def library_steps(self) -> LibrarySteps | LibraryTurns:
        """The steps of a library's loop."""
        assert isinstance(self._method, LibrarySteps | LibraryTurns)
        return self._method

    @property
    def exchanged_loss(self) -> float | None:
        """The mean loss over the batch of the last exchanged step, even of one committed elsewhere; None before it."""
        if self._reduced is not None:
            return self._reduced.loss
        newest = self._step_log.newest()
        return newest[-1]["loss"] if newest else None

    @property
    def rank(self) -> int:
        return self._group.rank if self._group is not None else 0

    @property
    def world_size(self) -> int:
        return self._group.world_size if self._group is not None else 1

    @property
    def seed(self) -> int:
        return self.job.seed

    @property
    def global_batch_size(self) -> int:
        """The samples of a full batch; the initial one, if it may change."""
        return self.training_cursor.global_batch_size

    def next_shard(self) -> tuple[GlobalBatch, int, tuple[int, int]] | None:
        """The next shard's global batch, number and (first, end) samples; None when all steps are committed.

        Seeds the random generators for that shard.
        """
        self._pass_boundary()
        while not (self.training_cursor.is_over or self._is_ended):
            if self.membership.must_leave_step:
                self._recover("")
            elif self._batch is None:
                self._begin_step()
            else:
                part, bounds = self._method.begin_part()
                self._part_size = bounds[1] - bounds[0]
                # A pass over half of the batch begins as that over the whole, which comes after it.
                seed_everything(self.job.seed, self._batch.step, max(part, 0))
                return self._batch, part, bounds
        return None

    def backward(self, loss: torch.Tensor, place: int = 0, weight: float | None = None) -> None:
        """Run backward for the current shard; after the step's last shard, exchange the gradients.

        `place` is that of the optimizer whose turn it is. The shard counts for `weight`, or for what LossWeights says.
        """
        if self._batch is None:
            # An earlier turn of this step was given up.
            return
        if self._must_discard():
            self._give_up("")
            return
        self._turns.begin(place, self.training_cursor.cursor.num_updates)
        if self._turns.is_repeated:
            return
        self._take_back()
        if self._turns.last is not None:
            # What the turn before has exchanged has ended this member's computation.
            self._reporter.step_begins(-(-len(self._batch.ids) // self._group.world_size) if self._group else 0)
        weight = self._loss_weights.of(loss, weight, self._part_size)
        loss, root = weighted(loss, self._scaling.scaled(loss), weight, self._part_size)
        self._method.backward(loss, root, place, weight)
        if not self._method.has_part():
            self._exchange()

    def leave_loop(self) -> None:
        """User code has left its loop over batches."""
        self._method.leave_loop()

    def clip_grad_norm(self, max_norm: float) -> float:
        """Clip the exchanged gradients; returns the norm that they had, NaN if the step is not to be updated now."""
        if self._reduced is None:
            return math.nan
        try:
            return clip_gradients(self._method.payload.parameters, max_norm, self._group)
        except CollectiveError as error:
            self._give_up(str(error))
            return math.nan

    def update(self) -> bool:
        """Update and commit, if the gradients were exchanged; whether they were."""
        if self._turns.end():
            self._method.rewind()
            return False
        reduced, self._reduced = self._reduced, None
        if reduced is None:
            return False
        if self._is_updated_at_once:
            self._commit(reduced)
        else:
            self._apply(self.step + 1)
            assert isinstance(self.training_cursor, TrainingCursor)
            self.training_cursor.note_update()
            self._turns.last, self.loss = reduced, reduced.loss
        return True

    def evaluate(self, name: str, num_parts: int, compute: Compute) -> list[PartScores]:
        """The scores of all parts, in order, by all members that call this with the same name after the same step.

        If the group breaks meanwhile, each member that is left computes what is missing: the next group forms at the
        step's boundary, when user code is done with the step.
        """
        membership, look = self.membership, self._reporter.still_at_work
        name = self._evaluations.name_of(membership.generation, self.step, name)
        return scores_of_all(self._group, name, num_parts, compute, look, lambda: membership.must_leave_step)

    def begin_offered(self, batch: GlobalBatch, num_left: int | None) -> None:
        """Of a library's loop: do what the exchange of the step before agreed on, and begin one on `batch`.

        `num_left` counts the steps to the end, this one too; None: the library does not know. Raises WorkerExit.
        """
        assert self._library_cursor is not None
        self._pass_boundary()
        while self.membership.must_leave_step:
            self._recover("")
        self._library_cursor.offer(batch, num_left)
        self._begin_step()

    def exchange_offered(self, broken: str = "") -> bool:
        """Of a library's loop: exchange what its passes have left; whether that was done.

        `broken` is what failed in this step before, if anything did. If it was not done, a member was lost and another
        group has formed. The same step was begun again in it, unless `step` is one higher: another member had completed
        it, and this one has its state. Raises WorkerExit.
        """
        step = self.step
        if broken:
            self._give_up(broken)
        else:
            self._exchange()
        # The library's own state is left to its loop, which goes on in the midst of the step.
        self._undo = None
        if self._reduced is None and self.step == step:
            self._begin_step()
        return self._reduced is not None

    def extend_offered(self, batch: GlobalBatch) -> None:
        """Of a library's loop: the step that was begun is on `batch`, which has more samples."""
        assert isinstance(self._method, LibraryTurns)
        assert self._library_cursor is not None
        self._batch = batch
        self._library_cursor.extend(batch)
        self._method.extend(batch)

    def turn_begins(self) -> None:
        """Of a library's loop: after an exchange in the midst of a step, this member computes again."""
        if self._batch is not None and self._group is not None:
            self._reporter.step_begins(-(-len(self._batch.ids) // self._group.world_size))

    def drop_offered(self) -> None:
        """Of a library's loop: take back an exchanged step, which was only to hear from the other members."""
        self._method.discard()
        self._batch = self._reduced = None

    def finish(self, publish: Callable[[], str]) -> int:
        """Report that the user's function returned, until the control plane acknowledges it; returns the exit code.

        If another member dies meanwhile, this one joins the new group, so that members behind can copy its state.
        `publish` writes the result if this member is rank 0; it is called again after each change of the group,
        because this member may become rank 0 only then.
        """
        # A function that leaves its loop has not come to the last step's boundary.
        self._pass_boundary()
        self._tell_return()
        self._writer.wait()
        self._sources.close()
        seq = self._send_finished(publish())
        deadline_s, alone_at_s = time.monotonic() + self._spec.lease_s, time.monotonic() + _ALONE_S
        while not self._link.wait_acknowledged(seq, _FORM_POLL_S) and time.monotonic() < deadline_s:
            if time.monotonic() > alone_at_s and not self.training_cursor.is_over and self._group is not None:
                # The others wait for this one in their next step, and find out now.
                alone_at_s = math.inf
                self._group.close()
            pending = self.membership.pending
            if pending is not None and pending.generation > self._tried_generation:
                try:
                    self._enter(pending)
                except CollectiveError:
                    self._tried_generation = pending.generation
                    continue
                self._tell_return()
                alone_at_s = time.monotonic() + _ALONE_S
                self._write_step_log()
                seq = self._send_finished(publish())
        return 0

    def _tell_return(self) -> None:
        """Before the last step: have members whose code goes on find out why this one does not."""
        if self._group is not None and self.world_size > 1 and not self.training_cursor.is_over:
            with contextlib.suppress(CollectiveError):
                self._group.set_flag(_returned_after(self.step))

    def _is_left_alone(self) -> bool:
        """Whether another member's function has returned after the last committed step; the log then says so."""
        group = self._group
        if group is None or group.world_size == 1 or self._library_cursor is not None:
            return False
        with contextlib.suppress(CollectiveError):
            self._is_ended = group.has_flag(_returned_after(self.step))
        if self._is_ended:
            _log(
                f"the training function has returned on another worker after step {self.step}, so it ends on this one, "
                "too. Let all workers leave the loop at the same step: by what ctx.evaluate returns, by ctx.loss, and "
                "by counts in a dict that was handed to ctx.prepare"
            )
        return self._is_ended

    def abort_receiver(self) -> None:
        """Stop receiving a catch-up stream, if one is open. Called by the control thread on a forced order."""
        receiver = self._receiver
        if receiver is not None:
            receiver.abort()

    # --- a step -----------------------------------------------------------------------------------------------

    @property
    def _is_updated_at_once(self) -> bool:
        """Whether a step has one update of the platform's, or is a library's."""
        return len(self.state.optimizers) == 1 or self._library_cursor is not None

    def _must_discard(self) -> bool:
        return self.membership.must_leave_step and self._method.can_discard

    def _begin_step(self) -> None:
        group = self._group
        assert group is not None
        group.timeout_s = self._patience.timeout_s
        self._batch = self.training_cursor.next_batch()
        self._method.begin(self._batch, group, is_measured=self.training_cursor.measures_step)
        self._turns.begin_step()
        if self.training_cursor.cursor.num_updates:
            # Until the updates that are made already were gone through, user code does again what it has done.
            self._undo = self.state.keep_controls()
        self._reporter.step_begins(-(-len(self._batch.ids) // group.world_size))
        self._patience.begin_step()

    def _exchange(self) -> None:
        if self._must_discard():
            self._give_up("")
            return
        if self.job.max_workers > 1:
            self._method.payload.check_frozen()
        pending = self.membership.pending
        self._exchange_began_at_s = self._reporter.computation_ended()
        try:
            reduced = self._reduce(pending)
        except CollectiveError as error:
            self._give_up(str(error))
            return
        self._boundary = reduced.flags, pending
        assert self._batch is not None
        reduced = divided_by_weight(reduced, self._method.payload.parameters, len(self._batch.ids))
        self._reduced = self._scaling.unscale(reduced, self._turns.place)

    def _give_up(self, detail: str) -> None:
        """Within a call of user code: recover, so that the step is done again when it asks for the next batch."""
        self._recover(detail)
        self._undo = self.state.keep_controls(with_buffers=True)

    def _pass_boundary(self) -> None:
        """Between two steps, once user code is done with the last: do what the members agreed on in its exchange."""
        membership = self.membership
        self._take_back()
        self._commit_turns()
        boundary, self._boundary = self._boundary, None
        if boundary is None:
            return
        flags, pending = boundary
        cursor = self.training_cursor
        if self.rank == 0 and not cursor.is_over:
            self._writer.write_if_due(self.state, cursor.cursor, self.epoch, membership.generation)
        if flags.preempt:
            self._leave_with_checkpoint(flags.preempt, is_writer=self.rank == 0)
        agreed = membership.agreed(flags.ready) if flags.ready else None
        if agreed is not None:
            self._switch(agreed, flags.needs_sync)
        elif pending is not None and not flags.ready:
            membership.drop_superseded(pending.generation)
        if membership.is_departing:
            self._break_up()
            self._enter_next()

    def _commit_turns(self) -> None:
        last_turn = self._turns.pop_last()
        if last_turn is not None:
            self._commit(last_turn)

    def _take_back(self) -> None:
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def _reduce(self, pending: Formation | None) -> Reduced:
        ready, needs_sync = self._readiness(pending)
        flags = Flags(ready=ready, needs_sync=needs_sync, preempt=self.membership.preempt_generation or 0)
        return self._method.exchange(self.training_cursor.cursor.position, flags, self.training_cursor.last_square)

    def _commit(self, reduced: Reduced) -> None:
        """Update the model with the reduced gradients, unless turns have. The step then counts as committed."""
        assert self._batch is not None
        batch, self._batch = self._batch, None
        self.training_cursor.commit(batch, reduced.squares, reduced.rank0_square, reduced.num_parts)
        if self._is_updated_at_once:
            self._apply(self.step)
        if self._old_group is not None:
            # The first common step proves that no member is in the old group any more.
            self._old_group.close()
            self._old_group = None
        self._patience.end_step()
        self._after_commit(batch, reduced.loss)

    def _apply(self, step: int) -> None:
        """Update the model, and have joiners do the same, as a part of `step`."""
        factor = self.training_cursor.learning_rate_factor

        def feed(lease: Lease, has_gradient: list[bool]) -> None:
            # Queued before this member's own update, so that joiners apply the step at the same time, not after it.
            self._sources.before_update(step, lease, has_gradient, factor)

        self._method.update(factor, feed if self._sources.is_open else None, is_skipped=self._scaling.is_skipped)
        self._scaling.updated(self._turns.place)
        self._sources.after_update(step)

    def _after_commit(self, batch: GlobalBatch, loss: float) -> None:
        generation = self.membership.generation
        self.loss = loss
        self._step_log.remember(
            StepRecord(
                generation=generation,
                step=self.step,
                epoch=batch.epoch,
                loss=loss,
                num_samples=len(batch.ids),
                ids_digest=batch.ids_digest,
                took_s=self._reporter.since_last_end_s(),
            )
        )
        self._write_step_log()
        sync_s = time.monotonic() - self._exchange_began_at_s
        self._reporter.exact_obstacle = self._method.exact_obstacle
        self._reporter.step_ended(self.training_cursor, batch, loss, sync_s=sync_s)

    def _write_step_log(self) -> None:
        """On rank 0, write the steps that the log lacks: its own, and those that an earlier rank 0 did not write."""
        if self.rank != 0:
            return
        try:
            self._step_log.write(self.membership.generation)
        except Fenced:
            # A newer order raised the fence and has not arrived yet. It may include this member and need its state,
            # so the worker waits for the order instead of exiting.
            self.membership.is_outdated = True
        except (OSError, StorageError) as error:
            _log(f"the step log could not be written, it will be tried again: {error}")

    # --- a change of the group --------------------------------------------------------------------------------

    def _readiness(self, pending: Formation | None) -> tuple[int, bool]:
        """The generation that this member can switch to now (0: none), and whether joiners then need a full sync."""
        if pending is None or pending.order.forced:
            return 0, False
        if pending.error and pending.generation > self._tried_generation:
            self._tried_generation = pending.generation
            self._link.send(GroupBrokenReport(generation=pending.generation, detail=pending.error))
        if not pending.is_member:
            return pending.generation, False
        current = self.membership.current
        assert current is not None
        joiners = [name for name in pending.order.members if name not in current.order.members]
        if not joiners:
            return (pending.generation if pending.is_ready else 0), False
        if not self._can_catch_up(pending):
            return (pending.generation if pending.is_ready else 0), True
        self._sources.open(self.state, self._method.payload, pending, joiners)
        in_step, has_failed = self._sources.readiness(self.step)
        return (pending.generation if pending.is_ready and in_step else 0), has_failed

    def _can_catch_up(self, formation: Formation) -> bool:
        return self._catchup and formation.is_reachable and supports_catchup(self.state.optimizers)

    def _switch(self, formation: Formation, needs_sync: bool) -> None:
        """Switch to the new group: all members of the old one are at the same step and have connected the new one."""
        if not formation.is_member:
            self._leave(formation.generation)
        if not needs_sync:
            self._sources.switch(self.training_cursor.cursor, self._step_log)
        self._sources.close()
        previous = self.membership.current
        self._old_group, self._group = self._group, formation.group
        self.membership.adopt(formation)
        try:
            if needs_sync:
                self._sync(formation)
            elif formation.group is not None and formation.world_size > 1:
                formation.group.set_flag("switched")
        except CollectiveError as error:
            self._recover(str(error))
            return
        self._begin_generation(formation, previous)

    def _recover(self, detail: str) -> None:
        """Discard the step that cannot be completed, and continue in the next group from the last committed step.

        `detail` is reported to the control plane, unless it is empty because the control plane knows already.
        """
        if self._is_left_alone():
            self._break_up()
            return
        if detail and not self.membership.must_leave_step:
            self._link.send(GroupBrokenReport(generation=self.membership.generation, detail=detail[:500]))
        self._break_up()
        self._enter_next()

    def _break_up(self) -> None:
        """Close the groups and discard the current step; model and optimizer are at the last committed step."""
        for group in (self._group, self._old_group):
            if group is not None:
                group.close()
        self._sources.close()
        self._method.discard()
        self._scaling.discard()
        self._turns.pop_last()
        self._batch = self._reduced = self._boundary = self._old_group = None
        self._reporter.step_given_up()

    def _enter_next(self) -> None:
        """Wait for an order to form a group and join that group; repeat until that succeeds."""
        while True:
            pending = self.membership.await_order(self._tried_generation)
            self._leave_if_asked()
            assert pending is not None
            self._tried_generation = pending.generation
            try:
                self._enter(pending)
                return
            except CollectiveError as error:
                if pending.is_wanted():
                    self._link.send(GroupBrokenReport(generation=pending.generation, detail=str(error)[:500]))
                pending.give_up()

    def _enter(self, formation: Formation) -> None:
        """Join a group while in none: at the start, as a joiner, or after a failure."""
        membership = self.membership
        if not formation.is_member:
            self._leave(formation.generation)
        previous = membership.current
        cursor: Cursor | None = None
        order = formation.order
        if not self._has_state and order.previous and not order.forced and self._can_catch_up(formation):
            formation.wait_prepared()
            self._receiver = receiver = CatchupReceiver(self.state, self._method.payload, self._step_log, formation)
            cursor = receiver.receive(lambda: membership.pending is formation and not membership.is_leaving)
            self._receiver = None
        while not formation.wait_done(_FORM_POLL_S):
            if not formation.is_wanted():
                raise CollectiveError("the group was given up")
            self._leave_if_asked()
        if formation.group is None:
            raise CollectiveError(formation.error or "the group was given up")
        self._group = formation.group
        membership.adopt(formation)
        if cursor is None:
            self._sync(formation)
        else:
            self.training_cursor.cursor, self._has_state = cursor, True
        self._begin_generation(formation, previous)

    def _sync(self, formation: Formation) -> None:
        """Bring every member of the group to the highest committed step; a fresh group restores a checkpoint."""
        group = formation.group
        assert group is not None
        group.timeout_s = FIRST_STEP_TIMEOUT_S
        known = self.training_cursor.cursor if self._has_state else None

        def is_wanted() -> bool:
            # A member that missed the others' switch cannot sync with them: a new group has to form.
            missed = group.world_size > 1 and group.has_flag("switched")
            return formation.is_wanted() and not missed and not self.membership.is_leaving

        self.training_cursor.cursor, is_fresh = synchronise(
            group, self.state, self._step_log, known, is_wanted, lambda: self.storage.load_newest(self.state)
        )
        if is_fresh:
            self._step_log.restart_at(self.step)
        self._has_state = True

    def _begin_generation(self, formation: Formation, previous: Formation | None) -> None:
        self._patience.begin_generation()
        self.training_cursor.set_batch_size(formation.order.global_batch_size)
        if self.rank != 0:
            self._step_log.forget_written()
        self._link.update(generation=formation.generation, step=self.step)
        self._reporter.group_changed(formation, previous, self.step)
        if self._checks_state and formation.world_size > 1:
            self._check_state(formation)

    def _check_state(self, formation: Formation) -> None:
        """Say in the log, and as a metric of the job, if members differ; nothing of a group that breaks meanwhile."""
        assert self._group is not None
        with contextlib.suppress(CollectiveError):
            found = first_difference(self._group, self.state, formation.is_wanted)
            self.metrics["state_differs"] = float(bool(found))
            if found:
                _log(f"members differ after the change to generation {formation.generation}, step {self.step}: {found}")

    # --- leaving ----------------------------------------------------------------------------------------------

    def _leave(self, generation: int) -> None:
        self._writer.wait()
        self._sources.close()
        self._step_log.leave(self.membership.generation, is_leader=self.rank == 0)
        seq = self._link.send(Left(generation=generation, step=self.step))
        self._link.wait_acknowledged(seq, _LEAVE_WAIT_S)
        raise WorkerExit(0)

    def _leave_if_asked(self) -> None:
        """Between two groups: if this member was ordered to leave, commit the state it has and exit."""
        if self.membership.is_leaving:
            self._leave_with_checkpoint(self.membership.leaving_generation, is_writer=self._has_state)

    def _leave_with_checkpoint(self, generation: int, *, is_writer: bool) -> None:
        """If `is_writer`, commit a checkpoint of the current step as `generation`; then leave."""
        while is_writer:
            try:
                # A checkpoint implies that the log holds its steps: a rank 0 that died may not have written them.
                self._step_log.write(generation, is_leader=False)
                self._writer.write_now(self.state, self.training_cursor.cursor, self.epoch, generation)
                break
            except (OSError, StorageError) as error:
                newer = self.membership.await_newer_order(generation) if isinstance(error, Fenced) else None
                if newer is None:
                    _log(f"{error}; the older checkpoint stands")
                    break
                generation = newer
        self._leave(generation)

    def _send_finished(self, path: str) -> int:
        self._reporter.flush()
        report = Finished(
            generation=self.membership.generation,
            step=self.step,
            artifact_path=path,
            has_result=bool(path),
            diverged_at_step=self._reporter.diverged_at_step,
        )
        return self._link.send(report)


def _returned_after(step: int) -> str:
    """The flag of a member whose function has returned after a step."""
    return f"returned/{step}"


def _log(line: str) -> None:
    sys.stderr.write(f"springtide: {line}\n")
