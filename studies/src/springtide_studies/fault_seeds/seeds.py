"""Runs: one seed with faults and every invariant, or a workload without faults for its figures."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np

from springtide.control import loop
from springtide.control.controller import Controller
from springtide.control.journal.archive import JournalSnapshot
from springtide.control.journal.codec import SCHEMA_VERSION
from springtide.control.journal.memory import MemoryJournal
from springtide.control.state_data import PlatformSnapshot, data_of, encode_snapshot
from springtide.core.actions import Action
from springtide.core.decision import Policy
from springtide.core.errors import SpringtideError
from springtide.core.events import Event, NodeJoined, NodeLost
from springtide.core.ports import Standing, Step
from springtide.core.resources import Node, make_node
from springtide.core.tide import Tide
from springtide.scheduling.registry import PACKER_NAMES, make_policy
from springtide.simulator.clock import VirtualClock
from springtide.simulator.fluid.invariants import InvariantViolation
from springtide_studies.fault_seeds.executor import SimExecutor
from springtide_studies.fault_seeds.faults import FaultScript, SimulatedCrash
from springtide_studies.fault_seeds.faults_loans import LOAN_FAULT_KINDS
from springtide_studies.fault_seeds.faults_more import MORE_FAULT_KINDS
from springtide_studies.fault_seeds.invariants import ClaimsChecked, Invariants, check_return, complain
from springtide_studies.fault_seeds.invariants_loans import LoanInvariants
from springtide_studies.fault_seeds.machine import Machine
from springtide_studies.fault_seeds.models import Delays
from springtide_studies.fault_seeds.parts import varied
from springtide_studies.fault_seeds.promises import CHANGE, PromiseInvariants
from springtide_studies.fault_seeds.workload import (
    ModelledGateway,
    Owners,
    Workload,
    draw_pooled_nodes,
    draw_tidal_workload,
    draw_workload,
    with_shares,
)

# Everything small must have ended this long after the last fault, or never will.
PATIENCE_S = 1500.0
LOAD_INTERVAL_S = 5.0
# A small run takes a few hundred turns; one with this many is stuck in a loop.
MAX_TURNS = 20_000
# Of a compressed day, so that a bin is longer than the time between two looks at the load.
BINS_PER_DAY = 5
# One in so many journals is also decided anew from the state after so many of its steps.
SNAPSHOT_SEEDS, NUM_SNAPSHOTS = 10, 3
# The memory of a device in a scenario with shares: enough for two of the larger ones.
_SHARED_MEMORY_MB = 1000
# These promise with what changes cost in mind; the others keep to rules that do not know it.
_KEEPS_PROMISES = ("springtide",)
# These never take a server that training owns, even for guaranteed replicas.
_KEEP_TO_HOME = ("dedicated", "one-way")


class SeedOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one seed. `violation` is "" or the name of the first invariant that broke."""

    seed: int
    policy: str
    violation: str = ""
    detail: str = ""
    num_steps: int = 0
    num_events: int = 0
    num_crashes: int = 0
    num_refused_writes: int = 0
    virtual_s: float = 0.0
    num_loans: int = 0
    num_reclaims: int = 0
    has_shares: bool = False
    has_more_faults: bool = False
    has_promises: bool = False
    has_devices: bool = False
    num_promises: int = 0
    num_refused: int = 0
    num_share_changes: int = 0
    most_sharers: int = 0
    faults: dict[str, int] = {}
    ends: dict[str, str] = {}

    @property
    def command(self) -> str:
        """The command that runs this seed again and tells its story."""
        chosen = {"shares": self.has_shares, "more-faults": self.has_more_faults, "promises": self.has_promises}
        chosen["devices"] = self.has_devices
        told = "".join(f" --{name}" for name, is_chosen in chosen.items() if is_chosen)
        return f"python -m springtide_studies.fault_seeds --seed {self.seed} --policy {self.policy}{told}"


