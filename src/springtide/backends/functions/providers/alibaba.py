"""Alibaba Function Compute 3.0 through its SDK: custom containers that run `container_server`, invoked synchronously.

The SDK's retries stay off for invocations: a second try of a call that broke would be a second function.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import json
import os
import re
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from springtide.backends.functions.emulator.config import DEFAULT_HANDLER
from springtide.backends.functions.provider import (
    AccountFinding,
    InvocationEnd,
    Invocations,
    LogLine,
    OnEnd,
    Outcome,
    check_prefix,
    one_line,
)
from springtide.core.errors import BackendError, InvalidRequest, InvalidSetting, SettingName
from springtide.core.functions import FunctionService
from springtide.core.wire.functions import MAX_ORDER_BYTES
from springtide.perf.functions.services import size_of

_READ_MARGIN_S = 30.0
_CONNECT_LIMIT_MS = 10_000
_CONTROL_LIMIT_MS = 60_000
_MAX_LIFETIME_S = 86_400
_DISK_MB = 512
_PAGE = 100
CONTAINER_PORT = 9000
_INSTALL = "pip install 'springtide[functions]'"
_NEVER_SENT = re.compile(
    r"Failed to establish a new connection|ConnectTimeout|NameResolutionError|Name or service not known"
)
_TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)
_OUT_OF_MEMORY = re.compile(r"OOM|out of memory|memory limit", re.IGNORECASE)
_EXITED = re.compile(r"Process exited unexpectedly|exited", re.IGNORECASE)
_MAX_MEMORY = re.compile(r"Max Memory Used: ([\d.]+) MB")
_BILLED = re.compile(r"Billed Duration: (\d+) ms")


class AlibabaSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The region, code and role of functions.

    `image_uri` is a container image in the Container Registry of the region (`springtide package --platform alibaba`
    writes its recipe). `role_arn` is the RAM role that functions take on to reach the object store. Without keys the
    environment's ALIBABA_CLOUD_ACCESS_KEY_ID and ALIBABA_CLOUD_ACCESS_KEY_SECRET hold. `endpoint` is HOST or
    http://HOST:PORT; empty: the region's.
    """

    region: str = ""
    role_arn: str = ""
    image_uri: str = ""
    handler: str = DEFAULT_HANDLER
    function_prefix: str = "springtide"
    endpoint: str = ""
    access_key_id: str = ""
    access_key_secret: str = ""
    environment: dict[str, str] = {}


