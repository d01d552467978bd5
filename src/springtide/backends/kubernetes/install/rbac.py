"""What the platform may do at the API server, and nothing beyond it: rules as data, each with its reason.

Manifests write them down, `springtide k8s check` asks the server about each, and tests drive the platform with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from springtide.backends.kubernetes.settings import GROUP, KubernetesSettings

# The namespace of Events about objects without a namespace, such as nodes.
NODE_EVENTS_NAMESPACE = "default"
OBJECTS = ("trainingfunctions", "inferencefunctions")
_WATCHING = ("get", "list", "watch")


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One rule of a role. `names` limits it to objects of those names (empty: all). `reason` is for people."""

    group: str
    resources: tuple[str, ...]
    verbs: tuple[str, ...]
    reason: str
    names: tuple[str, ...] = ()

    def manifest(self) -> dict[str, Any]:
        rule: dict[str, Any] = {"apiGroups": [self.group], "resources": list(self.resources)}
        if self.names:
            rule["resourceNames"] = list(self.names)
        return {**rule, "verbs": list(self.verbs)}


class Right(msgspec.Struct, frozen=True, kw_only=True):
    """A required right. An empty `namespace` means all of them, or that the kind has none."""

    verb: str
    group: str
    resource: str
    subresource: str = ""
    namespace: str = ""
    name: str = ""
    reason: str = ""

    @property
    def words(self) -> str:
        """As in `patch pods/log in namespace ml`."""
        return f"{self.verb} {self.object_words}"

    @property
    def object_words(self) -> str:
        """As in `pods/log in namespace ml`."""
        resource = f"{self.resource}/{self.subresource}" if self.subresource else self.resource
        resource = f"{resource}.{self.group}" if self.group else resource
        name = f" {self.name}" if self.name else ""
        return f"{resource}{name}" + (f" in namespace {self.namespace}" if self.namespace else "")


NODE_RULES: tuple[Rule, ...] = (
    Rule(
        group="",
        resources=("nodes",),
        verbs=(*_WATCHING, "patch"),
        reason="it finds devices on nodes, and loans and reclaims by writing a node's pool label",
    ),
    Rule(
        group="",
        resources=("pods",),
        verbs=_WATCHING,
        reason="it sees how much of a node's processors and memory other pods request, in whatever namespace",
    ),
)
WORKLOAD_RULES: tuple[Rule, ...] = (
    Rule(
        group="",
        resources=("pods",),
        verbs=(*_WATCHING, "create", "patch", "delete"),
        reason="replicas are pods",
    ),
    Rule(group="", resources=("pods/binding",), verbs=("create",), reason="it is the scheduler of its pods"),
    Rule(group="", resources=("pods/log",), verbs=("get",), reason="`springtide logs` shows what workers wrote"),
    Rule(
        group="",
        resources=("secrets",),
        # Neither get nor list: it writes the keys of its workloads and reads no Secrets.
        verbs=("create", "patch", "delete"),
        reason="each workload has a Secret with its key and the object store's credentials",
    ),
    Rule(
        group="",
        resources=("events",),
        verbs=("create", "list"),
        reason="each decision is an event, with its reason; only a pod's events say that its image is being pulled",
    ),
    Rule(
        group=GROUP,
        resources=OBJECTS,
        # Nothing about finalizers: none are used.
        verbs=(*_WATCHING, "create", "patch", "delete"),
        reason="workloads are objects; those that came over REST are given one, and it is taken away over REST",
    ),
    Rule(
        group=GROUP,
        resources=tuple(f"{name}/status" for name in OBJECTS),
        verbs=("patch",),
        reason="it tells how workloads stand",
    ),
    Rule(
        group="",
        resources=("configmaps",),
        verbs=("get",),
        reason="the source of a workload may be a ConfigMap, and parts of its folder are",
    ),
)
NODE_EVENT_RULES: tuple[Rule, ...] = (
    Rule(
        group="",
        resources=("events",),
        verbs=("create",),
        reason="events about nodes are kept in this namespace",
    ),
)
# What the share daemon of a node does: it reads which of the node's pods hold which share.
SHARE_DAEMON_RULES: tuple[Rule, ...] = (
    Rule(group="", resources=("pods",), verbs=_WATCHING, reason="shares are annotations of pods"),
)
# Rights of users on the platform's objects, added to their roles in a namespace.
VIEW_RULES: tuple[Rule, ...] = (
    Rule(group=GROUP, resources=OBJECTS, verbs=_WATCHING, reason="users that may view a namespace see its workloads"),
)
EDIT_RULES: tuple[Rule, ...] = (
    Rule(
        group=GROUP,
        resources=OBJECTS,
        verbs=(*_WATCHING, "create", "update", "patch", "delete", "deletecollection"),
        reason="users that may edit a namespace train and deploy there",
    ),
    Rule(
        group=GROUP,
        resources=tuple(f"{name}/scale" for name in OBJECTS),
        verbs=("get", "update", "patch"),
        reason="kubectl scale",
    ),
)


def master_key_name(settings: KubernetesSettings) -> str:
    """The name of the Secret with the master key, from which every workload's key is derived."""
    return f"{settings.name}-master-key"


def token_name(settings: KubernetesSettings) -> str:
    """The name of the Secret with the token of the REST API."""
    return f"{settings.name}-token"


def platform_rules(settings: KubernetesSettings) -> tuple[Rule, ...]:
    """The control plane's rights in its own namespace, whether workloads live there or not."""
    return (
        Rule(
            group="coordination.k8s.io",
            resources=("leases",),
            # A resource name cannot limit `create`: the object has no name yet when the server checks.
            verbs=("create",),
            reason="of several control planes one decides",
        ),
        Rule(
            group="coordination.k8s.io",
            resources=("leases",),
            verbs=("get", "update"),
            names=(settings.name,),
            reason="of several control planes one decides",
        ),
        Rule(
            group="", resources=("secrets",), verbs=("create",), reason="it makes its key and its token at first start"
        ),
        Rule(
            group="",
            resources=("secrets",),
            verbs=("get",),
            names=(master_key_name(settings), token_name(settings)),
            reason="it reads its key and its token, and no other Secret",
        ),
        Rule(
            group="",
            resources=("pods",),
            verbs=("list", "patch"),
            reason="the control plane that leads labels its own pod and no other one, so that the Service leads there",
        ),
        Rule(group="", resources=("events",), verbs=("create",), reason="it tells who took over"),
    )


def workload_namespaces(settings: KubernetesSettings) -> tuple[str, ...]:
    """The namespaces of workloads, "" for all."""
    return settings.namespaces or ("",)


def needed_rights(settings: KubernetesSettings) -> tuple[Right, ...]:
    """Every single right that the control plane needs, in reading order."""
    rights = [*_rights(NODE_RULES, "")]
    for namespace in workload_namespaces(settings):
        rights += _rights(WORKLOAD_RULES, namespace)
    rights += _rights(platform_rules(settings), settings.namespace)
    if workload_namespaces(settings) != ("",):
        rights += _rights(NODE_EVENT_RULES, NODE_EVENTS_NAMESPACE)
    return tuple(dict.fromkeys(rights))


def _rights(rules: Sequence[Rule], namespace: str) -> Iterator[Right]:
    for rule in rules:
        for resource in rule.resources:
            plural, _, subresource = resource.partition("/")
            for verb in rule.verbs:
                for name in rule.names or ("",):
                    yield Right(
                        verb=verb,
                        group=rule.group,
                        resource=plural,
                        subresource=subresource,
                        namespace=namespace,
                        name=name,
                        reason=rule.reason,
                    )
