"""The server of a serving replica: it accepts gateways' connections, queues their batches and calls and answers them.

Each connection has a reading thread, so that pings are answered while a prediction runs. A drain answers every accepted
batch and call. Code that does not end when its time is over is reported, so that the replica is replaced.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from springtide.core.errors import BackendError
from springtide.core.wire.workers import FrameDecoder
from springtide.core.workload import ReplicaId
from springtide.runtime.serving.calls import AsyncCall, CallAnswerer, OpenCall, answered, answered_async
from springtide.runtime.serving.identity import CALL, IDENTITY, CallScope
from springtide.runtime.serving.listeners import MAX_CONNECTIONS, ReplicaListener
from springtide.serving.frames import (
    MAX_FRAME_BYTES,
    MAX_GREETING_BYTES,
    Answered,
    BatchOutcome,
    Cancel,
    Challenge,
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
_WATCH_S = 0.25
_WORK = (Predict, Open)
_OF_CALLS = (Credit, Cancel, Feed)


class Answerer(CallAnswerer, Protocol):
    """What a server needs of a model; as many threads call `answer` as its schema has concurrency.

    `loop` is where its async code works; None if `predict` is not async.
    """

    schema: ServiceSchema
    loop: asyncio.AbstractEventLoop | None

    def answer(self, calls: Sequence[bytes]) -> tuple[BatchOutcome, ...]:
        """Return one outcome per call."""
        ...

    def close(self) -> None:
        """End what async code has begun; its loop runs no more."""
        ...

    def set_queue_length(self, num_batches: int) -> None:
        """Report how many batches wait for the current one to end. Called by several threads."""
        ...


@runtime_checkable
class Mortal(Protocol):
    """A model that can end by itself."""

    def watch(self, on_end: Callable[[str], None]) -> None:
        """Call `on_end` on another thread, with a sentence, when it has ended although nothing asked it to."""
        ...


class ReplicaServer:
    """Queues batches and calls for the thread that calls `run`, and others beside it if it works on several at a time.

    `drain` and `address` may be used from any thread.
    """

    def __init__(self, replica_id: ReplicaId, model: Answerer, listener: ReplicaListener) -> None:
        self._model = model
        self._replica_id = replica_id
        self._welcome = encode_frame(Welcome(replica_id=replica_id, schema=model.schema, takes_identity=True))
        self._batches: queue.SimpleQueue[tuple[_Peer, Predict | OpenCall] | None] = queue.SimpleQueue()
        self._calls: dict[tuple[_Peer, int], OpenCall] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_drained = asyncio.Event()
        # When each batch that is worked on should have ended, by the thread that works on it.
        self._limits_s: dict[int, float] = {}
        self._grace_s = math.inf
        self._max_outstanding = max(_MAX_OUTSTANDING, 2 * model.schema.concurrency)
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

    def run(self, *, grace_s: float = math.inf, on_stuck: Callable[[str], None] = lambda why: None) -> None:
        """Answer batches and calls until `drain` is called and every one accepted before it is answered.

        `on_stuck` is called on another thread, with a sentence, if the user's code works on a batch for longer than
        its requests allow and `grace_s`, or on a call for `grace_s` after it was cancelled. The server drains by then.
        It is called too, at once, when what answers has ended by itself.
        """
        self._grace_s = grace_s
        threading.Thread(target=self._watch, args=(on_stuck,), name="springtide-watch", daemon=True).start()
        if isinstance(self._model, Mortal):
            self._model.watch(on_stuck)
        if self._model.loop is not None:
            self._model.loop.run_until_complete(self._is_drained.wait())
            self._model.close()
            return
        others = [
            threading.Thread(target=self._work, name=f"springtide-predict-{number}", daemon=True)
            for number in range(1, self._model.schema.concurrency)
        ]
        for thread in others:
            thread.start()
        self._work()
        for thread in others:
            thread.join()

    def _work(self) -> None:
        while (entry := self._batches.get()) is not None:
            peer, question = entry
            self._model.set_queue_length(max(0, self._num_outstanding - self._model.schema.concurrency))
            if isinstance(question, OpenCall):
                answered(question, self._model)
                continue
            thread_id = threading.get_ident()
            self._limits_s[thread_id] = time.monotonic() + (question.timeout_s or math.inf) + self._grace_s
            CALL.set(CallScope(question.origin, question.timeout_s))
            started_s = time.perf_counter()
            outcomes = self._model.answer(question.calls)
            took_s = time.perf_counter() - started_s
            del self._limits_s[thread_id]
            # Before the answer is sent: a client that has it must not see the batch counted as outstanding.
            with self._lock:
                self._num_outstanding -= 1
            peer.send(Answered(batch_id=question.batch_id, outcomes=outcomes, predict_s=took_s))
        # The threads end one after another.
        self._batches.put(None)

    def _watch(self, on_stuck: Callable[[str], None]) -> None:
        """Report code that does not end in time, once others have been answered or had as long."""
        while not (why := self._stuck()[1]):
            time.sleep(_WATCH_S)
        self.drain()
        until_s = time.monotonic() + self._grace_s
        while self._num_outstanding > self._stuck()[0] and time.monotonic() < until_s:
            time.sleep(_WATCH_S)
        if self._stuck()[0]:
            on_stuck(why)

    def _stuck(self) -> tuple[int, str]:
        """How many batches and calls should have ended by now, and a sentence about one of them."""
        now_s = time.monotonic()
        with self._lock:
            cancelled_s = [call.cancelled_at_s for call in self._calls.values() if call.cancelled_at_s is not None]
        num_late = sum(limit_s < now_s for limit_s in list(self._limits_s.values()))
        num_cancelled = sum(at_s + self._grace_s < now_s for at_s in cancelled_s)
        why = ""
        if num_cancelled:
            why = f"predict did not end within {self._grace_s:g} s after its call was cancelled"
        elif num_late:
            why = f"predict worked for {self._grace_s:g} s beyond what its requests allow, and cannot be stopped"
        return num_late + num_cancelled, why

    def drain(self) -> None:
        """Refuse new batches and calls; `run` returns once all accepted ones are answered."""
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
        self._end_loop_if_drained()

    def _end_loop_if_drained(self) -> None:
        loop = self._model.loop
        if loop is not None and self._is_draining and not self._num_outstanding and not loop.is_closed():
            loop.call_soon_threadsafe(self._is_drained.set)

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
                calls = [call for (owner, _), call in self._calls.items() if owner is peer]
            for call in calls:
                # There is nothing to send the answer to.
                call.cancel()
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
        schema = self._model.schema
        return encode_frame(Welcome(replica_id=self._replica_id, schema=schema, proof=proof, takes_identity=True))

    def _take(self, peer: _Peer, question: Question) -> None:
        if isinstance(question, _OF_CALLS):
            self._tell(peer, question)
            return
        if isinstance(question, Identify):
            IDENTITY.tell(question)
            return
        with self._lock:
            is_draining, num_outstanding = self._is_draining, self._num_outstanding
            if isinstance(question, _WORK):
                if num_outstanding >= self._max_outstanding:
                    raise BackendError(f"more than {self._max_outstanding} batches at a time")
                if not is_draining:
                    # Under the lock, so that accepted batches are queued before the sentinel that ends `run`.
                    self._num_outstanding += 1
                    self._accept_work(peer, question)
                    self._model.set_queue_length(num_outstanding)
                    return
        if isinstance(question, Ping):
            peer.send(Pong(nonce=question.nonce, num_outstanding=num_outstanding, is_draining=is_draining))
        elif isinstance(question, _WORK):
            peer.send(Draining(batch_id=question.batch_id))
        else:
            raise BackendError("it proved itself twice, or unasked")

    def _accept_work(self, peer: _Peer, question: Predict | Open) -> None:
        """Queue a batch or a call. The caller holds the lock. Raises BackendError for what the model does not take."""
        if isinstance(question, Predict) != (self._model.schema.kind == "plain"):
            raise BackendError(f"{self._model.schema.kind} code is not asked by a {type(question).__name__}")
        if isinstance(question, Predict):
            self._batches.put((peer, question))
            return

        def send(reply: Reply) -> None:
            if isinstance(reply, End):
                self._forget(peer, reply.batch_id)
            peer.send(reply)

        loop = self._model.loop
        if loop is None:
            call = OpenCall(question, send)
            self._batches.put((peer, call))
        else:
            call = AsyncCall(question, send, loop)
            loop.call_soon_threadsafe(self._start_task, call)
        self._calls[peer, question.batch_id] = call

    def _start_task(self, call: AsyncCall) -> None:
        call.task = asyncio.get_running_loop().create_task(answered_async(call, self._model))
        self._tasks.add(call.task)
        call.task.add_done_callback(self._tasks.discard)

    def _forget(self, peer: _Peer, batch_id: int) -> None:
        """Before the end of a call is sent: a client that has it must not see the call counted as outstanding."""
        with self._lock:
            self._num_outstanding -= 1
            self._calls.pop((peer, batch_id), None)
        self._end_loop_if_drained()

    def _tell(self, peer: _Peer, told: Credit | Cancel | Feed) -> None:
        with self._lock:
            call = self._calls.get((peer, told.batch_id))
        if call is None:
            # It has ended meanwhile.
            return
        if isinstance(told, Cancel):
            call.cancel()
        elif isinstance(told, Credit):
            call.add_credit(told.num_bytes)
        elif isinstance(call, AsyncCall):
            call.feed(told.body)


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
            told = BatchOutcome("error", str(error).encode())
            if isinstance(reply, End):
                frame = encode_frame(End(batch_id=reply.batch_id, outcome=told, predict_s=reply.predict_s))
            else:
                assert isinstance(reply, Answered)
                outcomes = tuple(told for _ in reply.outcomes)
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
