"""The gateway over real HTTP on loopback, against a fake replica that speaks the frames on a real unix socket."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from kits.service.gateway_replicas import FakeReplica, make_service, run
from springtide.core.shares import Share
from springtide.core.workload import ReplicaId
from springtide.service.gateway.application import ReplicaRoute, ServiceRoute
from springtide.service.gateway.bench import run_gateway_bench


class Free:
    def predict(self, features: dict[str, float], note: str = "") -> dict[str, float]:
        raise NotImplementedError


def test_a_call_is_answered_with_headers_that_say_how(tmp_path):
    async def scenario(harness):
        async with FakeReplica(tmp_path) as replica:
            await harness.serve(replica)
            answer = await harness.call([1, 2])
            assert (answer.status_code, answer.json()) == (200, {"outputs": [2, 4]})
            told = dict(part.split("=") for part in answer.headers["x-springtide"].split())
            assert told["batch"] == "2"
            assert told["replica"] == "r1"
            assert told["cold_start"] == "0ms"
            bare = await harness.client.post("/f/double", content=b"[1,2]")
            assert bare.status_code == 422, "two parameters: a bare list is ambiguous"
            assert bare.json()["error"]["expected"]["required"] == ["values"]
            assert (await harness.call([3], times=5)).json() == {"outputs": [15]}

    run(scenario)


def test_waiting_requests_are_batched_and_different_parameters_are_not_mixed(tmp_path):
    async def scenario(harness):
        async with FakeReplica(tmp_path) as replica:
            await harness.serve(replica)
            replica.hold = asyncio.Event()
            first = asyncio.create_task(harness.call([0]))
            await replica.arrived.wait()
            queue = harness.gateway._queues["double"]
            rest = [asyncio.create_task(harness.call([n], times=2 + n % 2)) for n in range(1, 7)]
            await harness.until(lambda: queue.num_queued == 6)
            replica.hold.set()
            answers = [task.json() for task in await asyncio.gather(first, *rest)]
            assert answers == [{"outputs": [0]}, *({"outputs": [n * (2 + n % 2)]} for n in range(1, 7))]
            assert sorted(len(batch) for batch in replica.batches) == [1, 3, 3]
            assert all(len({call["times"] for call in batch}) == 1 for batch in replica.batches[1:])

    run(scenario)


def test_one_wait_without_company_ends_what_is_expected_of_earlier_clients(tmp_path):
    async def scenario(harness):
        async with FakeReplica(tmp_path) as replica:
            await harness.serve(replica)
            await asyncio.gather(*(harness.call([n]) for n in range(8)))
            queue = harness.gateway._queues["double"]
            assert queue._expected > 2, "several were there at once"
            await harness.call([8])
            assert queue._expected == 1.0
            assert replica.batches[-1] == [{"values": [8]}]

    run(scenario)


@pytest.mark.slow
def test_no_answer_crosses_to_another_request(tmp_path):
    async def scenario(harness):
        async with FakeReplica(tmp_path, "r1") as one, FakeReplica(tmp_path, "r2") as two:
            await harness.serve(one, two)

            async def worker(start):
                for n in range(start, 1000, 20):
                    values = [n * 10 + k for k in range(n % 3 + 1)]
                    assert (await harness.call(values)).json() == {"outputs": [2 * value for value in values]}

            await asyncio.gather(*(worker(start) for start in range(20)))
            assert len(one.batches) + len(two.batches) < 1000, "nothing was batched"
            assert one.batches
            assert two.batches

    run(scenario)


def test_overload_is_refused_with_retry_after(tmp_path):
    async def scenario(harness):
        async with FakeReplica(tmp_path) as replica:
            await harness.serve(replica, max_queue=4, max_batch_size=1)
            replica.hold = asyncio.Event()
            calls = [asyncio.create_task(harness.call([n])) for n in range(12)]
            await harness.until(lambda: sum(call.done() for call in calls) >= 6)
            replica.hold.set()
            answers = await asyncio.gather(*calls)
            refused = [answer for answer in answers if answer.status_code == 429]
            # Two at the replica, four in the queue.
            assert len(refused) == 6
            assert all(
                int(answer.headers["retry-after"]) >= 1 and "full" in answer.json()["error"]["message"]
                for answer in refused
            )
            assert [answer.status_code for answer in answers].count(200) == 6
            assert 'springtide_request_seconds_count{code="429",service="double"} 6.0' in harness.metrics()

    run(scenario)


def test_scale_from_zero_holds_requests_and_wakes_once(tmp_path):
    async def scenario(harness):
        service = await harness.serve()
        harness.events.clear()
        calls = [asyncio.create_task(harness.call([n])) for n in range(5)]
        queue = harness.gateway._queues["double"]
        await harness.until(lambda: queue.num_queued == 5)
        told = [event for event in harness.events if event.queued]
        assert told[0].queued == 1
        assert len(told) <= 2, "one wake per burst (and perhaps one tick)"
        async with FakeReplica(tmp_path) as replica:
            harness.gateway.update([ServiceRoute(service=service, replicas=(replica.route(is_ready=False),))])
            await harness.until(lambda: queue.is_loading)
            assert queue.is_loading
            assert queue.observe(asyncio.get_running_loop().time() + 5).idle_s == 0, "loading is not idle"
            harness.gateway.update([ServiceRoute(service=service, replicas=(replica.route(),))])
            answers = await asyncio.gather(*calls)
            assert [answer.json() for answer in answers] == [{"outputs": [2 * n]} for n in range(5)]
            assert all("cold_start=0ms" not in answer.headers["x-springtide"] for answer in answers)
            assert 'springtide_cold_start_seconds_count{service="double"} 1.0' in harness.metrics()
            first_s = harness.gateway.first_answer_s("double")
            assert first_s is not None
            assert first_s >= 0.0
            assert (await harness.call([9])).status_code == 200
            assert harness.gateway.first_answer_s("double") == first_s, "later ones are no start"
            assert harness.gateway.first_answer_s("nobody") is None
            loop = asyncio.get_running_loop()
            load = queue.observe(loop.time())
            assert (load.queued, load.in_flight) == (0, 0)
            assert load.latency_p99_s >= load.latency_p50_s > 0
            assert queue.observe(loop.time() + 50).idle_s >= 40

    run(scenario)


def test_a_replica_that_goes_on_with_another_share_is_asked_at_once(tmp_path):
    async def scenario(harness):
        async with FakeReplica(tmp_path) as replica:
            first = await harness.serve(replica, share=Share(request=0.2, limit=0.4))
            answer = await harness.call([1])
            assert answer.headers["x-springtide"].endswith(" share=0.2..0.4")
            changed = replace(first, share=Share(request=0.3, limit=0.6), revision=first.revision + 1)
            harness.gateway.update([ServiceRoute(service=changed, replicas=(replica.route(),))])
            await harness.until(lambda: harness.gateway._queues["double"].service.revision == changed.revision)
            answer = await harness.call([2])
            assert answer.json() == {"outputs": [4]}
            assert answer.headers["x-springtide"].endswith(" share=0.3..0.6")

    run(scenario)


def test_a_revision_that_stays_answers_while_the_next_one_loads(tmp_path):
    async def scenario(harness):
        async with FakeReplica(tmp_path) as replica:
            first = await harness.serve(replica)
            assert (await harness.call([1])).status_code == 200
            changed = replace(first, max_batch_size=3, revision=first.revision + 1)
            loading = ReplicaRoute(replica_id=ReplicaId("double.9"))
            harness.gateway.update([ServiceRoute(service=changed, replicas=(replica.route(), loading))])
            await harness.until(lambda: harness.gateway._queues["double"].service.revision == changed.revision)
            assert (await harness.call([2])).json() == {"outputs": [4]}

    run(scenario)


def test_no_replica_in_time_is_a_503_and_a_full_hold_a_429(tmp_path):
    async def scenario(harness):
        await harness.serve(max_queue=2)
        answers = await asyncio.gather(*(harness.call([n], timeout="200ms") for n in range(5)))
        assert sorted(answer.status_code for answer in answers) == [429, 429, 429, 503, 503]
        assert all(answer.headers["retry-after"] for answer in answers)
        assert harness.gateway._queues["double"].num_queued == 0

    run(scenario)


@pytest.mark.parametrize(("waits_s", "seconds"), [(None, 2), (1.0, 2), (20.0, 20), (900.0, 60)])
def test_who_waits_for_a_promise_is_told_when_to_come_again(tmp_path, waits_s, seconds):
    async def scenario(harness):
        service = await harness.serve()
        why = "waits for a device: promised deadlines need them ('fit' has 2)"
        harness.gateway.update([ServiceRoute(service=service, waits=why, waits_s=waits_s)])
        answer = await harness.call([1], timeout="200ms")
        assert answer.status_code == 503
        assert why in answer.json()["error"]["message"]
        assert int(answer.headers["retry-after"]) == seconds

    run(scenario)


def test_who_waits_for_room_is_told_why(tmp_path):
    async def scenario(harness):
        service = await harness.serve()
        why = "waits for room: a replica needs 0.4 of a device, and the most that is left of one is 0.3"
        harness.gateway.update([ServiceRoute(service=service, waits=why)])
        answer = await harness.call([1], timeout="200ms")
        assert answer.status_code == 503
        assert f"({why}); send it again later" in answer.json()["error"]["message"]

    run(scenario)


def test_a_slow_model_is_a_504_and_the_service_stays_busy_until_it_answers(tmp_path):
    async def scenario(harness):
        async with FakeReplica(tmp_path) as replica:
            await harness.serve(replica)
            replica.hold = asyncio.Event()
            answer = await harness.call([1], timeout="50ms")
            assert answer.status_code == 504
            queue = harness.gateway._queues["double"]
            load = queue.observe(asyncio.get_running_loop().time() + 1000)
            assert (load.in_flight, load.idle_s) == (1, 0)
            replica.hold.set()
            await harness.until(lambda: queue.observe(asyncio.get_running_loop().time()).in_flight == 0)

    run(scenario)


def test_an_expired_request_never_reaches_a_replica(tmp_path):
    async def scenario(harness):
        async with FakeReplica(tmp_path) as replica:
            await harness.serve(replica)
            replica.hold = asyncio.Event()
            first = asyncio.create_task(harness.call([1]))
            await replica.arrived.wait()
            late = await harness.call([2], timeout="50ms")
            assert late.status_code == 503
            replica.hold.set()
            assert (await first).status_code == 200
            assert (await harness.call([3])).status_code == 200
            assert [call["values"] for batch in replica.batches for call in batch] == [[1], [3]]

    run(scenario)


def test_a_request_that_cannot_make_its_deadline_is_refused_early(tmp_path):
    async def scenario(harness):
        async with FakeReplica(tmp_path) as replica:
            await harness.serve(replica)
            queue = harness.gateway._queues["double"]
            queue._call_s = 4.0
            replica.hold = asyncio.Event()
            first = asyncio.create_task(harness.call([1]))
            await replica.arrived.wait()
            answer = await harness.call([2], timeout="2s")
            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) == 7
            replica.hold.set()
            await first

    run(scenario)


def test_a_draining_replica_is_routed_around(tmp_path):
    async def scenario(harness):
        async with FakeReplica(tmp_path, "r1") as one, FakeReplica(tmp_path, "r2") as two:
            await harness.serve(one, two)
            one.is_draining = True
            answers = await asyncio.gather(*(harness.call([n]) for n in range(10)))
            assert [answer.json() for answer in answers] == [{"outputs": [2 * n]} for n in range(10)]
            assert not one.batches

    run(scenario)


def test_a_route_that_goes_away_lets_sent_work_finish(tmp_path):
    async def scenario(harness):
        async with FakeReplica(tmp_path) as replica:
            service = await harness.serve(replica)
            replica.hold = asyncio.Event()
            call = asyncio.create_task(harness.call([4]))
            await replica.arrived.wait()
            harness.gateway.update([ServiceRoute(service=service)])
            await harness.until(lambda: harness.gateway._queues["double"].num_ready == 0)
            replica.hold.set()
            assert (await call).json() == {"outputs": [8]}
            await harness.until(lambda: not replica.writers)

    run(scenario)


def test_a_replica_that_dies_is_replaced_once(tmp_path):
    async def scenario(harness):
        async with FakeReplica(tmp_path, "r1") as one, FakeReplica(tmp_path, "r2") as two:
            await harness.serve(one, two)
            one.deaths = 1
            assert (await harness.call([1])).json() == {"outputs": [2]}
            assert [len(one.batches), len(two.batches)] == [1, 1]
            await harness.until(lambda: harness.gateway._queues["double"].num_ready == 2)
            one.deaths = two.deaths = 1
            answer = await harness.call([1])
            assert answer.status_code == 502

    run(scenario)


def test_user_errors_are_told_and_do_not_spread(tmp_path):
    async def scenario(harness):
        async with FakeReplica(tmp_path) as replica:
            await harness.serve(replica)
            bad, good, wrong = await asyncio.gather(
                harness.call([666]), harness.call([1]), harness.client.post("/f/double", json={"values": ["x"]})
            )
            assert (bad.status_code, good.status_code, wrong.status_code) == (500, 200, 422)
            assert "RuntimeError: boom" in bad.json()["error"]["message"]
            assert wrong.json()["error"]["expected"]["properties"]["values"]["type"] == "array"

    run(scenario)


BAD_BODIES = [
    b"",
    b" ",
    b"{",
    b"[",
    b"nul",
    b"null",
    b"1",
    b'"text"',
    b"true",
    b'{"values": [NaN]}',
    b'{"values": [Infinity]}',
    b'{"values": [1e999]}',
    b'{"values": 1}',
    b'{"values": null}',
    b'{"values": {"a": 1}}',
    b'{"values": [1], "other": 2}',
    b'{"valuess": [1]}',
    b"{}",
    b'{"values": ["\xff\xfe"]}',
    b'{"\xff": [1]}',
    b"\xff\xfe\x00",
    b"\x00" * 100,
    b"[" * 200_000,
    b'{"a":' * 100_000,
    b'{"values": [' + b"9" * 5000 + b"]}",
    b'{"values": [1], "values": "x"}',
    b'{"values": ["\\ud800"]}',
    b'{"\\ud800": 1}',
    b'{"values": [1]} trailing',
    b"\xef\xbb\xbf" + b'{"values": [1]}',
]


@pytest.mark.slow
def test_bad_input_is_always_the_callers_fault(tmp_path):
    async def scenario(harness):
        async with FakeReplica(tmp_path) as replica:
            await harness.serve(replica)
            for path in ("/f/double", "/v2/models/double/infer"):
                for body in BAD_BODIES:
                    answer = await harness.client.post(path, content=body)
                    assert 400 <= answer.status_code < 500, (path, body[:60], answer.text)
                    assert answer.json()["error"], body[:60]
            for body in BAD_BODIES[:14]:
                fits = (await harness.client.post("/f/double", content=body)).status_code
                assert fits in (400, 422)

    run(scenario)


@pytest.mark.parametrize(
    ("request_args", "status"),
    [
        (("POST", "/f/nothing", {}), 404),
        (("POST", "/f/..%2f..", {}), 422),
        (("POST", "/f/UPPER", {}), 422),
        (("POST", "/f/%00", {}), 422),
        (("PUT", "/f/double", {}), 405),
        (("GET", "/v2/models/double/infer", {}), 405),
        (("GET", "/v2/models/nothing", {}), 404),
        (("GET", "/v2/models/double/versions/9", {}), 404),
        (("POST", "/f/double", {"content": b"x" * ((1 << 20) + 1)}), 413),
        (("POST", "/f/double", {"content": b"[1]", "headers": {"X-Springtide-Timeout": "soon"}}), 400),
        (("POST", "/f/double", {"content": b"[1]", "headers": {"X-Springtide-Timeout": "-1s"}}), 400),
        (("POST", "/f/double", {"content": b"[1]", "headers": {"Content-Encoding": "br"}}), 415),
        (("POST", "/f/double", {"content": b"[1]", "headers": {"Content-Encoding": "gzip"}}), 400),
    ],
)
def test_wrong_requests_get_the_right_refusal(tmp_path, request_args, status):
    async def scenario(harness):
        async with FakeReplica(tmp_path) as replica:
            await harness.serve(replica)
            method, path, more = request_args
            answer = await harness.client.request(method, path, **more)
            assert answer.status_code == status, answer.text
            if status == 404 and "nothing" in path:
                assert "double" in str(answer.json()["error"])

    run(scenario)


def test_a_chunked_giant_body_is_cut_off(tmp_path):
    async def chunks():
        for _ in range(40):
            yield b" " * 65536

    async def scenario(harness):
        await harness.serve()
        answer = await harness.client.post("/f/double", content=chunks())
        assert answer.status_code == 413

    run(scenario)


def test_a_client_that_leaves_takes_its_request_out_of_the_queue(tmp_path):
    async def scenario(harness):
        async with FakeReplica(tmp_path) as replica:
            await harness.serve(replica)
            replica.hold = asyncio.Event()
            first = asyncio.create_task(harness.call([1]))
            await replica.arrived.wait()
            queue = harness.gateway._queues["double"]
            leaver = asyncio.create_task(harness.call([2]))
            await harness.until(lambda: queue.num_queued == 1)
            leaver.cancel()
            await harness.until(lambda: queue.num_queued == 0)
            replica.hold.set()
            await first
            assert [call["values"] for batch in replica.batches for call in batch] == [[1]]

    run(scenario)


@pytest.mark.slow
def test_the_open_inference_protocol(tmp_path):
    async def scenario(harness):
        async with FakeReplica(tmp_path) as replica:
            await harness.serve(replica)
            get = harness.client.get
            assert (await get("/v2")).json()["name"] == "springtide"
            assert (await get("/v2/health/live")).json() == {"live": True}
            assert (await get("/v2/health/ready")).json() == {"ready": True}
            assert (await get("/v2/models/double/ready")).json()["state"] == "ready"
            metadata = (await get("/v2/models/double/versions/1")).json()
            assert metadata["inputs"][0] == {"name": "values", "datatype": "INT64", "shape": [-1]}
            tensor = {"name": "values", "shape": [3], "datatype": "INT64", "data": [1, 2, 3]}
            body = {"id": "q7", "inputs": [tensor]}
            answer = (await harness.client.post("/v2/models/double/infer", json=body)).json()
            assert answer == {
                "model_name": "double",
                "model_version": "1",
                "id": "q7",
                "outputs": [{"name": "outputs", "shape": [3], "datatype": "INT64", "data": [2, 4, 6]}],
            }
            for wrong in ({"shape": [4]}, {"datatype": "FP9"}, {"datatype": "BOOL"}, {"shape": [-3]}, {"name": "no"}):
                refused = await harness.client.post("/v2/models/double/infer", json={"inputs": [{**tensor, **wrong}]})
                assert refused.status_code == 422, wrong
                assert list(refused.json()) == ["error"]

    run(scenario)


def test_an_unbatchable_service_gets_one_call_at_a_time(tmp_path):
    async def scenario(harness):
        async with FakeReplica(tmp_path, served=Free) as replica:
            await harness.serve(replica, service=make_service("free"))
            replica.hold = asyncio.Event()
            replica.hold.set()
            calls = [harness.client.post("/f/free", json={"features": {"a": n}}) for n in range(6)]
            answers = await asyncio.gather(*calls)
            assert [answer.json() for answer in answers] == [{"outputs": {"a": n}} for n in range(6)]
            assert [len(batch) for batch in replica.batches] == [1] * 6

    run(scenario)


def test_description_and_openapi_come_from_the_hints(tmp_path):
    async def scenario(harness):
        await harness.serve()
        before = (await harness.client.get("/f/double")).json()
        assert before["body"] is None
        assert "first replica" in before["note"]
        async with FakeReplica(tmp_path) as replica:
            await harness.serve(replica)
            told = (await harness.client.get("/f/double")).json()
            assert told["batchable"] is True
            assert "-d '{\"values\":[1]}'" in told["example"]
            path = harness.gateway.openapi_paths()["/f/double"]["post"]
            assert path["requestBody"]["content"]["application/json"]["schema"]["required"] == ["values"]

    run(scenario)


def test_a_quiet_service_is_told_of_seldom(tmp_path):
    async def scenario(harness):
        async with FakeReplica(tmp_path) as replica:
            await harness.serve(replica)
            queue = harness.gateway._queues["double"]
            start = asyncio.get_running_loop().time()
            harness.events.clear()
            for second in range(100, 130):
                queue.report_load(start + second)
            assert 2 <= len(harness.events) <= 4
            assert harness.events[-1].idle_s > harness.events[0].idle_s

    run(scenario)


def test_a_service_that_was_given_up_tells_why_at_once_and_serves_when_deployed_again(tmp_path):
    async def scenario(harness):
        service = await harness.serve()
        held = asyncio.create_task(harness.call([1]))
        await harness.until(lambda: harness.gateway._queues["double"].num_queued == 1)
        harness.gateway.update([ServiceRoute(service=service, failure="crashed 4 times: no weights")])
        for answer in (await held, await harness.call([2])):
            assert answer.status_code == 503
            assert "crashed 4 times: no weights; deploy it again" in answer.json()["error"]["message"]
        async with FakeReplica(tmp_path) as replica:
            await harness.serve(replica, service=service)
            assert (await harness.call([3])).status_code == 200

    run(scenario)


def test_a_removed_service_answers_404_to_those_who_wait(tmp_path):
    async def scenario(harness):
        await harness.serve()
        call = asyncio.create_task(harness.call([1]))
        await harness.until(lambda: harness.gateway._queues["double"].num_queued == 1)
        harness.gateway.update([])
        answer = await call
        assert answer.status_code == 404
        assert "removed" in answer.json()["error"]["message"]

    run(scenario)


@pytest.mark.slow
def test_the_bench_measures_real_processes():
    report = run_gateway_bench(num_rounds=1, num_requests=32)
    assert report["bench"] == "gateway"
    assert [row["case"] for row in report["rows"]] == [
        "c=1 latency p50",
        "c=16 latency p50",
        "c=1 CPU per request",
        "c=16 CPU per request",
        "c=1 throughput",
        "c=16 throughput",
    ]
    assert all(row["ours"] > 0 for row in report["rows"] if row["unit"] != "us" or "latency" in row["case"])


def test_every_answer_names_its_request(tmp_path):
    async def scenario(harness):
        async with FakeReplica(tmp_path) as replica:
            await harness.serve(replica)
            given = await harness.call([1], headers={"X-Request-Id": "abc-1"})
            assert given.headers.get_list("x-request-id") == ["abc-1"]
            made = [(await harness.call([1])).headers["x-request-id"] for _ in range(2)]
            assert len({*made}) == 2
            too_long = await harness.call([1], headers={"X-Request-Id": "x" * 129})
            assert len(too_long.headers["x-request-id"]) == 32
            refused = await harness.call(["no number"], headers={"X-Request-Id": "abc-2"})
            assert (refused.status_code, refused.headers["x-request-id"]) == (422, "abc-2")
            missing = await harness.call([1], name="nothing", headers={"X-Request-Id": "abc-3"})
            assert (missing.status_code, missing.headers["x-request-id"]) == (404, "abc-3")

    run(scenario)
