"""What the tests of deadlines under the tide share: nodes that come and go for training, and jobs with deadlines.

Many seeds by hand: PYTHONPATH=tests python -m kits.simulation.tide_deadlines FIRST COUNT
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import numpy as np

from kits.solvers.reservations import verify
from springtide.core.decision import Capacity, Drain, Plan, Policy, PoolAllocation, Snapshot
from springtide.core.resources import Node, NodeId, Topology, make_node
from springtide.core.tide import Tide
from springtide.core.workload import Entrypoint, Goal, TrainingJob
from springtide.scheduling.policies.springtide.policy import Springtide
from springtide.scheduling.registry import make_policy
from springtide.simulator.fluid.invariants import InvariantViolation
from springtide.simulator.fluid.play import FluidRunResult, play
from springtide.simulator.fluid.rules import ProfiledSpeeds, Times, overhead_rule
from springtide_studies.loans.minimums import Minimums, minimums_for
from springtide_studies.workloads.tidal import TidalSetting, draw_tidal

SOURCE = Entrypoint(source_path="a.py")
RULES = ("elasticflow", "measured", "pollux")
DAYS = 4


class Coming:
    """When each node is there for training: `away` has the stretches (from, to) in which it is not.

    For `notice_s` before that it is cordoned: who is there may stay, nobody else comes, and nobody is to count on it.
    """

    def __init__(
        self,
        nodes: list[Node],
        away: dict[str, list[tuple[float, float]]],
        *,
        notice_s: float = 0.0,
    ) -> None:
        self.nodes = nodes
        self.away = away
        self.notice_s = notice_s
        edges = {edge for spans in away.values() for begin_s, end_s in spans for edge in (begin_s - notice_s, end_s)}
        self.moments = sorted(edges | {begin_s for spans in away.values() for begin_s, _ in spans})

    def is_there(self, node: Node, now_s: float) -> bool:
        return not any(a <= now_s < b for a, b in self.away.get(node.node_id, []))

    def is_cordoned(self, node: Node, now_s: float) -> bool:
        return any(a - self.notice_s <= now_s < a for a, _ in self.away.get(node.node_id, []))

    def capacity(self, now_s: float) -> tuple[Capacity, ...]:
        def counted(moment_s: float) -> int:
            return sum(
                len(node.devices)
                for node in self.nodes
                if self.is_there(node, moment_s) and not self.is_cordoned(node, moment_s)
            )

        moments = [now_s, *(moment for moment in self.moments if moment > now_s)]
        return tuple(Capacity(from_s=moment, num_devices=counted(moment)) for moment in moments)

    def shown(self, snapshot: Snapshot) -> tuple[tuple[Node, ...], dict[NodeId, Drain]]:
        now_s = snapshot.now_s
        taken = {device for given in snapshot.allocations.values() for device in given.device_ids}
        nodes: list[Node] = []
        drains: dict[NodeId, Drain] = {}
        for node in self.nodes:
            if not self.is_there(node, now_s):
                continue
            if self.is_cordoned(node, now_s):
                left = tuple(device for device in node.devices if device.device_id in taken)
                if not left:
                    continue
                name = NodeId(f"{node.node_id}[{','.join(str(device.index) for device in left)}]")
                node = msgspec.structs.replace(node, node_id=name, devices=left)
                drains[name] = Drain(pool="inference", since_s=now_s)
            nodes.append(node)
        return tuple(nodes), drains


class Tided:
    """A training policy that is shown only the nodes that are there; who is on another is shown without it."""

    def __init__(self, training: Policy, coming: Coming) -> None:
        self.training = training
        self.coming = coming
        self._clusters: dict[tuple[NodeId, ...], Topology] = {}

    def decide(self, snapshot: Snapshot) -> Plan:
        now_s = snapshot.now_s
        nodes, drains = self.coming.shown(snapshot)
        key = tuple(node.node_id for node in nodes)
        cluster = self._clusters.setdefault(key, Topology(nodes=nodes))
        rigid = {view.job.job_id for view in snapshot.jobs if not view.job.elastic}
        held: dict[Any, PoolAllocation] = {}
        for who, given in snapshot.allocations.items():
            left = tuple(device for device in given.device_ids if device in cluster.device_set)
            if len(left) == given.num_devices:
                held[who] = given
            elif left and who not in rigid:
                held[who] = msgspec.structs.replace(given, device_ids=left)
        reduced = msgspec.structs.replace(
            snapshot, cluster=cluster, allocations=held, drains=drains, capacity=self.coming.capacity(now_s)
        )
        plan = self.training.decide(reduced)
        emptied = {device.device_id for node in nodes if node.node_id in drains for device in node.devices}
        for who, given in plan.allocations.items():
            assert cluster.device_set >= set(given.device_ids)
            own = held[who].device_ids if who in held else ()
            assert emptied.isdisjoint(set(given.device_ids) - set(own)), f"{who} is sent to a node that is emptied"
        reasons = dict(plan.reasons)
        for who, given in snapshot.allocations.items():
            if held.get(who) is not given:
                reasons.setdefault(who, "services need its node")
        later = [moment for moment in self.coming.moments if moment > now_s][:1]
        moments = [*later, *([] if plan.revisit_at_s is None else [plan.revisit_at_s])]
        return msgspec.structs.replace(plan, reasons=reasons, revisit_at_s=min(moments, default=None))


def draw_coming(rng: np.random.Generator, nodes: list[Node], num_home: int, horizon_s: float) -> Coming:
    """The last `num_home` nodes go to services by a wave with noise, bin by bin; any of them first."""
    home = [str(node.node_id) for node in nodes[len(nodes) - num_home :]]
    day_s = float(rng.uniform(1500.0, 6000.0))
    bin_s = day_s / float(rng.choice([12, 24, 48]))
    phase = float(rng.uniform(0.0, day_s))
    away: dict[str, list[tuple[float, float]]] = {name: [] for name in home}
    taken: list[str] = []
    since: dict[str, float] = {}
    at_s = 0.0
    while at_s < horizon_s:
        wave = 0.5 - 0.5 * np.cos(2 * np.pi * (at_s + phase) / day_s)
        need = int(np.clip(round(num_home * wave + rng.normal(0.0, 0.35)), 0, num_home))
        moment_s = at_s + float(rng.uniform(0.0, 0.5)) * bin_s
        while len(taken) < need:
            name = str(rng.choice([name for name in home if name not in taken]))
            taken.append(name)
            since[name] = moment_s
            moment_s += 3.0
        while len(taken) > need:
            name = taken.pop(int(rng.integers(len(taken))))
            away[name].append((since[name], moment_s))
        at_s += bin_s
    for name in taken:
        away[name].append((since[name], horizon_s))
    notice_s = float(rng.choice([0.0, 60.0, 300.0]))
    return Coming(nodes, away, notice_s=notice_s)


def draw_jobs(rng: np.random.Generator, num_jobs: int, most: int, over_s: float) -> list[tuple[float, TrainingJob]]:
    """Arrivals in bursts, with curves that rise faster than linear, flatten or fall; some rigid, some best effort."""
    arrivals: list[tuple[float, TrainingJob]] = []
    at_s = 0.0
    for index in range(num_jobs):
        if rng.random() < 0.6:
            at_s += float(rng.exponential(over_s / num_jobs / 0.6))
        rate = float(np.exp(rng.uniform(-1.0, 3.0)))
        profile: dict[int, float] = {}
        for n in (1, 2, 4, 8, 16):
            profile[n] = rate
            rate *= float(rng.uniform(0.8, 2.2))
        length_s = float(np.exp(rng.uniform(3.0, 7.5)))
        is_elastic = bool(rng.random() < 0.85)
        fixed = int(rng.choice([1, 2, 4]))
        alone_s = length_s if is_elastic else length_s * profile[1] / profile[fixed]
        hard = rng.random() < 0.85
        deadline_s = at_s + float(rng.uniform(0.4, 2.5)) * alone_s
        arrivals.append(
            (
                at_s,
                TrainingJob(
                    job_id=f"job-{index}",
                    name=f"job-{index}",
                    entrypoint=SOURCE,
                    max_workers=most if is_elastic else fixed,
                    num_virtual_shards=64,
                    total_steps=max(1, int(length_s * profile[1])),
                    profile_steps_per_s=profile,
                    requested_workers=1 if is_elastic else fixed,
                    elastic=is_elastic,
                    goal=Goal(deadline_s=deadline_s if hard else None, waits=bool(rng.random() < 0.5)),
                ),
            )
        )
    return arrivals


class Watched:
    """Springtide, and after every decision its book; with `doubts` also a policy that knows nothing but the memory."""

    def __init__(self, *, doubts: bool = False) -> None:
        self.policy = Springtide()
        self.derived = self.policy.make_derived()
        self.doubts = doubts

    def decide(self, snapshot: Snapshot) -> Plan:
        other = None
        if self.doubts:
            memory = msgspec.json.decode(msgspec.json.encode(snapshot.memory))
            other = Springtide().decide(msgspec.structs.replace(snapshot, memory=memory))
        plan = self.policy.decide(snapshot, self.derived)
        if other is not None:
            assert other.allocations == plan.allocations
            assert other.memory == plan.memory
            assert (other.admitted, other.rejected) == (plan.admitted, plan.rejected)
            assert (other.reasons, other.revisit_at_s) == (plan.reasons, plan.revisit_at_s)
        state = self.derived.state
        assert state is not None
        faults = verify(state.reservations)
        assert not faults, faults
        return plan


def play_by_hand(seed: int, *, doubts: bool = False) -> FluidRunResult:
    """Springtide alone under a tide that is told as it comes; raises at the first promise that is broken."""
    rng = np.random.default_rng(seed)
    nodes = [make_node(f"n{index}", 4) for index in range(4)]
    coming = draw_coming(rng, nodes, 2, 20_000.0)
    arrivals = draw_jobs(rng, 30, 16, 8_000.0)
    rule = overhead_rule(RULES[seed % len(RULES)], 16)
    policy = Tided(Watched(doubts=doubts), coming)
    return play(policy, arrivals, nodes, rule=rule, speeds=ProfiledSpeeds(devices_per_node=4))


def play_tide(seed: int, policy: str = "tide/springtide") -> tuple[FluidRunResult, Minimums]:
    """The strategy `tide` around springtide, under services that follow a tide and surge; raises at the first promise
    that is broken. Days are short, so that servers go to and fro all the time."""
    rng = np.random.default_rng([seed, 77])
    nodes = [make_node(f"n{index}", 4, pool="training" if index < 2 else "inference") for index in range(4)]
    day_s = float(rng.choice([3600.0, 7200.0, 14_400.0]))
    setting = TidalSetting(
        num_servers=2,
        days=DAYS + 1,
        devices_per_server=4,
        num_functions=int(rng.choice([3, 6])),
        noise_fraction=float(rng.choice([0.05, 0.15])),
        surges_per_day=float(rng.choice([0.0, 1.0])),
        day_s=day_s,
    )
    arrivals, times = draw_jobs(rng, 40, 16, 0.9 * DAYS * day_s), Times(service_start_s=3.7, service_stop_s=1.0)
    minimums = minimums_for(arrivals, times)
    played = play(
        make_policy(policy),
        arrivals,
        nodes,
        rule=overhead_rule(RULES[seed % len(RULES)], 16),
        speeds=ProfiledSpeeds(devices_per_node=4),
        timed_events=draw_tidal(seed, setting).timed_events,
        times=times,
        tide=Tide(day_s=day_s),
        watcher=minimums,
    )
    return played, minimums


def kept_of(played: FluidRunResult) -> int:
    """How many promises there were; all of them must have been kept."""
    admitted = [
        run for run in played.runs.values() if run.admitted_s is not None and run.job.goal.deadline_s is not None
    ]
    for run in admitted:
        assert run.ended_s is not None, f"{run.job.job_id} never ended"
        late_s = run.ended_s - (run.job.goal.deadline_s or 0.0)
        assert late_s <= 1e-6, f"{run.job.job_id} ended {late_s:.1f} s after its promised deadline"
    return len(admitted)


def main(first: int, count: int) -> int:
    """Both kinds of plays for so many seeds; prints what broke."""
    totals = {"by hand": 0, "tide/springtide": 0}
    num_bad = 0
    for seed in range(first, first + count):
        for name, begin in (("by hand", play_by_hand), ("tide/springtide", lambda seed: play_tide(seed)[0])):
            try:
                totals[name] += kept_of(begin(seed))
            except (AssertionError, InvariantViolation) as error:
                num_bad += 1
                print(f"seed {seed}, {name}: {error}", flush=True)
    print(f"{count} seeds: promises kept {totals}, runs in which something broke: {num_bad}")
    return num_bad


if __name__ == "__main__":
    sys.exit(min(1, main(int(sys.argv[1]), int(sys.argv[2]))))
