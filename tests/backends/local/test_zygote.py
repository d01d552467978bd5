"""Workers that come from a zygote (a double of it), its death, and its life past the executor's."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kits.local.local_platform import FAKE_ZYGOTE, Platform, start
from springtide.backends.control_channel.reactor import Reactor
from springtide.backends.local import executor
from springtide.backends.local import zygote as zygote_module
from springtide.backends.local.zygote import CODE, ZygoteClient, code_stamp, has_stamp
from springtide.core.actions import StopReplica
from springtide.core.events import ReplicaLost, ReplicaReady, ReplicaStopped
from springtide.core.ports import Standing
from springtide.core.workload import ReplicaId, WorkloadId


@pytest.fixture
def zygote_platform_of(platform_of: Callable[..., Platform]) -> Iterator[Callable[..., Platform]]:
    def build(command: list[str] = FAKE_ZYGOTE) -> Platform:
        return platform_of(worker_command=None, zygote_command=command)

    return build


def zygote_pid(platform: Platform) -> int:
    process = platform.executor._launcher.zygote.process
    assert process is not None
    return process.pid


def test_a_worker_is_forked_and_its_exit_code_is_known(zygote_platform_of: Callable[..., Platform]) -> None:
    platform = zygote_platform_of()
    platform.executor.recover(Standing())
    platform.executor.start(start("r0"))
    platform.until(ReplicaReady)
    platform.executor.start(StopReplica(workload_id=WorkloadId("job"), replica_id=ReplicaId("r0")))
    platform.until(ReplicaStopped)
    platform.executor.start(start("r1", say="exit:4"))
    assert platform.until(ReplicaLost).exit_code == 4


@pytest.mark.slow
def test_a_dead_zygote_is_replaced_and_its_workers_live_on(zygote_platform_of: Callable[..., Platform]) -> None:
    platform = zygote_platform_of()
    platform.executor.recover(Standing())
    platform.executor.start(start("r0"))
    platform.until(ReplicaReady)
    first = zygote_pid(platform)
    os.kill(first, signal.SIGKILL)
    platform.executor.start(start("r1"))
    platform.until(ReplicaReady, lambda event: event.replica_id == "r1")
    assert zygote_pid(platform) != first
    assert not platform.of(ReplicaLost)
    os.kill(platform.pid("r0"), signal.SIGKILL)
    assert platform.until(ReplicaLost).replica_id == "r0"


@pytest.mark.slow
def test_a_request_that_kills_the_zygote_is_given_up(zygote_platform_of: Callable[..., Platform]) -> None:
    platform = zygote_platform_of()
    platform.executor.recover(Standing())
    platform.executor.start(start("r0", zygote="die"))
    assert "died" in platform.until(ReplicaLost).reason
    platform.executor.start(start("r1"))
    platform.until(ReplicaReady)


@pytest.mark.slow
def test_a_zygote_that_says_that_a_worker_waits_for_an_import_is_given_longer(
    zygote_platform_of: Callable[..., Platform], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zygote_module, "ANSWER_TIMEOUT_S", 5.0)
    platform = zygote_platform_of()
    platform.executor.recover(Standing())
    platform.executor.start(start("r0", zygote="hold"))
    platform.until(ReplicaReady)
    assert platform.executor.counts()["spawns"] == 1


def test_a_zygote_that_does_not_come_up_loses_the_start(zygote_platform_of: Callable[..., Platform]) -> None:
    platform = zygote_platform_of(["sh", "-c", "echo no torch here; exit 1"])
    platform.executor.recover(Standing())
    platform.executor.start(start("r0"))
    lost = platform.until(ReplicaLost)
    assert lost.reason == "the process that starts workers does not come up: no torch here"


@pytest.mark.slow
@pytest.mark.parametrize("is_upgraded", [False, True])
def test_the_next_executor_takes_over_the_zygote_unless_its_code_is_another(
    zygote_platform_of: Callable[..., Platform], monkeypatch: pytest.MonkeyPatch, is_upgraded: bool
) -> None:
    platform = zygote_platform_of()
    platform.executor.recover(Standing())
    action = start("r0")
    platform.executor.start(action)
    platform.until(ReplicaReady)
    first = zygote_pid(platform)
    platform.executor.close()
    if is_upgraded:
        monkeypatch.setattr(executor, "code_stamp", lambda: "of the next release")
    second = zygote_platform_of()
    second.executor.recover(Standing(replicas=(action,)))
    second.until(ReplicaReady)
    end_s = time.monotonic() + 60
    while second.executor._launcher.zygote.process is None and time.monotonic() < end_s:
        time.sleep(0.01)
    assert (zygote_pid(second) != first) is is_upgraded
    second.executor.start(start("r1"))
    second.until(ReplicaReady)


def test_a_zygote_that_does_not_fit_is_looked_for_again_only_after_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes its time to die, and its socket accepts until then."""
    looks: list[int] = []

    def is_usable(pid: int) -> bool:
        looks.append(pid)
        return False

    monkeypatch.setattr(ZygoteClient, "kill", lambda self: None)
    reactor = Reactor()
    told = dict.fromkeys(("on_spawned", "on_exited", "on_failed", "on_request_lost", "on_stray"), looks.append)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "zygote.sock"))
        listener.listen()
        zygote = ZygoteClient(
            reactor, ["true"], {}, tmp_path / "zygote.sock", tmp_path / "log", is_usable=is_usable, **told
        )
        zygote.ensure()
        assert looks == [os.getpid()]
        assert not zygote.is_connected
        zygote.close()
    reactor.close()


