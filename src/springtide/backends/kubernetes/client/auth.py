"""How calls authenticate, with secrets that change while the platform runs.

A token in a file (a pod's service account) is replaced by the kubelet, one of a command (a cloud's) expires, a client
certificate is renewed. Each is read again when it is due, and once when the server says 401.
"""

from __future__ import annotations

import asyncio
import datetime
import os
import ssl
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from springtide.core.decoding import decode_json
from springtide.core.errors import BackendError

# How long a token read from a file is used: the kubelet renews it at four fifths of its lifetime.
FILE_BELIEVED_S = 60.0
_COMMAND_S = 60.0
# A token is renewed this long before it expires.
_EXPIRY_MARGIN_S = 10.0


class Authorization(Protocol):
    """The source of the Authorization header of calls."""

    async def said(self, refused: str = "") -> str:
        """The header of that name; with `refused`, what to say instead of that. Raises BackendError: nothing is known.

        The same again means that there is nothing else to say.
        """
        ...


class Fixed:
    """A secret that does not change."""

    def __init__(self, header: str) -> None:
        self._header = header

    async def said(self, refused: str = "") -> str:
        return self._header


class TokenFile:
    """A bearer token in a file, which is read again every minute, and at once after a 401."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._bearer = ""
        self._read_at_s = float("-inf")

    async def said(self, refused: str = "") -> str:
        if refused or time.monotonic() - self._read_at_s > FILE_BELIEVED_S:
            self._read()
        return self._bearer

    def _read(self) -> None:
        try:
            self._bearer = f"Bearer {self._path.read_text().strip()}"
        except OSError as error:
            if not self._bearer:
                raise BackendError(f"the token {self._path} cannot be read: {error}") from error
        self._read_at_s = time.monotonic()


class _CredentialStatus(msgspec.Struct):
    token: str = ""
    expires_at: str = msgspec.field(default="", name="expirationTimestamp")


class _Credential(msgspec.Struct):
    status: _CredentialStatus = msgspec.field(default_factory=_CredentialStatus)


class TokenCommand:
    """A bearer token printed by a command (`exec` in a kubeconfig), renewed when it expires or is refused."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], api_version: str) -> None:
        self._command = tuple(command)
        self._environment = dict(environment)
        self._api_version = api_version
        self._bearer = ""
        self._expires_at_s = float("inf")
        self._lock = asyncio.Lock()

    async def said(self, refused: str = "") -> str:
        async with self._lock:
            is_stale = time.time() > self._expires_at_s - _EXPIRY_MARGIN_S
            if not self._bearer or is_stale or self._bearer == refused:
                await self._ask()
            return self._bearer

    async def _ask(self) -> None:
        info = {"apiVersion": self._api_version, "kind": "ExecCredential", "spec": {"interactive": False}}
        environment = {**os.environ, **self._environment, "KUBERNETES_EXEC_INFO": msgspec.json.encode(info).decode()}
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command, env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe
            )
            async with asyncio.timeout(_COMMAND_S):
                out, err = await process.communicate()
        except (OSError, TimeoutError) as error:
            raise BackendError(f"`{self._command[0]}` gave no credentials for the cluster: {error!r}") from error
        try:
            if process.returncode != 0:
                raise ValueError(err.decode(errors="replace").strip() or f"exit code {process.returncode}")
            status = decode_json(out, _Credential).status
            if not status.token:
                raise ValueError("its answer has no token (client certificates by a command are not taken)")
            expires_at_s = datetime.datetime.fromisoformat(status.expires_at).timestamp() if status.expires_at else None
        except ValueError as error:
            raise BackendError(f"`{self._command[0]}` gave no credentials for the cluster: {error}") from error
        self._bearer = f"Bearer {status.token}"
        self._expires_at_s = float("inf") if expires_at_s is None else expires_at_s


class ClientCertificate:
    """A client certificate in files, reloaded into its context when they change."""

    def __init__(self, context: ssl.SSLContext, certificate: Path, key: Path) -> None:
        self._context = context
        self._paths = (certificate, key)
        self._seen = self._stamps()
        self._looked_at_s = time.monotonic()

    def refresh(self) -> bool:
        """Check, at most once a minute, whether the files have changed: if so, new connections are needed."""
        now_s = time.monotonic()
        if now_s - self._looked_at_s < FILE_BELIEVED_S:
            return False
        self._looked_at_s = now_s
        stamps = self._stamps()
        if stamps == self._seen or not stamps:
            return False
        try:
            self._context.load_cert_chain(*self._paths)
        except (OSError, ssl.SSLError):
            # Only one file of the pair has been replaced so far: keep the old pair until the next check.
            return False
        self._seen = stamps
        return True

    def _stamps(self) -> tuple[tuple[int, int], ...]:
        try:
            return tuple((stat.st_mtime_ns, stat.st_ino) for stat in (path.stat() for path in self._paths))
        except OSError:
            return ()
