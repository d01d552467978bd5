"""What each policy does in four short scenarios, line by line. A change here is a change of behaviour: review it."""

from __future__ import annotations

from pathlib import Path

import pytest

from springtide_studies.fault_seeds.golden import golden_file, golden_names, golden_trace, main

HERE = Path(__file__).parent


@pytest.mark.parametrize(("scenario", "policy"), golden_names())
def test_trace_is_as_written(scenario: str, policy: str) -> None:
    path = HERE / golden_file(scenario, policy)
    assert golden_trace(scenario, policy) == path.read_text(encoding="utf-8"), (
        "to accept the change: python -m springtide_studies.fault_seeds.golden --write"
    )


@pytest.mark.slow
def test_a_difference_is_reported_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 1
    assert "differs: deadlines.edf.txt" in capsys.readouterr().out
    assert main(["--write", str(tmp_path)]) == 0
    assert main([str(tmp_path)]) == 0
