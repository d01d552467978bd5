"""API keys: who holds one may call the services that it names, so often a second, and nothing else of the platform.

Each is an object in the platform's store, of which the secret's digest is a part and the secret is not.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import math
import re
import secrets
import string
import threading
import time
from collections.abc import Callable

import msgspec
from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from springtide.core.decoding import decode_json
from springtide.core.errors import Conflict, InvalidRequest, NotFound, ObjectMissing, Unauthorized
from springtide.core.ports import Store
from springtide.core.quantities import validate_name
from springtide.core.status.api_keys import ApiKeyStatus, NewApiKey
from springtide.service.api import openapi
from springtide.service.api.routes import encoded, read_body, read_nothing
from springtide.service.submission.problems import RequestForbidden, problem, problem_of
from springtide.service.submission.schemas import ApiKeyIn

KEY_PREFIX = "st_"
MAX_KEYS = 256
_FOLDER = "api-keys/"
_ID_CHARS = string.ascii_lowercase + string.digits
_SECRET = re.compile(r"st_([a-z0-9]{8})_([A-Za-z0-9_-]{43})")
_SECRET_BYTES = 32


class _StoredKey(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The object of one key. `digest` is the SHA-256 of the whole secret, in hex."""

    name: str
    key_id: str
    digest: str
    services: tuple[str, ...] | None = None
    rate_per_s: float | None = None
    created_unix_s: float = 0.0
    expires_unix_s: float | None = None


class _Use:
    """What became of one key's requests since this process started, and when the next one is due by its rate."""

    __slots__ = ("due_s", "last_unix_s", "num", "num_refused")

    def __init__(self) -> None:
        self.num, self.num_refused, self.due_s = 0, 0, -math.inf
        self.last_unix_s: float | None = None

    def wait_s(self, rate_per_s: float, now_s: float) -> float:
        """Count a request in, and return 0, or for how long none may come. A second's worth may come at once.

        The generic cell rate algorithm (ITU-T I.371).
        """
        due_s = max(self.due_s, now_s)
        wait_s = due_s - now_s - (max(1.0, rate_per_s) - 1.0) / rate_per_s
        if wait_s > 1e-9:
            return wait_s
        self.due_s = due_s + 1.0 / rate_per_s
        return 0.0


