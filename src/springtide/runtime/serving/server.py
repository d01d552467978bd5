"""The server of a serving replica: it accepts gateways' connections, queues their batches and answers them.

Each connection has a reading thread, so that pings are answered while a prediction runs. A drain answers every accepted
batch.
"""

from __future__ import annotations

import logging
import queue
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from springtide.core.errors import BackendError
from springtide.core.wire.workers import FrameDecoder
from springtide.core.workload import ReplicaId
from springtide.runtime.serving.listeners import MAX_CONNECTIONS, ReplicaListener
from springtide.serving.frames import (
    MAX_FRAME_BYTES,
    MAX_GREETING_BYTES,
    Answered,
    BatchOutcome,
    Challenge,
    Draining,
    Greet,
    Ping,
    Pong,
    Predict,
    Question,
    Reply,
    Welcome,
    encode_frame,
    gateway_proof,
    is_proof,
    new_nonce,
    replica_proof,
)
from springtide.serving.schema import ServiceSchema

_LOG = logging.getLogger("springtide.replica")
# Limits for connections that have not authenticated yet.
_MAX_UNAUTHENTICATED = 32
_GREETING_S = 5.0
_MAX_OUTSTANDING = 64
_READ_BYTES = 1 << 18
_SEND_TIMEOUT_S = 10.0


class Answerer(Protocol):
    """What a server needs of a model; only one thread calls `answer`."""

    schema: ServiceSchema

    def answer(self, calls: Sequence[bytes]) -> tuple[BatchOutcome, ...]:
        """Return one outcome per call."""
        ...

    def set_queue_length(self, num_batches: int) -> None:
        """Report how many batches wait for the current one to end. Called by several threads."""
        ...