class _Journal:
    """The journal, between two crash points and on a disk that may refuse."""

    def __init__(self, run: FaultRun) -> None:
        self._run = run
        self.memory = MemoryJournal()
        self.num_steps = 0
        self.num_events = 0
        # A turn that the journal has refused so far: the controller is ahead of what may be told to others.
        self.is_behind = False

    def append(self, step: Step) -> int:
        self.is_behind = True
        self._run.faults.check_journal()
        self._run.faults.reach("append.before")
        append_s, agenda = self._run.faults.append_s(), self._run.machine.agenda
        if append_s:
            agenda.run_until(agenda.clock.now_s() + append_s)
            self._run.loans.note_outage(self._run.clock.now_s())
        seq = self.memory.append(step)
        self.num_steps, self.num_events = seq, self.num_events + len(step.events)
        self.is_behind = False
        self._run.note_journaled(step)
        self._run.faults.reach("append.after")
        return seq

    def read(self, after_seq: int = 0) -> Iterator[tuple[int, Step]]:
        return self.memory.read(after_seq)


class _Executor:
    """The executor between crash points, with the checks that belong to the order of effects."""

    def __init__(self, inner: SimExecutor, run: FaultRun) -> None:
        self.inner = inner
        self._run = run

    def recover(self, standing: Standing) -> None:
        self._run.faults.reach("recover.before")
        self.inner.recover(standing)
        self._run.faults.reach("recover.after")

    def start(self, action: Action) -> None:
        kind, faults = type(action).__name__, self._run.faults
        faults.run_watched(action)
        faults.reach("start.before")
        faults.reach(f"{kind}.before")
        self._run.invariants.check_started(action)
        self.inner.start(action)
        faults.reach("start.after")
        faults.reach(f"{kind}.after")

    def wait(self, deadline_s: float | None) -> Sequence[Event]:
        is_late = self.inner.late_by_s > 0.0
        events = self.inner.wait(None if deadline_s is None else deadline_s - self._run.clock.ahead_s)
        if is_late:
            self._run.loans.note_outage(self._run.clock.now_s())
        if events:
            self._run.faults.reach("wait.after")
        return events

    def acknowledge(self, events: Sequence[Event]) -> None:
        self._run.faults.reach("acknowledge.before")
        for event in events:
            self._run.invariants.check_acknowledged(event)
        self.inner.acknowledge(events)
        self._run.faults.reach("acknowledge.after")


class ControlClock:
    """The clock that control planes read: that of the machines, or so many seconds ahead of it after a jump."""

    def __init__(self, machines: VirtualClock) -> None:
        self._machines = machines
        self.ahead_s = 0.0

    def now_s(self) -> float:
        """The present instant as the control plane knows it."""
        return self._machines.now_s() + self.ahead_s


