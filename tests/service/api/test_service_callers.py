"""The identities of services: what they open, and for how long; over the records of services."""

from __future__ import annotations

import msgspec
import pytest

from kits.service.gateway_replicas import make_service
from springtide.control.records import ReplicaRecord, ReplicaState, ServiceRecord, ServiceState
from springtide.control.releases.parts import Revision
from springtide.core.errors import Unauthorized
from springtide.core.resources import DeviceId
from springtide.core.workload import ReplicaId
from springtide.service.api.service_callers import SERVICE_PREFIX, ServiceCallers, identity_of

TOKEN, URL = "the-platform-s-token", "http://127.0.0.1:1"


def record_of(service, **changes) -> ServiceRecord:
    settings = {"state": ServiceState.READY, "reason": "", "deployed_at_s": 0.0, "min_replicas": 0, "max_replicas": 1}
    return ServiceRecord(service=service, **{**settings, **changes})


def secret_of(service, token=TOKEN) -> str:
    identity = identity_of(service, token=token, url=URL)
    assert identity is not None
    assert identity.url == URL
    return identity.secret


def test_an_identity_is_that_of_one_revision_and_goes_with_it():
    first = make_service("my.shop", calls=("embed",))
    second = msgspec.structs.replace(first, revision=2, calls=("chat",))
    records = {first.service_id: record_of(first)}
    callers = ServiceCallers(TOKEN, lambda: records)
    assert callers.known(secret_of(first)).calls == ("embed",)
    with pytest.raises(Unauthorized, match=r"revision 2 of 'my\.shop' is gone"):
        callers.known(secret_of(second))
    old = ReplicaRecord(
        replica_id=ReplicaId("r1"), device_id=DeviceId("d1"), state=ReplicaState.READY, started_at_s=0.0, revision=1
    )
    retired = Revision(service=first, state="retired", reason="", began_at_s=0.0, ended_at_s=1.0)
    records[first.service_id] = record_of(second, replicas=(old,), past=(retired,))
    assert callers.known(secret_of(second)).calls == ("chat",)
    assert callers.known(secret_of(first)).calls == ("embed",), "its last replica still answers"
    records[first.service_id] = record_of(second, past=(retired,))
    with pytest.raises(Unauthorized, match=r"revision 1 of 'my\.shop' is gone"):
        callers.known(secret_of(first))
    records[first.service_id] = record_of(first, is_removed=True)
    with pytest.raises(Unauthorized, match="is gone, and calls nothing any more"):
        callers.known(secret_of(first))
    records.clear()
    with pytest.raises(Unauthorized, match="its service was removed"):
        callers.known(secret_of(first))


def test_wrong_secrets_are_of_no_service():
    service = make_service(calls=("embed",))
    callers = ServiceCallers(TOKEN, lambda: {service.service_id: record_of(service)})
    right = secret_of(service)
    wrong = (
        secret_of(service, token="another"),
        right[:-1],
        right + "0",
        SERVICE_PREFIX,
        f"{SERVICE_PREFIX}..",
        right.replace(".1.", ".2."),
        right.replace(".1.", ".\u0661."),
        right.replace(".1.", f".{'1' * 5000}."),
        SERVICE_PREFIX + "\udce4",
    )
    for secret in wrong:
        with pytest.raises(Unauthorized):
            callers.known(secret)


def test_a_service_that_calls_none_has_no_identity():
    assert identity_of(make_service(), token=TOKEN, url=URL) is None
