"""The truth of jobs that change their batch: steps, gains, epochs, pauses and reports, reckoned by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kits.studies.goodput_data import step_s, write_application, write_workload
from springtide.core.decision import Plan, PoolAllocation, Snapshot
from springtide.core.errors import InvalidRequest
from springtide.core.job_parts import StepTime
from springtide.scheduling.registry import make_policy
from springtide.simulator.fluid.play import FluidRunResult
from springtide.simulator.simulate import simulate
from springtide.workloads.formats.pollux import read
from springtide.workloads.trace import make_trace
from springtide_studies.adaptive.jobs import find_measurements_near, goodput_arrivals
from springtide_studies.adaptive.play import GoodputSetting, make_nodes, play_workload
from springtide_studies.adaptive.speeds import lengths
from springtide_studies.adaptive.truth import AppTruth, compact_placement, make_truths
from springtide_studies.fapes.truth import split_batch
from springtide_studies.workloads.pollux_tables import read_applications

pytest.importorskip("scipy", reason="unmeasured placements are interpolated by an extra")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_application(tmp_path)


@pytest.fixture
def truth(folder: Path) -> AppTruth:
    return make_truths(read_applications(folder / "profiles"))["toy"]


class Script:
    """Gives the one job devices (node, index) and a batch from a moment on; keeps what it saw."""

    def __init__(self, *acts: tuple[float, list[tuple[int, int]], int]) -> None:
        self.acts = acts
        self.seen: list[Snapshot] = []

    def decide(self, snapshot: Snapshot) -> Plan:
        self.seen.append(snapshot)
        now = [act for act in self.acts if act[0] <= snapshot.now_s]
        later = [act[0] for act in self.acts if act[0] > snapshot.now_s]
        revisit_at_s = later[0] if later else None
        if not now or not snapshot.jobs:
            return Plan(revisit_at_s=revisit_at_s)
        job_id = snapshot.jobs[0].job.job_id
        given = PoolAllocation(
            device_ids=tuple(snapshot.cluster.nodes[node].devices[index].device_id for node, index in now[-1][1]),
            global_batch_size=now[-1][2] or None,
        )
        return Plan(allocations={job_id: given}, reasons={job_id: "the script"}, revisit_at_s=revisit_at_s)


def play_one(folder: Path, script: Any, **setting: Any) -> FluidRunResult:
    workload = write_workload(folder, num_jobs=1)
    return play_workload(script, workload, folder / "profiles", GoodputSetting(**setting))


ONE, TWO = [(0, 0)], [(0, 0), (0, 1)]


def test_a_step_is_measured_or_interpolated(truth: AppTruth) -> None:
    assert truth.step_times((2, 1), 6) == pytest.approx(step_s(2, 3, 6)), "between local batches, the ring turned round"
    for placement, local in (((1, 1, 1), 5), ((4, 4, 2, 1), 8), ((4,) * 12, 4)):
        assert truth.step_times(placement, local) == pytest.approx(step_s(len(placement), sum(placement), local))
    assert truth.step_times((1,), 99) == truth.step_times((1,), 8), "as the largest that was measured"


def test_packed_tables_never_pay_for_scattering(folder: Path) -> None:
    path = folder / "profiles" / "toy" / "placements.csv"
    path.write_text(path.read_text().replace("11,8,0.92,0.12", "11,8,0.7,0.1"))
    apps = read_applications(folder / "profiles")
    raw, packed = (make_truths(apps, rule)["toy"] for rule in ("raw", "packed"))
    assert raw.step_times((1, 1), 8) == (0.7, 0.1)
    assert packed.step_times((1, 1), 8) == raw.step_times((2,), 8) == step_s(1, 2, 8)
    assert packed.step_times((2, 2), 8) == raw.step_times((2, 2), 8), "slower than packed stays as it is"
    with pytest.raises(InvalidRequest, match="raw, packed"):
        make_truths(apps, "new")


@pytest.mark.parametrize(("size", "workers"), [(8, 1), (9, 1), (32, 1), (32, 2), (17, 4), (32, 3), (31, 4)])
def test_a_batch_is_split_as_policies_reckon(folder: Path, truth: AppTruth, size: int, workers: int) -> None:
    job = goodput_arrivals(read(write_workload(folder)), {"toy": truth})[0][1]
    local, passes, true_size = truth.split(size, workers)
    told_local, told_passes = split_batch(size, workers, job.batch, job.global_batch_size)
    assert passes == told_passes
    # Rounding up never goes beyond the largest batch, and nobody takes less than the least.
    assert local == max(4, min(told_local, 32 // (workers * passes)))
    assert true_size == local * passes * workers


def test_gain_and_epochs(truth: AppTruth) -> None:
    assert truth.epoch_ends == (100, 200), "the earliest of all trainings"
    assert truth.gain(8, 0) == 1.0
    assert truth.gain(16, 0) == pytest.approx(1.6)
    assert truth.gain(16, 1) == pytest.approx(4 / 3)
    # In steps of 16 each epoch is shorter by what such a step is worth.
    ends, worths = lengths(truth, 16)
    assert worths == pytest.approx((1.6, 4 / 3))
    assert ends == pytest.approx((62.5, 62.5 + 75))
    assert truth.time_alone_s((1,), [8, 16]) == pytest.approx(160.0), "8 samples: 0.8 s; 16 bring too little for 1.6 s"
    assert truth.time_alone_s(compact_placement(5), [8, 16]) == float("inf")
    assert truth.batch_grid(3) == (8, 16, 32)


def test_a_job_runs_at_the_pace_of_its_epoch(folder: Path) -> None:
    played = play_one(folder, Script((0, ONE, 16)))
    run = next(iter(played.runs.values()))
    # 30 s of start, 100 / 1.6 steps and 100 / (4/3) steps of 1.6 s.
    assert run.ended_s == pytest.approx(10 + 30 + 62.5 * 1.6 + 75 * 1.6)
    assert run.num_restarts == 0


def test_another_batch_costs_nothing_and_other_devices_half_a_minute(folder: Path) -> None:
    run = next(iter(play_one(folder, Script((0, ONE, 8), (70, ONE, 16))).runs.values()))
    # From 40 s on 1.25 a second: 37.5 done at 70 s; then 1 a second to 100, then 5/6.
    assert run.ended_s == pytest.approx(70 + 62.5 + 120)
    assert run.num_restarts == run.num_resizes == 0
    run = next(iter(play_one(folder, Script((0, ONE, 8), (70, TWO, 16))).runs.values()))
    step = step_s(1, 2, 8)[0]
    assert run.ended_s == pytest.approx(70 + 30 + 62.5 / (1.6 / step) + 75 * step)
    assert (run.num_restarts, run.num_resizes) == (1, 1)


def test_a_batch_that_changes_during_the_start_does_not_cut_it_short(folder: Path) -> None:
    run = next(iter(play_one(folder, Script((0, ONE, 8), (20, ONE, 16))).runs.values()))
    assert run.ended_s == pytest.approx(40 + 62.5 * 1.6 + 75 * 1.6)


def test_what_a_policy_sees(folder: Path) -> None:
    script = Script((0, [(0, 0), (3, 2)], 16))
    played = play_one(folder, script)
    job_id = next(iter(played.runs))
    views = [(snapshot.now_s, snapshot.jobs[0]) for snapshot in script.seen if snapshot.jobs]
    step, sync = step_s(2, 2, 8)
    first = next(view for now_s, view in views if view.learnt.step_times)
    assert first.learnt.step_times == (StepTime(placement=(1, 1), local_batch_size=8, step_s=step, sync_s=sync),)
    assert next(now_s for now_s, view in views if view.learnt.noise) == pytest.approx(40 + step), "after its first step"
    assert (first.learnt.noise.grad_sqr, first.learnt.noise.grad_var) == (1.0, 3.0)
    assert first.total_equivalent_steps == 200.0
    assert {60.0, 120.0} <= {now_s for now_s, _ in views}, "every minute"
    at_120 = next(view for now_s, view in views if now_s == 120.0)
    assert at_120.equivalent_steps == pytest.approx(
        80 * 1.6 / step if 80 * 1.6 / step < 100 else 100 + (80 - 62.5 * step) * 4 / 3 / step
    )
    assert at_120.global_batch_size == 16
    assert at_120.job.job_id == job_id


def test_an_unknown_length_stays_unknown(folder: Path) -> None:
    script = Script((0, ONE, 16))
    play_one(folder, script, knows_length=False)
    views = [snapshot.jobs[0] for snapshot in script.seen if snapshot.jobs]
    assert views[-1].equivalent_steps > 100
    assert {view.total_equivalent_steps for view in views} == {None}


def test_epochs_end_at_whole_seconds_where_the_artifact_is_followed(folder: Path) -> None:
    path = folder / "profiles" / "toy" / "placements.csv"
    path.write_text(path.read_text().replace("1,8,0.8,0.0", "1,8,0.804,0.0"))
    exact, whole = (
        next(iter(play_one(folder, Script((0, ONE, 8)), whole_seconds=rounds).runs.values()))
        for rounds in (False, True)
    )
    assert exact.ended_s == pytest.approx(40 + 160.8)
    # The first epoch ends 80.4 s on, rounded to 120 s: after the decisions of that minute; the second at 200.
    assert whole.ended_s == pytest.approx(200.0, abs=2e-3)


def test_tuned_requests_are_what_their_owners_asked_for(folder: Path, truth: AppTruth) -> None:
    trace = read(write_workload(folder))
    at_s, tuned = goodput_arrivals(trace, {"toy": truth}, batch="tuned")[1]
    assert at_s == 40.0, "the clock of the file"
    assert (tuned.global_batch_size, tuned.requested_workers, tuned.max_workers) == (16, 2, 4)
    assert (tuned.batch.min_size, tuned.batch.max_size, tuned.total_steps) == (16, 16, 138)
    assert tuned.profile_steps_per_s[2] == pytest.approx(1 / step_s(1, 2, 8)[0])
    assert tuned.profile_steps_per_s[1] == pytest.approx(1 / 1.6), "two passes"
    adaptive = goodput_arrivals(trace, {"toy": truth}, knows_length=False)[1][1]
    assert (adaptive.batch.min_size, adaptive.batch.max_size, adaptive.total_steps) == (8, 32, None)
    assert (adaptive.max_workers, adaptive.profile_steps_per_s) == (8, {})
    other = make_trace("w", [trace.jobs[0].__class__(job_id="x", submit_s=0.0, model="new", global_batch_size=8)])
    with pytest.raises(InvalidRequest, match="no tables of 'new'; there are toy"):
        goodput_arrivals(other, {"toy": truth})


def test_simulate_plays_them_too(folder: Path, tmp_path: Path) -> None:
    workload = write_workload(folder)
    answer = simulate(
        str(workload), "4x4", ["fifo"], overhead="pollux", adaptive=True, limit=2, with_rows=True, with_series=True
    )
    assert answer["profiles"] == "profiles"
    rows = answer["policies"]["fifo"]["rows"]
    assert [(row["submit_s"], row["state"]) for row in rows] == [(10.0, "SUCCEEDED"), (40.0, "SUCCEEDED")]
    with pytest.raises(InvalidRequest, match="--profiles DIR"):
        find_measurements_near(Path("/nowhere/at/all.csv"))
    with pytest.raises(InvalidRequest, match="are read from files"):
        simulate(read(workload), "4x4", ["fifo"], adaptive=True)


@pytest.mark.parametrize("batch", ["adaptive", "tuned"])
def test_any_policy_plays_a_workload(folder: Path, batch: Any) -> None:
    workload = write_workload(folder, num_jobs=4)
    for policy in ("fifo", "tiresias"):
        played = play_workload(make_policy(policy), workload, folder / "profiles", GoodputSetting(batch=batch))
        assert all(run.ended_s is not None and run.done_steps == run.length for run in played.runs.values())
    assert len(make_nodes()) == 16
