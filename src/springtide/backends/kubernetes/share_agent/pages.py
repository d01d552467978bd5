"""The HTTP pages of a node's share agent: its health, and how its node's GPUs are shared."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from typing import Protocol

import msgspec

from springtide.backends.sharing.gpu.table import GpuDaemonStatus
from springtide.core.status.shares import TenantStatus

_TIMEOUT_S = 5.0
_MAX_REQUEST_BYTES = 8192
_MAX_AT_ONCE = 32
_REASONS = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}
# Name, kind and the field of a tenant's status.
_FIGURES = (
    ("springtide_node_share_request", "gauge", "request"),
    ("springtide_node_share_limit", "gauge", "limit"),
    ("springtide_node_share_granted", "gauge", "granted"),
    ("springtide_node_share_used", "gauge", "used"),
    ("springtide_node_share_throttled_seconds_total", "counter", "throttled_s"),
    ("springtide_node_share_launches_total", "counter", "num_launches"),
    ("springtide_node_share_open_launches_total", "counter", "num_open"),
    ("springtide_node_share_denied_allocations_total", "counter", "num_denied"),
)


class NodeShareReport(Protocol):
    """The source of the pages' contents."""

    @property
    def problem(self) -> str:
        """Why shares are not enforced; empty if they are."""
        ...

    def status(self) -> GpuDaemonStatus | None:
        """The daemon's status; None if that is outdated."""
        ...


async def serve_pages(about: NodeShareReport, host: str, port: int) -> asyncio.Server:
    """Answer at an address: /livez (and /healthz), /readyz, /sharing, /metrics. Raises OSError."""
    room = asyncio.Semaphore(_MAX_AT_ONCE)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if not room.locked():
                async with room, asyncio.timeout(_TIMEOUT_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(_answer(about, head))
                    await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            with contextlib.suppress(OSError):
                writer.close()

    return await asyncio.start_server(answer, host, port, limit=_MAX_REQUEST_BYTES)


def _answer(about: NodeShareReport, head: bytes) -> bytes:
    words = head.split(b"\r\n", 1)[0].split()
    if len(words) != 3 or words[0] not in (b"GET", b"HEAD"):
        return _response(405, b"use GET\n")
    path = words[1].partition(b"?")[0]
    status, body, kind = _page(about, path)
    return _response(status, body, kind, with_body=words[0] == b"GET")


def _page(about: NodeShareReport, path: bytes) -> tuple[int, bytes, str]:
    text = "text/plain; charset=utf-8"
    if path in (b"/livez", b"/healthz"):
        return 200, b"it runs\n", text
    if path == b"/readyz":
        problem = about.problem
        return (503, f"{problem}\n".encode(), text) if problem else (200, b"sharers are held\n", text)
    status = about.status()
    if path == b"/metrics":
        return 200, "".join(_metrics(status)).encode(), "text/plain; version=0.0.4"
    if path != b"/sharing":
        return 404, b"there is /livez, /readyz, /sharing and /metrics\n", text
    if status is None:
        return 503, f"{about.problem}\n".encode(), text
    return 200, msgspec.json.encode(status.sharing), "application/json"


def _metrics(status: GpuDaemonStatus | None) -> Iterable[str]:
    yield f"# TYPE springtide_node_share_daemon_up gauge\nspringtide_node_share_daemon_up {int(status is not None)}\n"
    tenants = status.sharing.tenants if status is not None else ()
    for name, kind, field in _FIGURES:
        yield f"# TYPE {name} {kind}\n"
        for tenant in tenants:
            yield f"{name}{{{_labels(tenant)}}} {getattr(tenant, field):g}\n"


def _labels(tenant: TenantStatus) -> str:
    named = (("workload", tenant.workload_id), ("replica", tenant.replica_id), ("device", tenant.device_id))
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in named)


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _response(status: int, body: bytes, kind: str = "text/plain", *, with_body: bool = True) -> bytes:
    head = f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + (body if with_body else b"")
