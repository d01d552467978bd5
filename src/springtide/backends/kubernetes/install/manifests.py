"""The manifests of the platform: everything that `kubectl apply -f -` needs, as plain objects made from settings."""

from __future__ import annotations

from springtide.backends.kubernetes import settings as names
from springtide.backends.kubernetes.client.overlay import merge
from springtide.backends.kubernetes.install import rbac
from springtide.backends.kubernetes.install.objects import (
    SETTINGS_DIR,
    SETTINGS_FILE,
    Manifest,
    _role,
    cluster_role,
    config_map,
    labels_of,
    metadata_of,
    namespace_object,
    role,
    settings_digest,
)
from springtide.backends.kubernetes.install.settings_file import SettingsFile, complete
from springtide.backends.kubernetes.install.share_manifests import share_daemon

CONTAINER_NAME = "control-plane"
STATE_DIR = "/var/lib/springtide"
# Label of the pod of the leading control plane; the others stand by. See service/assembly/kubernetes.py.
ACTIVE_LABEL = f"{names.GROUP}/active"
USER_ID = 10001
DEFAULT_CPU = "500m"
DEFAULT_MEMORY = "1Gi"
# The newest version of Kubernetes that still has no policy/v1.
_LAST_WITHOUT_POLICY_V1 = (1, 20)
_METADATA_SERVICES = ("169.254.169.254/32", "fd00:ec2::254/128")


def render(given: SettingsFile, kubernetes: tuple[int, int] = (1, 30)) -> tuple[Manifest, ...]:
    """Every object of the platform but its custom resource definitions, in the order in which they can be applied.

    `kubernetes` is the version of the cluster, as in (1, 30).
    """
    settings = complete(given)
    install = settings.install
    objects = [*_namespaces(settings), _service_account(settings), *_access(settings)]
    objects += [config_map(settings, settings.name, settings.namespace)]
    objects += [_state_claim(settings)] if keeps_state(settings) else []
    objects += [_service(settings), _deployment(settings)]
    objects += [_disruption_budget(settings, kubernetes)] if install.replicas > 1 else []
    objects += _network_policies(settings) if install.network_policy else []
    objects += [_service_monitor(settings)] if install.monitoring else []
    if install.share_daemon:
        objects += share_daemon(settings)
    return tuple(objects)


def keeps_state(settings: SettingsFile) -> bool:
    """Whether the journal is a file of the control plane, whose directory then has to outlive the pod."""
    return not settings.journal_url.startswith("postgres")


# --- service account and roles ---------------------------------------------------------------------------------------


def _namespaces(settings: SettingsFile) -> list[Manifest]:
    if not settings.install.namespace_object:
        return []
    return [namespace_object(settings.namespace, "restricted")]


def _service_account(settings: SettingsFile) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata_of(settings, settings.name, settings.namespace),
        # The token is mounted only in pods that need it.
        "automountServiceAccountToken": False,
    }


def _access(settings: SettingsFile) -> list[Manifest]:
    """Roles and bindings. The names of what belongs to the cluster hold the namespace: platforms may be several."""
    prefix = f"{settings.namespace}:{settings.name}"
    account = settings.name
    objects = [*cluster_role(settings, f"{prefix}:nodes", rbac.NODE_RULES, account)]
    if settings.namespaces:
        for namespace in settings.namespaces:
            objects += role(settings, f"{settings.name}-workloads", namespace, rbac.WORKLOAD_RULES, account)
        node_events = f"{prefix}:node-events"
        objects += role(settings, node_events, rbac.NODE_EVENTS_NAMESPACE, rbac.NODE_EVENT_RULES, account)
    else:
        objects += cluster_role(settings, f"{prefix}:workloads", rbac.WORKLOAD_RULES, account)
    objects += role(settings, settings.name, settings.namespace, rbac.platform_rules(settings), account)
    if settings.install.user_roles:
        for kind, rules in (("view", rbac.VIEW_RULES), ("edit", rbac.EDIT_RULES)):
            user_role = _role("ClusterRole", metadata_of(settings, f"{prefix}:{kind}"), rules)
            user_role["metadata"]["labels"] |= _aggregation(kind)
            objects.append(user_role)
    return objects


