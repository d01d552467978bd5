"""The kinds of objects that the platform reads and writes, and the paths under which an API server keeps them."""

from __future__ import annotations

from typing import Any, NamedTuple

from springtide.backends.kubernetes.settings import GROUP, VERSION

# An object as the API server's JSON has it.
Object = dict[str, Any]


class Kind(NamedTuple):
    """One kind of object. `group` is empty for the core group, `plural` is its name in paths, `name` in objects."""

    group: str
    version: str
    plural: str
    name: str
    is_namespaced: bool = True

    @property
    def api_version(self) -> str:
        """The `apiVersion` of objects of this kind."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """The path of an object, or of all of them if `name` is empty; across namespaces if `namespace` is empty."""
        parts = [f"/apis/{self.group}" if self.group else "/api", self.version]
        if self.is_namespaced and namespace:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        if name:
            parts.append(name)
        if subresource:
            parts.append(subresource)
        return "/".join(parts)


class Key(NamedTuple):
    """The namespace and name of an object. `namespace` is empty for kinds without namespaces."""

    namespace: str
    name: str


POD = Kind("", "v1", "pods", "Pod")
NODE = Kind("", "v1", "nodes", "Node", is_namespaced=False)
NAMESPACE = Kind("", "v1", "namespaces", "Namespace", is_namespaced=False)
SECRET = Kind("", "v1", "secrets", "Secret")
CONFIG_MAP = Kind("", "v1", "configmaps", "ConfigMap")
SERVICE = Kind("", "v1", "services", "Service")
SERVICE_ACCOUNT = Kind("", "v1", "serviceaccounts", "ServiceAccount")
RESOURCE_QUOTA = Kind("", "v1", "resourcequotas", "ResourceQuota")
PERSISTENT_VOLUME_CLAIM = Kind("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
EVENT = Kind("", "v1", "events", "Event")
LEASE = Kind("coordination.k8s.io", "v1", "leases", "Lease")
DEPLOYMENT = Kind("apps", "v1", "deployments", "Deployment")
DAEMON_SET = Kind("apps", "v1", "daemonsets", "DaemonSet")
CUSTOM_RESOURCE_DEFINITION = Kind(
    "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", is_namespaced=False
)
ACCESS_REVIEW = Kind(
    "authorization.k8s.io", "v1", "selfsubjectaccessreviews", "SelfSubjectAccessReview", is_namespaced=False
)
TRAINING_FUNCTION = Kind(GROUP, VERSION, "trainingfunctions", "TrainingFunction")
INFERENCE_FUNCTION = Kind(GROUP, VERSION, "inferencefunctions", "InferenceFunction")


def key_of(obj: Object) -> Key:
    metadata = obj["metadata"]
    return Key(metadata.get("namespace", ""), metadata["name"])


def uid_of(obj: Object) -> str:
    """An object's uid, which differs between objects of one name; empty if the server has not seen it yet."""
    return str(obj["metadata"].get("uid", ""))


def version_of(obj: Object) -> int:
    """An object's or a listing's resource version as a number: later is larger. 0 where it has none.

    API servers promise that versions of one kind compare as numbers; one that writes something else gets -1, which
    callers take for "cannot be compared".
    """
    return number_of(obj.get("metadata", {}).get("resourceVersion", ""))


def number_of(version: str) -> int:
    """A resource version as a number, as `version_of` gives it."""
    if not version:
        return 0
    return int(version) if version.isdecimal() else -1


def is_ending(obj: Object) -> bool:
    """Whether the object is being deleted."""
    return "deletionTimestamp" in obj["metadata"]
