"""A serving replica: loads the user's class and answers batches and calls until the platform stops it.

The main thread runs user code, with others only where a service's `concurrency` asks for them; listening and reading
are in listeners.py and server.py, calls of async code and of generators in calls.py. This module does not
import torch; the user's file imports what its model needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from springtide.core.errors import InvalidRequest, SpringtideError
from springtide.core.wire.shares import SlotWriter
from springtide.core.wire.workers import Failed, FenceOrder, Left, Order, Preempt, Ready, Stop, WorkerSpec
from springtide.core.workload import Entrypoint, InferenceService
from springtide.runtime.process.control_link import ControlLink
from springtide.runtime.process.device_seen import device_seen
from springtide.runtime.process.entry import describe_error, load_object
from springtide.runtime.process.share_slot import open_slot
from springtide.runtime.serving.asgi import ServedApplication
from springtide.runtime.serving.calls import InvalidCall
from springtide.runtime.serving.folder import entered_copy
from springtide.runtime.serving.identity import IDENTITY
from springtide.runtime.serving.listeners import HandshakeGuard, ReplicaListener, TcpListener, UnixListener
from springtide.runtime.serving.requests import NUM_READY, PROBE_S, RequestAnswerer, RunningApplication
from springtide.runtime.serving.server import Answerer, ReplicaServer
from springtide.serving.applications import AsgiService, ProcessService, WebService
from springtide.serving.frames import MAX_FRAME_BYTES, BatchOutcome
from springtide.serving.schema import ServiceSchema, call_decoder, derive_schema

_LOG = logging.getLogger("springtide.replica")
_ACKNOWLEDGE_S = 5.0
_EXIT_MARGIN_FRACTION = 0.1


def load_served_class(entrypoint: Entrypoint) -> type:
    """Import the user's file and return the class to serve. Raises InvalidRequest, and errors of the user's file."""
    if entrypoint.kind != "class":
        raise InvalidRequest(f"a service needs a class to serve, {entrypoint.object_name!r} is a {entrypoint.kind}")
    found = load_object(entrypoint, f"springtide_served_{os.getpid()}")
    served = getattr(found, "cls", found)
    if not isinstance(served, type):
        raise InvalidRequest(
            f"{entrypoint.object_name!r} in {Path(entrypoint.source_path).name} is not a class to serve"
        )
    return served


def _wait_until(ready: Callable[[], object]) -> None:
    """Return once `ready` was true twice in a row; the time in which a replica has to start limits how long that takes.

    Whatever it raises ends the start.
    """
    num_true, is_told = 0, False
    while num_true < NUM_READY:
        if ready():
            num_true += 1
            continue
        num_true = 0
        if not is_told:
            _LOG.warning("ready() is false; this replica gets no requests until it is true")
            is_told = True
        time.sleep(PROBE_S)


class ServedUserModel:
    """The user's object with its schema. At most `concurrency` threads may call `answer` at a time.

    `slot` tells the share daemon when the replica predicts; None if it holds the whole device.
    """

    def __init__(
        self,
        served: type,
        max_batch_size: int,
        params: dict[str, str],
        slot: SlotWriter | None = None,
        concurrency: int | None = None,
    ) -> None:
        self.schema: ServiceSchema = derive_schema(served, concurrency)
        is_async = self.schema.kind in ("async", "async_generator")
        self.loop = asyncio.new_event_loop() if is_async else None
        self._decoder = call_decoder(served)
        self._list_names = [parameter.name for parameter in self.schema.parameters if parameter.is_list]
        self._max_batch_size = max_batch_size
        self._slot = slot
        self._slot_lock = threading.Lock()
        self._num_working = 0
        self._instance = served()
        if params and not hasattr(self._instance, "params"):
            self._instance.params = dict(params)
        load = getattr(self._instance, "load", None)
        if callable(load):
            self._awaited(load())
        ready = getattr(self._instance, "ready", None)
        if callable(ready):
            _wait_until(lambda: self._awaited(ready()))

    def _awaited(self, value: Any) -> Any:
        """The value, awaited on the loop of `predict`, because what it opens there belongs to it."""
        if inspect.iscoroutine(value):
            return (self.loop or asyncio.new_event_loop()).run_until_complete(value)
        return value

    def start(self, call: bytes) -> Any:
        """The generator or the coroutine of a call's `predict`. Raises InvalidCall."""
        try:
            arguments = self._arguments(call)
        except (ValueError, RecursionError) as error:
            raise InvalidCall(str(error)) from None
        return self._instance.predict(**arguments)

    def encoded(self, value: Any) -> bytes:
        """The JSON of a value. Raises what msgspec raises for one that has none."""
        return _ENCODER.encode(_plain(value))

    def outcome_of(self, value: Any) -> BatchOutcome:
        """The outcome with a value as JSON."""
        return _encoded(_plain(value))

    def failure(self, error: BaseException) -> BatchOutcome:
        """The outcome of an error of the user's code, which it logs."""
        return _failure(error)

    def _arguments(self, call: bytes) -> dict[str, Any]:
        decoded = msgspec.structs.asdict(self._decoder.decode(call))
        return {name: value for name, value in decoded.items() if value is not msgspec.UNSET}

    def answer(self, calls: Sequence[bytes]) -> tuple[BatchOutcome, ...]:
        """Return one outcome per call (the JSON arguments of `predict`), in order.

        If the class takes lists, the calls are predicted together as one batch.
        """
        outcomes: list[BatchOutcome | None] = [None] * len(calls)
        arguments: dict[int, dict[str, Any]] = {}
        for index, call in enumerate(calls):
            try:
                arguments[index] = self._arguments(call)
            except (ValueError, RecursionError) as error:
                outcomes[index] = BatchOutcome("invalid", str(error).encode())
        if self.schema.is_batchable:
            predicted = self._predict_together(arguments)
        else:
            predicted = {index: self._predict_alone(given) for index, given in arguments.items()}
        for index, outcome in predicted.items():
            outcomes[index] = outcome
        return tuple(outcome for outcome in outcomes if outcome is not None)

    def _predict_together(self, arguments: dict[int, dict[str, Any]]) -> dict[int, BatchOutcome]:
        """Concatenate the lists, predict in chunks of at most `max_batch_size` items, and split the outputs by call."""
        if not arguments:
            return {}
        first = next(iter(arguments.values()))
        names = [name for name in self._list_names if name in first]
        fixed = {name: value for name, value in first.items() if name not in names}
        if any(
            {name: value for name, value in given.items() if name not in names} != fixed
            or any(name not in given or len(given[name]) != len(given[names[0]]) for name in names)
            for given in arguments.values()
        ):
            # The gateway does not mix such calls, but another client of the socket may.
            return {index: self._checked_alone(given, names) for index, given in arguments.items()}
        columns = {name: [item for given in arguments.values() for item in given[name]] for name in names}
        num_items = len(columns[names[0]])
        outputs: list[Any] = []
        try:
            for start in range(0, num_items, self._max_batch_size):
                chunk = {name: column[start : start + self._max_batch_size] for name, column in columns.items()}
                expected = min(self._max_batch_size, num_items - start)
                outputs += self._outputs_of_chunk({**chunk, **fixed}, expected)
        except _WrongLength as error:
            return {index: BatchOutcome("error", str(error).encode()) for index in arguments}
        except (Exception, SystemExit) as error:
            if len(arguments) == 1:
                return {index: _failure(error) for index in arguments}
            # One bad request must not fail the others of its batch, so each is predicted alone.
            return {index: self._predict_together({index: given})[index] for index, given in arguments.items()}
        answers: dict[int, BatchOutcome] = {}
        start = 0
        for index, given in arguments.items():
            end = start + len(given[names[0]])
            answers[index] = _encoded(outputs[start:end])
            start = end
        return answers

    def _checked_alone(self, given: dict[str, Any], names: list[str]) -> BatchOutcome:
        present = [name for name in self._list_names if name in given]
        if not present or len({len(given[name]) for name in present}) > 1:
            return BatchOutcome("invalid", b"the lists of one call must be equally long")
        return self._predict_together({0: given})[0]

    def _outputs_of_chunk(self, arguments: dict[str, Any], num_items: int) -> list[Any]:
        result = self._predict(arguments, num_items)
        if not isinstance(result, list | tuple):
            raise _WrongLength(f"predict must return a list with one output per item, it returned {_type_of(result)}")
        if len(result) != num_items:
            raise _WrongLength(f"predict got {num_items} items and returned {len(result)} outputs; return one for each")
        return list(result)

    def _predict(self, arguments: dict[str, Any], num_items: int) -> Any:
        """Run `predict` on one batch. Converting arrays to lists also waits for a device to finish its work."""
        if self._slot is None:
            return _plain(self._instance.predict(**arguments))
        self.began(num_items)
        is_done = False
        try:
            result = _plain(self._instance.predict(**arguments))
            is_done = True
        finally:
            self.ended(is_done=is_done)
        return result

    def began(self, num_items: int) -> None:
        """Report to the share daemon that `predict` works, if it did not do so already. Thread-safe."""
        if self._slot is None:
            return
        with self._slot_lock:
            self._num_working += 1
            if self._num_working == 1:
                self._slot.begin(num_items)

    def ended(self, *, is_done: bool) -> None:
        """Report that `predict` works no more, if this was the last call that it worked on. Thread-safe."""
        if self._slot is None:
            return
        with self._slot_lock:
            self._num_working -= 1
            if self._num_working == 0:
                self._slot.end() if is_done else self._slot.abandon()

    def close(self) -> None:
        """Does nothing: a class has no method that ends it."""

    def set_queue_length(self, num_batches: int) -> None:
        """Report how many batches wait for the current one to end. Thread-safe."""
        if self._slot is not None:
            self._slot.queued(num_batches)

    def _predict_alone(self, arguments: dict[str, Any]) -> BatchOutcome:
        try:
            result = self._predict(arguments, 1)
        except (Exception, SystemExit) as error:
            return _failure(error)
        return _encoded(result)


