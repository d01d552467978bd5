"""The bench of packing: its rows, what passes, and how the command calls it."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from click.testing import CliRunner

from springtide.cli.main import cli
from springtide.core.errors import InvalidRequest
from springtide_studies.dilu import packing_bench as bench_packing
from springtide_studies.workloads.dilu import SharingWorkload, draw_sharing_workload

pytest.importorskip("scipy")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A drawn workload of 40 instances as a file of the artifact's format."""
    write(tmp_path / "instances-40.txt", draw_sharing_workload(40, 5))
    return tmp_path


def write(path: Path, workload: SharingWorkload) -> None:
    lines = []
    for event in workload.events:
        each, share = event.instance, event.instance.share
        minutes, seconds = divmod(int(event.at_s), 60)
        told = {
            "Time": f"2024-06-19 15:{minutes:02d}:{seconds:02d}",
            "Action": "start" if event.is_start else "delete",
            "Instance": {
                "service_name": each.name,
                "type": each.kind,
                "gpu_num": each.num_devices,
                "sm_requests": share.request,
                "sm_limits": share.limit,
                "memory": [share.memory_mb // 1024] * each.num_devices,
            },
        }
        lines.append(repr(told))
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_packing, "SIZES", (30,))
    monkeypatch.setattr(bench_packing, "NUM_DRAWN", MappingProxyType({30: 2}))


def bench(data: Path, step_s: float = 1e-5, **more: Any) -> dict[str, Any]:
    return bench_packing.run_bench(data, timer=itertools.count(0, step_s).__next__, **more)


def test_rows_have_their_bounds_and_baselines(data: Path) -> None:
    report = bench(data)
    rows = {row["case"].removeprefix("instances-40: "): row for row in report["rows"]}
    peak = rows["GPUs at the peak, nobody split"]
    assert peak["bound"] <= peak["ours"] <= peak["peaks"]["exclusive"]
    assert peak["baseline"] == peak["peaks"]["infless-r"]
    assert set(peak["peaks"]) == {each.name for each in bench_packing.CONTENDERS}
    assert rows["events that leave a bound broken, all policies"]["ours"] == 0
    # A timer that ticks at each call: every decision took one step.
    assert rows["a decision, 99th percentile"]["ours"] == pytest.approx(0.01)
    drawn = rows["drawn, 30 instances, 2 seeds: GPUs at the peak, mean"]
    assert drawn["passed"] is None
    assert drawn["bound"] <= drawn["ours"]
    assert report["passed"] == (peak["ours"] <= peak["baseline"] and rows["GPUs at the peak, splits priced"]["passed"])
    assert "| instances-40 |" in bench_packing.markdown(report)


@pytest.mark.slow
def test_slow_decisions_and_too_many_devices_do_not_pass(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = bench(data, step_s=0.1)
    failed = {row["case"] for row in slow["rows"] if row["passed"] is False}
    assert {"instances-40: all decisions", "instances-40: a decision, 99th percentile"} <= failed
    assert not slow["passed"]
    monkeypatch.setattr(bench_packing, "MOST_DEVICES", {40: (1, 1)})
    strict = bench(data)
    assert not strict["passed"]
    assert next(row for row in strict["rows"] if "nobody split" in row["case"])["passed"] is False


def test_sizes_choose_among_the_files(data: Path) -> None:
    assert bench(data, sizes=(40,))["rows"][-1]["case"].startswith("drawn, 40 instances, 1 seeds")
    with pytest.raises(InvalidRequest, match="has workloads of 40 instances"):
        bench(data, sizes=(100,))


def test_the_command_asks_for_the_folder(data: Path) -> None:
    runner = CliRunner()
    refused = runner.invoke(cli, ["bench", "packing"])
    assert refused.exit_code == 2
    assert "--data DIR" in refused.output
    refused = runner.invoke(cli, ["bench", "packing", "--data", str(data), "--sizes", "many"])
    assert "is no number of instances" in refused.output
    done = runner.invoke(cli, ["bench", "packing", "--data", str(data), "--sizes", "40", "--markdown"])
    assert done.exit_code == 0, done.output
    assert "| workload |" in done.output
