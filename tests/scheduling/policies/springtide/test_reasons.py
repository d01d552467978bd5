"""What a plan says of deadlines: which promises are given up, and which of these for certain."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from springtide.core.decision import Snapshot, TimeClaim
from springtide.core.resources import Topology
from springtide.scheduling.policies.springtide.reasons import claims_of
from springtide.solvers.reservations.reservation_table import Entry


@pytest.mark.parametrize(
    ("deadline_s", "slowed", "is_certain"),
    [(150.0, {}, True), (250.0, {}, False), (150.0, {"fit": 0.5}, False), (80.0, {"fit": 0.5}, True)],
)
def test_a_promise_is_given_up_for_certain_where_no_devices_would_keep_it(
    deadline_s: float, slowed: dict[str, float], is_certain: bool
) -> None:
    """1,000 steps at 5 a second; where it is scattered, it would make 10 on devices that lie close together."""
    late = Entry("fit", 1000.0, deadline_s, (0.0, 5.0), (1,))
    late.is_late = True
    state = SimpleNamespace(
        reservations=SimpleNamespace(entries={"fit": late}),
        given_up={"fit": "late"},
        waits={},
        slowed=slowed,
        full_rates={"fit": (0.0, 10.0)} if slowed else {},
    )
    snapshot = Snapshot(now_s=0.0, cluster=Topology())
    claims = claims_of({}, snapshot, {}, state)  # type: ignore[arg-type]
    assert claims == {"fit": TimeClaim(code="given_up", is_certain=is_certain)}
