"""Services that call services: the identity of each revision, and what it opens.

An identity is derived from the platform's token and stored nowhere: the journal, environments and parameters have
none. A control plane that starts again derives the same.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping

from springtide.control.records import ServiceRecord
from springtide.control.releases.steps import version_of
from springtide.core.errors import Unauthorized
from springtide.core.tokens import service_secret
from springtide.core.workload import InferenceService, WorkloadId
from springtide.serving.frames import Identify

SERVICE_PREFIX = "st_service."


def identity_of(service: InferenceService, *, token: str, url: str) -> Identify | None:
    """What the replicas of this revision call other services with, at `url`; None if it may call none."""
    if not service.calls:
        return None
    secret = service_secret(token.encode(), service.service_id, service.revision)
    return Identify(url=url, secret=f"{SERVICE_PREFIX}{service.service_id}.{service.revision}.{secret}")


class ServiceCallers:
    """Knows services by the secrets of their replicas. `services` returns the records of all services at present."""

    def __init__(self, token: str, services: Callable[[], Mapping[WorkloadId, ServiceRecord]]) -> None:
        self._token, self._services = token.encode(), services

    def known(self, secret: str) -> InferenceService:
        """The revision whose identity this is. Raises Unauthorized if it is wrong, or that revision has gone."""
        service_id, _, rest = secret.removeprefix(SERVICE_PREFIX).rpartition(".")[0].rpartition(".")
        revision = int(rest) if rest.isascii() and rest.isdigit() and len(rest) < 10 else 0
        given = secret.rpartition(".")[2]
        expected = service_secret(self._token, WorkloadId(service_id), revision)
        record = self._services().get(WorkloadId(service_id))
        if not hmac.compare_digest(given.encode("utf-8", "replace"), expected.encode()) or record is None:
            raise Unauthorized("this identity of a service is wrong, or its service was removed")
        if record.is_removed or revision not in _living(record):
            raise Unauthorized(f"revision {revision} of {record.service.name!r} is gone, and calls nothing any more")
        return version_of(record, revision)


def _living(record: ServiceRecord) -> frozenset[int]:
    """The revisions that are served, being released, or still have replicas."""
    release = () if record.release is None else (record.release.revision,)
    replicas = (version_of(record, replica.revision).revision for replica in record.replicas)
    return frozenset((record.service.revision, *release, *replicas))
