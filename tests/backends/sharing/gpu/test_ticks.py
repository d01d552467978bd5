"""Turns of the GPU share daemon without the daemon: tokens, what a tenant is seen to do, and whose process is whose."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from springtide.backends.processes import ProcessIdentity, identify
from springtide.backends.sharing.gpu.meter import Meter, work_size
from springtide.backends.sharing.gpu.segments import (
    OK,
    UNKNOWN,
    UNLIMITED,
    USAGE,
    USAGE_FIELDS,
    UsageSegment,
    offsets_of,
    segment_directory,
)
from springtide.backends.sharing.gpu.table import GpuTenantEntry, uuid_bytes
from springtide.backends.sharing.gpu.tenants import GpuTenant, GpuTenants
from springtide.backends.sharing.gpu.ticks import GpuTicks, tokens
from springtide.core.errors import BackendError
from springtide.core.resources import DeviceId
from springtide.core.shares import Share
from springtide.core.wire.shares import EndedIteration, SlotReading
from springtide.core.workload import ReplicaId, WorkloadId
from springtide.serving.share_control import Observation

MS = 1_000_000
UUID = "GPU-00000000-0000-0000-0000-000000000001"
_AT = offsets_of(USAGE_FIELDS)


def usage(used_ns: int = 0, cycles_ns: tuple[int, ...] = (), **fields: int) -> UsageSegment:
    data = bytearray(USAGE.size)
    struct.pack_into(f"={len(cycles_ns)}Q", data, _AT["cycle_ns"], *cycles_ns)
    for name, value in {"used_ns": used_ns, **fields}.items():
        struct.pack_into("=Q", data, _AT[name], value)
    return UsageSegment(used_ns, 0, 0, 0, 0, 0, bytes(data))


class Watched:
    """A meter and the clock of its turns of 5 ms."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.meter = Meter(usage())

    def see(
        self,
        now: UsageSegment,
        *,
        granted_ns: int = 1 << 60,
        rate: float = 0.5,
        waits: bool = False,
        told: SlotReading | None = None,
    ) -> Observation:
        self.now_s += 0.005
        return self.meter.observe(
            now, told, granted_ns=granted_ns, rate=rate, is_waiting=waits, now_s=self.now_s, tick_s=0.005
        )


# --- tokens ---------------------------------------------------------------------------------------------------------


def test_tokens_grow_by_the_rate_and_stop_at_the_stock() -> None:
    granted_ns = 0
    for _ in range(10):
        granted_ns = tokens(granted_ns, 0, 0.5, 0.3, 0.005, 0.010)
    assert granted_ns == 5 * MS
    assert tokens(granted_ns, 0, 0.25, 0.3, 0.005, 0.010) == 5 * MS


def test_a_tenant_that_uses_everything_gets_exactly_its_rate() -> None:
    granted_ns = used_ns = 0
    for _ in range(1000):
        granted_ns = tokens(granted_ns, used_ns, 0.3, 0.3, 0.005, 0.010)
        used_ns = granted_ns
    assert used_ns == pytest.approx(1500 * MS, abs=5 * MS)


def test_a_large_kernel_is_paid_for_afterwards_but_not_for_ever() -> None:
    """40 ms at a rate of a tenth are 400 ms of waiting; what would be more than nine tenths of 2 s is let off."""
    assert tokens(0, 40 * MS, 0.1, 0.1, 0.005, 0.010) == int(0.5 * MS)
    assert tokens(0, 10_000 * MS, 0.1, 0.1, 0.005, 0.010) == 10_000 * MS - 180 * MS


def test_nobody_is_without_an_end_to_its_debt_because_it_is_granted_nothing_now() -> None:
    assert tokens(0, 10_000 * MS, 0.0, 0.2, 0.005, 0.010) == 10_000 * MS - 360 * MS


# --- what is seen ---------------------------------------------------------------------------------------------------


def test_what_is_launched_at_once_is_worked_off_over_time() -> None:
    watched = Watched()
    seen = [watched.see(usage(12 * MS)).used_fraction for _ in range(4)]
    assert seen == pytest.approx([1.0, 1.0, 0.4, 0.0])


