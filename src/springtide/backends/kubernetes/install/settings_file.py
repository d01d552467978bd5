"""The settings file of a platform on Kubernetes: read, checked, filled with what follows from the rest, written.

One file serves the control plane, `springtide k8s render` and Helm's values. Its section `install` is for the manifests
alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

import springtide
from springtide.backends.kubernetes.client.yaml_text import read_yaml
from springtide.backends.kubernetes.settings import KubernetesSettings, PodSettings
from springtide.control.journal.retention import retention_of
from springtide.core.decoding import convert
from springtide.core.errors import InvalidRequest

# Names of objects leave room for a suffix; namespaces are DNS labels.
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?")
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?")
_STORE_SCHEMES = ("s3", "file")
_JOURNAL_SCHEMES = ("postgresql", "postgres", "sqlite")
_CLOUD_SETTINGS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "aws": {"region": "eu-central-1", "role": "arn:aws:iam::ACCOUNT:role/NAME", "image": "ACCOUNT.dkr.ecr..."},
        "alibaba": {"region": "cn-hangzhou", "role": "acs:ram::ACCOUNT:role/NAME", "image": "registry.../springtide"},
    }
)
_MAX_CONCURRENCY = 10_000
_MAX_PLACES = 64
_EXAMPLES: Mapping[str, str] = MappingProxyType({"cpu": "500m", "memory": "1Gi"})
CONTROL_PLANE_IMAGE = "springtide-control-plane"
WORKER_IMAGE = "springtide-worker"
SHARE_AGENT_IMAGE = "springtide-share-agent"
SHARE_DIRECTORY = "/run/springtide"


class InstallSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What only the manifests need to know.

    `registry` is put before the names of images that are not given in full. `replicas` are control planes: one
    decides, the others stand by. `storage_size` and `storage_class` are the volume of a journal in SQLite (class empty:
    the cluster's default). `service_type` is the Service's. `monitoring` adds a ServiceMonitor (its kind must be
    installed), `network_policy` NetworkPolicies, `namespace_object` the platform's Namespace with the labels of
    PodSecurity (render only; Helm has --create-namespace), `user_roles` lets users that may view or edit a namespace
    view or edit the platform's objects there. `share_daemon` adds the daemon that holds parts of GPUs on every node,
    `share_image` is its image.
    """

    registry: str = ""
    replicas: int = 1
    storage_size: str = "8Gi"
    storage_class: str = ""
    service_type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    monitoring: bool = False
    network_policy: bool = True
    namespace_object: bool = True
    user_roles: bool = True
    share_daemon: bool = False
    share_image: str = ""


