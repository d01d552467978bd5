"""The typed client of the control API: it returns structs of core.status and raises errors of core.errors."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote, urlsplit

import httpx2
import msgspec

from springtide.client.calls.answers import (
    NOT_RUNNING,
    AnswerT,
    ConnectionLost,
    answer_of,
    decode_answer,
    encode_body,
    error_of,
    events_of,
    items_of,
    lines_of,
    outputs_of,
    transport_errors,
)
from springtide.client.sources.body import SourceLike, source_body
from springtide.client.sources.source import SentFolder
from springtide.core.decoding import decode_json
from springtide.core.errors import (
    BackendError,
    InvalidRequest,
    Unauthorized,
)
from springtide.core.status.api_keys import ApiKeyStatus, NewApiKey
from springtide.core.status.artifacts import ArtifactStatus
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
from springtide.storage.state_directory import default_state_directory

REQUEST_TIMEOUT_S = 30.0
# A quote makes many decisions of the policy, and waits for earlier quotes.
QUOTE_TIMEOUT_S = 120.0
FOLDER_TIMEOUT_S = 120.0
# The platform may read large files, or fetch them from a store, before it answers.
ARTIFACT_TIMEOUT_S = 300.0
CONNECT_TIMEOUT_S = 5.0
INFER_TIMEOUT_S = 120.0
# Longer than the platform's interval between keep-alive lines of a stream.
STREAM_SILENCE_S = 60.0
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


class _Address(msgspec.Struct):
    url: str


class Client:
    """A connection to one platform; `st.connect()` makes it. Not thread-safe; close it, or use a `with` block:

        with st.connect() as client:
            for job in client.jobs():
                print(job.job_id, job.state)

    Moments in answers are seconds on the platform's clock. Every call raises BackendError if the platform does not
    answer, and Unauthorized for a wrong token.
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
        """Return the client."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connection."""
        self.close()

    def close(self) -> None:
        """Close every socket. The client cannot be used afterwards."""
        self._http.close()

    @property
    def authorization(self) -> str:
        """The value of the Authorization header of its requests, which is a secret."""
        return str(self._http.headers["Authorization"])

    # --- the platform -----------------------------------------------------------------------------------------------

    def status(self) -> PlatformStatus:
        """Jobs, services, nodes and devices at this instant."""
        return self.request("GET", "/v1/status", PlatformStatus)

    def stream(self, after_seq: int = -1) -> Iterator[PlatformStatus]:
        """Yield the status now and after every change, until the platform ends; `after_seq` is the last one known."""
        with self._open("/v1/stream", {"after_seq": after_seq}) as response, transport_errors():
            for event in events_of(response):
                yield decode_answer(event, PlatformStatus)

    def series(self, job_id: str) -> ProgressSeries:
        """Loss, speed and number of workers of a job over time, oldest point first. Raises NotFound."""
        return self.request("GET", f"/v1/jobs/{_part(job_id)}/series", ProgressSeries)

    def timeline(self, since_s: float = 0.0) -> Timeline:
        """Which workload held which device since `since_s` (seconds on the platform's clock), and marked events."""
        return self.request("GET", "/v1/timeline", Timeline, params={"since_s": since_s})

    def pools(self, past_days: int = 1) -> PoolsReport:
        """Pools, loans, reclaims, and the services' demand over the last `past_days` days with its forecast."""
        return self.request("GET", "/v1/pools", PoolsReport, params={"past_days": past_days})

    def sharing(self) -> SharingStatus:
        """The sharers of each device, the fraction of it granted to each, and the mechanism that enforces it."""
        return self.request("GET", "/v1/sharing", SharingStatus)

    def cluster(self) -> ClusterStatus:
        """The state of the Kubernetes cluster and the pods of all replicas. Raises NotFound outside Kubernetes."""
        return self.request("GET", "/v1/cluster", ClusterStatus)

    def export(self) -> LiveState:
        """What the policy sees now, as input for predicting its further plans."""
        return self.request("GET", "/v1/export", LiveState)

    def shutdown(self, *, stop_workers: bool = True) -> None:
        """Stop the platform; with `stop_workers=False` workers train on until it is started again."""
        self.request("POST", "/v1/shutdown", dict[str, bool], body={"stop_workers": stop_workers})

    # --- jobs -------------------------------------------------------------------------------------------------------

    def jobs(self, name: str = "") -> list[JobStatus]:
        """Every job, or those of one name, in order of arrival; of those that ended long ago the newest thousand."""
        return self.request("GET", f"/v1/jobs?name={_part(name)}" if name else "/v1/jobs", list[JobStatus])

    def job(self, job_id: str) -> JobStatus:
        """One job, by id or unique name. Raises NotFound, Conflict."""
        return self.request("GET", f"/v1/jobs/{_part(job_id)}", JobStatus)

    def submit_job(
        self,
        name: str,
        source: SourceLike,
        options: Mapping[str, Any] | None = None,
        *,
        folder: SentFolder | None = None,
        idempotency_key: str | None = None,
    ) -> JobStatus:
        """Submit a training job with the `options` of POST /v1/jobs. Returns once the job is durable.

        `folder` is a folder whose contents were sent, which the job gets a copy of (client/folders/send.py).
        A lost connection is retried once with the same idempotency key, so the job is never created twice. Raises
        InvalidRequest, Conflict (the key was used for another job), BackendError.
        """
        body = {"name": name, "source": source_body(source, folder), "options": dict(options or {})}
        headers = {"Idempotency-Key": idempotency_key or secrets.token_hex(16)}
        # The platform copies a folder before it answers.
        timeout_s = REQUEST_TIMEOUT_S if folder is None else FOLDER_TIMEOUT_S
        try:
            return self.request("POST", "/v1/jobs", JobStatus, body=body, headers=headers, timeout_s=timeout_s)
        except ConnectionLost:
            return self.request("POST", "/v1/jobs", JobStatus, body=body, headers=headers, timeout_s=timeout_s)

    def quote(self, name: str, source: SourceLike, options: Mapping[str, Any] | None = None) -> Quote:
        """Predict what `submit_job` with the same arguments would do now, changing nothing. Raises InvalidRequest."""
        # No secret is sent where none is needed.
        asked = {option: value for option, value in (options or {}).items() if option != "secrets"}
        body = {"name": name, "source": source_body(source), "options": asked}
        return self.request("POST", "/v1/quote", Quote, body=body, timeout_s=QUOTE_TIMEOUT_S)

    def artifacts(self, job_id: str, *, with_digests: bool = False) -> list[ArtifactStatus]:
        """The files that a job left, by name; with their digests if asked, for which each is read. Raises NotFound."""
        params = {"digests": str(with_digests).lower()}
        path = f"/v1/jobs/{_part(job_id)}/artifacts"
        return self.request("GET", path, list[ArtifactStatus], params=params, timeout_s=ARTIFACT_TIMEOUT_S)

    def artifact(self, job_id: str, name: str) -> Iterator[bytes]:
        """The content of a file that a job left, piece by piece. Raises NotFound."""
        path = f"/v1/jobs/{_part(job_id)}/artifacts/{quote(name)}"
        with self._open(path, {}, timeout_s=ARTIFACT_TIMEOUT_S) as response, transport_errors():
            yield from response.iter_bytes()

    def cancel(self, job_id: str) -> JobStatus:
        """End a job; its last checkpoint stays. Raises NotFound, Conflict."""
        return self.request("POST", f"/v1/jobs/{_part(job_id)}/cancel", JobStatus)

    def change(self, job_id: str, wish: Mapping[str, Any]) -> JobStatus:
        """Change a job's goal; `wish` is the body of PATCH /v1/jobs/{id}. Raises NotFound, Conflict, InvalidRequest."""
        return self.request("PATCH", f"/v1/jobs/{_part(job_id)}", JobStatus, body=dict(wish))

    def pause(self, job_id: str) -> JobStatus:
        """Checkpoint a job and release its devices. Raises NotFound, Conflict."""
        return self.request("POST", f"/v1/jobs/{_part(job_id)}/pause", JobStatus)

    def resume(self, job_id: str, budget_usd: float | None = None) -> JobStatus:
        """Resume a paused job, with a new budget in US dollars if given. Raises NotFound, Conflict, InvalidRequest."""
        body = None if budget_usd is None else {"budget_usd": budget_usd}
        return self.request("POST", f"/v1/jobs/{_part(job_id)}/resume", JobStatus, body=body)

    def quote_move(self, job_id: str, layer_profile: Mapping[str, Any] | None = None) -> Quote:
        """What the rest of a job on machines would take on functions; nothing is changed. Raises as `move`."""
        body = _move_body(layer_profile)
        return self.request("POST", f"/v1/jobs/{_part(job_id)}/move/quote", Quote, body=body)

    def move(self, job_id: str, layer_profile: Mapping[str, Any] | None = None) -> JobStatus:
        """Move a job from machines to functions, where it goes on from its checkpoint.

        `layer_profile` is the profile of its layers, if none came with it. Raises NotFound, Conflict, InvalidRequest.
        """
        body = _move_body(layer_profile)
        return self.request("POST", f"/v1/jobs/{_part(job_id)}/move", JobStatus, body=body)

    # --- services ---------------------------------------------------------------------------------------------------

    def services(self) -> list[ServiceStatus]:
        """Every service, in order of arrival."""
        return self.request("GET", "/v1/services", list[ServiceStatus])

    def service(self, name: str) -> ServiceStatus:
        """One service. Raises NotFound."""
        return self.request("GET", f"/v1/services/{_part(name)}", ServiceStatus)

    def deploy_service(
        self,
        name: str,
        source: SourceLike,
        options: Mapping[str, Any] | None = None,
        *,
        folder: SentFolder | None = None,
        release: Mapping[str, Any] | None = None,
    ) -> ServiceStatus:
        """Deploy a service, or a new revision, with the `options` and the `release` of PUT /v1/services.

        `folder` is the folder that the source is in, whose contents the platform has. Raises InvalidRequest, Conflict.
        """
        body = {"source": source_body(source, folder), "options": dict(options or {}), "release": dict(release or {})}
        timeout_s = REQUEST_TIMEOUT_S if folder is None else FOLDER_TIMEOUT_S
        return self.request("PUT", f"/v1/services/{_part(name)}", ServiceStatus, body=body, timeout_s=timeout_s)

    def roll_back(
        self, name: str, revision: int | None = None, release: Mapping[str, Any] | None = None
    ) -> ServiceStatus:
        """Release an earlier revision again, None: the one that was replaced last. Raises NotFound, Conflict."""
        body = {"revision": revision, "release": dict(release or {})}
        return self.request("POST", f"/v1/services/{_part(name)}/rollback", ServiceStatus, body=body)

    def remove_service(self, name: str) -> ServiceStatus:
        """Drain and delete a service. Raises NotFound."""
        return self.request("DELETE", f"/v1/services/{_part(name)}", ServiceStatus)

    def create_key(
        self,
        name: str,
        services: Sequence[str] | None = None,
        *,
        rate_per_s: float | None = None,
        expires_in_s: float | None = None,
    ) -> NewApiKey:
        """Make an API key, which may call these services (None: all) so many times a second, and nothing else.

        Its secret is told only now. Raises InvalidRequest, Conflict (there is one of that name).
        """
        wanted = {"name": name, "services": services, "rate_per_s": rate_per_s, "expires_in_s": expires_in_s}
        return self.request("POST", "/v1/keys", NewApiKey, body=wanted)

    def keys(self) -> list[ApiKeyStatus]:
        """The API keys by name, without their secrets."""
        return self.request("GET", "/v1/keys", list[ApiKeyStatus])

    def revoke_key(self, name: str) -> ApiKeyStatus:
        """Take an API key away: its next request is refused. Raises NotFound."""
        return self.request("DELETE", f"/v1/keys/{_part(name)}", ApiKeyStatus)

    def infer(
        self,
        service_name: str,
        payload: Any = None,
        /,
        *,
        timeout_s: float = INFER_TIMEOUT_S,
        request_headers: Mapping[str, str] | None = None,
        **inputs: Any,
    ) -> Any:
        """Call `predict` of a service with one JSON object or with keywords, and return its outputs.

        Raises InvalidRequest (the arguments do not fit), NotFound, CapacityError (the service is too busy),
        BackendError (no answer within `timeout_s` seconds, or predict failed).
        """
        body = _arguments(payload, inputs)
        path, headers = f"/f/{_part(service_name)}", request_headers
        answer = self.request("POST", path, dict[str, Any], body=body, headers=headers, timeout_s=timeout_s)
        return outputs_of(answer)

    def infer_stream(
        self,
        service_name: str,
        payload: Any = None,
        /,
        *,
        timeout_s: float = INFER_TIMEOUT_S,
        request_headers: Mapping[str, str] | None = None,
        **inputs: Any,
    ) -> Iterator[Any]:
        """Call a `predict` that yields and yield its items as they come; closing the iterator cancels the call.

        `timeout_s` is the longest wait for an item. Raises as `infer`, also when the answer breaks off.
        """
        body, headers = encode_body(_arguments(payload, inputs)), dict(request_headers or {})
        headers["Accept"] = "text/event-stream"
        path, headers["Content-Type"] = f"/f/{_part(service_name)}", "application/json"
        with self._open(path, {}, timeout_s=timeout_s, body=body, headers=headers) as response, transport_errors():
            yield from items_of(response)

    # --- jobs and services ------------------------------------------------------------------------------------------

    def scale(self, workload_id: str, minimum: int, maximum: int) -> JobStatus | ServiceStatus:
        """Set the bounds on a job's workers or a service's replicas. Raises NotFound, Conflict, InvalidRequest."""
        body = {"minimum": minimum, "maximum": maximum}
        answer = self.request("POST", f"/v1/workloads/{_part(workload_id)}/scale", msgspec.Raw, body=body)
        if "job_id" in decode_answer(answer, dict[str, Any]):
            return decode_answer(answer, JobStatus)
        return decode_answer(answer, ServiceStatus)

    def why(self, workload_id: str) -> Explanation:
        """The reason for a workload's present state, and what would change it. Raises NotFound."""
        return self.request("GET", f"/v1/workloads/{_part(workload_id)}/why", Explanation)

    def history(self, workload_id: str) -> list[HistoryEntry]:
        """The newest entries of a workload's history, oldest first. Raises NotFound."""
        return self.request("GET", f"/v1/workloads/{_part(workload_id)}/history", list[HistoryEntry])

    def logs(
        self, workload_id: str, *, replica: str | None = None, tail: int = 200, follow: bool = False
    ) -> Iterator[str]:
        """Yield the newest `tail` lines of output, then with `follow` new lines until the workload has ended.

        `replica` selects one replica. Raises NotFound, InvalidRequest.
        """
        params = {"replica": replica or "", "tail": tail, "follow": str(follow).lower()}
        path = f"/v1/workloads/{_part(workload_id)}/logs"
        timeout_s = STREAM_SILENCE_S if follow else REQUEST_TIMEOUT_S
        with self._open(path, params, timeout_s=timeout_s) as response, transport_errors():
            for line in lines_of(response):
                yield line.decode("utf-8", "replace")

    # --- requests ---------------------------------------------------------------------------------------------------

    def request(
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
        """Send one request to the API and decode its answer. A `body` is sent as JSON, bytes unchanged.

        Raises the error of core.errors that corresponds to the response's status.
        """
        sent = dict(headers or {})
        content = None
        if body is not None:
            is_raw = isinstance(body, bytes)
            content = body if is_raw else encode_body(body)
            sent["Content-Type"] = "application/octet-stream" if is_raw else "application/json"
        timeout = httpx2.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)
        with transport_errors():
            response = self._http.request(method, path, content=content, params=params, headers=sent, timeout=timeout)
        return answer_of(response, answer_type)

    @contextmanager
    def _open(
        self,
        path: str,
        params: Mapping[str, Any],
        *,
        timeout_s: float = STREAM_SILENCE_S,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Iterator[httpx2.Response]:
        """Open a streamed answer, which fails as lost after a silence of `timeout_s`; with a `body` it is posted."""
        timeout = httpx2.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)
        method, given = "GET" if body is None else "POST", dict(headers or {})
        with (
            transport_errors(),
            self._http.stream(method, path, params=params, content=body, headers=given, timeout=timeout) as response,
        ):
            if not response.is_success:
                response.read()
                raise error_of(response)
            yield response


