"""Scaling tables: how many optimizer steps a second a model runs at a global batch size on n devices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from springtide.core.errors import InvalidRequest
from springtide.workloads.formats.pollux import derive_table, find_measurements
from springtide.workloads.rows import TextRow, read_header, read_rows
from springtide.workloads.trace import MAX_DEVICES, Trace

_KEY = "global_batch_size"
_MAX_TABLES = 1_000
_MAX_ROWS = 10_000
_NOT_MEASURED = frozenset({"", "nan"})

Pair = tuple[str, int]


class Profiles(msgspec.Struct, frozen=True, kw_only=True):
    """The tables of one folder: model -> global batch size -> devices -> optimizer steps a second."""

    name: str
    tables: dict[str, dict[int, dict[int, float]]]

    @classmethod
    def read(cls, folder: Path | str) -> Profiles:
        """Read every `MODEL.csv` whose first column is global_batch_size; other files are ignored.

        The other columns are numbers of devices. `nan`, an empty field and 0 mean that the model does not run, or was
        not measured, on that many. From a folder of Pollux's measurements, APPLICATION/placements.csv, tables are
        derived (see `formats.pollux.derive_table`). Raises InvalidRequest naming file, line and column.
        """
        place = Path(folder)
        if not place.is_dir():
            raise InvalidRequest(f"{place} is not a folder of scaling tables; name one that holds MODEL.csv files")
        tables = {path.stem: _read_table(path) for path in _table_files(place)}
        if not tables:
            tables = {path.name: derive_table(path) for path in find_measurements(place)}
        if not tables:
            raise InvalidRequest(f"{place} holds no scaling table; a table MODEL.csv begins {_KEY},1,2,4")
        return cls(name=place.name, tables=tables)

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """Every model and batch size that runs on some number of devices, sorted."""
        return tuple(
            (model, size) for model, table in sorted(self.tables.items()) for size in sorted(table) if table[size]
        )

    def knows(self, model: str, global_batch_size: int) -> bool:
        """Whether the pair runs on some number of devices."""
        return bool(self.tables.get(model, {}).get(global_batch_size))

    def steps_per_s(self, model: str, global_batch_size: int) -> dict[int, float]:
        """Devices to optimizer steps a second, as measured, fewest devices first. Raises InvalidRequest if unknown."""
        if model not in self.tables:
            raise InvalidRequest(f"{self.name} has no model {model!r}; it knows {', '.join(sorted(self.tables))}")
        if not self.knows(model, global_batch_size):
            sizes = ", ".join(str(size) for size in sorted(self.tables[model]))
            raise InvalidRequest(
                f"{self.name} does not say how fast {model!r} runs at batch {global_batch_size}; it knows {sizes}"
            )
        return dict(self.tables[model][global_batch_size])


def rate_at(steps_per_s: dict[int, float], num_devices: int) -> float:
    """Steps a second on so many devices: linear between measured counts, flat beyond them; 0.0 without any."""
    if not steps_per_s:
        return 0.0
    counts = sorted(steps_per_s)
    if num_devices <= counts[0]:
        return steps_per_s[counts[0]]
    for below, above in itertools.pairwise(counts):
        if num_devices <= above:
            share = (num_devices - below) / (above - below)
            return steps_per_s[below] + share * (steps_per_s[above] - steps_per_s[below])
    return steps_per_s[counts[-1]]


def choose_profiles(trace: Trace, trace_path: Path | str, given: Profiles | Path | str | None = None) -> Profiles:
    """The tables for a trace: those given, or of the given folder, or of one near the trace; they hold all its pairs.

    Raises InvalidRequest naming the file, line and column of the first pair that they lack.
    """
    places = {(model, size): place for model, size, place in trace.pair_places}
    # In the order of the file, so that the error is about its first unknown pair.
    pairs = [*places, *(pair for pair in trace.pairs if pair not in places)]
    if given is None:
        return Profiles.read(find_profiles(trace_path, pairs, places))
    profiles = given if isinstance(given, Profiles) else Profiles.read(given)
    for pair in pairs:
        if not profiles.knows(*pair):
            try:
                profiles.steps_per_s(*pair)
            except InvalidRequest as error:
                where = places.get(pair, f"trace {trace.name}")
                raise InvalidRequest(f"{where}: {error}; name other tables with --profiles DIR") from None
    return profiles


def find_profiles(trace_path: Path | str, pairs: Iterable[Pair], places: Mapping[Pair, str] | None = None) -> Path:
    """The folder near a trace whose tables hold all of `pairs`: its own folder, the two above, and the folders named
    throughputs* or profiles* in these; the nearest first, then by name, so that A100 comes before T4.

    Raises InvalidRequest naming the first pair that the closest match lacks and, if `places` has it, its line.
    """
    wanted = list(dict.fromkeys(pairs))
    best: tuple[int, Path, Pair] | None = None
    for folder in _folders_near(Path(trace_path)):
        if next(iter(_table_files(folder)), None) is None and not find_measurements(folder):
            continue
        profiles = Profiles.read(folder)
        missing = [pair for pair in wanted if not profiles.knows(*pair)]
        if not missing:
            return folder
        if best is None or len(missing) < best[0]:
            best = (len(missing), folder, missing[0])
    if best is None:
        raise InvalidRequest(
            f"no folder of scaling tables lies near {trace_path}; name one with --profiles DIR, where MODEL.csv "
            f"begins {_KEY},1,2,4"
        )
    _, folder, (model, size) = best
    where = f"{places[model, size]}: " if places and (model, size) in places else ""
    raise InvalidRequest(
        f"{where}no scaling table near {trace_path} knows {model!r} at batch {size} ({folder.name} comes closest); "
        "name a folder that does with --profiles DIR"
    )


def _folders_near(trace_path: Path) -> Iterator[Path]:
    start = trace_path.absolute().parent
    for folder in [start, *start.parents][:3]:
        yield folder
        try:
            inside = sorted(path for path in folder.iterdir() if path.name.startswith(("throughputs", "profiles")))
        except OSError:
            continue
        # Sorted, throughputs_A100 stands before throughputs_T4, and profiles before both.
        yield from (path for path in inside if path.is_dir())


def _table_files(folder: Path) -> Iterator[Path]:
    """The tables in a folder, by name; at most _MAX_TABLES files are looked at."""
    try:
        paths = sorted(path for path in folder.glob("*.csv") if path.is_file())
    except OSError as error:
        raise InvalidRequest(f"{folder} cannot be read: {error}") from error
    for path in paths[:_MAX_TABLES]:
        try:
            with path.open("rb") as file:
                begins = file.read(len(_KEY) + 3)
        except OSError as error:
            raise InvalidRequest(f"{path} cannot be read: {error}") from error
        if begins.removeprefix(b"\xef\xbb\xbf").startswith(_KEY.encode()):
            yield path


def _read_table(path: Path) -> dict[int, dict[int, float]]:
    counts = {}
    for column in read_header(path)[1:]:
        if not column.isascii() or not column.isdecimal() or not 1 <= int(column) <= MAX_DEVICES:
            raise InvalidRequest(f"{path.name} line 1, column {column}: a number of devices belongs here")
        counts[column] = int(column)
    if not counts:
        raise InvalidRequest(f"{path.name} line 1: no column of a number of devices; write {_KEY},1,2,4")
    table: dict[int, dict[int, float]] = {}
    for row in read_rows(path, [_KEY, *counts]):
        size = row.count(_KEY)
        if size in table:
            row.refuse(_KEY, f"batch {size} has a row already; keep one of the two")
        if len(table) >= _MAX_ROWS:
            row.refuse(_KEY, f"over {_MAX_ROWS} batch sizes; this is no scaling table")
        table[size] = dict(sorted(_read_rates(row, counts)))
    return table


def _read_rates(row: TextRow, counts: dict[str, int]) -> Iterator[tuple[int, float]]:
    for column, count in counts.items():
        if row.text(column).lower() in _NOT_MEASURED:
            continue
        rate = row.number(column)
        if rate > 0 and math.isfinite(rate):
            yield count, rate
