"""The gateway's connection to one replica: several batches at a time over one socket. Runs on the event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import cast

from springtide.core.errors import BackendError
from springtide.core.wire.workers import FrameDecoder
from springtide.core.workload import ReplicaId
from springtide.serving.frames import (
    MAX_FRAME_BYTES,
    Answered,
    Cancel,
    Challenge,
    Chunk,
    Credit,
    Draining,
    End,
    Feed,
    Greet,
    Identify,
    Open,
    Ping,
    Pong,
    Predict,
    Reply,
    Taken,
    Welcome,
    encode_frame,
    gateway_proof,
    is_proof,
    new_nonce,
    replica_proof,
)
from springtide.serving.schema import ServiceSchema

_FIRST_BACKOFF_S = 0.02
_LAST_BACKOFF_S = 1.0
_CONNECT_TIMEOUT_S = 5.0
# TCP keepalives detect a dead machine. The kernel answers them even while a model keeps its process busy.
_KEEPALIVE_IDLE_S = 2
_KEEPALIVE_INTERVAL_S = 1
_KEEPALIVE_PROBES = 3
_UNACKNOWLEDGED_MS = 5000
_ANSWERS = (Answered, End, Draining)
_PARTS = (Chunk, Taken)
# A message of a WebSocket may be as long as the largest frame.
_FEED_BYTES = 1 << 20


class ReplicaClient:
    """Keeps a connection to one replica open. All callbacks run on the event loop.

    `on_ready` is called after each Welcome, `on_answer` after each Answered, End or Draining, `on_chunk` after each
    Chunk or Taken, `on_draining` when a Pong says that the replica drains, and `on_lost` with the ids of the unanswered
    batches and calls when the connection breaks.
    The owner sets `is_retired`: then it sends nothing more, and the connection is not opened again.

    With a `token`, each side proves to the other that it knows the token before any request is sent
    (serving/frames.py). A replica is told its `identity` before the first call.
    """

    def __init__(
        self,
        replica_id: ReplicaId,
        address: str,
        *,
        token: str = "",
        identity: Identify | None = None,
        on_ready: Callable[[ReplicaClient, ServiceSchema], None],
        on_answer: Callable[[ReplicaClient, Answered | End | Draining], None],
        on_chunk: Callable[[Chunk | Taken], None] = lambda chunk: None,
        on_lost: Callable[[ReplicaClient, tuple[int, ...]], None],
        on_draining: Callable[[ReplicaClient], None],
    ) -> None:
        self.replica_id = replica_id
        self.address = address
        self.is_connected = False
        self.is_draining = False
        self.is_retired = False
        self.is_closed = False
        self.outstanding: dict[int, None] = {}
        self.problem = ""
        self.token = token
        self._identity = identity
        self._expected_proof = b""
        self._backoff_s = _FIRST_BACKOFF_S
        self._on_ready = on_ready
        self._on_answer = on_answer
        self._on_chunk = on_chunk
        self._on_lost = on_lost
        self._on_draining = on_draining
        self._transport: asyncio.Transport | None = None
        self._task = asyncio.get_running_loop().create_task(self._connect())

    def ask(self, question: Predict | Open) -> None:
        """Send a batch, or a call whose answer may be a stream; the result arrives through a callback.

        Raises BackendError if it exceeds the frame limit.
        """
        assert self._transport is not None, "it is for connected replicas"
        frame = encode_frame(question)
        self.outstanding[question.batch_id] = None
        self._transport.write(frame)

    def credit(self, batch_id: int, num_bytes: int) -> None:
        """Let the replica send so many more bytes of a call's answer."""
        self._tell(Credit(batch_id=batch_id, num_bytes=num_bytes))

    def cancel(self, batch_id: int) -> None:
        """Ask the replica to end a call whose answer is not wanted any more; it still ends with an End."""
        self._tell(Cancel(batch_id=batch_id))

    def feed(self, batch_id: int, body: bytes) -> None:
        """Send bytes of the client's messages on a WebSocket."""
        for start in range(0, len(body), _FEED_BYTES):
            self._tell(Feed(batch_id=batch_id, body=body[start : start + _FEED_BYTES]))

    def _tell(self, told: Credit | Cancel | Feed) -> None:
        if told.batch_id in self.outstanding and self._transport is not None:
            self._transport.write(encode_frame(told))

    def ping(self) -> None:
        """Ask for a Pong, which says whether the replica drains."""
        if self._transport is not None:
            self._transport.write(encode_frame(Ping()))

    def close(self) -> None:
        """Close the connection for good. Unanswered batches count as lost."""
        self.is_closed = True
        self._task.cancel()
        if self._transport is not None:
            self._transport.close()

    async def _connect(self) -> None:
        """Try until connected. If the replica is gone, the platform removes its route and this client is closed."""
        loop = asyncio.get_running_loop()
        backoff_s = _FIRST_BACKOFF_S
        while not self.is_closed:
            try:
                async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                    if self.address.startswith("unix://"):
                        path = self.address.removeprefix("unix://")
                        await loop.create_unix_connection(lambda: _ReplicaProtocol(self), path)
                    else:
                        host, _, port = self.address.removeprefix("tcp://").rpartition(":")
                        await loop.create_connection(lambda: _ReplicaProtocol(self), host.strip("[]"), int(port))
                return
            except (OSError, TimeoutError, ValueError):
                await asyncio.sleep(backoff_s)
                backoff_s = min(backoff_s * 2, _LAST_BACKOFF_S)

    def handle_reply(self, reply: Reply) -> None:
        if isinstance(reply, _ANSWERS):
            if isinstance(reply, Draining):
                self.is_draining = True
            if reply.batch_id in self.outstanding:
                del self.outstanding[reply.batch_id]
                self._on_answer(self, reply)
        elif isinstance(reply, _PARTS):
            if reply.batch_id in self.outstanding:
                self._on_chunk(reply)
        elif isinstance(reply, Pong):
            if reply.is_draining and not self.is_draining:
                self.is_draining = True
                self._on_draining(self)
        elif isinstance(reply, Challenge):
            self._answer_challenge(reply)
        else:
            self._handle_welcome(reply)

    def _answer_challenge(self, challenge: Challenge) -> None:
        """Prove that this is the gateway. Raises BackendError without a token."""
        if not self.token or self.is_connected:
            raise BackendError("it asks for a proof, and there is no secret between it and this gateway")
        assert self._transport is not None
        nonce = new_nonce()
        proofs = (self.token, self.replica_id, challenge.nonce, nonce)
        self._expected_proof = replica_proof(*proofs)
        self._transport.write(encode_frame(Greet(nonce=nonce, proof=gateway_proof(*proofs))))

    def _handle_welcome(self, welcome: Welcome) -> None:
        """Mark the replica as ready. Raises BackendError if it is another replica or does not know the token."""
        if self.token:
            is_right = bool(self._expected_proof) and is_proof(welcome.proof, self._expected_proof)
            if not is_right or welcome.replica_id != self.replica_id:
                raise BackendError(f"the process that answers at {self.address} is not {self.replica_id}")
        if self._identity is not None and welcome.takes_identity:
            assert self._transport is not None
            self._transport.write(encode_frame(self._identity))
        self.is_connected = True
        self.problem = ""
        self._backoff_s = _FIRST_BACKOFF_S
        self._on_ready(self, welcome.schema)

    def handle_connected(self, transport: asyncio.Transport) -> None:
        """The socket is open; the replica becomes ready with its Welcome."""
        self._transport = transport
        self._expected_proof = b""
        raw = transport.get_extra_info("socket")
        if raw is not None and raw.family != socket.AF_UNIX:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)

    def handle_lost(self) -> None:
        """Report the unanswered batches of a broken connection and, unless closed or retired, connect again."""
        self._transport = None
        self.is_connected = False
        unanswered = tuple(self.outstanding)
        self.outstanding.clear()
        if not self.is_closed and not self.is_retired:
            self._task = asyncio.get_running_loop().create_task(self._reconnect())
        self._on_lost(self, unanswered)

    async def _reconnect(self) -> None:
        """Connect again after a doubling pause, so that a peer that fails the proof is tried less often."""
        backoff_s, self._backoff_s = self._backoff_s, min(self._backoff_s * 2, _LAST_BACKOFF_S)
        await asyncio.sleep(backoff_s)
        await self._connect()


class _ReplicaProtocol(asyncio.Protocol):
    """Decodes received bytes into replies and passes them to the client."""

    def __init__(self, client: ReplicaClient) -> None:
        self._client = client
        self._reader: FrameDecoder[Reply] = FrameDecoder(Reply, MAX_FRAME_BYTES)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._client.is_closed:
            self._transport.abort()
            return
        self._client.handle_connected(self._transport)

    def data_received(self, data: bytes) -> None:
        try:
            for reply in self._reader.feed(data):
                self._client.handle_reply(reply)
        except BackendError as error:
            # The peer broke the protocol: drop the connection and start again with a new stream.
            assert self._transport is not None
            self._client.problem = str(error)
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.handle_lost()
