"""The typed client of the control API: answers are structs of core.status, refusals are errors of core.errors."""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self, TypeVar
from urllib.parse import quote, urlsplit

import httpx2
import msgspec

from springtide.core.errors import (
    BackendError,
    CapacityError,
    Conflict,
    InvalidRequest,
    NotFound,
    SpringtideError,
    Unauthorized,
)
from springtide.core.status.export import LiveState
from springtide.core.status.platform import (
    Explanation,
    HistoryEntry,
    JobStatus,
    PlatformStatus,
    ProgressSeries,
    ServiceStatus,
    Timeline,
)
from springtide.core.status.pods import ClusterStatus
from springtide.core.status.pools import PoolsReport
from springtide.core.status.quote import Quote
from springtide.core.status.shares import SharingStatus

REQUEST_TIMEOUT_S = 30.0
# A quote asks the policy many times, and waits for earlier quotes.
QUOTE_TIMEOUT_S = 120.0
CONNECT_TIMEOUT_S = 5.0
INFER_TIMEOUT_S = 120.0
# Longer than the platform ever leaves a stream without a sign of life.
STREAM_SILENCE_S = 60.0
MAX_LINE_BYTES = 64 * 1024 * 1024
NOT_RUNNING = "no platform is running; start one with `springtide up`"
_ERRORS: Mapping[int, type[InvalidRequest]] = {401: Unauthorized, 404: NotFound, 409: Conflict}
# The code with which the control API says that the platform itself did not do what it was asked.
_UNAVAILABLE = "unavailable"
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})

AnswerT = TypeVar("AnswerT")


class SourceLike(Protocol):
    """One Python file and what to take from it, as client.source reads it."""

    @property
    def filename(self) -> str:
        """The bare name of the file."""
        ...

    @property
    def text(self) -> str:
        """Its whole content."""
        ...

    @property
    def object_name(self) -> str:
        """The function or class; empty for a script."""
        ...

    @property
    def kind(self) -> Literal["function", "class", "script"]:
        """What it is."""
        ...

    @property
    def args(self) -> tuple[str, ...]:
        """The command line of a script."""
        ...

    @property
    def import_root(self) -> str:
        """The folder to import the file's neighbours from; empty for none."""
        ...

    @property
    def files(self) -> Mapping[str, str]:
        """Further files beside it, by name."""
        ...


class _Address(msgspec.Struct):
    url: str


class _ProblemDetail(msgspec.Struct):
    message: str
    code: str = ""


class _Problem(msgspec.Struct):
    error: _ProblemDetail