def test_a_waiting_tenant_uses_all_that_it_is_granted() -> None:
    """What waits is counted already, and has not been launched."""
    watched = Watched()
    seen = [watched.see(usage(50 * MS), granted_ns=2 * MS, rate=0.4, waits=True).used_fraction for _ in range(3)]
    assert seen == pytest.approx([0.4, 0.4, 0.4])
    assert watched.meter.used_s == pytest.approx(0.002)
    assert watched.see(usage(50 * MS), granted_ns=51 * MS).used_fraction == 1.0


def test_counts_may_fall_when_a_launch_fails() -> None:
    watched = Watched()
    watched.see(usage(4 * MS))
    assert watched.see(usage(3 * MS)).used_fraction == 0.0
    assert watched.see(usage(4 * MS)).used_fraction == pytest.approx(0.2)


@pytest.mark.parametrize("used_ns", [1 << 63, (1 << 64) - 1])
def test_lies_are_bounded(used_ns: int) -> None:
    watched = Watched()
    seen = watched.see(usage(used_ns, num_cycles_ended=(1 << 64) - 1, cycle_started_ns=(1 << 64) - 1))
    assert seen.used_fraction == 1.0
    assert seen.iteration_s == 0.0
    assert seen.finished == ()
    for _ in range(500):
        seen = watched.see(usage(0))
    assert seen.used_fraction == 0.0


def test_whatever_lies_in_the_usage_the_meter_goes_on() -> None:
    """Bytes drawn at random, for ever other ones: no exception, and nothing beyond what a device can do."""
    drawn = random.Random(9)
    watched = Watched()
    for _ in range(300):
        data = drawn.randbytes(USAGE.size) if drawn.random() < 0.7 else bytes(USAGE.size)
        head = struct.unpack_from("=6Q", data, _AT["used_ns"])
        seen = watched.see(UsageSegment(*head, data), granted_ns=drawn.randrange(1 << 63), waits=drawn.random() < 0.5)
        assert 0.0 <= seen.used_fraction <= 1.0
        assert seen.iteration_s >= 0.0
        assert all(0.0 < each.duration_s < 1e6 for each in seen.finished)
        assert 0.0 <= watched.meter.used_fraction() <= 1.0


def test_the_workers_own_word_comes_before_its_cycles() -> None:
    watched = Watched()
    told = SlotReading(num_begun=3, num_ended=2, started_s=100.0, batch_size=4, num_queued=5)
    ended = SlotReading(num_begun=3, num_ended=3, num_queued=5, finished=(EndedIteration(4, 0.02),))
    first = watched.see(usage(MS, (7,), num_cycles_ended=1), told=told)
    assert (first.batch_size, first.num_queued, first.iteration_s) == (4, 5, pytest.approx(0.005))
    second = watched.see(usage(MS), told=ended)
    assert [each.duration_s for each in second.finished] == [0.02]
    # While the slot is being written, what it said stands.
    assert watched.see(usage(MS)).num_queued == 5


def test_cycles_stand_for_iterations_and_their_device_time_for_the_batch() -> None:
    watched = Watched()
    started_ns = int(watched.now_s * 1e9)
    running = watched.see(usage(2 * MS, cycle_started_ns=started_ns))
    assert running.iteration_s == pytest.approx(0.005)
    ended = watched.see(usage(2 * MS, (9 * MS,), num_cycles_ended=1))
    assert [(each.batch_size, each.duration_s) for each in ended.finished] == [(work_size(2 * MS), 0.009)]
    assert running.batch_size == work_size(2 * MS)
    again = watched.see(usage(6 * MS, (9 * MS, 7 * MS, 8 * MS), num_cycles_ended=3))
    assert [each.duration_s for each in again.finished] == [0.007, 0.008]
    assert {each.batch_size for each in again.finished} == {work_size(2 * MS)}


def test_a_program_that_never_synchronises_is_in_no_trouble() -> None:
    watched = Watched()
    started_ns = int(watched.now_s * 1e9)
    assert watched.see(usage(MS, cycle_started_ns=started_ns)).iteration_s > 0.0
    for _ in range(20):
        seen = watched.see(usage(MS, cycle_started_ns=started_ns))
    assert seen.iteration_s == 0.0


