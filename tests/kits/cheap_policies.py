"""All policies by name for tests that loop over them: the costly ones with parameters that make a decision cheap."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from kits.simulation.sweeps import STRIDE
from springtide.scheduling.registry import POLICY_NAMES, make_policy

# Enough of a search to decide sensibly about a handful of jobs. Sia's table solves the same program as HiGHS, exactly,
# and for so few devices in a tenth of the time.
_CHEAP: Mapping[str, str] = MappingProxyType({"pollux": ":population=12:generations=5", "sia": ":solver=table"})


def cheap_names(round_s: float | None = None) -> tuple[str, ...]:
    """Every policy's name, in the registry's order; those that decide in rounds do so every `round_s` if given."""
    return tuple(name + _CHEAP.get(name, "") + _rounds(name, round_s) for name in POLICY_NAMES)


def long_sweep(names: Iterable[str]) -> tuple[str, ...]:
    """Those of `names` that are played for long: all, or in CI the product's own without the rivals of the studies."""
    own = "springtide."
    return tuple(name for name in names if STRIDE == 1 or type(make_policy(name)).__module__.startswith(own))


def _rounds(name: str, round_s: float | None) -> str:
    return "" if round_s is None or not hasattr(make_policy(name), "round_s") else f":round_s={round_s:g}"
