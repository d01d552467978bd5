"""Follows the output of pods into the files that `springtide logs` reads. Bounded in number and size."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import IO

from springtide.backends.kubernetes.client.api import KubeApi
from springtide.backends.kubernetes.client.errors import KubeApiError
from springtide.backends.kubernetes.client.thread import ApiThread
from springtide.backends.kubernetes.pods.spec import CONTAINER_NAME
from springtide.backends.kubernetes.pods.state import Acknowledgement, PodState
from springtide.backends.processes import bound_log
from springtide.core.errors import BackendError
from springtide.storage.step_lines import WORD

_log = logging.getLogger(__name__)

MAX_LOG_BYTES = 64 << 20
KEPT_LOG_BYTES = 1 << 20
# The most streams at once; further pods are read when one has ended, if the kubelet still has their log.
MAX_FOLLOWED = 256
_CHECK_BYTES = 256 << 10
# Files beside a replica's output: lines of the job's step log that its pod wrote at its end, and, once all is read, a
# marker for the service that puts both into the store (service/logs/upload.py).
STEPS_SUFFIX = ".steps"
ENDED_SUFFIX = ".ended"
_MAX_STEPS_BYTES = 4 << 20
_STEPS_WORD = WORD.encode()
_BACKOFF_S = (0.5, 10.0)
_STAMP = re.compile(rb"\d{4}-\d\d-\d\dT[0-9:.]+(Z|[+-]\d\d:\d\d)")


class PodLogs:
    """Follows each running pod once. `path_of` gives the file of its output; `done` is called once all is read."""

    def __init__(
        self,
        api_thread: ApiThread,
        path_of: Callable[[PodState], Path],
        done: Callable[[PodState], None],
        *,
        max_log_bytes: int = MAX_LOG_BYTES,
    ) -> None:
        self._thread = api_thread
        self._path_of = path_of
        self._done = done
        self._max_log_bytes = max_log_bytes
        self._room = asyncio.Semaphore(MAX_FOLLOWED)
        self._streams: dict[str, concurrent.futures.Future[None]] = {}

    def follow(self, pod: PodState) -> None:
        """Read a pod's output from its beginning until its end, unless that is under way."""
        if pod.uid and pod.uid not in self._streams:
            pod.awaiting |= {Acknowledgement.LOGS}
            self._streams[pod.uid] = self._thread.run(lambda api: self._run(api, pod))

    def forget(self, pod: PodState) -> None:
        """The pod is gone."""
        stream = self._streams.pop(pod.uid, None)
        if stream is not None:
            stream.cancel()

    def close(self) -> None:
        """End every stream."""
        for stream in self._streams.values():
            stream.cancel()
        self._streams.clear()

    # --- on the API thread -------------------------------------------------------------------------------------------

    async def _run(self, api: KubeApi, pod: PodState) -> None:
        try:
            async with self._room:
                await self._copy(api, pod)
        except OSError as error:
            _log.warning("the output of %s cannot be kept: %s", pod.replica_id, error.strerror)
        finally:
            # Pods that still run when this control plane ends are not marked: the next one follows them.
            if pod.is_over:
                with contextlib.suppress(OSError):
                    _note_end(self._path_of(pod))
            self._done(pod)

    async def _copy(self, api: KubeApi, pod: PodState) -> None:
        last, backoff_s = b"", _BACKOFF_S[0]
        with _Output(self._path_of(pod), self._max_log_bytes) as output:
            while True:
                was_over, before = pod.is_over, last
                try:
                    async for stamp, text in self._lines(api, pod, last):
                        output.write(text)
                        last = stamp
                except KubeApiError as error:
                    if error.status in (403, 404) and pod.is_over:
                        return
                except BackendError:
                    pass  # The connection broke: continue after the last line.
                if was_over or pod.is_gone:
                    return
                backoff_s = _BACKOFF_S[0] if last != before else min(backoff_s * 2, _BACKOFF_S[1])
                await asyncio.sleep(backoff_s if not pod.is_over else 0.0)

    async def _lines(self, api: KubeApi, pod: PodState, last: bytes) -> AsyncIterator[tuple[bytes, bytes]]:
        """The lines after the time `last`, each with its time."""
        lines = api.logs(
            pod.key,
            container=CONTAINER_NAME,
            follow=not pod.is_over,
            # The API takes whole seconds: lines of that second that were read already are skipped below.
            since_time=last[:19].decode() + "Z" if last else "",
            timestamps=True,
        )
        async for line in lines:
            stamp, _, text = line.partition(b" ")
            # A kubelet that can no longer read the output sends an error message instead, without a time.
            if _STAMP.fullmatch(stamp) and stamp > last:
                last = stamp
                yield stamp, text


class _Output:
    """The file of one pod's output. The first line replaces what an earlier control plane wrote."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._file: IO[bytes] | None = None
        self._written = 0
        self._steps_bytes = 0

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, line: bytes) -> None:
        """Add a line. Raises OSError."""
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_bytes(b"")
            for suffix in (STEPS_SUFFIX, ENDED_SUFFIX):
                self._path.with_suffix(suffix).unlink(missing_ok=True)
            # In append mode, so that writing continues at the new end after the file was truncated.
            self._file = self._path.open("ab", buffering=0)
        if line.startswith(_STEPS_WORD):
            self._write_steps(line)
            return
        self._file.write(line + b"\n")
        self._written += len(line) + 1
        if self._written >= _CHECK_BYTES:
            self._written = 0
            bound_log(self._path, self._max_bytes, min(KEPT_LOG_BYTES, self._max_bytes))

    def _write_steps(self, line: bytes) -> None:
        """Write the step log's lines in a pod's output to a separate file: they are for the store, not for users."""
        self._steps_bytes += len(line) + 1
        if self._steps_bytes <= _MAX_STEPS_BYTES:
            with self._path.with_suffix(STEPS_SUFFIX).open("ab") as file:
                file.write(line + b"\n")


def _note_end(path: Path) -> None:
    if path.exists():
        path.with_suffix(ENDED_SUFFIX).touch()
