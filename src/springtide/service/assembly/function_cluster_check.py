"""Checks whether a cluster's settings let jobs run on functions, with the keys that the control plane has.

The checks run on the machine of the command. A service that cannot be reached from there may still be reachable for
the control plane, so that is a warning; a wrong answer is a failure.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from urllib.parse import parse_qsl, urlsplit

from msgspec.structs import replace

from springtide.backends.functions.parameter_store.redis_check import examine_redis
from springtide.backends.functions.provider import AccountFinding
from springtide.backends.kubernetes.install.cluster_check import STORE_KEYS, ClusterFinding
from springtide.backends.kubernetes.settings import KubernetesSettings
from springtide.core.errors import BackendError, InvalidRequest, InvalidSetting, SpringtideError
from springtide.service.assembly.function_settings import FunctionSettings, check_settings, shown_address
from springtide.service.assembly.functions import (
    ALIBABA_KEYS,
    AWS_KEYS,
    alibaba_settings,
    aws_settings,
    emulator_elsewhere,
    service_of,
)
from springtide.service.assembly.kubernetes_functions import function_settings
from springtide.storage.stores.probe import probe_store

_NAME = "functions"
# Suffixes of host names that resolve only inside a cluster or a machine.
_INSIDE = (".svc", ".cluster.local", ".local", ".localhost")


def check_functions(settings: KubernetesSettings, secret: Mapping[str, str]) -> list[ClusterFinding]:
    """Check the provider, the object store and the Redis. Blocks. It writes only a small object and deletes it again.

    `secret` is the content of the Secret `store_secret`.
    """
    try:
        given = function_settings(settings, secret)
        if given is None:
            return []
        check_settings(given)
        findings = [
            *_provider(given, secret),
            *_shared_keys(settings, secret),
            *_addresses(given),
            *_store(given, secret),
            *_parameters(given),
        ]
    except InvalidRequest as error:
        text = error.in_files if isinstance(error, InvalidSetting) else str(error)
        findings = [
            AccountFinding(verdict="fail", text=text, mend="correct the settings; docs/kubernetes.md lists them")
        ]
    return [ClusterFinding(name=_NAME, verdict=each.verdict, text=each.text, mend=each.mend) for each in findings]


def _provider(given: FunctionSettings, secret: Mapping[str, str]) -> list[AccountFinding]:
    match given.provider:
        case "aws":
            return _aws(given, secret)
        case "alibaba":
            return _alibaba(given, secret)
        case "emulator":
            return _emulator(given, secret)


def _aws(given: FunctionSettings, secret: Mapping[str, str]) -> list[AccountFinding]:
    from springtide.backends.functions.providers.aws import LambdaProvider

    names = AWS_KEYS if secret.get(AWS_KEYS[0]) else STORE_KEYS
    if not all(secret.get(name) for name in names):
        text = "the Secret has no keys for aws: the control plane's pod needs an identity of its own that may do it"
        mend = f"put {' and '.join(AWS_KEYS)} into the Secret, or see that its service account has a role at AWS"
        return [AccountFinding(verdict="warn", text=text, mend=mend)]
    keys = {AWS_KEYS[0]: secret[names[0]], AWS_KEYS[1]: secret[names[1]]}
    offered = service_of(given, num_cores=1)
    provider = LambdaProvider(aws_settings(given, keys), replace(offered, concurrency=2 * offered.concurrency))
    try:
        return provider.examine()
    finally:
        provider.close()


def _shared_keys(settings: KubernetesSettings, secret: Mapping[str, str]) -> list[AccountFinding]:
    """Warn if workers' pods get the keys with which functions are created."""
    has_own = bool(secret.get(AWS_KEYS[0])) or not secret.get(STORE_KEYS[0]) or bool(settings.worker_store_secret)
    if settings.functions.provider != "aws" or has_own:
        return []
    text = "functions are made with the object store's keys, which workers' pods have, too"
    mend = f"put keys of their own into the Secret ({' and '.join(AWS_KEYS)}), or set worker_store_secret"
    return [AccountFinding(verdict="warn", text=text, mend=mend)]


def _alibaba(given: FunctionSettings, secret: Mapping[str, str]) -> list[AccountFinding]:
    from springtide.backends.functions.providers.alibaba import AlibabaProvider

    absent = [name for name in ALIBABA_KEYS if not secret.get(name)]
    if absent:
        return [AccountFinding(verdict="fail", text=f"the Secret lacks {' and '.join(absent)}", mend="put it there")]
    provider = AlibabaProvider(alibaba_settings(given, secret), service_of(given, num_cores=1))
    try:
        return provider.examine()
    finally:
        provider.close()


def _emulator(given: FunctionSettings, secret: Mapping[str, str]) -> list[AccountFinding]:
    from springtide.backends.functions.emulator.launch import emulator_service

    try:
        service = emulator_service(emulator_elsewhere(given, secret))
    except BackendError as error:
        mend = "ask from where it can be reached; beside the control plane it listens for that pod alone"
        return [AccountFinding(verdict="warn", text=f"the emulator at {given.endpoint}: {error}", mend=mend)]
    sizes = ", ".join(str(size.memory_mb) for size in service.sizes)
    text = f"emulator at {given.endpoint}: {service.concurrency} functions at a time, of {sizes} MB"
    return [AccountFinding(verdict="ok", text=text)]


def _addresses(given: FunctionSettings) -> Iterator[AccountFinding]:
    """Report addresses of the cluster that functions of a cloud cannot reach."""
    if given.is_emulated:
        return
    endpoint = dict(parse_qsl(urlsplit(given.store).query)).get("endpoint", "")
    for setting, address in (("store_url", endpoint), ("functions.parameter_store", given.parameter_store)):
        host = urlsplit(address).hostname or ""
        if address and _is_inside(host):
            text = f"{setting} is at {host}, which functions at {given.provider} do not find"
            mend = "give it an address that they reach, too (a name of the cloud's network, a load balancer)"
            yield AccountFinding(verdict="fail", text=text, mend=mend)


def _is_inside(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return "." not in host or host.endswith(_INSIDE)


def _store(given: FunctionSettings, secret: Mapping[str, str]) -> list[AccountFinding]:
    """Check that the object store accepts the keys and supports the conditional writes that jobs on functions need."""
    shown = shown_address(given.store).partition("?")[0]
    if given.store.startswith("s3:") and not all(secret.get(name) for name in STORE_KEYS):
        text = f"{shown} is not tried: the Secret has no keys for it, and an identity of the pod's cannot be borrowed"
        return [
            AccountFinding(verdict="warn", text=text, mend="see the control plane's log, which says whether it answers")
        ]
    try:
        probed = probe_store(given.store, environment=secret)
    except SpringtideError as error:
        mend = "mend it; where it is only out of reach from here, the control plane's log says how it stands"
        return [AccountFinding(verdict="fail", text=f"{shown}: {error}", mend=mend)]
    text = f"{shown}: put {probed.put_s * 1000:.0f} ms, get {probed.get_s * 1000:.0f} ms from here"
    return [AccountFinding(verdict="ok", text=text)]


def _parameters(given: FunctionSettings) -> list[AccountFinding]:
    if not given.parameter_store:
        return [
            AccountFinding(
                verdict="ok", text="no parameter store: what functions tell each other goes through the store"
            )
        ]
    return examine_redis(given.parameter_store)
