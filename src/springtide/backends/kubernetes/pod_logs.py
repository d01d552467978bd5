"""What pods write, followed into the files that `springtide logs` reads. Bounded in number and in size."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections.abc import Callable
from pathlib import Path
from typing import IO

from springtide.backends.kubernetes.api import KubeApi
from springtide.backends.kubernetes.api_errors import ApiError
from springtide.backends.kubernetes.api_thread import ApiThread
from springtide.backends.kubernetes.pod_spec import CONTAINER_NAME
from springtide.backends.kubernetes.pod_table import Body
from springtide.backends.processes import bound_log
from springtide.core.errors import BackendError

_log = logging.getLogger(__name__)

MAX_LOG_BYTES = 64 << 20
KEPT_LOG_BYTES = 1 << 20
# So many streams at once; who comes later is read when one of them has ended, as far as the kubelet still has it.
MAX_FOLLOWED = 256
_CHECK_BYTES = 256 << 10
_BACKOFF_S = (0.5, 10.0)


class PodLogs:
    """Follows each running pod once. `path_of` says where its output goes, `done` is told when all of it is there."""

    def __init__(
        self,
        api_thread: ApiThread,
        path_of: Callable[[Body], Path],
        done: Callable[[Body], None],
        *,
        max_log_bytes: int = MAX_LOG_BYTES,
    ) -> None:
        self._thread = api_thread
        self._path_of = path_of
        self._done = done
        self._max_log_bytes = max_log_bytes
        self._room = asyncio.Semaphore(MAX_FOLLOWED)
        self._streams: dict[str, concurrent.futures.Future[None]] = {}

    def follow(self, body: Body) -> None:
        """Read a pod's output from its beginning until its end, unless that is under way."""
        if body.uid and body.uid not in self._streams:
            body.is_logged = False
            self._streams[body.uid] = self._thread.run(lambda api: self._run(api, body))

    def forget(self, body: Body) -> None:
        """The pod is gone."""
        stream = self._streams.pop(body.uid, None)
        if stream is not None:
            stream.cancel()

    def close(self) -> None:
        """End every stream."""
        for stream in self._streams.values():
            stream.cancel()
        self._streams.clear()

    # --- on the API thread -------------------------------------------------------------------------------------------

    async def _run(self, api: KubeApi, body: Body) -> None:
        try:
            async with self._room:
                await self._copy(api, body)
        except OSError as error:
            _log.warning("the output of %s cannot be kept: %s", body.replica_id, error.strerror)
        finally:
            self._done(body)

    async def _copy(self, api: KubeApi, body: Body) -> None:
        path = self._path_of(body)
        path.parent.mkdir(parents=True, exist_ok=True)
        last, backoff_s = b"", _BACKOFF_S[0]
        # From the beginning: what an earlier control plane has kept of it is a part of what comes now.
        path.write_bytes(b"")
        with path.open("ab", buffering=0) as file:
            while True:
                was_over = body.is_over
                try:
                    came = await self._stream(api, body, path, file, last)
                except ApiError as error:
                    if error.status in (403, 404) and (body.is_over or body.is_gone):
                        return
                    came = last
                except BackendError:
                    came = last
                if was_over or body.is_gone:
                    return
                backoff_s = _BACKOFF_S[0] if came != last else min(backoff_s * 2, _BACKOFF_S[1])
                last = came
                await asyncio.sleep(backoff_s if not body.is_over else 0.0)

    async def _stream(self, api: KubeApi, body: Body, path: Path, file: IO[bytes], last: bytes) -> bytes:
        """Copy what came after the line of the time `last`; return the time of the last line."""
        written = 0
        lines = api.logs(
            body.key,
            container=CONTAINER_NAME,
            follow=not body.is_over,
            # Of whole seconds: what was read of that second already is left out below.
            since_time=last[:19].decode() + "Z" if last else "",
            timestamps=True,
        )
        async for line in lines:
            stamp, _, text = line.partition(b" ")
            if stamp <= last:
                continue
            file.write(text + b"\n")
            last = stamp
            written += len(text) + 1
            if written >= _CHECK_BYTES:
                written = 0
                bound_log(path, self._max_log_bytes, min(KEPT_LOG_BYTES, self._max_log_bytes))
        return last
