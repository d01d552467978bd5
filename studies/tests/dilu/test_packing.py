"""The study of packing: its check finds what is wrong, its figures are right by hand, its bound is below every run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from springtide.core.resources import DeviceId
from springtide.core.shares import Share
from springtide.scheduling.sharing.ledger import LedgerBounds, Part, ShareLedger
from springtide.scheduling.sharing.packing import DiluPacker, PlacementRequest
from springtide_studies.dilu import packing as dilu_packing
from springtide_studies.dilu.packing_play import (
    CONTENDERS,
    Contender,
    LedgerCheck,
    paper_cluster,
    play_packing,
    sizes_after,
)
from springtide_studies.workloads.dilu import (
    DEVICE_MEMORY_MB,
    SharingEvent,
    SharingInstance,
    SharingWorkload,
    draw_sharing_workload,
)

CLUSTER = paper_cluster()
OURS = next(contender for contender in CONTENDERS if contender.name == "dilu")


def instance(name: str, request: float, limit: float, memory_mb: int, num_devices: int = 1) -> SharingInstance:
    kind = "training" if num_devices > 1 else "inference"
    share = Share(request=request, limit=limit, memory_mb=memory_mb)
    return SharingInstance(name=name, family=name, kind=kind, num_devices=num_devices, share=share)


def start(at_s: float, which: SharingInstance) -> SharingEvent:
    return SharingEvent(at_s=at_s, is_start=True, instance=which)


def end(at_s: float, which: SharingInstance) -> SharingEvent:
    return SharingEvent(at_s=at_s, is_start=False, instance=which)


def part(device: str, share: Share) -> Part:
    return Part(DeviceId(device), share)


def test_figures_by_hand() -> None:
    job, small = instance("job", 0.5, 0.8, DEVICE_MEMORY_MB // 2, 2), instance("small", 0.5, 0.5, DEVICE_MEMORY_MB // 4)
    workload = SharingWorkload(name="w", events=(start(0, job), start(1800, small), end(3600, job), end(5400, small)))
    run = play_packing(workload, OURS, CLUSTER, timer=iter(range(100)).__next__)
    assert (run.peak_devices, run.peak_at_s) == (2, 0.0)
    # Two devices for an hour, one for another half.
    assert run.device_hours == 2.5
    assert (run.sm_fragmentation, run.memory_fragmentation) == (0.5, 0.5)
    assert run.open_after == (2, 2, 1, 0)
    assert run.decision_s == (1, 1, 1, 1)
    assert run.figures()["decision_total_s"] == 4
    assert (run.num_violations, run.num_refused, run.num_splits) == (0, 0, 0)
    assert sizes_after(workload, 1) == [(500_000, 800_000, DEVICE_MEMORY_MB // 2)] * 2 + [(500_000, 500_000, 10_240)]


def test_splits_are_counted_with_what_they_repeat() -> None:
    jobs = instance("jobs", 0.5, 0.8, DEVICE_MEMORY_MB * 5 // 8, 2)
    share = Share(request=0.4, limit=0.6, memory_mb=24 * 1024)
    model = SharingInstance(name="llm", family="llm", kind="llm-inference", num_devices=1, share=share)
    workload = SharingWorkload(name="w", events=(start(0, jobs), start(0, model), end(3600, model), end(3600, jobs)))
    split = next(contender for contender in CONTENDERS if contender.price is not None)
    run = play_packing(workload, split, CLUSTER)
    assert (run.peak_devices, run.num_splits, run.extra_stages, run.num_violations) == (2, 1, 1, 0)
    assert run.extra_device_hours == pytest.approx(0.4)
    assert play_packing(workload, OURS, CLUSTER).peak_devices == 3


class Careless(msgspec.Struct, frozen=True):
    """Puts everybody on the first device."""

    def booked(self, share: Share) -> Share:
        """The share itself."""
        return share

    def choose(self, ledger: ShareLedger, request: PlacementRequest) -> tuple[DeviceId, ...] | None:
        """The first device, room or not."""
        return (ledger.device_ids[0],) * request.num_devices


def test_the_check_finds_what_the_ledger_would_let_through() -> None:
    """With the ledger's bounds off, only the check's own sums can tell."""
    half = instance("a", 0.6, 0.9, 1)
    loose = Contender(name="careless", packer=Careless(), bounds=LedgerBounds(max_request=9.0, max_limit=9.0))
    check = LedgerCheck(CLUSTER, LedgerBounds())
    events = [start(at, msgspec.structs.replace(half, name=f"i{at}")) for at in range(3)]
    run = play_packing(SharingWorkload(name="w", events=tuple(events)), loose, CLUSTER)
    assert run.num_violations == 0
    for event in events:
        check.follow(event, half.share, [part("n0000/0", half.share)])
    assert len(check.violations) == 2
    assert "at 1 s: n0000/0 is beyond its bounds with i1" in check.violations[0]
    check.follow(end(9, events[0].instance), half.share, ())
    check.follow(end(9, events[1].instance), half.share, ())
    check.follow(start(10, half), half.share, [part("n0000/1", half.share)])
    assert len(check.violations) == 2


@pytest.mark.parametrize(
    ("devices", "scale", "sentence"),
    [
        (("n0000/0",), 1.0, "has 1 devices instead of 2"),
        (("n0000/0", "n0000/0"), 1.0, "one device twice"),
        (("n0000/0", "n0001/0"), 1.0, "several nodes"),
        (("n0000/0", "n0000/1"), 0.5, "less than it asked for"),
        (("n0000/0", "n0000/1", "n0000/2"), 1.0, "has 3 devices"),
    ],
)
def test_the_check_knows_groups(devices: tuple[str, ...], scale: float, sentence: str) -> None:
    group = instance("group", 0.4, 0.6, 1000, 2)
    held = Share(request=0.4 * scale, limit=0.6 * scale, memory_mb=1000)
    check = LedgerCheck(CLUSTER, LedgerBounds())
    check.follow(start(0, group), group.share, [part(device, held) for device in devices])
    assert any(sentence in said for said in check.violations)


def test_the_check_wants_all_memory_of_a_model() -> None:
    model = instance("llm", 0.4, 0.6, 1000)
    pieces = [part(f"n0000/{at}", Share(request=0.4, limit=0.6, memory_mb=400)) for at in range(2)]
    check = LedgerCheck(CLUSTER, LedgerBounds())
    check.follow(start(0, model), model.share, pieces)
    assert check.violations == ["at 0 s: llm has not as much memory as it asked for"]


def test_a_refusal_is_counted() -> None:
    huge = instance("huge", 0.5, 0.5, DEVICE_MEMORY_MB + 1)
    workload = SharingWorkload(name="w", events=(start(0, huge), end(1, huge)))
    run = play_packing(workload, OURS, CLUSTER)
    assert (run.num_refused, run.peak_devices, run.num_violations) == (1, 0, 0)


@pytest.mark.parametrize("seed", [1, 2])
def test_every_contender_keeps_its_bounds_and_none_is_below_the_least(seed: int) -> None:
    pytest.importorskip("scipy")
    workload = draw_sharing_workload(60, seed, num_families=5)
    answer = dilu_packing.study_workload(workload, CONTENDERS)
    peaks = {name: figures["peak_devices"] for name, figures in answer["policies"].items()}
    assert not any(figures["num_violations"] for figures in answer["policies"].values())
    assert answer["bound"]["least"] <= peaks["dilu"] <= peaks["infless-l"] <= peaks["exclusive"]
    assert answer["bound"]["least_with_splits"] <= min(peaks["dilu-splits"], answer["bound"]["least"])
    # The same workload gives the same answer, and the bound does not rest on which moments are looked at first.
    assert dilu_packing.study_workload(workload, CONTENDERS) == answer


def test_the_study_on_files_and_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("scipy")
    line = (
        "{'Time': '2024-06-19 15:46:09', 'Action': 'start', 'Instance': {'service_name': 'a', 'type': 'inference', "
        "'gpu_num': 1, 'sm_requests': 0.3, 'sm_limits': 0.5, 'memory': [4]}}\n"
    )
    (tmp_path / "instances-1.txt").write_text(line)
    told: list[Any] = []
    answer = dilu_packing.run_study(
        data=tmp_path, seed=0, is_small=True, on_progress=lambda name, done, total: told.append((name, done, total))
    )
    assert [workload["bound"]["least"] for workload in answer["workloads"]] == [1]
    assert ("instances-1 dilu", 0, 1) in told
    text = dilu_packing.study_text(answer)
    assert "no packing needs fewer than 1 GPUs" in text
    assert any(row.split()[:2] == ["dilu-printed", "1"] for row in text.splitlines())
    monkeypatch.setattr(dilu_packing, "SIZES", (20, 800))
    drawn = dilu_packing.run_study(data=None, seed=3, is_small=True)
    assert [workload["name"] for workload in drawn["workloads"]] == ["drawn-20-seed3"]


@pytest.mark.slow
def test_foresight_needs_no_more_devices_than_the_printed_algorithm_on_average() -> None:
    """On thirty drawn workloads of a hundred: the reason why it is there at all."""
    printed = Contender(name="printed", packer=DiluPacker(foresight=False))
    sums = [
        sum(play_packing(draw_sharing_workload(100, seed), each, CLUSTER).peak_devices for seed in range(100, 130))
        for each in (OURS, printed)
    ]
    assert sums[0] < sums[1]
