"""Which replica gets the next batch, and the routes that the platform gives to its gateway."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from springtide.core.workload import InferenceService, ReleaseTerms, ReplicaId
from springtide.serving.frames import Identify


class ReplicaRoute(msgspec.Struct, frozen=True, kw_only=True):
    """One replica of a service as the platform sees it. `address` is empty until it has reported Ready.

    `token` is the secret that gateway and replica share; empty where the address itself is private to the platform.
    """

    replica_id: ReplicaId
    address: str = ""
    is_ready: bool = False
    token: str = ""


class ServiceRoute(msgspec.Struct, frozen=True, kw_only=True):
    """One deployed service with its replicas.

    `failure` says why the platform no longer starts replicas; the service has to be deployed again. `waits` says why it
    has no replica yet, if that is known, and `waits_s` in how many seconds one can start at the earliest.
    Of several revisions each has a route, the present one the first; `terms` has one that is being released. With
    `identity` its replicas call other services.
    """

    service: InferenceService
    replicas: tuple[ReplicaRoute, ...] = ()
    failure: str = ""
    waits: str = ""
    waits_s: float | None = None
    terms: ReleaseTerms | None = None
    identity: Identify | None = None


class ReplicaLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The load of one replica: `num_outstanding` batches sent and not yet answered."""

    replica_id: ReplicaId
    num_outstanding: int = 0
    is_ready: bool = True
    is_draining: bool = False


def pick_replica(
    replicas: Sequence[ReplicaLoad],
    *,
    max_outstanding: int = 1,
    avoid: frozenset[ReplicaId] = frozenset(),
    cost: Callable[[ReplicaId], float] | None = None,
) -> ReplicaId | None:
    """Return the ready, not draining replica with the fewest outstanding batches, or None if all are full.

    With a `cost` of the batch at each replica the lowest decides, and among equal ones the outstanding batches. Ties go
    to the first in the sequence, so that at low load the later replicas stay idle and the first ones keep their caches
    warm. Replicas in `avoid` are chosen only if there is no other usable one.
    """
    usable = [replica for replica in replicas if replica.is_ready and not replica.is_draining]
    preferred = [replica for replica in usable if replica.replica_id not in avoid] or usable
    free = [replica for replica in preferred if replica.num_outstanding < max_outstanding]
    if not free:
        return None
    return min(
        free, key=lambda replica: (0.0 if cost is None else cost(replica.replica_id), replica.num_outstanding)
    ).replica_id
