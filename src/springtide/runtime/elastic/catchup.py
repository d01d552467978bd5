"""Copying the training state to a joiner while training goes on, so that a grow pauses the job only briefly.

A member of the current group (the source) sends buckets of parameters with their optimizer state, each as of a step
boundary. For every bucket sent it then forwards each step's reduced gradients, and the joiner applies the same
optimizer steps. Once the joiner holds all buckets it is exactly in step, and the switch moves no parameters at all.
This works only for optimizers that update every parameter independently of the others.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from springtide.core.decoding import convert
from springtide.core.errors import CollectiveError, PeerLost
from springtide.core.workload import ReplicaId
from springtide.runtime.elastic.group import wait_for_keys
from springtide.runtime.elastic.handshake import Entrance, prove
from springtide.runtime.elastic.membership import Formation
from springtide.runtime.elastic.reduce import BufferPool
from springtide.runtime.elastic.step_log import StepMemory
from springtide.runtime.elastic.step_vector import StepVector
from springtide.runtime.elastic.training_cursor import Cursor
from springtide.runtime.elastic.transfer import receive_header, receive_tensor, send_message
from springtide.runtime.models.named_tensors import TrainingState

_UNIX = "unix:"
_TCP = "tcp:"
_ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.ASGD,
    torch.optim.Rprop,
)
_BUCKET_BYTES = 16 << 20
_MAX_BUCKETS = 8
_MAX_LAG_STEPS = 2
_PATIENCE_STEPS = 8
_BLOCKED_LIMIT_S = 10.0
_POLL_S = 0.02
_ACK = struct.Struct(">q")
_TOKEN_BYTES = 32
_BACKLOG = 128


def listen_for_stream(host: str) -> tuple[socket.socket, str]:
    """A listening socket for one other worker, and the address to connect to. Raises OSError.

    `host` is the address at which other machines reach this worker; empty if all members are on this machine.
    """
    if host:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        return listener, f"{_TCP}{host}:{listener.getsockname()[1]}"
    # Unlike a path, an abstract name has no length limit that matters and leaves no file to clean up.
    name = f"springtide-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0{name}")
    listener.listen(_BACKLOG)
    return listener, _UNIX + name


def connect_stream(address: str, timeout_s: float) -> socket.socket:
    """Connect to what `listen_for_stream` has named. Raises OSError, ValueError for what is no such address."""
    if address.startswith(_UNIX):
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link.settimeout(timeout_s)
        try:
            link.connect(f"\0{address.removeprefix(_UNIX)}")
        except OSError:
            link.close()
            raise
        return link
    if not address.startswith(_TCP):
        raise ValueError(f"{address!r} is no address of a stream")
    host, _, port = address.removeprefix(_TCP).rpartition(":")
    link = socket.create_connection((host, int(port)), timeout=timeout_s)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return link


def supports_catchup(optimizers: Iterable[torch.optim.Optimizer]) -> bool:
    """Whether a step on some of the parameters does to them exactly what a step on all would."""
    return not any(
        type(optimizer) not in _ELEMENTWISE
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        for optimizer in optimizers
    )


class Lease:
    """A reference-counted vector of a pool: the last holder's `release` returns it to the pool."""

    def __init__(self, vector: torch.Tensor, pool: BufferPool) -> None:
        self.vector = vector
        self._pool = pool
        self._num_holders = 1
        self._lock = threading.Lock()

    def retain(self) -> None:
        with self._lock:
            self._num_holders += 1

    def release(self) -> None:
        with self._lock:
            self._num_holders -= 1
            is_free = self._num_holders == 0
        if is_free:
            self._pool.give(self.vector)


@dataclass(slots=True)
class _Message:
    header: dict[str, Any]
    tensors: list[torch.Tensor]
    lease: Lease | None = None


@dataclass(slots=True)
class _Bucket:
    names: list[str] = field(default_factory=list)
    num_bytes: int = 0