class AlibabaProvider:
    """The provider of Alibaba Function Compute. The constructor raises InvalidRequest for invalid settings."""

    def __init__(self, settings: AlibabaSettings, service: FunctionService) -> None:
        check_settings(settings, service)
        self._settings = settings
        self._service = service
        self._environment = dict(settings.environment)
        self._invocations = Invocations(service.concurrency)
        self._deploying = threading.Lock()
        self._sdk = _load_sdk()
        self._client = self._sdk.client(settings)

    @property
    def service(self) -> FunctionService:
        return self._service

    def function_name(self, memory_mb: int) -> str:
        return f"{self._settings.function_prefix}-{memory_mb}"

    def deploy(self, memory_mb: Collection[int], environment: Mapping[str, str] | None = None) -> None:
        """Create what is missing and change what differs. Raises InvalidRequest, BackendError."""
        with self._deploying:
            if environment is not None:
                self._environment = {**self._settings.environment, **environment}
            for size in sorted(set(memory_mb)):
                with self._explained(f"the function {self.function_name(size)} cannot be made"):
                    self._deploy_one(size)

    def invoke(self, memory_mb: int, payload: bytes, on_end: OnEnd) -> str:
        """One run, in a thread of its own. Raises InvalidRequest for an order that is too large."""
        if len(payload) > MAX_ORDER_BYTES:
            raise InvalidRequest(
                f"an order of {len(payload)} bytes is above {MAX_ORDER_BYTES}; large things go by store"
            )
        return self._invocations.start(lambda identity: self._call(memory_mb, payload, identity), on_end)

    def tail(self, since_s: float, limit: int = 1000) -> Sequence[LogLine]:
        """Nothing: Function Compute keeps logs in Simple Log Service. Each InvocationEnd carries its last 4 KB."""
        return ()

    def remove(self) -> None:
        """Delete all functions of the prefix. Raises BackendError."""
        with self._explained("the functions cannot be deleted"):
            for name in self._deployed_names():
                try:
                    self._client.delete_function_with_options(name, {}, self._control())
                except self._sdk.error as error:
                    if _status_of(error) != 404:
                        raise

    def examine(self) -> list[AccountFinding]:
        """Check what would keep a first function from running with these settings, without creating anything."""
        where = f"alibaba {self._settings.region}"
        try:
            with self._explained(f"{where} cannot be used"):
                names = self._deployed_names()
        except InvalidRequest as error:
            return [
                AccountFinding(verdict="fail", text=str(error), mend="docs/functions-providers.md says what is needed")
            ]
        except BackendError as error:
            mend = "ask from where it can be reached; whether the control plane reaches it, its log says"
            return [AccountFinding(verdict="warn", text=str(error), mend=mend)]
        told = f"{where}: functions are called {self._settings.function_prefix}-MEMORY; {len(names)} are made"
        return [AccountFinding(verdict="ok", text=told)]

    def close(self) -> None:
        """Report no more outcomes; functions run on."""
        self._invocations.close()

    def _control(self) -> Any:
        return self._sdk.options(read_timeout=_CONTROL_LIMIT_MS, connect_timeout=_CONNECT_LIMIT_MS)

    def _deployed_names(self) -> list[str]:
        pattern = re.compile(re.escape(self._settings.function_prefix) + r"-\d+")
        names: list[str] = []
        token: str | None = None
        while True:
            request = self._sdk.models.ListFunctionsRequest(
                prefix=f"{self._settings.function_prefix}-", limit=_PAGE, next_token=token
            )
            page = self._client.list_functions_with_options(request, {}, self._control()).body
            names += [one.function_name for one in page.functions or ()]
            token = page.next_token
            if not token:
                return sorted(name for name in names if pattern.fullmatch(name))

    def _deploy_one(self, memory_mb: int) -> None:
        """Creating comes first: it says so if the function is there, and then that is changed where it differs."""
        models, name = self._sdk.models, self.function_name(memory_mb)
        given = self._wanted(memory_mb)
        create = models.CreateFunctionRequest(
            body=models.CreateFunctionInput(function_name=name, runtime="custom-container", handler="index", **given)
        )
        try:
            self._client.create_function_with_options(create, {}, self._control())
        except self._sdk.error as error:
            if _status_of(error) != 409:
                raise
            update = models.UpdateFunctionRequest(body=models.UpdateFunctionInput(**given))
            self._client.update_function_with_options(name, update, {}, self._control())

    def _wanted(self, memory_mb: int) -> dict[str, Any]:
        models, settings = self._sdk.models, self._settings
        vcpus = size_of(self._service, memory_mb).vcpus
        lifetime_s = min(round(self._service.lifetime_s), _MAX_LIFETIME_S)
        # The container's server answers for as long as it may, and tells the handler how long that is.
        told = {"SPRINGTIDE_HANDLER": settings.handler, "SPRINGTIDE_LIFETIME_S": str(lifetime_s)}
        return {
            # vCPUs come in steps of 0.05, with 1 to 4 GB each.
            "cpu": round(max(0.05, round(vcpus / 0.05) * 0.05), 2),
            "memory_size": memory_mb,
            "timeout": lifetime_s,
            "disk_size": _DISK_MB,
            # One invocation at a time: each has the whole function's memory and CPU.
            "instance_concurrency": 1,
            "role": settings.role_arn or None,
            "environment_variables": {**self._environment, **told},
            "internet_access": True,
            "custom_container_config": models.CustomContainerConfig(image=settings.image_uri, port=CONTAINER_PORT),
        }

    def _call(self, memory_mb: int, payload: bytes, identity: str) -> InvocationEnd:
        """One blocking invocation, and what its answer means."""
        models = self._sdk.models
        read_s = self._service.lifetime_s + self._service.cold_start_s + _READ_MARGIN_S
        options = self._sdk.options(read_timeout=round(read_s * 1000), connect_timeout=_CONNECT_LIMIT_MS)
        headers = models.InvokeFunctionHeaders(x_fc_invocation_type="Sync", x_fc_log_type="Tail")
        request = models.InvokeFunctionRequest(body=payload)
        try:
            response = self._client.invoke_function_with_options(
                self.function_name(memory_mb), request, headers, options
            )
            returned = response.body.read() if response.body is not None else b""
        except self._sdk.error as error:
            return _end_of_refusal(error, identity)
        except Exception as error:
            # The SDK wraps what requests and urllib3 raise into errors without a common class.
            text = one_line(error)
            if _NEVER_SENT.search(text):
                text = f"Function Compute cannot be reached: {text}"
                return InvocationEnd(invocation_id=identity, outcome="refused", error=text, retry_after_s=1.0)
            text = f"the connection to Function Compute broke while the function ran: {text}"
            return InvocationEnd(invocation_id=identity, outcome="lost", error=text, duration_s=None)
        headers_given = {name.lower(): value for name, value in (response.headers or {}).items()}
        return end_of_answer(identity, memory_mb, headers_given, returned)

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Turns what the SDK raises into one sentence: InvalidRequest with a mend where there is one."""
        try:
            yield
        except self._sdk.error as error:
            raise _told(what, error, self._settings) from error
        except (InvalidRequest, BackendError, KeyError):
            raise
        except Exception as error:
            raise BackendError(f"{what}: Function Compute cannot be reached: {one_line(error)}") from error


def check_settings(settings: AlibabaSettings, service: FunctionService) -> None:
    """Raise InvalidRequest for settings with which no function can be created, before any call."""
    if not re.fullmatch(r"[a-z]{2}-[a-z0-9-]+", settings.region):
        raise InvalidSetting(
            "functions on Alibaba Cloud need a region: ",
            SettingName("functions.region"),
            f" cn-hangzhou, for example, not {settings.region!r}",
        )
    if not settings.image_uri:
        raise InvalidSetting(
            "functions on Alibaba Cloud need an image in the Container Registry, ",
            SettingName("functions.image"),
            "; `springtide package --platform alibaba` writes its recipe",
        )
    if settings.role_arn and not re.fullmatch(r"acs:ram::\d+:role/[\w.@-]+", settings.role_arn):
        raise InvalidRequest(f"a role on Alibaba Cloud is acs:ram::ACCOUNT:role/NAME, not {settings.role_arn!r}")
    check_prefix(settings.function_prefix)
    if service.lifetime_s > _MAX_LIFETIME_S:
        raise InvalidRequest(f"a function lives for {_MAX_LIFETIME_S} s at most, not {service.lifetime_s:g}")


def end_of_answer(identity: str, memory_mb: int, headers: Mapping[str, str], returned: bytes) -> InvocationEnd:
    """What the answer to an invocation means: its headers (in lower case) and its body."""
    log = base64.b64decode(headers.get("x-fc-log-result", "")).decode(errors="replace")
    billed, used = _BILLED.search(log), _MAX_MEMORY.search(log)
    duration_ms = headers.get("x-fc-invocation-duration") or (billed[1] if billed else "")
    memory_text = headers.get("x-fc-max-memory-usage") or (used[1] if used else "0")
    used_mb = round(float(memory_text)) if re.fullmatch(r"[\d.]+", memory_text) else 0
    kind = headers.get("x-fc-error-type", "")
    outcome: Outcome = "returned"
    error = ""
    if kind:
        outcome, error = _failure(kind, returned, used_mb >= memory_mb)
    return InvocationEnd(
        invocation_id=identity,
        outcome=outcome,
        payload=b"" if kind else returned,
        error=error,
        log=log,
        duration_s=float(duration_ms) / 1000 if duration_ms.replace(".", "", 1).isdigit() else None,
        max_memory_mb=used_mb,
    )


def _failure(kind: str, returned: bytes, is_full: bool) -> tuple[Outcome, str]:
    try:
        said = json.loads(returned)
    except ValueError:
        said = {}
    message = str(said.get("errorMessage", "")) if isinstance(said, dict) else ""
    name = str(said.get("errorType", "")) if isinstance(said, dict) else ""
    text = message or returned.decode(errors="replace")[:500]
    # What the handler raised may speak of time and memory, too: only the provider's own words count.
    if not name:
        if _TIMED_OUT.search(kind + text):
            return "timed_out", text
        if _OUT_OF_MEMORY.search(kind + text) or (_EXITED.search(text) and is_full):
            return "out_of_memory", "the function needed more than its memory"
        if _EXITED.search(text):
            return "failed", text
    return "failed", f"{name}: {text}" if name else text or kind


def _end_of_refusal(error: Any, identity: str) -> InvocationEnd:
    status, message = _status_of(error), f"{error.code}: {error.message}"
    if status == 429:
        after_ms = getattr(error, "retry_after", None)
        retry_after_s = after_ms / 1000 if after_ms else 1.0
        return InvocationEnd(invocation_id=identity, outcome="throttled", error=message, retry_after_s=retry_after_s)
    retry_after_s = 1.0 if status >= 500 else None
    return InvocationEnd(invocation_id=identity, outcome="refused", error=message, retry_after_s=retry_after_s)


def _told(what: str, error: Any, settings: AlibabaSettings) -> BackendError | InvalidRequest:
    code, status, message = str(error.code or ""), _status_of(error), str(error.message or "")
    if status in (401, 403) or "AccessKey" in code or "Signature" in code:
        mend = "check the access key, and that it may use Function Compute and pass on the role"
    elif "image" in message.lower():
        mend = f"the image {settings.image_uri} cannot be used; it must be in region {settings.region}"
    elif "role" in message.lower():
        mend = f"the role {settings.role_arn} cannot be taken on; fc.aliyuncs.com must be trusted in it"
    else:
        return BackendError(f"{what}: {code}: {message}")
    return InvalidRequest(f"{what}: {mend} ({code}: {message})")


def _status_of(error: Any) -> int:
    return int(getattr(error, "status_code", None) or 0)


class _Sdk(msgspec.Struct, frozen=True):
    """The parts of the SDK, loaded late so that this module can be imported without it."""

    models: Any
    error: type[Exception]
    options: Any
    client_class: Any
    config_class: Any

    def client(self, settings: AlibabaSettings) -> Any:
        """A client. Raises InvalidRequest without credentials."""
        key = settings.access_key_id or os.environ.get("ALIBABA_CLOUD_ACCESS_KEY_ID", "")
        secret = settings.access_key_secret or os.environ.get("ALIBABA_CLOUD_ACCESS_KEY_SECRET", "")
        if not key or not secret:
            raise InvalidRequest(
                "functions on Alibaba Cloud: no credentials were found; set ALIBABA_CLOUD_ACCESS_KEY_ID and "
                "ALIBABA_CLOUD_ACCESS_KEY_SECRET"
            )
        scheme, _, host = settings.endpoint.rpartition("://")
        config = self.config_class(
            access_key_id=key,
            access_key_secret=secret,
            region_id=settings.region,
            endpoint=host or None,
            protocol=(scheme or "https").upper(),
        )
        return self.client_class(config)


def _load_sdk() -> _Sdk:
    try:
        from alibabacloud_fc20230330 import models
        from alibabacloud_fc20230330.client import Client
        from alibabacloud_tea_openapi.exceptions import AlibabaCloudException
        from alibabacloud_tea_openapi.utils_models import Config

        options = importlib.import_module("darabonba.runtime").RuntimeOptions
    except ImportError:
        raise InvalidRequest(f"Alibaba Function Compute needs its SDK; {_INSTALL}") from None
    return _Sdk(models, AlibabaCloudException, options, Client, Config)
