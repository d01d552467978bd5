"""Seeded fault scripts: what goes wrong, when and how badly. Every kind draws from a stream of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from springtide.core.actions import Action
from springtide.core.errors import JournalError, SpringtideError
from springtide.core.events import NodeJoined, NodeLost
from springtide.core.resources import NodeId
from springtide.core.wire.workers import Preempt
from springtide_studies.fault_seeds.executor import SimExecutor
from springtide_studies.fault_seeds.machine import Machine, Process

CRASH_POINTS = (
    "wait.after",
    "append.before",
    "append.after",
    "acknowledge.before",
    "acknowledge.after",
    "start.before",
    "start.after",
    "recover.before",
    "recover.after",
)
# A crash whose point is not reached within this time is dropped.
_CRASH_WINDOW_S = 15.0


class SimulatedCrash(SpringtideError):
    """The control plane dies here. Only the experiment may catch it."""


class FaultScript:
    """The fault script of one run, and what of it is under way."""

    def __init__(self, machine: Machine, seed: np.random.SeedSequence, horizon_s: float, num_faults: float) -> None:
        self.machine = machine
        self.executor: SimExecutor | None = None
        self.horizon_s = horizon_s
        self.end_s = 0.0
        self.counts: Counter[str] = Counter()
        self.passed: Counter[str] = Counter()
        self.down_s = 1.0
        self._armed: list[tuple[float, str, int, float]] = []
        self._watched: list[tuple[float, type[Action], Callable[[Action], None]]] = []
        self._journal_fails_until_s = -1.0
        self._asks_twice_until_s = -1.0
        self._slow_until_s, self._slow_append_s = -1.0, 0.0
        self.jump_s = 0.0
        self._travel_until_s: dict[str, float] = {}
        self.given_up: set[NodeId] = set()
        streams = seed.spawn(len(FAULT_KINDS) + 1)
        self._network_rng = np.random.default_rng(streams[-1])
        self.draw(FAULT_KINDS, streams[:-1], num_faults)

    def draw(
        self, kinds: Mapping[str, FaultPlan], streams: Sequence[np.random.SeedSequence], num_faults: float
    ) -> None:
        """Enter so many faults of these kinds on average, each kind from a stream of its own."""
        for (kind, plan), stream in zip(kinds.items(), streams, strict=True):
            rng = np.random.default_rng(stream)
            for _ in range(rng.poisson(num_faults / len(kinds))):
                self._enter(kind, plan, rng)

    def _enter(self, kind: str, plan: FaultPlan, rng: np.random.Generator) -> None:
        at_s = float(rng.uniform(0.0, self.horizon_s))
        self.last(at_s)

        def happen() -> None:
            self.counts[kind] += 1
            self.machine.say("FAULT {}", kind)
            plan(self, rng)

        self.machine.agenda.at(at_s, happen)

    def last(self, until_s: float) -> None:
        """A fault lasts until then; liveness is checked after it."""
        self.end_s = max(self.end_s, until_s)

    def now_s(self) -> float:
        """The present instant."""
        return self.machine.clock.now_s()

    # --- crashes of the control plane --------------------------------------------------------------------------------

    def arm(self, point: str, skip: int, down_s: float, *, window_s: float = _CRASH_WINDOW_S) -> None:
        """Let the control plane die at its `skip`-th pass of `point` from now on."""
        self._armed.append((self.now_s() + window_s, point, skip, down_s))
        self.last(self.now_s() + window_s + down_s)

    def watch(self, kind: type[Action], then: Callable[[Action], None]) -> None:
        """Call back at the next action of this kind, right before it is carried out."""
        self._watched.append((self.now_s() + _CRASH_WINDOW_S, kind, then))
        self.last(self.now_s() + _CRASH_WINDOW_S)

    def run_watched(self, action: Action) -> None:
        """Run the callbacks that wait for an action of this kind, which is about to be carried out."""
        if not self._watched:
            return
        now_s = self.now_s()
        due = [then for until_s, kind, then in self._watched if isinstance(action, kind) and now_s <= until_s]
        self._watched = [entry for entry in self._watched if not isinstance(action, entry[1]) and now_s <= entry[0]]
        for then in due:
            then(action)

    def reach(self, point: str) -> None:
        """The control plane passes a point. Raises SimulatedCrash if it dies there."""
        self.passed[point] += 1
        if not self._armed:
            return
        for index, (until_s, name, skip, down_s) in enumerate(self._armed):
            if name != point or self.now_s() > until_s:
                continue
            if skip:
                self._armed[index] = (until_s, name, skip - 1, down_s)
                continue
            del self._armed[index]
            self.down_s = down_s
            self.counts[f"crash at {point}"] += 1
            self.machine.say("CRASH of the control plane at {}", point)
            raise SimulatedCrash(point)

    def check_journal(self) -> None:
        """Raises JournalError while the journal's disk refuses writes."""
        if self.now_s() < self._journal_fails_until_s:
            raise JournalError("the journal cannot be written: no space left on device")

    def slow_journal(self, append_s: float, duration_s: float) -> None:
        """Let every append to the journal take so long for a while."""
        self._slow_until_s, self._slow_append_s = self.now_s() + duration_s, append_s
        self.last(self._slow_until_s + append_s)

    def append_s(self) -> float:
        """How long an append to the journal takes at the moment; 0 on a disk that is not slow."""
        return self._slow_append_s if self.now_s() < self._slow_until_s else 0.0

    def asks_twice(self) -> bool:
        """Whether impatient owners send everything twice at the moment."""
        return self.now_s() < self._asks_twice_until_s

    def fail_journal(self, duration_s: float) -> None:
        """Let the journal refuse writes for a while."""
        self._journal_fails_until_s = self.now_s() + duration_s
        self.last(self._journal_fails_until_s)

    def ask_twice(self, duration_s: float) -> None:
        """Let owners send everything twice for a while."""
        self._asks_twice_until_s = self.now_s() + duration_s

    # --- the network -------------------------------------------------------------------------------------------------

    def disturb(self, what: str, duration_s: float) -> None:
        """Let messages be lost, duplicated, reordered or delayed for a while."""
        self._travel_until_s[what] = self.now_s() + duration_s
        self.last(self.now_s() + duration_s)
        self.machine.network.travel = self._travel

    def _travel(self) -> tuple[float | None, ...]:
        now_s, rng = self.now_s(), self._network_rng
        active = {what for what, until_s in self._travel_until_s.items() if now_s < until_s}
        delay_s = self.machine.network.message_s
        if not active:
            self.machine.network.travel = None
            return (delay_s,)
        if "lose" in active and rng.random() < 0.4:
            return (None,)
        if "delay" in active:
            delay_s += float(rng.exponential(1.0))
        if "hold" in active and rng.random() < 0.2:
            delay_s += float(rng.uniform(5.0, 40.0))
        if "reorder" in active:
            delay_s += float(rng.uniform(0.0, 0.5))
        if "duplicate" in active and rng.random() < 0.5:
            return (delay_s, delay_s + float(rng.exponential(0.5)))
        return (delay_s,)

    # --- machines ----------------------------------------------------------------------------------------------------

    def pick(self, rng: np.random.Generator, *, trains: bool = False) -> Process | None:
        """A living worker, at random."""
        choice = [p for p in self.machine.alive.values() if not p.is_fenced and (p.run is not None or not trains)]
        return choice[int(rng.integers(len(choice)))] if choice else None

    def pick_node(self, rng: np.random.Generator) -> NodeId | None:
        """A node that is up and connected, at random."""
        choice = [node_id for node_id in self.machine.nodes if node_id not in self.machine.partitioned]
        return choice[int(rng.integers(len(choice)))] if choice else None

    def post_node(self, event: NodeJoined | NodeLost) -> None:
        """Report a node to the control plane if one is running; a restarted one finds out by itself."""
        if self.executor is not None:
            self.executor.post_node(event)

    def lose_node(self, node_id: NodeId, down_s: float, *, is_noticed: bool) -> None:
        """A node goes down with all that runs on it and comes back empty."""
        machine = self.machine
        machine.nodes.pop(node_id)
        machine.say("{} goes down", node_id)
        victims = machine.on_node(node_id)
        for process in victims:
            machine.die(process, "its node is down", is_silent=True)
        self.last(self.now_s() + down_s)

        def notice() -> None:
            if node_id not in machine.nodes:
                self.post_node(NodeLost(node_id=node_id))

        def come_back() -> None:
            machine.say("{} is back", node_id)
            machine.add_node(machine.known_nodes[node_id])
            for process in victims:
                if not is_noticed and machine.link is not None:
                    machine.link.note_exit(process)
            self.post_node(NodeJoined(node=machine.nodes[node_id]))

        if is_noticed:
            machine.agenda.after(machine.delays.node_lost_after_s, notice)
        machine.agenda.after(down_s, come_back)

    def partition_node(self, node_id: NodeId, duration_s: float) -> None:
        """Cut a node off. Its workers go on; if it lasts, they are given up and come back as fenced workers."""
        machine = self.machine
        machine.say("{} is cut off", node_id)
        machine.partitioned.add(node_id)
        cut_off = machine.on_node(node_id)
        for process in cut_off:
            process.is_partitioned = True
        for run in machine.runs.values():
            group = run.group
            if group is not None and len({member.is_partitioned for member in group.members if member.is_alive}) > 1:
                run.break_group(group, "a peer does not answer")
        self.last(self.now_s() + duration_s + 5.0)

        def give_up() -> None:
            if node_id not in machine.partitioned:
                return
            for process in machine.on_node(node_id):
                process.is_fenced = True
            self.given_up.add(node_id)
            self.post_node(NodeLost(node_id=node_id))

        def heal() -> None:
            machine.say("{} is connected again", node_id)
            machine.partitioned.discard(node_id)
            self.given_up.discard(node_id)
            for process in machine.on_node(node_id):
                process.is_partitioned = False
                if process.is_fenced:
                    machine.come_back(process)
            # A control plane that has started meanwhile may not know this node.
            machine.agenda.after(1.0, lambda: self.post_node(NodeJoined(node=machine.known_nodes[node_id])))

        if duration_s > machine.delays.node_lost_after_s:
            machine.agenda.after(machine.delays.node_lost_after_s, give_up)
        machine.agenda.after(duration_s, heal)

    def fill_disks(self, duration_s: float) -> None:
        """Let no checkpoint be written for a while."""
        stores = [run.store for run in self.machine.runs.values()]
        for store in stores:
            store.is_full = True

        def empty() -> None:
            for store in stores:
                store.is_full = False

        self.last(self.now_s() + duration_s)
        self.machine.agenda.after(duration_s, empty)

    def expire_leases(self) -> None:
        """After a long time without a control plane every worker commits what it has and ends."""
        for process in self.machine.living():
            if process.run is None:
                self.machine.leave(process, "its lease is over")
            elif process.preempt is None and not process.is_fenced:
                process.preempt = Preempt(generation=process.form.generation if process.form else process.generation)
                process.run.receive_preemption(process)


