"""How a device is divided: requests first, the rest by requests up to limits, nothing left over that anybody wants."""

from __future__ import annotations

import numpy as np
import pytest

from springtide.core.shares import Share, make_share
from springtide.simulator.shared_devices import SharedDevices, TenantDemand, divide, overfull


def tenant(request: float, limit: float, demand: float = 1.0) -> TenantDemand:
    return TenantDemand(Share(request=request, limit=limit), demand)


@pytest.mark.parametrize(
    ("tenants", "wanted"),
    [
        ((), ()),
        # Alone it gets its limit, and no more though the rest lies idle.
        ((tenant(0.3, 0.6),), (0.6,)),
        # What the resting one leaves goes to the other, up to its limit.
        ((tenant(0.3, 0.6, 0.0), tenant(0.5, 0.9)), (0.0, 0.9)),
        # Both at work: the 0.4 that is left is divided 1 : 2.
        ((tenant(0.2, 1.0), tenant(0.4, 1.0)), (1 / 3, 2 / 3)),
        # One is stopped by its limit; what it may not have is the other's.
        ((tenant(0.2, 0.25), tenant(0.4, 1.0)), (0.25, 0.75)),
        # A little work takes only that little.
        ((tenant(0.5, 1.0, 0.1), tenant(0.4, 1.0)), (0.1, 0.9)),
        # Requests that fill the device are all that there is.
        ((tenant(0.5, 1.0), tenant(0.5, 0.5)), (0.5, 0.5)),
        # More than a device: no ledger allows it, nobody gets more than there is.
        ((tenant(1.0, 1.0), tenant(1.0, 1.0)), (0.5, 0.5)),
    ],
)
def test_a_device_is_divided(tenants, wanted):
    assert divide(tenants) == pytest.approx(wanted, abs=1e-12)


def test_every_division_is_within_bounds_and_leaves_nothing_over():
    rng = np.random.default_rng(np.random.SeedSequence(5))
    for _ in range(2000):
        requests = rng.dirichlet(np.ones(int(rng.integers(1, 6)))) * rng.uniform(0.2, 1.0)
        tenants = tuple(
            tenant(request, min(1.0, request * rng.uniform(1.0, 4.0)), float(rng.choice([0.0, rng.random(), 1.0])))
            for request in requests
        )
        given = divide(tenants)
        assert sum(given) <= 1.0 + 1e-9
        wanted = [min(each.demand, each.share.limit) for each in tenants]
        for each, part, most in zip(tenants, given, wanted, strict=True):
            assert min(each.demand, each.share.request) - 1e-12 <= part <= most + 1e-12
        if sum(given) < 1.0 - 1e-9:
            assert given == pytest.approx(wanted, abs=1e-9), "something is left though somebody wants it"


def test_tenants_are_told_when_their_neighbours_change():
    told: list[str] = []
    devices = SharedDevices(told.append)
    devices.hold("a", ("d",), make_share(0.3, 0.8), 1.0)
    devices.hold("b", ("d",), make_share(0.3, 0.6))
    assert devices.rate("a") == 0.8
    assert not told, "who asks for nothing slows nobody down"
    devices.set_demand(["b"], 1.0)
    assert told == ["a"]
    assert devices.rate("a") == devices.rate("b") == 0.5
    devices.set_share("b", make_share(0.6))
    assert told == ["a", "a", "b"]
    assert devices.rate("b") == pytest.approx(0.6 + 0.1 * 2 / 3)
    devices.release("b")
    assert devices.rate("a") == 0.8
    assert devices.shares_on("d") == (make_share(0.3, 0.8),)
    assert "b" not in devices
    assert devices.rate("b") == 1.0
    assert devices.share_of("b") is None
    assert devices.slowest(["a", "b"]) == 0.8


def test_what_is_not_known_changes_nothing():
    devices = SharedDevices(lambda _: pytest.fail("nobody is there to be told"))
    devices.set_share("gone", make_share(0.5))
    devices.set_demand(["gone"], 1.0)
    devices.release("gone")
    assert devices.rate("gone") == 1.0


@pytest.mark.parametrize(
    ("held", "memory_mb", "word"),
    [
        ([], 0, ""),
        ([None], 0, ""),
        ([make_share(0.5), make_share(0.5, 0.5)], 0, ""),
        ([None, None], 0, "the whole"),
        ([make_share(0.1), None], 0, "the whole"),
        ([make_share(0.6), make_share(0.5)], 0, "requests"),
        ([make_share(0.5, 1.0), make_share(0.4, 0.6)], 0, "limits"),
        ([make_share(0.1, None, 600), make_share(0.1, None, 500)], 1000, "MB"),
        ([make_share(0.1, None, 600), make_share(0.1, None, 500)], 0, ""),
    ],
)
def test_what_does_not_fit_is_named(held, memory_mb, word):
    wrong = overfull(held, memory_mb)
    assert bool(wrong) == bool(word)
    assert word in wrong


def test_a_replica_on_several_devices_is_as_fast_as_on_the_slowest_of_them() -> None:
    changed: list[str] = []
    devices = SharedDevices(changed.append)
    devices.hold("wide", ("d", "e"), make_share(0.3, 0.8), 1.0)
    assert devices.rate("wide") == pytest.approx(0.8)
    devices.hold("beside", ("e",), make_share(0.6, 0.7), 1.0)
    assert devices.rate("wide") == pytest.approx(1 / 3)
    assert changed == ["wide"]
    assert devices.shares_on("d") == (make_share(0.3, 0.8),)
    assert devices.num_extra_tenants == 1
    devices.release("beside")
    assert devices.rate("wide") == pytest.approx(0.8)
    devices.release("wide")
    assert devices.shares_on("d") == devices.shares_on("e") == ()
