"""The provider's side of the emulator: the part of the Lambda API that boto3 calls here, and its log.

Requests need the token: it is the access key of their signature.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import io
import json
import re
import uuid
import zipfile
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from springtide.backends.functions.emulator.fleet import Fleet, Lost, Throttled
from springtide.backends.functions.emulator.instances import Function
from springtide.backends.functions.emulator.logs import LogIndex
from springtide.core.errors import BackendError

_V1 = "/2015-03-31/functions"
_MAX_PAYLOAD_BYTES = 6 * 1024 * 1024
_MAX_EVENT_BYTES = 1024 * 1024
_MAX_CREATE_BYTES = 70 * 1024 * 1024
_MAX_UNZIPPED_BYTES = 250 * 1024 * 1024
_MAX_LOG_EVENTS = 1000
_NAME = re.compile(r"(?:arn:aws:lambda:[\w-]*:\d*:function:)?([A-Za-z0-9_-]{1,64})(?::\$LATEST)?")
_CREDENTIAL = re.compile(r"Credential=([^/,\s]+)/")
Handler = Callable[[Request], Awaitable[Response]]


class LambdaApiError(Exception):
    """An error as the service answers it: status, type, message."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


class LambdaApi:
    """The routes. `state_dir` holds the unpacked code of functions that were made from a zip file."""

    def __init__(self, fleet: Fleet, logs: LogIndex, token: str, state_dir: Path) -> None:
        self._fleet = fleet
        self._log_index = logs
        self._token = token
        self._state_dir = state_dir
        one = _V1 + "/{name}"
        table: list[tuple[str, str, Handler]] = [
            (_V1, "POST", self._create),
            (_V1, "GET", self._list),
            (_V1 + "/", "GET", self._list),
            (one, "GET", self._get),
            (one, "DELETE", self._delete),
            (one + "/configuration", "GET", self._get_configuration),
            (one + "/configuration", "PUT", self._update_configuration),
            (one + "/code", "PUT", self._update_code),
            (one + "/invocations", "POST", self._invoke),
            ("/", "POST", self._logs),
        ]
        self.routes = [Route(path, self._guarded(handler), methods=[method]) for path, method, handler in table]

    def app(self) -> Starlette:
        return Starlette(routes=self.routes)

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(request: Request) -> Response:
            try:
                self._check(request)
                return await handler(request)
            except LambdaApiError as error:
                return _error(error)

        return guarded

    def _check(self, request: Request) -> None:
        found = _CREDENTIAL.search(request.headers.get("authorization", ""))
        if found is None:
            raise LambdaApiError(403, "MissingAuthenticationTokenException", "Missing Authentication Token")
        if not hmac.compare_digest(found.group(1).encode(), self._token.encode()):
            message = "The security token included in the request is invalid."
            raise LambdaApiError(403, "UnrecognizedClientException", message)

    async def _create(self, request: Request) -> Response:
        body = await _body_of(request, _MAX_CREATE_BYTES)
        name = _name_of(str(body.get("FunctionName", "")))
        if name in self._fleet.functions:
            raise LambdaApiError(409, "ResourceConflictException", f"Function already exist: {name}")
        if not str(body.get("Role", "")).startswith("arn:aws:iam::"):
            raise LambdaApiError(
                400, "InvalidParameterValueException", "The role defined for the function cannot be assumed"
            )
        code_dir, sha256, image_uri = self._place_code(name, body.get("Code") or {})
        command = (body.get("ImageConfig") or {}).get("Command") or []
        handler = command[0] if image_uri and command else body.get("Handler") or self._fleet.config.handler
        function = Function(
            name=name,
            memory_mb=_within(body.get("MemorySize", 128), 128, 10240, "MemorySize"),
            timeout_s=_within(body.get("Timeout", 3), 1, 900, "Timeout"),
            handler=str(handler),
            environment=_environment_of(body),
            role=str(body["Role"]),
            image_uri=image_uri,
            code_dir=code_dir,
            code_sha256=sha256,
            modified_at=_now(),
            revision=str(uuid.uuid4()),
        )
        self._fleet.functions[name] = function
        return _json(_described(function), 201)

    def _place_code(self, name: str, code: dict[str, Any]) -> tuple[str, str, str]:
        """Where the code lies, its digest, and the image's address (an image is the emulator's own installation)."""
        if code.get("ImageUri"):
            uri = str(code["ImageUri"])
            return "", hashlib.sha256(uri.encode()).hexdigest(), uri
        try:
            data = base64.b64decode(code["ZipFile"], validate=True)
        except (KeyError, ValueError, TypeError):
            message = "Code is given as ZipFile or ImageUri here"
            raise LambdaApiError(400, "InvalidParameterValueException", message) from None
        digest = hashlib.sha256(data).hexdigest()
        directory = self._state_dir / "code" / f"{name}-{digest[:16]}"
        _unpack(data, directory)
        return str(directory), digest, ""

    async def _list(self, request: Request) -> Response:
        return _json({"Functions": [_described(function) for function in self._fleet.functions.values()]})

    async def _get(self, request: Request) -> Response:
        function = self._named(request)
        where = {"ImageUri": function.image_uri} if function.image_uri else {"Location": function.code_dir}
        return _json({"Configuration": _described(function), "Code": where})

    async def _get_configuration(self, request: Request) -> Response:
        return _json(_described(self._named(request)))

    async def _delete(self, request: Request) -> Response:
        function = self._named(request)
        del self._fleet.functions[function.name]
        self._fleet.retire(function.name)
        return Response(status_code=204)

    async def _update_configuration(self, request: Request) -> Response:
        function = self._named(request)
        body = await _body_of(request, _MAX_EVENT_BYTES)
        memory_mb = _within(body.get("MemorySize", function.memory_mb), 128, 10240, "MemorySize")
        timeout_s = _within(body.get("Timeout", function.timeout_s), 1, 900, "Timeout")
        environment = _environment_of(body) if body.get("Environment") is not None else function.environment
        command = (body.get("ImageConfig") or {}).get("Command") or []
        handler = str(command[0] if command else body.get("Handler") or function.handler)
        return self._replace(
            function, memory_mb=memory_mb, timeout_s=timeout_s, environment=environment, handler=handler
        )

    async def _update_code(self, request: Request) -> Response:
        function = self._named(request)
        code_dir, sha256, image_uri = self._place_code(function.name, await _body_of(request, _MAX_CREATE_BYTES))
        return self._replace(function, code_dir=code_dir, code_sha256=sha256, image_uri=image_uri)

    def _replace(self, function: Function, **changes: Any) -> Response:
        changed = msgspec.structs.replace(function, **changes, modified_at=_now(), revision=str(uuid.uuid4()))
        self._fleet.functions[function.name] = changed
        self._fleet.retire(function.name)
        return _json(_described(changed))

    async def _invoke(self, request: Request) -> Response:
        function = self._named(request)
        kind = request.headers.get("x-amz-invocation-type", "RequestResponse")
        payload = await _bytes_of(request, _MAX_EVENT_BYTES if kind == "Event" else _MAX_PAYLOAD_BYTES)
        try:
            json.loads(payload or b"null")
        except ValueError:
            message = "Could not parse request body into json"
            raise LambdaApiError(400, "InvalidRequestContentException", message) from None
        invocation_id = str(uuid.uuid4())
        headers = {"X-Amzn-RequestId": invocation_id, "X-Amz-Executed-Version": "$LATEST"}
        if kind == "DryRun":
            return Response(status_code=204, headers=headers)
        if kind == "Event":
            self._fleet.invoke_later(function, payload, invocation_id)
            return Response(status_code=202, headers=headers)
        try:
            answer = await self._fleet.invoke(function, payload or b"null", invocation_id)
        except Throttled:
            raise LambdaApiError(429, "TooManyRequestsException", "Rate Exceeded.") from None
        except Lost:
            return BrokenResponse()
        except BackendError as error:
            raise LambdaApiError(500, "ServiceException", str(error)) from error
        if answer.function_error:
            headers["X-Amz-Function-Error"] = answer.function_error
        if request.headers.get("x-amz-log-type") == "Tail":
            headers["X-Amz-Log-Result"] = base64.b64encode(answer.log).decode()
        return Response(answer.payload, headers=headers, media_type="application/json")

    async def _logs(self, request: Request) -> Response:
        if request.headers.get("x-amz-target") != "Logs_20140328.FilterLogEvents":
            raise LambdaApiError(400, "InvalidAction", "of the log service there is FilterLogEvents here")
        body = await _body_of(request, _MAX_EVENT_BYTES)
        group = str(body.get("logGroupName", ""))
        if group.rpartition("/")[2] not in self._fleet.functions:
            raise LambdaApiError(400, "ResourceNotFoundException", "The specified log group does not exist.")
        limit = _within(body.get("limit", _MAX_LOG_EVENTS), 1, 10_000, "limit")
        after = str(body.get("nextToken") or 0)
        events = self._log_index.read(group, int(body.get("startTime", 0)), int(after) if after.isdigit() else 0, limit)
        found = [
            {
                "logStreamName": event.stream,
                "timestamp": event.at_ms,
                "ingestionTime": event.at_ms,
                "message": event.text,
                "eventId": str(event.number),
            }
            for event in events
        ]
        following = {"nextToken": str(events[-1].number)} if len(events) == limit else {}
        return _json({"events": found, "searchedLogStreams": [], **following})

    def _named(self, request: Request) -> Function:
        name = _name_of(request.path_params["name"])
        function = self._fleet.functions.get(name)
        if function is None:
            raise LambdaApiError(404, "ResourceNotFoundException", f"Function not found: {name}")
        return function