class FaultRun:
    """One seed: a small cluster, a small workload, a fault script, and control planes that come and go."""

    def __init__(
        self,
        seed: int,
        make: Callable[[], Policy],
        *,
        num_faults: float | None = None,
        workload: Workload | None = None,
        nodes: Sequence[Node] | None = None,
        tell: Callable[[str], None] | None = None,
        has_pools: bool = False,
        has_shares: bool = False,
        has_more_faults: bool = False,
        has_promises: bool = False,
        has_devices: bool = False,
        keeps_promises: bool = False,
        reaches: Callable[[Node], bool] | None = None,
    ) -> None:
        """With `has_pools` nodes belong to inference or training, and services live through a compressed day.

        With `has_shares` the workload that is drawn is the same, but some of its jobs and services hold a part of each
        of their devices, whose memory counts. `has_more_faults` adds the kinds of faults_more.py, half as many faults
        as of the others together. With `has_promises` jobs have profiles and tight deadlines, and a policy that
        `keeps_promises` keeps each where nothing goes wrong and no service takes devices; with `has_devices` workers of
        some jobs hold several devices (and with shares replicas of some services parts of several). `reaches` says
        which nodes the policy takes for what a service is guaranteed.
        """
        self._seed = seed
        sequence = np.random.SeedSequence(seed)
        cluster_seed, workload_seed, fault_seed = sequence.spawn(3)
        rng = np.random.default_rng(cluster_seed)
        self.make = make
        machine_clock = VirtualClock()
        self.clock = ControlClock(machine_clock)
        self.machine = Machine(machine_clock, Delays(), complain, tell)
        num_nodes, num_devices = int(rng.integers(1, 5)), int(rng.integers(2, 5))
        shared = (make_node(f"node-{index}", num_devices) for index in range(num_nodes))
        self.nodes = tuple(nodes or (draw_pooled_nodes(rng) if has_pools else shared))
        horizon_s = float(rng.uniform(20.0, 60.0)) * (2.0 if has_pools else 1.0)
        drawn_faults = float(rng.uniform(5.0, 30.0))
        mean_faults = drawn_faults if num_faults is None else num_faults
        if workload is None:
            workload = _draw(np.random.default_rng(workload_seed), self.nodes, horizon_s, has_pools=has_pools)
        if has_shares:
            # A stream of its own: what the seed draws besides is what it was without shares.
            workload = with_shares(workload, np.random.default_rng(sequence.spawn(1)[0]))
            self.nodes = tuple(_with_memory(node) for node in self.nodes)
        num_all = sum(len(node.devices) for node in self.nodes)
        self.workload = workload = varied(workload, seed, self.nodes, make, has_promises, has_devices, has_shares)
        for node in self.nodes:
            self.machine.add_node(node)
        self.owners = Owners(self.machine, workload.requests)
        self.gateway = ModelledGateway(self.machine, workload.loads, LOAD_INTERVAL_S)
        self.faults = FaultScript(self.machine, fault_seed, horizon_s, mean_faults)
        if has_pools:
            self.faults.draw(LOAN_FAULT_KINDS, fault_seed.spawn(len(LOAN_FAULT_KINDS)), mean_faults)
        if has_more_faults:
            self.faults.draw(MORE_FAULT_KINDS, fault_seed.spawn(len(MORE_FAULT_KINDS)), mean_faults / 2)
        self.owners.asks_twice = self.faults.asks_twice
        self.invariants = Invariants(self.machine)
        self.loans = LoanInvariants(self.machine, complain, reaches=reaches or _any_node, is_quiet=mean_faults == 0.0)
        self.overheads = CHANGE if has_promises else None
        is_kept = has_promises and keeps_promises and not has_pools and not mean_faults
        self.promises = PromiseInvariants(complain, num_all if keeps_promises else None, is_kept=is_kept)
        self.journal = _Journal(self)
        self.controller = self._make_controller()
        self.executor: _Executor | None = None
        self.num_crashes = self._num_turns = 0
        self._limit_s = PATIENCE_S + max((request.at_s for request in workload.requests), default=0.0) + horizon_s
        self.machine.agenda.at(self._limit_s, self._give_up)

    def run(self) -> None:
        """Drive the run to its end. Raises InvariantViolation, or any error of the control plane."""
        is_fresh = True
        while True:
            try:
                self._start_control_plane(is_fresh)
                assert self.executor is not None
                loop.run(self.controller, self.executor, self.clock, self.journal, until=self._is_done)
                break
            except SimulatedCrash:
                self._crash()
                is_fresh = False
        self.invariants.check(self.controller, self.owners.acknowledged)
        self.invariants.check_end(self.controller, self.clock.now_s(), self.owners.num_open)
        self.loans.check_end(self.controller.state)
        loop.verify(self._make_controller(), self.journal)
        loop.verify(self._make_controller(), self.journal, is_cold=True)
        if self._seed % SNAPSHOT_SEEDS == 0:
            self._check_snapshots()

    def _check_snapshots(self) -> None:
        """After a few drawn steps: from a snapshot the rest leads to the same decisions, and one may come back late."""
        drawn = {*np.random.default_rng(self._seed).integers(1, max(2, self.journal.num_steps), NUM_SNAPSHOTS).tolist()}
        controller = self._make_controller()
        for seq, step in self.journal.read():
            controller.restore(step)
            if seq in drawn or seq == self.journal.num_steps:
                blob = encode_snapshot(PlatformSnapshot(state=data_of(controller.state)))
                snapshot = JournalSnapshot(seq, b"", step.now_s, SCHEMA_VERSION, blob)
                loop.verify(self._make_controller(), self.journal, is_cold=True, snapshots=(snapshot,))
                check_return(self._make_controller(), (step for at, step in self.journal.read() if at <= seq))

    def _make_controller(self) -> Controller:
        day_s = self.workload.day_s
        tide = None if day_s is None else Tide(day_s=day_s, bins_per_day=BINS_PER_DAY)
        return Controller(ClaimsChecked(self.make()), tide=tide, overheads=self.overheads)

    def note_journaled(self, step: Step) -> None:
        """A step is durable."""
        self.invariants.note_journaled(step, self.controller)
        self.loans.note_journaled(step, self.controller.state)
        self.promises.note_journaled(step, self.controller.state, self.controller.future)
        if self.machine.tell is not None:
            write_step(step, self.machine.tell)

    def _start_control_plane(self, is_fresh: bool) -> None:
        self.controller = self._make_controller()
        self.journal.is_behind = False
        inner = SimExecutor(self.machine)
        self.executor = _Executor(inner, self)
        self.faults.executor = inner
        if not is_fresh:
            loop.recover(self.controller, self.executor, self.journal)
            self.invariants.check_replayed(self.controller)
        self.owners.executor = self.gateway.executor = inner
        machine, known = self.machine, self.controller.state.nodes
        for node_id, node in machine.nodes.items():
            if node_id not in machine.partitioned and known.get(node_id) != node:
                inner.post_node(NodeJoined(node=node))
        for node_id in known:
            if node_id not in machine.nodes or node_id in self.faults.given_up:
                inner.post_node(NodeLost(node_id=node_id))
        self.loans.note_outage(self.clock.now_s())

    def _crash(self) -> None:
        self.num_crashes += 1
        self.owners.executor = self.gateway.executor = self.faults.executor = None
        self.machine.reconnect(None)
        down_s, self.faults.down_s = self.faults.down_s, 1.0
        lease_s = self.machine.delays.lease_s
        agenda = self.machine.agenda
        if down_s > lease_s:
            agenda.run_until(agenda.clock.now_s() + lease_s)
            self.faults.expire_leases()
            down_s -= lease_s
        agenda.run_until(agenda.clock.now_s() + down_s)
        if self.faults.jump_s:
            self.machine.say("the clock jumps by {:.0f} s", self.faults.jump_s)
            self.clock.ahead_s, self.faults.jump_s = self.clock.ahead_s + self.faults.jump_s, 0.0
        self.machine.say("a new control plane starts")

    def _give_up(self) -> None:
        if self.executor is not None:
            self.executor.inner.is_over = True

    def _is_done(self) -> bool:
        assert self.executor is not None
        self._num_turns += 1
        if self._num_turns > MAX_TURNS:
            complain("no-spinning", f"{MAX_TURNS} turns by {self.clock.now_s():.3f} s")
        if self.journal.is_behind:
            self.loans.note_outage(self.clock.now_s())
            return self.executor.inner.is_over
        self.invariants.check(self.controller, self.owners.acknowledged)
        now_s = self.machine.clock.now_s()
        self.loans.check(self.controller.state, self.clock.now_s(), self.faults.end_s + self.clock.ahead_s)
        if self.executor.inner.is_over or now_s > self._limit_s:
            return True
        return (
            not self.owners.num_open
            and not self.machine.alive
            and now_s > self.faults.end_s
            and self.controller.is_idle
            # A node's return may still have to be told.
            and self.controller.state.nodes.keys() == self.machine.nodes.keys()
        )


