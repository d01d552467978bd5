"""The REST routes of datasets.

Clients upload shards into the platform's store first; then one small request adds them to a dataset.
"""

from __future__ import annotations

import hashlib
import mmap
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from urllib.parse import unquote, urlsplit

import msgspec
from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from springtide.core.decoding import convert
from springtide.core.errors import CapacityError, Conflict, InvalidRequest, NotFound, StorageError
from springtide.core.ports import Store
from springtide.core.quantities import validate_name
from springtide.core.workload import WorkloadId
from springtide.service.api import openapi
from springtide.service.api.routes import encoded, read_json, read_nothing
from springtide.service.ports import PlatformLike
from springtide.service.submission.problems import Malformed, TooLarge
from springtide.service.submission.schemas import with_whole_numbers
from springtide.storage.datasets.cut import shard_contents
from springtide.storage.datasets.log import DatasetLog
from springtide.storage.datasets.manifest import (
    MAX_FRAME_BYTES,
    DatasetChange,
    DatasetManifest,
    DatasetPart,
    DatasetStatus,
    status_of,
)
from springtide.storage.datasets.store import appended_part, closing_part, list_datasets, remove_dataset, whole_part
from springtide.storage.stores.open import open_store
from springtide.storage.workloads.artifacts import Artifact, checked_digest

MAX_UPLOADS = 8
_EXAMPLE = {
    "verb": "append",
    "part_id": "a1",
    "arrays": [{"name": "x", "dtype": "F32", "shape": [8]}],
    "shards": [["0" * 64, 32, 1096]],
}


class DatasetCatalog:
    """The datasets of one platform, in its object store or in its state directory."""

    def __init__(self, platform: PlatformLike) -> None:
        self._platform = platform
        self._state_dir = platform.workload_dir(WorkloadId("data")).parents[1]
        self._lock = threading.Lock()
        self._store: Store | None = None
        self._num_uploads = 0

    @property
    def store(self) -> Store:
        """The store, opened on first use. Raises InvalidRequest, StorageError."""
        with self._lock:
            if self._store is None:
                try:
                    self._store = open_store(self._platform.data_store_url())
                except ModuleNotFoundError as error:
                    raise InvalidRequest(
                        f"the platform's store needs {error.name}: pip install 'springtide[functions]'"
                    ) from None
            return self._store

    def listed(self) -> list[DatasetStatus]:
        """Every dataset, by name."""
        return list_datasets(self.store, time.time()) if self._has_store() else []

    def one(self, name: str) -> DatasetStatus:
        """One dataset. Raises NotFound."""
        found = self._log_of(name).find()
        if found is None:
            raise _unknown(name)
        return status_of(found, time.time())

    def shard(self, name: str, sha256: str) -> Artifact:
        """A shard that was uploaded before. Raises NotFound."""
        log = self._log_of(name)
        try:
            found = log.shards.find(checked_digest(sha256))
        except StorageError as error:
            raise NotFound(str(error)) from None
        if found is None:
            raise NotFound(f"the dataset {name!r} has no shard {sha256}; send it with PUT")
        return found

    @contextmanager
    def upload(self) -> Iterator[IO[bytes]]:
        """A temporary file for an upload, which vanishes if the platform dies. Raises CapacityError."""
        with self._lock:
            if self._num_uploads >= MAX_UPLOADS:
                raise CapacityError(f"{MAX_UPLOADS} shards are being sent already; send this one a moment later")
            self._num_uploads += 1
        try:
            folder = Path(self._state_dir)
            with tempfile.TemporaryFile(dir=folder if folder.is_dir() else None) as file:
                yield file
        finally:
            with self._lock:
                self._num_uploads -= 1

    def take_shard(self, name: str, artifact: Artifact, file: IO[bytes]) -> Artifact:
        """Check that the uploaded file is a shard and store it. Raises InvalidRequest, StorageError."""
        if artifact.num_bytes == 0:
            raise InvalidRequest("this is no shard of a dataset: it has no bytes")
        file.flush()
        # Mapped instead of read, because a shard may have 256 MiB. The mapping ends with its last reference.
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        try:
            shard_contents(data)
        except StorageError as error:
            raise InvalidRequest(f"this is no shard of a dataset: {error}") from None
        DatasetLog(self.store, name).shards.put_unseen(artifact, data)
        return artifact

    def change(self, name: str, change: DatasetChange) -> DatasetStatus:
        """Carry out a put, append or close. Raises InvalidRequest, NotFound, Conflict, StorageError."""
        log = self._log_of(name) if change.verb == "close" else DatasetLog(self.store, name)
        now_s = time.time()

        def part(manifest: DatasetManifest | None) -> DatasetPart | None:
            if change.verb == "close":
                return closing_part(name, manifest, now_s, change.part_id)
            make = whole_part if change.verb == "put" else appended_part
            return make(name, manifest, change.arrays, change.shards, now_s, change.part_id)

        current = log.find()
        if change.verb != "close":
            if not change.shards or not change.arrays:
                raise InvalidRequest("a change of a dataset needs its arrays and at least one shard")
            # Invalid requests are refused first, because checking the shards takes longer.
            if part(current) is not None:
                _check_shards(log, change)
        return status_of(log.commit(part, current), now_s)

    def remove(self, name: str) -> None:
        """Delete a dataset. Raises NotFound, and Conflict while a job trains on it as a stream."""
        for record in self._platform.view().jobs.values():
            if record.job.stream == name and not record.lifecycle.state.is_terminal:
                raise Conflict(
                    f"the job {record.job.job_id} trains on {name!r}; cancel it first: "
                    f"springtide cancel {record.job.job_id}"
                )
        self._log_of(name)
        remove_dataset(self.store, name)

    def _log_of(self, name: str) -> DatasetLog:
        """The log of an existing dataset; an invalid name counts as unknown. Raises NotFound, StorageError."""
        try:
            validate_name(name)
        except InvalidRequest:
            raise _unknown(name) from None
        if not self._has_store():
            raise _unknown(name)
        return DatasetLog(self.store, name)

    def _has_store(self) -> bool:
        """Whether the store exists: a store in a directory is created by the first upload, not by a read."""
        parts = urlsplit(self._platform.data_store_url())
        return self._store is not None or parts.scheme != "file" or Path(unquote(parts.path)).is_dir()


