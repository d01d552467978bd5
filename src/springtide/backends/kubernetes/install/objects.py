"""Objects and names that all manifests of the platform are made of: metadata, roles, the settings as a file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

import springtide
from springtide.backends.kubernetes.client.yaml_text import write_yaml
from springtide.backends.kubernetes.install import rbac
from springtide.backends.kubernetes.install.settings_file import SettingsFile, platform_settings

Manifest = dict[str, Any]


SETTINGS_DIR = "/etc/springtide"


SETTINGS_FILE = "settings.yaml"


def labels_of(settings: SettingsFile, component: str) -> dict[str, str]:
    """The labels of one component's objects. Never those that mark pods of workloads: such pods it may end."""
    return {
        "app.kubernetes.io/name": "springtide",
        "app.kubernetes.io/instance": settings.name,
        "app.kubernetes.io/component": component,
    }


def metadata_of(settings: SettingsFile, name: str, namespace: str = "", component: str = "control-plane") -> Manifest:
    """The metadata of one of the platform's objects; without a namespace, of a cluster-wide one."""
    version = {"app.kubernetes.io/version": springtide.__version__}
    metadata: Manifest = {"name": name, "labels": {**labels_of(settings, component), **version}}
    return {**metadata, "namespace": namespace} if namespace else metadata


def settings_digest(settings: SettingsFile) -> str:
    """A digest of the settings for the pod template: the control plane restarts when they change.

    The text that is hashed is what Go writes for the same values, so that Helm's `toJson | sha256sum` is equal.
    """
    text = json.dumps(_platform_values(settings), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return hashlib.sha256(text.encode()).hexdigest()


def _platform_values(settings: SettingsFile) -> dict[str, Any]:
    values = msgspec.to_builtins(platform_settings(settings))
    return {name: _whole_numbers(value) for name, value in values.items() if value is not None}


def _whole_numbers(value: Any) -> Any:
    """The same values with floats that are whole as such: YAML and JSON tell them apart by the way they are written."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _whole_numbers(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_whole_numbers(member) for member in value]
    return value


def namespace_object(name: str, level: str) -> Manifest:
    """A namespace with that level of PodSecurity. Its name is also a label, for network policies."""
    enforced = {f"pod-security.kubernetes.io/{mode}": level for mode in ("enforce", "audit", "warn")}
    return {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": name, "labels": {"kubernetes.io/metadata.name": name, **enforced}},
    }


def role(
    settings: SettingsFile,
    name: str,
    namespace: str,
    rules: Sequence[rbac.Rule],
    account: str,
    account_namespace: str = "",
    component: str = "control-plane",
) -> list[Manifest]:
    """The rights of an account in one namespace. The account's namespace is by default the platform's."""
    metadata = metadata_of(settings, name, namespace, component)
    return [
        _role("Role", metadata, rules),
        _binding("RoleBinding", metadata, "Role", account, account_namespace or settings.namespace),
    ]


def cluster_role(
    settings: SettingsFile,
    name: str,
    rules: Sequence[rbac.Rule],
    account: str,
    account_namespace: str = "",
    component: str = "control-plane",
) -> list[Manifest]:
    """The cluster-wide rights of an account of the platform."""
    metadata = metadata_of(settings, name, component=component)
    return [
        _role("ClusterRole", metadata, rules),
        _binding("ClusterRoleBinding", metadata, "ClusterRole", account, account_namespace or settings.namespace),
    ]


def _role(kind: str, metadata: Manifest, rules: Sequence[rbac.Rule]) -> Manifest:
    manifests = [rule.manifest() for rule in rules]
    return {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": kind, "metadata": metadata, "rules": manifests}


def _binding(kind: str, metadata: Manifest, role_kind: str, account: str, account_namespace: str) -> Manifest:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": kind,
        "metadata": metadata,
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": role_kind, "name": metadata["name"]},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": account_namespace}],
    }


def config_map(settings: SettingsFile, name: str, namespace: str, component: str = "control-plane") -> Manifest:
    """The settings as a file, for the pods of one component."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata_of(settings, name, namespace, component),
        "data": {SETTINGS_FILE: settings_text(settings)},
    }


def settings_text(settings: SettingsFile) -> str:
    """The settings as the control plane reads them: everything but `install`, each value written out."""
    return write_yaml([_platform_values(settings)], sorts_keys=True).removeprefix("---\n")
