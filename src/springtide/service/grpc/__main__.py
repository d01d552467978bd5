"""`python -m springtide.service.grpc`: answer gRPC on a loopback port until standard input ends.

The first line on standard output is the port, or {"error": sentence}. The platform starts it (process.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import threading

import grpc

from springtide.core.workload import MAX_BODY_MIB
from springtide.service.grpc.gateway_client import GatewayClient
from springtide.service.grpc.servicer import InferenceHandlers

HOST = "127.0.0.1"
# The largest body of a service, and room for what is around its tensors.
MAX_MESSAGE_BYTES = (MAX_BODY_MIB + 1) << 20
# Messages are read before the token is checked, so this bounds what strangers can have held in memory.
_MAX_CALLS = 512
_GRACE_S = 2.0


async def serve(port: int, gateway_url: str) -> int:
    """Serve until standard input ends. Returns the exit code."""
    gateway = GatewayClient(gateway_url)
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", -1),
            # Otherwise a second server would take half of the calls of the first.
            ("grpc.so_reuseport", 0),
        ],
        maximum_concurrent_rpcs=_MAX_CALLS,
    )
    server.add_generic_rpc_handlers((InferenceHandlers(gateway),))
    try:
        bound = server.add_insecure_port(f"{HOST}:{port}")
    except RuntimeError:
        bound = 0
    if not bound:
        sentence = f"port {port} of {HOST} cannot be used for gRPC; choose another with --grpc-port, or --grpc-port 0"
        _say({"error": sentence})
        return 1
    await server.start()
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    threading.Thread(target=_until_input_ends, args=(loop, ended), daemon=True).start()
    _say({"port": bound})
    await ended.wait()
    await server.stop(_GRACE_S)
    gateway.close()
    return 0


def _until_input_ends(loop: asyncio.AbstractEventLoop, ended: asyncio.Event) -> None:
    """The platform holds the other end of the pipe: it closes with the platform, however that ends."""
    while sys.stdin.buffer.read(1024):
        pass
    loop.call_soon_threadsafe(ended.set)


def _say(document: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    """Parse the arguments and serve."""
    parser = argparse.ArgumentParser(prog="python -m springtide.service.grpc", description=__doc__)
    parser.add_argument("--port", type=int, required=True, help="0 takes a free port")
    parser.add_argument("--gateway", required=True, help="the gateway's address, as http://127.0.0.1:8787")
    parsed = parser.parse_args(arguments)
    return asyncio.run(serve(parsed.port, parsed.gateway))


if __name__ == "__main__":
    sys.exit(main())
