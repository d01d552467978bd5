"""The platform's secrets in its cluster: the master key, from which all other keys are derived, and the API's token.

Each is a Secret in the platform's namespace. The first control plane creates it and all later ones read it.
"""

from __future__ import annotations

import base64
import secrets

from springtide.backends.kubernetes.client.api import KubeApi
from springtide.backends.kubernetes.client.errors import AlreadyExists
from springtide.backends.kubernetes.client.kinds import SECRET
from springtide.backends.kubernetes.settings import MANAGED_BY_LABEL, PLATFORM_LABEL, KubernetesSettings
from springtide.core.errors import InvalidRequest

MASTER_KEY_BYTES = 32
_TOKEN_BYTES = 32
_SHORTEST_TOKEN = 16


def master_key_secret(settings: KubernetesSettings) -> str:
    """The name of the Secret that holds the platform's master key under `key`."""
    return f"{settings.name}-master-key"


def token_secret(settings: KubernetesSettings) -> str:
    """The name of the Secret that holds the API's token under `token`."""
    return f"{settings.name}-token"


async def master_key(api: KubeApi, settings: KubernetesSettings) -> bytes:
    """The platform's master key, created if it does not exist. Raises ApiError, InvalidRequest if it is too short."""
    name = master_key_secret(settings)
    found = await _value(api, settings, name, "key", secrets.token_bytes(MASTER_KEY_BYTES))
    if len(found) < MASTER_KEY_BYTES:
        raise InvalidRequest(
            f"the Secret {settings.namespace}/{name} must hold at least {MASTER_KEY_BYTES} random bytes under `key`; "
            "delete it to have a new one made (workers that run now will then be replaced)"
        )
    return found


async def api_token(api: KubeApi, settings: KubernetesSettings) -> str:
    """The token of the API, created if it does not exist. Raises ApiError, InvalidRequest if it is not usable."""
    name = token_secret(settings)
    found = await _value(api, settings, name, "token", secrets.token_urlsafe(_TOKEN_BYTES).encode())
    token = found.decode("ascii", "replace").strip()
    if len(token) < _SHORTEST_TOKEN or not token.isascii() or not token.isprintable():
        raise InvalidRequest(
            f"the Secret {settings.namespace}/{name} must hold at least {_SHORTEST_TOKEN} printable characters under "
            "`token`; delete it to have a new one made"
        )
    return token


async def _value(api: KubeApi, settings: KubernetesSettings, name: str, key: str, fresh: bytes) -> bytes:
    """The value of a Secret's key; a Secret that does not exist is created with `fresh`."""
    found = await api.find(SECRET, name, settings.namespace)
    if found is None:
        wanted = {
            "metadata": {
                "name": name,
                "namespace": settings.namespace,
                "labels": {MANAGED_BY_LABEL: "springtide", PLATFORM_LABEL: settings.name},
            },
            "type": "Opaque",
            "data": {key: base64.b64encode(fresh).decode()},
        }
        try:
            found = await api.create(SECRET, wanted, settings.namespace)
        except AlreadyExists:
            # Another control plane created it first: use its value.
            found = await api.get(SECRET, name, settings.namespace)
    try:
        return base64.b64decode((found.get("data") or {}).get(key, ""), validate=True)
    except ValueError:
        return b""
