"""Every reader of traces keeps the contract of readers, by its own name and behind the door that detects formats."""

from __future__ import annotations

from pathlib import Path

import pytest

from springtide.core.errors import InvalidRequest
from springtide.testing.trace_reader import Reader, Sample, check_memory, check_reader
from springtide.workloads.formats import elasticflow, google, helios, philly, pollux, springtide
from springtide.workloads.readers import FORMATS, read_trace
from springtide.workloads.trace import Trace, TraceJob

SAMPLES = Path(__file__).parents[1] / "workloads" / "samples"


def sample(name: str, columns: tuple[str, ...] = (), **changes) -> Sample:
    path = SAMPLES / name
    return Sample(text=path.read_text(), columns=columns, suffix=path.suffix, **changes)


CLUSTER_COLUMNS = tuple(
    {"submit_time": "submission_time", "iteration": "num_iteration", "ddl": "deadline"}.get(name, name)
    for name in elasticflow.COLUMNS
)
CASES: dict[str, tuple[Reader, Sample]] = {
    "elasticflow": (elasticflow.read, sample("elasticflow.csv", elasticflow.COLUMNS)),
    "elasticflow-cluster": (elasticflow.read, sample("elasticflow_cluster.csv", CLUSTER_COLUMNS)),
    "elasticflow-philly": (elasticflow.read, sample("elasticflow_philly.csv", elasticflow.COLUMNS)),
    "springtide": (springtide.read, sample("springtide.csv", springtide.COLUMNS)),
    "pollux": (pollux.read, sample("pollux.csv", pollux.COLUMNS)),
    "philly": (philly.read_json, sample("philly_log.json")),
    "philly-csv": (philly.read_csv, sample("philly.csv", philly.COLUMNS, has_ids=False)),
    "helios": (helios.read, sample("helios.csv", helios.COLUMNS)),
    "google": (google.read, sample("google.csv", google.COLUMNS, has_header=False, has_ids=False)),
}


def test_every_format_is_checked() -> None:
    assert set(FORMATS) <= set(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_reader_keeps_the_contract(name: str, tmp_path: Path) -> None:
    read, good = CASES[name]
    check_reader(read, good, tmp_path)


@pytest.mark.parametrize("name", CASES)
def test_ten_gigabytes_are_refused_in_bounded_memory(name: str, tmp_path: Path) -> None:
    read, good = CASES[name]
    check_memory(read, good, tmp_path)


@pytest.mark.parametrize("name", CASES)
def test_the_door_reads_what_the_reader_reads(name: str, tmp_path: Path) -> None:
    read, good = CASES[name]
    path = tmp_path / f"sample{good.suffix}"
    path.write_text(good.text)
    assert read_trace(path) == read(path, None)


@pytest.mark.parametrize("name", CASES)
def test_the_door_keeps_the_contract_too(name: str, tmp_path: Path) -> None:
    _, good = CASES[name]
    # What a header without one of its columns is taken for decides the sentence: the columns are each reader's affair.
    whole = Sample(text=good.text, suffix=good.suffix, has_header=good.has_header)
    check_reader(lambda path, limit: read_trace(path, limit=limit), whole, tmp_path)


def careless(path: Path, limit: int | None) -> Trace:
    """Reads the whole file and believes it."""
    rows = path.read_text().splitlines()[1:]
    cells = [row.split(",") for row in rows][:limit]
    return Trace(name="", jobs=tuple(TraceJob(job_id=cell[0], submit_s=float(cell[1])) for cell in cells))


def greedy(path: Path, limit: int | None) -> Trace:
    """Refuses in a good sentence, but holds far more of the file than a line."""
    with path.open("rb") as file:
        held = file.read(64 * 2**20)
    raise InvalidRequest(f"{path.name} line 1: {len(held)} bytes are too many")


def test_the_kit_finds_a_careless_reader(tmp_path: Path) -> None:
    with pytest.raises((AssertionError, ValueError, IndexError, OSError)):
        check_reader(careless, CASES["elasticflow"][1], tmp_path)


def test_the_kit_finds_a_greedy_reader(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="took"):
        check_memory(greedy, CASES["elasticflow"][1], tmp_path)
