"""Replicas that share GPUs of a real platform: what their processes are given, what is told, what stays alive.

The library here is an empty one: what it does is tested in tests/native, and all of it together in tests/end_to_end.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from kits.local.local_platform import FAKE_ZYGOTE, Platform, start
from kits.nvidia_smi import STUB_UUIDS
from springtide.backends.local.devices import Gpu
from springtide.backends.processes import read_stat
from springtide.backends.sharing.gpu import enforcement
from springtide.backends.sharing.gpu.build import LIBRARY_FLAGS, LIBRARY_NAME, build_library
from springtide.backends.sharing.gpu.segments import (
    HELLO,
    LAYOUT,
    MAGIC,
    SOCKET_VARIABLE,
    UNKNOWN,
    WELCOME,
    segment_directory,
)
from springtide.backends.sharing.gpu.table import STATUS_NAME, TENANT_SOCKET_NAME, GpuDaemonStatus, uuid_bytes
from springtide.backends.sharing.table import read_whole
from springtide.backends.sockets import socket_directory
from springtide.core.actions import SetShare, StartReplica, StopReplica
from springtide.core.errors import BackendError
from springtide.core.events import ReplicaReady, ReplicaStopped
from springtide.core.ports import Standing
from springtide.core.resources import DeviceId, make_node
from springtide.core.shares import Share
from springtide.core.status.shares import SharingStatus, TenantStatus
from springtide.core.workload import ReplicaId, WorkloadId

THIRD = Share(request=0.3, limit=0.6, memory_mb=1000)
GPUS = [Gpu(number=number, uuid=uuid, memory_mb=16_000) for number, uuid in enumerate(STUB_UUIDS[:2])]
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def empty_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("empty")
    source = folder / "empty.c"
    source.write_text("int springtide_nothing;\n")
    try:
        return build_library(folder / LIBRARY_NAME, sources=[source], headers=[], flags=LIBRARY_FLAGS)
    except BackendError as error:
        pytest.skip(f"nothing can be compiled here: {error}")


@pytest.fixture
def library(empty_library: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a machine with GPUs would find; the platform looks for nothing else."""
    monkeypatch.setattr(enforcement, "find_library", lambda *, builds=True: empty_library)
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.delenv("SPRINGTIDE_SHARE_MECHANISM", raising=False)
    return empty_library


@pytest.fixture
def gpu_platform(platform_of: Callable[..., Platform]) -> Callable[[], Platform]:
    return lambda: platform_of(nodes=[make_node("local", 2, kind="gpu")], gpus=GPUS)


def sharing(name: str, share: Share | None = THIRD, device: int = 0) -> StartReplica:
    return replace(start(name, job_id=f"job-{name}"), device_id=DeviceId(f"local/{device}"), share=share)


def run(platform: Platform, *actions: StartReplica) -> None:
    platform.executor.recover(Standing())
    for action in actions:
        platform.executor.start(action)
        platform.until(ReplicaReady, lambda event, action=action: event.replica_id == action.replica_id)


