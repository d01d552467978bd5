"""A serving replica: loads the user's class and answers batches until it is told to stop.

The main thread runs the user's code and nothing else does; where it listens and what it reads is replica_server.py.
No torch here: what a model needs, the user's file imports.
"""

from __future__ import annotations

import logging
import os
import signal
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
from springtide.runtime.process.entry import describe_error, load_object
from springtide.runtime.process.share_slot import iteration, open_slot
from springtide.runtime.serving.listeners import GuardedDoor, HandshakeGuard, PrivateDoor, ReplicaListener
from springtide.runtime.serving.server import ReplicaServer
from springtide.serving.frames import MAX_FRAME_BYTES, BatchOutcome
from springtide.serving.schema import ServiceSchema, call_decoder, derive_schema

_LOG = logging.getLogger("springtide.replica")
_ACKNOWLEDGE_S = 5.0
_EXIT_MARGIN_FRACTION = 0.1


def load_served_class(entrypoint: Entrypoint) -> type:
    """Import the user's file and return the served class. Raises InvalidRequest, or whatever the file raises."""
    if entrypoint.kind != "class":
        raise InvalidRequest(f"a service needs a class to serve, {entrypoint.object_name!r} is a {entrypoint.kind}")
    found = load_object(entrypoint, f"springtide_served_{os.getpid()}")
    served = getattr(found, "cls", found)
    if not isinstance(served, type):
        raise InvalidRequest(
            f"{entrypoint.object_name!r} in {Path(entrypoint.source_path).name} is not a class to serve"
        )
    return served


class ServedUserModel:
    """The user's object with its schema: turns calls into outcomes. Only one thread may call `answer`.

    `slot` is where a replica tells when it predicts (None: it has its device to itself).
    """

    def __init__(
        self, served: type, max_batch_size: int, params: dict[str, str], slot: SlotWriter | None = None
    ) -> None:
        self.schema: ServiceSchema = derive_schema(served)
        self._decoder = call_decoder(served)
        self._list_names = [parameter.name for parameter in self.schema.parameters if parameter.is_list]
        self._max_batch_size = max_batch_size
        self._slot = slot
        self._instance = served()
        if params and not hasattr(self._instance, "params"):
            self._instance.params = dict(params)
        load = getattr(self._instance, "load", None)
        if callable(load):
            load()

    def answer(self, calls: Sequence[bytes]) -> tuple[BatchOutcome, ...]:
        """Return one outcome per call. Calls that may share a batch are predicted together, in order."""
        outcomes: list[BatchOutcome | None] = [None] * len(calls)
        arguments: dict[int, dict[str, Any]] = {}
        for index, call in enumerate(calls):
            try:
                decoded = msgspec.structs.asdict(self._decoder.decode(call))
            except (ValueError, RecursionError) as error:
                outcomes[index] = BatchOutcome("invalid", str(error).encode())
                continue
            arguments[index] = {name: value for name, value in decoded.items() if value is not msgspec.UNSET}
        if self.schema.is_batchable:
            predicted = self._predict_together(arguments)
        else:
            predicted = {index: self._predict_alone(given) for index, given in arguments.items()}
        for index, outcome in predicted.items():
            outcomes[index] = outcome
        return tuple(outcome for outcome in outcomes if outcome is not None)

    def _predict_together(self, arguments: dict[int, dict[str, Any]]) -> dict[int, BatchOutcome]:
        """Concatenate the lists, predict in chunks of at most `max_batch_size` items, and cut the outputs again."""
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
            # The gateway does not mix these; another client of the socket may.
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
            # One request's input must not fail its neighbours: each is tried alone, and the culprit fails alone.
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
        """Run the user's code on one batch; arrays come back as lists, so that a device has done its work by then."""
        slot = self._slot
        if slot is None:
            return _plain(self._instance.predict(**arguments))
        with iteration(slot, num_items):
            return _plain(self._instance.predict(**arguments))

    def waits(self, num_batches: int) -> None:
        """So many batches wait for the one at work to end. Any thread may say so."""
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
    """Turn arrays and tensors into lists; leave the rest."""
    tolist = getattr(value, "tolist", None)
    return tolist() if callable(tolist) else value


def _encode_hook(value: Any) -> Any:
    plain = _plain(value)
    if plain is value:
        raise TypeError(f"{_type_of(value)} cannot be written as JSON")
    return plain


_ENCODER = msgspec.json.Encoder(enc_hook=_encode_hook)


def _encoded(result: Any) -> BatchOutcome:
    """Write the result as JSON (a NaN becomes null, for JSON has none)."""
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
    return BatchOutcome("error", f"{type(error).__name__}: {sentence}".encode("utf-8", "replace"))