FaultPlan = Callable[[FaultScript, np.random.Generator], None]


def _crash_worker(faults: FaultScript, rng: np.random.Generator) -> None:
    process = faults.pick(rng)
    if process is not None:
        faults.machine.die(process, "killed by a fault")


def _crash_two(faults: FaultScript, rng: np.random.Generator) -> None:
    first = faults.pick(rng, trains=True)
    if first is not None:
        for process in faults.machine.of_workload(first.workload_id)[:2]:
            faults.machine.die(process, "killed by a fault")


def _lose_node(faults: FaultScript, rng: np.random.Generator) -> None:
    node_id = faults.pick_node(rng)
    if node_id is not None:
        faults.lose_node(node_id, float(rng.uniform(5.0, 30.0)), is_noticed=True)


def _reboot_node(faults: FaultScript, rng: np.random.Generator) -> None:
    node_id = faults.pick_node(rng)
    if node_id is not None:
        faults.lose_node(node_id, float(rng.uniform(0.5, 3.5)), is_noticed=False)


def _cut_off_briefly(faults: FaultScript, rng: np.random.Generator) -> None:
    node_id = faults.pick_node(rng)
    if node_id is not None:
        faults.partition_node(node_id, float(rng.uniform(0.2, 3.5)))


def _cut_off_long(faults: FaultScript, rng: np.random.Generator) -> None:
    node_id = faults.pick_node(rng)
    if node_id is not None:
        faults.partition_node(node_id, float(rng.uniform(5.0, 30.0)))


