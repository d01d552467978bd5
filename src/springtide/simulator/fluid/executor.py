"""The executor of long traces: without processes and messages; a job's progress is a number that grows with time."""

from __future__ import annotations

from collections.abc import Sequence

from springtide.core.actions import (
    Action,
    AdmitJob,
    DrainNode,
    EndJob,
    LabelNode,
    PreemptJob,
    ResizeJob,
    SetShare,
    StartReplica,
    StopReplica,
)
from springtide.core.events import (
    Event,
    JobFinished,
    JobSubmitted,
    LoadObserved,
    NodeJoined,
    NodeLost,
    ReplicaLost,
    ReplicaReady,
    ReplicaStopped,
)
from springtide.core.ports import Standing
from springtide.core.resources import Node, NodeId
from springtide.core.workload import ReplicaId, TrainingJob, WorkloadId
from springtide.simulator.clock import FluidAgenda, VirtualClock
from springtide.simulator.fluid.faults import NodeFaults
from springtide.simulator.fluid.nodes import FluidNodes
from springtide.simulator.fluid.rules import OverheadRule, ProfiledSpeeds, Speeds, Times
from springtide.simulator.fluid.runs import FluidReplica, FluidRun, UtilisationTimeline, direction_of
from springtide.simulator.fluid.services import FluidServices
from springtide.simulator.shared_devices import SharedDevices

# A turn of the loop in which nothing happens takes this long, as a real clock does not stand still between turns.
TURN_S = 0.001
# After this many turns in a row in which nothing trains and no arrival is left, the run is stuck and ends.
MAX_IDLE_TURNS = 10_000


