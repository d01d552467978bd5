"""Whole runs: journals that do not depend on the process, promises that are watched, causes that add up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from kits.simulation.sweeps import part
from springtide.control.controller import Controller
from springtide.control.journal.memory import MemoryJournal
from springtide.control.loop import verify
from springtide.core.decision import Plan, Policy, PoolAllocation, Snapshot
from springtide.core.errors import InvalidRequest
from springtide.scheduling.registry import POLICY_NAMES, make_policy
from springtide.simulator.fluid.invariants import InvariantViolation
from springtide.simulator.fluid.rules import overhead_rule, scattered_fraction
from springtide.simulator.simulate import simulate

DIGEST = """
import hashlib
from springtide.control.journal.memory import MemoryJournal
from springtide.control.journal.codec import encode_step
from springtide.simulator.simulate import simulate
from kits.cheap_policies import cheap_names
for policy in cheap_names(round_s=600.0):
    journal = MemoryJournal()
    simulate("generated:{num_jobs}", "2x4", [policy], seed=4, journal=lambda name: journal, strict=False, {options})
    steps = b"".join(encode_step(step) for _, step in journal.read())
    print(policy, len(steps), hashlib.sha256(steps).hexdigest())
"""


def digests(options: str, hash_seed: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", DIGEST.format(options=options, num_jobs=part(25, least=12))],
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", "error_fraction=0.3, mtbf_hours=1.0, repair_hours=0.1"])
def test_two_processes_two_hash_seeds_one_journal(options: str) -> None:
    first, second = digests(options, "1"), digests(options, "4242")
    assert first == second
    assert len(first) == len(POLICY_NAMES)


def test_a_played_journal_decides_the_same_again() -> None:
    journal = MemoryJournal()
    simulate("generated:20", "2x4", ["elastic"], seed=2, journal=lambda name: journal)
    told = overhead_rule("elasticflow", 8).announced
    assert verify(Controller(make_policy("elastic"), overheads=told), journal) > 20


@pytest.mark.slow
def test_faults_and_error_end_every_job_and_are_named_as_causes() -> None:
    answer = simulate("generated:60", "4x2", ["elastic"], seed=3, error_fraction=0.5, mtbf_hours=0.5, repair_hours=0.2)
    figures = answer["policies"]["elastic"]
    assert figures["num_faults"] > 5
    assert figures["jobs"] == 60
    assert set(figures["misses"]) <= {"impossible", "fault", "misprediction"}
    assert figures["misses"]["fault"] > 0
    assert answer["mtbf_hours"] == 0.5


def test_a_job_that_is_slower_than_its_profile_misses_by_misprediction(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    header = (
        "job_id,submit_s,samples,global_batch_size,min_workers,max_workers,deadline_s,samples_per_s_1,parallel_fraction"
    )
    # A hundred jobs one after the other, each with the devices to itself and a tenth more time than it needs.
    rows = [f"j{i},{i * 200},100,1,1,1,{i * 200 + 110},1,0" for i in range(100)]
    path.write_text("\n".join([header, *rows]), encoding="utf-8")
    answer = simulate(str(path), "1x4", ["fifo"], overhead="none", error_fraction=0.2, with_rows=True)
    figures = answer["policies"]["fifo"]
    late = [row for row in figures["rows"] if row["end_s"] - row["submit_s"] > 110]
    assert 10 < len(late) < 60
    assert figures["misses"] == {"misprediction": len(late)}


class Promising:
    """Runs jobs in order of arrival on one device each and promises every deadline, whether it can be kept or not."""

    def decide(self, snapshot: Snapshot) -> Plan:
        plan = make_policy("fifo").decide(snapshot)
        waiting = [view for view in snapshot.jobs if view.promise.admitted_at_s is None and view.job.goal.is_hard]
        return Plan(
            allocations=plan.allocations,
            admitted={view.job.job_id: view.job.goal.deadline_s for view in waiting},
            reasons=plan.reasons,
        )


def test_a_broken_promise_stops_a_strict_run_with_the_command_that_repeats_it() -> None:
    with pytest.raises(InvariantViolation, match="--trace generated:60 --cluster 1x4 --policy promising") as found:
        simulate("generated:60", "1x4", {"promising": Promising()}, seed=1)
    assert found.value.name == "promise-kept"
    figures = simulate("generated:60", "1x4", {"promising": Promising()}, seed=1, strict=False)["policies"]["promising"]
    assert figures["admitted_and_broken"] > 0
    assert figures["promised"] == figures["deadline_jobs"]
    assert figures["latest_s"] > 0
    assert figures["misses"]["scheduler"] > 0


class Idle:
    """Never runs anybody."""

    def decide(self, snapshot: Snapshot) -> Plan:
        return Plan()


def test_a_policy_that_leaves_jobs_waiting_for_ever_is_found() -> None:
    with pytest.raises(InvariantViolation, match="never end") as found:
        simulate("generated:5", "1x4", {"idle": Idle()})
    assert found.value.name == "all-end"


class Hasty:
    """Wants to be asked again at once, for ever."""

    def decide(self, snapshot: Snapshot) -> Plan:
        return replace(make_policy("fifo").decide(snapshot), revisit_at_s=snapshot.now_s)


class Flapping:
    """Starts the first job and takes the device back before it trains."""

    def decide(self, snapshot: Snapshot) -> Plan:
        if snapshot.allocations or not snapshot.jobs:
            return Plan(reasons=dict.fromkeys(snapshot.allocations, "changed its mind"))
        first = snapshot.jobs[0].job.job_id
        device = snapshot.cluster.device_ids()[0]
        return Plan(allocations={first: PoolAllocation(device_ids=(device,))}, reasons={first: "starts"})


@pytest.mark.slow
@pytest.mark.parametrize("policy", [Hasty(), Flapping()])
def test_a_policy_that_goes_round_in_circles_is_found(policy: Policy) -> None:
    with pytest.raises(InvariantViolation) as found:
        simulate("generated:5", "1x4", {"round": policy})
    assert found.value.name == "no-spinning"


def test_series_and_rows_are_there_when_asked_for() -> None:
    answer = simulate("generated:30", "2x4", ["edf"], with_series=True, with_rows=True)
    figures = answer["policies"]["edf"]
    series = figures["series"]
    assert set(series) == {
        *("jct_s", "queueing_s", "finished", "submitted", "admitted", "allocated", "running", "efficiency")
    }
    assert series["jct_s"][-1][1] == 1.0
    assert series["submitted"][-1][1] == series["finished"][-1][1] == 30.0
    assert max(devices for _, devices in series["allocated"]) <= 8
    assert series["allocated"][-1] == [figures["makespan_s"], 0.0]
    rows = figures["rows"]
    assert len(rows) == 30
    assert sum(row["gpu_hours"] for row in rows) == pytest.approx(figures["gpu_hours"])
    assert sum(row["is_met"] for row in rows) == figures["deadlines_met"]
    assert "series" not in simulate("generated:3", "2x4", ["edf"])["policies"]["edf"]


def test_overhead_rules() -> None:
    small, large = overhead_rule("elasticflow", 255), overhead_rule("elasticflow", 256)
    assert [small.pause.cost_s(count, is_fresh=False) for count in (1, 8)] == [2.0, 2.0]
    # 2 s, and 2 (log2 n + 1) s on a set of devices that nobody has used before; 7 s from 256 devices up.
    assert [small.pause.cost_s(count) for count in (1, 2, 8)] == [4.0, 6.0, 10.0]
    assert large.pause.cost_s(8) == 15.0
    assert overhead_rule("none", 8).announced.cost_s(8) == 0.0
    measured = overhead_rule("measured", 8)
    assert measured.announced.change_s == pytest.approx(measured.pause.change_s + measured.cold_start_s)
    with pytest.raises(InvalidRequest, match="elasticflow, measured, pollux, none"):
        overhead_rule("free", 8)


def test_eight_devices_on_eight_nodes_run_as_published() -> None:
    assert scattered_fraction(8, 1) == pytest.approx(1 / 2.17)
    assert scattered_fraction(2, 2) == 1.0
    assert 1 / 2.17 < scattered_fraction(2, 1) < 1.0


def test_measured_overhead_plays_to_the_end() -> None:
    figures = simulate("generated:40", "2x4", ["elastic"], overhead="measured", seed=6)["policies"]["elastic"]
    assert figures["overhead_gpu_hours"] > 0
    assert figures["jobs"] == 40
