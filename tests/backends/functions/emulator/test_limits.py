"""The emulator's parts, each by itself: chance, configuration, shares, memory, the sweeper, the log."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import msgspec
import pytest

from springtide.backends.functions.emulator import __main__ as command
from springtide.backends.functions.emulator import cage
from springtide.backends.functions.emulator.config import EmulatorConfig, EmulatorFaults, fate_of
from springtide.backends.functions.emulator.launch import find_emulator
from springtide.backends.functions.emulator.limits import (
    GroupShare,
    StopAndGo,
    cpu_seconds,
    descendants,
    kill_all,
    make_cpu_groups,
    memory_bytes,
)
from springtide.backends.functions.emulator.logs import LogIndex, OutputPipe
from springtide.backends.functions.emulator.sweeper import end_group, follow
from springtide.backends.processes import read_stat
from springtide.backends.sharing.cpu.enforcers import describe_enforcer
from springtide.core.errors import InvalidRequest
from springtide.core.functions import FunctionPrices, FunctionService
from springtide.perf.functions.services import emulator

LIMIT_S = 20.0
SPIN = "import sys\nsys.stdout.write('x'); sys.stdout.flush()\nwhile True: pass"


def wait_until(holds):
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.005)


@pytest.fixture
def spinner():
    process = subprocess.Popen([sys.executable, "-S", "-c", SPIN], stdout=subprocess.PIPE, start_new_session=True)
    process.stdout.read(1)
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


def test_the_same_seed_gives_the_nth_invocation_the_same_fate():
    faults = EmulatorFaults(seed=3, kill_fraction=0.05, lost_fraction=0.1, late_fraction=0.2, kill_within_s=10.0)
    fates = [fate_of(faults, number) for number in range(2000)]
    assert fates == [fate_of(faults, number) for number in range(2000)]
    assert fates != [fate_of(msgspec.structs.replace(faults, seed=4), number) for number in range(2000)]
    killed = [fate.kill_after_s for fate in fates if fate.kill_after_s is not None]
    assert 60 < len(killed) < 140
    assert 0 <= min(killed) < 1
    assert 9 < max(killed) < 10
    assert 140 < sum(fate.is_lost for fate in fates) < 260
    assert not any(fate.is_throttled for fate in fates)


def test_without_faults_nothing_happens():
    fate = fate_of(EmulatorFaults(), 7)
    assert (fate.is_lost, fate.is_throttled, fate.late_s, fate.kill_after_s, fate.cpu_factor) == (
        False,
        False,
        0.0,
        None,
        1.0,
    )


@pytest.mark.parametrize("changes", [{"kill_fraction": 1.5}, {"late_s": -1.0}, {"slow_factor": 0.0}, {"seed": -1}])
def test_faults_that_cannot_be_are_refused(changes):
    with pytest.raises(ValueError, match="faults"):
        EmulatorFaults(**changes)


def test_what_comes_with_memory_lies_between_the_sizes():
    config = EmulatorConfig(service=emulator((1769, 3008)))
    assert config.offered(1769).vcpus == pytest.approx(1.0)
    assert config.offered((1769 + 3008) // 2).vcpus == pytest.approx((1.0 + 1.67) / 2, rel=1e-3)
    assert config.offered(128).vcpus == config.offered(1769).vcpus
    empty = FunctionService(name="none", sizes=(), prices=FunctionPrices(usd_per_gb_s=0.0))
    with pytest.raises(InvalidRequest, match="no memory sizes"):
        EmulatorConfig(service=empty).offered(128)


def test_stop_and_go_stops_who_is_in_debt_and_lets_go_who_has_paid(spinner):
    """Time is what the test says; the CPU time that is charged is the process's own."""
    share = StopAndGo()
    assert share.pids(spinner.pid) == [spinner.pid]
    share.tick(0.0)
    share.set_vcpus(0.5)
    used = cpu_seconds(spinner.pid)
    wait_until(lambda: cpu_seconds(spinner.pid) - used > 0.05)
    # It has used 50 ms and earned 5.
    share.tick(0.01)
    wait_until(lambda: read_stat(spinner.pid).state == "T")
    stopped_at = cpu_seconds(spinner.pid)
    share.tick(0.01)
    assert cpu_seconds(spinner.pid) == stopped_at
    assert read_stat(spinner.pid).state == "T"
    share.tick(10.0)
    wait_until(lambda: read_stat(spinner.pid).state != "T")
    wait_until(lambda: cpu_seconds(spinner.pid) > stopped_at + 0.05)
    # What was not used of ten seconds is kept for one tick, not for ever.
    share.tick(0.01)
    wait_until(lambda: cpu_seconds(spinner.pid) > stopped_at + 0.1)
    share.tick(0.01)
    wait_until(lambda: read_stat(spinner.pid).state == "T")
    share.set_vcpus(None)
    wait_until(lambda: read_stat(spinner.pid).state != "T")


@pytest.mark.slow
def test_a_control_group_holds_a_process_to_its_share(spinner):
    groups = make_cpu_groups(f"springtide-test-{os.getpid()}")
    if groups is None:
        pytest.skip("no control groups may be made here")
    share = groups.share("one")
    try:
        share.set_vcpus(0.2)
        with open(share.procs_path, "w") as file:
            file.write(str(spinner.pid))
        assert share.pids(spinner.pid) == [spinner.pid]
        used, begun = cpu_seconds(spinner.pid), time.monotonic()
        wait_until(lambda: cpu_seconds(spinner.pid) - used > 0.1)
        took = time.monotonic() - begun
        assert cpu_seconds(spinner.pid) - used <= 0.2 * took + 0.05
    finally:
        os.killpg(spinner.pid, signal.SIGKILL)
        wait_until(lambda: not share.pids(spinner.pid))
        share.remove()
        groups.remove()
    assert not groups.parent.exists()