class FluidExecutor:
    """An Executor whose actions take effect in the instant in which they are started, apart from the overhead.

    `arrivals` are submitted at their moments; jobs bring their length and their profile. A group forms at once and
    stands still for its overhead; a job that is changed within its overhead pays anew. A group whose worker is lost
    stands still until the platform forms it anew. With `reports_progress` running jobs report what they measure;
    without it a run takes far fewer turns. `timed_events` are what owners and gateways report at their moments
    (services deployed, bounds set, loads observed); `times` how long services and preempted jobs take. `is_over` says
    that nothing will happen any more; `agenda.num_run` counts the agenda's entries that were run, without actions.
    """

    def __init__(
        self,
        clock: VirtualClock,
        nodes: Sequence[Node],
        arrivals: Sequence[tuple[float, TrainingJob]] = (),
        *,
        rule: OverheadRule | None = None,
        speeds: Speeds | None = None,
        faults: NodeFaults | None = None,
        reports_progress: bool = False,
        timed_events: Sequence[tuple[float, Event]] = (),
        times: Times | None = None,
    ) -> None:
        self.clock = clock
        self.agenda = FluidAgenda()
        self._at = self.agenda.at
        self.rule = rule or OverheadRule(name="none")
        self.speeds = speeds or ProfiledSpeeds(devices_per_node=max((len(node.devices) for node in nodes), default=1))
        self.runs: dict[WorkloadId, FluidRun] = {}
        self.timeline = UtilisationTimeline()
        self.is_over = False
        self.num_faults, self.num_open = 0, len(arrivals)
        self._num_to_come = len(arrivals) + len(timed_events)
        self._reports_progress = reports_progress
        self._faults = faults
        self.nodes = FluidNodes(nodes)
        self._times = times or Times()
        self.sharing = SharedDevices(self._change_pace)
        self._sharers = dict[ReplicaId, FluidRun]()
        self._services = FluidServices(clock, self._times, self._at, self.post, self._record_utilisation, self.sharing)
        self._inbox: list[Event] = [NodeJoined(node=node) for node in nodes]
        self._unacknowledged: list[Event] = []
        self._training = dict[WorkloadId, FluidRun]()
        self._num_held = self._num_progressing = self._num_idle_turns = 0
        self._efficiency = 0.0
        for at_s, job in arrivals:
            self._at(at_s, self._submit, job)
        for at_s, event in timed_events:
            self._at(at_s, self._post_timed_event, event)
        for node_id, at_s in faults.first_failures_s(self.nodes) if faults is not None else ():
            self._at(at_s, self._fail_node, node_id)
        if reports_progress:
            self._at(clock.now_s() + self.speeds.report_every_s, self._report_all, None)

    @property
    def is_empty(self) -> bool:
        """Whether no worker holds a device and no event waits to be returned."""
        return not self._num_held and not self._inbox

    # --- Executor ----------------------------------------------------------------------------------------------------

    def recover(self, standing: Standing) -> None:
        """Adopt what still runs, end what the journal does not know, report losses and all unacknowledged events."""
        self._inbox = [*self._unacknowledged, *self._inbox]
        self._unacknowledged = []
        for node_id, pool in standing.labels.items():
            self.nodes.label(node_id, pool)
        named = {start.replica_id for start in standing.replicas}
        for run in self.runs.values():
            for replica_id in [replica_id for replica_id in run.replicas if replica_id not in named]:
                self._release(run, replica_id)
        self._services.keep_only(named)
        restarted = {action.replica_id for action in standing.actions if isinstance(action, StartReplica)}
        for start in standing.replicas:
            if start.share is not None:
                self.sharing.set_share(start.replica_id, start.share)
            known = self.runs.get(start.workload_id)
            lives = start.replica_id in self._services or (known is not None and start.replica_id in known.replicas)
            if not lives and start.replica_id not in restarted:
                why = "it ended meanwhile"
                self._inbox.append(ReplicaLost(workload_id=start.workload_id, replica_id=start.replica_id, reason=why))
        for action in standing.actions:
            self.start(action)

    def start(self, action: Action) -> None:
        """Carry out an action; a repeated or outdated one changes nothing."""
        match action:
            case StartReplica():
                self._start_replica(action)
            case StopReplica():
                self._stop_replica(action)
            case ResizeJob():
                self._resize(action)
            case PreemptJob():
                self._preempt(action)
            case SetShare():
                self.sharing.set_share(action.replica_id, action.share)
            case EndJob():
                self._end(action)
            case LabelNode():
                self.nodes.label(action.node_id, action.pool)
            case AdmitJob() | DrainNode():
                pass

    def wait(self, deadline_s: float | None) -> Sequence[Event]:
        """Advance virtual time until there is an event, or to the deadline."""
        clock, agenda = self.clock, self.agenda
        began_s = clock.now_s()
        while not self._inbox:
            next_s = agenda.next_s
            if next_s is None and deadline_s is None:
                self.is_over = True
                break
            if deadline_s is not None and (next_s is None or deadline_s < next_s):
                if clock.now_s() == began_s:
                    moment_s = max(deadline_s, began_s + TURN_S)
                    clock.advance_to(moment_s if next_s is None else min(moment_s, next_s))
                else:
                    clock.advance_to(deadline_s)
                self._check_stuck()
                break
            assert next_s is not None
            clock.advance_to(next_s)
            agenda.run_due(clock.now_s())
            if not self._inbox and self._check_stuck():
                break
        agenda.run_due(clock.now_s())
        events, self._inbox = self._inbox, []
        self._unacknowledged += events
        return events

    def acknowledge(self, events: Sequence[Event]) -> None:
        """The events are durable: they need not be reported again."""
        if len(events) == len(self._unacknowledged):
            self._unacknowledged.clear()
            return
        known = set(map(id, events))
        self._unacknowledged = [event for event in self._unacknowledged if id(event) not in known]

    def post(self, event: Event) -> None:
        """Hand an event to the control loop, as the API does for owners."""
        self._inbox.append(event)

    # --- time --------------------------------------------------------------------------------------------------------

    def _check_stuck(self) -> bool:
        """Whether nothing can happen any more although the policy keeps setting moments to be asked again."""
        if self._num_progressing or self._num_to_come or self.nodes.any_down:
            self._num_idle_turns = 0
        else:
            self._num_idle_turns += 1
            self.is_over = self.is_over or self._num_idle_turns > MAX_IDLE_TURNS
        return self.is_over

    def _record_utilisation(self) -> None:
        # A shared device counts once, and as one of services where a replica of a service is among its tenants.
        num_serving, num_extra_tenants = self._services.num_held, self.sharing.num_extra_tenants
        num_held, num_serving = (
            max(0, self._num_held - num_extra_tenants),
            num_serving - max(0, num_extra_tenants - self._num_held),
        )
        self.timeline.note(self.clock.now_s(), num_held, len(self._training), self._efficiency, num_serving)

    # --- jobs --------------------------------------------------------------------------------------------------------

    def _submit(self, job: TrainingJob) -> None:
        self._num_to_come -= 1
        self.add_job(job)
        self._inbox.append(JobSubmitted(job=job))

    def _post_timed_event(self, event: Event) -> None:
        self._num_to_come -= 1
        if isinstance(event, LoadObserved):
            self._services.note_load(event)
        self._inbox.append(event)

    def add_job(self, job: TrainingJob, *, done_steps: float = 0.0) -> FluidRun:
        """Open the run of a job that has done `done_steps`. Its true speed is drawn here."""
        run = self.runs[job.job_id] = self.speeds.open_run(job, self.clock.now_s(), done_steps)
        return run

    def _resize(self, action: ResizeJob) -> None:
        run = self.runs.get(action.job_id)
        if run is None or run.has_ended or action.generation <= run.generation:
            return
        now_s, before = self.clock.now_s(), run.members
        self._halt(run, now_s)
        named = action.replica_ids
        assert all(replica_id in run.replicas for replica_id in named), (
            f"{action.job_id}: a group of workers that are gone"
        )
        for replica_id in before:
            if replica_id not in named:
                self._release(run, replica_id)
                self._inbox.append(ReplicaStopped(workload_id=action.job_id, replica_id=replica_id))
        direction = direction_of(run, before, action)
        # The same workers with another batch size go on at once, or when the pause of an earlier change is over.
        left_s = max(0.0, run.resumed_s - now_s) if named == before and not action.forced else None
        run.count_change(direction, now_s, is_paid=left_s is None)
        left_s = left_s if action.functions == run.functions else None
        run.batch_size, run.functions = action.global_batch_size, action.functions
        pause_s = self._form(run, named, action.generation, now_s, left_s)
        self._inbox.append(run.resized_event(pause_s, direction))

    def _form(
        self, run: FluidRun, members: tuple[ReplicaId, ...], generation: int, now_s: float, left_s: float | None
    ) -> float:
        """Let these workers train after their overhead, or after `left_s` of it. Returns the pause."""
        devices = [run.replicas[replica_id].device_id for replica_id in members]
        bits, run.placement = self.nodes.group(devices, keeps_order=self.speeds.rings_by_rank)
        run.accelerators = self.nodes.accelerators_of(devices)
        pause_s = left_s
        if pause_s is None:
            pause_s = self.rule.pause_s(run, len(members), is_fresh=self.nodes.is_fresh(bits))
        run.members, run.generation, run.device_bits = members, generation, bits
        run.formed_s = now_s
        run.resumed_s = now_s + pause_s
        run.token += 1
        self._training[run.job.job_id] = run
        self.sharing.set_demand(members, 1.0)
        self._pace(run, run.resumed_s)
        if run.rate > 0.0:
            self._num_progressing += 1
            if self._reports_progress and left_s is None:
                self._at(run.since_s + self.speeds.first_report_s(run), self._report_first, (run, run.token))
        return pause_s

    def _pace(self, run: FluidRun, since_s: float) -> None:
        """From `since_s` on the group trains at its present true speed, until that changes or the job is done."""
        pace, share = self.speeds.pace(run), self.sharing.slowest(run.members)
        run.since_s = since_s
        run.rate, run.efficiency, run.boundary = pace.rate * share, pace.efficiency * share, pace.until
        self._efficiency += run.efficiency
        run.is_scattered = pace.is_scattered
        self._record_utilisation()
        if run.rate > 0.0:
            run.boundary_s = self.speeds.boundary_s(run)
            self._at(self.speeds.observed_s(run), self._reach_boundary, (run, run.token))

    def _change_pace(self, replica_id: ReplicaId) -> None:
        """A worker computes at another rate than before, because other tenants of its device came, went or changed."""
        run, now_s = self._sharers.get(replica_id), self.clock.now_s()
        if run is None or replica_id not in run.members:
            return
        run.settle(now_s)
        run.commit_checkpoints(now_s)
        self._efficiency -= run.efficiency
        run.token += 1
        self._pace(run, max(now_s, run.since_s))
        if self._reports_progress:
            self._at(run.since_s + self.speeds.first_report_s(run), self._report_first, (run, run.token))

    def _halt(self, run: FluidRun, now_s: float) -> None:
        """The group stands still from now on: settle its progress and invalidate its agenda entries."""
        if not run.members:
            return
        self.sharing.set_demand(run.members, 0.0)
        if now_s > run.formed_s:
            # A set of devices that was held for one instant only does not count as used.
            self.nodes.use(run.device_bits)
        self._num_progressing -= run.rate > 0.0
        run.stand_still(now_s)
        del self._training[run.job.job_id]
        self._efficiency = self._efficiency - run.efficiency if self._training else 0.0
        self._record_utilisation()

    def _reach_boundary(self, entry: tuple[FluidRun, int]) -> None:
        """A job has reached the boundary of its pace, or its end."""
        run, token = entry
        if token != run.token:
            return
        if run.boundary < run.length:
            run.settle(self.clock.now_s())
            run.done_steps = run.boundary
            self._efficiency -= run.efficiency
            self._pace(run, run.boundary_s)
            return
        self._halt(run, self.clock.now_s())
        run.done_steps = run.length
        self._inbox.append(JobFinished(job_id=run.job.job_id, generation=run.generation, step=run.total_steps))

    def _preempt(self, action: PreemptJob) -> None:
        run = self.runs.get(action.job_id)
        if run is None or run.has_ended or action.generation <= run.generation:
            return
        now_s = self.clock.now_s()
        self._halt(run, now_s)
        run.generation = action.generation
        run.num_preemptions += 1
        run.saving = action.replica_ids
        save_s = self._times.save_s(run.job)
        if save_s > 0.0:
            is_saved = save_s <= action.grace_s
            self._at(
                now_s + min(save_s, action.grace_s), self._finish_preemption, (run, run.generation, now_s, is_saved)
            )
        else:
            self._finish_preemption((run, run.generation, now_s, True))

    def _finish_preemption(self, entry: tuple[FluidRun, int, float, bool]) -> None:
        """The checkpoint of a preempted job is written, or its grace is over: its workers stop."""
        run, generation, since_s, is_saved = entry
        if run.has_ended or run.generation != generation or not run.saving:
            return
        leavers, run.saving = run.saving, ()
        if is_saved:
            run.saved_steps = run.done_steps
            self._inbox.append(run.checkpoint_event(run.step))
        else:
            self._inbox.append(run.lose_unsaved())
        for replica_id in [leaver for leaver in leavers if leaver in run.replicas]:
            run.paused_device_s += self.clock.now_s() - since_s
            self._release(run, replica_id)
            self._inbox.append(ReplicaStopped(workload_id=run.job.job_id, replica_id=replica_id))

    def _end(self, action: EndJob) -> None:
        run = self.runs.get(action.job_id)
        if run is None or run.has_ended:
            return
        self._halt(run, self.clock.now_s())
        run.state, run.reason, run.ended_s = action.state, action.reason, self.clock.now_s()
        self.num_open -= 1
        for replica_id in list(run.replicas):
            self._release(run, replica_id)
            self._inbox.append(ReplicaStopped(workload_id=action.job_id, replica_id=replica_id))

    # --- replicas ----------------------------------------------------------------------------------------------------

    def _start_replica(self, action: StartReplica) -> None:
        replica_id, job = action.replica_id, action.workload
        if not isinstance(job, TrainingJob):
            self._services.start(action, is_down=self.nodes.is_down(action.device_id))
            return
        run = self.runs.get(job.job_id)
        if run is None:
            run = self.add_job(job)
        if run.has_ended or replica_id in run.replicas or replica_id in run.gone:
            return
        now_s = self.clock.now_s()
        if self.nodes.is_down(action.device_id):
            run.gone.add(replica_id)
            self._inbox.append(
                ReplicaLost(workload_id=job.job_id, replica_id=replica_id, reason="it could not be started")
            )
            return
        if not run.replicas:
            run.begin_afresh(now_s, action.restore.step if action.restore is not None else 0)
        run.replicas[replica_id] = FluidReplica(replica_id, action.device_id, now_s)
        if action.share is not None:
            self._sharers[replica_id] = run
            self.sharing.hold(replica_id, action.device_ids, action.share)
        self._num_held += 1
        self._record_utilisation()
        if self.rule.cold_start_s:
            self._at(now_s + self.rule.cold_start_s, self._warm_up, (run, replica_id))
        else:
            self._inbox.append(ReplicaReady(workload_id=job.job_id, replica_id=replica_id))

    def _warm_up(self, entry: tuple[FluidRun, ReplicaId]) -> None:
        run, replica_id = entry
        if replica_id in run.replicas:
            self._inbox.append(ReplicaReady(workload_id=run.job.job_id, replica_id=replica_id))

    def _stop_replica(self, action: StopReplica) -> None:
        replica_id, run = action.replica_id, self.runs.get(action.workload_id)
        if run is None:
            self._services.stop(action)
            return
        if replica_id in run.gone or (run.has_ended and replica_id not in run.replicas):
            return
        self._remove_workers(run, (replica_id,))
        self._inbox.append(ReplicaStopped(workload_id=action.workload_id, replica_id=replica_id))

    def _release(self, run: FluidRun, replica_id: ReplicaId) -> None:
        replica = run.replicas.pop(replica_id, None)
        if replica is None:
            return
        share = self.sharing.share_of(replica_id)
        run.device_s += (self.clock.now_s() - replica.started_s) * (1.0 if share is None else share.request)
        self.sharing.release(replica_id)
        self._sharers.pop(replica_id, None)
        self._num_held -= 1
        self._record_utilisation()
        if run.has_ended:
            run.gone.clear()
        else:
            run.gone.add(replica_id)

    # --- faults ------------------------------------------------------------------------------------------------------

    def lose_replica(self, replica_id: ReplicaId) -> None:
        """Let one worker die although no action asked it to end."""
        if replica_id in self._services:
            self._services.lose(replica_id)
            return
        for run in self.runs.values():
            if replica_id in run.replicas:
                self._lose_workers(run, (replica_id,))
                self._inbox.append(
                    ReplicaLost(workload_id=run.job.job_id, replica_id=replica_id, reason="its process ended")
                )
                return

    def _lose_workers(self, run: FluidRun, lost: Sequence[ReplicaId]) -> None:
        run.num_losses += 1
        self._remove_workers(run, lost)

    def _remove_workers(self, run: FluidRun, lost: Sequence[ReplicaId]) -> None:
        """Remove workers: their group stands still, and without a survivor the job loses what no checkpoint holds."""
        members = run.members
        if set(lost) & set(members):
            self._halt(run, self.clock.now_s())
            if set(members) <= set(lost):
                self._inbox.append(run.lose_unsaved())
        elif run.saving and set(run.saving) & set(run.replicas) <= set(lost):
            # The last of the workers that were writing the checkpoint.
            run.saving = ()
            self._inbox.append(run.lose_unsaved())
        for replica_id in lost:
            self._release(run, replica_id)

    def _fail_node(self, node_id: NodeId) -> None:
        assert self._faults is not None
        self.num_faults += 1
        for run in self.runs.values():
            if not run.has_ended:
                here = [r.replica_id for r in run.replicas.values() if self.nodes.node_of[r.device_id] == node_id]
                if here:
                    self._lose_workers(run, here)
        self.nodes.lose(node_id)
        self._services.lose_devices(self.nodes.is_down)
        self._inbox.append(NodeLost(node_id=node_id))
        self._at(self.clock.now_s() + self._faults.draw_repair_s(node_id), self._repair_node, node_id)

    def _repair_node(self, node_id: NodeId) -> None:
        assert self._faults is not None
        self._inbox.append(NodeJoined(node=self.nodes.bring_back(node_id)))
        self._at(self.clock.now_s() + self._faults.draw_life_s(node_id), self._fail_node, node_id)

    # --- progress ----------------------------------------------------------------------------------------------------

    def _report_all(self, _: None) -> None:
        now_s = self.clock.now_s()
        for run in self._training.values():
            if run.rate and now_s > run.since_s:
                self._report(run, now_s)
        self._at(now_s + self.speeds.report_every_s, self._report_all, None)

    def _report_first(self, entry: tuple[FluidRun, int]) -> None:
        run, token = entry
        if token == run.token:
            self._report(run, self.clock.now_s())

    def _report(self, run: FluidRun, now_s: float) -> None:
        run.settle(now_s)
        self._inbox.append(self.speeds.report(run))
