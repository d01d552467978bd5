"""Status of pools as users see it: each node's label, what was loaned and reclaimed, and the demand over time.

As in core.status, times named `_at_s` are on the platform's clock.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from springtide.core.resources import Pool

# What a reclaim met on its server: jobs that were stopped, only jobs that went on elsewhere, or none.
ReclaimKind = Literal["interrupting", "shrinking", "idle"]
# What a reclaim did to a job: stopped it, took workers away, moved them, or ended some by force after the grace.
Effect = Literal["stopped", "shrunk", "moved", "forced"]
HandoverState = Literal["draining", "done", "called off", "lost"]


class DrainStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A node on its way into `pool`. Since `reclaim_at_s` workloads there have to leave (None: they may stay).

    `cost_s` is what the reclaim costs training, in device-seconds, as the policy estimates.
    """

    pool: Pool
    since_at_s: float
    reclaim_at_s: float | None
    reason: str
    cost_s: float


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A node, what it is labelled for, the pool that owns it and how many of its devices jobs and services hold."""

    node_id: str
    pool: Pool
    owner: Pool
    is_loaned: bool
    num_devices: int
    num_training: int
    num_serving: int
    isolates_devices: bool = False
    drain: DrainStatus | None = None


class PoolStatus(msgspec.Struct, frozen=True, kw_only=True):
    """All nodes of one label. `num_borrowed` are owned by another pool, `num_lent` of its own have another label."""

    pool: Pool
    num_nodes: int
    num_devices: int
    num_training: int
    num_serving: int
    num_borrowed: int
    num_lent: int
    num_draining: int


class AffectedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job that had to leave a reclaimed node, and its workers before and after."""

    workload_id: str
    name: str
    effect: Effect
    num_workers_before: int
    num_workers_after: int


class Handover(msgspec.Struct, frozen=True, kw_only=True):
    """A node's way from one pool to another: a loan towards training, a reclaim towards services.

    Wanted at `demanded_at_s`; from `reclaim_at_s` on the workloads there had to leave; labelled at `labelled_at_s`; the
    first replica of a service was ready there at `serving_at_s`. None: not yet, or never. `is_return` says that the
    node goes back to the pool that owns it. `cost_s` is in device-seconds, as the policy estimated.
    """

    node_id: str
    num_devices: int
    kind: Literal["loan", "reclaim"]
    from_pool: Pool
    to_pool: Pool
    is_return: bool
    state: HandoverState
    demanded_at_s: float
    reclaim_at_s: float | None = None
    labelled_at_s: float | None = None
    serving_at_s: float | None = None
    reason: str = ""
    cost_s: float = 0.0
    reclaim_kind: ReclaimKind = "idle"
    affected: tuple[AffectedJob, ...] = ()


class LoanInterval(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of time in which a node was labelled for another pool than its owner (end None: it still is)."""

    node_id: str
    owner: Pool
    pool: Pool
    start_s: float
    end_s: float | None


class PoolSize(msgspec.Struct, frozen=True, kw_only=True):
    """From `at_s` on: how many devices services could hold, and how many the pool of inference owns."""

    at_s: float
    num_open: int
    num_owned: int


class TideBand(msgspec.Struct, frozen=True, kw_only=True):
    """Devices that services are expected to need at most in the bin that begins at `at_s`, and the band around it."""

    at_s: float
    expected: float
    lower: float
    upper: float


class TideStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How many devices services needed, and are forecast to need.

    `peaks[i]` is the most that was needed in the bin of `bin_s` that begins at `from_at_s + i * bin_s`; `level` is what
    they need now (None: not reported yet). `forecast` begins with the present bin, its bins are `forecast_bin_s`
    long, and it is empty while less than a day is known. `sizes` are the pool's size over the same time.
    """

    bin_s: float
    day_s: float
    from_at_s: float
    peaks: tuple[int, ...]
    level: int | None
    forecast_bin_s: float = 0.0
    forecast: tuple[TideBand, ...] = ()
    sizes: tuple[PoolSize, ...] = ()


class PoolsReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything there is to say of pools at one instant; `pools` is empty where no node belongs to one kind.

    `handovers` are the newest, those under way included, the oldest of them first.
    """

    now_s: float
    wall_clock_offset_s: float
    pools: tuple[PoolStatus, ...]
    nodes: tuple[NodeStatus, ...]
    tide: TideStatus
    handovers: tuple[Handover, ...]