class BrokenResponse(Response):
    """Begins an answer and never ends it: the server closes the connection, as a network would that lost it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the head of a response with a body, and no body."""
        headers = [(b"content-length", b"64"), (b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})


def _error(error: LambdaApiError) -> Response:
    body = {"Type": "User" if error.status < 500 else "Service", "message": str(error), "Message": str(error)}
    headers = {"x-amzn-ErrorType": error.kind, "x-amzn-RequestId": str(uuid.uuid4())}
    if error.status == 429:
        body["Reason"] = "ConcurrentInvocationLimitExceeded"
        headers["Retry-After"] = "1"
    return Response(json.dumps({"__type": error.kind, **body}), error.status, headers, "application/json")


def _json(body: dict[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(body), status, media_type="application/json")


async def _bytes_of(request: Request, limit: int) -> bytes:
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > limit:
            message = f"{limit} byte payload is the limit of this call"
            raise LambdaApiError(413, "RequestEntityTooLargeException", message)
    return bytes(data)


async def _body_of(request: Request, limit: int) -> dict[str, Any]:
    try:
        body = json.loads(await _bytes_of(request, limit) or b"{}")
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise LambdaApiError(400, "InvalidRequestContentException", "Could not parse request body into json")
    return body


def _name_of(text: str) -> str:
    found = _NAME.fullmatch(text)
    if found is None:
        raise LambdaApiError(400, "InvalidParameterValueException", f"{text[:80]!r} is no function name")
    return found.group(1)


def _within(value: Any, low: int, high: int, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise LambdaApiError(400, "ValidationException", f"'{what}' is a number from {low} to {high}, not {value!r}")
    return int(value)


def _environment_of(body: dict[str, Any]) -> dict[str, str]:
    variables = (body.get("Environment") or {}).get("Variables") or {}
    if not isinstance(variables, dict) or not all(isinstance(value, str) for value in variables.values()):
        raise LambdaApiError(400, "ValidationException", "'Environment' holds strings")
    if sum(len(name) + len(value) for name, value in variables.items()) > 4096:
        message = "Lambda was unable to configure your environment variables because they exceed the 4KB limit"
        raise LambdaApiError(400, "InvalidParameterValueException", message)
    return {str(name): value for name, value in variables.items()}


def _unpack(data: bytes, directory: Path) -> None:
    """Unpack into a directory that nothing else writes to. Nothing lands outside it. Raises ApiError."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
            if sum(member.file_size for member in members) > _MAX_UNZIPPED_BYTES:
                message = f"Unzipped size must be smaller than {_MAX_UNZIPPED_BYTES} bytes"
                raise LambdaApiError(400, "InvalidParameterValueException", message)
            for member in members:
                path = PurePosixPath(member.filename)
                if path.is_absolute() or ".." in path.parts or "\\" in member.filename:
                    message = f"{member.filename[:80]!r} in the zip file lies outside of it"
                    raise LambdaApiError(400, "InvalidParameterValueException", message)
            directory.mkdir(parents=True, exist_ok=True)
            archive.extractall(directory)
    except (zipfile.BadZipFile, NotImplementedError, OSError) as error:
        message = f"Could not unzip uploaded file: {error}"
        raise LambdaApiError(400, "InvalidParameterValueException", message) from error


def _described(function: Function) -> dict[str, Any]:
    return {
        "FunctionName": function.name,
        "FunctionArn": f"arn:aws:lambda:us-east-1:000000000000:function:{function.name}",
        "Role": function.role,
        "Handler": function.handler,
        "MemorySize": function.memory_mb,
        "Timeout": int(function.timeout_s),
        "PackageType": "Image" if function.image_uri else "Zip",
        "Environment": {"Variables": function.environment},
        "CodeSha256": function.code_sha256,
        "LastModified": function.modified_at,
        "RevisionId": function.revision,
        "Version": "$LATEST",
        "State": "Active",
        "LastUpdateStatus": "Successful",
    }


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.000+0000")
