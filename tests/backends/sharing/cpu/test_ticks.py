"""One turn after the other, on a clock and an enforcer that are moved by hand."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from springtide.backends.processes import ProcessIdentity
from springtide.backends.sharing.cpu import ticks as share_ticks
from springtide.backends.sharing.cpu.enforcers import NoEnforcer
from springtide.backends.sharing.cpu.ticks import CpuTicks
from springtide.backends.sharing.table import DaemonStatus, SharerEntry, read_whole, write_whole
from springtide.core.errors import BackendError
from springtide.core.shares import Share
from springtide.core.status.shares import SharingStatus
from springtide.core.wire.shares import SlotReader, SlotWriter, make_slots

TICK_S = 0.005


class Recording(NoEnforcer):
    """Remembers what it was told last of each tenant."""

    def __init__(self) -> None:
        self.devices: dict[str, float] = {}
        self.groups: dict[str, tuple[str, int]] = {}
        self.held: dict[str, float] = {}
        self.calm: dict[str, bool] = {}
        self.num_writes = 0
        self.refuses = ""

    def set_device(self, device: str, cpus: float) -> None:
        self.devices[device] = cpus

    def admit(self, tenant: str, device: str, pid: int) -> None:
        if tenant == self.refuses:
            raise BackendError("the kernel says no")
        self.groups[tenant] = (device, pid)

    def set_limit(self, tenant: str, cpus: float, *, is_calm: bool = False) -> None:
        self.held[tenant] = cpus
        self.calm[tenant] = is_calm
        self.num_writes += 1

    def remove(self, tenant: str) -> None:
        self.groups.pop(tenant, None)
        self.held.pop(tenant, None)


class World:
    """Two sharers of a device: 1 trains and always computes, 2 serves."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, *, is_controlled: bool = True) -> None:
        self.now_s = 100.0
        self.used_s = {1: 5.0, 2: 3.0}
        monkeypatch.setattr(share_ticks, "process_clock_s", self.used_s.get)
        make_slots(path, 8)
        self.enforcer = Recording()
        self.ticks = CpuTicks(self.enforcer, lambda: self.now_s, is_controlled=is_controlled)
        self.ticks.reader = SlotReader(path)
        self.writer = SlotWriter(str(path), 2, lambda: self.now_s)
        self.entries = (
            entry("train", 1, Share(request=0.4, limit=0.8), is_slo=False),
            entry("serve", 2, Share(request=0.5, limit=1.0), is_slo=True),
        )

    def close(self) -> None:
        self.ticks.close()
        self.writer.close()

    def run(self, seconds: float, use: Callable[[int], float]) -> None:
        """Let time pass; `use` is which part of the device each process uses."""
        for _ in range(round(seconds / TICK_S)):
            self.now_s += TICK_S
            for pid in self.used_s:
                self.used_s[pid] += use(pid) * TICK_S
            self.ticks.tick(self.now_s)

    def rate(self, name: str) -> float:
        return next(told.granted for told in self.ticks.statuses() if told.replica_id == name)


def entry(name: str, number: int, share: Share, *, is_slo: bool, device: str = "local/0") -> SharerEntry:
    return SharerEntry(
        workload_id=f"w-{name}",
        replica_id=name,
        device_id=device,
        share=share,
        slot=number,
        process=ProcessIdentity(number, 1, "boot"),
        is_slo=is_slo,
    )


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(tmp_path / "slots", monkeypatch)
    yield world
    world.close()


def test_who_is_alone_may_use_its_limit(world: World) -> None:
    world.ticks.take(world.entries[:1], 0.5, world.now_s)
    world.run(1.0, lambda pid: 0.4)
    assert world.rate("train") == 0.8
    assert world.enforcer.devices == {"local/0": 0.5}
    assert world.enforcer.held == {"slot-1": pytest.approx(0.4)}
    assert not world.ticks.is_contended
    (told,) = world.ticks.statuses()
    assert told.used == pytest.approx(0.8, abs=0.05)


def test_a_sharer_that_begins_to_work_gets_its_part_at_the_next_tick(world: World) -> None:
    world.ticks.take(world.entries, 1.0, world.now_s)
    world.run(1.0, lambda pid: 0.8 if pid == 1 else 0.0)
    assert world.rate("train") == 0.8
    assert world.enforcer.calm["slot-1"], "who is granted the same for a while gets longer slices"
    world.writer.begin(4)
    world.run(TICK_S, lambda pid: 0.8 if pid == 1 else 0.2)
    assert not world.enforcer.calm["slot-1"]
    assert world.rate("train") < 0.8
    assert world.rate("serve") >= 0.5
    assert world.enforcer.held["slot-1"] < 0.8


def test_work_that_no_slot_tells_of_is_seen_by_its_use(world: World) -> None:
    world.ticks.take(world.entries, 1.0, world.now_s)
    world.run(1.0, lambda pid: 0.8 if pid == 1 else 0.0)
    world.run(2 * TICK_S, lambda pid: 0.8 if pid == 1 else 0.2)
    assert world.rate("train") < 0.8


