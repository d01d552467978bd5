"""Status of the pods that replicas run in, as users see it."""

from __future__ import annotations

from typing import Literal

import msgspec

from springtide.core.resources import NodeId
from springtide.core.workload import ReplicaId, WorkloadId

PodPhase = Literal["waiting", "creating", "binding", "starting", "running", "ending"]


class PodStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One replica's pod. `reason` is the sentence that says why it does not run, empty where it does.

    `since_s` is how long it has been in this phase.
    """

    workload_id: WorkloadId
    replica_id: ReplicaId
    namespace: str
    pod: str
    node_id: NodeId
    phase: PodPhase
    reason: str = ""
    address: str = ""
    since_s: float = 0.0


class ClusterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The platform's connection to its Kubernetes cluster.

    `leader` is the process that decides now, `term` how often that has changed; `watch_age_s` how long ago the API
    server was last heard of, `pending_writes` how many calls wait. `problem` is what keeps the platform from reaching
    it, empty where nothing does.
    """

    server: str = ""
    leader: str = ""
    term: int = 0
    num_nodes: int = 0
    num_pods: int = 0
    watch_age_s: float = 0.0
    pending_writes: int = 0
    problem: str = ""
    pods: tuple[PodStatus, ...] = ()
