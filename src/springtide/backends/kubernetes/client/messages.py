"""Messages to and from an API server, and their decoders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, Literal, NamedTuple, TypeAlias, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from springtide.backends.kubernetes.client.kinds import ACCESS_REVIEW, Key, Kind, Object, number_of
from springtide.core.decoding import json_decoder

ItemT = TypeVar("ItemT")
# The items of all pages, and the version that they are of.
Listed: TypeAlias = tuple[list[ItemT], str]
_PATH_SAFE = "/:@!$&'()*+,;=~"
METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
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


class HeadMetadata(msgspec.Struct, gc=False):
    """The identity and version of an object."""

    name: str
    namespace: str = ""
    uid: str = ""
    resource_version: str = msgspec.field(default="", name="resourceVersion")


class ResponseHead(msgspec.Struct, gc=False):
    """An object of a listing, reduced to its metadata."""

    metadata: HeadMetadata

    @property
    def key(self) -> Key:
        return Key(self.metadata.namespace, self.metadata.name)

    @property
    def uid(self) -> str:
        """The object's uid."""
        return self.metadata.uid

    @property
    def version(self) -> int:
        """Its version, as kinds.version_of reads it."""
        return number_of(self.metadata.resource_version)


class Heads(NamedTuple):
    """The heads of all objects of one kind at `resource_version`."""

    items: list[ResponseHead]
    resource_version: str


class _Event(msgspec.Struct):
    type: str
    object: Object


class _ListMeta(msgspec.Struct):
    resource_version: str = msgspec.field(default="", name="resourceVersion")
    next_page: str = msgspec.field(default="", name="continue")


class Page(msgspec.Struct, Generic[ItemT]):
    """One page of a listing."""

    metadata: _ListMeta
    items: list[ItemT] | None = None


event_decoder = json_decoder(_Event)
decode_objects = json_decoder(Page[Object]).decode
decode_heads = json_decoder(Page[ResponseHead]).decode
decode_object = json_decoder(Object).decode
encode = msgspec.json.Encoder().encode


def selectors(labels: str, fields: str) -> dict[str, str]:
    """The query parameters that select objects; empty without selectors."""
    chosen = {"labelSelector": labels, "fieldSelector": fields}
    return {name: value for name, value in chosen.items() if value}


def access_review(verb: str, kind: Kind, namespace: str, name: str, subresource: str) -> Object:
    """A SelfSubjectAccessReview: whether the caller has that right on objects of that kind."""
    attributes = {
        "verb": verb,
        "group": kind.group,
        "version": kind.version,
        "resource": kind.plural,
        "subresource": subresource,
        "namespace": namespace,
        "name": name,
    }
    return {
        "apiVersion": ACCESS_REVIEW.api_version,
        "kind": ACCESS_REVIEW.name,
        "spec": {"resourceAttributes": {key: value for key, value in attributes.items() if value}},
    }


def kind_of_write(method: str, path: str) -> str:
    """The kind of a write, so that writes of one kind cost the server alike: method and last part of the path."""
    end = path.rpartition("/")[2]
    return f"{method} {end}" if method == "POST" or end == "status" else method


def target_of(path: str, params: Mapping[str, str] | None) -> str:
    """A path and its query, percent-encoded."""
    path = quote(path, safe=_PATH_SAFE)
    return f"{path}?{urlencode(params)}" if params else path