@pytest.mark.parametrize("is_unified", [True, False])
def test_quotas_are_written_as_either_version_reads_them(tmp_path, is_unified):
    share = GroupShare(tmp_path / "group", is_unified=is_unified)
    share.set_vcpus(0.5)
    files = {path.name: path.read_text() for path in (tmp_path / "group").iterdir()}
    bounded = {"cpu.max": "10000 20000"} if is_unified else {"cpu.cfs_period_us": "20000", "cpu.cfs_quota_us": "10000"}
    assert files == bounded
    share.set_vcpus(None)
    name, text = ("cpu.max", "max 20000") if is_unified else ("cpu.cfs_quota_us", "-1")
    assert (tmp_path / "group" / name).read_text() == text
    assert share.pids(1) == []


def test_memory_is_what_is_held_and_the_gone_hold_none():
    own = memory_bytes([os.getpid()])
    block = bytearray(32 << 20)
    block[::4096] = b"\x01" * len(block[::4096])
    assert memory_bytes([os.getpid()]) >= own + (30 << 20)
    assert memory_bytes([2**22 + 1]) == 0


def test_groups_between_two_functions_are_not_cleared_away_with_those_that_were_left_behind():
    groups = make_cpu_groups(f"springtide-test-kept-{os.getpid()}")
    if groups is None:
        pytest.skip("control groups cannot be made here")
    left = groups.parent.with_name(f"springtide-test-left-{os.getpid()}")
    left.mkdir()
    try:
        # Another platform begins on this machine.
        describe_enforcer()
        assert not left.exists()
        share = groups.share("f1")
        assert share.remove()
    finally:
        groups.remove()
    assert not groups.parent.exists()


def test_killing_by_number_never_means_a_group(monkeypatch):
    killed = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
    kill_all([0, -1, 1, 2**22 + 1])
    assert killed == [2**22 + 1]


def test_descendants_are_found():
    child = subprocess.Popen(
        [
            sys.executable,
            "-S",
            "-c",
            "import subprocess as s; p=s.Popen(['sleep','60']); print(p.pid, flush=True); p.wait()",
        ],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    grandchild = int(child.stdout.readline())
    try:
        assert sorted(descendants(child.pid)) == sorted([child.pid, grandchild])
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()


def test_the_sweeper_keeps_what_has_not_ended():
    lines = ["+groups 0 /g\n", "+a 10 -\n", "+b 11 /g/b\n", "-a\n", "nonsense\n", "+c not-a-number -\n"]
    assert follow(lines) == {"groups": (0, "/g"), "b": (11, "/g/b")}


def test_the_sweeper_ends_a_process_group():
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    end_group(child.pid, "")
    assert child.wait() == -signal.SIGKILL
    end_group(child.pid, "/no/such/group")


def test_the_cage_runs_its_program_in_a_session_of_its_own():
    program = [sys.executable, "-S", "-c", "import os, resource; print(os.getsid(0) == os.getpid())"]
    caged = [sys.executable, "-S", "-E", cage.__file__, str(os.getpid()), "", *program]
    assert subprocess.run(caged, capture_output=True, check=True).stdout == b"True\n"


def test_the_cage_refuses_a_parent_that_has_gone():
    caged = [sys.executable, "-S", "-E", cage.__file__, "1", "", "/bin/true"]
    ended = subprocess.run(caged, capture_output=True)
    assert ended.returncode == cage.EXIT_NOT_CAGED
    assert b"the emulator has ended" in ended.stderr


def test_the_log_gives_lines_of_one_function_from_a_moment_on():
    now = [100]
    logs = LogIndex(lambda: now[0])
    for text in ("one", "two"):
        logs.add("/aws/lambda/f", "i", text)
    now[0] = 200
    logs.add("/aws/lambda/f", "i", "three")
    logs.add("/aws/lambda/g", "i", "other")
    assert [event.text for event in logs.read("/aws/lambda/f", 0, 0, 10)] == ["one", "two", "three"]
    assert [event.text for event in logs.read("/aws/lambda/f", 150, 0, 10)] == ["three"]
    first = logs.read("/aws/lambda/f", 0, 0, 2)
    assert [event.text for event in logs.read("/aws/lambda/f", 0, first[-1].number, 10)] == ["three"]


def test_output_is_cut_into_lines_and_the_last_one_is_kept():
    async def collect():
        lines = []
        pipe = OutputPipe(lines.append)
        os.write(pipe.writer, b"first\nsec")
        pipe.drain()
        os.write(pipe.writer, b"ond\nwithout an end")
        pipe.started()
        pipe.drain()
        return lines

    assert asyncio.run(collect()) == ["first", "second", "without an end"]


def test_a_configuration_that_cannot_be_read_is_said(tmp_path, capsys):
    assert command.main(["--state-dir", str(tmp_path), "--config", '{"service": 1}']) == 2
    assert command.main(["--state-dir", str(tmp_path), "--config", str(tmp_path / "none")]) == 2
    config = json.loads(msgspec.json.encode(EmulatorConfig(service=emulator())))
    config["faults"]["kill_fraction"] = 7
    assert command.main(["--state-dir", str(tmp_path), "--config", json.dumps(config)]) == 2
    told = capsys.readouterr().err
    assert told.count("configuration cannot be read") == 3
    assert "fractions of faults" in told


def test_a_record_of_an_emulator_that_has_gone_finds_nobody(tmp_path):
    assert find_emulator(tmp_path) is None
    gone = {"endpoint": "http://127.0.0.1:1", "token": "t", "process": {"pid": 1, "start_ticks": 1, "boot_id": "x"}}
    (tmp_path / "emulator.json").write_text(json.dumps(gone))
    assert find_emulator(tmp_path) is None