def _aggregation(kind: str) -> dict[str, str]:
    """The labels by which Kubernetes adds a role to its standard roles view, edit and admin."""
    into = ("view", "edit", "admin") if kind == "view" else ("edit", "admin")
    return {f"rbac.authorization.k8s.io/aggregate-to-{name}": "true" for name in into}


# --- workloads -------------------------------------------------------------------------------------------------------


def _state_claim(settings: SettingsFile) -> Manifest:
    install = settings.install
    storage_class = {"storageClassName": install.storage_class} if install.storage_class else {}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": metadata_of(settings, f"{settings.name}-state", settings.namespace),
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            **storage_class,
            "resources": {"requests": {"storage": install.storage_size}},
        },
    }


def _service(settings: SettingsFile) -> Manifest:
    ports = {"http": settings.port, "control": settings.control_port}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata_of(settings, settings.name, settings.namespace),
        "spec": {
            "type": settings.install.service_type,
            "selector": {**labels_of(settings, "control-plane"), ACTIVE_LABEL: "true"},
            "ports": [
                {"name": name, "port": port, "targetPort": name, "protocol": "TCP"} for name, port in ports.items()
            ],
        },
    }


def _deployment(settings: SettingsFile) -> Manifest:
    labels = labels_of(settings, "control-plane")
    template = {
        "metadata": {"labels": labels, "annotations": {f"{names.GROUP}/settings": settings_digest(settings)}},
        "spec": merge(_pod(settings), settings.controller.overlay),
    }
    # A volume has one writer. Without one, the control planes of before and after may live side by side: one decides.
    one_at_a_time = {"type": "Recreate"}
    side_by_side = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata_of(settings, settings.name, settings.namespace),
        "spec": {
            "replicas": settings.install.replicas,
            "revisionHistoryLimit": 3,
            "strategy": one_at_a_time if keeps_state(settings) else side_by_side,
            "selector": {"matchLabels": labels},
            "template": template,
        },
    }


def _pod(settings: SettingsFile) -> Manifest:
    claim = {"persistentVolumeClaim": {"claimName": f"{settings.name}-state"}}
    elsewhere = {
        "labelSelector": {"matchLabels": labels_of(settings, "control-plane")},
        "topologyKey": "kubernetes.io/hostname",
    }
    return {
        "serviceAccountName": settings.controller.service_account or settings.name,
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 60,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": USER_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "affinity": {
            "podAntiAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": elsewhere}]
            }
        },
        "volumes": [
            {"name": "settings", "configMap": {"name": settings.name}},
            {"name": "state", **(claim if keeps_state(settings) else {"emptyDir": {}})},
            {"name": "tmp", "emptyDir": {}},
        ],
        "containers": [_container(settings)],
    }


