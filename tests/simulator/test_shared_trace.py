"""A trace whose jobs hold parts of devices, played by the command's own code against several packers."""

from __future__ import annotations

from pathlib import Path

import pytest

from springtide.core.shares import make_share
from springtide.scheduling.registry import PACKER_NAMES
from springtide.simulator.fluid.trace import read_jobs
from springtide.simulator.simulate import simulate
from springtide.workloads.formats.springtide import COLUMNS


def write(folder: Path, *rows: str) -> str:
    path = folder / "trace.csv"
    path.write_text("\n".join([",".join((*COLUMNS, "share")), *rows]) + "\n", encoding="utf-8")
    return str(path)


def play(trace: str, policy: str, cluster: str = "1x1") -> dict:
    answer = simulate(trace=trace, cluster=cluster, policies=[policy], overhead="none", with_rows=True)
    return answer["policies"][policy]


def ends(figures: dict) -> dict[str, float]:
    return {row["job_id"]: row["end_s"] for row in figures["rows"]}


def test_jobs_of_a_trace_keep_their_shares(tmp_path: Path) -> None:
    trace = write(tmp_path, "a,0,3200,32,1,1,,100,0.9,0.4..0.8", "b,0,3200,32,1,1,,100,0.9,")
    jobs = [job for _, job in read_jobs(trace, 1).arrivals]
    assert [job.share for job in jobs] == [make_share(0.4, 0.8), None]
    assert jobs[0].profile_steps_per_s == jobs[1].profile_steps_per_s


def test_two_jobs_beside_each_other_end_sooner_than_one_after_the_other(tmp_path: Path) -> None:
    rows = [f"{name},0,6400,32,1,1,,100,0.9,0.5..0.75" for name in "ab"]
    trace = write(tmp_path, *rows)
    # 64 s of work each at a whole device: 128 s at half of it, or at three quarters one after the other.
    for policy in ("dilu/springtide", "springtide", "fifo"):
        assert ends(play(trace, policy)) == pytest.approx({"a": 128.0, "b": 128.0})
    alone = ends(play(trace, "infless-l/fifo"))
    assert alone == pytest.approx({"a": 64 / 0.75, "b": 2 * 64 / 0.75})
    assert ends(play(trace, "infless-r/fifo")) == pytest.approx({"a": 128.0, "b": 128.0})


def test_what_is_kept_for_jobs_is_what_counts_as_used(tmp_path: Path) -> None:
    trace = write(tmp_path, "a,0,6400,32,1,1,,100,0.9,0.25..0.5")
    figures = play(trace, "dilu/fifo")
    assert ends(figures) == pytest.approx({"a": 128.0})
    assert figures["rows"][0]["gpu_hours"] == pytest.approx(0.25 * 128 / 3600)


@pytest.mark.slow
@pytest.mark.parametrize("packer", PACKER_NAMES)
def test_a_crowd_with_parts_and_whole_devices_ends_under_every_packer(tmp_path: Path, packer: str) -> None:
    shares = ("", "0.2..0.5", "0.5", "0.3..0.3", "0.7..0.8")
    rows = []
    for number in range(40):
        deadline_s = 4000 if number % 4 == 0 else ""
        samples, most = 3200 + 640 * (number % 5), 1 + number % 3
        rows.append(f"j{number},{7 * number},{samples},32,1,{most},{deadline_s},100,0.9,{shares[number % 5]}")
    trace = write(tmp_path, *rows)
    figures = play(trace, f"{packer}/elastic", cluster="2x2")
    assert [row["state"] for row in figures["rows"]] == ["SUCCEEDED"] * 40
    assert figures == play(trace, f"{packer}/elastic", cluster="2x2")
