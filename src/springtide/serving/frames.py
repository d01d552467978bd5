"""The messages between the gateway and a serving replica, and their framing: four bytes of length, then msgpack.

One connection carries many batches at a time; `batch_id` pairs an answer with its request. Calls of an async or a
generator `predict` are opened one by one, and their answers come in chunks, as far as the client takes them: one that
does not read stops no other one. The replica sends the first
frame. On a socket of its machine, which only its own user can reach, this is Welcome; over a network it is Challenge,
followed by Welcome once the gateway has proved that it knows the secret. Users' values are JSON inside the frames, so
that the gateway copies them without decoding.

Over a network both sides prove that they know the same secret without sending it: each draws a nonce, and the other
side computes a digest of nonce and secret. So a recorded proof is useless later, and a process that has taken over a
replica's old address gets neither the secret nor a request. The frames after that are not encrypted.
"""

from __future__ import annotations

import hmac
import secrets
from typing import Literal

import msgspec

from springtide.core.tokens import proof_of
from springtide.core.wire import workers as wire
from springtide.core.workload import ReplicaId
from springtide.serving.schema import ServiceSchema

MAX_FRAME_BYTES = 16 << 20
# The frame limit for a peer that has not yet proved that it knows the secret.
MAX_GREETING_BYTES = 1 << 10
# Where a replica with an address of its own listens for gateways, and where it reports its health.
SERVING_PORT = 8789
HEALTH_PORT = 8790
NONCE_BYTES = 16
# What a replica may send of an answer before the client has taken any of it, and at most in one frame.
CREDIT_BYTES = 256 << 10
CHUNK_BYTES = 64 << 10


class _Frame(msgspec.Struct, frozen=True, tag_field="frame", tag=True, kw_only=True):
    pass


class CallOrigin(msgspec.Struct, frozen=True, array_like=True):
    """The request behind a call, as it is passed on to the services that the call calls.

    Of a batch of several requests it is the highest of their priorities alone. `priority` is high, normal or low.
    """

    priority: str = "normal"
    request_id: bytes = b""
    traceparent: bytes = b""


class Predict(_Frame, frozen=True, kw_only=True):
    """To the replica: answer these calls together. Each call is a JSON object that maps parameters to values.

    `timeout_s` is how long the last of them is waited for (0: not known); a replica whose code runs on long after that
    is replaced. `origin` is told where the code may call other services.
    """

    batch_id: int
    calls: tuple[bytes, ...]
    timeout_s: float = 0.0
    origin: CallOrigin | None = None


class HttpHead(msgspec.Struct, frozen=True, array_like=True):
    """A request to an application; `path` is the whole one, with the root path in front.

    `raw_path` is the same as the client has written it (empty from older gateways). A WebSocket has the scheme ws or
    wss.
    """

    method: str
    scheme: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    raw_path: bytes = b""

    @property
    def is_socket(self) -> bool:
        """Whether the client asks for a WebSocket."""
        return self.scheme in ("ws", "wss")


class HttpStart(msgspec.Struct, frozen=True, array_like=True):
    """The head of an application's answer; after status 101 come messages of a WebSocket (socket_messages.py)."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]


class Open(_Frame, frozen=True, kw_only=True):
    """To the replica: answer this call with Chunks and an End. `batch_id` is from the same numbers as Predict's.

    The replica may send CREDIT_BYTES of chunks, and as many more as Credit says. With `is_sse` it writes the items of a
    stream as server-sent events. Of a request to an application `http` is the head and `call` the body. `timeout_s` and
    `origin` are as in Predict.
    """

    batch_id: int
    call: bytes
    is_sse: bool = False
    http: HttpHead | None = None
    timeout_s: float = 0.0
    origin: CallOrigin | None = None


class Credit(_Frame, frozen=True, kw_only=True):
    """To the replica: the client has taken so many bytes of this call's chunks."""

    batch_id: int
    num_bytes: int


class Cancel(_Frame, frozen=True, kw_only=True):
    """To the replica: the answer of this call is not wanted any more. It is still to be ended with an End."""

    batch_id: int


