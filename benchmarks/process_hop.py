"""What the way through the gateway adds to a request to a command: time to the first chunk, and CPU.

springtide up --state DIR; python benchmarks/process_hop.py --state DIR [--rounds 20] [--requests 50] [--clients 1]

The command is this file: a bare asyncio server that streams three events of 128 bytes, the first at once. Each round
asks it directly and through the gateway, in turn, over one kept connection for each client. CPU is from the kernel's
accounts in nanoseconds (schedstat, all threads), less what the same processes use in as long a time without requests.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from pathlib import Path
from typing import Any

import msgspec

from springtide.client.api import connect
from springtide.client.applications import typed_command
from springtide.client.functions import deploy_service

_NAME = "process-hop"
_IDLE_S = 5.0
_EVENT = b"data: " + b"x" * 120 + b"\n\n"
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def main() -> None:
    """Serve, or measure and print a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", type=int, metavar="PORT", help="Be the command.")
    parser.add_argument("--state", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--requests", type=int, default=50, help="Of each client, in each round.")
    parser.add_argument("--clients", type=int, default=1, help="At a time.")
    asked = parser.parse_args()
    if asked.serve:
        asyncio.run(_serve(asked.serve))
    else:
        print(msgspec.json.encode(_measured(asked.state, asked.rounds, asked.requests, asked.clients)).decode())


async def _serve(port: int) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            while (await reader.readline()).strip():
                pass
            if b"/about" in line:
                body = msgspec.json.encode({"port": port, "pid": os.getpid(), "replica": os.getppid()})
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
                continue
            writer.write(_HEAD)
            for _ in range(3):
                writer.write(b"%x\r\n%s\r\n" % (len(_EVENT), _EVENT))
                await asyncio.sleep(0)
            writer.write(b"0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", port)
    await server.serve_forever()


def _measured(state_dir: Path, num_rounds: int, num_requests: int, num_clients: int) -> dict[str, Any]:
    client = connect(state_dir=state_dir)
    command = typed_command(
        f"python {Path(__file__).name} --serve {{port}}", ready="/about", folder=Path(__file__).parent
    )
    service = deploy_service(command.source(), command.options.override({"scale": (1, 1)}), _NAME, client)
    try:
        platform = msgspec.json.decode((state_dir / "platform.json").read_bytes())
        token = (state_dir / "token").read_text().strip()
        return asyncio.run(_compare(platform, token, num_rounds, num_requests, num_clients))
    finally:
        service.remove()


async def _compare(
    platform: dict[str, Any], token: str, num_rounds: int, num_requests: int, num_clients: int
) -> dict[str, Any]:
    gateway = await _Connection.open(int(platform["url"].rpartition(":")[2]), f"/f/{_NAME}", token)
    about = msgspec.json.decode(await gateway.body("/about"))
    port = int(platform["url"].rpartition(":")[2])
    clients = range(num_clients)
    ways = {
        "direct": [await _Connection.open(about["port"], "", "") for _ in clients],
        "gateway": [await _Connection.open(port, f"/f/{_NAME}", token) for _ in clients],
    }
    pids = {"gateway": platform["pid"], "replica": about["replica"], "command": about["pid"]}
    idle = {name: -_cpu_s(pid) for name, pid in pids.items()}
    await asyncio.sleep(_IDLE_S)
    idle = {name: (idle[name] + _cpu_s(pid)) / _IDLE_S for name, pid in pids.items()}
    first_s: dict[str, list[float]] = {"direct": [], "gateway": []}
    cpu_s = {way: dict.fromkeys(pids, 0.0) for way in first_s}
    for number in range(num_rounds + 1):
        for way, connections in ways.items():
            before, began_s = {name: _cpu_s(pid) for name, pid in pids.items()}, time.perf_counter()
            found = await asyncio.gather(*(connection.streams(num_requests) for connection in connections))
            if number:
                # The first round warms up.
                first_s[way] += [first for each in found for first in each]
                for name, pid in pids.items():
                    cpu_s[way][name] += _cpu_s(pid) - before[name] - idle[name] * (time.perf_counter() - began_s)
    total = num_rounds * num_requests * num_clients
    return {
        "requests": total,
        "clients": num_clients,
        "load_1m": os.getloadavg()[0],
        "first_chunk_p50_ms": {way: round(statistics.median(found) * 1e3, 3) for way, found in first_s.items()},
        "first_chunk_p10_ms": {
            way: round(statistics.quantiles(found, n=10)[0] * 1e3, 3) for way, found in first_s.items()
        },
        "idle_cpu_percent": {name: round(100 * rate, 2) for name, rate in idle.items()},
        "cpu_us": {way: {name: round(s / total * 1e6) for name, s in of.items()} for way, of in cpu_s.items()},
    }


def _cpu_s(pid: int) -> float:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


class _Connection:
    """One connection that is kept alive."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, prefix: str, token: str) -> None:
        self._reader, self._writer, self._prefix, self._token = reader, writer, prefix, token

    @classmethod
    async def open(cls, port: int, prefix: str, token: str) -> _Connection:
        return cls(*await asyncio.open_connection("127.0.0.1", port), prefix, token)

    def _ask(self, path: str) -> None:
        head = f"GET {self._prefix}{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {self._token}\r\n\r\n"
        self._writer.write(head.encode())

    async def body(self, path: str) -> bytes:
        """The body of an answer with a length."""
        self._ask(path)
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        if not head.startswith(b"http/1.1 200"):
            raise SystemExit(head.decode() + (await self._reader.read(1000)).decode())
        return await self._reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]))

    async def streams(self, number: int) -> list[float]:
        """So many streams, one after the other."""
        return [await self.stream() for _ in range(number)]

    async def stream(self) -> float:
        """Seconds to the first chunk of a streamed answer, which is then read to its end."""
        began_s = time.perf_counter()
        self._ask("/stream")
        await self._reader.readuntil(b"\r\n\r\n")
        read = await self._reader.readuntil(b"\n\n\r\n")
        first_s = time.perf_counter() - began_s
        if not read.endswith(b"0\r\n\r\n"):
            await self._reader.readuntil(b"0\r\n\r\n")
        return first_s


if __name__ == "__main__":
    main()