def test_sizes_are_steps_that_grow_with_the_work() -> None:
    assert work_size(0) == work_size(10_000)
    assert work_size(100 * MS) == work_size(101 * MS) or work_size(101 * MS) == work_size(118 * MS)
    assert work_size(200 * MS) == pytest.approx(2 * work_size(100 * MS), rel=0.01)
    assert len({work_size(step * MS) for step in range(1, 1000)}) < 64


# --- devices --------------------------------------------------------------------------------------------------------


@pytest.fixture
def tenants(tmp_path: Path) -> Iterator[GpuTenants]:
    found = GpuTenants(segment_directory(tmp_path))
    yield found
    found.close(is_giving_up=True)
    assert not any(segment_directory(tmp_path).iterdir())
    segment_directory(tmp_path).rmdir()


def entry(
    name: str, limit: float, *, uuid: str = UUID, is_slo: bool = False, process: ProcessIdentity | None = None
) -> GpuTenantEntry:
    me = identify(os.getpid())
    assert me is not None
    return GpuTenantEntry(
        workload_id=WorkloadId(f"w-{name}"),
        replica_id=ReplicaId(name),
        device_id=DeviceId("local/0"),
        device_uuid=uuid,
        share=Share(request=0.3, limit=limit),
        process=process or me,
        is_slo=is_slo,
    )


class Machine:
    """Turns over a clock that this test moves, and programs that use all that they are granted."""

    def __init__(self, tenants: GpuTenants) -> None:
        self.now_ns = 10**12
        self.tenants = tenants
        self.ticks = GpuTicks(tenants, lambda: self.now_ns)

    def take(self, *entries: GpuTenantEntry) -> None:
        self.tenants.take(entries)
        self.ticks.arrange(self.now_ns / 1e9)

    def tenant(self, name: str) -> GpuTenant:
        return next(tenant for tenant in self.tenants.by_key.values() if tenant.entry.replica_id == name)

    def use(self, name: str, used_ns: int) -> None:
        segments = self.tenant(name).segments
        assert segments is not None
        os.pwrite(segments.usage_descriptor, struct.pack("=Q", used_ns), _AT["used_ns"])

    def granted_ns(self, name: str) -> int:
        segments = self.tenant(name).segments
        assert segments is not None
        return segments.granted_ns

    def run(self, seconds: float, *busy: str, tick_ns: int = 5 * MS) -> None:
        for _ in range(round(seconds * 1e9 / tick_ns)):
            for name in busy:
                self.use(name, self.granted_ns(name))
            self.now_ns += tick_ns
            self.ticks.tick(self.now_ns / 1e9)


def test_the_limits_hold_and_requests_are_kept(tenants: GpuTenants) -> None:
    machine = Machine(tenants)
    machine.take(entry("a", 0.5), entry("b", 1.0))
    machine.run(0.5, "a", "b")
    before = machine.granted_ns("a"), machine.granted_ns("b")
    machine.run(2.0, "a", "b")
    rates = [(machine.granted_ns(name) - was) / 2e9 for name, was in zip(("a", "b"), before, strict=True)]
    assert rates[0] <= 0.505
    assert min(rates) >= 0.295
    assert sum(rates) == pytest.approx(1.0, abs=0.02)


def test_one_devices_trouble_is_no_other_ones(tenants: GpuTenants) -> None:
    other = UUID[:-1] + "2"
    machine = Machine(tenants)
    machine.take(entry("a", 0.6), entry("b", 0.6), entry("c", 0.6, uuid=other), entry("d", 0.6, uuid=other))
    machine.run(1.0, "a", "b")
    quiet = machine.tenant("c")
    assert machine.granted_ns("c") <= 6 * MS
    machine.run(1.0, "a", "b", "c")
    assert quiet.grant.rate == pytest.approx(0.6)
    assert machine.tenant("a").grant.rate <= 0.6


def test_a_late_turn_counts_whole_and_a_daemon_that_stood_still_forgives(tenants: GpuTenants) -> None:
    machine = Machine(tenants)
    machine.take(entry("a", 0.5))
    machine.run(0.2, "a")
    before_ns = machine.granted_ns("a")
    machine.run(0.4, "a", tick_ns=40 * MS)
    assert machine.granted_ns("a") - before_ns == pytest.approx(0.5 * 400 * MS, rel=0.01)
    machine.use("a", 10**10)
    machine.run(0.3, tick_ns=300 * MS)
    assert machine.granted_ns("a") >= 10**10


