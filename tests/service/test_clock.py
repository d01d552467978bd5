"""Platform time follows the boot clock; a wall clock that is wrong is reported, and neither believed nor charged."""

from __future__ import annotations

import pytest

from springtide.control.controller import Controller
from springtide.core.events import ClockAnchored, JobSubmitted, NodeJoined, ReplicaLost
from springtide.core.resources import Device, Node
from springtide.core.workload import Entrypoint, TrainingJob
from springtide.scheduling.registry import make_policy
from springtide.service.clock import ANCHOR_EVERY_S, SYNCHRONISE_S, MachineClocks, PlatformClock, read_machine

DAY_S = 86400.0
BEGAN = 1_700_000_000.0


class Clocks:
    """The clocks of a machine, set by hand."""

    def __init__(self) -> None:
        self.now = MachineClocks("boot-1", 5_000.0, BEGAN, True)

    def __call__(self) -> MachineClocks:
        return self.now

    def set(self, **fields: object) -> None:
        self.now = self.now._replace(**fields)

    def pass_by(self, seconds: float) -> None:
        self.set(boot_s=self.now.boot_s + seconds, unix_s=self.now.unix_s + seconds)

    def reboot(self, down_s: float, wall_error_s: float = 0.0, is_synchronised: bool | None = True) -> None:
        self.pass_by(down_s)
        self.set(
            boot_id="boot-2",
            boot_s=30.0,
            unix_s=self.now.unix_s + wall_error_s,
            is_synchronised=is_synchronised,
        )


def started(clocks: Clocks) -> tuple[PlatformClock, ClockAnchored]:
    clock = PlatformClock(clocks.now.unix_s, 0.0, clocks)
    return clock, clock.resume(None, 0.0)


def again(clocks: Clocks, anchor: ClockAnchored | None, lowest_s: float) -> tuple[PlatformClock, ClockAnchored]:
    """The control plane that is started after one whose journal ends at `lowest_s`."""
    clock = PlatformClock(BEGAN, lowest_s, clocks)
    return clock, clock.resume(anchor, lowest_s)


@pytest.mark.parametrize("jump_s", [30 * DAY_S, -7 * DAY_S])
def test_a_wall_clock_that_jumps_at_a_restart_moves_nothing(jump_s: float) -> None:
    clocks = Clocks()
    _, anchor = started(clocks)
    clocks.pass_by(3600.0)
    clocks.pass_by(60.0)
    clocks.set(unix_s=clocks.now.unix_s + jump_s)
    clock, second = again(clocks, anchor, 3600.0)
    assert clock.now_s() == pytest.approx(3660.0)
    assert second.skipped_s == 0.0
    assert "jumped by" in clock.notice
    assert clock.wall_offset_s == pytest.approx(BEGAN), "what is shown as dates stays right"
    # And it is right again.
    clocks.pass_by(10.0)
    clocks.set(unix_s=clocks.now.unix_s - jump_s)
    clock, _ = again(clocks, second, 3665.0)
    assert clock.now_s() == pytest.approx(3670.0)
    assert not clock.notice


def test_a_wall_clock_that_jumps_while_it_runs_is_reported_until_it_is_right() -> None:
    clocks = Clocks()
    clock, _ = started(clocks)
    clocks.pass_by(100.0)
    clocks.set(unix_s=clocks.now.unix_s + 5 * DAY_S)
    assert clock.review() is None
    assert clock.notice == "the wall clock jumped by +5 days: platform time goes on by the machine's boot clock"
    assert clock.now_s() == pytest.approx(100.0)
    clocks.set(unix_s=clocks.now.unix_s - 5 * DAY_S)
    assert clock.review() is None
    assert not clock.notice


def test_a_clock_that_was_set_right_is_believed_after_an_hour() -> None:
    clocks = Clocks()
    clock, _ = started(clocks)
    clocks.set(unix_s=clocks.now.unix_s + 400 * DAY_S)
    assert clock.review() is None
    assert clock.notice
    clocks.pass_by(ANCHOR_EVERY_S + 1.0)
    anchor = clock.review()
    assert anchor is not None
    assert not clock.notice
    assert anchor.unix_s == pytest.approx(clocks.now.unix_s)


