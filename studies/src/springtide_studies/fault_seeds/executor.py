"""The executor whose machines are models. It dies with its control plane; the Machine behind it lives on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from springtide.core.actions import (
    Action,
    DrainNode,
    EndJob,
    LabelNode,
    PreemptJob,
    ResizeJob,
    SetShare,
    StartReplica,
    StopReplica,
)
from springtide.core.events import CheckpointCommitted, Event, NodeJoined, NodeLost, ReplicaLost, ReplicaStopped
from springtide.core.ports import Standing
from springtide.core.resources import NodeId
from springtide.core.shares import Share
from springtide.core.wire.workers import FenceOrder, FormGroup, Preempt, Stop
from springtide.core.workload import ReplicaId, TrainingJob, WorkloadId
from springtide_studies.fault_seeds.machine import Machine, Process

# A preempted worker that does not end by itself is killed this long after its grace.
_OVERTIME_S = 1.0
# A turn of the loop in which nothing happens takes this long, as a real clock does not stand still between turns.
TURN_S = 0.001


class SimExecutor:
    """An Executor over a Machine. Each control plane has its own; a new one takes the machine over by `recover`."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.is_over = False
        self.late_by_s = 0.0
        self._inbox: list[Event] = []
        self._waiting: dict[int, tuple[Event, list[Callable[[], None]]]] = {}
        self._asked: set[ReplicaId] = set()
        self._given_up: set[ReplicaId] = set()
        self._ended: set[WorkloadId] = set()
        self._lost_nodes: dict[NodeId, NodeLost] = {}
        machine.reconnect(self)

    # --- Executor ----------------------------------------------------------------------------------------------------

    def recover(self, standing: Standing) -> None:
        """Adopt what still runs, fence what should not run, report what is gone, repeat what may have been
        interrupted."""
        restartable = {action.replica_id for action in standing.actions if isinstance(action, StartReplica)}
        asked = _asked(standing)
        named, shares = set(), list[tuple[Process, Share]]()
        self._report_checkpoints(standing)
        for node_id, pool in standing.labels.items():
            self.machine.label_node(node_id, pool)
        for start in standing.replicas:
            named.add(start.replica_id)
            process = self.machine.processes.get(start.replica_id)
            if process is None and start.replica_id in restartable:
                continue
            if process is None or not process.is_alive or process.is_fenced:
                self._report_gone(start.workload_id, start.replica_id, start.replica_id in asked, "it ended meanwhile")
                continue
            if start.share is not None:
                shares.append((process, start.share))
            if not process.is_ready:
                self._watch_start(process)
        for process in self.machine.living():
            if process.replica_id not in named and not process.is_fenced:
                self._fence(process)
        # The last changes of shares may have been interrupted.
        self.machine.set_shares(shares)
        for action in standing.actions:
            self.start(action)

    def start(self, action: Action) -> None:
        """Begin an action; a repeated or outdated one changes nothing."""
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
                self._set_share(action)
            case EndJob():
                self._ended.add(action.job_id)
            case DrainNode():
                # The control plane starts nothing on draining nodes; on the machines a drain is only a mark.
                self.machine.say("{} is marked as on its way to {}", action.node_id, action.pool)
            case LabelNode():
                self.machine.label_node(action.node_id, action.pool)

    def wait(self, deadline_s: float | None) -> Sequence[Event]:
        """Advance virtual time until something is reported, or to the deadline."""
        agenda, clock = self.machine.agenda, self.machine.clock
        if self.late_by_s:
            # The machine slept, or its control plane got no CPU time: it wakes up late and finds many events.
            late_by_s, self.late_by_s = self.late_by_s, 0.0
            agenda.run_until(clock.now_s() + late_by_s)
        while not self._inbox and not self.is_over:
            next_s = agenda.next_s
            if next_s is None and deadline_s is None:
                self.is_over = True
            elif next_s is None or (deadline_s is not None and deadline_s < next_s):
                assert deadline_s is not None
                clock.advance_to(max(deadline_s, clock.now_s() + TURN_S))
                break
            else:
                agenda.run_next()
        now_s = clock.now_s()
        while not self.is_over and agenda.next_s is not None and agenda.next_s <= now_s:
            agenda.run_next()
        events, self._inbox = self._inbox, []
        return events

    def acknowledge(self, events: Sequence[Event]) -> None:
        """Tell the senders of these events that they are durable."""
        for event in events:
            _, tellers = self._waiting.pop(id(event), (event, []))
            for tell in tellers:
                tell()

    # --- what comes in -----------------------------------------------------------------------------------------------

    def post(self, event: Event, on_acknowledged: Callable[[], None] | None = None) -> None:
        """Hand an event to the control loop."""
        self._inbox.append(event)
        if on_acknowledged is not None:
            self._waiting.setdefault(id(event), (event, []))[1].append(on_acknowledged)

    def post_node(self, event: NodeJoined | NodeLost) -> None:
        """Report a node. Between its loss and the moment at which its return is known, nothing is started on it."""
        if isinstance(event, NodeLost):
            self._lost_nodes[event.node_id] = event
            self.post(event)
            return
        node_id = event.node.node_id
        loss = self._lost_nodes.get(node_id)

        def note_known() -> None:
            # The node may have been lost again since its return was reported.
            if self._lost_nodes.get(node_id) is loss:
                self._lost_nodes.pop(node_id, None)

        self.post(event, note_known)

    def take_report(self, event: Event, process: Process, seq: int) -> None:
        """A worker's report has arrived."""
        if process.replica_id in self._given_up:
            return
        if seq:
            self.post(event, lambda: self.machine.settle_report(process, seq))
        else:
            self.post(event)

    def note_exit(self, process: Process) -> None:
        """A process has ended: as it was asked to, or not."""
        if process.replica_id in self._given_up:
            return
        was_asked = process.replica_id in self._asked or process.has_left
        self._report_gone(process.workload_id, process.replica_id, was_asked, "its process ended")

    def note_silence(self, process: Process) -> None:
        """A worker has been silent for too long: give it up, kill it, report it lost."""
        if process.replica_id in self._given_up:
            return
        self._given_up.add(process.replica_id)
        process.is_fenced = True
        self.machine.say("{} is given up", process.replica_id)
        self.machine.kill(process, "it was silent for too long")
        if process.is_alive and process.run is not None:
            process.run.lose_member(process)
        self._report_gone(process.workload_id, process.replica_id, False, "it was silent for too long")

    def _report_gone(self, workload_id: WorkloadId, replica_id: ReplicaId, was_asked: bool, reason: str) -> None:
        if was_asked:
            self.post(ReplicaStopped(workload_id=workload_id, replica_id=replica_id))
        else:
            self.post(ReplicaLost(workload_id=workload_id, replica_id=replica_id, reason=reason))

    def _report_checkpoints(self, standing: Standing) -> None:
        """Report the newest checkpoints: their writers may have ended while no control plane was running."""
        restored = {start.workload_id: start.restore.step for start in standing.replicas if start.restore is not None}
        for job_id, generation in standing.generations.items():
            run = self.machine.runs.get(job_id)
            found = None if run is None else run.store.newest()
            if found is None or found.generation > generation or found.step <= restored.get(job_id, -1):
                continue
            self.post(
                CheckpointCommitted(
                    job_id=job_id,
                    generation=found.generation,
                    step=found.step,
                    path=found.path,
                    num_bytes=found.num_bytes,
                )
            )

    # --- what goes out -----------------------------------------------------------------------------------------------

    def _is_current(self) -> bool:
        return self.machine.link is self

    def _start_replica(self, action: StartReplica) -> None:
        if action.replica_id in self.machine.processes or action.workload_id in self._ended:
            return
        if isinstance(action.workload, TrainingJob):
            self.machine.run_of(action.workload).store.raise_fence(action.generation)
        is_lost = self.machine.node_of.get(action.device_id) in self._lost_nodes
        process = None if is_lost else self.machine.spawn(action)
        if process is None:
            lost = ReplicaLost(
                workload_id=action.workload_id, replica_id=action.replica_id, reason="it could not be started"
            )
            self.machine.agenda.after(
                self.machine.delays.spawn_s, lambda: self.post(lost) if self._is_current() else None
            )
            return
        self._watch_start(process)

    def _watch_start(self, process: Process) -> None:
        self.machine.agenda.after(self.machine.delays.start_timeout_s, lambda: self._check_start(process))

    def _check_start(self, process: Process) -> None:
        if self._is_current() and process.is_alive and not process.is_ready and not process.is_fenced:
            self.machine.kill(process, "it did not get ready in time")

    def _stop_replica(self, action: StopReplica) -> None:
        process = self.machine.processes.get(action.replica_id)
        if process is None:
            self.post(ReplicaStopped(workload_id=action.workload_id, replica_id=action.replica_id))
            return
        self._end(process, Stop(grace_s=action.grace_s), action.grace_s)

    def _set_share(self, action: SetShare) -> None:
        # Like a label a share is an entry in the machines' records: in force at once, and never lost as a message.
        process = self.machine.processes.get(action.replica_id)
        if process is not None:
            self.machine.set_shares([(process, action.share)])

    def _end(self, process: Process, order: Stop | Preempt, limit_s: float) -> None:
        self._asked.add(process.replica_id)
        if not process.is_alive or process.is_fenced:
            return
        self.machine.order(process, order, self._is_current)
        self.machine.agenda.after(limit_s, lambda: self._kill_overdue(process))

    def _kill_overdue(self, process: Process) -> None:
        if not self._is_current() or not process.is_alive or process.is_fenced:
            return
        if process.is_stalled and process.is_unkillable:
            self.note_silence(process)
        else:
            self.machine.kill(process, "its grace is over")

    def _resize(self, action: ResizeJob) -> None:
        run = self.machine.runs.get(action.job_id)
        if run is None or action.job_id in self._ended:
            return
        if action.forced:
            run.store.raise_fence(action.generation)
        order = FormGroup(
            generation=action.generation,
            members=action.replica_ids,
            rendezvous="",
            forced=action.forced,
            global_batch_size=action.global_batch_size,
        )
        named = set(action.replica_ids)
        for process in self.machine.of_workload(action.job_id):
            if process.replica_id in named or process.is_member:
                self.machine.order(process, order, self._is_current)

    def _preempt(self, action: PreemptJob) -> None:
        for replica_id in action.replica_ids:
            process = self.machine.processes.get(replica_id)
            if process is None:
                self.post(ReplicaStopped(workload_id=action.job_id, replica_id=replica_id))
            else:
                order = Preempt(generation=action.generation, grace_s=action.grace_s)
                self._end(process, order, action.grace_s + _OVERTIME_S)

    def _fence(self, process: Process) -> None:
        self.machine.say("{} is fenced: the journal does not know it", process.replica_id)
        self._given_up.add(process.replica_id)
        self.machine.order(process, FenceOrder(reason="unknown"), self._is_current)


def _asked(standing: Standing) -> set[ReplicaId]:
    """The replicas that were asked to end before the restart."""
    asked: set[ReplicaId] = set()
    for action in standing.actions:
        if isinstance(action, StopReplica):
            asked.add(action.replica_id)
        elif isinstance(action, PreemptJob):
            asked.update(action.replica_ids)
    return asked
