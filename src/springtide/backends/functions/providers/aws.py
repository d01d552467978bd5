"""AWS Lambda through boto3, and the emulator through the same calls: create, invoke, tail, delete.

Invocations are synchronous (RequestResponse), one connection each, and are never retried here: boto3's own retries are
off for them, because a second try of a call that broke would be a second function.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from springtide.backends.functions.emulator.config import DEFAULT_HANDLER
from springtide.backends.functions.emulator.launch import EmulatorAddress
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
from springtide.backends.functions.providers.aws_check import Account, examine_account
from springtide.backends.functions.providers.aws_errors import INSTALL, Explained, code_of, sdk_errors
from springtide.core.errors import BackendError, InvalidRequest, InvalidSetting, SettingName
from springtide.core.functions import FunctionService
from springtide.core.wire.functions import MAX_ORDER_BYTES

_READ_MARGIN_S = 30.0
_CONNECT_LIMIT_S = 10.0
_EXAMINE_LIMIT_S = 15.0
_KEEP_ALIVE_S = 60
_READY_LIMIT_S = 120.0
_READY_POLL_S = 0.5
_MAX_UNZIPPED_IN_REQUEST = 50 * 1024 * 1024
_LAMBDA_LIFETIME_S = 900
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_REPORT = re.compile(
    r"REPORT RequestId: (?P<id>\S+)\s+Duration: [\d.]+ ms\s+Billed Duration: (?P<billed>\d+) ms"
    r"\s+Memory Size: (?P<size>\d+) MB\s+Max Memory Used: (?P<used>\d+) MB(?:\s+Init Duration: (?P<init>[\d.]+) ms)?"
)
_TIMED_OUT = re.compile(r"Task timed out after [\d.]+ seconds|Init timed out")
_KILLED = re.compile(r"signal: killed|signal: 9")


class LambdaSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The region, code and role of functions.

    `image_uri` is the container image (`springtide package` writes its recipe) or `zip_path` a zip file with the code;
    `role_arn` is the role that the functions run as: it must allow them to read and write the object store. Without
    access keys boto3 looks where it always does (environment, ~/.aws, the machine's role). `endpoint_url` is for
    services that speak Lambda's API; empty: AWS.
    """

    region: str = ""
    role_arn: str = ""
    image_uri: str = ""
    zip_path: str = ""
    handler: str = DEFAULT_HANDLER
    function_prefix: str = "springtide"
    endpoint_url: str = ""
    access_key_id: str = ""
    secret_access_key: str = ""
    environment: dict[str, str] = {}
    architecture: str = "x86_64"


