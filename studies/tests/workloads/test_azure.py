"""The Azure Functions trace: the contract of readers, its counts as moments, and its bad rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from springtide.core.errors import InvalidRequest
from springtide.testing.trace_reader import Sample, check_memory, check_reader
from springtide.workloads.readers import AZURE_COLUMNS
from springtide_studies.workloads import azure
from springtide_studies.workloads.request_trace import FunctionCalls

SAMPLE = Path(__file__).parents[3] / "tests" / "workloads" / "samples" / "azure.csv"


def read_calls(path: Path, limit: int | None) -> tuple[FunctionCalls, ...]:
    return azure.read(path, limit).functions


def refuse(tmp_path: Path, old: str, new: str) -> str:
    """The sentence about the sample in which `old` is replaced."""
    text = SAMPLE.read_text()
    assert old in text
    path = tmp_path / "azure.csv"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(InvalidRequest) as caught:
        azure.read(path)
    return str(caught.value)


def test_the_reader_keeps_the_contract(tmp_path: Path) -> None:
    good = Sample(text=SAMPLE.read_text(), columns=(*AZURE_COLUMNS, "1"))
    check_reader(read_calls, good, tmp_path)
    check_memory(read_calls, good, tmp_path)


def test_azure_counts_become_moments() -> None:
    trace = azure.read(SAMPLE)
    assert [(calls.function, calls.num_calls) for calls in trace.functions] == [
        ("function-1", 123),
        ("function-2", 5),
        ("function-3", 7),
    ]
    assert trace.skipped == {"never called": 1}
    assert (trace.num_intervals, trace.interval_s) == (5, 60.0)
    assert trace.functions[0].intervals == (1, 4)
    assert trace.rates_per_s(0).tolist() == [0.0, 0.05, 0.0, 0.0, 2.0]
    moments_s = trace.arrivals_s(0, seed=3)
    assert np.histogram(moments_s, bins=5, range=(0, 300))[0].tolist() == [0, 3, 0, 0, 120]
    assert (np.diff(moments_s) >= 0).all()
    assert (moments_s == trace.arrivals_s(0, seed=3)).all()
    assert (moments_s != trace.arrivals_s(0, seed=4)).any()


def test_azure_rows_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for old, new, sentence in [
        ("0,3,0,0,120", "0,-3,0,0,120", "line 2, column 2: '-3' must be a whole number"),
        ("0,3,0,0,120", "0,3,0,0,nan", "line 2, column 5: 'nan' must be a whole number"),
        ("Trigger,1,2", "Trigger,2,1", "line 1, column 2: minute 1 belongs here"),
        ("function-2,timer", "function-1,http", "line 3, column HashFunction: 'function-1' of this app"),
    ]:
        assert sentence in refuse(tmp_path, old, new)
    monkeypatch.setattr(azure, "MAX_BUSY_MINUTES", 4)
    assert "line 3: more than" in refuse(tmp_path, "queue", "queue")


def test_a_function_of_very_many_calls_has_no_moments(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("HashOwner,HashApp,HashFunction,Trigger,1\na,b,c,d,2000000000\n")
    with pytest.raises(InvalidRequest, match="2,000,000,000 calls"):
        azure.read(path).arrivals_s(0, seed=0)
