"""The objects of a replica's pod and its workload's Secret, and reading the spec back. Pure: dicts in and out."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from springtide.backends.kubernetes import settings as names
from springtide.backends.kubernetes.client.overlay import merge
from springtide.backends.kubernetes.pods.shares import is_enforced, share_parts
from springtide.backends.kubernetes.settings import KubernetesSettings
from springtide.core.actions import StartReplica
from springtide.core.containers import ContainerSettings
from springtide.core.errors import BackendError
from springtide.core.resources import Device
from springtide.core.wire.workers import WorkerSpec
from springtide.core.workload import InferenceService, ReplicaId, TrainingJob, WorkloadId
from springtide.serving.frames import HEALTH_PORT, SERVING_PORT

CONTAINER_NAME = "worker"
# Paths in a pod. The working directory is deleted with the pod.
RUN_DIR = "/var/run/springtide"
WORK_DIR = f"{RUN_DIR}/work"
KEY_DIR = f"{RUN_DIR}/key"
KEY_FILE = f"{KEY_DIR}/key"
LOG_PATH = f"{WORK_DIR}/logs/worker.log"
SPEC_VARIABLE = "SPRINGTIDE_SPEC"
KEY_FILE_VARIABLE = "SPRINGTIDE_KEY_FILE"
POD_IP_VARIABLE = "POD_IP"
# The ports on which rank 0 of a training group hosts the rendezvous; successive generations use different ones.
RENDEZVOUS_PORT = 29400
NUM_RENDEZVOUS_PORTS = 128
# Seconds beyond the grace of a pod's workload, to write the termination message and for the end to be seen.
GRACE_MARGIN_S = 5.0
# The credentials of the object store that the workload's Secret may have.
STORE_VARIABLES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
)
_REGION_VARIABLES = frozenset({"AWS_REGION", "AWS_DEFAULT_REGION"})
# The kernel limits each string of a process's environment to 128 KiB.
_MAX_SPEC_BYTES = 120_000
_MAX_NAME = 63
_MAX_LABEL = 63
_USER_ID = 10001
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_REPLICA_ID = re.compile(r"([a-z0-9](?:[a-z0-9-]*[a-z0-9])?)\.([0-9]+)")
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


# --- names -----------------------------------------------------------------------------------------------------------


def pod_name(replica_id: ReplicaId) -> str:
    """The name of a replica's pod: always the same, so that the API server refuses a second one."""
    match = _REPLICA_ID.fullmatch(replica_id)
    plain = f"{match[1]}-{match[2]}" if match else ""
    return plain if 0 < len(plain) <= _MAX_NAME else _with_digest(replica_id, _MAX_NAME)


def secret_name(workload_id: WorkloadId) -> str:
    """The name of the Secret that a workload's pods share."""
    plain = f"springtide-{workload_id}"
    return plain if _NAME.fullmatch(plain) and len(plain) <= _MAX_NAME else _with_digest(plain, _MAX_NAME)


def label_value(text: str) -> str:
    """The text as a label's value: unchanged if it is valid, else its valid characters and a digest."""
    return text if len(text) <= _MAX_LABEL and _LABEL.fullmatch(text) else _with_digest(text, _MAX_LABEL)


def namespace_of(workload: TrainingJob | InferenceService, settings: KubernetesSettings) -> str:
    """The namespace of a workload's pods and its Secret."""
    own = workload.container.namespace if workload.container else ""
    if own or not settings.namespaces or settings.namespace in settings.namespaces:
        return own or settings.namespace
    # Then the platform has no rights on workloads in its own namespace.
    return settings.namespaces[0]


def _with_digest(text: str, limit: int) -> str:
    digest = hashlib.sha256(text.encode()).hexdigest()[:10]
    head = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[: limit - len(digest) - 1].rstrip("-")
    return f"{head or 'x'}-{digest}"


# --- the spec of the worker ------------------------------------------------------------------------------------------