def _draw(rng: np.random.Generator, nodes: Sequence[Node], horizon_s: float, *, has_pools: bool) -> Workload:
    if has_pools:
        return draw_tidal_workload(rng, nodes, horizon_s)
    return draw_workload(rng, sum(len(node.devices) for node in nodes), horizon_s)


def _with_memory(node: Node) -> Node:
    devices = tuple(msgspec.structs.replace(device, memory_mb=_SHARED_MEMORY_MB) for device in node.devices)
    return msgspec.structs.replace(node, devices=devices)


def _any_node(node: Node) -> bool:
    return True


def _belongs_to_services(node: Node) -> bool:
    return node.owner != "training"


def write_step(step: Step, tell: Callable[[str], None]) -> None:
    """Write one journaled step in readable lines."""
    for event in step.events:
        tell(f"  event  {describe_event(event)}")
    for action in step.actions:
        tell(f"  action {describe_action(action)}")


def describe_event(event: Event) -> str:
    """One line for an event: its name and its plain fields."""
    return _describe(event)


def describe_action(action: Action) -> str:
    """One line for an action: its name and its plain fields."""
    return _describe(action)


def _describe(message: msgspec.Struct) -> str:
    words = []
    for name in message.__struct_fields__:
        value = getattr(message, name)
        if name == "workload":
            words.append(str(getattr(value, "job_id", None) or value.service_id))
        elif isinstance(value, tuple) and value and isinstance(value[0], str):
            words.append(f"{name}={'+'.join(value)}")
        elif isinstance(value, str | int | float) and value not in ("", False):
            words.append(f"{name}={value:.3f}" if isinstance(value, float) else f"{name}={value}")
        elif name in ("job", "service"):
            words.append(str(getattr(value, "job_id", None) or value.service_id))
        elif name == "restore" and value is not None:
            words.append(f"restore=step {value.step}")
        elif name == "share" and value is not None:
            words.append(f"share={value.request:g}..{value.limit:g}")
        elif name == "node":
            words.append(str(value.node_id))
    return f"{type(message).__name__} {' '.join(words)}"