def test_limits_are_written_when_they_change_and_not_at_every_tick(world: World) -> None:
    world.ticks.take(world.entries, 1.0, world.now_s)
    world.run(0.5, lambda pid: 0.8 if pid == 1 else 0.0)
    before = world.enforcer.num_writes
    world.run(2.0, lambda pid: 0.8 if pid == 1 else 0.0)
    assert world.enforcer.num_writes - before < 20
    assert max(world.ticks.reactions_s) >= 0.0


def test_what_was_used_beyond_the_grants_is_taken_off_later_ones(world: World) -> None:
    world.ticks.take(world.entries[:1], 1.0, world.now_s)
    world.run(0.1, lambda pid: 0.8)
    assert world.enforcer.held["slot-1"] == pytest.approx(0.8)
    world.run(0.1, lambda pid: 1.0)
    assert world.enforcer.held["slot-1"] < 0.7
    world.run(0.2, lambda pid: 0.4)
    assert world.enforcer.held["slot-1"] == pytest.approx(0.8)


def test_without_control_each_sharer_has_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path / "slots", monkeypatch, is_controlled=False)
    world.ticks.take(world.entries, 1.0, world.now_s)
    world.writer.begin(1)
    world.run(0.1, lambda pid: 0.5)
    assert (world.rate("train"), world.rate("serve")) == (0.8, 1.0)
    assert {told.reason for told in world.ticks.statuses()} == {"the control is off: every tenant has its limit"}
    world.close()


def test_the_table_is_whole_and_who_stays_keeps_what_is_known(world: World) -> None:
    world.ticks.take(world.entries, 1.0, world.now_s)
    world.run(0.5, lambda pid: 0.4)
    known = world.ticks.sharers["train"]
    changed = entry("train", 1, Share(request=0.2, limit=0.3), is_slo=False)
    world.ticks.take((changed,), 1.0, world.now_s)
    assert world.ticks.sharers["train"] is known
    assert set(world.ticks.sharers) == {"train"}
    assert set(world.enforcer.groups) == {"slot-1"}
    assert world.enforcer.held["slot-1"] == pytest.approx(0.3)
    moved = entry("train", 1, Share(request=0.2, limit=0.3), is_slo=False, device="local/1")
    world.ticks.take((moved,), 1.0, world.now_s)
    assert world.enforcer.groups["slot-1"] == ("local/1", 1)


def test_a_sharer_that_the_kernel_refuses_is_told_of_and_the_others_are_held(world: World) -> None:
    world.enforcer.refuses = "slot-1"
    world.ticks.take(world.entries, 1.0, world.now_s)
    world.run(0.1, lambda pid: 0.3)
    reasons = {told.replica_id: told.reason for told in world.ticks.statuses()}
    assert reasons["train"] == "its share is not enforced: the kernel says no"
    assert "slot-2" in world.enforcer.held
    assert "slot-1" not in world.enforcer.held


def test_a_late_turn_counts_the_time_that_passed(world: World) -> None:
    world.ticks.take(world.entries[:1], 1.0, world.now_s)
    world.run(0.05, lambda pid: 0.8)
    world.now_s += 3.0
    world.ticks.tick(world.now_s)
    assert world.rate("train") == 0.8


def test_a_status_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    assert read_whole(path, DaemonStatus) is None
    status = DaemonStatus(pid=os.getpid(), written_at_s=time.monotonic(), sharing=SharingStatus())
    write_whole(path, status)
    assert read_whole(path, DaemonStatus) == status
    path.write_text("{")
    assert read_whole(path, DaemonStatus) is None
    with pytest.raises(BackendError):
        write_whole(tmp_path / "no" / "status.json", status)


def test_a_sharer_of_two_devices_may_use_what_is_granted_on_both_together(world: World) -> None:
    wide = [entry("wide", 2, Share(request=0.3, limit=0.9), is_slo=True, device=f"local/{at}") for at in (0, 1)]
    beside = entry("train", 1, Share(request=0.4, limit=0.9), is_slo=False, device="local/1")
    world.ticks.take((*wide, beside), 0.5, world.now_s)
    world.run(1.0, lambda pid: 0.9 if pid == 2 else 0.4)
    assert world.enforcer.groups["slot-2"] == ("local/0+local/1", 2)
    assert world.enforcer.devices == {"local/0+local/1": 1.0, "local/1": 0.5}
    told = {told.device_id: told for told in world.ticks.statuses() if told.replica_id == "wide"}
    assert set(told) == {"local/0", "local/1"}
    assert told["local/0"].granted == pytest.approx(0.9)
    assert 0.3 <= told["local/1"].granted <= 0.601, "another works there, and is sure of 0.4"
    # Half a core makes a device.
    granted = 0.5 * sum(each.granted for each in told.values())
    assert world.enforcer.held["slot-2"] <= granted + 1e-9
    assert world.ticks.is_contended
    assert told["local/0"].used == pytest.approx(0.9, abs=0.05)
    # With a part of one device it is there alone.
    world.ticks.take((wide[0], beside), 0.5, world.now_s)
    assert world.enforcer.groups["slot-2"] == ("local/0", 2)
    assert not world.ticks.is_contended
