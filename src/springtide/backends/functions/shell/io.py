"""A coordinator's I/O outside its own thread: checking stores, assembling the model, removing objects."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from springtide.backends.functions.coordinator import messages
from springtide.backends.functions.coordinator.function_pool import StreamRules
from springtide.backends.functions.parameter_store.host import ParameterHost
from springtide.backends.functions.provider import FunctionProvider
from springtide.backends.functions.shell.objects import JobObjects
from springtide.core.errors import BackendError, InvalidRequest, ObjectMissing, StorageError
from springtide.core.events import Event
from springtide.core.ports import Clock
from springtide.core.workload import TrainingJob
from springtide.storage.datasets.log import StreamWatch
from springtide.storage.datasets.manifest import DatasetLost

_log = logging.getLogger(__name__)
# How long requests to a store are retried before it counts as down.
STORE_PATIENCE_S = 30.0
RETRY_S = 1.0


class Wiring(msgspec.Struct, frozen=True, kw_only=True):
    """What a coordinator is connected to: the provider, the stores, the workload's directory, the platform's clock.

    `parameter_host` runs the parameter store, where there is one; `parameter_url` is set where its address is always
    the same. `term` numbers the control planes that lead one after the other on different machines; coordinators then
    keep their records and notes in the store. 0: there is one machine, and they are kept on its disk.
    """

    provider: FunctionProvider
    store_url: str
    parameter_url: str
    parameter_host: ParameterHost | None
    work_dir: Path
    clock: Clock
    post: Callable[[Event], None]
    stream_rules: StreamRules = StreamRules()
    term: int = 0


class CoordinatorIO:
    """The blocking I/O of one job's coordinator, each method for a thread of its own; `send` takes the outcome.

    `is_closed` ends methods that wait for a store; `note` writes a line to the coordinator's log.
    """

    def __init__(
        self,
        job: TrainingJob,
        wiring: Wiring,
        objects: JobObjects,
        send: Callable[[messages.Stimulus], None],
        note: Callable[[str], None],
        is_closed: threading.Event,
    ) -> None:
        self.job = job
        self._wiring = wiring
        self._objects = objects
        self.send = send
        self._note = note
        self._is_closed = is_closed
        self._watch = StreamWatch(objects.store, job.stream) if job.stream else None
        self._watching = threading.Lock()

    def look(self, order: messages.FindStates) -> None:
        """Find the newest complete state."""
        give_up_s = time.monotonic() + STORE_PATIENCE_S
        while not self._is_closed.is_set():
            try:
                found = self._objects.find_states(order.num_layers, order.newest, may_begin_anew=order.may_begin_anew)
            except StorageError as error:
                if time.monotonic() > give_up_s:
                    self.send(messages.StoreFailed(error=f"the saved states cannot be found: {error}"))
                    return
                self._is_closed.wait(RETRY_S)
                continue
            num_bytes = sum(meta.num_bytes for meta in found.metas)
            self.send(messages.StatesFound(number=order.number, step=found.step, num_bytes=num_bytes, torn=found.torn))
            return

    def assemble(self, order: messages.Assemble) -> None:
        """Put the model's file together."""
        try:
            found = self._objects.find_states(order.num_layers)
            if self._wiring.term:
                path = self._objects.publish(found, self.job.job_id, order.generation)
            else:
                path = str(self._objects.assemble(found, self._wiring.work_dir / "artifacts"))
            self.send(messages.Assembled(path=path))
        except StorageError as error:
            self.send(messages.Assembled(error=str(error)))

    def delete(self, order: messages.DeleteKeys) -> None:
        """Remove objects that are no longer read."""
        try:
            self._objects.delete(order.keys, order.prefixes)
        except StorageError as error:
            # They will be removed with the job.
            _log.warning("%s: objects could not be removed: %s", self.job.job_id, error)

    def check_stream(self) -> None:
        """Read the length of the stream; does nothing while another thread does."""
        if self._watch is None or not self._watching.acquire(blocking=False):
            return
        try:
            self.send(messages.StreamRead(stream=self._watch.look(time.time())))
        except ObjectMissing as error:
            self.send(messages.StreamRead(error=f"the stream {self.job.stream!r} is not there: {error}"))
        except DatasetLost as error:
            self.send(messages.StreamRead(error=str(error)))
        except StorageError as error:
            # The store may come back; the next check will tell.
            _log.warning("%s: its stream could not be looked at: %s", self.job.job_id, error)
        finally:
            self._watching.release()

    def check_parameters(self) -> None:
        """Check whether the parameter store answers."""
        host = self._wiring.parameter_host
        if host is not None and not host.is_alive(self.job.job_id):
            self.send(messages.ParameterStoreLost())

    def open_parameters(self) -> None:
        """Start the parameter store, a new one if the old one is dead."""
        host, job_id = self._wiring.parameter_host, self.job.job_id
        assert host is not None
        give_up_s = time.monotonic() + STORE_PATIENCE_S
        while True:
            try:
                url = host.acquire(job_id)
                if not host.is_alive(job_id):
                    self._note("its parameter store is gone: a new one is brought up")
                    url = host.renew(job_id)
                break
            except (InvalidRequest, BackendError, StorageError) as error:
                is_final = isinstance(error, InvalidRequest) or time.monotonic() > give_up_s
                if is_final or self._is_closed.wait(RETRY_S):
                    self.send(messages.StoreFailed(error=f"its parameter store does not come up: {error}"))
                    return
        self._objects.parameter_url = url
        self.send(messages.ParameterStoreUp(url=url))

    def close_parameters(self) -> None:
        """Release the parameter store."""
        host = self._wiring.parameter_host
        assert host is not None
        self._objects.parameter_url = self._wiring.parameter_url
        host.release(self.job.job_id)
