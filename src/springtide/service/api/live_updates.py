"""The live view: server-sent events of the platform's status, at most four a second."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

import anyio
import anyio.to_thread
import msgspec

from springtide.core.errors import CapacityError
from springtide.service.ports import PlatformLike
from springtide.service.status.cluster_evidence import with_condition
from springtide.service.status.search_reports import SearchReports
from springtide.service.status.sharing import SharingReports
from springtide.service.status.status import platform_status

MAX_STREAMS = 32
SHORTEST_GAP_S = 0.25
KEEP_ALIVE_S = 10.0
# A stream whose client has left keeps its thread for at most this long.
WAIT_S = 1.0
_RETRY_MS = 1000


class LiveStreams:
    """Creates the streams. Each waits in a thread of its own, so that streams never block the threads of requests."""

    def __init__(
        self,
        platform: PlatformLike,
        searches: SearchReports,
        shares: SharingReports,
        *,
        keep_alive_s: float = KEEP_ALIVE_S,
    ) -> None:
        self._platform = platform
        self._searches = searches
        self._shares = shares
        self._keep_alive_s = keep_alive_s
        self._num_open = 0

    def check_capacity(self) -> None:
        """Raise CapacityError if the maximum number of streams is open."""
        if self._num_open >= MAX_STREAMS:
            raise CapacityError(f"{MAX_STREAMS} streams are open already; close one, or ask /v1/status now and then")

    async def stream(self, after_seq: int, base_url: str) -> AsyncGenerator[bytes, None]:
        """Yield an event at once and after each change, and keep-alive comments while nothing changes."""
        # A limiter of its own gives every stream its own thread, in addition to those that answer requests.
        limiter = anyio.CapacityLimiter(1)
        yield b"retry: %d\n\n" % _RETRY_MS
        if after_seq > self._platform.view().seq:
            # The client got this number from another platform.
            after_seq = -1
        last_sent_at, told = time.monotonic(), self._platform.trouble
        while True:
            began_at = time.monotonic()
            wait = partial(self._platform.wait_change, after_seq, WAIT_S)
            seq = await anyio.to_thread.run_sync(wait, abandon_on_cancel=True, limiter=limiter)
            trouble = self._platform.trouble
            if seq <= after_seq and trouble == told:
                if time.monotonic() - began_at < WAIT_S / 2:
                    # wait_change returns early without a new step only when the platform is ending.
                    return
                if time.monotonic() - last_sent_at > self._keep_alive_s:
                    last_sent_at = time.monotonic()
                    yield b": nothing new\n\n"
                continue
            last_sent_at, told = time.monotonic(), trouble
            view = self._platform.view()
            platform = self._platform
            offset_s, price = platform.wall_clock_offset_s, platform.usd_per_device_hour
            drains = platform.snapshot().drains
            # After a measurement the search report takes milliseconds to compute, so it runs in the stream's thread.
            make_status = partial(
                platform_status,
                view,
                platform.now_s(),
                offset_s,
                base_url,
                price,
                drains,
                platform.function_status,
                self._searches.status,
                self._shares,
            )
            made = await anyio.to_thread.run_sync(make_status, limiter=limiter)
            status = with_condition(made, platform)
            after_seq = view.seq
            yield b"id: %d\nevent: status\ndata: %s\n\n" % (after_seq, msgspec.json.encode(status))
            await anyio.sleep(max(0.0, SHORTEST_GAP_S - (time.monotonic() - last_sent_at)))

    async def counted(self, chunks: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        """Yield the chunks, and count this as an open stream until the last one."""
        self._num_open += 1
        try:
            async with aclosing(chunks) as source:
                async for chunk in source:
                    yield chunk
        finally:
            self._num_open -= 1
