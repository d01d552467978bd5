"""FunctionsExecutor: the Executor port for jobs on a function service. A job's one replica is its coordinator."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from functools import singledispatchmethod
from pathlib import Path
from urllib.parse import quote

from springtide.backends.functions.coordinator import messages
from springtide.backends.functions.coordinator.function_pool import StreamRules
from springtide.backends.functions.parameter_store.host import FixedHost, ParameterHost
from springtide.backends.functions.provider import FunctionProvider
from springtide.backends.functions.shell.copies import fetch_status
from springtide.backends.functions.shell.io import Wiring
from springtide.backends.functions.shell.notes import NOTES_FILE, read_status
from springtide.backends.functions.shell.objects import JobObjects
from springtide.backends.functions.shell.shell import CoordinatorShell
from springtide.backends.inbox import Inbox
from springtide.core.actions import (
    Action,
    AdmitJob,
    DrainNode,
    EndJob,
    LabelNode,
    PreemptJob,
    ResizeJob,
    StartReplica,
    StopReplica,
)
from springtide.core.errors import StorageError
from springtide.core.events import Event, JobEdited, ProgressReported, ReplicaStopped
from springtide.core.ports import Clock, Standing
from springtide.core.resources import Node
from springtide.core.status.functions import FunctionRunStatus
from springtide.core.wire.functions import Keys
from springtide.core.workload import JobState, ReplicaId, TrainingJob, WorkloadId
from springtide.storage.stores.open import open_store

_log = logging.getLogger(__name__)
_END_S = 5.0


class FunctionsExecutor:
    """Runs jobs on the functions of one provider. `open`, then `recover` or `start`, `wait`; finally `close`.

    `store_url` is the object store that functions reach as well. `parameter_host` runs the stores for messages between
    functions (None: the one at `parameter_url`, or none where that is empty). `stream_rules` say when jobs on streams
    end their functions and restart them. `node` represents the service in the cluster. `term` numbers the control
    planes that lead one after the other on different machines; a job's records are in the store then (0: on this disk).
    Every method is thread-safe; none but `wait`, `open` and `close` blocks.
    """

    def __init__(
        self,
        state_dir: Path,
        clock: Clock,
        *,
        provider: FunctionProvider,
        store_url: str,
        parameter_url: str = "",
        parameter_host: ParameterHost | None = None,
        stream_rules: StreamRules | None = None,
        node: Node | None = None,
        term: int = 0,
    ) -> None:
        self.node = node
        self.provider = provider
        self._state_dir = state_dir
        self._clock = clock
        self._store_url = store_url
        self._parameter_host = parameter_host or (FixedHost(parameter_url) if parameter_url else None)
        # A permanent store has to be cleaned after each job; the others end with their job.
        self._parameter_url = self._parameter_host.url if isinstance(self._parameter_host, FixedHost) else ""
        self._stream_rules = stream_rules or StreamRules()
        self._inbox: Inbox[None] = Inbox(clock)
        self._outlet: Callable[[Event], None] | None = None
        self._lock = threading.Lock()
        self._shells: dict[WorkloadId, CoordinatorShell] = {}
        self._gone: set[ReplicaId] = set()
        self._term = term
        self._kept: frozenset[str] = frozenset()
        self._fetched: set[WorkloadId] = set()

    def open(self) -> None:
        """With a `term`: list the jobs that have objects in the store, which are not known from this disk."""
        if not self._term:
            return
        try:
            with contextlib.closing(open_store(self._store_url)) as store:
                self._kept = frozenset(key.split("/", 2)[1] for key in store.keys("jobs/"))
        except StorageError as error:
            _log.warning("what is kept of jobs on functions is not known: %s", error)

    def send_events_to(self, post: Callable[[Event], None]) -> None:
        """Send events to `post` instead of returning them from `wait`, for executors that share one inbox."""
        self._outlet = post

    def knows(self, job_id: WorkloadId) -> bool:
        """Whether the job was ever started on functions of this platform."""
        return job_id in self._shells or job_id in self._kept or (self._work_dir(job_id) / NOTES_FILE).exists()

    def close(self, stop_workers: bool = False) -> None:
        """End every coordinator. With `stop_workers` functions are stopped first; otherwise they run on."""
        with self._lock:
            shells = list(self._shells.values())
        if stop_workers:
            for shell in shells:
                shell.send(messages.StopRequested(grace_s=1.0))
            for shell in shells:
                shell.wait_stopped(_END_S)
        for shell in shells:
            shell.close()
        if self._parameter_host is not None:
            self._parameter_host.close(ends=stop_workers)
        self._inbox.close()

    def post(self, event: Event) -> None:
        """Hand over an event; `wait` returns at once."""
        if self._outlet is not None:
            self._outlet(event)
        elif not isinstance(event, ProgressReported):
            self._inbox.post(event)
        else:
            self._inbox.progress(event)

    def wait(self, deadline_s: float | None) -> Sequence[Event]:
        """Return as soon as something happened, or nothing at the deadline (platform clock) or once closed."""
        return self._inbox.wait(deadline_s)

    def acknowledge(self, events: Sequence[Event]) -> None:
        """Pass on changed budgets that are durable now; a coordinator that starts later gets its from StartReplica.

        Events need no acknowledgement to be repeated: after a restart coordinators report again, from the store.
        """
        for event in events:
            if isinstance(event, JobEdited) and event.goal is not None:
                with self._lock:
                    shell = self._shells.get(event.job_id)
                if shell is not None:
                    shell.send(messages.BudgetChanged(budget_usd=event.goal.budget_usd))

    def status(self, job_id: WorkloadId) -> FunctionRunStatus | None:
        """The current or last status of a job's functions; None for a job that never had any."""
        with self._lock:
            shell = self._shells.get(job_id)
        status = shell.status() if shell is not None else None
        if status is None and self._term:
            self._fetch_status(job_id)
        return status if status is not None else read_status(self._work_dir(job_id))

    def _fetch_status(self, job_id: WorkloadId) -> None:
        """Fetch the status that a coordinator on another machine left; once."""
        with self._lock:
            is_known = job_id in self._fetched
            self._fetched.add(job_id)
        if is_known:
            return
        try:
            with contextlib.closing(open_store(self._store_url)) as store:
                fetch_status(store, job_id, self._work_dir(job_id))
        except StorageError as error:
            _log.warning("the last status of %s cannot be had: %s", job_id, error)

    def recover(self, standing: Standing) -> None:
        """Take over the jobs whose functions may have run on, then start unconfirmed actions again."""
        asked = {action.replica_id for action in standing.actions if isinstance(action, StartReplica)}
        for start in standing.replicas:
            if isinstance(start.workload, TrainingJob) and start.workload.is_on_functions:
                generation = standing.generations.get(start.workload_id, start.generation)
                self._begin(start, generation, is_adopting=start.replica_id not in asked)
        for action in standing.actions:
            self.start(action)

    def start(self, action: Action) -> None:
        """Start an action; its outcome is reported as an event. Repeating an action is harmless."""
        self._do(action)

    # --- actions ---------------------------------------------------------------------------------------------------

    @singledispatchmethod
    def _do(self, action: Action) -> None:
        raise AssertionError(f"no way to do {type(action).__name__}")

    @_do.register
    def _(self, action: StartReplica) -> None:
        self._begin(action, action.generation, is_adopting=False)

    @_do.register
    def _(self, action: ResizeJob) -> None:
        shell = self._shells.get(action.job_id)
        if shell is not None and action.functions is not None and shell.replica_id in action.replica_ids:
            shell.send(messages.RunRequested(generation=action.generation, plan=action.functions))

    @_do.register
    def _(self, action: PreemptJob) -> None:
        self._end_replicas(
            action.job_id,
            action.replica_ids,
            messages.PreemptRequested(generation=action.generation, grace_s=action.grace_s),
        )

    @_do.register
    def _(self, action: StopReplica) -> None:
        self._end_replicas(action.workload_id, (action.replica_id,), messages.StopRequested(grace_s=action.grace_s))

    @_do.register
    def _(self, action: EndJob) -> None:
        shell = self._shells.get(action.job_id)
        if shell is not None:
            shell.send(messages.StopRequested())
        self._inbox.forget_job(action.job_id)
        keeps_states = action.state is not JobState.SUCCEEDED
        threading.Thread(
            target=self._clear, args=(action.job_id, shell, keeps_states), name=f"end-{action.job_id}", daemon=True
        ).start()

    @_do.register
    def _(self, action: AdmitJob) -> None:
        """Nothing to do: promises concern only the control plane."""

    @_do.register
    def _(self, action: DrainNode) -> None:
        """Nothing to do: a function service changes no pool."""

    @_do.register
    def _(self, action: LabelNode) -> None:
        """Nothing to do: a function service changes no pool."""

    def _begin(self, start: StartReplica, generation: int, *, is_adopting: bool) -> None:
        with self._lock:
            known = self._shells.get(start.workload_id)
            if start.replica_id in self._gone or (known is not None and known.replica_id == start.replica_id):
                return
            wiring = Wiring(
                provider=self.provider,
                store_url=self._store_url,
                parameter_url=self._parameter_url,
                parameter_host=self._parameter_host,
                stream_rules=self._stream_rules,
                work_dir=self._work_dir(start.workload_id),
                clock=self._clock,
                post=self.post,
                term=self._term,
            )
            # From now on the status on this disk is the newest.
            self._fetched.add(start.workload_id)
            shell = CoordinatorShell(start, wiring, generation, is_adopting=is_adopting)
            self._shells[start.workload_id] = shell
            if known is not None:
                self._gone.add(known.replica_id)
        if known is not None:
            # It belonged to a replica that was reported as lost; only its thread still runs.
            known.close(timeout_s=0.0)
        shell.start()

    def _end_replicas(self, job_id: WorkloadId, replica_ids: Sequence[ReplicaId], asked: messages.Stimulus) -> None:
        for replica_id in replica_ids:
            shell = self._shells.get(job_id)
            if shell is not None and shell.replica_id == replica_id and not shell.has_ended:
                shell.send(asked)
            else:
                self.post(ReplicaStopped(workload_id=job_id, replica_id=replica_id))

    def _clear(self, job_id: WorkloadId, shell: CoordinatorShell | None, keeps_states: bool) -> None:
        """Remove an ended job's objects once neither coordinator nor functions write any more."""
        if shell is not None:
            shell.wait_stopped(self.provider.service.lifetime_s)
            shell.close()
            with self._lock:
                self._gone.add(shell.replica_id)
                self._shells.pop(job_id, None)
        if self._parameter_host is not None:
            self._parameter_host.release(job_id, lingers=False)
        try:
            store = open_store(self._store_url)
            try:
                JobObjects(store, Keys(f"jobs/{job_id}"), self._parameter_url).clear(keeps_states=keeps_states)
            finally:
                store.close()
        except StorageError as error:
            _log.warning("the objects of %s could not be removed: %s", job_id, error)

    def _work_dir(self, job_id: WorkloadId) -> Path:
        return self._state_dir / "workloads" / quote(job_id, safe="")
