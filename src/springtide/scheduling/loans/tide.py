"""Our strategy of loans: servers train while the forecast does not need them for services, and return before the peak.

A server that services will need gets no job that would not end by then. Servers needed at once are taken where the
least work is lost, from jobs that can shrink before any job is stopped. See docs/tide.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from springtide.core.decision import Capacity, JobView, Relabel
from springtide.core.errors import InvalidRequest
from springtide.core.resources import NodeId
from springtide.core.workload import DEFAULT_GRACE_S, JobState, WorkloadId
from springtide.perf.tide import DEFAULT_QUANTILE, Forecaster, TideForecast
from springtide.scheduling.loans.losses import Leaving, Losses, any_job, stay_s
from springtide.scheduling.loans.outlook import (
    Coming,
    DemandOutlook,
    capacity_of,
    needed_lately,
    needed_now,
    outlook_of,
    returns_in_s,
)
from springtide.scheduling.loans.pools import LabelVerdict, NodeView, PoolState
from springtide.scheduling.loans.reasons import loaned_text, reclaimed_text, soon_text
from springtide.scheduling.loans.reclaim import choose_victims, servers_of
from springtide.scheduling.placement.gangs import fixed_size
from springtide.solvers.reclaim import Victim, reclaim_by_gain

Victims = Literal["loss", "gain", "any"]

# A server is kept free for a coming need for at most this part of a day: what could run in a longer time is worth more
# than stopping it costs.
PATIENCE_FRACTION = 1 / 12
# How far ahead the tide is forecast for promises.
PROMISED_DAYS = 1.0


@dataclass(frozen=True, kw_only=True)
class TideStrategy:
    """Loans and reclaims by the forecast of the tide. Each parameter can switch one idea off, to measure its effect.

    `ahead`: look ahead at all. `quantile`: the chance with which services need no more than the forecast. `victims`:
    how servers to take are chosen: by what their jobs lose, by FaPES's reclaim gain, or in order. `shrink`: elastic
    jobs give up devices before any job is stopped. `fractions`: also parts of servers with isolated devices are loaned.
    `weekly`: weekdays have a season of their own once two weeks are known.
    """

    ahead: bool = True
    quantile: float = DEFAULT_QUANTILE
    victims: Victims = "loss"
    shrink: bool = True
    fractions: bool = True
    weekly: bool = True

    def __post_init__(self) -> None:
        """Raises InvalidRequest for a quantile below 0.5 or not below 1."""
        if not 0.5 <= self.quantile < 1.0:
            raise InvalidRequest(f"a quantile of {self.quantile:g} leaves no band; give 0.5 to less than 1, like 0.95")

    def choose(self, pools: PoolState) -> LabelVerdict:
        """Return the labels that nodes are to change to."""
        forecast, common = self.forecast(pools), dict[NodeId, str]()
        while True:
            choice = _Choice(self, pools, forecast, common)
            verdict = choice.verdict()
            if choice.common == common:
                return verdict
            # All their devices count from now on, so that what else was chosen may be too much.
            common = choice.common

    def capacity(self, pools: PoolState, verdict: LabelVerdict) -> tuple[Capacity, ...]:
        """The capacity for promises: what training has, until services would need it back on their highest days."""
        num_now = 0
        for node in pools.nodes:
            relabel = verdict.pools.get(node.node_id)
            label = relabel.pool if relabel is not None else node.pool
            num_now += {"training": node.num_devices, "shared": node.num_devices, "inference": 0}[label]
        tide = pools.snapshot.tide
        forecast = None
        if pools.needs:
            # A service deployed later may need more than the maximum of the services deployed now.
            forecast = self._forecaster(pools).forecast(tide, pools.now_s, tide.day_s * PROMISED_DAYS)
        largest = max((node.num_devices for node in pools.nodes), default=1)
        granularity = 1 if all(node.isolates_devices or node.owner == "shared" for node in pools.nodes) else largest
        lead_s = pools.snapshot.tide.day_s * PATIENCE_FRACTION if self.ahead else 0.0
        return capacity_of(pools, forecast, num_now, granularity, lead_s)

    def forecast(self, pools: PoolState) -> TideForecast | None:
        """The forecast for a day, at most the services' maxima; None without services."""
        if not pools.needs:
            return None
        tide = pools.snapshot.tide
        return self._forecaster(pools).forecast(tide, pools.now_s, tide.day_s * PROMISED_DAYS, pools.maximum)

    def _forecaster(self, pools: PoolState) -> Forecaster:
        return pools.forecasters.of(self.quantile, weekly=self.weekly)