def run_replica(
    spec: WorkerSpec,
    link: ControlLink,
    *,
    guard: HandshakeGuard | None = None,
    on_serving: Callable[[ReplicaServer], None] = lambda server: None,
    terminate: Callable[[int], None] = os._exit,
) -> int:
    """Load the service's class, serve it, and return the exit code: 0 after a drain, 1 if the class does not load.

    The caller has started `link` and closes it. Loading counts as starting: Ready is reported only when the socket
    answers, and `on_serving` gets what answers there. It listens at `guard`'s address, or privately on its machine.
    A Stop (or SIGTERM) ends the process within its grace even if the user's code hangs, through `terminate`.
    """
    service = spec.workload
    assert isinstance(service, InferenceService), "run_replica is for services"
    stop = _Stopping(terminate)
    link.on_lease_expired = lambda: stop.begin(service.grace_s)
    link.on_order = stop.take
    while not link.orders.empty():
        # What came before there was a callback.
        stop.take(link.orders.get())
    if threading.current_thread() is threading.main_thread():
        # A handler runs between two instructions of this thread, which may hold the lock that `begin` wants.
        signal.signal(
            signal.SIGTERM, lambda *_: threading.Thread(target=stop.begin, args=(service.grace_s,), daemon=True).start()
        )
    try:
        server = _load(spec, service, link, guard)
        if server is None:
            return 1
        on_serving(server)
        return _serve(spec, link, stop, server)
    finally:
        stop.end()
        sys.stdout.flush()
        sys.stderr.flush()


def _load(
    spec: WorkerSpec, service: InferenceService, link: ControlLink, guard: HandshakeGuard | None
) -> ReplicaServer | None:
    """Return what listens for the loaded model; None, after a report of why, if that came to nothing."""
    try:
        served = load_served_class(service.entrypoint)
        link.phases.ended("import")
        model = ServedUserModel(served, service.max_batch_size, service.params, open_slot(spec))
        door: ReplicaListener = GuardedDoor(guard) if guard else PrivateDoor(Path(spec.work_dir), spec.replica_id)
        return ReplicaServer(spec.replica_id, model, door)
    except (Exception, SystemExit) as error:
        _LOG.error("the service %s does not load", service.name, exc_info=error)
        is_ours = isinstance(error, SpringtideError)
        sentence = str(error) if is_ours else describe_error(error, service.entrypoint.source_path)
        seq = link.send(Failed(generation=spec.generation, error=f"the service does not load: {sentence:.500}"))
        link.wait_acknowledged(seq, _ACKNOWLEDGE_S)
        return None


def _serve(spec: WorkerSpec, link: ControlLink, stop: _Stopping, server: ReplicaServer) -> int:
    try:
        stop.attach(server)
        link.update(is_ready=True, address=server.address)
        link.send(Ready(address=server.address, phases_s=link.phases.ended("load")))
        server.run()
        seq = link.send(Left(generation=spec.generation))
        link.wait_acknowledged(seq, min(_ACKNOWLEDGE_S, stop.left_s()))
        return 0
    finally:
        server.close()


class _Stopping:
    """Turns orders into a drain, and sees to it that the process ends in time."""

    def __init__(self, terminate: Callable[[int], None]) -> None:
        self._terminate = terminate
        self._lock = threading.Lock()
        self._server: ReplicaServer | None = None
        self._deadline_s: float | None = None
        self._watchdog: threading.Timer | None = None

    def take(self, order: Order) -> None:
        """Handle one order, on the control thread."""
        if isinstance(order, Stop | Preempt):
            self.begin(order.grace_s)
        elif isinstance(order, FenceOrder):
            _LOG.warning("fenced: %s", order.reason)
            self._terminate(0)

    def begin(self, grace_s: float) -> None:
        """Drain now, and end the process just before `grace_s` have passed."""
        with self._lock:
            if self._deadline_s is not None:
                return
            self._deadline_s = time.monotonic() + grace_s * (1 - _EXIT_MARGIN_FRACTION)
            server = self._server
            self._watchdog = threading.Timer(grace_s * (1 - _EXIT_MARGIN_FRACTION), self._expire)
            self._watchdog.daemon = True
            self._watchdog.start()
        if server is not None:
            # Telling the gateways may take a while if one does not read, and heartbeats come from this thread.
            threading.Thread(target=server.drain, name="springtide-drain", daemon=True).start()

    def attach(self, server: ReplicaServer) -> None:
        """Let orders reach the server; one that came while it loaded takes effect now."""
        with self._lock:
            self._server = server
            is_stopping = self._deadline_s is not None
        if is_stopping:
            server.drain()

    def end(self) -> None:
        """The process ends by itself: stop the watchdog."""
        with self._lock:
            if self._watchdog is not None:
                self._watchdog.cancel()

    def left_s(self) -> float:
        return 1.0 if self._deadline_s is None else max(0.0, self._deadline_s - time.monotonic())

    def _expire(self) -> None:
        _LOG.error("the grace period is over and the user's code still runs; ending the process")
        self._terminate(0)
