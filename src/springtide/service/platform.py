"""The running platform: the control loop on its own thread, and the immutable view that all other threads read."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path

import msgspec
from msgspec.structs import replace

from springtide.control.controller import Controller
from springtide.control.journal.chain import CLOCK_BEGAN, MIDNIGHT
from springtide.control.journal.ended import EndedJobsLike, NoEndedJobs
from springtide.control.journal.journal import DurableJournal
from springtide.control.journal.retention import Retention
from springtide.control.journal.sqlite import SqliteJournal
from springtide.control.loop import recover, run
from springtide.control.quotes.budget import WithinBudget
from springtide.control.records import JobRecord, ServiceRecord
from springtide.control.state_data import PlatformSnapshot
from springtide.control.upkeep import JournalUpkeep
from springtide.core.decision import Overheads, Policy, PromiseCondition, Schedule, Snapshot, TimeClaim
from springtide.core.decoding import decode_json
from springtide.core.errors import BackendError, JournalDamaged, JournalError, PolicyError, Superseded
from springtide.core.events import ClockAnchored, Event, NodeJoined, NodeLost, PlatformStarted, PlatformStopping
from springtide.core.job_parts import JobOutcome
from springtide.core.ports import Step
from springtide.core.resources import DeviceId, Node
from springtide.core.status.functions import FunctionRunStatus
from springtide.core.status.pods import ClusterStatus
from springtide.core.status.shares import SharingStatus
from springtide.core.tide import DAY_S, Tide
from springtide.core.workload import MAX_UNFINISHED, WorkloadId
from springtide.scheduling.functions.policy import WithFunctions
from springtide.scheduling.registry import make_live_policy
from springtide.service.assembly.pool_settings import midnight_before_s
from springtide.service.clock import PlatformClock
from springtide.service.crash_points import UPKEEP_PACE, CrashingJournal, CrashPoints, EventExecutor
from springtide.service.decision_watch import DecisionWatch
from springtide.service.history.keeping import ANCHOR, Keeper, Keepers
from springtide.service.ports import SourceStore
from springtide.service.state_claim import StateClaim
from springtide.service.submission.quarantine import Quarantine
from springtide.service.submission.source_stores import DirectorySources
from springtide.storage.datasets.place import data_store_url

LOG = logging.getLogger("springtide.platform")
# How long a shutdown waits for the workers: the longest usual grace period plus a margin.
LONGEST_DRAIN_S = 25.0
# Measured on a busy machine with two cores: from the order to its first step, a worker of a small model took 2.1 to
# 2.4 s, nearly all of it for importing and building the model. Plans reserve this time at every change; the pause in
# training is shorter.
LOCAL_OVERHEADS = Overheads(change_s=2.5)
_RESTART_SHOWN_S = 600.0
_CLOCK_REVIEW_S = 60.0
_GATHER_PROGRESS_S = 0.5


class PlatformBuild(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a platform that runs on a cluster instead of one machine and its state directory.

    The platform closes `journal`. `nodes` is called once the executor exists and returns the nodes of that moment;
    from `recover` on, the executor posts nodes that join or are lost. `overheads` is what a change of a job costs
    there; with `learns_overheads` it is only the estimate used until changes have been measured. `store_url` is where
    datasets are stored. `cluster` returns the cluster's status and may be called from any thread. `on_superseded` is
    called on the loop's thread, before anything else, when another control plane has taken the journal over.
    """

    journal: DurableJournal
    source_store: SourceStore
    nodes: Callable[[], Sequence[Node]]
    store_url: str
    overheads: Overheads
    learns_overheads: bool = False
    cluster: Callable[[], ClusterStatus | None] = lambda: None
    on_superseded: Callable[[Superseded], None] = lambda error: None


class PlatformView(msgspec.Struct, frozen=True, kw_only=True):
    """The platform after journal step `seq`. Replaced as a whole, never changed.

    `ended` finds the workloads that ended so long ago that they are not among `jobs` and `services`.
    """

    seq: int
    now_s: float
    jobs: Mapping[WorkloadId, JobRecord]
    services: Mapping[WorkloadId, ServiceRecord]
    nodes: tuple[Node, ...]
    policy: str
    future: Mapping[WorkloadId, Schedule] = {}
    ended: EndedJobsLike = NoEndedJobs()
    claims: Mapping[WorkloadId, TimeClaim] = {}
    conditions: Mapping[WorkloadId, PromiseCondition] = {}
    price_s: float | None = None
    prices_s: Mapping[str, float] = {}
    outcomes: tuple[JobOutcome, ...] = ()


