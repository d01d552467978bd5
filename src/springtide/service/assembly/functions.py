"""Connects a platform to its function service, an emulator or a cloud's, which becomes one of its nodes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from springtide.backends.functions.parameter_store.address import is_fixed, make_parameter_host
from springtide.backends.functions.parameter_store.host import ParameterHost
from springtide.backends.functions.provider import FunctionProvider, function_prefix
from springtide.core.errors import BackendError, InvalidRequest
from springtide.core.functions import FunctionService
from springtide.core.resources import Node, make_node
from springtide.service.assembly.function_settings import FunctionSettings
from springtide.storage.stores.probe import probe_store

if TYPE_CHECKING:
    from springtide.backends.functions.emulator.launch import EmulatorAddress
    from springtide.backends.functions.providers.alibaba import AlibabaSettings
    from springtide.backends.functions.providers.aws import LambdaSettings

_FOLDER = "functions"
_PARAMETER_FOLDER = "parameter-stores"
# How long an emulated function, forked from a warm process, takes until its code runs.
_COLD_START_S = 2.0
# Enough for three stages with two replicas each, on the smallest machine too.
_MIN_CONCURRENCY = 6
# The environment variable with the token of an emulator that runs elsewhere.
EMULATOR_TOKEN = "SPRINGTIDE_EMULATOR_TOKEN"
# Keys for creating and invoking functions at AWS; without them the keys that boto3 finds are used.
AWS_KEYS = ("FUNCTIONS_AWS_ACCESS_KEY_ID", "FUNCTIONS_AWS_SECRET_ACCESS_KEY")
ALIBABA_KEYS = ("ALIBABA_CLOUD_ACCESS_KEY_ID", "ALIBABA_CLOUD_ACCESS_KEY_SECRET")
_STORE_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION")
_INSTALL = "pip install 'springtide[functions]'"


class ServiceConnection(msgspec.Struct, frozen=True, kw_only=True):
    """A connected function service.

    `parameter_host` runs a parameter store for each job that needs one, and the executor closes it; without it all
    data travels through the object store. Call `end` to disconnect; its argument says whether functions end too.
    """

    service: FunctionService
    provider: FunctionProvider
    store_url: str
    parameter_host: ParameterHost | None
    node: Node
    end: Callable[[bool], None]


def connect(settings: FunctionSettings, state_dir: Path, *, probes: bool = True) -> ServiceConnection:
    """Start the emulator or connect to the cloud. Nothing is deployed before the first job.

    Raises InvalidRequest for wrong settings or a missing library, StorageError for a store that fails its probe (with
    `probes`), BackendError otherwise.
    """
    offered = _offered_by(settings)
    # Plans use as many functions as the node offers. Each may have a successor warming up, so twice as many may run.
    service = replace(offered, concurrency=2 * offered.concurrency)
    folder = state_dir / _FOLDER
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    store_url = settings.store or f"file://{(folder / 'store').resolve()}"
    try:
        # Report a missing bucket, wrong keys or a Redis that is down now, before a job fails.
        for url in stores_of(settings, store_url) if probes else ():
            probe_store(url)
        host = make_parameter_host(settings.parameter_store, folder / _PARAMETER_FOLDER)
    except ModuleNotFoundError as error:
        raise InvalidRequest(f"functions need {error.name}, which is not installed here: {_INSTALL}") from None
    make = {"emulator": _emulated, "aws": _on_aws, "alibaba": _at_alibaba}[settings.provider]
    try:
        provider, end = make(settings, service, folder)
    except ModuleNotFoundError as error:
        raise InvalidRequest(f"functions need {error.name}, which is not installed here: {_INSTALL}") from None
    return ServiceConnection(
        service=offered,
        provider=provider,
        store_url=store_url,
        parameter_host=host,
        node=_node(settings, offered),
        end=end,
    )


def stores_of(settings: FunctionSettings, store_url: str) -> tuple[str, ...]:
    """The URLs of the stores that must already run; stores that are started for each job are left out."""
    return (store_url, settings.parameter_store) if is_fixed(settings.parameter_store) else (store_url,)


def node_of(settings: FunctionSettings) -> Node:
    """The function service as a node: each of its devices is a place for one job."""
    return _node(settings, service_of(settings, num_cores=_num_cores()))


def _node(settings: FunctionSettings, service: FunctionService) -> Node:
    return replace(make_node(settings.provider, settings.places, kind="function"), functions=service)


def _offered_by(settings: FunctionSettings) -> FunctionService:
    """The service's resources for planning; an emulator elsewhere is asked for them. Raises BackendError."""
    if not (settings.is_emulated and settings.endpoint):
        return service_of(settings, num_cores=_num_cores())
    from springtide.backends.functions.emulator.launch import emulator_service

    service = emulator_service(emulator_elsewhere(settings, os.environ))
    return replace(service, concurrency=settings.concurrency or max(1, service.concurrency // 2))


def emulator_elsewhere(settings: FunctionSettings, environment: Mapping[str, str]) -> EmulatorAddress:
    """The address of the emulator that the settings name, with the token from `environment`."""
    from springtide.backends.functions.emulator.launch import EmulatorAddress

    return EmulatorAddress(endpoint=settings.endpoint.rstrip("/"), token=environment.get(EMULATOR_TOKEN, ""))


def service_of(settings: FunctionSettings, num_cores: int) -> FunctionService:
    """The resources of the service, as modified by the settings."""
    from springtide.perf.functions import services as function_services

    match settings.provider:
        case "emulator":
            usual = function_services.emulator()
            return function_services.emulator(
                lifetime_s=settings.lifetime_s or usual.lifetime_s,
                bytes_per_s=settings.bytes_per_s or usual.sizes[-1].bytes_per_s,
                cold_start_s=_COLD_START_S,
                concurrency=settings.concurrency or max(_MIN_CONCURRENCY, 2 * num_cores),
                # Several functions share this machine, so more threads for each would only wait for each other.
                max_vcpus=max(1.0, num_cores / 4),
                total_vcpus=float(num_cores),
            )
        case "aws":
            service = function_services.aws_lambda()
        case "alibaba":
            service = function_services.alibaba_function_compute()
    # Half of the account's limit is for successors that warm up.
    return replace(service, concurrency=settings.concurrency or service.concurrency // 2)


_Connected = tuple[FunctionProvider, Callable[[bool], None]]


def _emulated(settings: FunctionSettings, service: FunctionService, folder: Path) -> _Connected:
    from springtide.backends.functions.emulator.config import EmulatorConfig, EmulatorFaults
    from springtide.backends.functions.emulator.launch import ensure_emulator, stop_emulator
    from springtide.backends.functions.providers.aws import emulator_provider

    if settings.endpoint:
        # The emulator has no roles; the functions get the keys in their environment instead.
        elsewhere = emulator_provider(
            emulator_elsewhere(settings, os.environ),
            service,
            _role_environment(settings),
            function_prefix=function_prefix(settings.name, settings.store),
        )
        return elsewhere, lambda ends_functions: elsewhere.close()
    faults = {f"{name}_fraction": fraction for name, fraction in settings.faults.items()}
    config = EmulatorConfig(
        service=service,
        warm_template=True,
        preload=("torch",),
        faults=EmulatorFaults(seed=settings.seed, **faults),
        role_environment=_role_environment(settings),
    )
    if _last_config(folder) not in (None, msgspec.json.encode(config)):
        # An emulator left behind by a platform with other settings would keep those settings.
        stop_emulator(folder)
    address = ensure_emulator(folder, config)
    provider = emulator_provider(address, service)

    def end(ends_functions: bool) -> None:
        provider.close()
        if ends_functions:
            with suppress(BackendError):
                stop_emulator(folder)

    return provider, end


def _role_environment(settings: FunctionSettings) -> dict[str, str]:
    """The environment that replaces a role at a cloud: the keys of the store, if it is at S3."""
    if not settings.store.startswith("s3:"):
        return {}
    return {name: os.environ[name] for name in _STORE_KEYS if name in os.environ}


def _last_config(folder: Path) -> bytes | None:
    try:
        return (folder / "config.json").read_bytes()
    except OSError:
        return None


def _on_aws(settings: FunctionSettings, service: FunctionService, folder: Path) -> _Connected:
    from springtide.backends.functions.providers.aws import LambdaProvider

    provider = LambdaProvider(aws_settings(settings, os.environ), service)
    return provider, lambda ends_functions: provider.close()


def aws_settings(settings: FunctionSettings, environment: Mapping[str, str]) -> LambdaSettings:
    """The settings of the provider at AWS, with the keys of `environment` if it has any."""
    from springtide.backends.functions.providers.aws import LambdaSettings

    return LambdaSettings(
        region=settings.region,
        role_arn=settings.role,
        image_uri=settings.image,
        endpoint_url=settings.endpoint,
        function_prefix=function_prefix(settings.name, settings.store),
        # The usual variables may hold the store's keys, which workers get too; those need not be allowed to create
        # functions.
        access_key_id=environment.get(AWS_KEYS[0], ""),
        secret_access_key=environment.get(AWS_KEYS[1], ""),
    )


def _at_alibaba(settings: FunctionSettings, service: FunctionService, folder: Path) -> _Connected:
    from springtide.backends.functions.providers.alibaba import AlibabaProvider

    provider = AlibabaProvider(alibaba_settings(settings, os.environ), service)
    return provider, lambda ends_functions: provider.close()


def alibaba_settings(settings: FunctionSettings, environment: Mapping[str, str]) -> AlibabaSettings:
    """The settings of the provider at Alibaba, with the keys of `environment` if it has any."""
    from springtide.backends.functions.providers.alibaba import AlibabaSettings

    return AlibabaSettings(
        region=settings.region,
        role_arn=settings.role,
        image_uri=settings.image,
        endpoint=settings.endpoint,
        function_prefix=function_prefix(settings.name, settings.store),
        access_key_id=environment.get(ALIBABA_KEYS[0], ""),
        access_key_secret=environment.get(ALIBABA_KEYS[1], ""),
    )


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
