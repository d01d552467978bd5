"""The messages between the gateway and a serving replica, and their framing: four bytes of length, then msgpack.

One connection carries many batches at a time; `batch_id` pairs an answer with its question. The replica sends first:
Welcome on a socket of its machine, which only its own user can reach; Challenge where any process could connect, and
Welcome once the gateway has proved itself. What users send and get travels as JSON inside the frames, so that the
gateway copies it and never has to understand it.

Over a network both prove that they know one secret, without ever sending it: each draws a nonce and the other mixes it
with the secret, so that a recorded proof is worth nothing later, and a process that has taken over a replica's old
address gets neither the secret nor a request. What follows is not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from typing import Generic, Literal, TypeVar

import msgspec

from springtide.core.errors import BackendError
from springtide.core.workload import ReplicaId
from springtide.serving.schema import ServiceSchema

MAX_FRAME_BYTES = 16 << 20
# A side that has not proved anything yet makes the other keep at most this.
MAX_GREETING_BYTES = 1 << 10
# Where a replica with an address of its own listens for gateways, and where it reports its health.
SERVING_PORT = 8789
HEALTH_PORT = 8790
_LENGTH = struct.Struct(">I")
M = TypeVar("M")
_ENCODER = msgspec.msgpack.Encoder()
NONCE_BYTES = 16


class _Frame(msgspec.Struct, frozen=True, tag_field="frame", tag=True, kw_only=True):
    pass


class Predict(_Frame, frozen=True, kw_only=True):
    """To the replica: answer these calls together. Each call is a JSON object that maps parameters to values."""

    batch_id: int
    calls: tuple[bytes, ...]


class Ping(_Frame, frozen=True, kw_only=True):
    """To the replica: are you there? Answered even while it predicts."""

    nonce: int = 0


class Greet(_Frame, frozen=True, kw_only=True):
    """To the replica, in answer to its Challenge: the sender knows the secret of the gateway. `nonce` is its own."""

    nonce: bytes
    proof: bytes


class Challenge(_Frame, frozen=True, kw_only=True):
    """From the replica, first on a connection over a network: prove that you know the secret, with this nonce."""

    nonce: bytes


class Welcome(_Frame, frozen=True, kw_only=True):
    """From the replica, before any answer: its identity and what it can be asked.

    `proof` says, over a network, that it knows the secret as well: an address may have passed to another process.
    """

    replica_id: ReplicaId
    schema: ServiceSchema
    proof: bytes = b""


class BatchOutcome(msgspec.Struct, frozen=True, array_like=True):
    """What became of one call: `ok` with the JSON of what predict returned, else a sentence in UTF-8.

    `invalid`: the call does not fit the type hints. `error`: the user's code failed.
    """

    status: Literal["ok", "invalid", "error"]
    body: bytes


class Answered(_Frame, frozen=True, kw_only=True):
    """From the replica: one Outcome for each call, in order. `predict_s` is the time in the user's code."""

    batch_id: int
    outcomes: tuple[BatchOutcome, ...]
    predict_s: float = 0.0


class Draining(_Frame, frozen=True, kw_only=True):
    """From the replica: it ends, and has not touched this batch; send it elsewhere."""

    batch_id: int


class Pong(_Frame, frozen=True, kw_only=True):
    """From the replica: it is there, with this many batches unanswered."""

    nonce: int
    num_outstanding: int = 0
    is_draining: bool = False


Question = Predict | Ping | Greet
Reply = Challenge | Welcome | Answered | Draining | Pong


def encode_frame(message: Question | Reply) -> bytes:
    """Return the message with its length in front. Raises BackendError above MAX_FRAME_BYTES."""
    body = _ENCODER.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise BackendError(f"a {type(message).__name__} of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


class FrameReader(Generic[M]):
    """Cuts a byte stream into messages of the given type union. Raises BackendError on anything malformed.

    `max_frame_bytes` may be changed between two calls, for what comes afterwards.
    """

    def __init__(self, message_type: object, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(message_type)
        self._buffer = bytearray()
        self.max_frame_bytes = max_frame_bytes

    def feed(self, data: bytes) -> list[M]:
        """Add received bytes and return the messages that are now complete."""
        buffer = self._buffer
        buffer += data
        messages: list[M] = []
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > self.max_frame_bytes:
                raise BackendError(f"a frame of {length} bytes is over the limit of {self.max_frame_bytes}")
            end = start + _LENGTH.size + length
            if len(buffer) < end:
                break
            try:
                messages.append(self._decoder.decode(bytes(buffer[start + _LENGTH.size : end])))
            except (ValueError, RecursionError) as error:
                # msgspec raises UnicodeDecodeError, a ValueError, on bad UTF-8.
                raise BackendError(f"a malformed frame: {error}") from None
            start = end
        del buffer[:start]
        return messages


def new_nonce() -> bytes:
    """Draw bytes that were never used before."""
    return secrets.token_bytes(NONCE_BYTES)


def gateway_proof(token: str, replica_id: ReplicaId, challenge: bytes, nonce: bytes) -> bytes:
    """What the gateway answers the replica's challenge with; `nonce` is the gateway's own."""
    return _proof("gateway", token, replica_id, challenge, nonce)


def replica_proof(token: str, replica_id: ReplicaId, challenge: bytes, nonce: bytes) -> bytes:
    """What the replica says in its Welcome, of the same two."""
    return _proof("replica", token, replica_id, challenge, nonce)


def is_proof(told: bytes, expected: bytes) -> bool:
    """Whether they are equal, compared in a time that reveals nothing."""
    return hmac.compare_digest(told, expected)


def _proof(who: str, token: str, replica_id: ReplicaId, challenge: bytes, nonce: bytes) -> bytes:
    parts = (who.encode(), replica_id.encode(), challenge, nonce)
    # Each part with its length, so that no two sets of parts make one text.
    text = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.new(token.encode(), text, hashlib.sha256).digest()