class LambdaProvider:
    """The provider of AWS Lambda. The constructor raises InvalidRequest for invalid settings."""

    def __init__(self, settings: LambdaSettings, service: FunctionService) -> None:
        check_settings(settings, service)
        self._settings = settings
        self._service = service
        self._environment = dict(settings.environment)
        self._invocations = Invocations(service.concurrency)
        self._deploying = threading.Lock()
        self._errors = sdk_errors()
        # Control calls may be retried; a retried invocation would be another function.
        self._session = _session(settings)
        self._control = self._client("lambda", attempts=4, read_s=60.0, connections=4)
        read_s = service.lifetime_s + service.cold_start_s + _READ_MARGIN_S
        self._data = self._client("lambda", attempts=1, read_s=read_s, connections=service.concurrency)
        self._logs: Any = None

    @property
    def service(self) -> FunctionService:
        return self._service

    def function_name(self, memory_mb: int) -> str:
        return f"{self._settings.function_prefix}-{memory_mb}"

    def deploy(self, memory_mb: Collection[int], environment: Mapping[str, str] | None = None) -> None:
        """Create what is missing, change what differs, and wait until all of it can be invoked.

        Raises InvalidRequest for what can be mended from here (credentials, role, image), BackendError otherwise.
        """
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
        name = self.function_name(memory_mb)
        return self._invocations.start(lambda identity: self._call(name, payload, identity), on_end)

    def tail(self, since_s: float, limit: int = 1000) -> Sequence[LogLine]:
        """Functions' output from CloudWatch Logs. Functions that never ran have no log. Raises BackendError."""
        lines: list[LogLine] = []
        if self._logs is None:
            self._logs = self._client("logs", attempts=4, read_s=60.0, connections=2)
        with self._explained("the functions' logs cannot be read"):
            for name in self._deployed_names():
                asked = {"logGroupName": f"/aws/lambda/{name}", "startTime": round(since_s * 1000), "limit": limit}
                try:
                    events = self._logs.filter_log_events(**asked)["events"]
                except self._errors.client as error:
                    if code_of(error) == "ResourceNotFoundException":
                        continue
                    raise
                lines += [
                    LogLine(
                        at_s=event["timestamp"] / 1000, stream=event["logStreamName"], text=event["message"].rstrip()
                    )
                    for event in events
                ]
        return sorted(lines, key=lambda line: line.at_s)[-limit:]

    def remove(self) -> None:
        """Delete all functions of the prefix. Raises BackendError."""
        with self._explained("the functions cannot be deleted"):
            for name in self._deployed_names():
                try:
                    self._control.delete_function(FunctionName=name)
                except self._errors.client as error:
                    if code_of(error) != "ResourceNotFoundException":
                        raise

    def examine(self) -> list[AccountFinding]:
        """Check what would keep a first function from running with these settings, without creating anything."""
        clients: dict[str, Any] = {}

        def client_of(kind: str) -> Any:
            if kind not in clients:
                clients[kind] = self._client(kind, attempts=1, read_s=_EXAMINE_LIMIT_S, connections=1)
            return clients[kind]

        account = Account(
            region=self._settings.region,
            role_arn=self._settings.role_arn,
            image_uri=self._settings.image_uri,
            prefix=self._settings.function_prefix,
            concurrency=self._service.concurrency,
            client_of=client_of,
            errors=self._errors,
        )
        try:
            return examine_account(account)
        finally:
            for client in clients.values():
                client.close()

    def close(self) -> None:
        """Drop connections; functions run on."""
        self._invocations.close()
        for client in (self._control, self._data, self._logs):
            if client is not None:
                client.close()

    def _deployed_names(self) -> list[str]:
        name = re.compile(re.escape(self._settings.function_prefix) + r"-\d+")
        pages = self._control.get_paginator("list_functions").paginate()
        found = [one["FunctionName"] for page in pages for one in page["Functions"]]
        return sorted(one for one in found if name.fullmatch(one))

    def _deploy_one(self, memory_mb: int) -> None:
        name = self.function_name(memory_mb)
        wanted = {
            "MemorySize": memory_mb,
            "Timeout": min(round(self._service.lifetime_s), _LAMBDA_LIFETIME_S),
            "Environment": {"Variables": self._environment},
        }
        try:
            found = self._control.get_function(FunctionName=name)
        except self._errors.client as error:
            if code_of(error) != "ResourceNotFoundException":
                raise
            self._create(name, wanted)
        else:
            self._update(name, wanted, found)
        self._wait_until_ready(name)

    def _create(self, name: str, wanted: dict[str, Any]) -> None:
        settings = self._settings
        if settings.image_uri:
            code = {
                "PackageType": "Image",
                "Code": {"ImageUri": settings.image_uri},
                "ImageConfig": {"Command": [settings.handler]},
            }
        else:
            data = Path(settings.zip_path).read_bytes()
            code = {
                "PackageType": "Zip",
                "Code": {"ZipFile": data},
                "Handler": settings.handler,
                "Runtime": "python3.11",
            }
        try:
            self._control.create_function(
                FunctionName=name,
                Role=settings.role_arn,
                Architectures=[settings.architecture],
                **code,
                **wanted,
            )
        except self._errors.client as error:
            # Another process, or an earlier try whose answer was lost, has created it.
            if code_of(error) != "ResourceConflictException":
                raise

    def _update(self, name: str, wanted: dict[str, Any], found: dict[str, Any]) -> None:
        has = found["Configuration"]
        if self._is_other_code(found):
            self._wait_until_ready(name)
            if self._settings.image_uri:
                self._control.update_function_code(FunctionName=name, ImageUri=self._settings.image_uri)
            else:
                data = Path(self._settings.zip_path).read_bytes()
                self._control.update_function_code(FunctionName=name, ZipFile=data)
        variables = (has.get("Environment") or {}).get("Variables") or {}
        now = {"MemorySize": has["MemorySize"], "Timeout": has["Timeout"], "Environment": {"Variables": variables}}
        if now != wanted:
            self._wait_until_ready(name)
            self._control.update_function_configuration(FunctionName=name, **wanted)

    def _is_other_code(self, found: dict[str, Any]) -> bool:
        if self._settings.image_uri:
            return bool(found["Code"].get("ImageUri") != self._settings.image_uri)
        digest = hashlib.sha256(Path(self._settings.zip_path).read_bytes())
        # AWS gives the digest in base64, others in hexadecimal.
        return found["Configuration"].get("CodeSha256") not in (
            base64.b64encode(digest.digest()).decode(),
            digest.hexdigest(),
        )

    def _wait_until_ready(self, name: str) -> None:
        deadline_s = time.monotonic() + _READY_LIMIT_S
        while True:
            found = self._control.get_function_configuration(FunctionName=name)
            state, update = found.get("State", "Active"), found.get("LastUpdateStatus", "Successful")
            if "Failed" in (state, update):
                reason = found.get("StateReason") or found.get("LastUpdateStatusReason") or "no reason given"
                raise InvalidRequest(f"the function {name} cannot be made ready: {reason}")
            # An inactive function becomes active with its next invocation.
            if state in ("Active", "Inactive") and update == "Successful":
                return
            if time.monotonic() > deadline_s:
                raise BackendError(f"the function {name} is still {state} after {_READY_LIMIT_S:.0f} s")
            time.sleep(_READY_POLL_S)

    def _call(self, name: str, payload: bytes, identity: str) -> InvocationEnd:
        """One blocking invocation, and what its answer means."""
        errors = self._errors
        try:
            response = self._data.invoke(
                FunctionName=name, InvocationType="RequestResponse", LogType="Tail", Payload=payload
            )
            returned = response["Payload"].read()
        except errors.client as error:
            return _end_of_refusal(error, identity)
        except errors.never_sent as error:
            text = f"Lambda cannot be reached: {one_line(error)}"
            return InvocationEnd(invocation_id=identity, outcome="refused", error=text, retry_after_s=1.0)
        except errors.any as error:
            text = f"the connection to Lambda broke while the function ran: {one_line(error)}"
            return InvocationEnd(invocation_id=identity, outcome="lost", error=text, duration_s=None)
        log = base64.b64decode(response.get("LogResult", "")).decode(errors="replace")
        return end_of_answer(identity, response.get("FunctionError", ""), returned, log)

    def _client(self, kind: str, *, attempts: int, read_s: float, connections: int) -> Any:
        """A client of one service. Raises InvalidRequest for an invalid region or endpoint."""
        from botocore.config import Config

        settings = self._settings
        config = Config(
            retries={"total_max_attempts": attempts, "mode": "standard"},
            connect_timeout=_CONNECT_LIMIT_S,
            read_timeout=read_s,
            max_pool_connections=max(10, connections),
            # A connection is idle for as long as its function runs; keepalive keeps routers from dropping it.
            tcp_keepalive=True,
            # Addresses of this machine are not reached through a proxy.
            proxies={} if urlsplit(settings.endpoint_url).hostname in _LOOPBACK else None,
        )
        keys = {
            "aws_access_key_id": settings.access_key_id or None,
            "aws_secret_access_key": settings.secret_access_key or None,
        }
        unusable: tuple[type[Exception], ...] = (*self._errors.any, ValueError)
        try:
            client = self._session.client(kind, endpoint_url=settings.endpoint_url or None, config=config, **keys)
        except unusable as error:
            raise InvalidRequest(f"functions on AWS cannot be used as set: {one_line(error)}") from error
        _keep_alive_early(client)
        return client

    def _explained(self, what: str) -> contextlib.AbstractContextManager[None]:
        return Explained(what, self._settings, self._errors)