def until(condition: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end_s, f"not in {LIMIT_S:g} s: {what}"
        time.sleep(0.02)


def told(platform: Platform, name: str) -> TenantStatus:
    return next(tenant for tenant in platform.executor.sharing().tenants if tenant.replica_id == name)


def daemon_of(platform: Platform) -> GpuDaemonStatus | None:
    return read_whole(socket_directory(platform.state_dir) / STATUS_NAME, GpuDaemonStatus)


def wait_held(platform: Platform) -> SharingStatus:
    def are_told() -> bool:
        status = platform.executor.sharing()
        reasons = [tenant.reason for tenant in status.tenants]
        return bool(reasons) and not any("enforced" in reason or "library" in reason for reason in reasons)

    until(are_told, "the daemon says of everybody what it does")
    return platform.executor.sharing()


def environment_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(line.split("=", 1) for line in lines if "=" in line)


@pytest.mark.slow
def test_processes_on_a_gpu_get_the_library_and_their_device_by_uuid(
    gpu_platform: Callable[[], Platform], library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = str(shutil.copy(library, tmp_path / "other.so"))
    monkeypatch.setenv("LD_PRELOAD", before)
    platform = gpu_platform()
    run(platform, sharing("r0"), sharing("r1", None, device=1))
    for name, uuid in zip(("r0", "r1"), STUB_UUIDS, strict=False):
        environment = environment_of(platform.pid(name))
        assert environment["LD_PRELOAD"] == f"{library}:{before}"
        assert environment["CUDA_VISIBLE_DEVICES"] == uuid
        assert environment[SOCKET_VARIABLE] == str(socket_directory(platform.state_dir) / TENANT_SOCKET_NAME)
    until(lambda: daemon_of(platform) is not None, "the daemon says something")
    daemon = daemon_of(platform)
    assert daemon is not None
    assert str(library) not in environment_of(daemon.pid).get("LD_PRELOAD", "")


def test_before_anybody_shares_it_is_told_what_will_hold_them(
    gpu_platform: Callable[[], Platform], library: Path
) -> None:
    status = gpu_platform().executor.sharing()
    assert status.mechanism == "cuda-preload"
    assert status.enforced.startswith("no device is shared yet; once one is, shares of a GPU are held by a library")


@pytest.mark.slow
def test_sharers_are_told_of_changed_and_let_go(gpu_platform: Callable[[], Platform], library: Path) -> None:
    platform = gpu_platform()
    run(platform, sharing("r0"), sharing("r1"))
    status = wait_held(platform)
    assert status.mechanism == "cuda-preload"
    assert status.enforced.startswith("shares of a GPU are held by a library")
    assert {(tenant.replica_id, tenant.device_id, tenant.memory_mb) for tenant in status.tenants} == {
        ("r0", "local/0", 1000),
        ("r1", "local/0", 1000),
    }
    asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    asked.connect(str(socket_directory(platform.state_dir) / TENANT_SOCKET_NAME))
    asked.send(HELLO.pack(MAGIC, LAYOUT, uuid_bytes(STUB_UUIDS[0])))
    assert WELCOME.unpack(asked.recv(WELCOME.size))[2] == UNKNOWN, "this process holds no share"
    asked.close()
    until(lambda: "not held: 1 process" in platform.executor.sharing().enforced, "who is not held is told of")
    pid = platform.pid("r0")
    half = Share(request=0.5, limit=0.5)
    platform.executor.start(SetShare(workload_id=WorkloadId("job-r0"), replica_id=ReplicaId("r0"), share=half))
    until(lambda: told(platform, "r0").limit == 0.5, "the new share is told")
    assert platform.pid("r0") == pid
    platform.executor.start(StopReplica(workload_id=WorkloadId("job-r0"), replica_id=ReplicaId("r0")))
    platform.until(ReplicaStopped)
    until(lambda: len(platform.executor.sharing().tenants) == 1, "who has left is not told of")


@pytest.mark.slow
def test_a_worker_on_two_gpus_sees_both_and_is_held_on_each(
    gpu_platform: Callable[[], Platform], library: Path
) -> None:
    platform = gpu_platform()
    run(platform, replace(sharing("r0"), more_devices=(DeviceId("local/1"),)), sharing("r1", device=1))
    assert environment_of(platform.pid("r0"))["CUDA_VISIBLE_DEVICES"] == ",".join(STUB_UUIDS[:2])
    status = wait_held(platform)
    assert {(tenant.replica_id, tenant.device_id) for tenant in status.tenants} == {
        ("r0", "local/0"),
        ("r0", "local/1"),
        ("r1", "local/1"),
    }
    daemon = daemon_of(platform)
    assert daemon is not None
    assert daemon.num_made == 3, "shared memory for each device of each"
    half = Share(request=0.5, limit=0.5)
    platform.executor.start(SetShare(workload_id=WorkloadId("job-r0"), replica_id=ReplicaId("r0"), share=half))

    def limits() -> set[float]:
        return {tenant.limit for tenant in platform.executor.sharing().tenants if tenant.replica_id == "r0"}

    until(lambda: limits() == {0.5}, "the new share is told of both devices")
    platform.executor.start(StopReplica(workload_id=WorkloadId("job-r0"), replica_id=ReplicaId("r0")))
    platform.until(ReplicaStopped)
    until(lambda: len(platform.executor.sharing().tenants) == 1, "who has left is told of on neither")


@pytest.mark.slow
def test_a_daemon_that_is_killed_comes_again(gpu_platform: Callable[[], Platform], library: Path) -> None:
    platform = gpu_platform()
    run(platform, sharing("r0"))
    for _ in range(2):
        wait_held(platform)
        before = daemon_of(platform)
        assert before is not None
        os.kill(before.pid, signal.SIGKILL)
        until(
            lambda killed=before.pid: (now := daemon_of(platform)) is not None and now.pid != killed,
            "there is another daemon",
        )
    wait_held(platform)


@pytest.mark.slow
def test_the_next_platform_adopts_sharers_with_their_daemon(
    gpu_platform: Callable[[], Platform], library: Path
) -> None:
    first = gpu_platform()
    run(first, sharing("r0"))
    wait_held(first)
    daemon = daemon_of(first)
    assert daemon is not None
    first.executor.close()
    second = gpu_platform()
    changed = replace(sharing("r0"), share=Share(request=0.2, limit=0.4))
    second.executor.recover(Standing(replicas=(changed,), generations={}))
    until(
        lambda: second.executor.sharing().tenants != () and told(second, "r0").limit == 0.4, "what stands is in force"
    )
    now = daemon_of(second)
    assert now is not None
    assert now.pid == daemon.pid


@pytest.mark.slow
def test_a_platform_that_ends_leaves_no_trace(gpu_platform: Callable[[], Platform], library: Path) -> None:
    platform = gpu_platform()
    run(platform, sharing("r0"))
    wait_held(platform)
    daemon = daemon_of(platform)
    assert daemon is not None
    segments = segment_directory(socket_directory(platform.state_dir))
    assert list(segments.iterdir())
    platform.executor.close(stop_workers=True, grace_s=2.0)
    assert read_stat(daemon.pid) is None
    assert not segments.exists() or not list(segments.iterdir())


@pytest.mark.slow
def test_a_process_from_before_the_library_is_told_of(
    gpu_platform: Callable[[], Platform], library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("SPRINGTIDE_SHARE_MECHANISM", "none")
        first = gpu_platform()
        run(first, sharing("r0"))
        status = first.executor.sharing()
        assert status.mechanism == "none"
        assert "the setting asks for none" in status.enforced
        assert "LD_PRELOAD" not in environment_of(first.pid("r0"))
        assert first.executor.counts().get("share_daemons", 0) == 0
        first.executor.close()
    second = gpu_platform()
    second.executor.recover(Standing(replicas=(sharing("r0"),), generations={}))
    until(
        lambda: any("without the library" in tenant.reason for tenant in second.executor.sharing().tenants),
        "who cannot be held is told of",
    )


@pytest.mark.slow
def test_a_zygote_from_before_the_library_is_replaced_and_its_workers_live_on(
    platform_of: Callable[..., Platform], library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build() -> Platform:
        nodes = [make_node("local", 2, kind="gpu")]
        return platform_of(nodes=nodes, gpus=GPUS, worker_command=None, zygote_command=FAKE_ZYGOTE)

    def zygote(platform: Platform) -> int:
        process = platform.executor._launcher.zygote.process
        assert process is not None
        return int(process.pid)

    with monkeypatch.context() as patch:
        patch.setenv("SPRINGTIDE_SHARE_MECHANISM", "none")
        first = build()
        run(first, sharing("r0"))
        before = zygote(first)
        first.executor.close()
    second = build()
    second.executor.recover(Standing(replicas=(sharing("r0"),), generations={}))
    second.executor.start(sharing("r1"))
    second.until(ReplicaReady, lambda event: event.replica_id == "r1")
    assert zygote(second) != before
    assert str(library) in environment_of(zygote(second))["LD_PRELOAD"]
    until(lambda: "without the library" in told(second, "r0").reason, "who cannot be held is told of")
    assert second.executor.counts()["adopted"] == 1
    second.executor.close()
    third = build()
    third.executor.recover(Standing(replicas=(sharing("r0"), sharing("r1")), generations={}))
    until(lambda: third.executor._launcher.zygote.is_connected, "the zygote that fits is taken over")
    assert zygote(third) == zygote(second)


def test_without_a_library_shares_are_planned_and_the_reason_is_told(
    gpu_platform: Callable[[], Platform], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*, builds: bool = True) -> Path:
        raise BackendError("there is no C compiler: install one\nand a second line")

    monkeypatch.delenv("SPRINGTIDE_SHARE_MECHANISM", raising=False)
    monkeypatch.setattr(enforcement, "find_library", missing)
    platform = gpu_platform()
    run(platform, sharing("r0"))
    status = platform.executor.sharing()
    assert status.mechanism == "none"
    assert status.enforced.endswith("(there is no C compiler: install one)")
    assert "not enforced" in told(platform, "r0").reason
    assert platform.executor.counts().get("share_daemons", 0) == 0


def test_gpus_without_a_known_uuid_cannot_be_held(platform_of: Callable[..., Platform], library: Path) -> None:
    nodes = [make_node("local", 2, kind="gpu")]
    for gpus in ([], GPUS[:1], [Gpu(number=0, uuid=""), GPUS[1]]):
        platform = platform_of(nodes=nodes, gpus=gpus)
        status = platform.executor.sharing()
        platform.executor.close()
        assert status.mechanism == "none"
        assert "nvidia-smi does not tell the UUIDs" in status.enforced


@pytest.mark.slow
def test_devices_of_both_kinds_are_told_of_together(platform_of: Callable[..., Platform], library: Path) -> None:
    nodes = [make_node("cpu", 1), make_node("local", 2, kind="gpu")]
    platform = platform_of(nodes=nodes, gpus=GPUS)
    on_cpu = replace(sharing("r1"), device_id=DeviceId("cpu/0"))
    run(platform, sharing("r0"), on_cpu)
    status = wait_held(platform)
    assert status.mechanism.endswith(" and cuda-preload")
    assert "of GPUs: shares of a GPU are held" in status.enforced
    assert [tenant.replica_id for tenant in status.tenants] == ["r1", "r0"]
