"""Errors of an API server by status, and whether repeating a call makes sense."""

from __future__ import annotations

import msgspec

from springtide.core.decoding import decode_json
from springtide.core.errors import BackendError


class KubeApiError(BackendError):
    """A call failed.

    `status` is HTTP's (0: no answer came), `reason` the server's word for it, `retry_after_s` when it wants to be asked
    again (0: it did not say). `fields` are the paths in an object that were found wanting.
    """

    def __init__(
        self,
        status: int,
        reason: str,
        message: str,
        *,
        retry_after_s: float = 0.0,
        fields: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s
        self.fields = fields

    @property
    def is_passing(self) -> bool:
        """Whether the same call may well succeed later: nothing is wrong with the call itself.

        Not to be known (401) passes, too: tokens are renewed, and what checks them may be away.
        """
        return self.status in (0, 401, 408, 429) or self.status >= 500


class Unreachable(KubeApiError):
    """No answer: the server is down, or the connection broke. The call may have been carried out nevertheless."""

    def __init__(self, message: str) -> None:
        super().__init__(0, "Unreachable", message)


class NotAuthenticated(KubeApiError):
    """401: the server does not accept the caller's credentials."""


class KubeForbidden(KubeApiError):
    """403: the user lacks the right, or an admission rule refused."""


class QuotaExceeded(KubeForbidden):
    """403 for lack of quota: the same call succeeds when the namespace has room."""


class NoSuchObject(KubeApiError):
    """404: no object of that name, or no such kind of object."""


class AlreadyExists(KubeApiError):
    """409 to a create: there is an object of that name."""


class VersionConflict(KubeApiError):
    """409: the object has another version or uid than the caller named, or its state does not allow the call."""


class Expired(KubeApiError):
    """410: the version to watch from, or to continue a listing from, has expired."""


class Invalid(KubeApiError):
    """422 or 400: the object is invalid; `fields` says where."""


class TooManyRequests(KubeApiError):
    """429: the server is overloaded, or a disruption budget does not allow an eviction now."""


class ServerFault(KubeApiError):
    """5xx: the server, or a service that it depends on, has failed."""


_BY_STATUS: dict[int, type[KubeApiError]] = {
    400: Invalid,
    401: NotAuthenticated,
    403: KubeForbidden,
    404: NoSuchObject,
    409: VersionConflict,
    410: Expired,
    422: Invalid,
    429: TooManyRequests,
}


class _Cause(msgspec.Struct):
    field: str = ""
    message: str = ""


class _Details(msgspec.Struct):
    causes: list[_Cause] | None = None
    retry_after_s: float = msgspec.field(default=0.0, name="retryAfterSeconds")


class _Status(msgspec.Struct):
    message: str = ""
    reason: str = ""
    code: int = 0
    details: _Details | None = None


def error_of(status: int, body: bytes, retry_after: str = "") -> KubeApiError:
    """The error for an answer. `retry_after` is the header of that name."""
    try:
        told = decode_json(body, _Status)
    except msgspec.MsgspecError:
        # The answer may be from a proxy, in a format of its own.
        told = _Status(message=body[:300].decode(errors="replace").strip())
    status = status or told.code
    details = told.details or _Details()
    waits_s = details.retry_after_s
    try:
        waits_s = max(waits_s, float(retry_after)) if retry_after else waits_s
    except ValueError:
        pass  # The header may be a date, too: then the caller's own back-off does.
    kind = _BY_STATUS.get(status, ServerFault if status >= 500 else KubeApiError)
    if status == 409 and told.reason == "AlreadyExists":
        kind = AlreadyExists
    elif status == 403 and "exceeded quota" in told.message:
        kind = QuotaExceeded
    return kind(
        status,
        told.reason or kind.__name__,
        told.message or f"the API server answered {status}",
        retry_after_s=waits_s,
        fields=tuple(cause.field for cause in details.causes or () if cause.field),
    )