def test_the_end_of_an_earlier_process_of_the_same_replica_is_no_loss(
    zygote_platform_of: Callable[..., Platform],
) -> None:
    platform = zygote_platform_of(["sh", "-c", "sleep 60; true"])
    platform.executor.recover(Standing())
    platform.executor.start(start("r0"))
    platform.barrier()
    launcher = platform.executor._launcher
    platform.executor._reactor.call(lambda: launcher.exited(ReplicaId("r0"), os.getpid(), 3))
    platform.barrier()
    platform.take()
    assert not platform.events
    assert ReplicaId("r0") in platform.executor._table.replicas
    platform.executor.start(StopReplica(workload_id=WorkloadId("job"), replica_id=ReplicaId("r0"), grace_s=0.2))
    platform.until(ReplicaStopped)


def test_where_no_descriptor_is_free_the_zygote_is_looked_for_again(tmp_path: Path) -> None:
    reactor = Reactor()
    found: list[int] = []
    told = dict.fromkeys(("on_spawned", "on_exited", "on_failed", "on_request_lost", "on_stray"), found.append)

    def is_usable(pid: int) -> bool:
        found.append(pid)
        reactor.stop()
        return True

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "zygote.sock"))
        listener.listen()
        zygote = ZygoteClient(
            reactor, ["true"], {}, tmp_path / "zygote.sock", tmp_path / "log", is_usable=is_usable, **told
        )
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        taken = {int(name) for name in os.listdir("/proc/self/fd")}
        free = next(number for number in itertools.count() if number not in taken)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
        try:
            zygote.ensure()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert not found
        reactor.run()
        assert found == [os.getpid()]
        zygote.close()
    reactor.close()


def test_the_stamp_of_the_code_follows_its_files_and_is_found_in_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deeper").mkdir()
    file = tmp_path / "deeper" / "worker.py"
    file.write_text("a = 1")
    monkeypatch.setattr("springtide.__file__", str(tmp_path / "__init__.py"))
    before = code_stamp()
    assert code_stamp() == before
    os.utime(file, ns=(0, 0))
    assert code_stamp() != before
    process = subprocess.Popen(["sleep", "60"], env={CODE: before})
    try:
        # Its environment is there once it has begun.
        limit_s = time.monotonic() + 10.0
        while not has_stamp(process.pid, before) and time.monotonic() < limit_s:
            time.sleep(0.01)
        assert has_stamp(process.pid, before)
        assert not has_stamp(process.pid, before[:-1])
    finally:
        process.kill()
        process.wait()
    assert not has_stamp(process.pid, before)