class ApiKeys:
    """The keys of one platform. `open_store` is called on first use; every method may block on the store but `admit`.

    Thread-safe. `unix_s` and `now_s` are clocks.
    """

    def __init__(
        self,
        open_store: Callable[[], Store],
        *,
        unix_s: Callable[[], float] = time.time,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open_store, self._unix_s, self._now_s = open_store, unix_s, now_s
        self._lock = threading.Lock()
        self._store: Store | None = None
        self._keys: dict[str, _StoredKey] = {}
        self._uses: dict[str, _Use] = {}

    @property
    def is_loaded(self) -> bool:
        """Whether the keys have been read from the store, so that `admit` knows them."""
        return self._store is not None

    def load(self) -> None:
        """Read the keys from the store, once. Raises StorageError, InvalidRequest."""
        with self._lock:
            self._loaded()

    def create(self, wanted: ApiKeyIn) -> NewApiKey:
        """Make a key. Raises Conflict if there is one of that name or there are too many, StorageError."""
        validate_name(wanted.name)
        for service in wanted.services or ():
            validate_name(service)
        now_s = self._unix_s()
        with self._lock:
            store = self._loaded()
            self._forget_expired(store, now_s)
            if any(key.name == wanted.name for key in self._keys.values()):
                raise Conflict(f"there is a key {wanted.name!r}; revoke it first, or choose another name")
            if len(self._keys) >= MAX_KEYS:
                raise Conflict(f"there are {MAX_KEYS} keys; revoke one first")
            key_id = "".join(secrets.choice(_ID_CHARS) for _ in range(8))
            secret = f"{KEY_PREFIX}{key_id}_{secrets.token_urlsafe(_SECRET_BYTES)}"
            key = _StoredKey(
                name=wanted.name,
                key_id=key_id,
                digest=_digest(secret),
                services=None if wanted.services is None else tuple(dict.fromkeys(wanted.services)),
                rate_per_s=wanted.rate_per_s,
                created_unix_s=now_s,
                expires_unix_s=None if wanted.expires_in_s is None else now_s + wanted.expires_in_s,
            )
            if not store.put_if_absent(_FOLDER + key_id, msgspec.json.encode(key)):
                raise Conflict("another key has the same id; try again")
            self._keys[key_id] = key
            return NewApiKey(secret=secret, key=self._status(key))

    def revoke(self, name: str) -> ApiKeyStatus:
        """Take a key away: its next request is refused. Raises NotFound, StorageError."""
        unknown = NotFound(f"there is no key {name!r:.100}; `springtide keys ls` lists them")
        try:
            validate_name(name)
        except InvalidRequest:
            raise unknown from None
        with self._lock:
            store = self._loaded()
            key = next((key for key in self._keys.values() if key.name == name), None)
            if key is None:
                raise unknown
            store.delete([_FOLDER + key.key_id])
            del self._keys[key.key_id]
            status = self._status(key)
            self._uses.pop(key.key_id, None)
            return status

    def listed(self) -> list[ApiKeyStatus]:
        """The keys, in the order of their names. Raises StorageError."""
        with self._lock:
            self._forget_expired(self._loaded(), self._unix_s())
            return [self._status(key) for key in sorted(self._keys.values(), key=lambda key: key.name)]

    def admit(self, secret: str, path: str) -> tuple[str, Response | None]:
        """Return the name of the key with this secret, and the refusal of a path that is not of its services (403), or
        of a request beyond its rate (429).

        Raises Unauthorized for an unknown secret.
        """
        match = _SECRET.fullmatch(secret)
        key = self._keys.get(match[1]) if match else None
        if key is None or not hmac.compare_digest(_digest(secret), key.digest):
            raise Unauthorized("this key is wrong, or was revoked")
        now_unix_s = self._unix_s()
        if key.expires_unix_s is not None and key.expires_unix_s <= now_unix_s:
            raise Unauthorized(f"the key {key.name!r} has expired")
        use = self._uses.setdefault(key.key_id, _Use())
        service = service_of_path(path)
        if service is None or (key.services is not None and service not in key.services):
            use.num_refused += 1
            may = "all services" if key.services is None else ", ".join(key.services) or "no service"
            refused = RequestForbidden(f"the key {key.name!r} may call {may}, and nothing else")
            return key.name, problem_of(refused)
        use.last_unix_s = now_unix_s
        if key.rate_per_s is not None and (wait_s := use.wait_s(key.rate_per_s, self._now_s())):
            use.num_refused += 1
            sentence = f"the key {key.name!r} may send {key.rate_per_s:g} requests a second; try again later"
            headers = {"Retry-After": str(max(1, math.ceil(wait_s)))}
            return key.name, problem(429, "rate_limited", sentence, headers)
        use.num += 1
        return key.name, None

    def _loaded(self) -> Store:
        if self._store is None:
            store = self._open_store()
            found: dict[str, _StoredKey] = {}
            for name in store.keys(_FOLDER):
                # One that is gone by now was revoked.
                with contextlib.suppress(ObjectMissing):
                    key = _decoded(store.get(name), name)
                    found[key.key_id] = key
            self._keys, self._store = found, store
        return self._store

    def _forget_expired(self, store: Store, now_unix_s: float) -> None:
        expired = [k for k, key in self._keys.items() if key.expires_unix_s and key.expires_unix_s <= now_unix_s]
        if expired:
            store.delete([_FOLDER + key_id for key_id in expired])
        for key_id in expired:
            del self._keys[key_id]
            self._uses.pop(key_id, None)

    def _status(self, key: _StoredKey) -> ApiKeyStatus:
        use = self._uses.get(key.key_id) or _Use()
        return ApiKeyStatus(
            name=key.name,
            key_id=key.key_id,
            services=key.services,
            rate_per_s=key.rate_per_s,
            created_unix_s=key.created_unix_s,
            expires_unix_s=key.expires_unix_s,
            num_requests=use.num,
            num_refused=use.num_refused,
            last_used_unix_s=use.last_unix_s,
        )


def service_of_path(path: str) -> str | None:
    """The name of the service that a request to this path calls; None for all other paths."""
    parts = path.split("/", 4)
    if len(parts) > 2 and parts[1] == "f":
        return parts[2].partition("@")[0] or None
    if len(parts) > 3 and parts[1:3] == ["v2", "models"]:
        return parts[3] or None
    return None


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()


def _decoded(data: bytes, name: str) -> _StoredKey:
    try:
        return decode_json(data, _StoredKey)
    except (msgspec.DecodeError, InvalidRequest) as error:
        raise InvalidRequest(f"{name} in the platform's store is no key ({error}); remove it") from None


def key_routes(keys: ApiKeys) -> APIRouter:
    """The routes that make, list and revoke keys; they need the platform's token."""
    router = APIRouter(prefix="/v1/keys", tags=["keys"])

    @router.post(
        "",
        summary="Make a key with which services can be called",
        status_code=201,
        openapi_extra=openapi.takes(ApiKeyIn, {"name": "shop", "services": ["digits"], "rate_per_s": 50.0}),
        responses=openapi.answers(
            openapi.reference(NewApiKey), "Its secret, told only now.", 400, 409, 413, 415, 422, 503, status=201
        ),
    )
    async def create(request: Request) -> Response:
        wanted = await read_body(request, ApiKeyIn)
        return encoded(await run_in_threadpool(keys.create, wanted), 201)

    @router.get(
        "",
        summary="The keys, without their secrets",
        responses=openapi.answers(openapi.list_of(ApiKeyStatus), "The keys by name.", 503),
    )
    async def listed() -> Response:
        return encoded(await run_in_threadpool(keys.listed))

    @router.delete(
        "/{name}",
        summary="Revoke a key",
        responses=openapi.answers(
            openapi.reference(ApiKeyStatus), "It opens nothing any more.", 400, 404, 413, 415, 422, 503
        ),
    )
    async def revoke(request: Request, name: openapi.NamePath) -> Response:
        await read_nothing(request)
        return encoded(await run_in_threadpool(keys.revoke, name))

    return router
