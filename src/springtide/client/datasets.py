"""Named datasets in the platform's store: `st.dataset`, `st.stream`, and functions that upload samples."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

from springtide.core.errors import BackendError, InvalidRequest, NotFound
from springtide.core.quantities import parse_size_bytes, validate_name
from springtide.storage.datasets.manifest import (
    DatasetArray,
    DatasetChange,
    DatasetStatus,
    ShardEntry,
    check_alike,
)
from springtide.storage.datasets.reference import DatasetReference

if TYPE_CHECKING:
    from springtide.client.api import Client

# Long enough for a shard of 256 MB on a slow disk.
_SEND_TIMEOUT_S = 300.0
_MAX_MIXED = 1_000_000
OnShard = Callable[[int, int], None]
Verb = Literal["put", "append"]


def dataset(name: str, *, mixed: int = 0) -> DatasetReference:
    """A reference to an uploaded dataset, for `st.Task(dataset=...)` or `ctx.batches(...)`:

        st.upload_dataset("digits", x=images, y=labels)
        task = st.Task(make_model, st.dataset("digits"), loss=cross_entropy, optimizer=make_optimizer)

    Workers read only the shards that they need. Each epoch uses every sample once, in an order that shuffles the
    shards, and the samples within groups of `mixed` shards (0: as many as fit on a function's disk). Raises
    InvalidRequest.
    """
    if isinstance(mixed, bool) or not isinstance(mixed, int) or not 0 <= mixed <= _MAX_MIXED:
        raise InvalidRequest(f"mixed is a number of shards, from 0 (as many as fit) to {_MAX_MIXED:,}, not {mixed!r}")
    return DatasetReference(name=validate_name(name, "the dataset's name"), num_mixed=mixed)


def stream(name: str) -> DatasetReference:
    """A reference to a growing dataset, for `st.Task(dataset=...)` of jobs on functions.

    Each sample is used once, in order of arrival; the job waits for more until `close_dataset`. Raises InvalidRequest.
    """
    return DatasetReference(name=validate_name(name, "the stream's name"), is_stream=True)


def upload_dataset(
    name: str,
    arrays: Mapping[str, Any] | None = None,
    /,
    *,
    client: Client | None = None,
    shard_size: str | int | None = None,
    **named: Any,
) -> DatasetStatus:
    """Upload arrays as a complete dataset: `st.upload_dataset("digits", x=images, y=labels)`.

    Each array (numpy or torch) has one row per sample. `shard_size` is "32MB" or bytes. Uploading the same content
    again changes nothing. Raises InvalidRequest, Conflict if the name holds other content, BackendError.
    """
    pieces = [_arrays_of(arrays, named)]
    with _connected(client) as connected:
        return send_pieces(connected, name, "put", pieces, shard_bytes=shard_bytes_of(shard_size))


def append_dataset(
    name: str,
    arrays: Mapping[str, Any] | None = None,
    /,
    *,
    client: Client | None = None,
    shard_size: str | int | None = None,
    **named: Any,
) -> DatasetStatus:
    """Append samples to a growing dataset: `st.append_dataset("clicks", x=..., y=...)`. The first call creates it.

    The samples become visible together, or not at all. Raises InvalidRequest, Conflict (the dataset is closed, or was
    uploaded as a whole), BackendError.
    """
    pieces = [_arrays_of(arrays, named)]
    with _connected(client) as connected:
        return send_pieces(connected, name, "append", pieces, shard_bytes=shard_bytes_of(shard_size))


def close_dataset(name: str, *, client: Client | None = None) -> DatasetStatus:
    """Close a growing dataset: jobs train on its remaining samples and finish. Raises NotFound, Conflict."""
    with _connected(client) as connected:
        change = DatasetChange(verb="close", part_id=secrets.token_hex(8))
        return _change(connected, name, change)


def remove_dataset(name: str, *, client: Client | None = None) -> None:
    """Delete a dataset with its shards. Raises NotFound, and Conflict while a job trains on it as a stream."""
    with _connected(client) as connected:
        connected.request("DELETE", _path(name), dict[str, str])


def show_dataset(name: str, *, client: Client | None = None) -> DatasetStatus:
    """The status of one dataset. Raises NotFound."""
    with _connected(client) as connected:
        return connected.request("GET", _path(name), DatasetStatus)


def datasets(*, client: Client | None = None) -> list[DatasetStatus]:
    """The status of every dataset of the platform, ordered by name."""
    with _connected(client) as connected:
        return connected.request("GET", "/v1/data", list[DatasetStatus])


def send_pieces(
    client: Client,
    name: str,
    verb: Verb,
    pieces: Iterable[Mapping[str, Any]],
    *,
    shard_bytes: int,
    on_progress: OnShard = lambda num_samples, num_bytes: None,
) -> DatasetStatus:
    """Upload named arrays piece by piece: all as one complete dataset ("put"), or each as one append ("append").

    `on_progress(num_samples, num_bytes)` is called after each shard, with what has been sent or found there so far.
    Raises as `upload_dataset` does, InvalidRequest also where there is no piece.
    """
    sender = _Sender(client, name, shard_bytes, on_progress)
    arrays: tuple[DatasetArray, ...] = ()
    shards: list[ShardEntry] = []
    status: DatasetStatus | None = None
    for piece in pieces:
        described, sent = sender.send(piece, verb)
        if arrays and described != arrays:
            raise InvalidRequest("the pieces of a dataset must have the same arrays, types and shapes of a sample")
        arrays = described
        shards += sent
        if verb == "append":
            status = sender.commit(verb, arrays, shards)
            shards = []
    if not arrays:
        raise InvalidRequest("there is nothing to send: hand over at least one sample")
    return status if status is not None else sender.commit(verb, arrays, shards)


class _Sender:
    """Cuts arrays into shards and uploads those that the platform does not have yet."""

    def __init__(self, client: Client, name: str, shard_bytes: int, on_progress: OnShard) -> None:
        self._client = client
        self._name = validate_name(name, "the dataset's name")
        self._shard_bytes = shard_bytes
        self._on_progress = on_progress
        self._num_samples = 0
        self._num_bytes = 0
        try:
            self._existing: DatasetStatus | None = client.request("GET", _path(name), DatasetStatus)
        except NotFound:
            self._existing = None

    def send(self, piece: Mapping[str, Any], verb: Verb) -> tuple[tuple[DatasetArray, ...], list[ShardEntry]]:
        """Upload one piece; returns the description of its arrays, and its shards in order."""
        # Imported here, because it imports numpy.
        from springtide.storage.datasets.cut import checked_arrays, cut, described

        arrays = checked_arrays({name: _on_the_cpu(array) for name, array in piece.items()})
        spec = described(arrays)
        if verb == "append" and self._existing is not None:
            check_alike(self._name, self._existing.arrays, spec)
        # If the name is taken no shards are uploaded: their digests suffice to tell whether the content is the same.
        writes = verb == "append" or self._existing is None
        shards = []
        for frame, num_samples in cut(arrays, self._shard_bytes):
            entry = ShardEntry(hashlib.sha256(frame).hexdigest(), num_samples, len(frame))
            if writes and not self._has(entry):
                path = f"{_path(self._name)}/shards/{entry.sha256}"
                self._client.request("PUT", path, dict[str, Any], body=frame, timeout_s=_SEND_TIMEOUT_S)
            shards.append(entry)
            self._num_samples += num_samples
            self._num_bytes += len(frame)
            self._on_progress(self._num_samples, self._num_bytes)
        return spec, shards

    def commit(self, verb: Verb, arrays: tuple[DatasetArray, ...], shards: list[ShardEntry]) -> DatasetStatus:
        """Make the uploaded shards part of the dataset. Raises InvalidRequest, Conflict, BackendError."""
        change = DatasetChange(verb=verb, part_id=secrets.token_hex(8), arrays=arrays, shards=tuple(shards))
        try:
            return _change(self._client, self._name, change)
        except BackendError:
            # The answer may have been lost; the platform applies the same `part_id` only once.
            return _change(self._client, self._name, change)

    def _has(self, entry: ShardEntry) -> bool:
        try:
            self._client.request("GET", f"{_path(self._name)}/shards/{entry.sha256}", dict[str, Any])
        except NotFound:
            return False
        return True


def shard_bytes_of(size: str | int | None) -> int:
    """A shard size in bytes, from "32MB", bytes, or None for the default. Raises InvalidRequest."""
    from springtide.storage.datasets.cut import DEFAULT_SHARD_BYTES

    return DEFAULT_SHARD_BYTES if size is None else parse_size_bytes(size, "the size of a shard")


def _change(client: Client, name: str, change: DatasetChange) -> DatasetStatus:
    return client.request("POST", _path(name), DatasetStatus, body=change, timeout_s=_SEND_TIMEOUT_S)


def _arrays_of(arrays: Mapping[str, Any] | None, named: Mapping[str, Any]) -> Mapping[str, Any]:
    if arrays is not None and named:
        raise InvalidRequest("give the arrays as one mapping or by name, not both")
    return named if arrays is None else arrays


def _on_the_cpu(array: Any) -> Any:
    """A torch tensor as a numpy array; anything else unchanged."""
    return array.detach().cpu().numpy() if hasattr(array, "detach") else array


def _path(name: str) -> str:
    return "/v1/data/" + quote(validate_name(name, "the dataset's name"), safe="")


@contextmanager
def _connected(client: Client | None) -> Iterator[Client]:
    if client is not None:
        yield client
        return
    from springtide.client.api import connect

    with connect() as opened:
        yield opened
