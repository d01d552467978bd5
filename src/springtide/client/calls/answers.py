"""The API's answers as the client reads them: JSON, lines, items of a stream, and the errors of core.errors."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx2
import msgspec

from springtide.core.decoding import decode_json
from springtide.core.errors import (
    BackendError,
    CapacityError,
    Conflict,
    InvalidRequest,
    NoRoomBeside,
    NotFound,
    SpringtideError,
    Unauthorized,
)

MAX_LINE_BYTES = 64 * 1024 * 1024
NOT_RUNNING = "no platform is running; start one with `springtide up`"
_ERRORS: Mapping[int, type[InvalidRequest]] = {401: Unauthorized, 404: NotFound, 409: Conflict}
# The error code for a failure of the platform itself, as opposed to a lack of capacity.
_UNAVAILABLE = "unavailable"
_EVENT_STREAM = "text/event-stream"
_STREAMS = ("application/x-ndjson", _EVENT_STREAM)

AnswerT = TypeVar("AnswerT")


class _ProblemDetail(msgspec.Struct):
    message: str
    code: str = ""


class _Problem(msgspec.Struct):
    error: _ProblemDetail


class ConnectionLost(BackendError):
    """The connection broke after it was open, so it is unknown whether the request was processed."""


def encode_body(value: Any) -> bytes:
    """The JSON of a request's body. Raises InvalidRequest for what has none."""
    try:
        # The standard encoder rejects NaN and infinities; msgspec would silently send null.
        return json.dumps(msgspec.to_builtins(value), allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidRequest(f"this cannot be sent as JSON: {error}; use numbers, strings, lists and dicts") from None


def decode_answer(data: bytes | msgspec.Raw, answer_type: type[AnswerT]) -> AnswerT:
    """The JSON of an answer. Raises BackendError for another one than is expected."""
    try:
        return decode_json(data, answer_type)
    except (ValueError, RecursionError) as error:
        raise BackendError(f"the platform's answer cannot be read ({error}); is it another version?") from None


def answer_of(response: httpx2.Response, answer_type: type[AnswerT]) -> AnswerT:
    """The answer that a response holds whole. Raises its error, and InvalidRequest for a stream."""
    if not response.is_success:
        raise error_of(response)
    if response.headers.get("content-type", "") in _STREAMS:
        raise InvalidRequest("the service answers with a stream of items; use infer_stream for it")
    return decode_answer(response.content, answer_type)


def outputs_of(answer: dict[str, Any]) -> Any:
    """What `predict` returned, of a service's answer."""
    return answer["outputs"] if set(answer) == {"outputs"} else answer


def error_of(response: httpx2.Response) -> SpringtideError:
    """The error for an unsuccessful response, with the platform's sentence as its message."""
    try:
        problem = decode_json(response.content, _Problem).error
    except (ValueError, RecursionError):
        problem = _ProblemDetail(f"the platform answered {response.status_code} without a reason")
    message = problem.message
    if response.status_code in (429, 503) and problem.code != _UNAVAILABLE and "retry-after" in response.headers:
        return CapacityError(message, _retry_after_s(response))
    if problem.code == NoRoomBeside.code:
        return NoRoomBeside(message)
    if response.status_code in _ERRORS:
        return _ERRORS[response.status_code](message)
    return InvalidRequest(message) if 400 <= response.status_code < 500 else BackendError(message)


class LineReader:
    """Splits bytes at newlines only: text may hold other line-breaking characters."""

    def __init__(self) -> None:
        self._pending: list[bytes] = []
        self._num_bytes = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lines that end in this chunk. Raises BackendError for one that is too long."""
        first, *others = chunk.split(b"\n")
        self._pending.append(first)
        self._num_bytes += len(first)
        lines = []
        for other in others:
            lines.append(b"".join(self._pending))
            self._pending, self._num_bytes = [other], len(other)
        if self._num_bytes > MAX_LINE_BYTES:
            raise BackendError("the platform sent a line that is too long to be one")
        return lines

    def rest(self) -> list[bytes]:
        """The last line, if no newline ends it."""
        return [b"".join(self._pending)] if self._num_bytes else []


class ItemReader:
    """Reads the items of a service's stream of events: values, or the texts of `st.sse`."""

    def __init__(self) -> None:
        self._lines = LineReader()
        self._data: list[bytes] = []
        self._is_error = False

    def feed(self, chunk: bytes) -> Iterator[Any]:
        """The items that end in this chunk. Raises BackendError if the answer says that it breaks off."""
        for line in self._lines.feed(chunk):
            if line == b"event: error":
                self._is_error = True
            elif line.startswith(b"data:"):
                self._data.append(line.removeprefix(b"data:").removeprefix(b" "))
            elif not line and self._data:
                text, self._data = b"\n".join(self._data), []
                if self._is_error:
                    raise BackendError(decode_answer(text, _Problem).error.message)
                yield _item(text)


def _item(text: bytes) -> Any:
    try:
        return decode_json(text, Any)
    except ValueError:
        return text.decode("utf-8", "replace")


def is_event_stream(response: httpx2.Response) -> bool:
    """Whether an answer comes as server-sent events."""
    return response.headers.get("content-type", "").startswith(_EVENT_STREAM)


def lines_of(response: httpx2.Response) -> Iterator[bytes]:
    """The lines of a streamed answer. Raises BackendError for one that is too long."""
    reader = LineReader()
    for chunk in response.iter_bytes():
        yield from reader.feed(chunk)
    yield from reader.rest()


def events_of(response: httpx2.Response) -> Iterator[bytes]:
    """The data of each server-sent event."""
    data: list[bytes] = []
    for line in lines_of(response):
        if line.startswith(b"data:"):
            data.append(line.removeprefix(b"data:").removeprefix(b" "))
        elif not line and data:
            yield b"\n".join(data)
            data = []


def items_of(response: httpx2.Response) -> Iterator[Any]:
    """The items of a service's answer; one that is no stream is one item. Raises BackendError if it breaks off."""
    if not is_event_stream(response):
        yield outputs_of(decode_answer(response.read(), dict[str, Any]))
        return
    reader = ItemReader()
    for chunk in response.iter_bytes():
        yield from reader.feed(chunk)


def _retry_after_s(response: httpx2.Response) -> float:
    try:
        seconds = float(response.headers.get("retry-after", "1"))
    except ValueError:
        return 1.0
    return seconds if math.isfinite(seconds) and seconds >= 0 else 1.0


@contextmanager
def transport_errors() -> Iterator[None]:
    """Raise BackendError or InvalidRequest where no answer comes."""
    try:
        yield
    except httpx2.ConnectError:
        raise BackendError(NOT_RUNNING) from None
    except httpx2.TimeoutException:
        raise BackendError("the platform did not answer in time; `springtide status` shows whether it lives") from None
    except httpx2.InvalidURL as error:
        raise InvalidRequest(f"the platform's address is not one: {error}") from None
    except httpx2.HTTPError as error:
        raise ConnectionLost(f"the connection to the platform was lost: {error}") from None