def emulator_provider(
    address: EmulatorAddress,
    service: FunctionService,
    environment: Mapping[str, str] | None = None,
    handler: str = DEFAULT_HANDLER,
    function_prefix: str = "springtide",
) -> LambdaProvider:
    """The provider of the emulator at that address; its token is the access key."""
    settings = LambdaSettings(
        region="us-east-1",
        role_arn="arn:aws:iam::000000000000:role/emulator",
        image_uri="springtide-emulator:installed",
        endpoint_url=address.endpoint,
        access_key_id=address.token,
        secret_access_key=address.token,
        environment=dict(environment or {}),
        handler=handler,
        function_prefix=function_prefix,
    )
    return LambdaProvider(settings, service)


def check_settings(settings: LambdaSettings, service: FunctionService) -> None:
    """Raise InvalidRequest for settings with which no function can be created, before any call to AWS."""
    if not settings.region:
        region = SettingName("functions.region")
        raise InvalidSetting("functions on AWS need a region: ", region, " eu-central-1, for example")
    if not re.fullmatch(r"arn:aws[\w-]*:iam::\d{12}:role/[\w+=,.@/-]+", settings.role_arn):
        raise InvalidSetting(
            f"functions on AWS need a role, arn:aws:iam::ACCOUNT:role/NAME, not {settings.role_arn!r}; give ",
            SettingName("functions.role"),
            " one that Lambda may assume and that may use the object store",
        )
    if bool(settings.image_uri) == bool(settings.zip_path):
        raise InvalidSetting(
            "functions on AWS need an image, ",
            SettingName("functions.image"),
            " ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME:TAG: `springtide package` writes its recipe (or a zip file, "
            "for code that fits one)",
        )
    if settings.zip_path:
        path = Path(settings.zip_path)
        if not path.is_file():
            raise InvalidRequest(f"there is no zip file {settings.zip_path}")
        if path.stat().st_size > _MAX_UNZIPPED_IN_REQUEST:
            raise InvalidRequest(f"{settings.zip_path} is above the 50 MB that Lambda takes directly; use an image")
    check_prefix(settings.function_prefix)
    if service.lifetime_s > _LAMBDA_LIFETIME_S:
        raise InvalidRequest(f"a Lambda function lives for {_LAMBDA_LIFETIME_S} s at most, not {service.lifetime_s:g}")


