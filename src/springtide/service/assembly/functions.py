"""Connects a platform to its function service: the emulator that it starts, or a cloud's, as one node among its own."""

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
# How long a function of this machine takes until its code begins, where a warm process is forked.
_COLD_START_S = 2.0
# Enough for three stages and two replicas, however small the machine.
_LEAST_CONCURRENCY = 6
# What an emulator that runs elsewhere takes as its key.
EMULATOR_TOKEN = "SPRINGTIDE_EMULATOR_TOKEN"
# By these functions of AWS are made and invoked; without them by those that boto3 finds.
AWS_KEYS = ("FUNCTIONS_AWS_ACCESS_KEY_ID", "FUNCTIONS_AWS_SECRET_ACCESS_KEY")
ALIBABA_KEYS = ("ALIBABA_CLOUD_ACCESS_KEY_ID", "ALIBABA_CLOUD_ACCESS_KEY_SECRET")
_STORE_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION")
_INSTALL = "pip install 'springtide[functions]'"


class ServiceConnection(msgspec.Struct, frozen=True, kw_only=True):
    """A function service that can be used: what it offers, what invokes there, where objects lie, and how it is closed.

    `parameter_host` has a parameter store running for each job that synchronises (None: all travels through the object
    store); the executor ends it. `end` takes whether functions are to end with the platform.
    """

    service: FunctionService
    provider: FunctionProvider
    store_url: str
    parameter_host: ParameterHost | None
    node: Node
    end: Callable[[bool], None]


def connect(settings: FunctionSettings, state_dir: Path, *, probes: bool = True) -> ServiceConnection:
    """Start the emulator, or reach the cloud; nothing is deployed before the first job.

    Raises InvalidRequest for settings that cannot work or a library that is missing, StorageError for a store that does
    not do what it is asked (unless it `probes` none), BackendError otherwise.
    """
    offered = _offered_by(settings)
    # Plans use as many functions as the node says; a successor warms up beside each, so that as many again may run.
    service = replace(offered, concurrency=2 * offered.concurrency)
    folder = state_dir / _FOLDER
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    store_url = settings.store or f"file://{(folder / 'store').resolve()}"
    try:
        # A bucket that is not there, keys that do not fit, a Redis that is down: better known now than by a job.
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
    """The stores that must answer before the first job: those that are not started for each one."""
    return (store_url, settings.parameter_store) if is_fixed(settings.parameter_store) else (store_url,)


def node_of(settings: FunctionSettings) -> Node:
    """The function service as a node: each of its devices is a place for one job."""
    return _node(settings, service_of(settings, num_cores=_num_cores()))


def _node(settings: FunctionSettings, service: FunctionService) -> Node:
    return replace(make_node(settings.provider, settings.places, kind="function"), functions=service)


def _offered_by(settings: FunctionSettings) -> FunctionService:
    """The service's resources for planning; an emulator elsewhere is asked for its own. Raises BackendError."""
    if not (settings.is_emulated and settings.endpoint):
        return service_of(settings, num_cores=_num_cores())
    from springtide.backends.functions.emulator.launch import emulator_service

    service = emulator_service(emulator_elsewhere(settings, os.environ))
    return replace(service, concurrency=settings.concurrency or max(1, service.concurrency // 2))


def emulator_elsewhere(settings: FunctionSettings, environment: Mapping[str, str]) -> EmulatorAddress:
    """The emulator that the settings name, with its token out of `environment`."""
    from springtide.backends.functions.emulator.launch import EmulatorAddress

    return EmulatorAddress(endpoint=settings.endpoint.rstrip("/"), token=environment.get(EMULATOR_TOKEN, ""))


def service_of(settings: FunctionSettings, num_cores: int) -> FunctionService:
    """What the service offers, with what the settings change of it."""
    from springtide.perf.functions import services as function_services

    match settings.provider:
        case "emulator":
            usual = function_services.emulator()
            return function_services.emulator(
                lifetime_s=settings.lifetime_s or usual.lifetime_s,
                bytes_per_s=settings.bytes_per_s or usual.sizes[-1].bytes_per_s,
                cold_start_s=_COLD_START_S,
                concurrency=settings.concurrency or max(_LEAST_CONCURRENCY, 2 * num_cores),
                # Several functions share this machine: threads that wait for each other cost more than they give.
                max_vcpus=max(1.0, num_cores / 4),
                total_vcpus=float(num_cores),
            )
        case "aws":
            service = function_services.aws_lambda()
        case "alibaba":
            service = function_services.alibaba_function_compute()
    # Of what the account allows half is for successors that warm up.
    return replace(service, concurrency=settings.concurrency or service.concurrency // 2)


_Connected = tuple[FunctionProvider, Callable[[bool], None]]


def _emulated(settings: FunctionSettings, service: FunctionService, folder: Path) -> _Connected:
    from springtide.backends.functions.emulator.config import EmulatorConfig, EmulatorFaults
    from springtide.backends.functions.emulator.launch import ensure_emulator, stop_emulator
    from springtide.backends.functions.providers.aws import emulator_provider

    if settings.endpoint:
        # It has no roles: what one would give is a part of the functions' environment.
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
        # One that a platform with other settings left behind would go on with those.
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
    """What a function's role would give it in a cloud: the keys to an S3 store, where the jobs' objects are in one."""
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
    """What the provider at AWS is told; its keys are those of `environment`, where there are some."""
    from springtide.backends.functions.providers.aws import LambdaSettings

    return LambdaSettings(
        region=settings.region,
        role_arn=settings.role,
        image_uri=settings.image,
        endpoint_url=settings.endpoint,
        function_prefix=function_prefix(settings.name, settings.store),
        # The usual places hold the store's keys where workers have those, too: they need not be able to do this.
        access_key_id=environment.get(AWS_KEYS[0], ""),
        secret_access_key=environment.get(AWS_KEYS[1], ""),
    )


def _at_alibaba(settings: FunctionSettings, service: FunctionService, folder: Path) -> _Connected:
    from springtide.backends.functions.providers.alibaba import AlibabaProvider

    provider = AlibabaProvider(alibaba_settings(settings, os.environ), service)
    return provider, lambda ends_functions: provider.close()


def alibaba_settings(settings: FunctionSettings, environment: Mapping[str, str]) -> AlibabaSettings:
    """What the provider at Alibaba is told; its keys are those of `environment`, where there are some."""
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