class Client:
    """A connection to one platform. Use it in a `with` block, or call `close`; not from several threads at once.

    Every call raises BackendError where the platform does not answer; moments are seconds on the platform's clock.
    """

    def __init__(
        self, url: str, token: str, *, state_dir: str = "", transport: httpx2.BaseTransport | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self.state_dir = state_dir
        self._http = httpx2.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=httpx2.Timeout(REQUEST_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            # A proxy of the environment must not stand between this machine and itself, nor see the token.
            trust_env=False,
            transport=transport,
        )

    def __enter__(self) -> Self:
        """Return the client itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connection."""
        self.close()

    def close(self) -> None:
        """Let go of every socket. The client cannot be used afterwards."""
        self._http.close()

    # --- the platform -----------------------------------------------------------------------------------------------

    def status(self) -> PlatformStatus:
        """Jobs, services, nodes and devices at this instant."""
        return self._ask("GET", "/v1/status", PlatformStatus)

    def stream(self, after_seq: int = -1) -> Iterator[PlatformStatus]:
        """Yield the status at once and after every change, until the platform ends; `after_seq`: the last known."""
        with self._open("/v1/stream", {"after_seq": after_seq}) as response, _transport_errors():
            for event in _events(response):
                yield _decode(event, PlatformStatus)

    def series(self, job_id: str) -> ProgressSeries:
        """Loss, speed and workers of a job over time, the oldest point first. Raises NotFound."""
        return self._ask("GET", f"/v1/jobs/{_part(job_id)}/series", ProgressSeries)

    def timeline(self, since_s: float = 0.0) -> Timeline:
        """Which workload held which device since `since_s`, seconds on the platform's clock, and what happened."""
        return self._ask("GET", "/v1/timeline", Timeline, params={"since_s": since_s})

    def pools(self, past_days: int = 1) -> PoolsReport:
        """Pools, loans, reclaims, and what services needed over the last `past_days` with the forecast."""
        return self._ask("GET", "/v1/pools", PoolsReport, params={"past_days": past_days})

    def sharing(self) -> SharingStatus:
        """The sharers of each device, the fraction of it that each is granted, and what enforces it."""
        return self._ask("GET", "/v1/sharing", SharingStatus)

    def cluster(self) -> ClusterStatus:
        """How the platform stands with its cluster, and the pods of all replicas. Raises NotFound: it has none."""
        return self._ask("GET", "/v1/cluster", ClusterStatus)

    def export(self) -> LiveState:
        """What the platform's policy is shown now, for playing it forward here."""
        return self._ask("GET", "/v1/export", LiveState)

    def shutdown(self, *, stop_workers: bool = True) -> None:
        """Ask the platform to end; with `stop_workers` False its workers go on training until it is back."""
        self._ask("POST", "/v1/shutdown", dict[str, bool], body={"stop_workers": stop_workers})

    # --- jobs -------------------------------------------------------------------------------------------------------

    def jobs(self) -> list[JobStatus]:
        """Every job, in order of arrival."""
        return self._ask("GET", "/v1/jobs", list[JobStatus])

    def job(self, job_id: str) -> JobStatus:
        """One job, by id or unique name. Raises NotFound, Conflict."""
        return self._ask("GET", f"/v1/jobs/{_part(job_id)}", JobStatus)

    def submit_job(
        self,
        name: str,
        source: SourceLike,
        options: Mapping[str, Any] | None = None,
        *,
        idempotency_key: str | None = None,
    ) -> JobStatus:
        """Submit a training job; `options` are those of POST /v1/jobs. Returns once it is durable.

        A lost connection is tried once more under the same key, so the job is never taken in twice.
        Raises InvalidRequest, Conflict, BackendError.
        """
        body = {"name": name, "source": _source(source), "options": dict(options or {})}
        headers = {"Idempotency-Key": idempotency_key or secrets.token_hex(16)}
        try:
            return self._ask("POST", "/v1/jobs", JobStatus, body=body, headers=headers)
        except _ConnectionLost:
            return self._ask("POST", "/v1/jobs", JobStatus, body=body, headers=headers)

    def quote(self, name: str, source: SourceLike, options: Mapping[str, Any] | None = None) -> Quote:
        """Say what `submit_job` with the same arguments would meet now; nothing is changed. Raises InvalidRequest."""
        body = {"name": name, "source": _source(source), "options": dict(options or {})}
        return self._ask("POST", "/v1/quote", Quote, body=body, timeout_s=QUOTE_TIMEOUT_S)

    def cancel(self, job_id: str) -> JobStatus:
        """End a job; its last checkpoint stays. Raises NotFound, Conflict."""
        return self._ask("POST", f"/v1/jobs/{_part(job_id)}/cancel", JobStatus)

    def change(self, job_id: str, wish: Mapping[str, Any]) -> JobStatus:
        """Change what a job is to keep: the body of PATCH /v1/jobs/{id}. Raises NotFound, Conflict, InvalidRequest."""
        return self._ask("PATCH", f"/v1/jobs/{_part(job_id)}", JobStatus, body=dict(wish))

    def pause(self, job_id: str) -> JobStatus:
        """Have a job checkpoint and give its devices back. Raises NotFound, Conflict."""
        return self._ask("POST", f"/v1/jobs/{_part(job_id)}/pause", JobStatus)

    def resume(self, job_id: str, budget_usd: float | None = None) -> JobStatus:
        """Let a paused job go on, with another budget if one is named. Raises NotFound, Conflict, InvalidRequest."""
        body = None if budget_usd is None else {"budget_usd": budget_usd}
        return self._ask("POST", f"/v1/jobs/{_part(job_id)}/resume", JobStatus, body=body)

    # --- services ---------------------------------------------------------------------------------------------------

    def services(self) -> list[ServiceStatus]:
        """Every service, in order of arrival."""
        return self._ask("GET", "/v1/services", list[ServiceStatus])

    def service(self, name: str) -> ServiceStatus:
        """One service. Raises NotFound."""
        return self._ask("GET", f"/v1/services/{_part(name)}", ServiceStatus)

    def deploy_service(self, name: str, source: SourceLike, options: Mapping[str, Any] | None = None) -> ServiceStatus:
        """Deploy a service or a new revision of it; `options` are those of PUT /v1/services. Raises InvalidRequest."""
        body = {"source": _source(source), "options": dict(options or {})}
        return self._ask("PUT", f"/v1/services/{_part(name)}", ServiceStatus, body=body)

    def remove_service(self, name: str) -> ServiceStatus:
        """Drain a service and take it away. Raises NotFound."""
        return self._ask("DELETE", f"/v1/services/{_part(name)}", ServiceStatus)

    def infer(
        self, service_name: str, payload: Any = None, /, *, timeout_s: float = INFER_TIMEOUT_S, **inputs: Any
    ) -> Any:
        """Call `predict` of a service and return its outputs. The arguments are `payload`, an object, or keywords.

        Raises InvalidRequest (they do not fit), NotFound, CapacityError (too busy), BackendError.
        """
        if payload is not None and inputs:
            raise InvalidRequest("give the arguments of predict as one object or as keywords, not both")
        body = payload if payload is not None else inputs
        answer = self._ask("POST", f"/f/{_part(service_name)}", dict[str, Any], body=body, timeout_s=timeout_s)
        return answer["outputs"] if set(answer) == {"outputs"} else answer

    # --- jobs and services alike ------------------------------------------------------------------------------------

    def scale(self, workload_id: str, minimum: int, maximum: int) -> JobStatus | ServiceStatus:
        """Set new bounds on workers or replicas. Raises NotFound, Conflict, InvalidRequest."""
        body = {"minimum": minimum, "maximum": maximum}
        answer = self._ask("POST", f"/v1/workloads/{_part(workload_id)}/scale", msgspec.Raw, body=body)
        if "job_id" in _decode(answer, dict[str, Any]):
            return _decode(answer, JobStatus)
        return _decode(answer, ServiceStatus)

    def why(self, workload_id: str) -> Explanation:
        """Why a workload is where it is, and what could be done. Raises NotFound."""
        return self._ask("GET", f"/v1/workloads/{_part(workload_id)}/why", Explanation)

    def history(self, workload_id: str) -> list[HistoryEntry]:
        """The newest lines of a workload's story, oldest first. Raises NotFound."""
        return self._ask("GET", f"/v1/workloads/{_part(workload_id)}/history", list[HistoryEntry])

    def logs(
        self, workload_id: str, *, replica: str | None = None, tail: int = 200, follow: bool = False
    ) -> Iterator[str]:
        """Yield the newest `tail` lines, then with `follow` what comes until the workload has ended.

        Raises NotFound, InvalidRequest.
        """
        params = {"replica": replica or "", "tail": tail, "follow": str(follow).lower()}
        path = f"/v1/workloads/{_part(workload_id)}/logs"
        with self._open(path, params, is_endless=follow) as response, _transport_errors():
            for line in _lines(response):
                yield line.decode("utf-8", "replace")

    # --- what other modules of the client ask -----------------------------------------------------------------------

    def ask(
        self,
        method: str,
        path: str,
        answer_type: type[AnswerT],
        *,
        body: Any = None,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> AnswerT:
        """Ask a path of the API; a `body` goes as JSON, bytes as they are. Raises what its refusal stands for."""
        return self._ask(method, path, answer_type, body=body, timeout_s=timeout_s)

    # --- how it is asked --------------------------------------------------------------------------------------------

    def _ask(
        self,
        method: str,
        path: str,
        answer_type: type[AnswerT],
        *,
        body: Any = None,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> AnswerT:
        sent = dict(headers or {})
        content = None
        if body is not None:
            is_raw = isinstance(body, bytes)
            content = body if is_raw else _encode(body)
            sent["Content-Type"] = "application/octet-stream" if is_raw else "application/json"
        timeout = httpx2.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)
        with _transport_errors():
            response = self._http.request(method, path, content=content, params=params, headers=sent, timeout=timeout)
        if response.is_success:
            return _decode(response.content, answer_type)
        raise _error_of(response)

    @contextmanager
    def _open(self, path: str, params: Mapping[str, Any], *, is_endless: bool = True) -> Iterator[httpx2.Response]:
        """Open an answer that is read as it comes. A silence of STREAM_SILENCE_S ends an endless one as lost."""
        silence_s = STREAM_SILENCE_S if is_endless else REQUEST_TIMEOUT_S
        timeout = httpx2.Timeout(silence_s, connect=CONNECT_TIMEOUT_S)
        with _transport_errors(), self._http.stream("GET", path, params=params, timeout=timeout) as response:
            if not response.is_success:
                response.read()
                raise _error_of(response)
            yield response


class _ConnectionLost(BackendError):
    """The connection broke after it stood: whether the request was taken in is unknown."""


def connect(url: str | None = None, token: str | None = None, state_dir: str | Path | None = None) -> Client:
    """Return a client of the running platform.

    Found by `url`, else SPRINGTIDE_URL, else platform.json in `state_dir` (SPRINGTIDE_STATE, else the usual place);
    the token likewise by `token`, SPRINGTIDE_TOKEN, else the state directory's token file, which is sent to this
    machine only. Raises BackendError if no platform is known, Unauthorized if no token is.
    """
    folder = Path(state_dir).expanduser() if state_dir is not None else default_state_dir()
    # A state directory that is asked for by name wins over the environment.
    if url is None and state_dir is None:
        url = os.environ.get("SPRINGTIDE_URL")
    if url is None:
        url = _find_url(folder)
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidRequest(f"the platform's address {url!r:.200} is not one; it is like http://127.0.0.1:8787")
    token = token or (os.environ.get("SPRINGTIDE_TOKEN") if state_dir is None else None)
    if not token:
        if parts.hostname not in _LOOPBACK:
            raise Unauthorized(f"no token for {parts.hostname}; set SPRINGTIDE_TOKEN or pass token=")
        token = _read_token(folder)
    if not token.isascii() or not token.isprintable():
        raise Unauthorized("the token holds characters that no token has; copy it again")
    return Client(url, token, state_dir=str(folder) if parts.hostname in _LOOPBACK else "")


def default_state_dir() -> Path:
    """`SPRINGTIDE_STATE`, or the usual place under the home directory."""
    given = os.environ.get("SPRINGTIDE_STATE")
    return Path(given).expanduser() if given else Path.home() / ".local" / "state" / "springtide"


def _find_url(folder: Path) -> str:
    try:
        return msgspec.json.decode((folder / "platform.json").read_bytes(), type=_Address).url
    except FileNotFoundError:
        raise BackendError(f"{NOT_RUNNING} (there is none in {folder})") from None
    except (OSError, ValueError, RecursionError) as error:
        raise BackendError(f"{folder / 'platform.json'} cannot be read: {error}; run `springtide up` again") from None


def _read_token(folder: Path) -> str:
    try:
        return (folder / "token").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Unauthorized(f"the token in {folder} cannot be read: {error}; set SPRINGTIDE_TOKEN") from None


def _part(name: str) -> str:
    """Return `name` as one part of a path. Raises InvalidRequest for what no workload can be called."""
    if not name or name in (".", ".."):
        raise InvalidRequest(f"{name!r} is not the id of a job or service; `springtide ps` lists them")
    return quote(name, safe="")


def _source(source: SourceLike) -> dict[str, Any]:
    return {
        "filename": source.filename,
        "text": source.text,
        "object_name": source.object_name,
        "kind": source.kind,
        "args": list(source.args),
        "import_root": source.import_root,
        **({"files": dict(source.files)} if source.files else {}),
    }


def _encode(value: Any) -> bytes:
    try:
        # The standard encoder refuses NaN and infinities; msgspec would quietly send null.
        return json.dumps(msgspec.to_builtins(value), allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidRequest(f"this cannot be sent as JSON: {error}; use numbers, strings, lists and dicts") from None


def _decode(data: bytes | msgspec.Raw, answer_type: type[AnswerT]) -> AnswerT:
    try:
        return msgspec.json.decode(data, type=answer_type)
    except (ValueError, RecursionError) as error:
        raise BackendError(f"the platform's answer cannot be read ({error}); is it another version?") from None


def _error_of(response: httpx2.Response) -> SpringtideError:
    """The error that a refusal stands for, with the platform's own sentence."""
    try:
        problem = msgspec.json.decode(response.content, type=_Problem).error
    except (ValueError, RecursionError):
        problem = _ProblemDetail(f"the platform answered {response.status_code} without a reason")
    message = problem.message
    if response.status_code in (429, 503) and problem.code != _UNAVAILABLE and "retry-after" in response.headers:
        return CapacityError(message, _retry_after_s(response))
    if response.status_code in _ERRORS:
        return _ERRORS[response.status_code](message)
    return InvalidRequest(message) if 400 <= response.status_code < 500 else BackendError(message)


def _lines(response: httpx2.Response) -> Iterator[bytes]:
    """The lines of an answer as they come, ended by newlines only: text may hold other characters that break lines."""
    pending: list[bytes] = []
    num_bytes = 0
    for chunk in response.iter_bytes():
        first, *others = chunk.split(b"\n")
        pending.append(first)
        num_bytes += len(first)
        for other in others:
            yield b"".join(pending)
            pending, num_bytes = [other], len(other)
        if num_bytes > MAX_LINE_BYTES:
            raise BackendError("the platform sent a line that is too long to be one")
    if num_bytes:
        yield b"".join(pending)


def _events(response: httpx2.Response) -> Iterator[bytes]:
    """The data of each server-sent event."""
    data: list[bytes] = []
    for line in _lines(response):
        if line.startswith(b"data:"):
            data.append(line.removeprefix(b"data:").removeprefix(b" "))
        elif not line and data:
            yield b"\n".join(data)
            data = []


def _retry_after_s(response: httpx2.Response) -> float:
    try:
        seconds = float(response.headers.get("retry-after", "1"))
    except ValueError:
        return 1.0
    return seconds if math.isfinite(seconds) and seconds >= 0 else 1.0


@contextmanager
def _transport_errors() -> Iterator[None]:
    try:
        yield
    except httpx2.ConnectError:
        raise BackendError(NOT_RUNNING) from None
    except httpx2.TimeoutException:
        raise BackendError("the platform did not answer in time; `springtide status` shows whether it lives") from None
    except httpx2.InvalidURL as error:
        raise InvalidRequest(f"the platform's address is not one: {error}") from None
    except httpx2.HTTPError as error:
        raise _ConnectionLost(f"the connection to the platform was lost: {error}") from None
