"""What the gateway is told after each step: who is there, where, behind which secret, and why nobody is."""

from __future__ import annotations

from msgspec.structs import replace

from springtide.control.records import ReplicaRecord, ReplicaState, ServiceRecord, ServiceState
from springtide.core.decision import TimeClaim
from springtide.core.resources import DeviceId
from springtide.core.shares import Share
from springtide.core.workload import Entrypoint, InferenceService, ReplicaId, WorkloadId
from springtide.service.gateway.routes import service_routes
from springtide.service.platform import PlatformView


def replica(number: int, state: ReplicaState) -> ReplicaRecord:
    return ReplicaRecord(
        replica_id=ReplicaId(f"s.{number}"),
        device_id=DeviceId(f"n/{number}"),
        state=state,
        started_at_s=0.0,
        address=f"tcp://10.0.0.{number}:8789",
    )


def record(name: str = "s", **changes: object) -> ServiceRecord:
    service = InferenceService(service_id=WorkloadId(name), name=name, entrypoint=Entrypoint(source_path="x.py"))
    made = ServiceRecord(
        service=service, state=ServiceState.READY, reason="", deployed_at_s=0.0, min_replicas=0, max_replicas=4
    )
    return replace(made, **changes)


def view(*records: ServiceRecord) -> PlatformView:
    services = {each.service.service_id: each for each in records}
    return PlatformView(seq=1, now_s=1.0, jobs={}, services=services, nodes=(), policy="p")


def test_a_replica_that_is_asked_to_stop_is_out_at_once() -> None:
    states = (ReplicaState.READY, ReplicaState.STOPPING, ReplicaState.STARTING)
    found = view(record(replicas=tuple(replica(number, state) for number, state in enumerate(states))))
    (route,) = service_routes(found)
    assert [(each.replica_id, each.is_ready) for each in route.replicas] == [("s.0", True), ("s.2", False)]
    assert {each.token for each in route.replicas} == {""}, "on one machine the address itself is private"


def test_each_service_has_the_secret_of_its_own_replicas() -> None:
    ready = (replica(0, ReplicaState.READY),)
    found = view(record("a", replicas=ready), record("b", replicas=ready), record("c", is_removed=True))
    routes = service_routes(found, token_of=lambda service_id: f"secret of {service_id}")
    assert {route.service.name: route.replicas[0].token for route in routes} == {
        "a": "secret of a",
        "b": "secret of b",
    }


def test_who_waits_for_a_promise_is_told_when_it_ends() -> None:
    waits = record("w", queued=1, reason="waits for a device")
    claims = {WorkloadId("w"): TimeClaim(code="waits_for", at_s=31.4)}
    (route,) = service_routes(replace(view(waits), claims=claims))
    assert (route.waits, route.waits_s) == ("waits for a device", 31.0)
    (route,) = service_routes(replace(view(waits), claims={WorkloadId("w"): TimeClaim(code="waits_for")}))
    assert (route.waits, route.waits_s) == ("waits for a device", None)
    (route,) = service_routes(view(waits))
    assert (route.waits, route.waits_s) == ("", None)


def test_who_waits_is_told_why_by_whoever_knows() -> None:
    share = replace(record().service, share=Share(request=0.2, limit=0.4))
    no_room = record("s", service=share, queued=1, reason="waits for room")
    pulling = record("p", replicas=(replica(0, ReplicaState.STARTING),))
    failed = record("f", state=ServiceState.FAILED, reason="it does not load")
    routes = service_routes(
        view(no_room, pulling, failed), waits_of=lambda service_id: f"{service_id}: ImagePullBackOff"
    )
    told = {route.service.service_id: (route.waits, route.failure) for route in routes}
    assert told["s"][0] == "waits for room"
    assert told["p"][0] == "p: ImagePullBackOff"
    assert told["f"][1] == "it does not load"