def _stall(faults: FaultScript, rng: np.random.Generator) -> None:
    process = faults.pick(rng)
    if process is not None:
        faults.machine.stall(process, float(rng.uniform(0.1, 1.8)))


def _hang(faults: FaultScript, rng: np.random.Generator) -> None:
    process = faults.pick(rng)
    if process is not None:
        faults.machine.stall(process, float(rng.uniform(2.5, 30.0)))


def _return_late(faults: FaultScript, rng: np.random.Generator) -> None:
    process = faults.pick(rng, trains=True)
    if process is not None:
        duration_s = float(rng.uniform(2.5, 20.0))
        faults.last(faults.now_s() + duration_s)
        faults.machine.stall(process, duration_s, is_unkillable=True)


def _disturb(what: str) -> FaultPlan:
    def plan(faults: FaultScript, rng: np.random.Generator) -> None:
        faults.disturb(what, float(rng.uniform(1.0, 10.0)))

    return plan


def _crash_control(faults: FaultScript, rng: np.random.Generator) -> None:
    point = str(rng.choice(CRASH_POINTS[:-2]))
    faults.arm(point, int(rng.integers(0, 4)), float(rng.uniform(0.1, 6.0)))


def _crash_twice(faults: FaultScript, rng: np.random.Generator) -> None:
    faults.arm(str(rng.choice(CRASH_POINTS[:-2])), 0, float(rng.uniform(0.1, 2.0)))
    faults.arm(str(rng.choice(CRASH_POINTS[-2:])), 0, float(rng.uniform(0.1, 2.0)))