def worker_spec(action: StartReplica, settings: KubernetesSettings) -> WorkerSpec:
    """The spec that the worker starts with, without its token: it derives that from the key of its workload."""
    workload = action.workload
    # A pod with whole devices sees only these, from 0 on; a sharer's pod sees all, and is told which one is its own.
    return WorkerSpec(
        workload=workload,
        replica_id=action.replica_id,
        generation=action.generation,
        control_address=f"tcp://{settings.advertise}:{settings.control_port}",
        token="",
        work_dir=WORK_DIR,
        log_path=LOG_PATH,
        device_index=0,
        device_kind=settings.device_kind,
        num_devices=len(action.device_ids),
        num_threads=_num_threads(_cpu_of(workload, settings)),
        restore=action.restore,
        lease_s=settings.worker_lease_s,
        environment={"OMP_NUM_THREADS": str(_num_threads(_cpu_of(workload, settings)))},
        share=action.share,
        store_url=settings.store_url,
    )


# --- the pod ---------------------------------------------------------------------------------------------------------


def make_pod(
    action: StartReplica,
    settings: KubernetesSettings,
    devices: Sequence[Device],
    *,
    term: int,
    counts_resource: bool = True,
) -> dict[str, Any]:
    """The pod of one replica on its devices, all of one node, without that node: that is the Binding's to say.

    `term` is the number of the leadership that makes it. `counts_resource` says that the devices' node has the extended
    resource `settings.device_resource`. Raises BackendError with the mend where the settings do not suffice.
    """
    spec = worker_spec(action, settings)
    text = msgspec.json.encode(spec).decode()
    if len(text) > _MAX_SPEC_BYTES:
        raise BackendError(
            f"what {action.replica_id} has to be told takes {len(text)} bytes, and a pod's environment holds "
            f"{_MAX_SPEC_BYTES}: shorten its params, variables and requirements"
        )
    shares = share_parts(action.share, devices[0], settings)
    metadata = _metadata(action, settings, devices, term)
    metadata["annotations"] |= shares.annotations
    container = _container(action, settings, devices, text, counts_resource)
    container["env"] += shares.environment
    container["volumeMounts"] += shares.mounts
    pod_spec = {
        "schedulerName": names.SCHEDULER_NAME,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": round(grace_of(action.workload, settings) + GRACE_MARGIN_S),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "serviceAccountName": _own(action.workload).service_account or settings.pod.service_account or "default",
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER_ID,
            "runAsGroup": _USER_ID,
            "fsGroup": _USER_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "tolerations": _tolerations(settings),
        "volumes": [*_volumes(action.workload_id), *shares.volumes],
        "containers": [container],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": merge(pod_spec, settings.pod.overlay),
    }


def make_secret(
    workload: TrainingJob | InferenceService,
    settings: KubernetesSettings,
    key: str,
    credentials: Mapping[str, str],
) -> dict[str, Any]:
    """The Secret that only the pods of a workload may read: its key, and the object store's credentials.

    `credentials` are those at hand by their variables' names, the control plane's and, where the settings name a Secret
    of workers' keys, those: then the control plane's go to no pod, also where the other Secret lacks a value.
    """
    workload_id = _id_of(workload)
    found = {name: credentials.get(name, "") for name in STORE_VARIABLES}
    if settings.worker_store_secret:
        own = {name: credentials.get(f"{names.WORKERS_PREFIX}{name}", "") for name in STORE_VARIABLES}
        # The endpoint and region of the bucket are no secrets.
        found = {name: own[name] or (found[name] if name in _REGION_VARIABLES else "") for name in STORE_VARIABLES}
    values = {"key": key, **{name: value for name, value in found.items() if value}}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": secret_name(workload_id),
            "namespace": namespace_of(workload, settings),
            "labels": {
                names.MANAGED_BY_LABEL: "springtide",
                names.PLATFORM_LABEL: label_value(settings.name),
                names.WORKLOAD_LABEL: label_value(workload_id),
            },
            "annotations": {names.WORKLOAD_ANNOTATION: workload_id},
            **_owners(workload),
        },
        "type": "Opaque",
        "data": {name: base64.b64encode(value.encode()).decode() for name, value in sorted(values.items())},
    }


