"""Shares over the API: what is taken, what is refused with which sentence, and what every answer says of them."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from fastapi.testclient import TestClient
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from kits.service.api_fixtures import HEADERS, job_body, service_body
from kits.service.platform_double import PlatformDouble
from springtide.core.errors import Conflict, InvalidRequest
from springtide.core.events import ReplicaReady
from springtide.core.resources import Device, make_node
from springtide.core.shares import Share
from springtide.core.status.shares import SharingStatus, TenantStatus
from springtide.service.api.application import build_api
from springtide.service.submission.schemas import JobIn
from springtide.service.submission.shares import check_devices, check_parts, check_share, share_of

HELD = {"request": 0.3, "limit": 0.6, "memory_mb": 0}
ENFORCED = "CPU time is given out by cgroups, 5 ms at a time"


@pytest.fixture
def platform(tmp_path):
    platform = PlatformDouble(tmp_path)
    platform.shares = SharingStatus(mechanism="cgroup-v1", enforced=ENFORCED, device_cpus=1.0, tick_s=0.005)
    return platform


@pytest.fixture
def client(platform):
    app = build_api(
        platform,
        token=HEADERS["Authorization"].removeprefix("Bearer "),
        registry=CollectorRegistry(),
        first_answer_s=lambda name: 0.25 if name == "reader" else None,
    )
    with TestClient(app, base_url="http://127.0.0.1", headers=HEADERS) as client:
        yield client


def test_a_job_on_shares_says_what_holds_it(client, platform):
    answer = client.post("/v1/jobs", json=job_body(options__share={"request": 0.3})).json()
    assert answer["share"] == HELD, "twice the request where no limit is named"
    assert answer["enforced"] == ENFORCED
    assert platform.current.jobs[answer["job_id"]].job.share == Share(request=0.3, limit=0.6)


def test_a_service_on_shares_says_what_holds_it_and_what_its_start_was_made_of(client, platform):
    body = service_body(options__share={"request": 0.3, "limit": 0.4, "memory_mb": 100}, options__min_replicas=1)
    body["options"]["capacity_per_s"] = 40.0
    deployed = client.put("/v1/services/reader", json=body).json()
    assert deployed["share"] == {"request": 0.3, "limit": 0.4, "memory_mb": 100}
    assert (deployed["enforced"], deployed["capacity_per_s"]) == (ENFORCED, 40.0)
    (replica,) = deployed["replicas"]
    phases_s = {"schedule": 0.01, "spawn": 0.02, "import": 0.5, "load": 1.5}
    platform.play(ReplicaReady(workload_id="reader", replica_id=replica["replica_id"], phases_s=phases_s))
    told = client.get("/v1/services/reader").json()
    assert told["cold_start_s"] == {**phases_s, "first_answer": 0.25}
    assert told["replicas"][0]["phases_s"] == phases_s
    everything = client.get("/v1/status").json()
    assert everything["services"][0]["enforced"] == ENFORCED
    assert everything["services"][0]["cold_start_s"] == told["cold_start_s"]


def test_without_a_share_nothing_is_said_of_one(client, platform):
    platform.sharing = lambda: pytest.fail("nobody needs to ask")
    job = client.post("/v1/jobs", json=job_body()).json()
    assert (job["share"], job["enforced"]) == (None, "")
    service = client.put("/v1/services/echo", json=service_body()).json()
    assert (service["share"], service["enforced"], service["cold_start_s"]) == (None, "", {})
    assert all(device["holders"] == [] for device in client.get("/v1/status").json()["devices"])


def test_a_quote_says_what_would_hold_it(client):
    quote = client.post("/v1/quote", json=job_body(options__share={"request": 0.3, "limit": 0.6})).json()
    assert (quote["share"], quote["enforced"]) == (HELD, ENFORCED)
    plain = client.post("/v1/quote", json=job_body()).json()
    assert (plain["share"], plain["enforced"]) == (None, "")


def test_who_shares_what_is_told(client, platform):
    tenant = TenantStatus(
        workload_id="reader", replica_id="reader.0", device_id="local/0", request=0.3, limit=0.6, granted=0.6, used=0.5
    )
    platform.shares = replace(platform.shares, tenants=(tenant,))
    told = client.get("/v1/sharing").json()
    assert told["enforced"] == ENFORCED
    assert told["tenants"][0]["granted"] == 0.6
    assert "springtide_share_granted_ratio" in client.get("/metrics").text


@pytest.mark.parametrize(
    ("share", "sentence"),
    [
        ({"request": 1.5}, "options.share.request"),
        ({"request": 0.0}, "options.share.request"),
        ({"request": 0.6, "limit": 0.3}, "between its request (0.6) and 1"),
        ({"limit": 0.3}, "options.share.request"),
        ({"request": 0.3, "cores": 2}, "cores"),
        ("30%", "options.share"),
    ],
)
def test_what_is_no_share(client, share, sentence):
    for answer in (
        client.post("/v1/jobs", json=job_body(options__share=share)),
        client.put("/v1/services/reader", json=service_body(options__share=share)),
    ):
        assert answer.status_code == 422
        assert sentence in answer.json()["error"]["message"]


def test_a_service_on_parts_of_several_devices_says_so_and_keeps_its_width(client, platform):
    share = {"request": 0.3, "limit": 0.6}
    body = service_body(options__share=share, options__devices_each=2)
    deployed = client.put("/v1/services/wide", json=body).json()
    assert (deployed["share"], deployed["devices_each"]) == (HELD, 2)
    assert platform.current.services["wide"].service.devices_each == 2
    for narrow in (share, None):
        answer = client.put("/v1/services/wide", json=service_body(options__share=narrow))
        assert answer.status_code == 409
        assert "cannot change while it is deployed" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("nodes", "told"),
    [
        ((make_node("n", 3),), "the largest node here has 3; ask for at most 2,"),
        ((make_node("n", 3, pool="inference"),), "the largest node here has 3; ask for at most 2,"),
    ],
)
def test_parts_of_several_devices_that_no_node_here_can_give_are_refused(nodes, told):
    with pytest.raises(Conflict, match=told):
        check_parts(SimpleNamespace(nodes=nodes), "wide", 4, None, has_pods=False)
    with pytest.raises(InvalidRequest, match="in pods a worker or replica holds a share of one device"):
        check_parts(SimpleNamespace(nodes=nodes), "wide", 4, None, has_pods=True)
    check_parts(SimpleNamespace(nodes=nodes), "small", 1, None, has_pods=True)


def test_workers_of_one_job_never_sit_on_one_device(client):
    body = job_body(options__share={"request": 0.1}, options__min_workers=3, options__max_workers=4)
    for path in ("/v1/jobs", "/v1/quote"):
        answer = client.post(path, json=body)
        assert answer.status_code == 409
        assert "a device of its own, and the platform has 2 devices; ask for at most --workers 2" in answer.text


def test_a_share_larger_than_any_memory_is_refused():
    small, large = (
        Device(device_id=f"gpu/{index}", node_id="gpu", index=index, kind="gpu", memory_mb=memory_mb)
        for index, memory_mb in enumerate((16_000, 40_000))
    )
    view = SimpleNamespace(nodes=(replace(make_node("gpu", 2), devices=(small, large)),))
    check_share(view, Share(request=0.3, limit=0.6, memory_mb=40_000), 1, "reader")
    with pytest.raises(InvalidRequest, match=r"asks for 40001 MB .* has 40000 MB; ask for at most --memory 40000MB"):
        check_share(view, Share(request=0.3, limit=0.6, memory_mb=40_001), 1, "reader")
    uncounted = SimpleNamespace(nodes=(make_node("cpu", 2),))
    check_share(uncounted, Share(request=0.3, limit=0.6, memory_mb=10**6), 1, "reader")
    check_share(SimpleNamespace(nodes=()), Share(request=0.3, limit=0.6), 9, "nobody knows before a node has joined")
    assert share_of(None) is None


@pytest.mark.parametrize(
    ("each", "workers", "has_pods", "sentence"),
    [
        (8, 3, True, ""),
        (8, 1, False, "the largest node here has 4; ask for at most --gpu 4"),
        (4, 2, False, "the platform has room for 1; ask for at most --workers 1"),
        (2, 4, False, "the platform has room for 3; ask for at most --workers 3"),
        (2, 3, False, ""),
        (1, 9, True, ""),
    ],
)
def test_workers_of_several_devices_need_a_node_each_that_pods_wait_for(each, workers, has_pods, sentence):
    view = SimpleNamespace(nodes=(make_node("a", 4), make_node("b", 3)))
    asked = job_body(options__devices_each=each, options__min_workers=workers, options__max_workers=workers)
    request = JobIn.model_validate_json(json.dumps(asked))
    if not sentence:
        check_devices(view, request, has_pods=has_pods)
        return
    with pytest.raises(InvalidRequest, match=sentence):
        check_devices(view, request, has_pods=has_pods)


def test_a_job_of_two_devices_each_is_taken_in(client, platform):
    job_id = client.post("/v1/jobs", json=job_body(options__devices_each=2)).json()["job_id"]
    assert platform.current.jobs[job_id].job.devices_each == 2
    refused = client.post("/v1/jobs", json=job_body(options__devices_each=5))
    assert refused.status_code == 422
    assert "1, 2, 4 or 8" in refused.text


def test_code_on_another_share_is_another_family(client, platform):
    families = set()
    for share in (None, {"request": 0.3}, {"request": 0.5}):
        job = client.post("/v1/jobs", json=job_body(options__share=share)).json()
        families.add(platform.current.jobs[job["job_id"]].job.family)
    assert len(families) == 3
