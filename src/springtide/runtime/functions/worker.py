"""The main loop of one function at its place: steps, saves, attempts, hand-over and end, as the control record says.

An interrupted step leaves the state as before or as after it, as its position says. An attempt starts from the state in
memory if that has the attempt's position, else from a saved state.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Literal

import msgspec

from springtide.collectives.communicator import Communicator
from springtide.core.decoding import decode_json
from springtide.core.errors import CollectiveError, InvalidRequest, ObjectMissing, StorageError
from springtide.core.functions import FunctionPlan
from springtide.core.ports import Store
from springtide.core.wire.functions import FunctionOrder, FunctionResult, Keys, LaneTimes, Place, ReportedLoss
from springtide.runtime.functions.control_watch import AttemptSuperseded, ControlWatch, NewAttempt, Stopped
from springtide.runtime.functions.place_worker import PlaceWorker, build_place_worker
from springtide.runtime.functions.reporting import FunctionReporter
from springtide.runtime.functions.source import UserSource
from springtide.runtime.functions.step import StepOutcome
from springtide.runtime.functions.timing import StepTimer
from springtide.runtime.functions.wire_store import WireStore, WireTrouble
from springtide.storage.stores.open import open_store

# A function leaves when its remaining lifetime is less than this many steps, a save, and these seconds.
LIFETIME_STEPS = 1.5
LIFETIME_SPARE_S = 2.0
_BOUNDARY_POLL_S = 0.5
_LINE_INTERVAL_S = 1.0
# How often the record is read while the next plan is imminent, and while waiting for samples.
PARK_POLL_S = 0.25
WAIT_POLL_S = 1.0
# How long a function whose messages cannot be exchanged waits for a new attempt.
STUCK_S = 60.0
Outcome = Literal["left", "finished", "stopped", "superseded"]


class _Left(msgspec.Struct, frozen=True, kw_only=True):
    """Written by a function that leaves for its successor: the step and attempt in which it stopped.

    The coordinator may not read its last report, so the successor reports its `losses` again.
    """

    step: int
    attempt: int = -1
    losses: tuple[ReportedLoss, ...] = ()


class FunctionWorker:
    """Trains one place until the job is done or the function's lifetime is nearly over; for one invocation.

    `store` holds states and records, `wire` carries messages and gradients; `open_wire(url)` opens another store for
    these. `remaining_s` returns the rest of the lifetime in seconds.
    """

    def __init__(
        self,
        order: FunctionOrder,
        store: Store,
        wire: Store,
        source: UserSource,
        reporter: FunctionReporter,
        remaining_s: Callable[[], float],
        *,
        open_wire: Callable[[str], Store] = open_store,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._order = order
        self._store = store
        # A failure of a separate wire store may be overcome by a new attempt, unlike failures of the object store.
        self._wire: Store = wire if wire is store else WireStore(wire)
        self._wire_url = order.parameter_url
        self._open_wire = open_wire
        self._source = source
        self._reporter = reporter
        self._remaining_s = remaining_s
        self._now_s = now_s
        self._keys = Keys(order.prefix)
        self._place = Place(order.stage, order.replica)
        self._sleep = sleep
        self._communicator: Communicator | None = None
        self._saved_steps: set[int] = set()
        self._save_s = 0.0
        self._step_s = 0.0
        self._timer = StepTimer()
        self._is_first_step = True
        self._num_samples = 0
        self._line_at_s = -_LINE_INTERVAL_S

    def run(self) -> FunctionResult:
        """Train until there is nothing more to do at this place, and return how that ended.

        Raises StorageError, InvalidRequest, CheckpointError, and whatever the user's code raises.
        """
        outcome: Outcome
        may_write, step = True, 0
        try:
            self._watch = ControlWatch(self._store, self._order, self._now_s, self._sleep)
            self._worker = self._build(self._order.plan or self._watch.record.plan)
            try:
                self._wait_for_place()
                outcome = self._work()
            finally:
                step = self._worker.position.step
                self._worker.close()
            self._flush()
            self._reporter.update(outcome)
        except AttemptSuperseded:
            outcome, may_write = "superseded", False
        except Stopped:
            outcome, may_write = "stopped", False
        self._reporter.close(writes=may_write)
        return FunctionResult(
            stage=self._place.stage,
            replica=self._place.replica,
            incarnation=self._order.incarnation,
            outcome=outcome,
            step=step,
            usage=self._reporter.usage(),
        )

    # --- taking the place -------------------------------------------------------------------------------------

    def _build(self, plan: FunctionPlan) -> PlaceWorker:
        """Import the user's code anew and build the worker in its state before the first step."""
        worker = build_place_worker(
            self._source,
            plan,
            self._place,
            store=self._store,
            wire=self._wire,
            check=self._watch.check,
            now_s=self._now_s,
        )
        self._reporter.update(
            "warm",
            total_steps=worker.total_steps or 0,
            global_batch_size=worker.global_batch_size,
            attempt=self._watch.record.attempt,
        )
        return worker

    def _wait_for_place(self) -> None:
        """Begin with the attempt's state; a successor first waits until its predecessor has left."""
        watch = self._watch
        if self._order.plan is not None:
            self._wait_for_plan()
            return
        before: int | None = None
        while watch.named < self._order.incarnation:
            before = watch.named
            left = self._read_left(before, timeout_s=1.0)
            watch.look()
            if left is not None:
                watch.has_taken_over = True
                self._reporter.take_losses(left.losses)
                self._begin(left.step if left.attempt == watch.record.attempt else watch.record.restore_step)
                return
        # The record names this function: in the attempt in which the predecessor left, or in a new one.
        step = watch.record.restore_step
        candidates = [before] if before is not None else range(self._order.incarnation - 1, -1, -1)
        if self._order.is_successor:
            for candidate in candidates:
                left = self._read_left(candidate, timeout_s=0.0)
                if left is not None:
                    self._reporter.take_losses(left.losses)
                    step = left.step if left.attempt == watch.record.attempt else step
                    break
        self._begin(step)

    def _wait_for_plan(self) -> None:
        """Invoked ahead for the next plan: wait until the record names this function."""
        watch = self._watch
        while watch.named != self._order.incarnation:
            is_near = watch.record.last_step is not None
            self._sleep(PARK_POLL_S if is_near else WAIT_POLL_S)
            watch.look()
        self._begin(watch.record.restore_step)

    def _read_left(self, incarnation: int, timeout_s: float) -> _Left | None:
        try:
            data = self._store.wait(self._keys.left(self._place, incarnation), timeout_s)
        except ObjectMissing:
            return None
        return decode_json(data, _Left)

    def _begin(self, step: int) -> None:
        """Enter the record's attempt with the state after `step` steps, in memory or loaded from the store."""
        record = self._watch.enter()
        worker = self._worker
        if step != worker.position.step:
            if step == 0:
                worker.close()
                self._worker = worker = self._build(record.plan)
            else:
                worker.load_state(self._store, self._keys, step)
        plan = record.plan
        if worker.plan != plan:
            worker.set_plan(plan)
        # What was saved of later steps in another attempt counts for nothing, and is removed.
        self._saved_steps = {step}
        self._flush()
        if record.parameter_url not in ("", self._wire_url):
            # Only the exchange of replicas of whole models can use another store; stages keep theirs for messages.
            self._wire, self._wire_url = WireStore(self._open_wire(record.parameter_url)), record.parameter_url
        self._is_first_step = True
        self._timer.begin()
        if plan.num_replicas > 1:
            self._communicator = Communicator(
                self._wire,
                self._place.replica,
                plan.num_replicas,
                now_s=self._now_s,
                collective=plan.collective,
                num_chunks=plan.num_chunks,
                num_in_flight=plan.num_in_flight,
                num_shards=plan.num_shards,
            )
            if self._watch.has_taken_over and step > 0:
                before = self._keys.wire(record.generation, record.attempt, step - 1)
                self._communicator.take_over(worker.sync_prefix(before), worker.num_exchanged)
        else:
            self._communicator = None
        worker.exchange = self._communicator
        self._reporter.update(
            "training",
            generation=record.generation,
            attempt=record.attempt,
            step=step,
            total_steps=worker.total_steps or 0,
            epoch=worker.epoch,
            saved_step=None,
            totals=self._timer.totals,
            error="",
            ids_digest=worker.position.ids_digest,
        )

    def _flush(self) -> None:
        """Wait until old gradients are removed from the store; what cannot be removed stays until the job's end."""
        if self._communicator is not None:
            try:
                self._communicator.flush()
            except StorageError as error:
                sys.stderr.write(f"springtide: gradients that were read could not be removed: {error}\n")

    # --- training ---------------------------------------------------------------------------------------------

    def _work(self) -> Outcome:
        while True:
            try:
                outcome = self._step_or_stuck()
                if outcome is not None:
                    return outcome
            except NewAttempt:
                record = self._watch.record
                sys.stderr.write(f"springtide: attempt {record.attempt} begins with step {record.restore_step + 1}\n")
                # All functions return to the state of the record's step.
                self._begin(record.restore_step)

    def _step_or_stuck(self) -> Outcome | None:
        """As `_next_step`, but if a separate wire store fails, wait for a new attempt before raising."""
        try:
            return self._next_step()
        except (WireTrouble, CollectiveError) as error:
            if self._wire is self._store:
                raise
            self._reporter.update("stuck", error=f"{type(error).__name__}: {error}")
            until_s = self._now_s() + STUCK_S
            while self._now_s() < until_s:
                self._sleep(_BOUNDARY_POLL_S)
                self._watch.look()
            raise

    def _next_step(self) -> Outcome | None:
        """Train one step and save or leave if that is due; returns an outcome if it was this function's last step."""
        worker, watch = self._worker, self._watch
        if worker.is_over:
            self._end()
            return "finished"
        watch.refresh(_BOUNDARY_POLL_S)
        if self._lacks_samples():
            return self._wait_for_samples()
        if worker.is_over:
            # The stream was closed after the last step.
            return None
        record = watch.record
        # Stages read the record at different steps, so the first stage decides, and its messages tell the others.
        ends_here = record.last_step is not None and worker.position.step + 1 >= record.last_step
        prefix = self._keys.wire(record.generation, watch.attempt, worker.position.step)
        batch, gradient_bytes = worker.global_batch_size, worker.gradient_bytes
        done = worker.run_step(prefix, ends_here=ends_here and self._place.stage == 0)
        self._timer.committed(self._now_s(), done.lanes, batch, gradient_bytes)
        self._committed(done)
        if worker.is_over:
            self._end()
            return "finished"
        if done.is_last:
            return self._halt()
        if worker.position.step % max(1, record.save_every) == 0 and self._is_my_turn():
            self._save()
        if self._remaining_s() < LIFETIME_STEPS * self._step_s + self._save_s + LIFETIME_SPARE_S:
            return self._leave()
        return None

    def _lacks_samples(self) -> bool:
        """Whether the next step must wait until the record allows more samples of the stream."""
        worker, record = self._worker, self._watch.record
        if worker.samples_needed is None:
            return False
        if record.num_available is None:
            raise InvalidRequest(
                "the task trains on a stream that its job does not know of; hand the job over again, so that the "
                "stream is found in it"
            )
        worker.set_available(record.num_available, is_closed=record.is_stream_closed)
        return not worker.is_over and worker.samples_needed > record.num_available

    def _wait_for_samples(self) -> Outcome | None:
        """Wait at the step boundary until there are samples for a step, or the job is to stop.

        All places wait here for the same step and stop at the same one, because a record with a last step allows no
        more samples.
        """
        began_s = self._now_s()
        self._reporter.update("waiting")
        while self._lacks_samples():
            if self._watch.record.last_step is not None:
                return self._halt()
            if self._remaining_s() < self._save_s + LIFETIME_SPARE_S:
                return self._leave()
            self._sleep(WAIT_POLL_S)
            self._watch.look()
        self._timer.skip(self._now_s() - began_s)
        self._reporter.update("training")
        return None

    def _halt(self) -> Outcome:
        """Stop at this boundary, as all functions do: save if due, then return, or park until the next plan.

        Raises NewAttempt if the next plan includes this function.
        """
        self._end()
        if self._watch.record.upcoming is None:
            return "stopped"
        self._reporter.update("parked")
        while self._watch.record.upcoming is not None:
            self._sleep(PARK_POLL_S)
            try:
                self._watch.look()
            except AttemptSuperseded:
                # The next plan does not include this function.
                break
        return "stopped"

    def _committed(self, done: StepOutcome) -> None:
        worker = self._worker
        # The first step may include waiting for others to start, so limit the estimate of the next one.
        computed_s = done.lanes.forward_s + done.lanes.backward_s + done.lanes.update_s
        self._step_s = min(done.lanes.step_s, 2 * computed_s) if self._is_first_step else done.lanes.step_s
        self._is_first_step = False
        self._num_samples += done.num_samples
        if self._place.stage == len(worker.plan.stages) - 1:
            # Also without samples in the step, because the coordinator waits for every replica's loss.
            self._reporter.add_loss(worker.position.step, done.loss or 0.0, done.num_samples)
        self._reporter.update(
            step=worker.position.step,
            total_steps=worker.total_steps or 0,
            epoch=worker.epoch,
            global_batch_size=worker.global_batch_size,
            num_samples=self._num_samples,
            ids_digest=worker.position.ids_digest,
            totals=self._timer.totals,
            pause_s=self._timer.pause_s,
            lanes=msgspec.structs.replace(done.lanes, save_s=self._save_s),
        )
        if self._now_s() - self._line_at_s >= _LINE_INTERVAL_S or worker.is_over:
            self._line_at_s = self._now_s()
            sys.stdout.write(self._line(done) + "\n")
            sys.stdout.flush()

    def _line(self, done: StepOutcome) -> str:
        lanes: LaneTimes = done.lanes
        loss = f"  loss {done.loss:.4g}" if done.loss is not None else ""
        return (
            f"stage {self._place.stage} replica {self._place.replica} step {self._worker.position.step}/"
            f"{self._worker.total_steps or '?'}{loss}  {lanes.step_s:.2f} s (compute "
            f"{lanes.forward_s + lanes.backward_s:.2f}, flush {lanes.flush_s:.2f}, sync {lanes.sync_s:.2f})"
        )

    # --- saving and leaving -----------------------------------------------------------------------------------

    def _is_my_turn(self) -> bool:
        """Whether this replica saves this step: replicas have identical states and take turns."""
        return self._worker.position.step % self._watch.record.plan.num_replicas == self._place.replica

    def _save(self) -> None:
        began_s = self._now_s()
        step = self._worker.position.step
        self._worker.save_state(self._store, self._keys)
        self._save_s = self._now_s() - began_s
        self._saved_steps.add(step)
        self._reporter.update(saved_step=step)

    def _end(self) -> None:
        """Save the state after the last step, if it is this replica's turn.

        Raises NewAttempt if a function of another stage died before it had saved: training then continues.
        """
        if self._is_my_turn() and self._worker.position.step not in self._saved_steps:
            self._save()
        self._watch.look()

    def _leave(self) -> Outcome:
        """Save the state and write the record for which the successor waits."""
        step = self._worker.position.step
        if step not in self._saved_steps and not self._worker.has_state(self._store, self._keys, step):
            self._reporter.update("leaving")
            self._save()
        # The record may have changed: a function that it no longer names must write nothing.
        self._watch_before_leaving()
        left = _Left(step=step, attempt=self._watch.attempt, losses=self._reporter.report.losses)
        self._store.put(self._keys.left(self._place, self._order.incarnation), msgspec.json.encode(left))
        return "left"

    def _watch_before_leaving(self) -> None:
        try:
            self._watch.look()
        except NewAttempt:
            # The successor follows the record's new attempt, whatever step this function left after.
            return