def grace_of(workload: TrainingJob | InferenceService, settings: KubernetesSettings) -> float:
    """Seconds that a replica has to save and leave: the longer of its workload's and the platform's."""
    return max(workload.grace_s, settings.grace_s)


def _metadata(
    action: StartReplica, settings: KubernetesSettings, devices: Sequence[Device], term: int
) -> dict[str, Any]:
    workload, more = action.workload, ",".join([device.device_id for device in devices[1:]])
    return {
        "name": pod_name(action.replica_id),
        "namespace": namespace_of(workload, settings),
        "labels": {
            names.MANAGED_BY_LABEL: "springtide",
            names.PLATFORM_LABEL: label_value(settings.name),
            names.WORKLOAD_LABEL: label_value(action.workload_id),
            names.REPLICA_LABEL: label_value(action.replica_id),
            names.ROLE_LABEL: "training" if isinstance(workload, TrainingJob) else "inference",
            names.GENERATION_LABEL: str(action.generation),
            names.TERM_LABEL: str(term),
        },
        "annotations": {
            names.WORKLOAD_ANNOTATION: action.workload_id,
            names.REPLICA_ANNOTATION: action.replica_id,
            names.DEVICE_ANNOTATION: devices[0].device_id,
            names.DEVICE_INDEX_ANNOTATION: str(devices[0].index),
            **({names.MORE_DEVICES_ANNOTATION: more} if more else {}),
        },
        **_owners(workload),
    }


