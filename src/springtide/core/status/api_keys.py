"""API keys for calling services, as the API answers."""

from __future__ import annotations

import msgspec


class ApiKeyStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A key without its secret. Moments are Unix seconds.

    It may call `services` (None: all, also those to come), `rate_per_s` requests a second (None: any number). The last
    three count since the control plane started.
    """

    name: str
    key_id: str
    services: tuple[str, ...] | None
    rate_per_s: float | None
    created_unix_s: float
    expires_unix_s: float | None
    num_requests: int = 0
    num_refused: int = 0
    last_used_unix_s: float | None = None


class NewApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key that was just made, with its secret, which is told only now."""

    secret: str
    key: ApiKeyStatus