class Platform:
    """Owns the loop thread, the journal and the view. Built by service.assembly, used by API, gateway and dashboard."""

    def __init__(
        self,
        state_dir: Path,
        policy_name: str,
        nodes: Sequence[Node],
        make_executor: Callable[[PlatformClock], EventExecutor],
        crash_point: Callable[[str], None] | None = None,
        usd_per_device_hour: float = 0.0,
        tide: Tide | None = None,
        function_status: Callable[[WorkloadId], FunctionRunStatus | None] = lambda workload_id: None,
        has_parameter_store: bool = False,
        sharing: Callable[[], SharingStatus] = SharingStatus,
        build: PlatformBuild | None = None,
        restarted: str = "",
        max_unfinished: int = MAX_UNFINISHED,
        keep: Retention | None = None,
    ) -> None:
        """`nodes` are the nodes of this machine; `tide` is an empty record of past days, filled from the journal.

        `function_status` returns which functions run a job and `sharing` which workloads share which device; both may
        be called from any thread. `has_parameter_store` says that functions exchange data through a parameter store.
        `build` is given where the platform runs on a cluster: then `nodes` are in addition to the cluster's own.
        `keep` says how long the journal keeps steps and ended jobs.
        """
        self.state_dir = state_dir
        self._restarted, self._started_at_s = restarted, time.monotonic()
        self.policy_name = policy_name
        self.usd_per_device_hour, self.max_unfinished = usd_per_device_hour, max_unfinished
        self._build = build
        self._nodes = {node.node_id: node for node in nodes}
        self.source_store: SourceStore = DirectorySources(state_dir) if build is None else build.source_store
        self._crash_point = crash_point or (lambda name: None)
        self._watch = DecisionWatch()
        self._function_status = function_status
        self._sharing = sharing
        self.has_parameter_store = has_parameter_store
        self._claim = StateClaim(state_dir)
        self._journal: DurableJournal = SqliteJournal(state_dir / "journal.db") if build is None else build.journal
        self.quarantine = Quarantine(_TriedByTheLoop(self._journal, self._note_intake_error))
        if build is None:
            _refuse_foreign_workloads(state_dir, self._journal)
        began_unix_s, midnight_s = _founding_times(self._journal)
        if tide is not None and tide.day_s == DAY_S:
            tide = replace(tide, midnight_s=midnight_s)
        self._controller = Controller(
            self.make_policy(),
            overheads=LOCAL_OVERHEADS if build is None else build.overheads,
            learns_overheads=build is not None and build.learns_overheads,
            on_policy_error=self._on_policy_error,
            tide=tide,
        )
        self.clock = PlatformClock(began_unix_s, self._journal.last_now_s())
        self._last_anchor: ClockAnchored | None = None
        self._executor = make_executor(self.clock)
        if build is not None:
            self._nodes |= {node.node_id: node for node in build.nodes()}
        self._listeners: list[Callable[[int, Step, PlatformView], None]] = []
        self._keepers = Keepers()
        self._keepers.follow(ANCHOR, self._take_anchor)
        self._upkeep = self._make_upkeep(keep or Retention())
        self._tickets: dict[int, tuple[Event, Future[int]]] = {}
        self._tickets_lock = threading.Lock()
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self.stop_workers, self._end_by_s = True, 0.0
        self.failure: BaseException | None = None
        self._on_stop: Callable[[], None] = lambda: None
        self._view = self._make_view(0)
        self._snapshot = self._controller.snapshot(self.clock.now_s())
        self._thread = threading.Thread(target=self._main, name="springtide-loop", daemon=True)

    def subscribe(self, listener: Callable[[int, Step, PlatformView], None]) -> None:
        """Have `listener(seq, step, view)` called on the loop's thread for every journaled step, oldest first.

        Subscribe before `start`. The listener must be quick and must not raise.
        """
        self._listeners.append(listener)

    def keep(self, name: str, keeper: Keeper) -> None:
        """Have what a listener knows of earlier steps kept under that name. Call it before `start`."""
        self._keepers.keep(name, keeper)

    def follow(self, name: str, take: Callable[[bytes], None]) -> None:
        """Have `take` called with what is kept under a name if the platform begins at a snapshot of its state."""
        self._keepers.follow(name, take)

    def _make_upkeep(self, keep: Retention) -> JournalUpkeep:
        return JournalUpkeep(
            *(self._controller, self._journal, keep),
            kept=self._kept,
            kept_of_job=self._keepers.kept_of_job,
            crash_point=self._crash_point,
            pace=float(os.environ.get(UPKEEP_PACE, "1")),
        )

    def _kept(self) -> dict[str, bytes]:
        anchor = {} if self._last_anchor is None else {ANCHOR: msgspec.json.encode(self._last_anchor)}
        return anchor | self._keepers.kept()

    def _note_snapshot(self, seq: int, snapshot: PlatformSnapshot) -> None:
        self._keepers.take(snapshot.kept)
        self._upkeep.begin(seq, self._journal.last_now_s())

    def _take_anchor(self, kept: bytes) -> None:
        self._last_anchor = decode_json(kept, ClockAnchored)

    def start(self, on_stop: Callable[[], None]) -> None:
        """Recover from the journal and start the loop. `on_stop` is called once when the loop has ended."""
        self._on_stop = on_stop
        journal = self._journal
        seq = recover(
            self._controller,
            self._guarded_executor(),
            journal,
            on_step=self._notify,
            snapshots=journal.archive.snapshots(),
            on_snapshot=self._note_snapshot,
        )
        if seq != journal.newest.seq:
            raise JournalDamaged(
                seq + 1, f"the journal ends at step {journal.newest.seq}, of which no snapshot can be read"
            )
        self._controller.follow_days(journal.last_now_s())
        self._view = self._make_view(seq)
        self._snapshot = self._controller.snapshot(self.clock.now_s())
        if self._build is None:
            self._post_nodes()
        self._executor.post(PlatformStarted())
        self._thread.start()
        threading.Thread(target=self._watch_clock, name="springtide-clock", daemon=True).start()

    def _resume_clock(self) -> None:
        """Post the anchor before the executor recovers, so that it comes before the losses that this finds."""
        self._post_anchor(self.clock.resume(self._last_anchor, self._journal.last_now_s()))

    def _watch_clock(self) -> None:
        while not self._stopping.wait(_CLOCK_REVIEW_S):
            self._post_anchor(self.clock.review())

    def _post_anchor(self, anchor: ClockAnchored | None) -> None:
        if anchor is not None:
            # The machines of a cluster may have run on while its control plane was away.
            self._executor.post(anchor if self._build is None else replace(anchor, skipped_s=0.0))
        if self.clock.notice:
            LOG.warning("%s", self.clock.notice)

    def _post_nodes(self) -> None:
        """Post nodes that the journal does not know as joined, and nodes that are gone as lost."""
        known = self._controller.state.nodes
        for node_id in known:
            if node_id not in self._nodes:
                self._executor.post(NodeLost(node_id=node_id))
        for node_id, node in self._nodes.items():
            # The journal decides the label: a node that was on loan before the restart still is.
            if node_id not in known or replace(known[node_id], pool=node.pool) != node:
                self._executor.post(NodeJoined(node=node))

    def now_s(self) -> float:
        return self.clock.now_s()

    @property
    def wall_clock_offset_s(self) -> float:
        return self.clock.wall_offset_s

    def view(self) -> PlatformView:
        """The platform after its newest journaled step."""
        return self._view

    @property
    def restarted(self) -> str:
        """How the control plane before this one ended, if not in order; empty some minutes after the new start."""
        return self._restarted if time.monotonic() - self._started_at_s < _RESTART_SHOWN_S else ""

    @property
    def clock_notice(self) -> str:
        """What is wrong with the machine's wall clock, and what follows; empty if nothing is."""
        return self.clock.notice

    @property
    def trouble(self) -> str:
        """Why no decisions are made now; empty while they are."""
        if self.failure is not None:
            return f"the control loop has ended: {self.failure}"
        return self._watch.trouble

    def snapshot(self) -> Snapshot:
        """The snapshot that the policy would get at this instant, for what-if questions. Thread-safe."""
        return replace(self._snapshot, now_s=self.clock.now_s())

    def function_status(self, workload_id: WorkloadId) -> FunctionRunStatus | None:
        """Which functions run a job now; None for a job on machines and while no coordinator runs for the job."""
        return self._function_status(workload_id)

    def sharing(self) -> SharingStatus:
        """Which workloads share which device now, what is granted to each, and what enforces it. Thread-safe."""
        return self._sharing()

    def make_policy(self) -> Policy:
        """A new instance of the policy that decides on this platform."""
        return WithFunctions(WithinBudget(make_live_policy(self.policy_name), self.usd_per_device_hour))

    def post(self, event: Event) -> None:
        """Hand an event to the loop without waiting."""
        self._executor.post(event)

    def submit(self, event: Event, timeout_s: float = 10.0) -> int:
        """Hand an event to the loop and wait until it is durable. Returns its journal number.

        Raises BackendError after `timeout_s`; the event may still be recorded later.
        """
        ticket: Future[int] = Future()
        with self._tickets_lock:
            self._tickets[id(event)] = (event, ticket)
        self._executor.post(event)
        try:
            return ticket.result(timeout_s)
        except FutureTimeout:
            raise BackendError(
                f"the platform did not record the request within {timeout_s:.0f} s; ask for its state before repeating"
            ) from None
        finally:
            with self._tickets_lock:
                self._tickets.pop(id(event), None)

    def wait_change(self, after_seq: int, timeout_s: float) -> int:
        """Block until a step later than `after_seq` is journaled or the timeout passes. Returns the newest number."""
        with self._changed:
            self._changed.wait_for(lambda: self._view.seq > after_seq or self._stopping.is_set(), timeout_s)
            return self._view.seq

    def workload_dir(self, workload_id: WorkloadId) -> Path:
        return self.state_dir / "workloads" / workload_id

    def data_store_url(self) -> str:
        """The URL of the store for datasets. Raises InvalidRequest."""
        return data_store_url(self.state_dir) if self._build is None else self._build.store_url

    def cluster(self) -> ClusterStatus | None:
        """The status of the Kubernetes cluster; None for a platform on one machine. Thread-safe."""
        return None if self._build is None else self._build.cluster()

    def request_shutdown(self, *, stop_workers: bool) -> None:
        """Ask the loop to end: once jobs have checkpointed and replicas are gone, or at once."""
        if self._stopping.is_set():
            return
        self.stop_workers = stop_workers
        self._end_by_s = time.monotonic() + (LONGEST_DRAIN_S if stop_workers else 0.0)
        self._stopping.set()
        # With no workers to stop, PlatformStarted changes nothing; it only wakes the loop.
        self._executor.post(PlatformStopping() if stop_workers else PlatformStarted())

    def _guarded_executor(self) -> CrashPoints:
        devices: frozenset[DeviceId] | None = None
        if self._build is None:
            devices = frozenset(device.device_id for node in self._nodes.values() for device in node.devices)
        return CrashPoints(
            self._executor, self._crash_point, self._is_draining, devices, self._watch, self._before_recovery
        )

    def _before_recovery(self) -> None:
        if isinstance(self.source_store, DirectorySources):
            jobs, services = self._controller.state.jobs.live.items(), self._controller.state.services.live.items()
            addresses = {workload_id: record.job.entrypoint.source_path for workload_id, record in jobs}
            addresses |= {workload_id: record.service.entrypoint.source_path for workload_id, record in services}
            self.source_store.check_not_moved(addresses)
        self._resume_clock()
        if self._build is not None:
            # Posted before the recovery, so that events which the recovery produces come after them.
            self._post_nodes()

    def _is_draining(self) -> float | None:
        """Until when (platform clock) the loop may wait for workers; None unless the platform is shutting down."""
        if not self._stopping.is_set():
            return None
        return self.clock.now_s() + max(0.0, self._end_by_s - time.monotonic())

    def _is_over(self) -> bool:
        if not self._stopping.is_set():
            return False
        state = self._controller.state
        is_drained = state.is_stopping and not state.holders()
        return is_drained or time.monotonic() >= self._end_by_s

    def join(self, timeout_s: float) -> None:
        """Wait for the loop to end, then close the journal and unlock the directory."""
        self._thread.join(timeout_s)
        self.quarantine.close()
        self._journal.close()
        self._claim.close()

    def _main(self) -> None:
        try:
            run(
                self._controller,
                self._guarded_executor(),
                self.clock,
                CrashingJournal(self._journal, self._crash_point),
                until=self._is_over,
                on_step=self._on_step,
                on_journal_error=self._on_journal_error,
                gather_progress_s=_GATHER_PROGRESS_S,
                upkeep=self._upkeep,
            )
            self._upkeep.cut(self.clock.now_s())
        except Superseded as error:
            self.failure = error
            if self._build is not None:
                self._build.on_superseded(error)
        except Exception as error:
            LOG.exception("the control loop failed")
            self.failure = error
        finally:
            # After a failure workers go on: the next control plane adopts them.
            self.stop_workers = self.stop_workers and self.failure is None
            self._stopping.set()
            with self._changed:
                self._changed.notify_all()
            self._on_stop()

    def _note_intake_error(self, error: JournalError) -> None:
        """The journal is away: show it until the loop has written a step, and have it write one."""
        if not self.trouble:
            self._on_journal_error(error)
            self._executor.post(self.clock.anchor())

    def _on_journal_error(self, error: JournalError) -> None:
        LOG.error("decisions wait: %s", error)
        self._watch.note_journal_error(error)

    def _on_policy_error(self, error: PolicyError) -> None:
        LOG.error("policy %s is broken, every workload keeps its devices: %s", self.policy_name, error)
        self._watch.note_policy_error(error)

    def _on_step(self, seq: int, step: Step) -> None:
        self._watch.note_durable()
        self._view = self._make_view(seq)
        # Taken on the loop's own thread, so that the state cannot change during the copy.
        self._snapshot = self._controller.snapshot(step.now_s)
        self._notify(seq, step)
        with self._tickets_lock:
            for event in step.events:
                known = self._tickets.get(id(event))
                if known is not None and known[0] is event:
                    known[1].set_result(seq)
        with self._changed:
            self._changed.notify_all()

    def _notify(self, seq: int, step: Step) -> None:
        for event in step.events:
            if isinstance(event, ClockAnchored):
                self._last_anchor = event
        for listener in self._listeners:
            listener(seq, step, self._view)

    def _make_view(self, seq: int) -> PlatformView:
        state = self._controller.state
        return PlatformView(
            seq=seq,
            now_s=self.clock.now_s(),
            jobs=dict(state.jobs),
            services=dict(state.services),
            nodes=tuple(state.nodes.values()),
            policy=self.policy_name,
            future=self._controller.future,
            ended=self._journal.ended,
            claims=self._controller.claims,
            conditions=self._controller.conditions,
            price_s=self._controller.price_s,
            prices_s=self._controller.prices_s,
            outcomes=state.outcomes,
        )


