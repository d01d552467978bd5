"""What a world of functions in events is made of: a service, plans, what may go wrong, and one function."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from springtide.backends.functions.coordinator import messages
from springtide.core.functions import (
    FunctionPlan,
    FunctionPrices,
    FunctionService,
    FunctionStage,
    MemorySize,
)
from springtide.core.wire.functions import (
    FunctionOrder,
    Place,
)
from springtide.runtime.functions.timing import StepTimer

PRICES = FunctionPrices(
    usd_per_gb_s=0.0000166667,
    usd_per_invocation=2e-7,
    usd_per_put=5e-6,
    usd_per_get=4e-7,
    usd_per_stored_gb_month=0.023,
)
BATCH = 8


def service_of(lifetime_s: float = 900.0, cold_start_s: float = 1.0) -> FunctionService:
    sizes = tuple(MemorySize(memory_mb=mb, vcpus=1.0, bytes_per_s=70e6) for mb in (1024, 2048, 3072))
    return FunctionService(
        name="test", sizes=sizes, prices=PRICES, lifetime_s=lifetime_s, concurrency=64, cold_start_s=cold_start_s
    )


def whole_plan(num_replicas: int = 2, memory_mb: int = 1024, **fields: int) -> FunctionPlan:
    """Every function holds the whole model."""
    stage = FunctionStage(first_layer=0, end_layer=4, memory_mb=memory_mb)
    return FunctionPlan(stages=(stage,), num_replicas=num_replicas, **fields)


def plan_of(num_stages: int = 2, num_replicas: int = 1, memory_mb: int = 1024) -> FunctionPlan:
    stages = tuple(
        FunctionStage(first_layer=2 * i, end_layer=2 * i + 2, memory_mb=memory_mb) for i in range(num_stages)
    )
    return FunctionPlan(stages=stages, num_replicas=num_replicas, num_micro_batches=2)


@dataclass
class Faults:
    """Probabilities of what may happen to an invocation, a report, or a function in any second of its life."""

    killed_per_s: float = 0.0
    throttled: float = 0.0
    vanishes: float = 0.0
    starts_late: float = 0.0
    lost_contact: float = 0.0
    unread: float = 0.0
    stale: float = 0.0
    repeated: float = 0.0
    user_error_at: int | None = None
    trouble_from_s: float | None = None
    trouble_until_s: float = 0.0
    too_small_mb: int = 0
    store_dies_per_s: float = 0.0
    store_moves: bool = False


@dataclass(eq=False)
class Function:
    """One invocation as it runs, or does not."""

    order: FunctionOrder
    invoke: messages.Invoke
    memory_mb: int
    invoked_at_s: float
    is_contact_lost: bool = False
    phase: str = "cold"
    joined: tuple[int, int] | None = None
    step: int = 0
    applied: list[int] = field(default_factory=list)
    began_at_s: float | None = None
    saved_step: int | None = None
    wake: int = 0
    done: bool = False
    losses: list[tuple[int, float, int]] = field(default_factory=list)
    plan: FunctionPlan | None = None
    timer: StepTimer = field(default_factory=StepTimer)
    computed_s: float = 0.0
    wire_url: str = ""
    waits_since_s: float | None = None
    stuck_until_s: float | None = None
    reported_at_s: float = -math.inf
    owes_report: bool = False

    @property
    def place(self) -> Place:
        return Place(self.order.stage, self.order.replica)
