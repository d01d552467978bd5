"""Objects that control planes died of are set aside until they change."""

from __future__ import annotations

import pytest

from kits.service.cluster_double import House
from kits.service.platform_double import Kept
from springtide.backends.kubernetes.client.kinds import uid_of
from springtide.backends.kubernetes.resources.status_schema import ConditionType, Reason
from springtide.service.submission.quarantine import INTAKE_KEY, Quarantine, object_key


@pytest.fixture
def house(platform):
    return House(platform)


def die_twice_during(house, obj):
    """What the third control plane finds beside the journal."""
    store = Kept()
    for _ in range(2):
        with Quarantine(store).taking_in(object_key(uid_of(obj), obj["metadata"]["generation"])):
            left = store.meta(INTAKE_KEY)
        store.set_meta(INTAKE_KEY, left)
    house.platform.quarantine = Quarantine(store)


def test_a_training_function_that_ended_two_control_planes_is_refused_until_it_changes(house):
    obj, other = house.cluster.put(), house.cluster.put(name="other")
    die_twice_during(house, obj)
    record, told = house.jobs.submit(obj)
    assert record is None
    assert (told.type, told.is_true, told.reason) == (ConditionType.ACCEPTED, False, Reason.ENDED_THE_CONTROL_PLANE)
    assert told.reason == "EndedTheControlPlane"
    assert "died 2 times while it took this in, so it is set aside until its spec changes" in told.message
    assert house.jobs.submit(other)[1] is None
    house.cluster.change(obj, epochs=2)
    assert house.jobs.submit(house.cluster.see(obj))[1] is None


def test_an_inference_function_that_ended_two_control_planes_is_refused_until_it_changes(house):
    obj = house.cluster.put("InferenceFunction", "echo")
    die_twice_during(house, obj)
    record, (told,) = house.services.compare(obj)
    assert record is None
    assert (told.type, told.is_true, told.reason) == (ConditionType.ACCEPTED, False, Reason.ENDED_THE_CONTROL_PLANE)
    house.cluster.change(obj, maxBatch=4)
    assert house.services.compare(house.cluster.see(obj))[0] is not None
