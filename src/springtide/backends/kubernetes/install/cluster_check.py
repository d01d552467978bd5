"""What a cluster lacks for the platform, in sentences with their mend: kinds, rights, nodes, storage, what runs."""

from __future__ import annotations

import asyncio
import base64
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

import msgspec

from springtide.backends.kubernetes.client import kinds
from springtide.backends.kubernetes.client.api import KubeApi
from springtide.backends.kubernetes.client.errors import KubeApiError, KubeForbidden, Unreachable
from springtide.backends.kubernetes.client.kinds import Kind, Object, key_of
from springtide.backends.kubernetes.install import rbac
from springtide.backends.kubernetes.install.manifests import ACTIVE_LABEL, keeps_state
from springtide.backends.kubernetes.install.objects import labels_of
from springtide.backends.kubernetes.install.settings_file import SettingsFile, complete
from springtide.backends.kubernetes.install.share_manifests import share_namespace
from springtide.backends.kubernetes.nodes.offered import facts_of
from springtide.backends.kubernetes.nodes.requests import BOUND_FIELDS
from springtide.backends.kubernetes.pods.spec import label_value
from springtide.backends.kubernetes.resources.definitions import custom_resource_definitions
from springtide.backends.kubernetes.settings import HOME_LABEL, NODE_LABEL, PLATFORM_LABEL, REPLICA_LABEL

SUBJECT_ACCESS_REVIEW = Kind(
    "authorization.k8s.io", "v1", "subjectaccessreviews", "SubjectAccessReview", is_namespaced=False
)
STORAGE_CLASS = Kind("storage.k8s.io", "v1", "storageclasses", "StorageClass", is_namespaced=False)
_DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
_APPLY = "springtide k8s render --settings FILE | kubectl apply -f -"
STORE_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
_MAX_TOLD = 8
_PARALLEL = 8
# Rights that the platform does not need: an account with one of them has more than the manifests grant.
_TOO_MUCH = (
    rbac.Right(verb="create", group="", resource="pods", namespace="kube-system"),
    rbac.Right(verb="list", group="", resource="secrets"),
    rbac.Right(verb="delete", group="", resource="nodes"),
    rbac.Right(verb="create", group="rbac.authorization.k8s.io", resource="clusterrolebindings"),
)


class ClusterFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at: how it stands, and what would mend it (empty: nothing to mend)."""

    name: str
    verdict: Literal["ok", "warn", "fail"]
    text: str
    mend: str = ""


# Checks the function service of the settings with the values of the Secret `store_secret`; may block.
FunctionsCheck = Callable[[SettingsFile, Mapping[str, str]], list[ClusterFinding]]


async def check_cluster(
    api: KubeApi, given: SettingsFile, functions: FunctionsCheck | None = None
) -> list[ClusterFinding]:
    """Check everything that the platform needs of a cluster, with the rights of the user of `api`.

    `functions` looks at the function service, where the settings name one. What that user may not read is a warning.
    Raises ApiError if the server breaks off in another way.
    """
    settings = complete(given)

    async def check_functions(api: KubeApi, settings: SettingsFile) -> list[ClusterFinding]:
        if functions is None or not settings.functions.provider:
            return []
        return await asyncio.to_thread(functions, settings, await _secret_values(api, settings))

    try:
        version = await api.version()
    except KubeApiError as error:
        return [
            _fail("server", str(error), "name the cluster with --kubeconfig or KUBECONFIG, and try `kubectl version`")
        ]
    findings = [ClusterFinding(name="server", verdict="ok", text=f"{api.server}, Kubernetes {version}")]
    checks: tuple[tuple[str, Callable[[KubeApi, SettingsFile], Awaitable[list[ClusterFinding]]]], ...] = (
        ("objects", _check_definitions),
        ("namespaces", _check_namespaces),
        ("rights", _check_rights),
        ("nodes", _check_nodes),
        ("quota", _check_quota),
        ("store", _check_store),
        ("functions", check_functions),
        ("journal", _check_journal),
        ("monitoring", _check_monitoring),
        ("control plane", _check_control_plane),
        ("share daemon", _check_share_daemon),
    )
    for name, check in checks:
        try:
            findings += await check(api, settings)
        except KubeForbidden as error:
            findings.append(_warn(name, f"you may not look: {error}", "ask as an administrator of the cluster"))
        except Unreachable as error:
            return [*findings, _fail("server", str(error), "try again")]
    return findings


def _ok(name: str, text: str) -> ClusterFinding:
    return ClusterFinding(name=name, verdict="ok", text=text)


def _warn(name: str, text: str, mend: str) -> ClusterFinding:
    return ClusterFinding(name=name, verdict="warn", text=text, mend=mend)


def _fail(name: str, text: str, mend: str) -> ClusterFinding:
    return ClusterFinding(name=name, verdict="fail", text=text, mend=mend)


async def _check_definitions(api: KubeApi, settings: SettingsFile) -> list[ClusterFinding]:
    findings = []
    for definition in custom_resource_definitions():
        name, kind = definition["metadata"]["name"], definition["spec"]["names"]["kind"]
        found = await api.find(kinds.CUSTOM_RESOURCE_DEFINITION, name)
        if found is None:
            findings.append(
                _fail("objects", f"the cluster does not know {kind}", "springtide k8s crds | kubectl apply -f -")
            )
        elif not _holds(found["spec"], definition["spec"]):
            told = f"the cluster's definition of {kind} is not the one of this version of Springtide"
            findings.append(_fail("objects", told, "springtide k8s crds | kubectl apply -f -"))
        else:
            findings.append(_ok("objects", f"{kind} ({name})"))
    return findings


def _holds(found: Any, wanted: Any) -> bool:
    """Whether an object contains all wanted values; the server adds defaults."""
    if isinstance(wanted, Mapping):
        return isinstance(found, Mapping) and all(
            key in found and _holds(found[key], value) for key, value in wanted.items()
        )
    if isinstance(wanted, list | tuple):
        return isinstance(found, list) and len(found) == len(wanted) and all(map(_holds, found, wanted))
    if isinstance(wanted, int | float) and not isinstance(wanted, bool):
        # Servers keep numbers as JSON has them: large ones come back rounded.
        return isinstance(found, int | float) and float(found) == float(wanted)
    return bool(found == wanted)


async def _check_namespaces(api: KubeApi, settings: SettingsFile) -> list[ClusterFinding]:
    findings = []
    for name in dict.fromkeys((settings.namespace, *settings.namespaces)):
        found = await api.find(kinds.NAMESPACE, name)
        if found is None:
            mend = _APPLY if name == settings.namespace else f"kubectl create namespace {name}"
            findings.append(_fail("namespaces", f"there is no namespace {name}", mend))
            continue
        level = found["metadata"].get("labels", {}).get("pod-security.kubernetes.io/enforce", "privileged")
        if level != "privileged" and name in settings.namespaces and _mounts_host(settings):
            told = f"{name} enforces PodSecurity {level}, and workers' pods are to mount folders of their node"
            mend = "take hostPath out of pod.overlay, set share_directory: '', or let workers live in another namespace"
            findings.append(_fail("namespaces", told, mend))
        elif name in (settings.namespaces or (settings.namespace,)) and not await _has_account(api, settings, name):
            account = settings.pod.service_account or "default"
            told = f"there is no service account {account} in {name}: pods are refused there"
            findings.append(_fail("namespaces", told, f"kubectl --namespace {name} create serviceaccount {account}"))
        else:
            findings.append(_ok("namespaces", f"{name} (PodSecurity {level})"))
    return findings


def _mounts_host(settings: SettingsFile) -> bool:
    volumes = settings.pod.overlay.get("volumes", [])
    overlaid = isinstance(volumes, list) and any(isinstance(each, dict) and "hostPath" in each for each in volumes)
    return overlaid or settings.install.share_daemon


async def _has_account(api: KubeApi, settings: SettingsFile, namespace: str) -> bool:
    return await api.find(kinds.SERVICE_ACCOUNT, settings.pod.service_account or "default", namespace) is not None


async def _check_rights(api: KubeApi, settings: SettingsFile) -> list[ClusterFinding]:
    name = settings.controller.service_account or settings.name
    account = f"{settings.namespace}:{name}"
    if await api.find(kinds.SERVICE_ACCOUNT, name, settings.namespace) is None:
        return [_fail("rights", f"there is no service account {account}", _APPLY)]
    needed = rbac.needed_rights(settings)
    turns = asyncio.Semaphore(_PARALLEL)

    async def ask(right: rbac.Right) -> bool:
        async with turns:
            return await may(api, account, right)

    answers = await asyncio.gather(*(ask(right) for right in (*needed, *_TOO_MUCH)))
    missing = [right for right, answer in zip(needed, answers, strict=False) if not answer]
    sentences = _told(missing)
    findings = [_fail("rights", sentence, _APPLY) for sentence in sentences[:_MAX_TOLD]]
    if len(sentences) > _MAX_TOLD:
        findings.append(_fail("rights", f"and {len(missing)} of the {len(needed)} rights in all", _APPLY))
    if not missing:
        findings.append(_ok("rights", f"service account {account}: all {len(needed)} that are needed"))
    for right, answer in zip(_TOO_MUCH, answers[len(needed) :], strict=True):
        # An account that reconciles all namespaces may create pods in each of them, kube-system included.
        if answer and not (right.resource == "pods" and not settings.namespaces):
            told = f"service account {account} may {right.words}, which it does not need"
            mend = "see who bound what to it: kubectl get clusterrolebindings,rolebindings -A -o wide | grep "
            findings.append(_warn("rights", told, mend + account.partition(":")[2]))
    if not settings.namespaces:
        told = "it may make pods and Secrets in every namespace, as `namespaces` names none"
        findings.append(_warn("rights", told, "set namespaces: [those where people train], and apply again"))
    return findings


def _told(missing: list[rbac.Right]) -> list[str]:
    """The missing rights, in one sentence for each group."""
    verbs: dict[tuple[str, str], list[str]] = {}
    for right in missing:
        verbs.setdefault((right.object_words, right.reason), []).append(right.verb)
    return [f"the control plane may not {', '.join(some)} {what}: {reason}" for (what, reason), some in verbs.items()]


async def may(api: KubeApi, account: str, right: rbac.Right) -> bool:
    """Whether a service account, as `namespace:name`, has a right. Raises Forbidden if the caller may not ask."""
    namespace = account.partition(":")[0]
    attributes = {
        "verb": right.verb,
        "group": right.group,
        "resource": right.resource,
        "subresource": right.subresource,
        "namespace": right.namespace,
        "name": right.name,
    }
    groups = ["system:authenticated", "system:serviceaccounts", f"system:serviceaccounts:{namespace}"]
    review = {
        "spec": {
            "user": f"system:serviceaccount:{account}",
            "groups": groups,
            "resourceAttributes": {key: value for key, value in attributes.items() if value},
        },
        "metadata": {},
    }
    answer = await api.create(SUBJECT_ACCESS_REVIEW, review)
    return bool(answer.get("status", {}).get("allowed"))


async def _check_nodes(api: KubeApi, settings: SettingsFile) -> list[ClusterFinding]:
    facts = [facts_of(node, settings) for node in (await api.list(kinds.NODE)).items]
    offered = [each for each in facts if each.node is not None]
    if not offered:
        reasons = Counter(each.reason for each in facts)
        told = "; ".join(f"{count} of {len(facts)}: {reason}" for reason, count in reasons.most_common())
        labels = settings.node_selector or {NODE_LABEL: "true"}
        label = f"kubectl label node NAME {' '.join(f'{key}={value}' for key, value in labels.items())}"
        plugin = f"install the device plugin of {settings.device_resource}, or set devices_per_node"
        mend = plugin if any(each.has_no_device for each in facts) else label
        return [_fail("nodes", f"no device to hand out ({told or 'the cluster has no nodes'})", mend)]
    num_devices = sum(len(each.node.devices) for each in offered if each.node is not None)
    text = f"{len(offered)} of {len(facts)} with {num_devices} x {settings.device_resource}"
    findings = [_ok("nodes", text)]
    for each in offered:
        away = each.cordon or ("" if each.is_ready else "it is not ready")
        if away:
            mend = f"kubectl describe node {each.name}"
            findings.append(_warn("nodes", f"nothing starts on {each.name}: {away}", mend))
        findings += [_warn("nodes", f"{each.name}: {complaint}", "correct it") for complaint in each.complaints]
    if settings.pools:
        pools = Counter(each.node.owner for each in offered if each.node is not None)
        told = ", ".join(f"{pool} {count}" for pool, count in sorted(pools.items()))
        mend = f"kubectl label node NAME {HOME_LABEL}=training (or inference)"
        can_loan = pools["training"] and pools["inference"]
        findings.append(_ok("pools", told) if can_loan else _warn("pools", f"{told}: nothing can be loaned", mend))
    return findings


async def _check_quota(api: KubeApi, settings: SettingsFile) -> list[ClusterFinding]:
    findings = []
    resource = f"requests.{settings.device_resource}"
    for namespace in settings.namespaces or (settings.namespace,):
        for quota in (await api.list(kinds.RESOURCE_QUOTA, namespace)).items:
            hard, used = quota.get("spec", {}).get("hard", {}), quota.get("status", {}).get("used", {})
            name = f"{namespace}/{quota['metadata']['name']}"
            if resource in hard:
                findings.append(_ok("quota", f"{name}: {used.get(resource, '0')} of {hard[resource]} {resource} used"))
            bare = [what for what in ("cpu", "memory") if _is_counted(hard, what) and not getattr(settings.pod, what)]
            if bare:
                told = f"{name} counts {' and '.join(bare)}, and workers' pods ask for none: they are refused"
                findings.append(_fail("quota", told, f"set {', '.join(f'pod.{what}' for what in bare)}"))
    return findings


def _is_counted(hard: Mapping[str, str], what: str) -> bool:
    return any(key in hard for key in (what, f"requests.{what}", f"limits.{what}"))


async def _check_store(api: KubeApi, settings: SettingsFile) -> list[ClusterFinding]:
    if not settings.store_url:
        told = "pods share no disk with the platform: without an object store they have nowhere to put what must last"
        return [_fail("store", told, "set store_url: s3://bucket/springtide")]
    if settings.store_url.startswith("file:"):
        told = f"{settings.store_url} is a folder: good only where every pod mounts the same one there"
        return [_warn("store", told, "use s3://bucket/prefix, or a volume that many nodes may write in pod.overlay")]
    if not settings.store_secret:
        told = f"{settings.store_url.partition('?')[0]} without store_secret: the pods' own identity must do"
        return [_ok("store", told)]
    found = await _check_secret(api, settings, "store", STORE_KEYS)
    if settings.worker_store_secret:
        found += await _check_secret(api, settings, "store", STORE_KEYS, settings.worker_store_secret)
    return found


async def _check_journal(api: KubeApi, settings: SettingsFile) -> list[ClusterFinding]:
    if not keeps_state(settings):
        if not settings.store_secret:
            told = "PostgreSQL, without a password: store_secret is not set"
            return [_warn("journal", told, "put PGPASSWORD into a Secret and name it as store_secret")]
        return await _check_secret(api, settings, "journal", ("PGPASSWORD",))
    claim = await api.find(kinds.PERSISTENT_VOLUME_CLAIM, f"{settings.name}-state", settings.namespace)
    if claim is not None and claim.get("status", {}).get("phase") == "Bound":
        return [_ok("journal", f"SQLite on volume {claim['spec'].get('volumeName', '')}")]
    classes = (await api.list(STORAGE_CLASS)).items
    wanted = settings.install.storage_class
    if wanted and wanted not in {each["metadata"]["name"] for each in classes}:
        known = ", ".join(sorted(each["metadata"]["name"] for each in classes)) or "none"
        return [
            _fail("journal", f"there is no storage class {wanted} (there is: {known})", "set install.storage_class")
        ]
    defaults = [each for each in classes if each["metadata"].get("annotations", {}).get(_DEFAULT_CLASS) == "true"]
    if not wanted and not defaults:
        told = "SQLite needs a volume, and the cluster has no default storage class"
        return [_fail("journal", told, "set install.storage_class, or journal_url: postgresql://...")]
    name = wanted or defaults[0]["metadata"]["name"]
    return [_ok("journal", f"SQLite on a volume of class {name}, {settings.install.storage_size}")]


async def _check_secret(
    api: KubeApi, settings: SettingsFile, name: str, variables: tuple[str, ...], secret: str = ""
) -> list[ClusterFinding]:
    """Whether a Secret (by default `store_secret`) has these values."""
    secret = secret or settings.store_secret
    where = f"{settings.namespace}/{secret}"
    literals = " ".join(f"--from-literal={variable}=..." for variable in variables)
    mend = f"kubectl --namespace {settings.namespace} create secret generic {secret} {literals}"
    found = await api.find(kinds.SECRET, secret, settings.namespace)
    if found is None:
        return [_fail(name, f"there is no Secret {where}", mend)]
    absent = [variable for variable in variables if not (found.get("data") or {}).get(variable)]
    if absent == list(variables) and secret == settings.worker_store_secret:
        told = f"Secret {where} has no keys: workers' pods need an identity of their own"
        return [_warn(name, told, f"see that pod.service_account has one, or {mend}")]
    if absent:
        return [_fail(name, f"Secret {where} lacks {', '.join(absent)}", mend)]
    return [_ok(name, f"Secret {where} has {', '.join(variables)}")]


async def _secret_values(api: KubeApi, settings: SettingsFile) -> dict[str, str]:
    """The values of the Secret `store_secret`, the control plane's environment; empty if there is none."""
    if not settings.store_secret:
        return {}
    found = await api.find(kinds.SECRET, settings.store_secret, settings.namespace)
    data = {} if found is None else found.get("data") or {}
    return {name: base64.b64decode(value).decode(errors="replace") for name, value in data.items()}


