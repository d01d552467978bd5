"""Many seeds of loans: `python -m springtide_studies.loans.check --seeds 200`. Is a guaranteed minimum ever broken, is
every server back in time, and what does the choice of servers cost beside the exact one?
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from springtide.core.decision import Capacity
from springtide.core.resources import NodeId
from springtide.core.workload import DEFAULT_GRACE_S
from springtide.scheduling.loans.policy import Loaning
from springtide.scheduling.loans.pools import LabelVerdict, NodeView, PoolState, Strategy
from springtide.scheduling.registry import make_policy
from springtide.solvers.reclaim import Server, Victim, cost_of
from springtide_studies.bounds.reclaim_milp import reclaim_exactly
from springtide_studies.fapes.play import request_rule
from springtide_studies.loans.play import START_S, LoanSetting, run_loans
from springtide_studies.workloads.tidal import TidalSetting

CLUSTER, DEVICES_PER_SERVER, DAYS = "6x8@3+3", 8, 2
POLICIES = ("two-way/fifo", "tide/fifo", "tide/springtide")
BOUND_S = DEFAULT_GRACE_S + START_S
# Of the exact choice's cost, all choices of a policy together.
COST_BOUND = 1.10


class SeedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of servers to reclaim at once: its cost and the least possible, in jobs and in device-seconds."""

    at_s: float
    num_servers: int
    jobs: float
    least_jobs: float
    device_s: float
    least_device_s: float


class SeedResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one seed under one policy. Seconds from a server's reclaim to its last ready replica."""

    seed: int
    policy: str
    minimums: int
    broken: int
    reclaims_s: tuple[float, ...]
    num_interrupting: int
    choices: tuple[SeedChoice, ...]


