"""`springtide chaos` on real processes for half a minute, and what it reports when something was lost."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from springtide.core.errors import BackendError, InvalidRequest
from springtide_studies.chaos.drill import ChaosOptions, ChaosRun, FaultTimes, run_chaos
from springtide_studies.chaos.load import ChaosRequest
from springtide_studies.chaos.platform import ChaosPlatform

OPTIONS = ChaosOptions(minutes=0.5, seed=7)


def springtide_chaos(*arguments):
    """The command in a process of its own, which changes its namespaces and adopts orphans."""
    command = [sys.executable, "-c", "from springtide.cli.main import main; main()", "chaos", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", ["5", "11"])
def test_half_a_minute_of_faults_loses_nothing(seed):
    run = springtide_chaos("--minutes", "0.5", "--seed", seed, "--json")
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads(run.stdout)
    assert report["passed"] is True
    assert report["violations"] == []
    assert sum(fault["num_times"] for fault in report["faults"]) >= 3
    assert report["jobs"]["SUCCEEDED"] >= 3
    assert report["requests"]["answered"] >= 50


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kills_alone_go_round_all_that_can_be_killed():
    kinds = ("control plane killed", "worker killed", "zygote killed", "replica killed")
    run = springtide_chaos("--minutes", "0.4", "--seed", "3", "--json", *(f"--only={kind}" for kind in kinds))
    report = json.loads(run.stdout)
    assert run.returncode == 0, report["violations"]
    assert {fault["kind"] for fault in report["faults"]} == set(kinds)
    assert report["num_control_planes"] >= 2


def test_only_a_platform_of_its_own_is_injured(tmp_path):
    (tmp_path / "journal.db").touch()
    run = springtide_chaos("--minutes", "0.1", "--state-dir", str(tmp_path))
    assert run.returncode == 1
    assert "is not empty" in run.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["journal.db"]


def test_an_unknown_fault_is_named():
    with pytest.raises(InvalidRequest, match="no fault 'rain'; known are control plane killed"):
        run_chaos({"minutes": 1.0, "seed": 1, "only": ("rain",)}, print)


def test_what_cannot_be_injected_here_is_said(tmp_path):
    only = ChaosOptions(minutes=0.5, seed=7, only=("full disk",))
    with pytest.raises(BackendError, match="none of these faults can be injected here: needs root"):
        ChaosRun(only, ChaosPlatform(tmp_path, "springtide"), {"full disk": "needs root"}, print).play()


def test_the_command_repeats_the_run():
    assert OPTIONS.command == "springtide chaos --minutes 0.5 --seed 7"
    other = ChaosOptions(minutes=2, seed=7, policy="edf", only=("full disk",))
    assert other.command == "springtide chaos --minutes 2 --seed 7 --policy edf --only 'full disk'"


@pytest.mark.parametrize(
    ("kind", "outcome", "sent_at", "is_excused"),
    [
        ("control plane killed", "lost", 11.0, True),
        ("control plane killed", "lost", 13.0, False),
        ("control plane killed", "wrong", 11.0, False),
        ("worker killed", "lost", 11.0, False),
    ],
)
def test_only_a_death_of_the_control_plane_may_lose_requests(tmp_path, kind, outcome, sent_at, is_excused):
    run = ChaosRun(OPTIONS, ChaosPlatform(tmp_path, "springtide"), {}, print)
    times = FaultTimes(kind=kind)
    run._windows = [(10.0, 12.0, times)]
    run.load.requests = [ChaosRequest(sent_at=sent_at, ended_at=sent_at + 0.1, outcome=outcome)]
    run._judge_requests()
    assert bool(run.report.violations) is not is_excused
    assert times.num_lost == is_excused
