"""What is known of a dataset that grows, for whoever waits for more of it: cheap to ask again and again."""

from __future__ import annotations

from springtide.core.function_search import StreamView
from springtide.core.ports import Store
from springtide.storage.datasets.log import DatasetLog
from springtide.storage.datasets.manifest import DatasetLost, DatasetManifest

# Every so many looks it is asked whether the stream is still there at all.
LOOKS_PER_CHECK = 16


def read_stream_view(store: Store, name: str, now_unix_s: float | None = None) -> StreamView:
    """The stream as it is now: two small reads. With `now_unix_s` its rate falls while nothing arrives.

    Raises ObjectMissing where there is none, StorageError.
    """
    return view_of(DatasetLog(store, name).read(), now_unix_s)


def view_of(manifest: DatasetManifest, now_unix_s: float | None = None) -> StreamView:
    return StreamView(
        name=manifest.name,
        num_samples=manifest.num_samples,
        arrivals_per_s=manifest.arrivals_per_s(None if manifest.is_closed else now_unix_s),
        is_closed=manifest.is_closed,
    )


class StreamWatch:
    """Follows one stream: a look costs one small read where nothing is new. Not for several threads at once."""

    def __init__(self, store: Store, name: str) -> None:
        self._log = DatasetLog(store, name)
        self._manifest: DatasetManifest | None = None
        self._num_looks = 0

    def look(self, now_unix_s: float | None = None) -> StreamView:
        """The stream as it is now. Raises ObjectMissing if there never was one, DatasetLost if it has vanished."""
        if self._manifest is None:
            self._manifest = self._log.read()
            return view_of(self._manifest, now_unix_s)
        self._num_looks += 1
        if self._num_looks % LOOKS_PER_CHECK == 0 and not self._log.is_still(self._manifest):
            name = self._log.name
            raise DatasetLost(
                f"the stream {name!r} has vanished from the store: nothing more can come of it; append to it anew "
                f"with `springtide data append {name} FILE` and submit the job again"
            )
        self._manifest = self._log.advanced(self._manifest)
        return view_of(self._manifest, now_unix_s)
