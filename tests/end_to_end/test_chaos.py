"""`springtide chaos` as people run it: half a minute of faults on real processes, and nothing is lost."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kits.simulation.sweeps import only_in_full

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def springtide_chaos(*arguments):
    """The command in a process of its own, which changes its namespaces and adopts orphans."""
    command = [sys.executable, "-c", "from springtide.cli.main import main; main()", "chaos", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.parametrize("seed", ["5", pytest.param("11", marks=only_in_full)])
def test_half_a_minute_of_faults_loses_nothing(seed):
    run = springtide_chaos("--minutes", "0.5", "--seed", seed, "--json")
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads(run.stdout)
    assert report["passed"] is True
    assert report["violations"] == []
    assert sum(fault["num_times"] for fault in report["faults"]) >= 3
    assert report["jobs"]["SUCCEEDED"] >= 3
    assert report["requests"]["answered"] >= 50


@only_in_full
def test_kills_alone_go_round_all_that_can_be_killed():
    kinds = ("control plane killed", "worker killed", "zygote killed", "replica killed")
    run = springtide_chaos("--minutes", "0.4", "--seed", "3", "--json", *(f"--only={kind}" for kind in kinds))
    report = json.loads(run.stdout)
    assert run.returncode == 0, report["violations"]
    assert {fault["kind"] for fault in report["faults"]} == set(kinds)
    assert report["num_control_planes"] >= 2


@only_in_full
def test_disks_and_the_network_fail_and_no_step_is_lost():
    kinds = ("full disk", "read-only disk", "network down")
    run = springtide_chaos("--minutes", "0.6", "--seed", "2", "--json", *(f"--only={kind}" for kind in kinds))
    if run.returncode == 1 and "root" in run.stderr:
        pytest.skip(run.stderr)
    report = json.loads(run.stdout)
    assert run.returncode == 0, report["violations"]
    assert all(fault["num_times"] for fault in report["faults"])


def test_only_a_platform_of_its_own_is_injured(tmp_path):
    (tmp_path / "journal.db").touch()
    run = springtide_chaos("--minutes", "0.1", "--state-dir", str(tmp_path))
    assert run.returncode == 1
    assert "is not empty" in run.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["journal.db"]
