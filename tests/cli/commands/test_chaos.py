"""`springtide chaos`: its table, its exit code, and what it says without the studies."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from click.testing import Result

from springtide.cli.commands import chaos

Run = Callable[..., Result]
FAULT = {"kind": "worker killed", "num_times": 3, "longest_recovery_s": 1.25, "num_lost": 0, "violations": ["x"]}
REPORT = {
    "passed": False,
    "command": "springtide chaos --minutes 1 --seed 9",
    "faults": [{**FAULT, "seen": "worker 2 of 3"}],
    "skipped": {"full disk": "needs root"},
    "jobs": {"SUCCEEDED": 12, "CANCELLED": 2},
    "requests": {"answered": 300},
    "num_control_planes": 2,
    "first": {"descriptors": 30.0},
    "last": {"descriptors": 31.0},
    "violations": ["worker killed: x"],
    "kept": "/somewhere",
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    calls: list[dict[str, object]] = []

    def run(options: dict[str, object], tell: Callable[[str], None]) -> dict[str, object]:
        calls.append(options)
        tell("progress")
        return REPORT if options["seed"] == 9 else {**REPORT, "passed": True, "violations": [], "kept": ""}

    monkeypatch.setattr(chaos, "load_from_studies", lambda group, name, what: run)
    return calls


def test_a_violation_is_exit_code_1_with_the_command_that_repeats_it(asked, springtide: Run) -> None:
    result = springtide("chaos", "--minutes", "1", "--seed", "9", "--only", "worker killed")
    assert result.exit_code == 1
    assert "worker killed  3        1.2 s             0              1           worker 2 of 3" in result.stdout
    assert "full disk      skipped" in result.stdout
    assert "VIOLATED  worker killed: x" in result.stdout
    assert "again     springtide chaos --minutes 1 --seed 9" in result.stdout
    assert asked == [{"minutes": 1.0, "seed": 9, "policy": "springtide", "only": ("worker killed",), "state_dir": ""}]


def test_json_is_one_document_and_progress_is_beside_it(asked, springtide: Run) -> None:
    result = springtide("chaos", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["passed"] is True
    assert "progress" in result.stderr


def test_without_the_studies_it_is_said_how_to_get_them(springtide: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("springtide.core.plugins.offered", lambda group: {})
    refused = springtide("chaos")
    assert refused.exit_code == 2
    assert "chaos comes with springtide[studies]: pip install 'springtide[studies]'" in refused.stderr