def connect(url: str | None = None, token: str | None = None, state_dir: str | Path | None = None) -> Client:
    """Return a client of the running platform; `st.connect()` finds the one on this machine.

    The address is `url`, else SPRINGTIDE_URL, else that in `state_dir`/platform.json. The token is `token`, else
    SPRINGTIDE_TOKEN, else `state_dir`/token, which is only sent to this machine. `state_dir` defaults to
    SPRINGTIDE_STATE, else springtide in XDG_STATE_HOME or ~/.local/state; if it is passed, the environment is ignored.
    Raises BackendError if no platform is running, Unauthorized without a token, InvalidRequest for a malformed address.
    """
    folder = Path(state_dir).expanduser() if state_dir is not None else default_state_directory()
    # An explicit state directory takes precedence over the environment.
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


def _find_url(folder: Path) -> str:
    try:
        return decode_json((folder / "platform.json").read_bytes(), _Address).url
    except FileNotFoundError:
        raise BackendError(f"{NOT_RUNNING} (there is none in {folder})") from None
    except (OSError, ValueError, RecursionError) as error:
        raise BackendError(f"{folder / 'platform.json'} cannot be read: {error}; run `springtide up` again") from None


def _read_token(folder: Path) -> str:
    try:
        return (folder / "token").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Unauthorized(f"the token in {folder} cannot be read: {error}; set SPRINGTIDE_TOKEN") from None


def _move_body(layer_profile: Mapping[str, Any] | None) -> dict[str, Any]:
    given = {} if layer_profile is None else {"layer_profile": dict(layer_profile)}
    return {"to": "functions", **given}


def _part(name: str) -> str:
    """`name` quoted as one segment of a path. Raises InvalidRequest if it cannot be a workload's name."""
    if not name or name in (".", ".."):
        raise InvalidRequest(f"{name!r} is not the id of a job or service; `springtide ps` lists them")
    return quote(name, safe="")


def _arguments(payload: Any, inputs: dict[str, Any]) -> Any:
    if payload is not None and inputs:
        raise InvalidRequest("give the arguments of predict as one object or as keywords, not both")
    return payload if payload is not None else inputs
