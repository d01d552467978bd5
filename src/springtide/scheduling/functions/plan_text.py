"""Plans on functions and what they cost, as text for users."""

from __future__ import annotations

import math

from springtide.core.functions import FunctionPlan


def words(plan: FunctionPlan) -> str:
    """What a plan is, for people: `6 functions (3 stages x 2), 2048+1024+1024 MB`."""
    sizes = [stage.memory_mb for stage in plan.stages]
    memory = f"{sizes[0]} MB each" if len(set(sizes)) == 1 else "+".join(map(str, sizes)) + " MB"
    count = "1 function" if plan.num_functions == 1 else f"{plan.num_functions} functions"
    return f"{count} ({len(plan.stages)} x {plan.num_replicas}), {memory}"


def money(usd: float) -> str:
    """$4.20; what is less than half a cent with two digits that count."""
    return f"${usd:.2f}" if usd >= 0.005 or usd == 0 else f"${usd:.2g}"


def above(usd: float) -> str:
    """A figure that is enough, with as few digits as make sense."""
    if usd >= 0.01:
        return f"{math.ceil(usd * 100) / 100:.2f}"
    digits = 1 - math.floor(math.log10(usd)) if usd > 0 else 2
    return f"{math.ceil(usd * 10**digits) / 10**digits:.{digits}f}"