async def _check_monitoring(api: KubeApi, settings: SettingsFile) -> list[ClusterFinding]:
    if not settings.install.monitoring:
        return []
    if await api.find(kinds.CUSTOM_RESOURCE_DEFINITION, "servicemonitors.monitoring.coreos.com") is None:
        told = "the cluster does not know ServiceMonitor, and install.monitoring asks for one"
        return [_fail("monitoring", told, "install the Prometheus operator, or set install.monitoring: false")]
    return [_ok("monitoring", "ServiceMonitor is known")]


async def _check_control_plane(api: KubeApi, settings: SettingsFile) -> list[ClusterFinding]:
    name = "control plane"
    deployment = await api.find(kinds.DEPLOYMENT, settings.name, settings.namespace)
    if deployment is None:
        return [_warn(name, "not installed", _APPLY)]
    selector = ",".join(f"{key}={value}" for key, value in labels_of(settings, "control-plane").items())
    pods = (await api.list(kinds.POD, settings.namespace, labels=selector)).items
    wanted, ready = settings.install.replicas, deployment.get("status", {}).get("readyReplicas", 0)
    active = [pod["metadata"]["name"] for pod in pods if pod["metadata"].get("labels", {}).get(ACTIVE_LABEL) == "true"]
    if ready < wanted:
        reasons = "; ".join(dict.fromkeys(reason for pod in pods if (reason := _why_not(pod))))
        told = f"{ready} of {wanted} ready" + (f": {reasons}" if reasons else "")
        return [_fail(name, told, f"kubectl --namespace {settings.namespace} describe deployment {settings.name}")]
    if not active:
        told = "ready, and none of them decides yet"
        return [_warn(name, told, f"kubectl --namespace {settings.namespace} logs deployment/{settings.name}")]
    return [_ok(name, f"{ready} ready; {active[0]} decides")]


