"""Properties of the choice of a replica."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from springtide.core.workload import ReplicaId
from springtide.serving.router import ReplicaLoad, pick_replica

LOADS = st.lists(
    st.builds(
        ReplicaLoad,
        replica_id=st.uuids().map(lambda each: ReplicaId(str(each))),
        num_outstanding=st.integers(0, 4),
        is_ready=st.booleans(),
        is_draining=st.booleans(),
    ),
    max_size=8,
)


@given(LOADS, st.integers(1, 3))
def test_the_choice_is_ready_not_draining_has_room_and_least_work(loads, max_outstanding):
    chosen = pick_replica(loads, max_outstanding=max_outstanding)
    usable = [
        load for load in loads if load.is_ready and not load.is_draining and load.num_outstanding < max_outstanding
    ]
    assert (chosen is None) == (not usable)
    if usable:
        (load,) = [load for load in usable if load.replica_id == chosen]
        assert load.num_outstanding == min(each.num_outstanding for each in usable)


def test_ties_go_to_the_first_and_the_avoided_is_the_last_resort():
    one, two = ReplicaLoad(replica_id=ReplicaId("1")), ReplicaLoad(replica_id=ReplicaId("2"))
    assert pick_replica([one, two]) == "1"
    assert pick_replica([one, two], avoid=frozenset({ReplicaId("1")})) == "2"
    assert pick_replica([one], avoid=frozenset({ReplicaId("1")})) == "1"
    full = ReplicaLoad(replica_id=ReplicaId("2"), num_outstanding=1)
    assert pick_replica([one, full], avoid=frozenset({ReplicaId("1")})) is None