class _WrongLength(Exception):
    """What predict returned cannot be cut into one output per item."""


def _type_of(value: object) -> str:
    return f"a {type(value).__name__}"


def _plain(value: Any) -> Any:
    """Arrays and tensors as lists; other values unchanged."""
    tolist = getattr(value, "tolist", None)
    return tolist() if callable(tolist) else value


def _encode_hook(value: Any) -> Any:
    plain = _plain(value)
    if plain is value:
        raise TypeError(f"{_type_of(value)} cannot be written as JSON")
    return plain


_ENCODER = msgspec.json.Encoder(enc_hook=_encode_hook)


def _encoded(result: Any) -> BatchOutcome:
    """The outcome with `result` as JSON; NaN becomes null, because JSON has no NaN."""
    try:
        body = _ENCODER.encode(result)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        return BatchOutcome("error", f"what predict returned cannot be sent: {error}".encode())
    if len(body) > MAX_FRAME_BYTES // 4:
        return BatchOutcome(
            "error", f"predict returned {len(body)} bytes; return at most {MAX_FRAME_BYTES // 4}".encode()
        )
    return BatchOutcome("ok", body)


def _failure(error: BaseException) -> BatchOutcome:
    _LOG.error("predict failed", exc_info=error)
    sentence = " ".join(str(error).split())[:500]
    name = type(error).__name__
    # Python's MemoryError, numpy's _ArrayMemoryError, torch's OutOfMemoryError.
    is_out_of_memory = name.endswith("MemoryError")
    return BatchOutcome("error", f"{name}: {sentence}".encode("utf-8", "replace"), is_out_of_memory)