def _container(settings: SettingsFile) -> Manifest:
    controller = settings.controller
    memory = controller.memory or DEFAULT_MEMORY
    container: Manifest = {
        "name": CONTAINER_NAME,
        "image": controller.image,
        "command": list(controller.command) or ["springtide"],
        "args": ["k8s", "serve", "--settings", f"{SETTINGS_DIR}/{SETTINGS_FILE}", "--state", STATE_DIR],
        "env": [
            _from_pod("POD_NAME", "metadata.name"),
            _from_pod("POD_NAMESPACE", "metadata.namespace"),
            _from_pod("POD_IP", "status.podIP"),
            {"name": "HOME", "value": "/tmp"},
        ],
        "ports": [
            {"name": "http", "containerPort": settings.port, "protocol": "TCP"},
            {"name": "control", "containerPort": settings.control_port, "protocol": "TCP"},
        ],
        "resources": {
            "requests": {"cpu": controller.cpu or DEFAULT_CPU, "memory": memory},
            "limits": {"memory": memory},
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        # Folding a long journal takes time: liveness counts only once the process has answered. A standby process is
        # ready, too: otherwise a rollout that waits for it would never end. While no decisions can be made requests are
        # still answered.
        "startupProbe": {**_probe("/healthz"), "periodSeconds": 2, "failureThreshold": 150},
        "readinessProbe": {**_probe("/readyz?for=requests"), "periodSeconds": 5, "failureThreshold": 2},
        "livenessProbe": {**_probe("/healthz"), "periodSeconds": 10, "failureThreshold": 6},
        "volumeMounts": [
            {"name": "settings", "mountPath": SETTINGS_DIR, "readOnly": True},
            {"name": "state", "mountPath": STATE_DIR},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }
    given: list[Manifest] = [{"secretRef": {"name": settings.store_secret}}] if settings.store_secret else []
    if settings.worker_store_secret:
        given.append({"secretRef": {"name": settings.worker_store_secret}, "prefix": names.WORKERS_PREFIX})
    if given:
        container["envFrom"] = given
    if controller.image_pull_policy:
        container["imagePullPolicy"] = controller.image_pull_policy
    return container


def _from_pod(name: str, path: str) -> Manifest:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _probe(path: str) -> Manifest:
    return {"httpGet": {"path": path, "port": "http"}, "timeoutSeconds": 5}


# --- network policies and monitoring ---------------------------------------------------------------------------------


def _disruption_budget(settings: SettingsFile, kubernetes: tuple[int, int]) -> Manifest:
    version = "policy/v1" if kubernetes > _LAST_WITHOUT_POLICY_V1 else "policy/v1beta1"
    return {
        "apiVersion": version,
        "kind": "PodDisruptionBudget",
        "metadata": metadata_of(settings, settings.name, settings.namespace),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": labels_of(settings, "control-plane")}},
    }


def _network_policies(settings: SettingsFile) -> list[Manifest]:
    """Only workers and the control plane may connect to workers; these may connect to all but the cloud's metadata."""
    policies = [_control_plane_policy(settings)]
    # Without a list of namespaces it is not known where workers will be: that of the platform is where they are first.
    for namespace in settings.namespaces or (settings.namespace,):
        policies.append(_worker_policy(settings, namespace))
    return policies


def _control_plane_policy(settings: SettingsFile) -> Manifest:
    workers = {"namespaceSelector": {}, "podSelector": {"matchLabels": {names.PLATFORM_LABEL: settings.name}}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata_of(settings, settings.name, settings.namespace),
        "spec": {
            "podSelector": {"matchLabels": labels_of(settings, "control-plane")},
            "policyTypes": ["Ingress"],
            "ingress": [
                # REST API and gateway: every client needs the token.
                {"ports": [{"port": settings.port, "protocol": "TCP"}]},
                {"from": [workers], "ports": [{"port": settings.control_port, "protocol": "TCP"}]},
            ],
        },
    }


def _worker_policy(settings: SettingsFile, namespace: str) -> Manifest:
    its_like = {"matchLabels": {names.PLATFORM_LABEL: settings.name}}
    control_plane = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": settings.namespace}},
        "podSelector": {"matchLabels": labels_of(settings, "control-plane")},
    }
    everywhere = [
        {"ipBlock": {"cidr": "0.0.0.0/0", "except": [_METADATA_SERVICES[0]]}},
        {"ipBlock": {"cidr": "::/0", "except": [_METADATA_SERVICES[1]]}},
    ]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata_of(settings, f"{settings.name}-workers", namespace, "worker"),
        "spec": {
            "podSelector": its_like,
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": [{"podSelector": its_like}, control_plane]}],
            # User code may connect anywhere but to the metadata address, which provides the machine's credentials.
            "egress": [{"to": everywhere}],
        },
    }


def _service_monitor(settings: SettingsFile) -> Manifest:
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "ServiceMonitor",
        "metadata": metadata_of(settings, settings.name, settings.namespace),
        "spec": {
            "selector": {"matchLabels": labels_of(settings, "control-plane")},
            "endpoints": [{"port": "http", "path": "/metrics", "interval": "15s"}],
        },
    }
