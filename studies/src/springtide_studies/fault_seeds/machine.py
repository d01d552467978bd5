"""What outlives the control plane: nodes, worker processes, their links and their disks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

from msgspec.structs import replace

from springtide.core.actions import StartReplica
from springtide.core.events import Event, ReplicaReady
from springtide.core.resources import DeviceId, Node, NodeId, Pool, admits
from springtide.core.shares import Share
from springtide.core.wire.workers import FenceOrder, FormGroup, Order, Preempt, Stop
from springtide.core.workload import ReplicaId, TrainingJob, WorkloadId
from springtide.simulator.clock import VirtualClock
from springtide.simulator.shared_devices import SharedDevices, overfull
from springtide_studies.agenda import Agenda
from springtide_studies.fault_seeds.models import Delays
from springtide_studies.fault_seeds.training import ModelledTraining


class Process:
    """One worker process. `is_fenced` says that the control plane has given it up."""

    def __init__(self, action: StartReplica, node_id: NodeId) -> None:
        self.action = action
        self.replica_id: ReplicaId = action.replica_id
        self.workload_id: WorkloadId = action.workload_id
        self.device_id: DeviceId = action.device_id
        self.device_ids = action.device_ids
        self.node_id = node_id
        self.share: Share | None = action.share
        self.generation = action.generation
        self.run: ModelledTraining | None = None
        self.is_alive = True
        self.is_ready = False
        self.is_stalled = False
        self.is_unkillable = False
        self.is_fenced = False
        self.is_partitioned = False
        self.has_left = False
        self.slowness = 1.0
        self.form: FormGroup | None = None
        self.told_at_s = 0.0
        self.preempt: Preempt | None = None
        self.stop: Stop | None = None
        self.state_step: int | None = None
        self.state_seen = 0
        self.is_member = False
        self.kept: dict[int, Event] = {}
        self.recent: deque[Event] = deque(maxlen=4)
        self.num_reports = 0
        self.on_wake: list[Callable[[], None]] = []

    @property
    def is_working(self) -> bool:
        """Whether it can act: alive, not suspended, not given up."""
        return self.is_alive and not self.is_stalled and not self.is_fenced


class ModelledLink(Protocol):
    """The machines' link to the executor of a running control plane."""

    def take_report(self, event: Event, process: Process, seq: int) -> None:
        """A report has arrived; seq 0 needs no acknowledgement."""

    def note_exit(self, process: Process) -> None:
        """A process has ended."""

    def note_silence(self, process: Process) -> None:
        """A process has been silent for too long."""


class Network:
    """How messages travel between workers and the control plane. Faults open windows in which it misbehaves."""

    def __init__(self, message_s: float) -> None:
        self.message_s = message_s
        self.travel: Callable[[], tuple[float | None, ...]] | None = None

    def arrivals(self) -> tuple[float | None, ...]:
        """Seconds until each copy of one message arrives; None for a copy that is lost."""
        if self.travel is None:
            return (self.message_s,)
        return self.travel()


RESEND_S = 1.0


