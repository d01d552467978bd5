"""The Secrets of workloads: created before a workload's first pod, and renewed while it starts others.

The platform may create, change and delete Secrets but not read them, so each is written without knowing its contents.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from springtide.backends.kubernetes.client.api import KubeApi
from springtide.backends.kubernetes.client.errors import AlreadyExists, NoSuchObject, VersionConflict
from springtide.backends.kubernetes.client.kinds import SECRET, Key, Object, key_of
from springtide.backends.kubernetes.client.thread import ApiThread
from springtide.core.workload import WorkloadId

# A Secret written within this time is taken to exist; after it another client may have deleted it.
SECRET_AGE_S = 60.0
# Beyond this number, workloads that have not started a pod for long are forgotten: that costs one more write.
_MOST_REMEMBERED = 4096


@dataclass(eq=False)
class _Writing:
    """When a workload's Secret was last written. The pods of a job start together: one writes, the others wait."""

    at_s: float = float("-inf")
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class PodSecrets:
    """`ensure` runs on the API thread, `forget` on the I/O thread."""

    def __init__(self, api_thread: ApiThread, may_write: Callable[[], bool]) -> None:
        self._thread = api_thread
        self._may_write = may_write
        self._written: dict[WorkloadId, _Writing] = {}

    async def ensure(self, api: KubeApi, workload_id: WorkloadId, secret: Object) -> None:
        """Make sure that a workload's Secret exists with exactly these contents. Raises ApiError."""
        known = self._written.get(workload_id) or self._remember(workload_id)
        async with known.lock:
            now_s = time.monotonic()
            if now_s - known.at_s <= SECRET_AGE_S:
                return
            # Most are new, and creating one costs the server a third of a patch.
            is_first = known.at_s == float("-inf")
            await (self._make(api, secret) if is_first else self._change(api, secret))
            known.at_s = now_s

    def forget(self, workload_id: WorkloadId, key: Key) -> None:
        """Delete the Secret of an ended workload that has no owner whose deletion would remove it."""
        self._written.pop(workload_id, None)
        self._thread.write(
            ("secret", *key),
            lambda api: api.delete(SECRET, key.name, key.namespace),
            is_still_wanted=self._may_write,
        )

    def _remember(self, workload_id: WorkloadId) -> _Writing:
        if len(self._written) >= _MOST_REMEMBERED:
            before_s = time.monotonic() - SECRET_AGE_S
            self._written = {
                name: known for name, known in self._written.items() if known.at_s > before_s or known.lock.locked()
            }
        return self._written.setdefault(workload_id, _Writing())

    async def _make(self, api: KubeApi, secret: Object) -> None:
        try:
            await api.create(SECRET, secret)
        except AlreadyExists:
            await self._change(api, secret)

    async def _change(self, api: KubeApi, secret: Object) -> None:
        """Replace all contents of the Secret."""
        key, metadata = key_of(secret), secret["metadata"]
        changes = [
            {"op": "add", "path": "/data", "value": secret["data"]},
            {"op": "add", "path": "/metadata/labels", "value": metadata["labels"]},
            {"op": "add", "path": "/metadata/annotations", "value": metadata["annotations"]},
            {"op": "add", "path": "/metadata/ownerReferences", "value": metadata.get("ownerReferences", [])},
        ]
        try:
            await api.patch(SECRET, key.name, changes, key.namespace, how="json")
        except NoSuchObject:
            # It was deleted; another client may create it again first.
            try:
                await api.create(SECRET, secret)
            except AlreadyExists as error:
                raise VersionConflict(409, "Conflict", f"the Secret {key.name} came and went: once more") from error