def test_after_a_reboot_the_wall_clock_tells_how_long_it_was_down() -> None:
    clocks = Clocks()
    _, anchor = started(clocks)
    clocks.pass_by(500.0)
    clocks.reboot(down_s=2 * 3600.0)
    clock, second = again(clocks, anchor, 490.0)
    assert clock.now_s() == pytest.approx(500.0 + 7200.0)
    assert second.skipped_s == pytest.approx(7210.0)
    assert not second.is_in_doubt


@pytest.mark.parametrize("error_s", [30 * DAY_S, -30 * DAY_S])
def test_what_a_wall_clock_cannot_know_after_a_reboot_is_put_right_later(error_s: float) -> None:
    clocks = Clocks()
    _, anchor = started(clocks)
    clocks.pass_by(500.0)
    clocks.reboot(down_s=3600.0, wall_error_s=error_s)
    clock, second = again(clocks, anchor, 500.0)
    assert clock.now_s() == pytest.approx(500.0)
    assert second.is_in_doubt
    assert "which is not believed" in clock.notice
    # The control plane is started again before the clock is right.
    clocks.pass_by(60.0)
    clock, third = again(clocks, second, 555.0)
    assert clock.now_s() == pytest.approx(560.0)
    clocks.pass_by(60.0)
    clocks.set(unix_s=clocks.now.unix_s - error_s)
    anchor = clock.review()
    assert third.is_in_doubt
    assert anchor is not None
    assert anchor.skipped_s == pytest.approx(3600.0)
    assert clock.now_s() == pytest.approx(500.0 + 3600.0 + 120.0)
    assert not clock.notice


def test_a_clock_that_is_not_synchronised_is_waited_for() -> None:
    clocks = Clocks()
    _, anchor = started(clocks)
    clocks.pass_by(500.0)
    clocks.reboot(down_s=2 * DAY_S, is_synchronised=False)
    clock, _ = again(clocks, anchor, 500.0)
    assert clock.now_s() == pytest.approx(500.0)
    clocks.pass_by(SYNCHRONISE_S + 1.0)
    assert clock.review() is not None
    assert clock.now_s() == pytest.approx(500.0 + 2 * DAY_S + SYNCHRONISE_S + 1.0)


def test_a_journal_without_anchors_goes_on_by_the_wall_clock_within_a_week() -> None:
    clocks = Clocks()
    clocks.pass_by(9000.0)
    assert again(clocks, None, 100.0)[0].now_s() == pytest.approx(9000.0)
    clocks.pass_by(30 * DAY_S)
    clock, _ = again(clocks, None, 100.0)
    assert clock.now_s() == pytest.approx(100.0)
    assert clock.notice


def test_a_suspended_machine_is_not_a_jump() -> None:
    """The boot clock goes on while a machine sleeps."""
    clocks = Clocks()
    clock, _ = started(clocks)
    clocks.pass_by(8 * 3600.0)
    assert clock.review() is not None
    assert clock.now_s() == pytest.approx(8 * 3600.0)
    assert not clock.notice


def test_this_machine_has_clocks() -> None:
    first, second = read_machine(), read_machine()
    assert first.boot_id == second.boot_id != ""
    assert 0.0 <= second.boot_s - first.boot_s < 60.0


def test_workers_of_a_machine_that_was_off_are_charged_to_the_last_step() -> None:
    controller = Controller(make_policy("elastic"))
    job = TrainingJob(job_id="a", name="a", entrypoint=Entrypoint(source_path="a.py"))
    node = Node(node_id="n", devices=(Device(device_id="n/0", node_id="n", index=0),))
    controller.step(0.0, [NodeJoined(node=node), JobSubmitted(job=job)])
    replica = controller.state.jobs["a"].replicas[0].replica_id
    anchor = ClockAnchored(boot_id="b", boot_s=30.0, unix_s=0.0, at_s=5000.0, skipped_s=4900.0)
    controller.step(5000.0, [anchor, ReplicaLost(workload_id="a", replica_id=replica, reason="the machine was off")])
    assert controller.state.jobs["a"].spent.finished_service_s == pytest.approx(100.0)
