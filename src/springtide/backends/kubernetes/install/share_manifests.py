"""The manifests of the daemon that holds parts of GPUs on each node, in a namespace of its own: it needs its node."""

from __future__ import annotations

from springtide.backends.kubernetes import settings as names
from springtide.backends.kubernetes.install import rbac
from springtide.backends.kubernetes.install.objects import (
    SETTINGS_DIR,
    SETTINGS_FILE,
    Manifest,
    cluster_role,
    config_map,
    labels_of,
    metadata_of,
    namespace_object,
    role,
    settings_digest,
)
from springtide.backends.kubernetes.install.settings_file import SettingsFile

COMPONENT = "shares"
HEALTH_PORT = 8792


def share_namespace(settings: SettingsFile) -> str:
    """Where the daemons live: what they need of a node, no other pod of the platform may have."""
    return f"{settings.namespace}-shares"


def share_daemon(settings: SettingsFile) -> list[Manifest]:
    """The DaemonSet of share agents, one on every node that the platform may use, and its account and rights."""
    namespace, name = share_namespace(settings), f"{settings.name}-shares"
    account = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata_of(settings, name, namespace, COMPONENT),
        "automountServiceAccountToken": False,
    }
    objects = [namespace_object(namespace, "privileged"), account]
    if settings.namespaces:
        for each in settings.namespaces:
            objects += role(settings, name, each, rbac.SHARE_DAEMON_RULES, name, namespace, COMPONENT)
    else:
        whole = f"{settings.namespace}:{name}"
        objects += cluster_role(settings, whole, rbac.SHARE_DAEMON_RULES, name, namespace, COMPONENT)
    return [*objects, config_map(settings, name, namespace, COMPONENT), _daemon_set(settings, name, namespace)]


def _daemon_set(settings: SettingsFile, name: str, namespace: str) -> Manifest:
    labels = labels_of(settings, COMPONENT)
    pod: Manifest = {
        "serviceAccountName": name,
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,
        # The daemon identifies its clients by process id, which has to be one of the node's namespace.
        "hostPID": True,
        "nodeSelector": settings.node_selector or {names.NODE_LABEL: "true"},
        "tolerations": [{"key": settings.device_resource, "operator": "Exists"}],
        "volumes": [
            {"name": "settings", "configMap": {"name": name}},
            {"name": "shares", "hostPath": {"path": settings.share_directory, "type": "DirectoryOrCreate"}},
            {"name": "tmp", "emptyDir": {}},
        ],
        "containers": [_container(settings)],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": metadata_of(settings, name, namespace, COMPONENT),
        "spec": {
            "revisionHistoryLimit": 3,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels, "annotations": {f"{names.GROUP}/settings": settings_digest(settings)}},
                "spec": pod,
            },
        },
    }


def _container(settings: SettingsFile) -> Manifest:
    module = "springtide.backends.kubernetes.share_agent.agent"
    container: Manifest = {
        "name": "share-agent",
        "image": settings.install.share_image,
        "command": ["python", "-m", module],
        "args": ["--settings", f"{SETTINGS_DIR}/{SETTINGS_FILE}"],
        "env": [
            {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
            {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"},
            {"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "utility"},
            {"name": "HOME", "value": "/tmp"},
        ],
        "ports": [{"name": "health", "containerPort": HEALTH_PORT, "protocol": "TCP"}],
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "256Mi"}},
        "securityContext": {
            "runAsUser": 0,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            # Ticks of milliseconds need a thread with a higher priority.
            "capabilities": {"drop": ["ALL"], "add": ["SYS_NICE"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        # It is live while the API server is down, and ready only while shares are enforced.
        "livenessProbe": {**_probe("/healthz"), "periodSeconds": 10, "failureThreshold": 6},
        "readinessProbe": {**_probe("/readyz"), "periodSeconds": 5, "failureThreshold": 2},
        "volumeMounts": [
            {"name": "settings", "mountPath": SETTINGS_DIR, "readOnly": True},
            {"name": "shares", "mountPath": settings.share_directory},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }
    if settings.pod.image_pull_policy:
        container["imagePullPolicy"] = settings.pod.image_pull_policy
    return container


def _probe(path: str) -> Manifest:
    return {"httpGet": {"path": path, "port": "health"}, "timeoutSeconds": 5}
