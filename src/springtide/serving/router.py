"""Which replica gets the next batch, and the routes that the platform hands to its gateway. Pure values."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from springtide.core.workload import InferenceService, ReplicaId


class ReplicaRoute(msgspec.Struct, frozen=True, kw_only=True):
    """One replica of a service as the platform sees it. `address` is empty until it has reported Ready.

    `token` is the secret that gateway and replica share; empty where the address itself is private to the platform.
    """

    replica_id: ReplicaId
    address: str = ""
    is_ready: bool = False
    token: str = ""


class ServiceRoute(msgspec.Struct, frozen=True, kw_only=True):
    """One deployed service with the replicas that the platform knows of.

    `failure` says why the platform has given it up: nothing will serve it until it is deployed again. `waits` says
    why it has no replica yet, where that is known.
    """

    service: InferenceService
    replicas: tuple[ReplicaRoute, ...] = ()
    failure: str = ""
    waits: str = ""


class ReplicaLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica has to do: `num_outstanding` batches sent and not answered."""

    replica_id: ReplicaId
    num_outstanding: int = 0
    is_ready: bool = True
    is_draining: bool = False


def pick_replica(
    replicas: Sequence[ReplicaLoad], *, max_outstanding: int = 1, avoid: frozenset[ReplicaId] = frozenset()
) -> ReplicaId | None:
    """Return the ready, not draining replica with the least outstanding work, or None if every one is full.

    Ties go to the first in the sequence, so that a service at low load leaves its later replicas idle (and warm
    caches hot). Replicas in `avoid` are taken only when no other one could ever serve.
    """
    usable = [replica for replica in replicas if replica.is_ready and not replica.is_draining]
    preferred = [replica for replica in usable if replica.replica_id not in avoid] or usable
    free = [replica for replica in preferred if replica.num_outstanding < max_outstanding]
    if not free:
        return None
    return min(free, key=lambda replica: replica.num_outstanding).replica_id
