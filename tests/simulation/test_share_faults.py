"""Seeded fault schedules over devices that are held in parts: crashes, lost nodes, restarts, shares that change."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from kits.simulation.sharers import FirstFit, Restless
from kits.simulation.sweeps import sampled
from springtide.control import controller as controller_module
from springtide.control import grants
from springtide.control.controller import Controller
from springtide.core.actions import SetShare, StartReplica
from springtide.core.decision import Policy
from springtide.scheduling.registry import PACKER_NAMES
from springtide_studies.fault_seeds import executor as executor_module
from springtide_studies.fault_seeds.seeds import FaultRun, run_seed

BASE_SEED = int(os.environ.get("SPRINGTIDE_BASE_SEED", "20261121"))
NUM_SEEDS = int(os.environ.get("SPRINGTIDE_SEEDS", "1000"))
NUM_FAST_SEEDS = 75
CHUNK = 25


def first_fit() -> Policy:
    return FirstFit()


def restless() -> Policy:
    return Restless(FirstFit())


MAKERS: tuple[str | Callable[[], Policy], ...] = (
    restless,
    first_fit,
    *(f"{packer}/elastic" for packer in PACKER_NAMES),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=[] if first < NUM_FAST_SEEDS else pytest.mark.slow)
        for first in range(0, NUM_SEEDS, CHUNK)
    ],
)
def test_fresh_seeds_hold_every_invariant(first: int) -> None:
    print(f"base seed {BASE_SEED}: set SPRINGTIDE_BASE_SEED and SPRINGTIDE_SEEDS for others")
    for index in range(first, min(first + CHUNK, NUM_SEEDS)):
        result = run_seed(BASE_SEED + index, MAKERS[index % len(MAKERS)], has_shares=True)
        assert not result.violation, f"{result.violation}: reproduce with\n    {result.command}\n{result.detail}"


def test_the_others_of_a_lost_worker_go_on_beside_a_job_that_waits_for_whole_devices() -> None:
    result = run_seed(11004015, "fast-gs/elastic", has_shares=True)
    assert not result.violation, f"{result.violation}: reproduce with\n    {result.command}\n{result.detail}"


POOLED = (
    "dilu/two-way/fifo",
    "dilu/tide/elastic",
    "infless-r/one-way/edf",
    "fast-gs/dedicated/fifo",
    "exclusive/two-way/elastic",
    "dilu/tide/springtide",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in sampled(range(12, 96, 12)))]
)
def test_seeds_with_pools_and_shares_hold_every_invariant(first: int) -> None:
    for seed in range(first, first + 12):
        result = run_seed(seed, POOLED[seed % len(POOLED)], has_shares=True)
        assert not result.violation, f"{result.violation}: reproduce with\n    {result.command}\n{result.detail}"


def test_a_seed_draws_the_same_without_and_with_shares() -> None:
    for seed in range(5):
        plain = FaultRun(seed, first_fit)
        shared = FaultRun(seed, first_fit, has_shares=True)
        assert [job for _, job in plain.workload.jobs()] == [replace(j, share=None) for _, j in shared.workload.jobs()]
        assert plain.workload.loads == shared.workload.loads
        assert [node.node_id for node in plain.nodes] == [node.node_id for node in shared.nodes]
        assert plain.faults.end_s == shared.faults.end_s


def test_a_seed_with_shares_gives_the_same_run_every_time() -> None:
    assert run_seed(7, restless, has_shares=True) == run_seed(7, restless, has_shares=True)


@pytest.mark.slow
def test_shares_change_in_every_state_and_beside_every_trouble() -> None:
    met: Counter[str] = Counter()
    for seed in range(40):
        run = FaultRun(seed, restless, has_shares=True)
        run.run()
        met["restart of the control plane"] += run.num_crashes > 0 and run.invariants.num_share_changes > 0
        met["beside others"] += run.invariants.most_sharers > 1
        books = Controller(restless())
        for _, step in run.journal.read():
            books.restore(step)
            for action in step.actions:
                if isinstance(action, StartReplica) and action.share is not None:
                    met["start of a part"] += 1
                elif isinstance(action, SetShare):
                    job = books.state.jobs.get(action.workload_id)
                    met["service" if job is None else job.state] += 1
                    met["while resizing"] += job is not None and bool(job.group.members) and not job.group.is_confirmed
    for what in ("restart of the control plane", "beside others", "start of a part", "service", "STARTING", "RUNNING"):
        assert met[what] > 5, f"{what}: {met}"
    assert met["while resizing"] > 5, met


# --- planted bugs ---------------------------------------------------------------------------------------------------


def _no_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes is put beside those who are about to leave."""
    monkeypatch.setattr(grants, "has_room", lambda *_, **__: True)


def _forgotten_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restart everybody is started with a whole device."""
    original = controller_module.Controller.standing

    def standing(self: Controller) -> object:
        found = original(self)
        actions = [replace(each, share=None) if isinstance(each, StartReplica) else each for each in found.actions]
        return replace(found, actions=tuple(actions))

    monkeypatch.setattr(controller_module.Controller, "standing", standing)


def _lost_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of a share that was cut off by a crash is not made good."""
    original = executor_module.SimExecutor.recover

    def recover(self: executor_module.SimExecutor, standing: object) -> None:
        shares = {process.replica_id: process.share for process in self.machine.living()}
        kept = [replace(start, share=shares.get(start.replica_id, start.share)) for start in standing.replicas]
        original(self, replace(standing, replicas=tuple(kept)))

    monkeypatch.setattr(executor_module.SimExecutor, "recover", recover)


@pytest.mark.slow
@pytest.mark.parametrize("plant", [_no_bounds, _forgotten_shares, _lost_change])
def test_planted_bugs_are_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    for seed in range(1000):
        result = run_seed(seed, restless, has_shares=True)
        if result.violation:
            assert result.violation in ("device-once", "share-kept", "AssertionError"), result.detail
            return
    pytest.fail("1000 seeds did not find it")