class ReplicaServer:
    """Queues batches for the thread that calls `run`. `drain` and `address` may be used from any thread."""

    def __init__(self, replica_id: ReplicaId, model: Answerer, listener: ReplicaListener) -> None:
        self._model = model
        self._replica_id = replica_id
        self._welcome = encode_frame(Welcome(replica_id=replica_id, schema=model.schema))
        self._batches: queue.SimpleQueue[tuple[_Peer, Predict] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_outstanding = 0
        self._is_draining = False
        self._peers: set[_Peer] = set()
        # Peers that have not authenticated yet, the longest connected first.
        self._unauthenticated: dict[_Peer, None] = {}
        self._listener = listener
        self.schema = model.schema
        self.address = listener.address
        threading.Thread(target=self._accept, name="springtide-accept", daemon=True).start()

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    def run(self) -> None:
        """Answer batches until `drain` is called and every batch accepted before it is answered."""
        while True:
            entry = self._batches.get()
            if entry is None:
                return
            peer, predict = entry
            self._model.set_queue_length(self._num_outstanding - 1)
            started_s = time.perf_counter()
            outcomes = self._model.answer(predict.calls)
            took_s = time.perf_counter() - started_s
            # Before the answer is sent: a client that has it must not see the batch counted as outstanding.
            with self._lock:
                self._num_outstanding -= 1
            peer.send(Answered(batch_id=predict.batch_id, outcomes=outcomes, predict_s=took_s))

    def drain(self) -> None:
        """Refuse new batches; `run` returns once all accepted ones are answered."""
        with self._lock:
            if self._is_draining:
                return
            self._is_draining = True
            peers, num_outstanding = list(self._peers), self._num_outstanding
        for peer in peers:
            # An unsolicited Pong lets gateways stop sending before a batch has to be refused.
            peer.send(Pong(nonce=0, num_outstanding=num_outstanding, is_draining=True))
        # Last, because `run` may return at once: every accepted batch is in the queue before this sentinel.
        self._batches.put(None)

    def close(self) -> None:
        with self._lock:
            self._is_draining = True
            peers = [*self._peers, *self._unauthenticated]
        _shut(self._listener.socket)
        for peer in peers:
            peer.close()
        self._listener.remove()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.socket.accept()
            except OSError:
                return
            peer = _Peer(connection)
            # Only this user can connect to the unix socket, so no handshake is needed there.
            if not (self._admit_unauthenticated(peer) if self._listener.token else self._admit(peer)):
                peer.close()
                continue
            threading.Thread(target=self._read, args=(peer,), name="springtide-read", daemon=True).start()

    def _admit_unauthenticated(self, peer: _Peer) -> bool:
        """Admit a peer until it authenticates; over the limit the oldest is dropped: gateways authenticate at once."""
        with self._lock:
            oldest = next(iter(self._unauthenticated)) if len(self._unauthenticated) >= _MAX_UNAUTHENTICATED else None
            if oldest is not None:
                del self._unauthenticated[oldest]
            self._unauthenticated[peer] = None
        if oldest is not None:
            # The thread that reads from the connection closes it.
            oldest.hang_up()
        return True

    def _admit(self, peer: _Peer) -> bool:
        with self._lock:
            self._unauthenticated.pop(peer, None)
            if len(self._peers) >= MAX_CONNECTIONS:
                return False
            self._peers.add(peer)
            return True

    def _read(self, peer: _Peer) -> None:
        reader: FrameDecoder[Question] = FrameDecoder(Question, MAX_FRAME_BYTES)
        try:
            welcome = self._authenticate(peer, reader) if self._listener.token else self._welcome
            peer.send_bytes(welcome)
            if self._is_draining:
                peer.send(Pong(nonce=0, is_draining=True))
            while data := peer.connection.recv(_READ_BYTES):
                for question in reader.feed(data):
                    self._take(peer, question)
        except (OSError, BackendError) as error:
            _LOG.info("a connection ended: %s", error)
        finally:
            with self._lock:
                self._unauthenticated.pop(peer, None)
                self._peers.discard(peer)
            peer.close()

    def _authenticate(self, peer: _Peer, reader: FrameDecoder[Question]) -> bytes:
        """Authenticate a peer and return its Welcome. Raises BackendError or OSError if it cannot prove the secret."""
        challenge = new_nonce()
        peer.send_bytes(encode_frame(Challenge(nonce=challenge)))
        reader.max_frame_bytes = MAX_GREETING_BYTES
        end_s = time.monotonic() + _GREETING_S
        questions: list[Question] = []
        while not questions:
            peer.connection.settimeout(max(0.001, end_s - time.monotonic()))
            data = peer.connection.recv(MAX_GREETING_BYTES)
            if not data:
                raise BackendError("it hung up before it had proved anything")
            questions = reader.feed(data)
        greet = questions[0]
        if len(questions) > 1 or not isinstance(greet, Greet):
            raise BackendError("it asked for something before it had proved anything")
        if not is_proof(greet.proof, gateway_proof(self._listener.token, self._replica_id, challenge, greet.nonce)):
            raise BackendError("it does not know the secret of this service's gateway")
        if not self._admit(peer):
            raise BackendError(f"more than {MAX_CONNECTIONS} gateways at a time")
        peer.connection.settimeout(None)
        reader.max_frame_bytes = MAX_FRAME_BYTES
        proof = replica_proof(self._listener.token, self._replica_id, challenge, greet.nonce)
        return encode_frame(Welcome(replica_id=self._replica_id, schema=self._model.schema, proof=proof))

    def _take(self, peer: _Peer, question: Question) -> None:
        with self._lock:
            is_draining, num_outstanding = self._is_draining, self._num_outstanding
            if isinstance(question, Predict) and num_outstanding >= _MAX_OUTSTANDING:
                raise BackendError(f"more than {_MAX_OUTSTANDING} batches at a time")
            if isinstance(question, Predict) and not is_draining:
                # Under the lock, so that accepted batches are queued before the sentinel that ends `run`.
                self._num_outstanding += 1
                self._batches.put((peer, question))
                self._model.set_queue_length(num_outstanding)
                return
        if isinstance(question, Ping):
            peer.send(Pong(nonce=question.nonce, num_outstanding=num_outstanding, is_draining=is_draining))
        elif isinstance(question, Predict):
            peer.send(Draining(batch_id=question.batch_id))
        else:
            raise BackendError("it proved itself twice, or unasked")


class _Peer:
    """One connection; frames are sent atomically, from any thread."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._lock = threading.Lock()
        seconds = int(_SEND_TIMEOUT_S)
        timeout = seconds.to_bytes(8, sys.byteorder) + bytes(8)
        # Only sending has a timeout: a gateway that does not read must not block the replica.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, reply: Reply) -> None:
        """Send a reply; closes the connection if that fails. Outcomes too large for a frame become errors."""
        try:
            frame = encode_frame(reply)
        except BackendError as error:
            assert isinstance(reply, Answered)
            outcomes = tuple(BatchOutcome("error", str(error).encode()) for _ in reply.outcomes)
            frame = encode_frame(Answered(batch_id=reply.batch_id, outcomes=outcomes, predict_s=reply.predict_s))
        self.send_bytes(frame)

    def send_bytes(self, frame: bytes) -> None:
        try:
            with self._lock:
                self.connection.sendall(frame)
        except OSError as error:
            _LOG.info("an answer could not be sent: %s", error)
            self.close()

    def hang_up(self) -> None:
        """Shut the connection down; the thread that reads from it then closes it."""
        try:
            self.connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self) -> None:
        """Close the connection; the reading thread then ends."""
        _shut(self.connection)


def _shut(sock: socket.socket) -> None:
    try:
        # Closing alone does not wake a thread that is blocked in accept or recv.
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    sock.close()