def end_of_answer(identity: str, function_error: str, returned: bytes, log: str) -> InvocationEnd:
    """What Lambda's answer to an invocation means: its error header, payload, and the REPORT line of its log."""
    report = _REPORT.search(log)
    billed_s = int(report["billed"]) / 1000 if report else None
    used_mb = int(report["used"]) if report else 0
    outcome: Outcome = "returned"
    error = ""
    if function_error:
        outcome, error = _failure(returned, log, report)
    return InvocationEnd(
        invocation_id=identity,
        outcome=outcome,
        payload=b"" if function_error else returned,
        error=error,
        log=log,
        duration_s=billed_s,
        max_memory_mb=used_mb,
        init_s=float(report["init"]) / 1000 if report and report["init"] else 0.0,
    )


def _failure(returned: bytes, log: str, report: re.Match[str] | None) -> tuple[Outcome, str]:
    try:
        said = json.loads(returned)
    except ValueError:
        said = {}
    message = str(said.get("errorMessage", "")) if isinstance(said, dict) else ""
    kind = str(said.get("errorType", "")) if isinstance(said, dict) else ""
    if _TIMED_OUT.search(message):
        return "timed_out", message
    is_full = report is not None and int(report["used"]) >= int(report["size"])
    if "Runtime.OutOfMemory" in (kind + log) or (_KILLED.search(message) and is_full):
        size = f" of {report['size']} MB" if report else ""
        return "out_of_memory", f"the function needed more than its memory{size}"
    if _KILLED.search(message):
        return "killed", "the function's process was killed"
    return "failed", f"{kind}: {message}" if kind and message else message or kind or "the function failed"


def _end_of_refusal(error: Any, identity: str) -> InvocationEnd:
    """Lambda answered with an error of its own: nothing ran, unless it failed on its side after the start."""
    code, status = code_of(error), int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    message = f"{code}: {error.response.get('Error', {}).get('Message', '')}"
    if status == 429 or code in ("TooManyRequestsException", "ThrottlingException", "EC2ThrottledException"):
        headers = error.response["ResponseMetadata"].get("HTTPHeaders", {})
        after = str(headers.get("retry-after", ""))
        return InvocationEnd(
            invocation_id=identity,
            outcome="throttled",
            error=message,
            retry_after_s=float(after) if after.isdigit() else 1.0,
        )
    retry_after_s = 1.0 if status >= 500 or code == "ResourceConflictException" else None
    return InvocationEnd(invocation_id=identity, outcome="refused", error=message, retry_after_s=retry_after_s)


def _keep_alive_early(client: Any) -> None:
    """Ask after silent connections every minute: the kernel's two hours are longer than a NAT gateway's 350 s.

    The SDK has a switch for keep-alive and none for its times; new connections read this list of its.
    """
    options = getattr(client._endpoint.http_session, "_socket_options", None)
    if isinstance(options, list) and hasattr(socket, "TCP_KEEPIDLE"):
        options += [
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEP_ALIVE_S),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEP_ALIVE_S),
        ]


def _session(settings: LambdaSettings) -> Any:
    """The session that creates clients; it reads the services' descriptions once.

    Raises InvalidRequest without boto3, and where AWS_PROFILE names a profile that is not there.
    """
    try:
        import boto3
        from botocore.exceptions import BotoCoreError
    except ImportError:
        raise InvalidRequest(f"AWS Lambda needs boto3; {INSTALL}") from None
    try:
        return boto3.session.Session(region_name=settings.region)
    except BotoCoreError as error:
        raise InvalidRequest(f"functions on AWS cannot be used as set: {one_line(error)}") from error
