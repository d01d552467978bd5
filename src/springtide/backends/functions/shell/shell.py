"""The thread that runs one job's coordinator: it reads reports, invokes functions, writes records and posts events.

All decisions are the coordinator's; this module has the stores, the provider, the clock and the disk.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec
from msgspec.structs import replace

from springtide.backends.functions.coordinator import messages
from springtide.backends.functions.coordinator.coordinator import Coordinator
from springtide.backends.functions.coordinator.function_pool import JobFacts
from springtide.backends.functions.provider import InvocationEnd
from springtide.backends.functions.shell.conversion import convert_checkpoint
from springtide.backends.functions.shell.copies import Copies
from springtide.backends.functions.shell.fence import RecordFence
from springtide.backends.functions.shell.io import RETRY_S, STORE_PATIENCE_S, CoordinatorIO, Wiring
from springtide.backends.functions.shell.notes import (
    CoordinatorFiles,
    Notes,
    notes_of,
    usage_taken_over,
    usage_with_invocations,
)
from springtide.backends.functions.shell.objects import JobObjects
from springtide.core.actions import StartReplica
from springtide.core.decoding import decode_json
from springtide.core.errors import BackendError, CheckpointError, Fenced, InvalidRequest, StorageError
from springtide.core.events import (
    Event,
    JobFailed,
    MoveFailed,
    ReplicaLost,
    ReplicaReady,
    ReplicaStopped,
    UsageReported,
)
from springtide.core.functions import Usage
from springtide.core.status.functions import FunctionRunStatus
from springtide.core.wire.functions import ControlRecord, FunctionResult, Keys, Place
from springtide.core.workload import TrainingJob
from springtide.storage.stores.open import open_store

_log = logging.getLogger(__name__)
TICK_S = 0.25
# The interval of reading reports: this fraction of a step, within bounds.
READ_S = 1.0
LONGEST_READ_S = 4.0
READ_FRACTION = 0.25
# The interval of checking the stream and the parameter store; while no function runs, the stream is checked less
# and less often: after this fraction of the time since the last function ran.
WATCH_S = 1.0
DRY_WATCH_FRACTION = 0.1
LONGEST_WATCH_S = 30.0
_READERS = 8


class CoordinatorShell:
    """Runs one job's coordinator from its StartReplica on. `send` hands over a stimulus; `close` ends the thread.

    With `is_adopting` functions may be running already: they are taken over as the control record says.
    """

    def __init__(self, start: StartReplica, wiring: Wiring, generation: int, *, is_adopting: bool = False) -> None:
        assert isinstance(start.workload, TrainingJob)
        self.job = start.workload
        self.replica_id = start.replica_id
        self._wiring = wiring
        self._generation = generation
        self._is_adopting = is_adopting
        self._files = CoordinatorFiles(wiring.work_dir, str(self.job.job_id))
        self._stimuli: queue.Queue[messages.Stimulus | None] = queue.Queue()
        self._deployed: set[int] = set()
        self._coordinator: Coordinator | None = None
        self._status: FunctionRunStatus | None = None
        self._lines_of: dict[Place, int] = {}
        self._num_losses = 0
        self._parameters_before_s = 0.0
        self._read_at_s = 0.0
        self._watched_at_s = 0.0
        self._dry_since_s = 0.0
        self._deploying = threading.Lock()
        self._is_closed = threading.Event()
        self._is_stopped = threading.Event()
        self._objects: JobObjects
        self._io: CoordinatorIO
        # Used where the next coordinator may run on another machine (`term` > 0).
        self._fence: RecordFence | None = None
        self._copies: Copies | None = None
        self._threads = ThreadPoolExecutor(_READERS, thread_name_prefix=f"functions-{self.job.job_id}")
        self._thread = threading.Thread(target=self._main, name=f"coordinator-{self.job.job_id}", daemon=True)

    def start(self) -> None:
        """Start the thread: it stores the job, deploys functions, then reports the replica as ready."""
        self._thread.start()

    def send(self, stimulus: messages.Stimulus) -> None:
        """Hand over a stimulus; thread-safe."""
        self._stimuli.put(stimulus)

    def status(self) -> FunctionRunStatus | None:
        """The newest status."""
        return self._status

    @property
    def has_ended(self) -> bool:
        """Whether the thread has ended, so that stimuli are no longer handled."""
        return not self._thread.is_alive() and self._thread.ident is not None

    def wait_stopped(self, timeout_s: float) -> None:
        """Wait until no function of the job runs any more, or it is unknown which do."""
        self._is_stopped.wait(timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """End the thread; functions run on."""
        self._is_closed.set()
        self._stimuli.put(None)
        self._thread.join(timeout_s)
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --- the thread ------------------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            if self._prepare():
                self._loop()
        except Exception as error:
            # Report the loss whatever the error: the job must not keep its place without a coordinator.
            _log.exception("the coordinator of %s failed", self.job.job_id)
            self._report_lost(f"the coordinator of its functions failed: {type(error).__name__}: {error}")
        finally:
            self._is_stopped.set()
            if self._copies is not None:
                self._copies.save(is_last=True)

    def _prepare(self) -> bool:
        """Store and deploy what functions need. False: that failed, and was reported as a failure or a loss."""
        wiring = self._wiring
        try:
            self._objects = JobObjects(
                open_store(wiring.store_url), Keys(f"jobs/{self.job.job_id}"), wiring.parameter_url
            )
            self._io = CoordinatorIO(self.job, wiring, self._objects, self.send, self._note, self._is_closed)
            if wiring.parameter_url:
                # Fail now rather than in every function if it does not answer.
                open_store(wiring.parameter_url).close()
            record, notes = self._take_over()
            self._objects.put_job(self.job)
            self._take_checkpoint()
            options = self.job.menu.options if self.job.menu is not None else ()
            sizes = {stage.memory_mb for option in options for stage in option.plan.stages}
            if sizes:
                wiring.provider.deploy(sorted(sizes))
                self._deployed |= sizes
        except InvalidRequest as error:
            self._post(JobFailed(job_id=self.job.job_id, generation=self._generation, error=str(error)))
            self._answer_stops()
            return False
        except CheckpointError as error:
            self._note(f"functions cannot start from the checkpoint of machines: {error}")
            self._post(MoveFailed(job_id=self.job.job_id, generation=self._generation, error=str(error)))
            self._answer_stops()
            return False
        except Fenced as error:
            # The coordinator that has claimed the job reports on it.
            self._note(str(error))
            return False
        except (StorageError, BackendError) as error:
            self._report_lost(f"its functions could not be prepared: {error}")
            return False
        now_s = wiring.clock.now_s()
        used = max([notes.used_incarnations, *(record.incarnations.values() if record is not None else ())])
        facts = JobFacts(
            job_id=self.job.job_id,
            replica_id=self.replica_id,
            prefix=self._objects.keys.prefix,
            store_url=wiring.store_url,
            has_parameter_store=wiring.parameter_host is not None,
            service=wiring.provider.service,
            budget_usd=self.job.goal.budget_usd,
            menu=self.job.menu,
            used_incarnations=used,
            stream=self.job.stream,
            global_batch_size=self.job.global_batch_size,
            stream_rules=wiring.stream_rules,
        )
        adopted = record if self._is_adopting and record is not None and record.verb == "run" else None
        if adopted is not None and adopted.generation == self._generation:
            base = usage_taken_over(notes, now_s, uses_parameters=bool(wiring.parameter_url and adopted.parameter_url))
        else:
            adopted, base = None, usage_with_invocations(notes, now_s, wiring.provider.service.lifetime_s)
        if wiring.parameter_host is not None:
            # The uptime so far is already part of `base`.
            self._parameters_before_s = wiring.parameter_host.used_s(self.job.job_id)
        self._coordinator = Coordinator(facts, now_s, self._with_machines(base))
        last = self._files.last_loss()
        if last is not None:
            self._coordinator.run.progress.losses.append(last)
            self._num_losses = 1
        if adopted is not None:
            invoked = {invocation.incarnation: invocation.invoked_at_s for invocation in notes.invocations}
            self._coordinator.adopt(adopted, now_s, invoked)
            self._note("took over after a restart of the platform")
        self._post(ReplicaReady(workload_id=self.job.job_id, replica_id=self.replica_id))
        return True

    def _take_checkpoint(self) -> None:
        """Make the checkpoint of a job that has moved a state of functions. Raises CheckpointError, StorageError."""
        wiring = self._wiring
        step = convert_checkpoint(
            self.job, self._objects, wiring.store_url, wiring.work_dir, self._generation, self._is_closed.is_set
        )
        if step:
            self._note(f"the checkpoint of machines after step {step} is a state of functions now")

    def _with_machines(self, base: Usage) -> Usage:
        """The usage so far, with what the job has cost on machines, which counts in its budget."""
        run = self.job.machine_run
        return base if run is None else replace(base, machines_usd=run.cost_usd)

    def _take_over(self) -> tuple[ControlRecord | None, Notes]:
        """The control record and the notes of the previous coordinator. Raises StorageError, Fenced."""
        wiring = self._wiring
        if not wiring.term:
            return self._objects.read_control(), self._files.read()
        self._fence = self._objects.fence(wiring.term)
        give_up_s = time.monotonic() + STORE_PATIENCE_S
        while True:
            try:
                record, notes = self._fence.claim()
                break
            except StorageError as error:
                if isinstance(error, Fenced) or time.monotonic() > give_up_s or self._is_closed.wait(RETRY_S):
                    raise
        self._copies = Copies(self._objects.store, self.job.job_id, wiring.work_dir)
        self._copies.restore()
        self._files.on_new_lines = self._copies.copy_soon
        return record, notes

    def _loop(self) -> None:
        next_tick_s = time.monotonic()
        while not self._is_closed.is_set():
            try:
                stimulus = self._stimuli.get(timeout=max(0.0, next_tick_s - time.monotonic()))
            except queue.Empty:
                stimulus = messages.TimePassed(own=self._own_usage(), parameter_store_s=self._parameter_store_s())
                next_tick_s = time.monotonic() + TICK_S
                self._read_reports()
                self._watch_stores()
            if stimulus is None:
                return
            self._take(stimulus)

    def _answer_stops(self) -> None:
        """The job cannot run: answer only requests to stop it."""
        asked = (messages.StopRequested, messages.PreemptRequested)
        coordinator = Coordinator(
            JobFacts(
                job_id=self.job.job_id,
                replica_id=self.replica_id,
                prefix="",
                store_url="",
                service=self._wiring.provider.service,
            ),
            self._wiring.clock.now_s(),
        )
        while not self._is_closed.is_set():
            stimulus = self._stimuli.get()
            if isinstance(stimulus, asked):
                for order in coordinator.handle(self._wiring.clock.now_s(), messages.StopRequested()):
                    if isinstance(order, messages.Emit):
                        self._post(order.event)

    # --- stimuli ---------------------------------------------------------------------------------------------------

    def _take(self, stimulus: messages.Stimulus) -> None:
        coordinator = self._coordinator
        assert coordinator is not None
        reason = coordinator.run.reason
        orders = coordinator.handle(self._wiring.clock.now_s(), stimulus)
        if any(isinstance(order, messages.Invoke) for order in orders) and not self._announce_launches(coordinator):
            return
        for order in orders:
            if not self._carry_out_order(order):
                break
        if coordinator.run.reason != reason and coordinator.run.reason:
            self._note(coordinator.run.reason)
        self._save_losses(coordinator)

    def _read_reports(self) -> None:
        coordinator = self._coordinator
        assert coordinator is not None
        now_s = time.monotonic()
        step_s = coordinator.run.pace.measured_step_s or 0.0
        interval_s = min(LONGEST_READ_S, max(READ_S, READ_FRACTION * step_s))
        watched = coordinator.watched()
        if not watched or now_s - self._read_at_s < interval_s:
            return
        self._read_at_s = now_s
        for place, incarnation in watched:
            self._threads.submit(self._read_report, place, incarnation)

    def _watch_stores(self) -> None:
        """About once a second: check the stream and the parameter store, and renew the status."""
        coordinator = self._coordinator
        assert coordinator is not None
        if self._copies is not None and self._copies.is_due():
            self._threads.submit(self._copies.save)
        now_s = time.monotonic()
        if coordinator.run.mode != "resting":
            self._dry_since_s = now_s
        # Every check is a paid request: the longer no data came, the longer the interval.
        rested_s = DRY_WATCH_FRACTION * (now_s - self._dry_since_s)
        if now_s - self._watched_at_s < min(LONGEST_WATCH_S, max(WATCH_S, rested_s)):
            return
        self._watched_at_s = now_s
        self._status = coordinator.status() or self._status
        if coordinator.wants_stream:
            self._threads.submit(self._io.check_stream)
        if coordinator.run.mode == "running" and coordinator.run.pool.parameter_url:
            self._threads.submit(self._io.check_parameters)

    def _read_report(self, place: Place, incarnation: int) -> None:
        try:
            report = self._objects.read_report(place, incarnation)
        except StorageError as error:
            _log.warning("%s: a report could not be read: %s", self.job.job_id, error)
            return
        if report is None:
            return
        self.send(messages.ReportRead(report=report))
        if report.phase == "training" and self._lines_of.get(place, 0) < report.step:
            self._lines_of[place] = report.step
            _, newest, count = report.losses[-1] if report.losses else (0, None, 0)
            loss = f"  loss {'not finite' if newest is None else f'{newest:.4g}'}" if count else ""
            line = f"step {report.step}/{report.total_steps}{loss}  {report.lanes.step_s:.2f} s"
            self._files.add_step(place, incarnation, line)

    def _ended(self, invoke: messages.Invoke, end: InvocationEnd) -> None:
        """Called by the provider: read the function's last report, then pass on its end."""
        order = invoke.order
        place = Place(order.stage, order.replica)
        if self._is_closed.is_set():
            return
        result: FunctionResult | None = None
        outcome, error = end.outcome, end.error
        if outcome == "returned":
            try:
                result = decode_json(end.payload, FunctionResult)
            except msgspec.MsgspecError as reason:
                outcome, error = "failed", f"its answer is unreadable: {reason}"
        if outcome not in ("throttled", "refused"):
            self._read_report(place, order.incarnation)
        self._files.add_tail(place, order.incarnation, end.log)
        if outcome != "returned":
            self._note(f"{place}.{order.incarnation} {outcome}" + (f": {error}" if error else ""))
        self.send(
            messages.InvocationEnded(
                number=invoke.number,
                place=place,
                incarnation=order.incarnation,
                outcome=outcome,
                result=result,
                error=error,
                duration_s=end.duration_s,
                max_memory_mb=end.max_memory_mb,
                retry_after_s=end.retry_after_s,
            )
        )

    # --- orders ----------------------------------------------------------------------------------------------------

    def _carry_out_order(self, order: messages.Order) -> bool:
        """Carry out an order. False: that failed, and the orders after it must not be carried out."""
        if isinstance(order, messages.Emit):
            self._post(order.event)
        elif isinstance(order, messages.WriteControl):
            return self._write_control(order)
        elif isinstance(order, messages.Invoke):
            self._invoke(order)
        elif isinstance(order, messages.FindStates):
            self._threads.submit(self._io.look, order)
        elif isinstance(order, messages.Assemble):
            self._threads.submit(self._io.assemble, order)
        elif isinstance(order, messages.OpenParameterStore):
            self._threads.submit(self._io.open_parameters)
        elif isinstance(order, messages.CloseParameterStore):
            self._threads.submit(self._io.close_parameters)
        elif order.is_awaited:
            # A coordinator that has taken over the job may have written states under the same names.
            if self._fence is not None and not self._with_retries(self._fence.check, "a clearing up"):
                return False
            self._io.delete(order)
        else:
            self._threads.submit(self._io.delete, order)
        return True

    def _write_control(self, order: messages.WriteControl) -> bool:
        def write() -> None:
            if self._fence is not None:
                self._fence.write_control(order.record)
                return
            known = self._objects.read_control()
            if known is not None and known.generation > order.record.generation:
                raise Fenced(f"generation {known.generation} owns the job")
            self._objects.write_control(order.record)

        return self._with_retries(write, "the control record")

    def _announce_launches(self, coordinator: Coordinator) -> bool:
        """Write the notes, which name the functions about to be invoked. False: that failed, so invoke none."""
        fence, notes = self._fence, notes_of(coordinator, self._wiring.clock.now_s())
        if fence is None:
            self._write_notes(coordinator)
            return True
        return self._with_retries(lambda: fence.write_notes(notes), "the notes")

    def _with_retries(self, write: Callable[[], None], what: str) -> bool:
        """Make a store call, and retry it while the store fails; returns whether it succeeded."""
        give_up_s = time.monotonic() + STORE_PATIENCE_S
        while True:
            try:
                write()
                return True
            except Fenced:
                self.send(messages.FencedOff())
                return False
            except StorageError as error:
                if time.monotonic() > give_up_s or self._is_closed.is_set():
                    self.send(messages.StoreFailed(error=f"the object store does not do its work: {error}"))
                    return False
                self._note(f"{what} waits: {error}")
                self._is_closed.wait(RETRY_S)

    def _invoke(self, order: messages.Invoke) -> None:
        if order.memory_mb in self._deployed:
            self._invoke_deployed(order)
        else:
            # Deploying a new size takes a while: the coordinator's thread must not wait for it.
            self._threads.submit(self._deploy_and_invoke, order)

    def _deploy_and_invoke(self, order: messages.Invoke) -> None:
        try:
            with self._deploying:
                if order.memory_mb not in self._deployed:
                    self._wiring.provider.deploy([order.memory_mb])
                    self._deployed.add(order.memory_mb)
        except (InvalidRequest, BackendError) as error:
            self._ended(order, InvocationEnd(invocation_id="", outcome="refused", error=str(error)))
            return
        self._invoke_deployed(order)

    def _invoke_deployed(self, order: messages.Invoke) -> None:
        try:
            payload = msgspec.json.encode(order.order)
            self._wiring.provider.invoke(order.memory_mb, payload, partial(self._ended, order))
        except (InvalidRequest, BackendError) as error:
            self._ended(order, InvocationEnd(invocation_id="", outcome="refused", error=str(error)))

    # --- files and notes -------------------------------------------------------------------------------------------

    def _post(self, event: Event) -> None:
        if isinstance(event, UsageReported) and self._coordinator is not None:
            self._status = self._coordinator.status()
            if self._status is not None:
                self._files.write_status(self._status)
            self._write_notes(self._coordinator)
        self._wiring.post(event)
        if isinstance(event, ReplicaStopped | ReplicaLost):
            self._is_stopped.set()

    def _write_notes(self, coordinator: Coordinator) -> None:
        """Save the usage so far."""
        try:
            if self._fence is None:
                self._files.write(notes_of(coordinator, self._wiring.clock.now_s()))
            else:
                # Before the usage is reported: a bill that was shown must not fall when another control plane
                # continues.
                self._fence.write_notes(notes_of(coordinator, self._wiring.clock.now_s()))
        except Fenced:
            self.send(messages.FencedOff())
        except StorageError as error:
            _log.error("%s", error)

    def _save_losses(self, coordinator: Coordinator) -> None:
        losses = coordinator.run.progress.losses
        if len(losses) > self._num_losses:
            self._files.add_losses(losses[self._num_losses :])
            self._num_losses = len(losses)

    def _note(self, line: str) -> None:
        self._files.add_lines("coordinator", [line])

    def _own_usage(self) -> Usage:
        had = self._objects.store.requests()
        return Usage(num_puts=had.num_puts, num_gets=had.num_gets, num_lists=had.num_lists, num_deletes=had.num_deletes)

    def _parameter_store_s(self) -> float | None:
        host = self._wiring.parameter_host
        if host is None:
            return None
        return max(0.0, host.used_s(self.job.job_id) - self._parameters_before_s)

    def _report_lost(self, reason: str) -> None:
        self._note(reason)
        self._post(ReplicaLost(workload_id=self.job.job_id, replica_id=self.replica_id, reason=reason))
