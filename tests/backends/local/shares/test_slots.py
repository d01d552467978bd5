"""Replicas that share devices of a real platform: who is held, who is told, and nobody is left stopped."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from kits.local.local_platform import Platform, start
from springtide.backends.processes import read_stat
from springtide.backends.sharing.cpu.enforcers import describe_enforcer
from springtide.backends.sharing.table import STATUS_NAME, DaemonStatus, group_name, read_whole
from springtide.backends.sockets import socket_directory
from springtide.core.actions import SetShare, StartReplica, StopReplica
from springtide.core.events import ReplicaReady, ReplicaStopped
from springtide.core.ports import Standing
from springtide.core.resources import DeviceId, make_node
from springtide.core.shares import Share
from springtide.core.status.shares import TenantStatus
from springtide.core.workload import ReplicaId, WorkloadId

THIRD = Share(request=0.3, limit=0.6)
LIMIT_S = 60.0


def sharing(name: str, job_id: str, share: Share | None = THIRD) -> StartReplica:
    """All on one device."""
    return replace(start(name, job_id=job_id), device_id=DeviceId("local/0"), share=share)


def until(condition: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end_s, f"not in {LIMIT_S:g} s: {what}"
        time.sleep(0.02)


def tenant(platform: Platform, name: str) -> TenantStatus | None:
    return next((told for told in platform.executor.sharing().tenants if told.replica_id == name), None)


def daemon_of(platform: Platform) -> DaemonStatus | None:
    return read_whole(socket_directory(platform.state_dir) / STATUS_NAME, DaemonStatus)


def run(platform: Platform, *names: str) -> None:
    for name in names:
        platform.executor.start(sharing(name, f"job-{name}"))
        platform.until(ReplicaReady, lambda event, name=name: event.replica_id == name)
    until(lambda: daemon_of(platform) is not None, "the daemon says something")
    for name in names:
        until(lambda name=name: _is_held(platform, name), f"{name} is held")


def _is_held(platform: Platform, name: str) -> bool:
    told = tenant(platform, name)
    return told is not None and "about to be enforced" not in told.reason and "not enforced" not in told.reason


def is_stopped(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and stat.state == "T"


def test_without_a_share_nothing_is_started_or_told(platform: Platform) -> None:
    platform.executor.start(sharing("r0", "job", None))
    platform.until(ReplicaReady)
    status = platform.executor.sharing()
    assert status.tenants == ()
    assert status.enforced.startswith("no device is shared yet; once one is, ")
    assert status.mechanism == describe_enforcer()[0]
    assert platform.executor.counts().get("share_daemons", 0) == 0


@pytest.mark.slow
def test_replicas_of_different_workloads_share_a_device(platform: Platform) -> None:
    run(platform, "r0", "r1")
    status = platform.executor.sharing()
    assert 0.005 <= status.tick_s <= 0.02
    assert status.device_cpus == min(1.0, (os.cpu_count() or 1) / 4)
    assert {(told.replica_id, told.workload_id, told.device_id) for told in status.tenants} == {
        ("r0", "job-r0", "local/0"),
        ("r1", "job-r1", "local/0"),
    }
    assert status.enforced
    slots = {spec.handle.share_slot for spec in platform.executor._table.replicas.values()}
    assert len(slots) == 2
    platform.executor.start(StopReplica(workload_id=WorkloadId("job-r0"), replica_id=ReplicaId("r0")))
    platform.until(ReplicaStopped)
    until(lambda: tenant(platform, "r0") is None, "who has left is not told of")
    assert tenant(platform, "r1") is not None


@pytest.mark.slow
def test_a_share_is_changed_in_place(platform: Platform) -> None:
    run(platform, "r0")
    pid = platform.pid("r0")
    half = Share(request=0.5, limit=0.5)
    action = SetShare(workload_id=WorkloadId("job-r0"), replica_id=ReplicaId("r0"), share=half)
    platform.executor.start(action)
    platform.executor.start(action)
    until(lambda: (told := tenant(platform, "r0")) is not None and told.limit == 0.5, "the new share is told")
    assert platform.pid("r0") == pid
    assert platform.executor.counts()["repeated_actions"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", ["", "signals"])
def test_a_daemon_that_is_killed_leaves_nobody_stopped_and_comes_again(
    platform: Platform, mechanism: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPRINGTIDE_SHARE_MECHANISM", mechanism)
    run(platform, "r0", "r1")
    pids = [platform.pid(name) for name in ("r0", "r1")]
    for _ in range(2):
        before = daemon_of(platform)
        assert before is not None
        os.kill(before.pid, signal.SIGKILL)
        until(lambda: not any(is_stopped(pid) for pid in pids), "nobody is stopped")
        until(
            lambda killed=before.pid: (now := daemon_of(platform)) is not None and now.pid != killed,
            "there is another daemon",
        )
        for name in ("r0", "r1"):
            until(lambda name=name: _is_held(platform, name), f"{name} is held again")


@pytest.mark.slow
def test_the_next_platform_adopts_sharers_with_their_daemon(platform_of: Callable[..., Platform]) -> None:
    first = platform_of()
    first.executor.recover(Standing())
    run(first, "r0", "r1")
    daemon = daemon_of(first)
    assert daemon is not None
    slots = {name: first.executor._table.replicas[ReplicaId(name)].handle.share_slot for name in ("r0", "r1")}
    first.executor.close()
    second = platform_of()
    replicas = (sharing("r0", "job-r0"), replace(sharing("r1", "job-r1"), share=Share(request=0.2, limit=0.4)))
    second.executor.recover(Standing(replicas=replicas, generations={}))
    until(lambda: (told := tenant(second, "r1")) is not None and told.limit == 0.4, "what stands is in force")
    now = daemon_of(second)
    assert now is not None
    assert now.pid == daemon.pid
    assert {name: second.executor._table.replicas[ReplicaId(name)].handle.share_slot for name in slots} == slots
    assert second.executor.counts()["adopted"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", ["", "signals"])
def test_platform_and_daemon_are_gone_and_nobody_is_left_stopped(
    platform_of: Callable[..., Platform], mechanism: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPRINGTIDE_SHARE_MECHANISM", mechanism)
    first = platform_of()
    first.executor.recover(Standing())
    run(first, "r0", "r1")
    pids = [first.pid(name) for name in ("r0", "r1")]
    daemon = daemon_of(first)
    assert daemon is not None
    first.executor.close()
    os.kill(daemon.pid, signal.SIGKILL)
    # The platform that started it is gone in truth; here it is this process.
    os.waitpid(daemon.pid, 0)
    until(lambda: not any(is_stopped(pid) for pid in pids), "the daemon's guard continues everybody")
    second = platform_of()
    second.executor.recover(Standing(replicas=(sharing("r0", "job-r0"), sharing("r1", "job-r1")), generations={}))
    for name in ("r0", "r1"):
        until(lambda name=name: _is_held(second, name), f"{name} is held again")
    now = daemon_of(second)
    assert now is not None
    assert now.pid != daemon.pid


@pytest.mark.slow
def test_a_platform_that_ends_leaves_no_trace_of_shares(platform: Platform) -> None:
    run(platform, "r0")
    daemon = daemon_of(platform)
    assert daemon is not None
    slots = platform.executor._shares._slots_path
    group = group_name(socket_directory(platform.state_dir))
    assert slots.exists()
    platform.executor.close(stop_workers=True, grace_s=2.0)
    assert read_stat(daemon.pid) is None
    assert not slots.exists()
    assert not [path for path in Path("/sys/fs/cgroup").glob("*/*") if path.name == group]


@pytest.mark.slow
def test_a_daemon_that_does_not_come_up_is_told_of(
    platform_of: Callable[..., Platform], monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = platform_of()
    platform.executor._shares.cpu.keeper.command = ["/bin/false"]
    platform.executor.recover(Standing())
    platform.executor.start(sharing("r0", "job-r0"))
    platform.until(ReplicaReady)
    until(lambda: "does not come up" in platform.executor.sharing().enforced, "the failure is told")
    assert tenant(platform, "r0") is not None


def test_shares_of_a_gpu_are_planned_and_not_enforced(platform_of: Callable[..., Platform]) -> None:
    platform = platform_of(nodes=[make_node("local", 1, kind="gpu")])
    platform.executor.recover(Standing())
    platform.executor.start(sharing("r0", "job-r0"))
    platform.until(ReplicaReady)
    status = platform.executor.sharing()
    assert status.mechanism == "none"
    assert "not enforced" in status.enforced
    assert [told.replica_id for told in status.tenants] == ["r0"]
    assert platform.executor.counts().get("share_daemons", 0) == 0
