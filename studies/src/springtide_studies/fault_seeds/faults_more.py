"""Further faults, which known seeds do not draw: clocks, disks, one-way networks, damaged files, whole nodes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from springtide.core.resources import NodeId
from springtide_studies.fault_seeds.faults import FaultPlan, FaultScript

_DAY_S = 86_400.0


def _jump_clock(faults: FaultScript, rng: np.random.Generator) -> None:
    """The control plane dies, and its successor finds a clock that is minutes to a month ahead."""
    faults.jump_s += float(np.exp(rng.uniform(np.log(60.0), np.log(30.0 * _DAY_S))))
    faults.arm("wait.after", 0, float(rng.uniform(0.1, 3.0)))


def _slow_disk(faults: FaultScript, rng: np.random.Generator) -> None:
    """Each write takes long: a step of the journal up to seconds, a checkpoint many times as long as usual."""
    machine, duration_s = faults.machine, float(rng.uniform(2.0, 15.0))
    faults.slow_journal(float(np.exp(rng.uniform(np.log(0.02), np.log(3.0)))), duration_s)
    machine.disk_slowness = float(rng.uniform(3.0, 40.0))

    def recover() -> None:
        machine.disk_slowness = 1.0

    machine.agenda.after(duration_s, recover)


def _damage_checkpoint(faults: FaultScript, rng: np.random.Generator) -> None:
    """A part of a job's newest checkpoint was never written, and the job's workers die with its state."""
    process = faults.pick(rng, trains=True)
    newest = None if process is None or process.run is None else process.run.store.newest()
    if process is None or process.run is None or newest is None:
        return
    faults.machine.say("{} is damaged", newest.path)
    process.run.store.damaged.add(newest.path)
    for member in faults.machine.of_workload(process.workload_id):
        faults.machine.die(member, "killed by a fault")


def _cut_off_one_way(what: str) -> FaultPlan:
    """For a while a node's reports, or the orders to it, do not arrive; the other direction works."""

    def plan(faults: FaultScript, rng: np.random.Generator) -> None:
        node_id = faults.pick_node(rng)
        if node_id is None:
            return
        machine = faults.machine
        # A worker that cannot be heard for longer would be given up.
        duration_s = float(rng.uniform(0.2, 1.8) if what == "reports" else rng.uniform(0.5, 20.0))
        cut_off = machine.unheard if what == "reports" else machine.unreached
        cut_off.add(node_id)
        faults.last(faults.now_s() + duration_s)
        machine.agenda.after(duration_s, lambda: cut_off.discard(node_id))

    return plan


def _delay_for_long(faults: FaultScript, rng: np.random.Generator) -> None:
    faults.disturb("hold", float(rng.uniform(1.0, 10.0)))


def _reset_connection(faults: FaultScript, rng: np.random.Generator) -> None:
    """A worker connects again, which has not seen the last acknowledgements: it repeats what is long known."""
    process = faults.pick(rng)
    if process is not None:
        faults.machine.repeat_all(process)


def _run_out_of_memory(faults: FaultScript, rng: np.random.Generator) -> None:
    """The kernel ends every process of a node, which stays up."""
    node_id = faults.pick_node(rng)
    for process in [] if node_id is None else faults.machine.on_node(node_id):
        faults.machine.die(process, "its node is out of memory")


def _slow_starts(faults: FaultScript, rng: np.random.Generator) -> None:
    """A worker dies while processes take long to start: another one takes its place as late as a busy disk lets it."""
    machine, duration_s = faults.machine, float(rng.uniform(2.0, 20.0))
    machine.slow_start_s = float(rng.uniform(1.0, 12.0))
    process = faults.pick(rng)
    if process is not None:
        machine.die(process, "killed by a fault")
    faults.last(faults.now_s() + duration_s + machine.slow_start_s)

    def recover() -> None:
        machine.slow_start_s = 0.0

    machine.agenda.after(duration_s, recover)


def _flap_node(faults: FaultScript, rng: np.random.Generator) -> None:
    """A node goes down and comes back three times, each time too briefly to be noticed by its absence."""
    node_id = faults.pick_node(rng)
    if node_id is None:
        return
    times = np.cumsum(rng.uniform(1.5, 5.0, 3))

    def lose(node_id: NodeId, down_s: float) -> None:
        if node_id in faults.machine.nodes and node_id not in faults.machine.partitioned:
            faults.lose_node(node_id, down_s, is_noticed=False)

    for after_s in (0.0, *times[:-1]):
        down_s = float(rng.uniform(0.2, 1.2))
        faults.machine.agenda.after(float(after_s), lambda down_s=down_s: lose(node_id, down_s))  # type: ignore[misc]
    faults.last(faults.now_s() + float(times[-1]))


MORE_FAULT_KINDS: Mapping[str, FaultPlan] = MappingProxyType(
    {
        "clock jump": _jump_clock,
        "slow disk": _slow_disk,
        "partial write": _damage_checkpoint,
        "reports cut off": _cut_off_one_way("reports"),
        "orders cut off": _cut_off_one_way("orders"),
        "messages held back": _delay_for_long,
        "connection reset": _reset_connection,
        "node out of memory": _run_out_of_memory,
        "slow starts": _slow_starts,
        "flapping node": _flap_node,
    }
)