def run_replica(
    spec: WorkerSpec,
    link: ControlLink,
    *,
    guard: HandshakeGuard | None = None,
    on_serving: Callable[[ReplicaServer], None] = lambda server: None,
    terminate: Callable[[int], None] = os._exit,
) -> int:
    """Load the service's class, serve it, and return the exit code: 0 after a drain, 1 if the class does not load.

    The caller has started `link` and closes it. The replica listens at `guard`'s address, or at a private unix socket
    without one. When the model is loaded and the socket answers, `on_serving` is called with the server and Ready is
    reported. After a Stop order or SIGTERM, `terminate` ends the process within its grace even if user code hangs.
    """
    service = spec.workload
    assert isinstance(service, InferenceService), "run_replica is for services"
    stop = _Stopping(terminate)
    link.on_lease_expired = lambda: stop.begin(service.grace_s)
    link.on_order = stop.handle_order
    while not link.orders.empty():
        # Orders that arrived before the callback was set.
        stop.handle_order(link.orders.get())
    if threading.current_thread() is threading.main_thread():
        _call_at_sigterm(lambda: stop.begin(service.grace_s))
    try:
        with IDENTITY.of_replica(service.name, service.calls), contextlib.ExitStack() as kept:
            server = _load(spec, service, link, guard, kept)
            if server is None:
                return 1
            on_serving(server)
            return _serve(spec, link, stop, server)
    finally:
        stop.end()
        sys.stdout.flush()
        sys.stderr.flush()