def run_seed(
    seed: int,
    policy: str | Callable[[], Policy],
    *,
    num_faults: float | None = None,
    tell: Callable[[str], None] | None = None,
    has_pools: bool | None = None,
    has_shares: bool = False,
    has_more_faults: bool = False,
    has_promises: bool = False,
    has_devices: bool = False,
    reaches: Callable[[Node], bool] | None = None,
) -> SeedOutcome:
    """Run one seed with all invariants on and return what became of it; a violation is in the result, not raised.

    Whatever loans (`two-way/fifo`) is given nodes with pools, unless `has_pools` says otherwise; `reaches` is known of
    those in the registry.
    """
    if isinstance(policy, str):
        name = policy
        make: Callable[[], Policy] = lambda: make_policy(name)  # noqa: E731
    else:
        name, make = getattr(policy, "__name__", "custom"), policy
    packer, _, rest = name.partition("/")
    strategy, _, training = (rest if packer.partition(":")[0] in PACKER_NAMES else name).partition("/")
    run = FaultRun(
        seed,
        make,
        num_faults=num_faults,
        tell=tell,
        has_pools=bool(training) if has_pools is None else has_pools,
        has_shares=has_shares,
        has_more_faults=has_more_faults,
        has_promises=has_promises,
        has_devices=has_devices,
        keeps_promises=(training or strategy).partition(":")[0] in _KEEPS_PROMISES,
        reaches=reaches or (_belongs_to_services if strategy.partition(":")[0] in _KEEP_TO_HOME else _any_node),
    )
    violation = detail = ""
    try:
        run.run()
    except InvariantViolation as error:
        violation, detail = error.name, str(error)
    except (AssertionError, SpringtideError, LookupError, AttributeError, TypeError, ValueError) as error:
        violation, detail = type(error).__name__, traceback.format_exc()
    return SeedOutcome(
        seed=seed,
        policy=name,
        violation=violation,
        detail=detail,
        num_steps=run.journal.num_steps,
        num_events=run.journal.num_events,
        num_crashes=run.num_crashes,
        num_refused_writes=sum(job.store.num_refused for job in run.machine.runs.values()),
        virtual_s=run.machine.clock.now_s(),
        num_loans=run.loans.num_labels,
        num_reclaims=run.loans.num_reclaims,
        has_shares=has_shares,
        has_more_faults=has_more_faults,
        has_promises=has_promises,
        has_devices=has_devices,
        num_promises=run.promises.num_promised,
        num_refused=run.promises.num_refused,
        num_share_changes=run.invariants.num_share_changes,
        most_sharers=run.invariants.most_sharers,
        faults=dict(run.faults.counts),
        ends={job_id: str(record.lifecycle.state) for job_id, record in run.controller.state.jobs.items()},
    )


__all__ = ["FaultRun", "SeedOutcome", "describe_action", "describe_event", "run_seed", "write_step"]