def _stay_away(faults: FaultScript, rng: np.random.Generator) -> None:
    faults.arm("wait.after", 0, float(rng.uniform(20.0, 50.0)))


def _fail_journal(faults: FaultScript, rng: np.random.Generator) -> None:
    faults.fail_journal(float(rng.uniform(0.5, 8.0)))


def _fill_disk(faults: FaultScript, rng: np.random.Generator) -> None:
    faults.fill_disks(float(rng.uniform(2.0, 20.0)))


def _tear_checkpoint(faults: FaultScript, rng: np.random.Generator) -> None:
    """Kill a writer between the two halves of a checkpoint."""
    process = faults.pick(rng, trains=True)
    run = None if process is None else process.run
    if run is None or run.group is None or not run.group.is_training:
        return
    writer = run.group.members[0]
    run.settle(run.group)
    run.write_checkpoint(writer, run.group.generation, run.group.step)
    half_s = faults.machine.delays.checkpoint_s * 0.75
    faults.machine.agenda.after(half_s, lambda: faults.machine.die(writer, "killed while it wrote a checkpoint"))


def _wake_up_late(faults: FaultScript, rng: np.random.Generator) -> None:
    if faults.executor is not None:
        late_by_s = float(np.exp(rng.uniform(np.log(0.5), np.log(60.0))))
        faults.executor.late_by_s = late_by_s
        faults.last(faults.now_s() + late_by_s)


def _slow_down(faults: FaultScript, rng: np.random.Generator) -> None:
    process = faults.pick(rng, trains=True)
    if process is None or process.run is None:
        return
    run, process.slowness = process.run, float(rng.uniform(2.0, 8.0))
    run.change_pace()

    def recover() -> None:
        process.slowness = 1.0
        run.change_pace()

    faults.machine.agenda.after(float(rng.uniform(3.0, 20.0)), recover)


def _break_collective(faults: FaultScript, rng: np.random.Generator) -> None:
    process = faults.pick(rng, trains=True)
    if process is not None and process.run is not None and process.run.group is not None:
        process.run.break_group(process.run.group, "a collective failed although every member lives")


def _refuse_spawns(faults: FaultScript, rng: np.random.Generator) -> None:
    machine = faults.machine
    machine.fails_to_spawn = True
    duration_s = float(rng.uniform(0.5, 6.0))
    faults.last(faults.now_s() + duration_s)

    def recover() -> None:
        machine.fails_to_spawn = False

    machine.agenda.after(duration_s, recover)


def _ask_twice(faults: FaultScript, rng: np.random.Generator) -> None:
    faults.ask_twice(float(rng.uniform(5.0, 20.0)))


FAULT_KINDS: Mapping[str, FaultPlan] = MappingProxyType(
    {
        "worker crash": _crash_worker,
        "two workers of a job crash": _crash_two,
        "node loss": _lose_node,
        "node reboot": _reboot_node,
        "short partition": _cut_off_briefly,
        "long partition": _cut_off_long,
        "short stall": _stall,
        "long stall": _hang,
        "late return": _return_late,
        "messages lost": _disturb("lose"),
        "messages duplicated": _disturb("duplicate"),
        "messages reordered": _disturb("reorder"),
        "messages delayed": _disturb("delay"),
        "control plane crash": _crash_control,
        "crash in recovery": _crash_twice,
        "long outage": _stay_away,
        "journal error": _fail_journal,
        "full disk": _fill_disk,
        "torn checkpoint": _tear_checkpoint,
        "late wake-up": _wake_up_late,
        "slow worker": _slow_down,
        "broken collective": _break_collective,
        "refused spawns": _refuse_spawns,
        "owners ask twice": _ask_twice,
    }
)