def _call_at_sigterm(begin: Callable[[], None]) -> None:
    """Call `begin` on a thread of its own when SIGTERM arrives.

    A handler of Python runs on the main thread once that goes on, which may wait for the next batch: a signal that
    came a moment before, or on another thread, does not wake it. So the interpreter itself writes to a socket.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def wait() -> None:
        # Every signal with a handler of Python is written there, this one twice.
        while True:
            if signal.SIGTERM in reader.recv(64):
                begin()

    def tell(*_: object) -> None:
        # Code of the user may have put another socket in its place.
        with contextlib.suppress(BlockingIOError):
            writer.send(bytes([signal.SIGTERM]))

    def forget() -> None:
        # A process that the user's code forks ends by itself, and not this one.
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    threading.Thread(target=wait, name="springtide-sigterm", daemon=True).start()
    os.register_at_fork(after_in_child=forget)
    signal.signal(signal.SIGTERM, tell)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)


def _load(
    spec: WorkerSpec,
    service: InferenceService,
    link: ControlLink,
    guard: HandshakeGuard | None,
    kept: contextlib.ExitStack,
) -> ReplicaServer | None:
    """The server of the loaded model; None, after reporting the reason, if the model cannot be loaded.

    `kept` closes what has to stay for as long as it serves.
    """
    entrypoint = service.entrypoint
    try:
        entrypoint = kept.enter_context(entered_copy(spec))
        served = load_served_class(entrypoint)
        link.phases.ended("import")
        model: Answerer
        if issubclass(served, WebService):
            loop = asyncio.new_event_loop()
            model = RequestAnswerer(served, service.concurrency, loop, _application(served, service, loop))
        else:
            slot = open_slot(spec)
            model = ServedUserModel(served, service.max_batch_size, service.params, slot, service.concurrency)
        listener: ReplicaListener = TcpListener(guard) if guard else UnixListener(Path(spec.work_dir), spec.replica_id)
        return ReplicaServer(spec.replica_id, model, listener)
    except (Exception, SystemExit) as error:
        _LOG.error("the service %s does not load", service.name, exc_info=error)
        is_ours = isinstance(error, SpringtideError)
        sentence = str(error) if is_ours else describe_error(error, entrypoint.source_path)
        seq = link.send(Failed(generation=spec.generation, error=f"the service does not load: {sentence:.500}"))
        link.wait_acknowledged(seq, _ACKNOWLEDGE_S)
        return None


def _application(
    served: type[WebService], service: InferenceService, loop: asyncio.AbstractEventLoop
) -> RunningApplication:
    if issubclass(served, AsgiService):
        return ServedApplication(served, service.name, loop)
    assert issubclass(served, ProcessService), "there is no other kind"
    # Imported here, because only these need what speaks HTTP.
    from springtide.runtime.serving.processes.served import ServedProcess

    return ServedProcess(served, service.name, loop, derive_schema(served, service.concurrency).concurrency)


def _serve(spec: WorkerSpec, link: ControlLink, stop: _Stopping, server: ReplicaServer) -> int:
    try:
        stop.attach(server)
        link.update(is_ready=True, address=server.address)
        phases_s = link.phases.ended("load")
        link.send(
            Ready(
                address=server.address, phases_s=phases_s, device_seen=device_seen(spec.device_kind, spec.num_devices)
            )
        )
        server.run(grace_s=spec.workload.grace_s, on_stuck=lambda why: _give_up(link, spec.generation, why, stop))
        seq = link.send(Left(generation=spec.generation))
        link.wait_acknowledged(seq, min(_ACKNOWLEDGE_S, stop.left_s()))
        return 0
    finally:
        server.close()


def _give_up(link: ControlLink, generation: int, why: str, stop: _Stopping) -> None:
    """Report why the replica has to be replaced, and end the process."""
    _LOG.error("%s; the replica ends", why)
    seq = link.send(Failed(generation=generation, error=why))
    link.wait_acknowledged(seq, _ACKNOWLEDGE_S)
    stop.terminate(1)


class _Stopping:
    """Drains the server on a Stop order and ends the process at the end of its grace."""

    def __init__(self, terminate: Callable[[int], None]) -> None:
        self.terminate = terminate
        self._lock = threading.Lock()
        self._server: ReplicaServer | None = None
        self._deadline_s: float | None = None
        self._watchdog: threading.Timer | None = None

    def handle_order(self, order: Order) -> None:
        """Called on the control thread, so it must not block."""
        if isinstance(order, Stop | Preempt):
            self.begin(order.grace_s)
        elif isinstance(order, FenceOrder):
            _LOG.warning("fenced: %s", order.reason)
            self.terminate(0)

    def begin(self, grace_s: float) -> None:
        """Start to drain, and end the process just before `grace_s` have passed."""
        with self._lock:
            if self._deadline_s is not None:
                return
            self._deadline_s = time.monotonic() + grace_s * (1 - _EXIT_MARGIN_FRACTION)
            server = self._server
            self._watchdog = threading.Timer(grace_s * (1 - _EXIT_MARGIN_FRACTION), self._expire)
            self._watchdog.daemon = True
            self._watchdog.start()
        if server is not None:
            # On another thread: a gateway that does not read blocks `drain`, and this thread sends heartbeats.
            threading.Thread(target=server.drain, name="springtide-drain", daemon=True).start()

    def attach(self, server: ReplicaServer) -> None:
        """Set the server to drain; drains it now if a Stop arrived while the model was loading."""
        with self._lock:
            self._server = server
            is_stopping = self._deadline_s is not None
        if is_stopping:
            server.drain()

    def end(self) -> None:
        """Cancel the watchdog: the process ends by itself."""
        with self._lock:
            if self._watchdog is not None:
                self._watchdog.cancel()

    def left_s(self) -> float:
        return 1.0 if self._deadline_s is None else max(0.0, self._deadline_s - time.monotonic())

    def _expire(self) -> None:
        _LOG.error("the grace period is over and the user's code still runs; ending the process")
        self.terminate(0)
