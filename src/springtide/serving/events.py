"""How the items of a streamed answer are written: server-sent events, or a line of JSON each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from springtide.core.errors import InvalidRequest

EVENT_STREAM = "text/event-stream"
JSON_LINES = "application/x-ndjson"


class ServerSentEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One server-sent event; `sse` makes it. A `data` that is text is sent as it is, any other value as JSON."""

    data: Any
    event: str = ""
    event_id: str = ""
    retry_ms: int | None = None


def sse(data: Any, *, event: str = "", event_id: str = "", retry_ms: int | None = None) -> ServerSentEvent:
    """A server-sent event to yield from `predict`; an answer that begins with one is sent as server-sent events.

    `data`: a text, which may have several lines, or a value for JSON. `event`: its type; `event_id`: what a client
    names when it connects again; `retry_ms`: after how many milliseconds it does. Raises InvalidRequest for a line
    break in `event` or `event_id`.
    """
    for name, text in (("event", event), ("event_id", event_id)):
        if "\n" in text or "\r" in text:
            raise InvalidRequest(f"{name}={text!r:.40} has a line break, which would end the field")
    return ServerSentEvent(data=data, event=event, event_id=event_id, retry_ms=retry_ms)


def written_item(item: Any, encode: Callable[[Any], bytes], *, is_sse: bool) -> bytes:
    """The bytes of one item of an answer: an event, or a line. `encode` writes a value as JSON and may raise."""
    told = item if isinstance(item, ServerSentEvent) else None
    if not is_sse:
        return encode(item if told is None else told.data) + b"\n"
    if told is None:
        return b"data: " + encode(item) + b"\n\n"
    fields = [("event", told.event), ("id", told.event_id)]
    head = "".join(f"{name}: {text}\n" for name, text in fields if text)
    if told.retry_ms is not None:
        head += f"retry: {told.retry_ms}\n"
    if isinstance(told.data, str):
        # "\r" ends a line, too.
        lines = told.data.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        return (head + "".join(f"data: {line}\n" for line in lines) + "\n").encode("utf-8", "replace")
    return head.encode() + b"data: " + encode(told.data) + b"\n\n"


def written_error(problem: dict[str, str], *, is_sse: bool) -> bytes:
    """The last item of an answer that breaks off: an event of the type `error`, or a line, with {"error": problem}."""
    body = msgspec.json.encode({"error": problem})
    return b"event: error\ndata: " + body + b"\n\n" if is_sse else body + b"\n"
