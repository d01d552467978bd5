"""Services called by name: from the code of another service as that service, else with the platform's token."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx2

from springtide.client.api import CONNECT_TIMEOUT_S, INFER_TIMEOUT_S, Client, connect
from springtide.client.calls.answers import (
    ItemReader,
    answer_of,
    decode_answer,
    encode_body,
    error_of,
    is_event_stream,
    outputs_of,
    transport_errors,
)
from springtide.core.errors import BackendError, InvalidRequest
from springtide.core.quantities import parse_duration_s, validate_name
from springtide.runtime.serving.identity import CALL, IDENTITY

_JSON = "application/json"


def deployed(name: str, *, timeout: str | float | None = None) -> CalledService:
    """The deployed service of that name, to be called:

        @st.serve(calls=["embed"])
        class Search:
            def predict(self, text: str) -> list[str]:
                vector = st.deployed("embed").predict(text=text)

    In a replica it is called in the name of the replica's own service, which must name it in `calls`; what is left of
    the request's time, its priority, X-Request-Id and traceparent go with the call. Elsewhere it is called with what
    `st.connect()` finds. `timeout` ("2s" or seconds) is the longest wait for an answer, or for each item of a stream.
    Raises InvalidRequest for what is no name, or is not in `calls`.
    """
    validate_name(name, "service")
    if IDENTITY.service and name not in IDENTITY.calls:
        may = ", ".join(IDENTITY.calls) or "none"
        raise InvalidRequest(
            f"the service {IDENTITY.service!r} was deployed to call {may}; deploy it with calls=[{name!r}, ...]"
        )
    return CalledService(name, None if timeout is None else parse_duration_s(timeout, "timeout"))


class CalledService:
    """A service that is called; `st.deployed(NAME)` returns it. It may be kept, and used by several threads.

    Every call raises InvalidRequest (the arguments do not fit), Unauthorized, NotFound, CapacityError (it is too busy)
    or BackendError (no answer in time, or its code failed).
    """

    def __init__(self, name: str, timeout_s: float | None = None) -> None:
        self.name = name
        self._timeout_s = timeout_s
        self._own: _Connections | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        """The class and the service's name."""
        return f"<CalledService {self.name}>"

    def predict(self, **inputs: Any) -> Any:
        """Call `predict` with these arguments and return its outputs. It blocks: async code uses `predict_async`."""
        client, headers = self._connections().client, self._passed_on()
        return client.infer(self.name, inputs, timeout_s=self._wait_s(headers), request_headers=headers)

    def stream(self, **inputs: Any) -> Iterator[Any]:
        """Call a `predict` that yields, and yield its items as they come; closing the iterator cancels the call."""
        client, headers = self._connections().client, self._passed_on()
        return client.infer_stream(self.name, inputs, timeout_s=self._wait_s(headers), request_headers=headers)

    async def predict_async(self, **inputs: Any) -> Any:
        """`predict`, awaited. Cancelling the task cancels the call."""
        http, headers = self._connections().on_this_loop(), self._passed_on()
        with transport_errors():
            response = await http.post(
                f"/f/{self.name}",
                content=encode_body(inputs),
                headers={**headers, "Content-Type": _JSON},
                timeout=httpx2.Timeout(self._wait_s(headers), connect=CONNECT_TIMEOUT_S),
            )
        return outputs_of(answer_of(response, dict[str, Any]))

    async def stream_async(self, **inputs: Any) -> AsyncIterator[Any]:
        """`stream`, as an async iterator. Closing it cancels the call."""
        http, headers = self._connections().on_this_loop(), self._passed_on()
        sent = {**headers, "Content-Type": _JSON, "Accept": "text/event-stream"}
        timeout = httpx2.Timeout(self._wait_s(headers), connect=CONNECT_TIMEOUT_S)
        with transport_errors():
            async with http.stream(
                "POST", f"/f/{self.name}", content=encode_body(inputs), headers=sent, timeout=timeout
            ) as response:
                if not response.is_success or not is_event_stream(response):
                    await response.aread()
                    if not response.is_success:
                        raise error_of(response)
                    yield outputs_of(decode_answer(response.content, dict[str, Any]))
                    return
                reader = ItemReader()
                async for chunk in response.aiter_bytes():
                    for item in reader.feed(chunk):
                        yield item

    @property
    def url(self) -> str:
        """Its address, for HTTP clients of the caller's own: of an application or a language model, for example."""
        return f"{self._connections().client.url}/f/{self.name}"

    def headers(self) -> dict[str, str]:
        """The headers with which such a client calls it now: who calls, and what is passed on of the request.

        They hold a secret.
        """
        return {"Authorization": self._connections().client.authorization, **self._passed_on()}

    def _connections(self) -> _Connections:
        """Those of this replica, or of this handle elsewhere. Raises BackendError while the replica loads."""
        if IDENTITY.service:
            kept: _Connections | None = IDENTITY.kept(lambda told: _Connections(Client(told.url, told.secret)))
            if kept is None:
                raise BackendError(
                    f"{self.name!r} cannot be called while this replica loads: services are called once it answers"
                )
            return kept
        with self._lock:
            self._own = self._own or _Connections(connect())
            return self._own

    def _passed_on(self) -> dict[str, str]:
        """The headers of a call: what is known of the request that this code works on.

        Raises BackendError if its time is over.
        """
        scope, passed = CALL.get(), dict[str, str]()
        left_s = None if scope is None else scope.left_s()
        if left_s is not None and left_s <= 0:
            raise BackendError(f"the time that the request allows is over, so {self.name!r} was not called")
        waits = [wait_s for wait_s in (self._timeout_s, left_s) if wait_s is not None]
        if waits:
            passed["X-Springtide-Timeout"] = f"{max(min(waits), 0.001):.3f}s"
        if scope is not None and (origin := scope.origin) is not None:
            passed["X-Springtide-Priority"] = origin.priority
            if origin.request_id:
                passed["X-Request-Id"] = origin.request_id.decode("ascii", "replace")
            if origin.traceparent:
                passed["traceparent"] = origin.traceparent.decode("latin-1")
        return passed

    def _wait_s(self, passed: dict[str, str]) -> float:
        """How long the client waits: somewhat longer than the gateway, whose refusal says why."""
        text = passed.get("X-Springtide-Timeout")
        return INFER_TIMEOUT_S if text is None else float(text[:-1]) + 1.0


class _Connections:
    """A client of the platform, and one for each event loop, since its sockets belong to the loop."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._by_loop: dict[asyncio.AbstractEventLoop, httpx2.AsyncClient] = {}

    def on_this_loop(self) -> httpx2.AsyncClient:
        """The client of the running event loop."""
        loop = asyncio.get_running_loop()
        found = self._by_loop.get(loop)
        if found is None:
            for other in [other for other in self._by_loop if other.is_closed()]:
                self._by_loop.pop(other, None)
            headers = {"Authorization": self.client.authorization}
            found = self._by_loop[loop] = httpx2.AsyncClient(base_url=self.client.url, headers=headers, trust_env=False)
        return found