def _buckets(state: TrainingState, payload: StepVector) -> list[_Bucket]:
    """Group all parameters into buckets: those with gradients first, in the order of the step vector."""
    trained = set(payload.names)
    names = payload.names + [name for name in state.parameters if name not in trained]
    sizes = {name: state.parameters[name].numel() * state.parameters[name].element_size() for name in names}
    limit = max(_BUCKET_BYTES, sum(sizes.values()) // _MAX_BUCKETS)
    buckets = [_Bucket()]
    for name in names:
        if buckets[-1].names and buckets[-1].num_bytes + sizes[name] > limit:
            buckets.append(_Bucket())
        buckets[-1].names.append(name)
        buckets[-1].num_bytes += sizes[name]
    return buckets


class CatchupSource:
    """Sends the state to one joiner. The training thread queues messages; a thread of its own sends them."""

    def __init__(self, state: TrainingState, payload: StepVector, formation: Formation, rank: int) -> None:
        """Start sending to the joiner that will have `rank` in the formation's group."""
        self._state = state
        self._payload = payload
        self._formation = formation
        self._rank = rank
        self._is_wanted = formation.is_wanted
        self._queue: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
        # At most one message is queued: beyond that, training waits for the joiner instead of using more memory.
        self._slots = threading.Semaphore(1)
        self._buckets = _buckets(state, payload)
        self._num_sent = 0
        self._num_held = 0
        self._num_checks = 0
        self._acknowledged_step = -1
        self._is_connected = False
        self.has_failed = False
        self._thread = threading.Thread(target=self._run, name="springtide-catchup", daemon=True)
        self._thread.start()

    def before_update(self, step: int, lease: Lease, has_gradient: list[bool], factor: float = 1.0) -> None:
        """Queue the gradients of `step` (from 1) for the parameters already sent.

        `factor` is what the step multiplies the learning rates by.
        """
        if self._is_connected and not self.has_failed and self._num_sent:
            groups, group_tensors = self._state.pack_groups()
            end = self._payload.ends[self._num_held - 1] if self._num_held else 0
            header = {"kind": "step", "step": step, "groups": groups, "held": self._num_held, "grads": has_gradient}
            header["factor"] = factor
            lease.retain()
            tensors = [tensor.clone() for _, tensor in sorted(group_tensors.items())]
            self._put(_Message(header, [*tensors, lease.vector[:end]], lease))

    def after_update(self, step: int) -> None:
        """Queue the next bucket, as of the committed step `step`."""
        if self._is_connected and not self.has_failed and self._num_sent < len(self._buckets):
            names = self._buckets[self._num_sent].names
            packed, tensors_by_name = self._state.pack_optimizer([n for n in names if n in self._state.optimised])
            tensors = [self._state.parameters[name].detach().clone() for name in names]
            tensors += [tensor.clone() for _, tensor in sorted(tensors_by_name.items())]
            self._put(_Message({"kind": "bucket", "step": step, "names": names, "states": packed}, tensors))
            self._num_sent += 1
            self._num_held += sum(1 for name in names if self._state.parameters[name].requires_grad)

    def is_in_step(self, step: int) -> bool:
        """Whether the joiner holds all buckets and has applied all of the `step` committed steps.

        Acknowledgements lag behind: if steps are shorter than a round trip, the joiner never appears exactly in step.
        So after some calls a lag of two steps is accepted; the others then wait for it in their first common step.
        """
        if not self._is_connected or self.has_failed or self._num_sent < len(self._buckets):
            return False
        self._num_checks += 1
        max_lag_steps = _MAX_LAG_STEPS if self._num_checks > _PATIENCE_STEPS else 0
        return self._acknowledged_step >= step - max_lag_steps

    def switch(self, cursor: Cursor, steps: Sequence[Mapping[str, Any]]) -> None:
        """Queue the last message: `cursor`, the model's buffers, prepared objects, the newest lines of the step log."""
        groups, group_tensors = self._state.pack_groups()
        objects, object_tensors = self._state.objects.pack()
        tensors = [tensor.clone() for _, tensor in sorted(group_tensors.items())]
        tensors += [buffer.clone() for _, buffer in sorted(self._state.buffers().items())]
        tensors += [tensor.clone() for _, tensor in sorted(object_tensors.items())]
        # Does not wait for a slot: training is paused during the switch.
        header = {"kind": "switch", "cursor": msgspec.to_builtins(cursor), "groups": groups, "steps": list(steps)}
        header["objects"] = objects
        self._queue.put(_Message(header, tensors))
        self.close()

    def close(self) -> None:
        """Send what is queued, then end the stream."""
        self._queue.put(None)

    def _put(self, message: _Message) -> None:
        """Queue a message, waiting for the previous one to be sent; after a time limit the stream has failed."""
        if not self.has_failed and self._slots.acquire(timeout=_BLOCKED_LIMIT_S):
            self._queue.put(message)
            return
        self.has_failed = True
        if message.lease is not None:
            message.lease.release()

    def _run(self) -> None:
        try:
            # Not on the training thread: a rendezvous store on another machine may answer slowly.
            store, key = self._formation.store(), f"catchup/{self._rank}"
            wait_for_keys(store, [key], lambda: self._is_wanted() and not self.has_failed)
            address, _, token = store.get(key).decode().rpartition("#")
            with self._open(address, token) as link:
                threading.Thread(target=self._read_acknowledgements, args=(link.dup(),), daemon=True).start()
                self._is_connected = True
                try:
                    self._send_all(link)
                finally:
                    # Closing is not enough: the acknowledgement thread's duplicate keeps the connection open.
                    link.shutdown(socket.SHUT_WR)
        except (OSError, CollectiveError, RuntimeError, ValueError):
            # Without the stream the joiner gets the whole state at the switch instead.
            self.has_failed = True
        finally:
            self._drain()

    def _open(self, address: str, token: str) -> socket.socket:
        """Connect to the joiner, again if others take its places meanwhile. Raises OSError."""
        end_s = time.monotonic() + _BLOCKED_LIMIT_S
        key = self._formation.order.key
        while True:
            link = None
            try:
                link = connect_stream(address, _BLOCKED_LIMIT_S)
                if key:
                    prove(link, key + token)
                else:
                    link.sendall(bytes.fromhex(token))
                link.settimeout(_BLOCKED_LIMIT_S)
                return link
            except OSError as error:
                if link is not None:
                    link.close()
                is_gone = isinstance(error, ConnectionRefusedError)
                if is_gone or time.monotonic() > end_s or not self._is_wanted() or self.has_failed:
                    raise
            time.sleep(_POLL_S)

    def _send_all(self, link: socket.socket) -> None:
        while self._is_wanted():
            try:
                message = self._queue.get(timeout=_POLL_S * 5)
            except queue.Empty:
                continue
            if message is None:
                return
            try:
                send_message(link, message.header, message.tensors)
            finally:
                if message.lease is not None:
                    message.lease.release()
                self._slots.release()

    def _drain(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                message = self._queue.get_nowait()
                if message is not None and message.lease is not None:
                    message.lease.release()

    def _read_acknowledgements(self, link: socket.socket) -> None:
        with link, contextlib.suppress(OSError):
            data = b""
            link.settimeout(None)
            while part := link.recv(1024):
                data += part
                while len(data) >= _ACK.size:
                    self._acknowledged_step = _ACK.unpack_from(data)[0]
                    data = data[_ACK.size :]


class CatchupSources:
    """The streams from this member to joiners of the group that is being formed. For the training thread only."""

    def __init__(self) -> None:
        self._sources: list[CatchupSource] = []
        self._generation = 0

    def open(self, state: TrainingState, payload: StepVector, pending: Formation, joiners: Sequence[ReplicaId]) -> None:
        """Start a stream to each joiner that this member serves; does nothing if that was done for this formation."""
        if self._generation == pending.generation:
            return
        self.close()
        self._generation = pending.generation
        members = pending.order.members
        survivors = [rank for rank, name in enumerate(members) if name not in joiners]
        for index, name in enumerate(joiners):
            if survivors[index % len(survivors)] == pending.rank:
                self._sources.append(CatchupSource(state, payload, pending, members.index(name)))

    @property
    def is_open(self) -> bool:
        return bool(self._sources)

    def readiness(self, step: int) -> tuple[bool, bool]:
        """Whether every stream is in step or has failed, and whether any has failed."""
        is_settled = all(source.has_failed or source.is_in_step(step) for source in self._sources)
        return is_settled, any(source.has_failed for source in self._sources)

    def before_update(self, step: int, lease: Lease, has_gradient: list[bool], factor: float = 1.0) -> None:
        """Forward a step's gradients to every joiner; see CatchupSource.before_update."""
        for source in self._sources:
            source.before_update(step, lease, has_gradient, factor)

    def after_update(self, step: int) -> None:
        for source in self._sources:
            source.after_update(step)

    def switch(self, cursor: Cursor, step_log: StepMemory) -> None:
        """Complete every stream with `cursor` and the newest lines of the step log."""
        steps = step_log.newest() if self._sources else []
        for source in self._sources:
            source.switch(cursor, steps)

    def close(self) -> None:
        for source in self._sources:
            source.close()
        self._sources = []


class CatchupReceiver:
    """The joiner's end of the stream. Create it before the group is formed, so that the source finds its address."""

    def __init__(
        self,
        state: TrainingState,
        payload: StepVector,
        step_log: StepMemory,
        formation: Formation,
    ) -> None:
        """Listen and publish the address. Raises CollectiveError if the rendezvous store cannot be reached."""
        self._state = state
        self._payload = payload
        self._step_log = step_log
        self._link: socket.socket | None = None
        token = secrets.token_bytes(_TOKEN_BYTES)
        listener, address = listen_for_stream(formation.listen_host)
        key = formation.order.key
        # Where members know no key they are on one machine: the token is then in a directory of this account alone.
        self._entrance = Entrance(listener, key=key + token.hex()) if key else Entrance(listener, token=token)
        try:
            self._store = formation.store()
            self._store.set(f"catchup/{formation.rank}", f"{address}#{token.hex()}")
        except (RuntimeError, PeerLost) as error:
            self._entrance.close()
            raise PeerLost(f"the meeting place is gone: {error}") from error

    def receive(self, is_wanted: Callable[[], bool]) -> Cursor | None:
        """Apply the stream up to the switch and return the cursor; None if the state must be synced instead."""
        try:
            link = self._accept(is_wanted)
            if link is None:
                return None
            with link:
                while True:
                    header = receive_header(link)
                    if header["kind"] == "switch":
                        self._take_switch(link, header)
                        return convert(header["cursor"], Cursor)
                    (self._take_bucket if header["kind"] == "bucket" else self._take_step)(link, header)
                    link.sendall(_ACK.pack(header["step"]))
        except (PeerLost, OSError, ValueError, KeyError, TypeError, RuntimeError):
            return None
        finally:
            self._entrance.close()

    def abort(self) -> None:
        """End `receive` from another thread."""
        link = self._link
        if link is not None:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def _accept(self, is_wanted: Callable[[], bool]) -> socket.socket | None:
        while is_wanted():
            if self._store.check(["sync"]):
                return None
            link = self._entrance.admit(_POLL_S)
            if link is not None:
                self._link = link
                return link
        return None

    def _take_bucket(self, link: socket.socket, header: dict[str, Any]) -> None:
        names = header["names"]
        for name in names:
            receive_tensor(link, self._state.parameters[name])
        optimised = [name for name in names if name in self._state.optimised]
        tensors = self._state.unpack_optimizer(optimised, header["states"])
        for _, tensor in sorted(tensors.items()):
            receive_tensor(link, tensor)

    def _take_groups(self, link: socket.socket, header: dict[str, Any]) -> None:
        for _, tensor in sorted(self._state.unpack_groups(header["groups"]).items()):
            receive_tensor(link, tensor)

    def _take_step(self, link: socket.socket, header: dict[str, Any]) -> None:
        self._take_groups(link, header)
        vector = self._payload.pool.take()
        held = header["held"]
        receive_tensor(link, vector[: self._payload.ends[held - 1] if held else 0])
        self._payload.attach(vector, header["grads"], held)
        self._state.update(float(header["factor"]))
        self._payload.detach()
        self._payload.pool.give(vector)

    def _take_switch(self, link: socket.socket, header: dict[str, Any]) -> None:
        self._take_groups(link, header)
        for _, buffer in sorted(self._state.buffers().items()):
            receive_tensor(link, buffer)
        tensors, load_objects = self._state.objects.unpack(header.get("objects", {}))
        for _, tensor in sorted(tensors.items()):
            receive_tensor(link, tensor)
        load_objects()
        self._step_log.take_over(header["steps"])