def data_routes(catalog: DatasetCatalog) -> APIRouter:
    router = APIRouter(prefix="/v1/data", tags=["platform"])
    dataset = openapi.answers(
        openapi.reference(DatasetStatus), "The dataset as it is now.", 400, 404, 409, 413, 415, 422, 503
    )

    @router.get("", summary="Every dataset", responses=openapi.answers(openapi.list_of(DatasetStatus), "By name.", 503))
    async def list_all() -> Response:
        return encoded(await run_in_threadpool(catalog.listed))

    @router.get("/{name}", summary="One dataset", responses=dataset)
    async def get_one(name: openapi.NamePath) -> Response:
        return encoded(await run_in_threadpool(catalog.one, name))

    @router.post(
        "/{name}",
        summary="Put shards that were sent as a whole dataset, append them to a growing one, or close it",
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": openapi.reference(DatasetChange), "example": _EXAMPLE}},
            }
        },
        responses=dataset,
    )
    async def change(request: Request, name: openapi.NamePath) -> Response:
        validate_name(name, "the dataset's name")
        body = _decoded(await read_json(request))
        return encoded(await run_in_threadpool(catalog.change, name, body))

    @router.delete(
        "/{name}",
        summary="Take a dataset away, with all its shards",
        responses=openapi.answers({"type": "object"}, "It is gone.", 400, 404, 409, 413, 415, 422, 503),
    )
    async def remove(request: Request, name: openapi.NamePath) -> Response:
        await read_nothing(request)
        await run_in_threadpool(catalog.remove, name)
        return encoded({"removed": name})

    _add_shard_routes(router, catalog)
    return router


def _add_shard_routes(router: APIRouter, catalog: DatasetCatalog) -> None:
    """Add the routes that upload shards. A shard belongs to no dataset until a change names it."""
    known = openapi.answers(openapi.reference(Artifact), "The shard is there.", 400, 404, 409, 413, 422, 503)

    @router.get("/{name}/shards/{sha256}", summary="Whether a shard was sent before", responses=known)
    async def get_shard(name: openapi.NamePath, sha256: openapi.DigestPath) -> Response:
        return encoded(await run_in_threadpool(catalog.shard, name, sha256))

    @router.put(
        "/{name}/shards/{sha256}",
        summary="Send one shard, a safetensors frame with that digest",
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
            }
        },
        responses=known,
    )
    async def put_shard(request: Request, name: openapi.NamePath, sha256: openapi.DigestPath) -> Response:
        # Checked before any of the body is read or a file is created.
        try:
            checked_digest(sha256)
        except StorageError as error:
            raise InvalidRequest(str(error)) from None
        validate_name(name, "the dataset's name")
        found, num_bytes = hashlib.sha256(), 0
        with catalog.upload() as file:
            async for chunk in request.stream():
                num_bytes += len(chunk)
                if num_bytes > MAX_FRAME_BYTES:
                    raise TooLarge(f"a shard has at most {MAX_FRAME_BYTES:,} bytes; cut the dataset into smaller ones")
                found.update(chunk)
                await run_in_threadpool(file.write, chunk)
            if found.hexdigest() != sha256:
                raise Conflict(f"the {num_bytes:,} bytes that came do not have the digest {sha256}; send again")
            artifact = Artifact(sha256=sha256, num_bytes=num_bytes)
            return encoded(await run_in_threadpool(catalog.take_shard, name, artifact, file))


def _check_shards(log: DatasetLog, change: DatasetChange) -> None:
    """Check that every shard of a change is stored. Raises InvalidRequest, Conflict."""
    for number, shard in enumerate(change.shards, 1):
        if shard.num_samples < 1:
            raise InvalidRequest(f"shard {number} of {len(change.shards)} has no samples; leave it out")
        if log.shards.find(shard.sha256) != Artifact(sha256=shard.sha256, num_bytes=shard.num_bytes):
            raise Conflict(f"shard {number} of {len(change.shards)} was not sent; send it with PUT first")


def _decoded(body: bytes) -> DatasetChange:
    try:
        # Decoded first as any JSON, to tell invalid JSON (400) from JSON that is not a change (422).
        value = with_whole_numbers(msgspec.json.decode(body))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Malformed(f"the body is not valid JSON: {error}") from None
    try:
        return convert(value, DatasetChange)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"this is no change of a dataset: {error}") from None


def _unknown(name: str) -> NotFound:
    return NotFound(f"there is no dataset {name!r}; `springtide data ls` lists what there is")
