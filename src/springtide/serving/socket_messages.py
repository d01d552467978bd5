"""The messages of a WebSocket between gateway and replica: a letter, four bytes of length, and the message itself.

Both directions are streams of bytes that are cut anywhere, so that they go on credit as other answers do.
"""

from __future__ import annotations

from typing import Literal

import msgspec

# The longest message in either direction.
MAX_MESSAGE_BYTES = 16 << 20
NORMAL_CLOSURE = 1000
MAX_REASON_BYTES = 123
_HEAD_BYTES = 5
_KINDS: dict[int, Literal["text", "bytes", "close"]] = {ord("t"): "text", ord("b"): "bytes", ord("c"): "close"}


class BadMessage(ValueError):
    """The bytes are no messages."""


class SocketMessage(msgspec.Struct, frozen=True):
    """A text in UTF-8, bytes, or the end: `body` is then the reason, and `code` the number that WebSockets close with.

    `num_bytes` is what it takes on the way.
    """

    kind: Literal["text", "bytes", "close"]
    body: bytes
    code: int = NORMAL_CLOSURE

    @property
    def num_bytes(self) -> int:
        return _HEAD_BYTES + len(self.body) + (2 if self.kind == "close" else 0)

    def encode(self) -> bytes:
        """The message as it goes between gateway and replica."""
        body = self.code.to_bytes(2, "big") + self.body if self.kind == "close" else self.body
        return self.kind[0].encode() + len(body).to_bytes(4, "big") + body


def close_message(code: int = NORMAL_CLOSURE, reason: str = "") -> SocketMessage:
    """The end of the messages of one side; a reason is cut to what a WebSocket can carry."""
    told = reason.encode("utf-8", "replace")[:MAX_REASON_BYTES].decode("utf-8", "ignore").encode()
    return SocketMessage("close", told, code)


class MessageReader:
    """Puts messages together from bytes. `feed` raises BadMessage."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[SocketMessage]:
        """The messages that are complete with these bytes."""
        self._buffer += data
        found: list[SocketMessage] = []
        while len(self._buffer) >= _HEAD_BYTES:
            kind, length = _KINDS.get(self._buffer[0]), int.from_bytes(self._buffer[1:_HEAD_BYTES], "big")
            if kind is None or length > MAX_MESSAGE_BYTES or (kind == "close" and length < 2):
                raise BadMessage("these are no messages of a WebSocket")
            if len(self._buffer) < _HEAD_BYTES + length:
                break
            body = bytes(self._buffer[_HEAD_BYTES : _HEAD_BYTES + length])
            del self._buffer[: _HEAD_BYTES + length]
            is_close = kind == "close"
            code = int.from_bytes(body[:2], "big") if is_close else NORMAL_CLOSURE
            found.append(SocketMessage(kind, body[2:] if is_close else body, code))
        return found
