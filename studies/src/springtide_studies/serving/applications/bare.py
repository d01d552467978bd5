"""The handler as a raw ASGI application of one uvicorn process, inline on its loop: HTTP and JSON, no framework."""

from __future__ import annotations

import json
import os
import runpy
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

_HANDLER = runpy.run_path(str(Path(__file__).with_name("handlers.py")))["HANDLERS"][os.environ["BENCH_HANDLER"]]()
_HANDLER.load()


async def answer(
    scope: dict[str, Any],
    receive: Callable[[], Awaitable[dict[str, Any]]],
    send: Callable[[dict[str, Any]], Awaitable[None]],
) -> None:
    """Answer any request with what the handler returns for the body's `values`."""
    body, is_more = b"", True
    while is_more:
        message = await receive()
        body, is_more = body + message.get("body", b""), message.get("more_body", False)
    answered = json.dumps(_HANDLER.predict(json.loads(body)["values"])).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(answered))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": answered})