class Machine:
    """Every node with its processes. Time passes only through its agenda."""

    def __init__(
        self,
        clock: VirtualClock,
        delays: Delays,
        complain: Callable[[str, str], None],
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.clock = clock
        self.agenda = Agenda(clock)
        self.delays = delays
        self.complain = complain
        self.tell = tell
        self.network = Network(delays.message_s)
        self.link: ModelledLink | None = None
        self.nodes: dict[NodeId, Node] = {}
        self.known_nodes: dict[NodeId, Node] = {}
        self.node_of: dict[DeviceId, NodeId] = {}
        self.partitioned: set[NodeId] = set()
        self.processes: dict[ReplicaId, Process] = {}
        self.alive: dict[ReplicaId, Process] = {}
        self.runs: dict[WorkloadId, ModelledTraining] = {}
        self.sharing = SharedDevices(self._change_pace)
        self.fails_to_spawn = False
        self.disk_slowness = 1.0
        self.slow_start_s = 0.0
        # Nodes whose reports do not arrive, and nodes that no order reaches.
        self.unheard: set[NodeId] = set()
        self.unreached: set[NodeId] = set()

    # --- nodes and processes -----------------------------------------------------------------------------------------

    def add_node(self, node: Node) -> None:
        """A node comes up with nothing running on it, and with the label that it went down with."""
        known = self.known_nodes.get(node.node_id)
        if known is not None:
            node = _labelled(node, known.pool)
        self.nodes[node.node_id] = self.known_nodes[node.node_id] = node
        for device in node.devices:
            self.node_of[device.device_id] = node.node_id

    def label_node(self, node_id: NodeId, pool: Pool) -> None:
        """Label a node, which need not be up: as in a cluster's records the label outlives node and control plane."""
        known = self.known_nodes.get(node_id)
        if known is None or known.pool == pool:
            return
        self.say("{} is labelled for {}", node_id, pool)
        self.known_nodes[node_id] = node = _labelled(known, pool)
        if node_id in self.nodes:
            self.nodes[node_id] = node
        for process in self.on_node(node_id):
            self._check_place(process)

    def _check_place(self, process: Process) -> None:
        pool, action = self.known_nodes[process.node_id].pool, process.action
        is_job, is_part = isinstance(action.workload, TrainingJob), action.share is not None
        if not process.is_fenced and not admits(pool, is_job=is_job, is_part=is_part):
            self.complain("label-admits", f"{process.replica_id} on {process.device_id}, labelled for {pool}")

    def run_of(self, workload: TrainingJob) -> ModelledTraining:
        """The job's training as the machines know it."""
        run = self.runs.get(workload.job_id)
        if run is None:
            run = self.runs[workload.job_id] = ModelledTraining(self, workload)
        return run

    def of_workload(self, workload_id: WorkloadId) -> list[Process]:
        """The living processes of a job or service."""
        return [process for process in self.alive.values() if process.workload_id == workload_id]

    def on_node(self, node_id: NodeId) -> list[Process]:
        """The living processes of a node."""
        return [process for process in self.alive.values() if process.node_id == node_id]

    def spawn(self, action: StartReplica) -> Process | None:
        """Start a process; None if its node is down or refuses."""
        node_id = self.node_of.get(action.device_id)
        if node_id is None or node_id not in self.nodes or node_id in self.partitioned or self.fails_to_spawn:
            return None
        process = Process(action, node_id)
        self._check_room(process, action.share)
        self._check_place(process)
        self.processes[process.replica_id] = self.alive[process.replica_id] = process
        if action.share is not None:
            self.sharing.hold(process.replica_id, process.device_ids, action.share)
        self.say("{} starts on {}", process.replica_id, process.device_id)
        if isinstance(action.workload, TrainingJob):
            process.run = self.run_of(action.workload)
            self._warm_up(process)
        else:
            at_s = self.delays.spawn_s + self.delays.load_s + self.slow_start_s
            self.agenda.after(at_s, lambda: self._become_ready(process))
        return process

    def _check_room(self, process: Process, share: Share | None) -> None:
        """Whether the process may hold that of each of its devices beside the others there that are not given up."""
        mine = set(process.device_ids)
        if len({self.node_of[device_id] for device_id in mine}) > 1:
            self.complain("whole-workers", f"{process.replica_id} gets {sorted(mine)}, which are of several nodes")
        there = [p for p in self.alive.values() if not mine.isdisjoint(p.device_ids) and not p.is_fenced]
        memory_of = {device.device_id: device.memory_mb for device in self.known_nodes[process.node_id].devices}
        for device_id in process.device_ids:
            others = [other for other in there if other is not process and device_id in other.device_ids]
            wrong = overfull([share, *(other.share for other in others)], memory_of.get(device_id, 0))
            if wrong and others:
                names = ", ".join(f"{other.replica_id} ({_told(other.share)})" for other in others)
                self.complain(
                    "device-once", f"{process.replica_id} gets {_told(share)} of {device_id} beside {names}: {wrong}"
                )

    def set_shares(self, shares: Sequence[tuple[Process, Share]]) -> None:
        """These processes hold that of their devices from now on, all at once, and go on without a pause."""
        changed = [(process, share) for process, share in shares if process.is_alive and process.share != share]
        for process, share in changed:
            self.say("{} holds {} of {}", process.replica_id, _told(share), process.device_id)
            process.share = share
            if process.replica_id in self.sharing:
                self.sharing.set_share(process.replica_id, share)
                continue
            group = None if process.run is None else process.run.group
            is_busy = group is not None and group.is_training and process in group.members
            self.sharing.hold(process.replica_id, process.device_ids, share, float(is_busy))
            self._change_pace(process.replica_id)
        for process, share in changed:
            if not process.is_fenced:
                self._check_room(process, share)

    def _change_pace(self, replica_id: ReplicaId) -> None:
        """The process gets another part of its device than before."""
        process = self.alive.get(replica_id)
        group = None if process is None or process.run is None else process.run.group
        if process is not None and process.run is not None and group is not None and process in group.members:
            process.run.change_pace()

    def _warm_up(self, process: Process) -> None:
        assert process.run is not None
        poison = process.run.model.poison
        at_s = self.delays.spawn_s + self.delays.warm_up_s + self.slow_start_s
        if poison == "crash":
            self.agenda.after(at_s, lambda: self.die(process, "the user's module fails to import"))
        elif poison != "hang":
            self.agenda.after(at_s, lambda: self._become_ready(process))

    def _become_ready(self, process: Process) -> None:
        if not process.is_alive or process.is_ready:
            return
        if process.is_stalled:
            process.on_wake.append(lambda: self._become_ready(process))
            return
        process.is_ready = True
        address = "" if process.run is not None else f"model://{process.replica_id}"
        self.report(
            process, ReplicaReady(workload_id=process.workload_id, replica_id=process.replica_id, address=address)
        )
        if process.run is not None:
            process.run.consider()

    def die(self, process: Process, why: str, *, is_silent: bool = False) -> None:
        """A process ends, for whatever reason. Its device is physically free."""
        if not process.is_alive:
            return
        self.say("{} ends: {}", process.replica_id, why)
        process.is_alive = False
        del self.alive[process.replica_id]
        self.sharing.release(process.replica_id)
        process.kept.clear()
        process.on_wake.clear()
        if process.run is not None:
            process.run.lose_member(process)
        if not is_silent and not process.is_fenced:
            self.agenda.after(self.delays.message_s, partial(self._notice_exit, process))

    def _notice_exit(self, process: Process) -> None:
        if self.link is not None:
            self.link.note_exit(process)

    def leave(self, process: Process, why: str) -> None:
        """A process ends by itself, once its last reports are acknowledged (or no answer comes for a while)."""
        if process.has_left or not process.is_alive:
            return
        process.has_left = True
        deadline_s = self.clock.now_s() + self.delays.last_words_s
        self._leave_when_heard(process, why, deadline_s)

    def _leave_when_heard(self, process: Process, why: str, deadline_s: float) -> None:
        if process.is_stalled:
            process.on_wake.append(lambda: self._leave_when_heard(process, why, deadline_s))
        elif process.kept and self.clock.now_s() < deadline_s:
            self.agenda.after(self.delays.exit_s, lambda: self._leave_when_heard(process, why, deadline_s))
        else:
            self.agenda.after(self.delays.exit_s, lambda: self.die(process, why))

    def kill(self, process: Process, why: str) -> None:
        """SIGKILL: immediate, unless the process hangs where no signal reaches it."""
        if process.is_stalled and process.is_unkillable:
            return
        self.die(process, why)

    def stall(self, process: Process, duration_s: float, *, is_unkillable: bool = False) -> None:
        """Suspend a process for a while."""
        if not process.is_working:
            return
        self.say("{} stalls for {:.1f} s", process.replica_id, duration_s)
        process.is_stalled, process.is_unkillable = True, is_unkillable
        if process.run is not None:
            process.run.stall_member(process)
        self.agenda.after(self.delays.lost_after_s, lambda: self._notice_silence(process))
        self.agenda.after(duration_s, lambda: self._wake(process))

    def _notice_silence(self, process: Process) -> None:
        if process.is_alive and process.is_stalled and self.link is not None:
            self.link.note_silence(process)

    def _wake(self, process: Process) -> None:
        if not process.is_alive:
            return
        self.say("{} wakes up{}", process.replica_id, ", given up meanwhile" if process.is_fenced else "")
        process.is_stalled = False
        pending, process.on_wake = process.on_wake, []
        for happen in pending:
            happen()
        if process.is_fenced:
            self.come_back(process)
        elif process.run is not None:
            process.run.wake_member(process)

    def come_back(self, process: Process) -> None:
        """A process that was given up comes back: it tries to write, is refused by the fence or not needed, and
        ends."""
        if process.run is not None:
            process.run.write_after_fencing(process)
        self.agenda.after(self.delays.exit_s, lambda: self.die(process, "it belongs to the past"))

    def say(self, sentence: str, *values: object) -> None:
        """Log a sentence if a listener is set."""
        if self.tell is not None:
            self.tell(sentence.format(*values))

    # --- links -------------------------------------------------------------------------------------------------------

    def report(self, process: Process, event: Event, *, is_kept: bool = True) -> None:
        """Send a report, and repeat it until it is acknowledged if `is_kept`."""
        if not process.is_alive or process.is_fenced:
            return
        seq = 0
        if is_kept:
            process.num_reports += 1
            seq = process.num_reports
            process.kept[seq] = event
            process.recent.append(event)
        self._transmit(process, event, seq)

    def _transmit(self, process: Process, event: Event, seq: int) -> None:
        for delay_s in self.network.arrivals():
            if delay_s is None:
                if seq:
                    self.agenda.after(RESEND_S, lambda: self._resend(process, seq))
            else:
                self.agenda.after(delay_s, lambda: self._arrive(process, event, seq))

    def _resend(self, process: Process, seq: int) -> None:
        if process.is_alive and seq in process.kept:
            self._transmit(process, process.kept[seq], seq)

    def _arrive(self, process: Process, event: Event, seq: int) -> None:
        if process.is_fenced or self.link is None:
            return
        if process.is_partitioned or process.node_id in self.unheard:
            if seq:
                self.agenda.after(RESEND_S, lambda: self._resend(process, seq))
            return
        self.link.take_report(event, process, seq)

    def settle_report(self, process: Process, seq: int) -> None:
        """The control plane acknowledges a report. If the acknowledgement is lost, the report is sent again."""
        for delay_s in self.network.arrivals():
            if delay_s is not None and not process.is_partitioned and process.node_id not in self.unreached:
                self.agenda.after(delay_s, lambda: self._forget_report(process, seq))
            else:
                self.agenda.after(RESEND_S, lambda: self._resend(process, seq))

    def _forget_report(self, process: Process, seq: int) -> None:
        event = process.kept.pop(seq, None)
        if event is not None and process.run is not None and process.is_alive:
            process.run.receive_acknowledgement(process, event)

    def reconnect(self, link: ModelledLink | None) -> None:
        """The control plane goes away (None) or is back; then every worker repeats what was not acknowledged."""
        self.link = link
        if link is None:
            return
        for process in list(self.alive.values()):
            if process.is_stalled:
                self.agenda.after(self.delays.lost_after_s, partial(self._notice_silence, process))
            for seq in process.kept:
                self.agenda.after(self.delays.message_s, partial(self._resend, process, seq))

    def repeat_all(self, process: Process) -> None:
        """The process connects again: it repeats its last reports, acknowledged or not, and is told its group again."""
        for event in process.recent:
            self._transmit(process, event, 0)
        if process.form is not None:
            self.order(process, process.form, lambda: False)

    def order(self, process: Process, order: Order, still_meant: Callable[[], bool]) -> None:
        """Send an order; one that is lost is sent again as long as it is `still_meant`."""
        for delay_s in self.network.arrivals():
            if delay_s is None or process.is_partitioned or process.node_id in self.unreached:
                self.agenda.after(
                    RESEND_S,
                    lambda: self.order(process, order, still_meant) if process.is_alive and still_meant() else None,
                )
            else:
                self.agenda.after(delay_s, lambda: self._obey(process, order))

    def _obey(self, process: Process, order: Order) -> None:
        if not process.is_alive or process.is_fenced:
            return
        if process.is_stalled:
            process.on_wake.append(lambda: self._obey(process, order))
            return
        match order:
            case FormGroup():
                if process.form is None or order.generation > process.form.generation:
                    process.form, process.told_at_s = order, self.clock.now_s()
                    if process.run is not None:
                        process.run.receive_order(process)
            case Preempt():
                if process.preempt is None and process.run is not None:
                    process.preempt = order
                    process.run.receive_preemption(process)
            case Stop():
                if process.stop is None:
                    process.stop = order
                    drain_s = self.delays.drain_s if process.run is None and process.is_ready else 0.0
                    self.agenda.after(
                        drain_s + self.delays.exit_s, lambda: self.die_if_working(process, "it was asked to")
                    )
            case FenceOrder():
                self.come_back(process)

    def die_if_working(self, process: Process, why: str) -> None:
        """End by itself, unless it hangs; then it ends when it wakes."""
        if process.is_stalled:
            process.on_wake.append(lambda: self.die_if_working(process, why))
        else:
            self.die(process, why)

    def living(self) -> Iterator[Process]:
        """Every process that lives."""
        return iter(list(self.alive.values()))


def _labelled(node: Node, pool: Pool) -> Node:
    return node if node.pool == pool else replace(node, pool=pool, home=node.owner)


def _told(share: Share | None) -> str:
    return "the whole" if share is None else f"{share.request:g}..{share.limit:g}"
