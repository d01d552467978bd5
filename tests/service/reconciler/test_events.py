"""What many pods at once cost: one Event for what one decision says of them, and looks that leave time for the rest."""

from __future__ import annotations

import pytest

from kits.service.cluster_double import House, Moments
from springtide.backends.kubernetes.resources.events import MAX_MESSAGE_CHARS
from springtide.core.actions import StartReplica
from springtide.core.ports import Step
from springtide.core.resources import DeviceId
from springtide.core.status.pods import ClusterStatus, PodStatus
from springtide.core.workload import ReplicaId
from springtide.service.reconciler.events import EventPublisher
from springtide.service.reconciler.status import StatusWriter


@pytest.fixture
def house(platform):
    return House(platform)


def started(house, count):
    """The messages about a step that starts so many workers of one job, and the job's id."""
    posted = []
    publisher = EventPublisher("p", 0.0, posted.append)
    house.platform.subscribe(lambda seq, step, view: publisher.add(seq, step))
    publisher.begin(house.platform.now_s())
    obj = house.cluster.put(workers=1)
    house.jobs.submit(obj)
    job = house.job(obj).job
    publisher.publish(house.platform.view())
    posted.clear()
    actions = tuple(
        StartReplica(
            replica_id=ReplicaId(f"{job.job_id}.{100 + number}"),
            device_id=DeviceId(f"n/{number}"),
            generation=9,
            workload=job,
            reason="there is room",
        )
        for number in range(count)
    )
    publisher.add(1000, Step(now_s=50.0, events=(), actions=actions))
    publisher.publish(house.platform.view())
    return [event["message"] for event in posted if event["reason"] == "StartingReplica"], job.job_id


def test_one_decision_about_several_replicas_is_one_event(house):
    (message,), job_id = started(house, 4)
    assert message.split("; ") == [
        f"starting {job_id}.{100 + number} on n/{number} (there is room)" for number in range(4)
    ]


def test_what_one_event_has_no_room_for_is_told_in_another(house):
    messages, job_id = started(house, 64)
    assert len(messages) > 1
    assert all(len(message) <= MAX_MESSAGE_CHARS for message in messages)
    told = [line for message in messages for line in message.split("; ")]
    assert told == [f"starting {job_id}.{100 + number} on n/{number} (there is room)" for number in range(64)]


def test_a_look_at_pods_that_took_long_is_not_repeated_at_once(house):
    now = Moments()
    looks = []

    def slow_status():
        looks.append(now())
        now.at_s += 0.5
        return ClusterStatus(pods=(pod(f"reason {len(looks)}"),))

    writer = StatusWriter(house.platform, house.cluster, "p", "http://x:1", slow_status, now)
    assert writer.update_pods() == {"digits-1"}
    assert writer.update_pods() == set()
    now.at_s += 9.0
    assert writer.update_pods() == set()
    now.at_s += 1.1
    # Half a second of looking is a twentieth of ten: what has changed meanwhile is seen then.
    assert writer.update_pods() == {"digits-1"}
    assert len(looks) == 2


def pod(reason):
    return PodStatus(
        workload_id="digits-1",
        replica_id="digits-1.0",
        namespace="ml",
        pod="digits-1-0",
        node_id="n",
        phase="waiting",
        reason=reason,
    )
