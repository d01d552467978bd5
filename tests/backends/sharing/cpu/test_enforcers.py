"""Real processes held to shares by each mechanism that this machine allows, and never left stopped or limited."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from springtide.backends.processes import process_clock_s, read_stat
from springtide.backends.sharing.cpu.control_groups import GroupEnforcer, GroupV1Enforcer, GroupV2Enforcer, read_pids
from springtide.backends.sharing.cpu.enforcers import NoEnforcer, choose_enforcer
from springtide.backends.sharing.cpu.guard import LimitGuard, start_ticks_of, undo
from springtide.backends.sharing.cpu.signals import SignalEnforcer
from springtide.backends.sharing.fixed_share import FixedShare
from springtide.core.errors import BackendError, InvalidRequest

LIMIT_S = 60.0
SPIN = "while True: pass"
HOLD_AND_WAIT = """
import sys, time
from springtide.backends.sharing.fixed_share import FixedShare
with FixedShare(int(sys.argv[1]), 0.02, only=sys.argv[2]) as held:
    print(held.mechanism, held._guard.pid, flush=True)
    time.sleep(600)
"""


def until(condition: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end_s, f"not in {LIMIT_S:g} s: {what}"
        time.sleep(0.01)


def used_fraction(pid: int, seconds: float) -> float:
    """CPU time over elapsed time, of a core: a busy machine makes it smaller, never larger."""
    begin_s, begin_used_s = time.monotonic(), process_clock_s(pid)
    time.sleep(seconds)
    used_s = process_clock_s(pid)
    assert used_s is not None
    assert begin_used_s is not None
    return (used_s - begin_used_s) / (time.monotonic() - begin_s)


@pytest.fixture
def spinner() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen([sys.executable, "-c", SPIN], start_new_session=True)
    until(lambda: (process_clock_s(child.pid) or 0.0) > 0.05, "the child spins")
    yield child
    child.kill()
    child.wait()


def state_of(pid: int) -> str:
    stat = read_stat(pid)
    return stat.state if stat is not None else ""


# --- control groups as files: what is written where, without any rights --------------------------------------------


def make_group_files(path: Path) -> None:
    """What the kernel makes of a new directory."""
    for name in ("cgroup.procs", "cpu.cfs_quota_us", "cpu.cfs_period_us", "cpu.shares", "cpu.cfs_burst_us"):
        (path / name).write_text("")
    for name in ("cpu.max", "cpu.weight", "cpu.max.burst", "cgroup.subtree_control"):
        (path / name).write_text("")


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    true_mkdir = Path.mkdir

    def mkdir(path: Path, *arguments: object, **options: object) -> None:
        existed = path.exists()
        true_mkdir(path, *arguments, **options)  # type: ignore[arg-type]
        if not existed:
            make_group_files(path)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    return tmp_path


def value(path: Path) -> str:
    """Files of the kernel hold the last value; a plain file keeps the tail of a longer one before it."""
    return path.read_text()


def test_version_1_writes_quota_period_and_weight(groups: Path) -> None:
    enforcer = GroupV1Enforcer(groups, "springtide-x", groups)
    enforcer.set_device("local/0", 0.5)
    enforcer.admit("slot-1", "local/0", 4242)
    enforcer.set_weight("slot-1", 0.25)
    enforcer.set_limit("slot-1", 0.3)
    device = groups / "springtide-x" / "device-local%2F0"
    tenant = device / "slot-1"
    assert (value(device / "cpu.cfs_period_us"), value(device / "cpu.cfs_quota_us")) == ("20000", "10001")
    assert value(device / "cpu.cfs_burst_us") == "10001"
    assert value(tenant / "cgroup.procs") == "4242"
    assert (value(tenant / "cpu.cfs_period_us"), value(tenant / "cpu.cfs_quota_us")) == ("10000", "3000")
    assert value(tenant / "cpu.shares") == "256"
    enforcer.set_limit("slot-1", 0.3, is_calm=True)
    assert (value(tenant / "cpu.cfs_period_us"), value(tenant / "cpu.cfs_quota_us")) == ("20000", "6000")
    # Below a tenth of a core the kernel's smallest quota needs a longer period.
    enforcer.set_limit("slot-1", 0.02)
    assert value(tenant / "cpu.cfs_quota_us")[:4] == "1000"
    assert value(tenant / "cpu.cfs_period_us") == "50000"
    assert dict(enforcer.undo_files())[str(tenant / "cpu.cfs_quota_us")] == "-1"
    enforcer.close()


def test_version_2_writes_one_line_for_both(groups: Path) -> None:
    enforcer = GroupV2Enforcer(groups, "springtide-x", groups)
    enforcer.set_device("local/0", 1.0)
    enforcer.admit("slot-1", "local/0", 4242)
    enforcer.set_weight("slot-1", 0.25)
    enforcer.set_limit("slot-1", 0.3)
    tenant = groups / "springtide-x" / "device-local%2F0" / "slot-1"
    assert value(tenant / "cpu.max") == "3000 10000"
    assert value(tenant / "cpu.weight") == "25"
    assert value(tenant.parent / "cgroup.subtree_control") == "+cpu"
    assert value(tenant.parent / "cpu.max") == "20001 20000"
    assert dict(enforcer.undo_files())[str(tenant / "cpu.max")] == "max"
    enforcer.close()


def test_a_quota_in_force_is_not_written_again(groups: Path) -> None:
    enforcer = GroupV2Enforcer(groups, "springtide-x", groups)
    enforcer.set_device("d", 1.0)
    enforcer.admit("t", "d", 4242)
    enforcer.set_limit("t", 0.3)
    limit = groups / "springtide-x" / "device-d" / "t" / "cpu.max"
    limit.write_text("")
    enforcer.set_limit("t", 0.3)
    assert value(limit) == ""
    enforcer.set_limit("t", 0.4)
    assert value(limit) == "4000 10000"
    enforcer.close()


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="control group"):
        GroupV1Enforcer(tmp_path / "missing", "springtide-x", tmp_path)


def test_nothing_is_done_where_nothing_can_be(tmp_path: Path) -> None:
    enforcer = choose_enforcer("springtide-none", "none")
    assert isinstance(enforcer, NoEnforcer)
    assert enforcer.mechanism == "none"
    assert "not enforced" in enforcer.enforced
    enforcer.set_limit("t", 0.5)
    assert enforcer.undo_files() == []


# --- real processes ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("only", ["", "signals"])
def test_a_spinning_child_is_held_to_its_share(spinner: subprocess.Popen[bytes], only: str) -> None:
    with FixedShare(spinner.pid, 0.3, only=only) as held:
        assert used_fraction(spinner.pid, 0.5) >= 0.0
        assert used_fraction(spinner.pid, 3.0) < 0.36
        held.set(0.05)
        assert used_fraction(spinner.pid, 3.0) < 0.09
        assert held.enforced
    assert state_of(spinner.pid) != "T"
    before_s = process_clock_s(spinner.pid) or 0.0
    until(lambda: (process_clock_s(spinner.pid) or 0.0) - before_s > 0.5, "it runs on")


@pytest.mark.slow
def test_a_favoured_child_comes_before_others_up_to_its_share(spinner: subprocess.Popen[bytes]) -> None:
    with FixedShare(spinner.pid, 0.4, weight=100.0) as held:
        if not held.mechanism.startswith("cgroup"):
            pytest.skip("only control groups weigh")
        others = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(2 * (os.cpu_count() or 1))]
        try:
            used_fraction(spinner.pid, 0.5)
            assert 0.3 < used_fraction(spinner.pid, 3.0) < 0.48
        finally:
            for other in others:
                other.kill()
                other.wait()


@pytest.mark.slow
def test_a_share_is_of_a_device_and_not_of_a_core(spinner: subprocess.Popen[bytes]) -> None:
    with FixedShare(spinner.pid, 0.5, 0.4):
        used_fraction(spinner.pid, 0.3)
        assert used_fraction(spinner.pid, 3.0) < 0.25


@pytest.mark.slow
def test_a_devices_sharers_never_use_more_than_the_device(spinner: subprocess.Popen[bytes]) -> None:
    enforcer = choose_enforcer(f"springtide-test-{os.getpid()}")
    if not isinstance(enforcer, GroupEnforcer):
        pytest.skip("only control groups hold a device's sharers together")
    other = subprocess.Popen([sys.executable, "-c", SPIN], start_new_session=True)
    try:
        enforcer.set_device("d", 0.5)
        for name, pid in (("a", spinner.pid), ("b", other.pid)):
            enforcer.admit(name, "d", pid)
            # Whatever comes after whatever else, the kernel takes it: no part is ever more than the device.
            for cpus, is_calm in ((0.5, True), (0.005, False), (0.5, False), (0.1, True), (0.5, True), (0.5, False)):
                enforcer.set_limit(name, cpus, is_calm=is_calm)
        assert enforcer.pids("b") == [other.pid]
        begin_s = time.monotonic()
        before = [process_clock_s(pid) or 0.0 for pid in (spinner.pid, other.pid)]
        time.sleep(3.0)
        after = [process_clock_s(pid) or 0.0 for pid in (spinner.pid, other.pid)]
        assert (sum(after) - sum(before)) / (time.monotonic() - begin_s) < 0.6
    finally:
        other.kill()
        other.wait()
        enforcer.close()


@pytest.mark.slow
@pytest.mark.parametrize("only", ["", "signals"])
def test_no_process_stays_limited_after_its_daemon_was_killed(spinner: subprocess.Popen[bytes], only: str) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLD_AND_WAIT, str(spinner.pid), only], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    mechanism, guard_pid = owner.stdout.readline().split()
    used_fraction(spinner.pid, 0.3)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    until(lambda: not Path(f"/proc/{guard_pid}").exists() or state_of(int(guard_pid)) == "Z", "the guard has ended")
    assert state_of(spinner.pid) != "T"
    before_s = process_clock_s(spinner.pid) or 0.0
    until(lambda: (process_clock_s(spinner.pid) or 0.0) - before_s > 0.5, "it runs on")
    if mechanism.startswith("cgroup"):
        # What the dead left behind is removed by the next one who comes, once nobody is in it.
        spinner.kill()
        spinner.wait()
        choose_enforcer(f"springtide-test-{os.getpid()}").close()
        assert not list(Path("/sys/fs/cgroup").glob(f"**/springtide-fixed-{owner.pid}-*"))


@pytest.mark.slow
def test_a_guard_that_was_ended_is_replaced(spinner: subprocess.Popen[bytes]) -> None:
    guard = LimitGuard()
    guard.watch([], [(spinner.pid, start_ticks_of(spinner.pid))])
    first = guard.pid
    os.kill(first, signal.SIGKILL)
    until(lambda: state_of(first) in ("", "Z"), "the guard is gone")
    guard.ensure()
    assert guard.pid not in (0, first)
    os.kill(spinner.pid, signal.SIGSTOP)
    until(lambda: state_of(spinner.pid) == "T", "the child is stopped")
    guard.close()
    until(lambda: state_of(spinner.pid) != "T", "the child goes on")


def test_undoing_writes_files_and_spares_a_process_of_the_same_number(tmp_path: Path) -> None:
    (tmp_path / "limit").write_text("")
    line = f'{{"files": [["{tmp_path}/limit", "-1"], ["{tmp_path}/no/such", "1"]], "groups": [[{os.getpid()}, 1]]}}'
    undo(line.encode())
    assert (tmp_path / "limit").read_text() == "-1"
    undo(b"")


def test_a_share_out_of_bounds_is_refused() -> None:
    for rate in (0.0, 1.5, -1.0):
        with pytest.raises(InvalidRequest, match="above 0"):
            FixedShare(1, rate)


def test_a_process_that_is_gone_is_told() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    child.wait()
    with pytest.raises(BackendError, match="cannot hold process"), FixedShare(child.pid, 0.5, only="signals"):
        pass


def test_signals_stop_by_credit_and_never_their_own_group(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "getpgid", lambda pid: pid)
    monkeypatch.setattr(os, "killpg", lambda pid, number: sent.append((pid, number)))
    enforcer = SignalEnforcer()
    enforcer.admit("t", "d", 77)
    assert sent == [(77, signal.SIGCONT)]
    enforcer.set_limit("t", 0.5)
    used = {"t": 0.0}
    enforcer.tick(lambda name: used[name], 10.0)
    used["t"] = 0.005
    enforcer.tick(lambda name: used[name], 10.005)
    assert sent[-1] == (77, signal.SIGSTOP)
    enforcer.tick(lambda name: used[name], 10.011)
    assert sent[-1] == (77, signal.SIGCONT)
    assert enforcer.throttled_s("t") == pytest.approx(0.006)
    used["t"] = 0.02
    enforcer.tick(lambda name: used[name], 10.016)
    assert sent[-1] == (77, signal.SIGSTOP)
    enforcer.remove("t")
    assert sent[-1] == (77, signal.SIGCONT)
    count = len(sent)
    monkeypatch.setattr(os, "getpgrp", lambda: 88)
    enforcer.admit("own", "d", 88)
    assert len(sent) == count


def test_processes_of_a_missing_group_are_none(tmp_path: Path) -> None:
    assert read_pids(tmp_path / "missing") == []