def _container(
    action: StartReplica, settings: KubernetesSettings, devices: Sequence[Device], spec_text: str, counts_resource: bool
) -> dict[str, Any]:
    workload, own, given = action.workload, _own(action.workload), settings.pod
    image = own.image or given.image
    if not image:
        raise BackendError("no image to run workers in: set pod.image in the platform's settings, or the workload's")
    command = [*(given.command or ("python",)), "-m", "springtide.runtime"]
    container: dict[str, Any] = {
        "name": CONTAINER_NAME,
        "image": image,
        "command": [*command, "pod"],
        "env": _environment(action, settings, devices, spec_text, counts_resource),
        "envFrom": [{"secretRef": {"name": name}} for name in own.secrets],
        "resources": _resources(action, settings, counts_resource),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "springtide-work", "mountPath": RUN_DIR},
            {"name": "springtide-key", "mountPath": KEY_DIR, "readOnly": True},
            {"name": "springtide-tmp", "mountPath": "/tmp"},
            {"name": "springtide-shm", "mountPath": "/dev/shm"},
        ],
        # The kubelet runs it before it sends TERM, so the worker saves and leaves first, however the pod is deleted.
        "lifecycle": {"preStop": {"exec": {"command": [*command, "prestop"]}}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if given.image_pull_policy:
        container["imagePullPolicy"] = given.image_pull_policy
    if isinstance(workload, InferenceService):
        container |= _serving()
    return container


def _serving() -> dict[str, Any]:
    def probe(path: str) -> dict[str, Any]:
        return {"httpGet": {"path": path, "port": HEALTH_PORT}}

    return {
        "ports": [{"name": "replica", "containerPort": SERVING_PORT}, {"name": "health", "containerPort": HEALTH_PORT}],
        "readinessProbe": {**probe("/v2/health/ready"), "periodSeconds": 2, "timeoutSeconds": 2, "failureThreshold": 2},
        # A model may take minutes to load: liveness is probed only once the replica has answered.
        "startupProbe": {**probe("/v2/health/live"), "periodSeconds": 2, "timeoutSeconds": 2, "failureThreshold": 300},
        "livenessProbe": {**probe("/v2/health/live"), "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6},
    }


def _environment(
    action: StartReplica, settings: KubernetesSettings, devices: Sequence[Device], spec_text: str, counts_resource: bool
) -> list[dict[str, Any]]:
    secret = secret_name(action.workload_id)
    variables: list[dict[str, Any]] = [
        {"name": POD_IP_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": KEY_FILE_VARIABLE, "value": KEY_FILE},
        {"name": SPEC_VARIABLE, "value": _escape(spec_text)},
        {"name": "HOME", "value": "/tmp"},
        {"name": "PYTHONUNBUFFERED", "value": "1"},
    ]
    if settings.store_url:
        variables += [
            {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": name, "optional": True}}}
            for name in STORE_VARIABLES
        ]
    if settings.device_kind == "gpu" and (is_enforced(settings) or action.share is not None or not counts_resource):
        # The kubelet hands out no part of a device and, where devices are shared, might hand out one that others share:
        # then the container is told which ones are its own. Elsewhere the device plugin chooses.
        visible = ",".join([str(device.index) for device in devices])
        variables.append({"name": "NVIDIA_VISIBLE_DEVICES", "value": visible})
    taken = {variable["name"] for variable in variables}
    given = _own(action.workload).environment
    variables += [{"name": name, "value": _escape(value)} for name, value in given.items() if name not in taken]
    return variables


def _resources(action: StartReplica, settings: KubernetesSettings, counts_resource: bool) -> dict[str, Any]:
    own, given = _own(action.workload), settings.pod
    limits: dict[str, str] = {}
    requests: dict[str, str] = {}
    cpu, memory = own.cpu or given.cpu, own.memory or given.memory
    if action.share is not None and settings.device_kind == "cpu":
        # The device is one core: the share's request and limit are the container's.
        requests["cpu"], limits["cpu"] = f"{_milli(action.share.request)}m", f"{_milli(action.share.limit)}m"
    elif cpu:
        requests["cpu"] = limits["cpu"] = cpu
    if memory:
        requests["memory"] = limits["memory"] = memory
    if counts_resource and action.share is None and settings.device_resource:
        requests[settings.device_resource] = limits[settings.device_resource] = str(len(action.device_ids))
    return {"requests": requests, "limits": limits}


def _volumes(workload_id: WorkloadId) -> list[dict[str, Any]]:
    key = {"secretName": secret_name(workload_id), "items": [{"key": "key", "path": "key"}], "defaultMode": 0o440}
    return [
        {"name": "springtide-work", "emptyDir": {}},
        {"name": "springtide-key", "secret": key},
        {"name": "springtide-tmp", "emptyDir": {}},
        {"name": "springtide-shm", "emptyDir": {"medium": "Memory"}},
    ]


def _tolerations(settings: KubernetesSettings) -> list[dict[str, Any]]:
    # A node that is not ready may not be dead: the platform decides that by the heartbeats of its workers.
    tolerated = [
        {"key": f"node.kubernetes.io/{taint}", "operator": "Exists", "effect": "NoExecute"}
        for taint in ("not-ready", "unreachable")
    ]
    if settings.device_resource:
        tolerated.append({"key": settings.device_resource, "operator": "Exists"})
    return tolerated


def _owners(workload: TrainingJob | InferenceService) -> dict[str, Any]:
    own = _own(workload)
    if not own.owner_uid:
        return {}
    owner = {
        "apiVersion": f"{names.GROUP}/{names.VERSION}",
        "kind": own.owner_kind,
        "name": own.owner_name,
        "uid": own.owner_uid,
        "controller": True,
    }
    return {"ownerReferences": [owner]}


def _own(workload: TrainingJob | InferenceService) -> ContainerSettings:
    return workload.container or ContainerSettings()


def _id_of(workload: TrainingJob | InferenceService) -> WorkloadId:
    return workload.job_id if isinstance(workload, TrainingJob) else workload.service_id


def _cpu_of(workload: TrainingJob | InferenceService, settings: KubernetesSettings) -> str:
    return _own(workload).cpu or settings.pod.cpu


def _num_threads(cpu: str) -> int:
    """The whole processors of a limit, at least 1; 1 without a limit."""
    try:
        number = float(cpu[:-1]) / 1000.0 if cpu.endswith("m") else float(cpu or 1.0)
    except ValueError:
        return 1
    return max(1, int(number))


def _milli(fraction: float) -> int:
    return max(1, round(fraction * 1000))


def _escape(text: str) -> str:
    """Keep the kubelet from replacing `$(NAME)` in a value."""
    return text.replace("$", "$$")
