"""Fingerprints of snapshots: a hash of the parts of a snapshot that a policy declares to read.

A plan is valid while the present snapshot has the fingerprint that the plan was made from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from springtide.core.decision import Snapshot
from springtide.core.resources import Topology
from springtide.scheduling.placement.layout import shape_of
from springtide.scheduling.replicas import wanted_replicas

_DIGEST_BYTES = 16


class Projection(msgspec.Struct, frozen=True):
    """One value that a policy reads of a job, a service or a node.

    `value` computes it from the item; different values must have different reprs. `fields` are the fields of the view
    (JobView, ServiceView, Node) that it is computed from, with dots for nested ones (`progress.step`).
    """

    name: str
    fields: tuple[str, ...]
    value: Callable[[Any], object]


def of_fields(name: str, *fields: str) -> Projection:
    """The projection of views to these fields."""
    return Projection(name, fields, attrgetter(*fields))


def of_rows(projection: Projection) -> Projection:
    """The same projection for rows that a policy derived from views and that keep the view as `view`."""
    return Projection(projection.name, projection.fields, attrgetter(*(f"view.{field}" for field in projection.fields)))


class Reads(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy reads of a snapshot.

    A change of a projection is a reason to decide anew. `also` are fields of JobView that a decision reads, too, but
    whose change alone is no such reason: progress, for example, which is reported all the time. Tests fail if a policy
    reads any other field of a view.
    """

    jobs: tuple[Projection, ...] = ()
    services: tuple[Projection, ...] = ()
    nodes: tuple[Projection, ...] = ()
    also: tuple[str, ...] = ()
    # The attribute of an item with the id of its job.
    job_id: str = "job.job_id"

    @property
    def job_fields(self) -> frozenset[str]:
        """The fields of JobView that the policy may read."""
        return frozenset(self.also).union(*[projection.fields for projection in self.jobs])

    @property
    def service_fields(self) -> frozenset[str]:
        """The fields of ServiceView that the policy may read."""
        return frozenset().union(*[projection.fields for projection in self.services])


BOUNDS = of_fields("bounds", "bounds.min_workers", "bounds.max_workers")
LENGTH = of_fields("length", "total_steps")
RESTARTS = of_fields("restarts", "restarts.num_restarts")
# The fields that the curve of a job and the sizes worth having are computed from (perf.curve).
CURVE_FIELDS = ("job", "bounds.min_workers", "bounds.max_workers", "learnt.throughput_samples_per_s", "num_replicas")
MINIMUM = of_fields("minimum", "min_replicas")
DEMAND = Projection(
    "demand",
    (
        "service",
        "min_replicas",
        "max_replicas",
        "num_ready",
        "num_starting",
        "in_flight",
        "queued",
        "idle_s",
        "latency_p99_s",
        "wanted_replicas",
    ),
    wanted_replicas,
)
SHAPE = Projection("shape", ("devices",), shape_of)
# The projections of services and of nodes for every policy.
SERVICES = (MINIMUM, DEMAND)
NODES = (SHAPE,)


class RowChanges(NamedTuple):
    """Which items were made anew since the last fingerprint, and which were dropped."""

    fresh: Sequence[Any] = ()
    gone: Sequence[Any] = ()


class Fingerprints:
    """Fingerprints of the snapshots of one policy, each a text of 32 characters.

    Digests are cached by the identity of the items, so that a fingerprint costs only what has changed. The result
    depends on the snapshot alone. Every job and service is hashed with its name, then all digests together in the order
    of the names; nodes in the order of the cluster, since devices are numbered in it.
    """

    def __init__(self, reads: Reads, rule: str = "") -> None:
        self._jobs = _Digests(reads.jobs, attrgetter(reads.job_id))
        self._services = _Digests(reads.services, attrgetter("service.service_id"))
        self._nodes = reads.nodes
        self._rule = rule.encode()
        self._cluster: Topology | None = None
        self._cluster_text = ""
        self._parts: tuple[bytes, ...] = ()
        self._text = ""

    def of(self, snapshot: Snapshot, items: Sequence[Any] | None = None, changes: RowChanges | None = None) -> str:
        """The fingerprint of a snapshot.

        `items` replace its jobs if the projections are of rows instead of views. `changes` are those since the last
        call, if the caller knows them.
        """
        jobs = self._jobs.of(snapshot.jobs if items is None else items, changes)
        services = self._services.of(snapshot.services) if snapshot.services else b""
        parts = (jobs, services, self.nodes(snapshot.cluster).encode(), self._rule)
        if parts != self._parts:
            self._parts, self._text = parts, _hash(repr(parts).encode()).hex()
        return self._text

    def nodes(self, cluster: Topology) -> str:
        """The fingerprint of the nodes alone."""
        if self._cluster is not cluster:
            facts = [(node.node_id, *[each.value(node) for each in self._nodes]) for node in cluster.nodes]
            self._cluster, self._cluster_text = cluster, _hash(repr(facts).encode()).hex()
        return self._cluster_text


class _Digests:
    """The digests of the jobs or of the services, and the digest of all of them together."""

    def __init__(self, projections: tuple[Projection, ...], name_of: Callable[[Any], str]) -> None:
        self._values = [projection.value for projection in projections]
        self._name_of = name_of
        self._known: dict[str, tuple[object, str, bytes]] = {}
        self._together: bytes | None = None

    def of(self, items: Sequence[Any], changes: RowChanges | None = None) -> bytes:
        known = self._known
        if changes is not None:
            self._take(changes.fresh)
            for item in changes.gone:
                if known.pop(self._name_of(item), None) is not None:
                    self._together = None
        if changes is None or len(known) != len(items):
            self._take(items)
            if len(known) > len(items):
                names = {self._name_of(item) for item in items}
                self._known = known = {name: kept for name, kept in known.items() if name in names}
                self._together = None
        if self._together is None:
            self._together = _hash(b"".join([known[name][2] for name in sorted(known)]))
        return self._together

    def _take(self, items: Sequence[Any]) -> None:
        """Hash these items, unless they are known."""
        known, name_of = self._known, self._name_of
        for item in items:
            name = name_of(item)
            before = known.get(name)
            if before is not None and before[0] is item:
                continue
            text = repr((name, *[value(item) for value in self._values]))
            if before is not None and before[1] == text:
                known[name] = (item, text, before[2])
            else:
                known[name] = (item, text, _hash(text.encode()))
                self._together = None


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def nodes_fingerprint(cluster: Topology) -> str:
    """The fingerprint of the nodes, for callers without a `Fingerprints`."""
    return Fingerprints(Reads(nodes=NODES)).nodes(cluster)
