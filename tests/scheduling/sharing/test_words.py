"""What is said of places on shared devices."""

from __future__ import annotations

from springtide.core.resources import Topology, make_node
from springtide.core.shares import Share
from springtide.scheduling.sharing.ledger import ShareLedger, parts_of
from springtide.scheduling.sharing.words import lacks_text, places_text

PART = Share(request=0.4, limit=0.8)


def test_what_is_lacking_is_told_with_figures() -> None:
    cluster = Topology(nodes=(make_node("n", 1),))
    ledger = ShareLedger(cluster)
    ledger.hold("large", "large", parts_of(["n/0"], Share(request=0.7, limit=0.7)))
    asks = "a worker needs 0.4 of a device"
    assert lacks_text(ledger, PART, "a worker needs") == f"{asks}, and the most that is left of one is 0.3"
    none = lacks_text(ledger, PART, "a worker needs", beside=["n/0"])
    assert none.startswith(f"{asks}, and none of the 1 is open to it")


def test_places_name_some_of_those_beside() -> None:
    assert places_text(PART, 1, []) == "0.4..0.8 of 1 device, which nobody else shares"
    assert places_text(PART, 2, "abcde") == "0.4..0.8 of 2 devices, beside 'a', 'b', 'c', 'd'"
