"""The gateway's advice on replicas: once a second, at once from zero, and nothing where nobody profiled."""

from __future__ import annotations

import asyncio

import msgspec

from springtide.core.workload import Entrypoint, InferenceService, WorkloadId
from springtide.service.gateway.application import Gateway, ServiceRoute
from springtide.service.gateway.requests import RequestTerms
from springtide.service.gateway.scaling import ReplicaAdvice

SERVICE = InferenceService(
    service_id=WorkloadId("s1"),
    name="s",
    entrypoint=Entrypoint(source_path="a.py", object_name="S", kind="class"),
    min_replicas=0,
    max_replicas=6,
    capacity_per_s=100.0,
    idle_s=30.0,
)


def play(advice, rates, start_s=0.0, idle_s=0.0):
    now_s = start_s
    for rate in rates:
        for _ in range(rate):
            advice.arrived()
        now_s += 1.0
        advice.tick(now_s, num_queued=0, idle_s=idle_s)
    return advice.wanted


def test_load_is_counted_by_the_second():
    advice = ReplicaAdvice(SERVICE, 0.0, 1)
    assert play(advice, [60] * 30) == 1
    assert play(advice, [150, 150], start_s=30.0) == 2
    assert "more than 1" in advice.reason


def test_a_late_loop_counts_the_mean_and_a_hasty_one_nothing():
    advice = ReplicaAdvice(SERVICE, 0.0, 1)
    for _ in range(3):
        for _ in range(150):
            advice.arrived()
        advice.tick(advice._observed_at_s + 2.0, num_queued=0, idle_s=0.0)
    assert advice.wanted == 1, "150 requests in two seconds are 75 a second"
    advice.tick(advice._observed_at_s + 0.1, num_queued=500, idle_s=0.0)
    assert advice.wanted == 1


def test_from_zero_at_once_and_back_after_idleness():
    advice = ReplicaAdvice(SERVICE, 0.0, 0)
    assert advice.wanted == 0
    advice.arrived()
    advice.wake()
    assert advice.wanted == 1
    assert play(advice, [0], idle_s=29.0) == 1
    assert play(advice, [0], start_s=1.0, idle_s=31.0) == 0


def test_nobody_profiled_nothing_advised():
    advice = ReplicaAdvice(msgspec.structs.replace(SERVICE, capacity_per_s=None), 0.0, 2)
    assert play(advice, [500] * 30) is None
    advice.apply(SERVICE, 2)
    assert advice.wanted == 2, "from now on, beginning with what runs"
    advice.apply(msgspec.structs.replace(SERVICE, max_replicas=1), 2)
    assert advice.wanted == 1


def test_single_requests_to_a_slow_model_are_no_load_of_a_second():
    slow = ReplicaAdvice(msgspec.structs.replace(SERVICE, capacity_per_s=0.5), 0.0, 3)
    # One request a second and a half: two replicas' work, though two of three seconds see more than that or nothing.
    assert play(slow, [1, 1, 0] * 60) == 2
    quick = ReplicaAdvice(msgspec.structs.replace(SERVICE, capacity_per_s=5.0), 0.0, 1)
    assert play(quick, [11, 11]) == 3, "where a replica answers five a second, each second counts"


def test_replicas_that_are_heard_of_late_are_not_taken_away():
    advice = ReplicaAdvice(SERVICE, 0.0, 0)
    play(advice, [0])
    advice.apply(SERVICE, 3)
    assert advice.wanted == 3
    play(advice, [0] * 12, start_s=1.0)
    advice.apply(SERVICE, 5)
    assert advice.wanted == 3, "later, only load asks for more"


async def _ask_a_sleeping_service(service):
    told = []
    gateway = Gateway(told.append)
    gateway.update([ServiceRoute(service=service)])
    await gateway.startup()
    queue = gateway._queues["s"]
    before = queue.observe(0.0).wanted_replicas
    asked = asyncio.ensure_future(queue.submit(lambda schema: None, RequestTerms(5.0), asyncio.Event().wait))
    await asyncio.sleep(0)
    await gateway.shutdown()
    await asyncio.gather(asked, return_exceptions=True)
    return before, [load.wanted_replicas for load in told]


def test_the_gateway_tells_what_is_wanted_at_once():
    before, told = asyncio.run(_ask_a_sleeping_service(SERVICE))
    assert before == 0
    assert told[-1] == 1
    assert asyncio.run(_ask_a_sleeping_service(msgspec.structs.replace(SERVICE, capacity_per_s=None)))[1][-1] is None