class Watched:
    """A strategy whose every new choice of servers that jobs must leave at once is compared with the exact one."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self.choices: list[SeedChoice] = []

    def choose(self, pools: PoolState) -> LabelVerdict:
        """The verdict of the strategy."""
        verdict = self._strategy.choose(pools)
        new = {node_id for node_id in verdict.reclaimed if not pools.by_id[node_id].is_reclaimed}
        open_ = [node for node in pools.nodes if node.pool == "training" and node.jobs and not node.is_reclaimed]
        # Training's own servers are taken for guaranteed minimums alone.
        may_serve = sum(node.num_devices for node in pools.nodes if node.pool == "inference")
        if pools.required <= may_serve:
            open_ = [node for node in open_ if node.owner != "training" or node.node_id in new]
        new &= {node.node_id for node in open_}
        if new:
            self.choices.append(compared(pools, open_, new))
        return verdict

    def capacity(self, pools: PoolState, verdict: LabelVerdict) -> tuple[Capacity, ...]:
        """What the strategy says."""
        return self._strategy.capacity(pools, verdict)


def compared(pools: PoolState, open_: Sequence[NodeView], chosen: set[NodeId]) -> SeedChoice:
    """What the chosen servers cost beside the least that as many devices do, every job being stopped whole.

    By jobs, as FaPES counts; and in device-seconds: what stopping and going on takes all devices of a job.
    """
    job_ids = list(dict.fromkeys(job_id for node in open_ for job_id in node.jobs))
    number_of = {job_id: number for number, job_id in enumerate(job_ids)}
    servers = [
        Server(num_devices=node.num_devices, jobs={number_of[job_id]: count for job_id, count in node.jobs.items()})
        for node in open_
    ]
    numbers = [number for number, node in enumerate(open_) if node.node_id in chosen]
    needed = sum(servers[number].num_devices for number in numbers)
    stop_s = pools.snapshot.overheads.cost_s(1)
    held = [pools.snapshot.allocations[job_id].num_devices for job_id in job_ids]
    alike = [Victim() for _ in job_ids]
    by_devices = [Victim(stop_cost=num_devices * stop_s) for num_devices in held]
    return SeedChoice(
        at_s=pools.now_s,
        num_servers=len(numbers),
        jobs=cost_of(servers, alike, numbers),
        least_jobs=reclaim_exactly(servers, alike, needed).cost,
        device_s=cost_of(servers, by_devices, numbers),
        least_device_s=reclaim_exactly(servers, by_devices, needed).cost,
    )


def check_seed(seed: int, policy: str) -> SeedResult:
    """Play one seed: a tide of its own height, shape, noise and surges on 6 servers of 8 devices over two days.

    Raises InvalidRequest, or InvariantViolation if the run breaks an invariant.
    """
    rng = np.random.default_rng(np.random.SeedSequence([seed, 11]))
    n_r_max = int(rng.integers(1, 4))
    tide = TidalSetting(
        num_servers=n_r_max,
        days=DAYS + 1,
        devices_per_server=DEVICES_PER_SERVER,
        num_functions=8,
        night_fraction=float(rng.uniform(0.1, 0.6)),
        noise_fraction=float(rng.uniform(0.0, 0.2)),
        surges_per_day=float(rng.uniform(0.0, 4.0)),
        max_over_min=float(rng.uniform(1.0, 2.0)),
    )
    made = make_policy(policy)
    assert isinstance(made, Loaning), f"{policy} is no strategy of loans"
    watched = Watched(made.strategy)
    setting = LoanSetting(policy=policy, n_r_max=n_r_max, days=DAYS, seed=seed, cluster=CLUSTER)
    run = run_loans(setting, policy=msgspec.structs.replace(made, strategy=watched), tide=tide)
    minimums = run.minimums
    done = [reclaim for reclaim in minimums.reclaims if not reclaim.is_called_off]
    return SeedResult(
        seed=seed,
        policy=policy,
        minimums=minimums.num_demanded,
        broken=minimums.num_broken,
        reclaims_s=tuple(r.served_s - r.drained_s for r in done if r.served_s is not None),
        num_interrupting=sum(reclaim.is_interrupting for reclaim in done),
        choices=tuple(watched.choices),
    )


def summary(results: Sequence[SeedResult]) -> tuple[str, bool]:
    """A line about all seeds of one policy, and whether it passes."""
    times_s = [seconds for result in results for seconds in result.reclaims_s]
    choices = [choice for result in results for choice in result.choices]
    by_jobs = _ratio(sum(c.jobs for c in choices), sum(c.least_jobs for c in choices))
    by_devices = _ratio(sum(c.device_s for c in choices), sum(c.least_device_s for c in choices))
    broken = [result.seed for result in results if result.broken]
    p95_s = float(np.percentile(times_s, 95)) if times_s else 0.0
    holds = not broken and p95_s <= BOUND_S and _cost(results[0].policy, by_jobs, by_devices) <= COST_BOUND
    words = [
        f"{results[0].policy}: {len(results)} seeds, {sum(r.minimums for r in results)} minimums demanded",
        f"{sum(r.broken for r in results)} broken" + (f" (seeds {broken[:10]})" if broken else ""),
        f"{len(times_s)} servers taken at once, {sum(r.num_interrupting for r in results)} of them from stopped jobs",
        f"back in {float(np.median(times_s)) if times_s else 0.0:.1f} s (p95 {p95_s:.1f}, bound {BOUND_S:.1f})",
        f"cost against the exact choice x{by_jobs:.3f} by jobs, x{by_devices:.3f} in device-seconds "
        f"({len(choices)} choices)",
        "holds" if holds else "DOES NOT HOLD",
    ]
    return "; ".join(words), holds


def _cost(policy: str, by_jobs: float, by_devices: float) -> float:
    """What has to be near the exact choice: what the strategy weighs, where a job that is taken from is stopped."""
    if request_rule(policy) != "rigid":
        return 1.0
    return by_jobs if policy.startswith("two-way") else by_devices


def _ratio(cost: float, least: float) -> float:
    return cost / least if least > 0.0 else 1.0


def main(arguments: list[str] | None = None, write: Callable[[str], object] = sys.stdout.write) -> int:
    """Play the seeds; 1 if any policy fails."""
    parser = argparse.ArgumentParser(prog="python -m springtide_studies.loans.check", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--policy", default=",".join(POLICIES), help="one or more, separated by commas")
    chosen = parser.parse_args(arguments)
    all_hold = True
    for policy in chosen.policy.split(","):
        line, holds = summary([check_seed(seed, policy) for seed in range(chosen.first, chosen.first + chosen.seeds)])
        write(line + "\n")
        all_hold = all_hold and holds
    return 0 if all_hold else 1


if __name__ == "__main__":
    sys.exit(main())
