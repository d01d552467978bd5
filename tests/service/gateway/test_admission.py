"""What the gateway refuses for an SLO, a deadline or a priority: over real HTTP, before a double of a replica."""

from __future__ import annotations

import asyncio

from kits.service.gateway_replicas import FakeReplica, run


def teach(queue, *, call_s, num=100):
    """Let the queue of the service know so many calls, as if it had answered them one at a time."""
    for _ in range(num):
        queue._admission.ended(call_s, call_s, is_alone=True)
    queue._admission.tick()


async def held(harness, replica, num, **headers):
    """Send so many calls while the replica keeps all answers back; returns what was answered, in order."""
    replica.hold, replica.arrived = asyncio.Event(), asyncio.Event()
    calls = [asyncio.create_task(harness.call([n], headers=headers)) for n in range(num)]
    await replica.arrived.wait()
    queue = harness.gateway._queues["double"]
    await harness.until(lambda: queue.num_queued + len(queue._sent) + sum(call.done() for call in calls) >= num)
    replica.hold.set()
    return await asyncio.gather(*calls)


def test_what_would_miss_the_slo_is_refused_early_and_told(tmp_path):
    async def scenario(harness):
        async with FakeReplica(tmp_path) as replica:
            await harness.serve(replica, slo_s=0.5, max_batch_size=1)
            queue = harness.gateway._queues["double"]
            await harness.call([1])
            teach(queue, call_s=0.1)
            answers = await held(harness, replica, 20)
            refused = [answer for answer in answers if answer.status_code == 429]
            # Four or five calls of 100 ms are answered within 500 ms.
            assert 15 <= len(refused) <= 16
            assert all("the SLO of 500 ms would be missed" in answer.json()["error"]["message"] for answer in refused)
            assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
            assert {answer.headers["x-should-retry"] for answer in refused} == {"false"}
            told = harness.gateway.admission("double")
            assert (told.refused, told.refused_lately) == (len(refused), len(refused))
            assert told.notes == (
                f"refused {len(refused)} requests in the last minute: the SLO of 500 ms would be missed",
            )
            assert f'springtide_refused_requests_total{{reason="slo",service="double"}} {len(refused)}.0' in (
                harness.metrics()
            )
            # For the number of replicas they are load.
            assert queue.observe(asyncio.get_running_loop().time()).in_flight > 4

    run(scenario)


def test_where_too_few_calls_are_known_the_refusal_says_so(tmp_path):
    async def scenario(harness):
        async with FakeReplica(tmp_path) as replica:
            await harness.serve(replica, slo_s=0.5, max_batch_size=1)
            await harness.call([1])
            teach(harness.gateway._queues["double"], call_s=0.1, num=7)
            answers = await held(harness, replica, 20)
            refused = [answer for answer in answers if answer.status_code == 429]
            assert refused
            # One call was answered before the seven.
            message = "8 calls are known so far, too few to be sure of an answer within 500 ms: "
            assert all(message in answer.json()["error"]["message"] for answer in refused)
            assert harness.gateway.admission("double").notes == (
                f"refused {len(refused)} requests in the last minute: too few calls were known to be sure of answers "
                "in time",
            )

    run(scenario)


def test_a_service_without_an_slo_takes_what_its_queue_holds(tmp_path):
    async def scenario(harness):
        async with FakeReplica(tmp_path) as replica:
            await harness.serve(replica, max_batch_size=1)
            await harness.call([1])
            teach(harness.gateway._queues["double"], call_s=0.1)
            answers = await held(harness, replica, 20)
            assert {answer.status_code for answer in answers} == {200}
            assert harness.gateway.admission("double").notes == ()

    run(scenario)


def test_an_slo_below_the_calls_own_p99_refuses_nothing_and_is_told(tmp_path):
    async def scenario(harness):
        async with FakeReplica(tmp_path) as replica:
            await harness.serve(replica, slo_s=0.02, max_batch_size=1)
            await harness.call([1])
            teach(harness.gateway._queues["double"], call_s=0.1)
            answers = await held(harness, replica, 20)
            assert {answer.status_code for answer in answers} == {200}
            told = harness.gateway.admission("double")
            assert told.slo_is_out_of_reach
            assert "the SLO of 20 ms lies below 100 ms" in told.notes[0]

    run(scenario)


def test_a_shorter_deadline_is_held_to_and_low_priority_leaves_room(tmp_path):
    async def scenario(harness):
        async with FakeReplica(tmp_path) as replica:
            await harness.serve(replica, slo_s=1.0, max_batch_size=1)
            await harness.call([1])
            queue = harness.gateway._queues["double"]
            teach(queue, call_s=0.1)
            short = await held(harness, replica, 12, **{"X-Springtide-Timeout": "400ms"})
            assert [answer.status_code for answer in short].count(429) in (8, 9)
            late = next(answer for answer in short if answer.status_code == 429)
            assert "400 ms" in late.json()["error"]["message"]
            teach(queue, call_s=0.1)
            low = await held(harness, replica, 14, **{"X-Springtide-Priority": "low"})
            assert [answer.status_code for answer in low].count(200) in (6, 7), "70 % of 9 or 10"
            wrong = await harness.call([1], headers={"X-Springtide-Priority": "urgent"})
            assert wrong.status_code == 400
            assert "high, normal or low" in wrong.json()["error"]["message"]

    run(scenario)
