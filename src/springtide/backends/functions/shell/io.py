"""The I/O of a coordinator beside its own thread: looking at stores, assembling the model, removing objects."""

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
# So long a store is asked again before it is held to be down.
STORE_PATIENCE_S = 30.0
RETRY_S = 1.0


class Wiring(msgspec.Struct, frozen=True, kw_only=True):
    """Where everything is: the provider, the stores, the workload's directory, the platform's clock.

    `parameter_host` runs the parameter store, where there is one; `parameter_url` is its address where
    that is always the same. `term` numbers the control planes that lead one after the other on machines of their own:
    what a coordinator knows is in the store then. 0: there is one machine, whose disk has it.
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
    """The blocking I/O of one job's coordinator, each method for a thread of its own; `tell` takes the outcome.

    `is_closed` ends those that wait for a store, `note` writes a line to the coordinator's log.
    """

    def __init__(
        self,
        job: TrainingJob,
        wiring: Wiring,
        objects: JobObjects,
        tell: Callable[[messages.Stimulus], None],
        note: Callable[[str], None],
        is_closed: threading.Event,
    ) -> None:
        self.job = job
        self._wiring = wiring
        self._objects = objects
        self.tell = tell
        self._note = note
        self._is_closed = is_closed
        self._watch = StreamWatch(objects.store, job.stream) if job.stream else None
        self._watching = threading.Lock()

    def look(self, order: messages.LookForStates) -> None:
        """Find the newest whole state."""
        give_up_s = time.monotonic() + STORE_PATIENCE_S
        while not self._is_closed.is_set():
            try:
                found = self._objects.find_states(order.num_layers, order.newest, may_begin_anew=order.may_begin_anew)
            except StorageError as error:
                if time.monotonic() > give_up_s:
                    self.tell(messages.StoreFailed(error=f"the saved states cannot be found: {error}"))
                    return
                self._is_closed.wait(RETRY_S)
                continue
            num_bytes = sum(meta.num_bytes for meta in found.metas)
            self.tell(messages.StatesFound(number=order.number, step=found.step, num_bytes=num_bytes, torn=found.torn))
            return

    def assemble(self, order: messages.Assemble) -> None:
        """Put the model's file together."""
        try:
            found = self._objects.find_states(order.num_layers)
            if self._wiring.term:
                path = self._objects.publish(found, self.job.job_id, order.generation)
            else:
                path = str(self._objects.assemble(found, self._wiring.work_dir / "artifacts"))
            self.tell(messages.Assembled(path=path))
        except StorageError as error:
            self.tell(messages.Assembled(error=str(error)))

    def delete(self, order: messages.DeleteKeys) -> None:
        """Remove what is not read any more."""
        try:
            self._objects.delete(order.keys, order.prefixes)
        except StorageError as error:
            # What is left is removed with the job.
            _log.warning("%s: objects could not be removed: %s", self.job.job_id, error)

    def look_at_stream(self) -> None:
        """See how far the stream has come; one look at a time."""
        if self._watch is None or not self._watching.acquire(blocking=False):
            return
        try:
            self.tell(messages.StreamSeen(stream=self._watch.look(time.time())))
        except ObjectMissing as error:
            self.tell(messages.StreamSeen(error=f"the stream {self.job.stream!r} is not there: {error}"))
        except DatasetLost as error:
            self.tell(messages.StreamSeen(error=str(error)))
        except StorageError as error:
            # The store may come back; nothing waits for this look.
            _log.warning("%s: its stream could not be looked at: %s", self.job.job_id, error)
        finally:
            self._watching.release()

    def look_at_parameters(self) -> None:
        """See whether the parameter store answers."""
        host = self._wiring.parameter_host
        if host is not None and not host.is_alive(self.job.job_id):
            self.tell(messages.ParameterStoreLost())

    def open_parameters(self) -> None:
        """Bring up the parameter store, a fresh one where it is found dead."""
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
                    self.tell(messages.StoreFailed(error=f"its parameter store does not come up: {error}"))
                    return
        self._objects.parameter_url = url
        self.tell(messages.ParameterStoreUp(url=url))

    def close_parameters(self) -> None:
        """Let go of the parameter store."""
        host = self._wiring.parameter_host
        assert host is not None
        self._objects.parameter_url = self._wiring.parameter_url
        host.release(self.job.job_id)