class _TriedByTheLoop:
    """The journal's metadata; `on_error` is called when it cannot be written."""

    def __init__(self, journal: DurableJournal, on_error: Callable[[JournalError], None]) -> None:
        self.meta = journal.meta
        self._set_meta = journal.set_meta
        self._on_error = on_error

    def set_meta(self, key: str, value: str) -> None:
        try:
            self._set_meta(key, value)
        except Superseded:
            raise
        except JournalError as error:
            self._on_error(error)
            raise


def _founding_times(journal: DurableJournal) -> tuple[float, float]:
    """When the platform was created, in Unix time, and the local midnight before that on its own clock."""
    is_new = journal.last_now_s() == 0.0
    began = journal.meta(CLOCK_BEGAN)
    if began is None:
        began = repr(time.time())
        journal.set_meta(CLOCK_BEGAN, began)
    midnight = journal.meta(MIDNIGHT)
    if midnight is None:
        midnight = repr(midnight_before_s(float(began)) - float(began))
        if is_new:
            # Stored, so that a replay in another time zone gets the same times of day.
            journal.set_meta(MIDNIGHT, midnight)
    return float(began), float(midnight)


def _refuse_foreign_workloads(state_dir: Path, journal: DurableJournal) -> None:
    """Raise JournalError if the journal is new and the directory has workloads, whose journal is gone."""
    folder = state_dir / "workloads"
    found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if found and journal.last_now_s() == 0.0 and journal.meta(CLOCK_BEGAN) is None:
        journal.close()
        raise JournalError(
            f"the journal of {state_dir} is empty, but the directory has {len(found)} workloads ({found[0]}, ...), "
            "which a platform without their journal would not know: put the journal back from a copy, or move "
            "the folder workloads away"
        )