def test_what_ran_while_the_daemon_stood_still_is_over_when_it_goes_on(tenants: GpuTenants) -> None:
    machine = Machine(tenants)
    machine.take(entry("a", 0.5))
    machine.run(0.5)
    machine.use("a", 2 * 10**9)
    machine.run(4.0, tick_ns=4 * 10**9)
    machine.run(0.1)
    assert machine.tenant("a").meter.used_s == pytest.approx(2.0)
    assert machine.ticks.statuses()[0].used == pytest.approx(0.5, abs=0.02)


def test_what_somebody_begins_after_a_quiet_time_is_seen_at_the_next_turn(tenants: GpuTenants) -> None:
    machine = Machine(tenants)
    machine.take(entry("a", 0.5, is_slo=True), entry("b", 1.0))
    machine.run(1.0)
    segments = machine.tenant("a").segments
    assert segments is not None
    looked_ns = segments.heartbeat_ns
    assert machine.now_ns - looked_ns < 100 * MS
    before_ns = machine.granted_ns("a")
    assert before_ns == 5 * MS
    machine.use("a", before_ns)
    machine.now_ns += 5 * MS
    machine.ticks.tick(machine.now_ns / 1e9)
    assert segments.heartbeat_ns == machine.now_ns
    assert before_ns < machine.granted_ns("a") <= before_ns + 5 * MS


def test_nobody_is_unlimited_beside_somebody_else(tenants: GpuTenants) -> None:
    machine = Machine(tenants)
    machine.take(entry("a", 1.0))
    segments = machine.tenant("a").segments
    assert segments is not None
    assert segments.flags == UNLIMITED
    ahead_ns = machine.granted_ns("a")
    machine.take(entry("a", 1.0), entry("b", 1.0, is_slo=True))
    assert segments.flags == 0
    machine.run(0.1)
    assert machine.granted_ns("a") == ahead_ns <= 60 * MS


def test_a_uuid_that_is_none_is_said_and_does_nobody_harm(tenants: GpuTenants) -> None:
    machine = Machine(tenants)
    machine.take(entry("a", 0.5, uuid="GPU-nonsense"), entry("b", 0.5))
    machine.run(0.1, "b")
    told = {tenant.replica_id: tenant.reason for tenant in machine.ticks.statuses()}
    assert "is no UUID of a GPU" in told["a"]
    assert "UUID" not in told["b"]
    with pytest.raises(BackendError):
        uuid_bytes("GPU-12")


def test_a_leader_whose_number_is_another_ones_now_leads_nobody(tenants: GpuTenants) -> None:
    me = identify(os.getpid())
    assert me is not None
    machine = Machine(tenants)
    machine.take(entry("a", 0.5, process=ProcessIdentity(me.pid, me.start_ticks + 1, me.boot_id)))
    assert tenants.answer(os.getpid(), os.getuid(), uuid_bytes(UUID)).status == UNKNOWN


def test_somebody_elses_processes_get_nothing(tenants: GpuTenants) -> None:
    """Root's daemon serves everybody who is in the table, another one its own user alone."""
    machine = Machine(tenants)
    machine.take(entry("a", 0.5))
    stranger = os.getuid() + 1
    expected = OK if os.getuid() == 0 else UNKNOWN
    assert tenants.answer(os.getpid(), stranger, uuid_bytes(UUID)).status == expected
    assert tenants.answer(0, os.getuid(), uuid_bytes(UUID)).status == UNKNOWN


def test_a_replica_of_another_process_begins_anew(tenants: GpuTenants) -> None:
    machine = Machine(tenants)
    machine.take(entry("a", 0.5))
    first = machine.tenant("a").segments
    assert first is not None
    first_id = first.segment_id
    found = tenants.answer(os.getpid(), os.getuid(), uuid_bytes(UUID))
    assert (found.status, found.segment_id) == (OK, first_id)
    parent = identify(os.getppid())
    machine.take(entry("a", 0.5, process=parent))
    second = machine.tenant("a")
    assert second.segments is not None
    assert second.segments.segment_id != first_id
    assert second.members == {}