class SettingsFile(KubernetesSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file: the platform's settings, and `install` beside them."""

    install: InstallSettings = InstallSettings()


def read_settings(path: Path) -> KubernetesSettings:
    """The platform's settings, without `install`. Raises InvalidRequest whose sentence names file, place and mend."""
    return platform_settings(read_settings_file(path))


def read_settings_file(path: Path) -> SettingsFile:
    """The whole file, checked. Raises InvalidRequest whose sentence names file, place and mend."""
    return settings_from(read_values(path), str(path))


def read_values(path: Path) -> dict[str, Any]:
    """The file's table of plain values, not checked yet. Raises InvalidRequest."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidRequest(f"the settings {path} cannot be read: {reason}") from None
    return _values_of(text, str(path))


def parse_settings(text: str, place: str) -> SettingsFile:
    """The checked settings from a text of YAML or JSON. `place` names it. Raises InvalidRequest."""
    return settings_from(_values_of(text, place), place)


def _values_of(text: str, place: str) -> dict[str, Any]:
    documents = read_yaml(text, place)
    if len(documents) > 1:
        raise InvalidRequest(f"{place} holds {len(documents)} documents; settings are one: remove what follows `---`")
    found = documents[0] if documents else {}
    if not isinstance(found, dict):
        raise InvalidRequest(f"{place} must be a table of settings, like `policy: springtide`")
    return found


def settings_from(values: Mapping[str, Any], place: str) -> SettingsFile:
    """The checked settings from a table of plain values. Raises InvalidRequest."""
    # Helm puts values of its own beside a chart's: a file taken from there is as good as any.
    given = {key: value for key, value in values.items() if key != "global"}
    try:
        settings = convert(given, SettingsFile)
    except (msgspec.ValidationError, RecursionError) as error:
        raise InvalidRequest(f"{place}: {error}; docs/kubernetes.md lists the settings") from None
    check_settings(settings, place)
    return settings


def platform_settings(settings: SettingsFile) -> KubernetesSettings:
    """What the control plane reads: everything but `install`."""
    names = KubernetesSettings.__struct_fields__
    return KubernetesSettings(**{name: getattr(settings, name) for name in names})


def complete(settings: SettingsFile) -> SettingsFile:
    """The settings with what follows from the others filled in: images, and the host at which pods reach the platform.

    What is there stays, so that complete(complete(x)) is complete(x).
    """
    return msgspec.structs.replace(
        settings,
        advertise=settings.advertise or f"{settings.name}.{settings.namespace}.svc",
        share_directory=settings.share_directory or (SHARE_DIRECTORY if settings.install.share_daemon else ""),
        pod=_with_image(settings.pod, settings.install, WORKER_IMAGE),
        controller=_with_image(settings.controller, settings.install, CONTROL_PLANE_IMAGE),
        install=msgspec.structs.replace(
            settings.install, share_image=settings.install.share_image or _image(settings.install, SHARE_AGENT_IMAGE)
        ),
    )


def _with_image(pod: PodSettings, install: InstallSettings, name: str) -> PodSettings:
    return pod if pod.image else msgspec.structs.replace(pod, image=_image(install, name))


def _image(install: InstallSettings, name: str) -> str:
    prefix = f"{install.registry.rstrip('/')}/" if install.registry else ""
    return f"{prefix}{name}:{springtide.__version__}"


def check_settings(settings: SettingsFile, place: str) -> None:
    """Raise InvalidRequest, with the fix, for invalid or contradictory settings."""
    for sentence in _contradictions(settings):
        raise InvalidRequest(f"{place}: {sentence}")


def _contradictions(settings: SettingsFile) -> list[str]:
    """The errors of the settings, one sentence each with its fix; the first one is reported."""
    found = [*_bad_names(settings), *_bad_addresses(settings), *_bad_numbers(settings), *_bad_functions(settings)]
    install = settings.install
    if not 1 <= install.replicas <= 5:
        found.append(f"install.replicas must be from 1 to 5, got {install.replicas}: one decides, the others stand by")
    if install.replicas > 1 and not settings.journal_url.startswith("postgres"):
        found.append(
            f"install.replicas is {install.replicas}, and a journal in SQLite has one writer on one volume; set "
            "journal_url: postgresql://... or install.replicas: 1"
        )
    if settings.share_directory and not settings.share_directory.startswith("/"):
        found.append(
            f"share_directory must be a directory of nodes like /run/springtide, got {settings.share_directory!r}"
        )
    if _QUANTITY.fullmatch(install.storage_size) is None:
        found.append(f"install.storage_size must be a quantity like 8Gi, got {install.storage_size!r}")
    for where, pod in (("pod", settings.pod), ("controller", settings.controller)):
        for what in ("cpu", "memory"):
            quantity = getattr(pod, what)
            if quantity and _QUANTITY.fullmatch(quantity) is None:
                found.append(f"{where}.{what} must be a quantity like {_EXAMPLES[what]}, got {quantity!r}")
    return found


def _bad_names(settings: SettingsFile) -> list[str]:
    found = []
    if _NAME.fullmatch(settings.name) is None:
        found.append(
            f"name must be at most 40 of a-z, 0-9 and -, beginning and ending without -, got {settings.name!r}"
        )
    for namespace in (settings.namespace, *settings.namespaces):
        if _NAMESPACE.fullmatch(namespace) is None:
            found.append(f"{namespace!r} is no name of a namespace: at most 63 of a-z, 0-9 and -")
    if len(set(settings.namespaces)) != len(settings.namespaces):
        found.append("namespaces names one twice")
    for key, value in settings.node_selector.items():
        if _LABEL_KEY.fullmatch(key) is None or _LABEL_VALUE.fullmatch(value) is None:
            found.append(f"node_selector {key!r}: {value!r} is no label of a node")
    if _LABEL_KEY.fullmatch(settings.device_resource) is None or "/" not in settings.device_resource:
        found.append(
            f"device_resource must be an extended resource like nvidia.com/gpu, got {settings.device_resource!r}"
        )
    return found


def _bad_addresses(settings: SettingsFile) -> list[str]:
    found = []
    for what, address, schemes, example in (
        ("store_url", settings.store_url, _STORE_SCHEMES, "s3://bucket/springtide"),
        ("journal_url", settings.journal_url, _JOURNAL_SCHEMES, "postgresql://user@host/springtide"),
    ):
        if address and urlsplit(address).scheme not in schemes:
            found.append(f"{what} must be an address like {example}, got {address.partition('@')[2] or address!r}")
    if settings.worker_store_secret and settings.worker_store_secret == settings.store_secret:
        found.append(
            f"store_secret and worker_store_secret are both {settings.store_secret!r}, and the second holds keys that "
            "may do less; name another Secret, or leave worker_store_secret out"
        )
    if urlsplit(settings.journal_url).password:
        found.append(
            "journal_url holds a password, and the settings are no secret; put it into the Secret store_secret as "
            "PGPASSWORD and leave it out of the address"
        )
    return found


def _bad_numbers(settings: SettingsFile) -> list[str]:
    found = []
    for what in ("port", "control_port"):
        number = getattr(settings, what)
        if not 1024 <= number <= 65535:
            found.append(f"{what} must be from 1024 to 65535 (the control plane is not root), got {number}")
    if settings.port == settings.control_port:
        found.append(f"port and control_port are both {settings.port}; they need two different ports")
    for what in ("grace_s", "worker_lease_s", "worker_lost_after_s", "node_lost_after_s", "lease_s"):
        seconds = getattr(settings, what)
        if not 1.0 <= seconds <= 3600.0:
            found.append(f"{what} must be from 1 to 3600 seconds, got {seconds:g}")
    if not 0 <= settings.devices_per_node <= 256:
        found.append(f"devices_per_node must be from 0 to 256, got {settings.devices_per_node}")
    try:
        retention_of(settings.journal_retention, settings.keep_ended)
    except InvalidRequest as error:
        found.append(f"journal_retention and keep_ended: {error}")
    if not 0 <= settings.max_unfinished <= 1_000_000:
        found.append("max_unfinished must be how many workloads of a namespace may be unfinished; 0 for any number")
    if settings.finished_ttl_s is not None and not 0 <= settings.finished_ttl_s <= 10 * 365 * 86400:
        found.append("finished_ttl_s must be seconds after a job's end, like 604800; null keeps what has ended")
    if settings.usd_per_device_hour is not None and not 0 <= settings.usd_per_device_hour <= 1e6:
        found.append("usd_per_device_hour must be what an hour of one device costs, like 2.5; 0 for nothing")
    return found


def _bad_functions(settings: SettingsFile) -> list[str]:
    """The errors of the settings of a function service."""
    given, found = settings.functions, []
    if not given.provider:
        named = [name for name in ("region", "role", "image", "endpoint", "parameter_store") if getattr(given, name)]
        if named:
            found.append(f"functions.{named[0]} needs a service: add functions.provider: aws, or leave it out")
        return found
    if urlsplit(settings.store_url).scheme != "s3" and not (given.provider == "emulator" and settings.store_url):
        found.append(
            f"functions at {given.provider} meet at the platform's object store; set store_url: s3://bucket/prefix "
            "to an address that they reach"
        )
    if given.provider == "emulator":
        if urlsplit(given.endpoint).scheme not in ("http", "https"):
            found.append(
                "functions.endpoint must be the address of the emulator, which runs elsewhere, like http://localhost:9001"
            )
    else:
        for name, example in _CLOUD_SETTINGS[given.provider].items():
            if not getattr(given, name):
                found.append(f"functions at {given.provider} need functions.{name}, like {example}")
    found += _bad_parameter_store(given.parameter_store)
    for name, number, least, most in (
        ("concurrency", given.concurrency, 0, _MAX_CONCURRENCY),
        ("places", given.places, 1, _MAX_PLACES),
    ):
        if not least <= number <= most:
            found.append(f"functions.{name} must be from {least} to {most:,}, got {number}")
    return found


def _bad_parameter_store(address: str) -> list[str]:
    if not address:
        return []
    parts = urlsplit(address)
    if parts.password:
        return [
            "functions.parameter_store holds a password, and the settings are no secret; put it into the Secret "
            "store_secret as REDIS_PASSWORD and leave it out of the address"
        ]
    if parts.scheme not in ("redis", "rediss") or not parts.hostname:
        return [
            "functions.parameter_store must be a Redis that is always there, like redis://redis.data.svc:6379/0, got "
            f"{address[:200]!r}: the control plane starts none, as another one on another node could not end it"
        ]
    return []
