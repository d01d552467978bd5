"""The operator's settings of a platform on Kubernetes: one file, for the platform and for its manifests."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from springtide.control.journal.retention import KEEP_ENDED, KEEP_STEPS
from springtide.core.workload import MAX_UNFINISHED

GROUP = "springtide.dev"
VERSION = "v1alpha1"
SCHEDULER_NAME = "springtide"
# Prefix of the control plane's environment variables with the values of `worker_store_secret`: its own credentials
# have the names without it.
WORKERS_PREFIX = "WORKERS_"
FIELD_MANAGER = "springtide"

# Labels of nodes: whether the platform may use a node at all; the pool that it is labelled for now
# (written by the platform); the pool that owns it (written by the operator).
NODE_LABEL = f"{GROUP}/node"
POOL_LABEL = f"{GROUP}/pool"
HOME_LABEL = f"{GROUP}/home-pool"
# Labels of pods and other objects of the platform. GENERATION_LABEL is the job's epoch, TERM_LABEL the number of
# the leadership under which the object was written.
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
PLATFORM_LABEL = f"{GROUP}/platform"
WORKLOAD_LABEL = f"{GROUP}/workload"
REPLICA_LABEL = f"{GROUP}/replica"
ROLE_LABEL = f"{GROUP}/role"
GENERATION_LABEL = f"{GROUP}/generation"
TERM_LABEL = f"{GROUP}/term"
# Annotations of pods, for ids that may be too long for labels.
REPLICA_ANNOTATION = f"{GROUP}/replica-id"
WORKLOAD_ANNOTATION = f"{GROUP}/workload-id"
DEVICE_ANNOTATION = f"{GROUP}/device"
# The further devices of a worker that holds several: their ids, separated by commas.
MORE_DEVICES_ANNOTATION = f"{GROUP}/more-devices"
SHARE_ANNOTATION = f"{GROUP}/share"
DEVICE_INDEX_ANNOTATION = f"{GROUP}/device-index"
# Annotations of nodes, written by the operator or a discovery daemon.
SWITCHES_ANNOTATION = f"{GROUP}/switches"
LINK_GROUPS_ANNOTATION = f"{GROUP}/link-groups"


class PodSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of every pod of one role. `overlay` is merged over the pod's spec last (lists by name)."""

    image: str = ""
    image_pull_policy: Literal["", "Always", "IfNotPresent", "Never"] = ""
    command: tuple[str, ...] = ()
    cpu: str = ""
    memory: str = ""
    service_account: str = ""
    overlay: dict[str, Any] = {}


class FunctionsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The function service that jobs may run on beside the cluster's nodes; without a `provider` there is none.

    Functions meet at the platform's `store_url`, so that it must be an address which they reach, too. `region`, `role`
    (what functions may do) and `image` (what they are made of) are a cloud's; `endpoint` is another address of its API,
    and that of an emulator. `parameter_store` is a Redis that carries gradients and activations in the store's place:
    redis://HOST:PORT/NUMBER, without a password. `concurrency` is how many functions jobs have at a time (0: half of
    what the account allows), `places` how many jobs there are.
    """

    provider: Literal["", "aws", "alibaba", "emulator"] = ""
    region: str = ""
    role: str = ""
    image: str = ""
    endpoint: str = ""
    parameter_store: str = ""
    concurrency: int = 0
    places: int = 4


class KubernetesSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A platform on Kubernetes.

    `namespace` is the platform's own, `namespaces` those whose objects it reconciles (empty: all). `advertise` is the
    host at which pods reach the control plane, `control_port` where it takes workers, `port` where API and gateway are.
    `device_resource` is the extended resource that is a device; `devices_per_node` counts instead where a node has no
    such resource (0: such nodes are left alone). `node_selector` are the labels that a node must bear. `store_url` is
    the object store, `journal_url` the journal (empty: SQLite in the state directory).
    `pools` says that nodes belong to pools and may be loaned; `day_s` is the time after which the tide comes again
    (None: a day). `share_directory` is the directory of a node in which its share daemon and sharers' pods meet (empty:
    no daemon). `store_secret` is a Secret in the platform's namespace whose values are the object store's credentials,
    `worker_store_secret` one beside it with those that workers' pods are given instead (empty: the same).
    `finished_ttl_s` is for how long jobs stay after their end whose objects do not say (None: for good). `functions` is
    the function service that jobs may run on, too.
    """

    name: str = "springtide"
    namespace: str = "springtide"
    namespaces: tuple[str, ...] = ()
    advertise: str = ""
    control_port: int = 8788
    port: int = 8787
    policy: str = "springtide"
    device_resource: str = "nvidia.com/gpu"
    device_kind: Literal["gpu", "cpu"] = "gpu"
    devices_per_node: int = 0
    node_selector: dict[str, str] = {}
    pools: bool = False
    store_url: str = ""
    store_secret: str = ""
    worker_store_secret: str = ""
    journal_url: str = ""
    usd_per_device_hour: float | None = None
    day_s: float | None = None
    max_unfinished: int = MAX_UNFINISHED
    journal_retention: str = KEEP_STEPS
    keep_ended: str = KEEP_ENDED
    grace_s: float = 15.0
    worker_lease_s: float = 60.0
    worker_lost_after_s: float = 10.0
    node_lost_after_s: float = 40.0
    lease_s: float = 15.0
    finished_ttl_s: float | None = None
    share_directory: str = ""
    pod: PodSettings = PodSettings()
    controller: PodSettings = PodSettings()
    functions: FunctionsSettings = FunctionsSettings()