async def _check_share_daemon(api: KubeApi, settings: SettingsFile) -> list[ClusterFinding]:
    if not settings.install.share_daemon:
        return []
    name, namespace = f"{settings.name}-shares", share_namespace(settings)
    daemon = await api.find(kinds.DAEMON_SET, name, namespace)
    if daemon is None:
        return [_warn("share daemon", "not installed", _APPLY)]
    status = daemon.get("status", {})
    ready, wanted = status.get("numberReady", 0), status.get("desiredNumberScheduled", 0)
    if ready < wanted or not wanted:
        told = f"ready on {ready} of {wanted} nodes: where it is not, sharers are not held to their shares"
        return [_fail("share daemon", told, f"kubectl --namespace {namespace} get pods --output wide")]
    return [_ok("share daemon", f"ready on {ready} nodes"), *await _gpus_of_others(api, settings)]


async def _gpus_of_others(api: KubeApi, settings: SettingsFile) -> list[ClusterFinding]:
    """The platform's nodes on which others hold GPUs: where shares are held, the platform chooses GPUs by index."""
    try:
        nodes = [facts.name for node in (await api.list(kinds.NODE)).items if (facts := facts_of(node, settings)).node]
        pods = (await api.list(kinds.POD, fields=BOUND_FIELDS)).items
    except KubeForbidden:
        # Who may not see nodes is told so for the nodes.
        return []
    holders: dict[str, list[str]] = {}
    for pod in pods:
        labels, spec = pod["metadata"].get("labels") or {}, pod.get("spec") or {}
        asked = (container.get("resources", {}).get("limits") or {} for container in spec.get("containers", ()))
        is_own = labels.get(PLATFORM_LABEL) == label_value(settings.name) and REPLICA_LABEL in labels
        if not is_own and any(settings.device_resource in limits for limits in asked):
            holders.setdefault(spec.get("nodeName", ""), []).append("/".join(key_of(pod)))
    return [
        _warn(
            "share daemon",
            f"{', '.join(sorted(holders[name]))} holds {settings.device_resource} on {name}, and may be given one that "
            "the platform uses: where shares are held it chooses GPUs by index, whatever the device plugin chooses",
            f"keep others off: kubectl taint node {name} {settings.device_resource}=springtide:NoSchedule",
        )
        for name in nodes
        if name in holders
    ]


def _why_not(pod: Object) -> str:
    """Why a pod does not run, from its status."""
    status = pod.get("status", {})
    for container in status.get("containerStatuses", ()):
        waiting = container.get("state", {}).get("waiting")
        if waiting:
            return f"{waiting.get('reason', 'waiting')} {waiting.get('message', '')}".strip()
    for condition in status.get("conditions", ()):
        if condition.get("status") == "False" and condition.get("message"):
            return str(condition["message"])
    return ""
