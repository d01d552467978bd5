"""What goes over the wire to an API server and comes back: messages, their decoders, and options of connections."""

from __future__ import annotations

import socket
import urllib.request
from typing import Literal, NamedTuple

import httpx2
import msgspec

from springtide.backends.kubernetes.api_errors import Unreachable
from springtide.backends.kubernetes.kinds import Object

METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
# A connection whose other end vanished without a word is found out in half a minute.
SOCKET_OPTIONS = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    *(
        [
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),
        ]
        if hasattr(socket, "TCP_USER_TIMEOUT")
        else []
    ),
]

PatchType = Literal["merge", "json", "apply", "strategic"]
PATCH_TYPES: dict[PatchType, str] = {
    "merge": "application/merge-patch+json",
    "json": "application/json-patch+json",
    "apply": "application/apply-patch+yaml",
    "strategic": "application/strategic-merge-patch+json",
}


class WatchEvent(NamedTuple):
    """`type` is ADDED, MODIFIED, DELETED or BOOKMARK; of a bookmark only the object's resourceVersion counts."""

    type: str
    object: Object


class Listing(NamedTuple):
    """Objects of one kind, as they were together at `resource_version`."""

    items: list[Object]
    resource_version: str


class _Event(msgspec.Struct):
    type: str
    object: Object


class _ListMeta(msgspec.Struct):
    resource_version: str = msgspec.field(default="", name="resourceVersion")
    next_page: str = msgspec.field(default="", name="continue")


class _List(msgspec.Struct):
    metadata: _ListMeta
    items: list[Object] | None = None


event_decoder = msgspec.json.Decoder(_Event)
list_decoder = msgspec.json.Decoder(_List)
decode_object = msgspec.json.Decoder(Object).decode
encode = msgspec.json.Encoder().encode


def selectors(labels: str, fields: str) -> dict[str, str]:
    """The parameters that choose objects; none where nothing is chosen by."""
    chosen = {"labelSelector": labels, "fieldSelector": fields}
    return {name: value for name, value in chosen.items() if value}


def unreachable(server: str, error: httpx2.HTTPError) -> Unreachable:
    """What a call is told that got no answer."""
    told = str(error) or type(error).__name__
    return Unreachable(f"the API server {server} does not answer: {told}")


def proxy_for(server: str) -> str | None:
    """The proxy that the environment names for an address (HTTPS_PROXY, NO_PROXY), if any."""
    url = httpx2.URL(server)
    if urllib.request.proxy_bypass(url.host):
        return None
    return urllib.request.getproxies().get(url.scheme)
