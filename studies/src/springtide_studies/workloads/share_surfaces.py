"""Recorded latencies of an inference model by batch size and share of a device: tables without a header, checked."""

from __future__ import annotations

from pathlib import Path

import msgspec

from springtide.core.errors import InvalidRequest
from springtide.workloads.rows import name_of, read_rows

_COLUMNS = ["batch_size", "share_percent", "latency_s", "throughput_per_s"]
_MAX_BATCH = 65_536
_MAX_LATENCY_S = 3_600.0
_MAX_RATE = 1e15
_MAX_ROWS = 10_000


class ShareSurface(msgspec.Struct, frozen=True, kw_only=True):
    """What a model's batches took: `latency_s` by (batch size, percent of a device), whole in both.

    `throughput_per_s` is what the table says of the same, in units of its own. `batch_sizes` and `percents` rise.
    """

    name: str
    batch_sizes: tuple[int, ...]
    percents: tuple[int, ...]
    latency_s: dict[tuple[int, int], float]
    throughput_per_s: dict[tuple[int, int], float]

    @property
    def shares(self) -> tuple[float, ...]:
        """The shares as fractions of a device."""
        return tuple(percent / 100.0 for percent in self.percents)

    def at(self, batch_size: int, share: float) -> float:
        """Seconds of a batch; `share` is one of `shares`. Raises InvalidRequest where nothing was recorded."""
        found = self.latency_s.get((batch_size, round(share * 100)))
        if found is None:
            raise InvalidRequest(
                f"{self.name} has no row for a batch of {batch_size} on {share:.0%}; it has batches of "
                f"{_listed(self.batch_sizes)} on {_listed(self.percents)} percent"
            )
        return found


def read_share_surface(path: Path) -> ShareSurface:
    """Read lines of `batch size,percent of a device,seconds of a batch,samples a second`, in any order.

    The table is full: every batch size on every share that it names, once. Raises InvalidRequest with file and line.
    """
    latency_s: dict[tuple[int, int], float] = {}
    throughput_per_s: dict[tuple[int, int], float] = {}
    for row in read_rows(path, _COLUMNS, columns=_COLUMNS):
        key = (row.count("batch_size", highest=_MAX_BATCH), row.count("share_percent", highest=100))
        if key in latency_s:
            row.refuse("share_percent", f"a batch of {key[0]} on {key[1]} percent is there twice; keep one of the two")
        if len(latency_s) >= _MAX_ROWS:
            row.refuse("batch_size", f"the table has more than {_MAX_ROWS} rows, which no profile has")
        took_s = row.number("latency_s", highest=_MAX_LATENCY_S)
        if took_s <= 0.0:
            row.refuse("latency_s", "a batch takes longer than no time at all")
        latency_s[key] = took_s
        throughput_per_s[key] = row.number("throughput_per_s", highest=_MAX_RATE)
    batch_sizes = tuple(sorted({size for size, _ in latency_s}))
    percents = tuple(sorted({percent for _, percent in latency_s}))
    for size in batch_sizes:
        for percent in percents:
            if (size, percent) not in latency_s:
                raise InvalidRequest(
                    f"{path.name} has no row for a batch of {size} on {percent} percent; every batch size needs one "
                    "for each share"
                )
    return ShareSurface(
        name=name_of(path),
        batch_sizes=batch_sizes,
        percents=percents,
        latency_s=latency_s,
        throughput_per_s=throughput_per_s,
    )


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(str(value) for value in values[:20])
