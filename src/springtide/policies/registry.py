"""The list of policies: the one place that knows them by name. A new policy is one file and one line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from springtide.core.decision import Policy
from springtide.core.errors import InvalidRequest
from springtide.policies.edf import EarliestDeadlineFirst
from springtide.policies.elastic import Elastic
from springtide.policies.fifo import Fifo

_POLICIES: Mapping[str, Callable[[], Policy]] = MappingProxyType(
    {
        "elastic": Elastic,
        "edf": EarliestDeadlineFirst,
        "fifo": Fifo,
    }
)
POLICY_NAMES: tuple[str, ...] = tuple(_POLICIES)


def make_policy(name: str) -> Policy:
    """Build the policy of that name with its default parameters. Raises InvalidRequest naming the known ones."""
    make = _POLICIES.get(name)
    if make is None:
        raise InvalidRequest(f"there is no policy {name!r}; choose one of {', '.join(POLICY_NAMES)}")
    return make()


def describe_policy(name: str) -> str:
    """The first line of the policy's module docstring. Raises InvalidRequest."""
    import sys

    module = sys.modules[type(make_policy(name)).__module__]
    return (module.__doc__ or "").strip().splitlines()[0]