def is_common(node: NodeView) -> bool:
    """Whether the node belongs to jobs and services together, so that it is never loaned."""
    return node.owner == "shared" and node.heading == "shared"


class _Choice:
    """One verdict: which nodes services need at once, which they will need, and which they do not need.

    While a verdict is being carried out, the same nodes are chosen again: a node under way comes before others.
    `common` are nodes that training has and that go back to jobs and services together, and why; it may find more.
    """

    def __init__(
        self, strategy: TideStrategy, pools: PoolState, forecast: TideForecast | None, common: Mapping[NodeId, str]
    ) -> None:
        self.strategy = strategy
        self.pools = pools
        self.forecast = forecast
        self.needed = needed_now(pools)
        away_s = returns_in_s(forecast, self.needed, pools.now_s)
        self.losses = Losses(pools, away_s=away_s, shrinks=strategy.shrink)
        self.leaving = Leaving(pools, self.losses)
        self.change_s = DEFAULT_GRACE_S + pools.snapshot.overheads.cost_s(1)
        self.patience_s = pools.snapshot.tide.day_s * PATIENCE_FRACTION
        self.span_s = self._span_s()
        self.outlook: DemandOutlook = outlook_of(pools, forecast if strategy.ahead else None, self.span_s)
        # A need of a moment ago may come back, so a serving node is not loaned for so long.
        self.held = max(self.needed, needed_lately(pools), self.outlook.within(self.span_s))
        # The nodes that are to serve, and why; those of them whose jobs have to go, and what that costs; those that
        # serve as far as services need it, whose other devices jobs may keep.
        self.serving: dict[NodeId, str] = {}
        self.reclaimed: dict[NodeId, float] = {}
        self.parted: dict[NodeId, str] = dict(common)
        self.common: dict[NodeId, str] = dict(common)
        self.later: set[NodeId] = set()
        self.supply = 0

    def verdict(self) -> LabelVerdict:
        """Choose nodes for what is needed now, then for what will be needed; the others train."""
        self._keep()
        self._take(self.pools.required, is_minimum=True)
        self._take(self.needed, is_minimum=False)
        for step in self.outlook.steps:
            self._prepare(step)
        self._hold()
        self._gather()
        self._part()
        return LabelVerdict(
            pools=self._labels(),
            reclaimed=frozenset(self.reclaimed),
            growth="load",
            job_costs=self._job_costs(),
            revisit_at_s=self._revisit_at_s(),
        )

    # --- what is needed now ---------------------------------------------------------------------------------------

    def _open(self, *, is_minimum: bool) -> list[NodeView]:
        """The nodes not chosen yet, those under way first. Only minimums may take what training owns."""
        found = [
            node
            for node in self.pools.nodes
            if node.node_id not in self.serving
            and node.node_id not in self.common
            and (node.heading != "shared" or (node.is_idle and not is_common(node)))
            and (is_minimum or node.owner != "training" or node.heading == "inference")
        ]
        return sorted(found, key=lambda node: (node.heading != "inference", node.owner != "inference"))

    def _add(self, node: NodeView, reason: str) -> None:
        self.supply += node.num_devices
        self.serving[node.node_id] = (node.drain.reason if node.drain is not None else "") or reason

    def _keep(self) -> None:
        """Keep serving nodes, and go on freeing nodes that are being freed, as long as services need them."""
        for node in self.pools.nodes:
            if is_common(node) or node.node_id in self.common:
                self.supply += node.num_devices
            elif node.heading == "shared":
                self.supply += node.num_serving
            elif node.replicas and node.heading == "inference" and not node.jobs:
                self._add(node, f"services hold {node.num_serving} devices here")
        for node in self._open(is_minimum=True):
            is_left = node.drain is not None and node.heading == "inference" and node.pool != "inference"
            if is_left and node.drain is not None and (node.is_reclaimed or not node.jobs) and self.supply < self.held:
                self._add(node, f"services need {self.needed} devices")
                if node.jobs:
                    self.reclaimed[node.node_id] = node.drain.cost_s

    def _take(self, needed: int, *, is_minimum: bool) -> None:
        """Provide `needed` devices at once: idle nodes, then loaned parts of nodes, then nodes taken from jobs."""
        reason = f"services need {needed} devices"
        for node in self._open(is_minimum=is_minimum):
            # Also on a node that is about to leave the inference pool and still has its replicas.
            if self.supply < needed and not node.jobs:
                self._add(node, reason)
        # The smallest first: a node that was taken because the others were not enough does not replace them.
        for node in sorted(self.pools.nodes, key=lambda node: node.num_devices):
            is_part = node.heading == "shared" and not node.is_idle and not is_common(node)
            if is_part and (is_minimum or node.owner != "training"):
                num_free = node.num_devices - node.num_serving
                if self.supply < needed and node.node_id not in self.parted and num_free:
                    self.supply += num_free
                    self.parted[node.node_id] = reason
        missing = needed - self.supply
        candidates = self._open(is_minimum=is_minimum)
        if missing <= 0 or not candidates:
            return
        nodes, cost = self._victims(candidates, missing)
        reason = reclaimed_text(self.pools, nodes, missing, self.losses, is_minimum=is_minimum)
        surplus = sum(node.num_devices for node in nodes) - missing
        for node in sorted(nodes, key=lambda node: -node.num_training):
            if 0 < surplus < node.num_devices and node.jobs and self._has_parts(node) and node.drain is None:
                # Services take the devices that they need there, jobs keep the others.
                surplus = 0
                self.supply += node.num_devices
                self.parted[node.node_id] = reason
                if node.owner == "shared":
                    self.common[node.node_id] = reason
                continue
            self._add(node, reason)
            self.reclaimed[node.node_id] = cost / len(nodes)

    def _has_parts(self, node: NodeView) -> bool:
        return self.strategy.fractions and node.isolates_devices

    def _victims(self, candidates: Sequence[NodeView], num_devices: int) -> tuple[list[NodeView], float]:
        if self.strategy.victims == "loss":
            return choose_victims(self.pools, candidates, num_devices, self.losses.victim)
        if self.strategy.victims == "gain":
            servers, _ = servers_of(candidates)
            chosen = [candidates[number] for number in reclaim_by_gain(servers, num_devices)]
        else:
            chosen = []
            for node in candidates:
                if sum(taken.num_devices for taken in chosen) < num_devices:
                    chosen.append(node)
        jobs = {job_id for node in chosen for job_id in node.jobs if job_id in self.pools.job_of}
        return chosen, sum(self.losses.victim(self.pools.job_of[job_id]).stop_cost for job_id in sorted(jobs))

    # --- what will be needed --------------------------------------------------------------------------------------

    def _span_s(self) -> float:
        """How far ahead a server is kept free: for as long as the next job would run on it, at most `patience_s`."""
        if not self.strategy.ahead:
            return 0.0
        pools = self.pools
        held = self.losses.held
        # A job that was given devices does not count until it trains: otherwise its own start would change the verdict
        # that gave it these devices.
        waiting = [
            view
            for view in pools.snapshot.jobs
            if view.restarts.starts_at_s <= pools.now_s
            and (not held.get(view.job.job_id) or view.state in (JobState.PENDING, JobState.STARTING))
        ]
        total = sum(node.num_devices for node in pools.nodes)

        def size_of(view: JobView) -> int:
            return fixed_size(view, total)

        stay = stay_s(waiting, self.losses, pools.now_s, size_of)
        return max(self.change_s, min(stay, self.patience_s))

    def _prepare(self, step: Coming) -> None:
        """Choose the nodes that will serve a coming need.

        First nodes that are being freed already, then nodes whose jobs end in time, the last to end first; then nodes
        whose jobs can shrink when the need comes, and idle nodes. For a need that is expected right away, nodes are
        made ready now, idle ones first.
        """
        if self.supply >= step.num_devices:
            return
        is_near = step.in_s <= self.change_s
        reason = soon_text(self.pools, step)
        open_ = self._open(is_minimum=False)
        while self.supply < step.num_devices:
            is_expected = is_near and self.supply < step.expected
            freeing = next((node for node in open_ if node.heading == "inference" and node.jobs), None)
            idle = next((node for node in open_ if not node.jobs), None)
            shrinking = next((node for node in open_ if self.strategy.ahead and self.leaving.can_shrink(node)), None)
            ending = self._ending(open_, step.in_s)
            # Whether a serving node is loaned must not depend on which job runs on another node at this instant.
            is_ready = idle is not None and idle.heading == "inference" and is_near
            node = freeing or (idle if is_ready else None) or (idle or shrinking if is_expected else None)
            node = node or ending or shrinking or idle
            if node is None:
                return
            open_.remove(node)
            self._add(node, reason)
            if node.jobs and self.leaving.can_shrink(node) and node is not ending:
                self.leaving.shrink(node)
                if is_expected:
                    self.reclaimed[node.node_id] = 0.0
                elif node is shrinking and node is not freeing:
                    # Jobs may use it until then, so its drain does not begin yet.
                    self.later.add(node.node_id)

    def _ending(self, nodes: Sequence[NodeView], in_s: float) -> NodeView | None:
        """The node whose jobs end last of those that end in time."""
        found = [node for node in nodes if in_s > 0 and node.jobs and self.leaving.ends_in_s(node) <= in_s]
        return max(found, key=self.leaving.ends_in_s, default=None)

    # --- what comes of it -----------------------------------------------------------------------------------------

    def _hold(self) -> None:
        """Keep idle serving nodes as long as they may be needed again at any moment."""
        for node in self._open(is_minimum=False):
            if node.heading == "inference" and not node.jobs and self.supply < self.held:
                self._add(node, f"services needed {self.held} devices just now")

    def _gather(self) -> None:
        """Move the few replicas off nodes, so that these can be loaned, if the others have room for a long time."""
        if not self._is_wanted():
            return
        wide = outlook_of(self.pools, self.forecast if self.strategy.ahead else None, self.patience_s)
        # No service loses a replica by that, not even one that it only keeps in reserve.
        needed = max(self.pools.wanted, self.held, wide.within(self.patience_s))
        serving = [node for node in self.pools.nodes if node.node_id in self.serving and node.pool == "inference"]
        for node in sorted(serving, key=lambda node: (node.owner == "inference", node.num_serving)):
            # Without a forecast, a margin of half a node keeps a small rise from bringing the node back at once.
            margin = 0 if wide.is_known else node.num_devices // 2
            is_spare = node.replicas and not node.jobs and self._at_hand() - node.num_devices >= needed + margin
            if is_spare and (node.drain.pool == "training" if node.drain is not None else self._is_settled(node)):
                del self.serving[node.node_id]
                self.supply -= node.num_devices

    def _at_hand(self) -> int:
        """The supply without devices on loaned parts that jobs hold: those are taken where they are needed, no more."""
        return self.supply - sum(node.num_training for node in self.pools.nodes if node.node_id in self.parted)

    def _is_settled(self, node: NodeView) -> bool:
        """Whether services have what they want, and none of those on it has a replica that starts or stops."""
        held = self.pools.snapshot.allocations
        ready = {need.service_id: need.view.num_ready for need in self.pools.needs}
        missing = sum(max(0, need.wanted - need.view.num_ready - need.view.num_starting) for need in self.pools.needs)
        free = sum(
            each.num_devices - each.num_training - each.num_serving
            for each in self.pools.nodes
            if each.node_id in self.serving or each.heading == "shared"
        )
        return missing <= free and all(held[who].num_devices == ready.get(who) for who in node.replicas)

    def _part(self) -> None:
        """Loan the devices that no service will need on nodes of which services hold only a part."""
        surplus = self._at_hand() - max(self.pools.wanted, self.held)
        for node in sorted(self.pools.nodes, key=lambda node: node.num_serving):
            num_free = node.num_devices - node.num_serving
            is_part = node.node_id in self.serving and node.replicas and not node.jobs and 0 < num_free <= surplus
            is_open = node.pool == "inference" and self._has_parts(node) and self._is_settled(node)
            if is_part and is_open and self._is_wanted():
                surplus -= num_free
                self.parted[node.node_id] = loaned_text(self.pools, self.outlook)

    def _labels(self) -> dict[NodeId, Relabel]:
        labels: dict[NodeId, Relabel] = {}
        loan = loaned_text(self.pools, self.outlook)
        is_wanted = self._is_wanted()
        for node in self.pools.nodes:
            node_id = node.node_id
            if is_common(node):
                continue
            if node_id in self.parted or (node.heading == "shared" and node.num_serving):
                if node.pool != "shared":
                    labels[node_id] = Relabel(pool="shared", reason=self.parted.get(node_id, loan))
            elif node_id in self.serving:
                # Nothing can start on a node whose devices are all held, so it need not be drained yet.
                is_quiet = node.num_training >= node.num_devices and node.heading != "inference"
                is_drained = node_id in self.reclaimed or not (is_quiet or node_id in self.later)
                if node.pool != "inference" and is_drained:
                    cost_s = self.reclaimed.get(node_id, 0.0)
                    labels[node_id] = Relabel(pool="inference", reason=self.serving[node_id], cost_s=cost_s)
            elif node.pool != "training" and (is_wanted or node.heading != "inference"):
                reason = node.drain.reason if node.drain is not None and node.heading == "training" else ""
                labels[node_id] = Relabel(pool="training", reason=reason or loan)
        return labels

    def _is_wanted(self) -> bool:
        """Whether training could use more devices: a job holds fewer than it could, or waits for a part of one."""
        held = self.losses.held
        return self.pools.snapshot.num_parts_waiting > 0 or any(
            held.get(view.job.job_id, 0) < view.bounds.max_workers for view in self.pools.snapshot.jobs
        )

    def _job_costs(self) -> dict[WorkloadId, float]:
        if not self.parted and all(node.pool != "shared" for node in self.pools.nodes):
            return {}
        victim_of = self.losses.victim if self.strategy.victims == "loss" else any_job
        costs: dict[WorkloadId, float] = {}
        for job_id, view in self.pools.job_of.items():
            if self.losses.held.get(job_id):
                victim: Victim = victim_of(view)
                costs[job_id] = victim.shrink_cost if victim.num_spare else victim.stop_cost
        return costs

    def _revisit_at_s(self) -> float | None:
        """When to decide again: at the end of a forecast bin, as the next may differ. None without jobs."""
        forecast = self.forecast
        snapshot = self.pools.snapshot
        has_jobs = bool(snapshot.jobs) or snapshot.num_parts_waiting > 0
        if forecast is None or not forecast.is_known or not self.strategy.ahead or not has_jobs:
            return None
        ends = [forecast.until_s(index) for index in range(min(2, len(forecast.expected)))]
        return next((end_s for end_s in ends if end_s > self.pools.now_s), None)
