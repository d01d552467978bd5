"""Why the gateway did not answer a request."""

from __future__ import annotations

from springtide.core.errors import SpringtideError


class RequestRefused(SpringtideError):
    """The request was not answered by the model: too busy (429), no replica (502, 503), too late (504)."""

    def __init__(self, status: int, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class ClientGone(SpringtideError):
    """The client closed its connection; nobody waits for the answer."""