class Feed(_Frame, frozen=True, kw_only=True):
    """To the replica: bytes of the client's messages on a WebSocket: CREDIT_BYTES, and as many as were Taken."""

    batch_id: int
    body: bytes


class Ping(_Frame, frozen=True, kw_only=True):
    """To the replica: a health check. Answered even while it predicts."""

    nonce: int = 0


class Identify(_Frame, frozen=True, kw_only=True):
    """To the replica, before any call: with this secret its code may call services at `url`, a platform's address."""

    url: str
    secret: str


class Greet(_Frame, frozen=True, kw_only=True):
    """To the replica, in answer to its Challenge: the gateway's own nonce, and its proof that it knows the secret."""

    nonce: bytes
    proof: bytes


class Challenge(_Frame, frozen=True, kw_only=True):
    """From the replica, first on a connection over a network: the nonce for the gateway's proof."""

    nonce: bytes


class Welcome(_Frame, frozen=True, kw_only=True):
    """From the replica, before any answer: its identity and its schema.

    `proof` shows, over a network, that the replica knows the secret too: another process may have its address by now.
    `takes_identity`: it knows Identify; replicas of earlier versions do not.
    """

    replica_id: ReplicaId
    schema: ServiceSchema
    proof: bytes = b""
    takes_identity: bool = False


class BatchOutcome(msgspec.Struct, frozen=True, array_like=True):
    """The outcome of one call: `ok` with the JSON of what predict returned, else with an error message in UTF-8.

    `invalid`: the call does not fit the type hints. `error`: the user's code failed, `is_out_of_memory` for lack of
    memory of the host or the device.
    """

    status: Literal["ok", "invalid", "error"]
    body: bytes
    is_out_of_memory: bool = False


class Answered(_Frame, frozen=True, kw_only=True):
    """From the replica: one outcome for each call, in order. `predict_s` is the time in the user's code."""

    batch_id: int
    outcomes: tuple[BatchOutcome, ...]
    predict_s: float = 0.0


class Chunk(_Frame, frozen=True, kw_only=True):
    """From the replica: the next bytes of an answer's body, as the client is to get them."""

    batch_id: int
    body: bytes
    is_sse: bool = False
    start: HttpStart | None = None


class Taken(_Frame, frozen=True, kw_only=True):
    """From the replica: the application has taken so many bytes of a WebSocket's messages."""

    batch_id: int
    num_bytes: int


class End(_Frame, frozen=True, kw_only=True):
    """From the replica: the answer to an Open is complete. `outcome` has the answer if there were no chunks."""

    batch_id: int
    outcome: BatchOutcome
    predict_s: float = 0.0


class Draining(_Frame, frozen=True, kw_only=True):
    """From the replica: it is shutting down and did not start this batch; the gateway sends it elsewhere."""

    batch_id: int


class Pong(_Frame, frozen=True, kw_only=True):
    """From the replica, in answer to Ping: it is alive, with this many batches unanswered."""

    nonce: int
    num_outstanding: int = 0
    is_draining: bool = False


Question = Predict | Ping | Greet | Open | Credit | Cancel | Feed | Identify
Reply = Challenge | Welcome | Answered | Draining | Pong | Chunk | End | Taken


def encode_frame(message: Question | Reply) -> bytes:
    """Return the message with its length in front. Raises BackendError above MAX_FRAME_BYTES."""
    return wire.encode_frame(message, MAX_FRAME_BYTES)


def new_nonce() -> bytes:
    """Draw a random nonce."""
    return secrets.token_bytes(NONCE_BYTES)


def gateway_proof(token: str, replica_id: ReplicaId, challenge: bytes, nonce: bytes) -> bytes:
    """The gateway's answer to the replica's challenge; `nonce` is the gateway's own."""
    return proof_of(token, b"gateway", replica_id.encode(), challenge, nonce)


def replica_proof(token: str, replica_id: ReplicaId, challenge: bytes, nonce: bytes) -> bytes:
    """The replica's proof in its Welcome, for the same challenge and nonce."""
    return proof_of(token, b"replica", replica_id.encode(), challenge, nonce)


def is_proof(given: bytes, expected: bytes) -> bool:
    """Whether the proofs are equal, compared in constant time."""
    return hmac.compare_digest(given, expected)
