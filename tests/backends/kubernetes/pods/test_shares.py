"""Shares in pods: what a sharer's pod is made of, what a node's agent reads off pods, and what it tells. No server."""

from __future__ import annotations

import asyncio
import json

import pytest

from kits.kubernetes.share_pods import SHARE, pod
from springtide.backends.kubernetes.pods.shares import (
    SHARE_ANNOTATION,
    pod_sharing,
    share_of,
    share_parts,
    share_text,
)
from springtide.backends.kubernetes.pods.tenants import tenants_of
from springtide.backends.kubernetes.settings import KubernetesSettings
from springtide.backends.kubernetes.share_agent.pages import serve_pages
from springtide.backends.sharing.gpu.discovery import Gpu
from springtide.backends.sharing.gpu.table import GpuDaemonStatus
from springtide.core.resources import Device, DeviceId, NodeId
from springtide.core.shares import Share
from springtide.core.status.shares import SharingStatus, TenantStatus

ON = KubernetesSettings(share_directory="/run/springtide")
DEVICE = Device(device_id=DeviceId("n/1"), node_id=NodeId("n"), index=1, kind="gpu")
GPUS = (Gpu(number=0, uuid="GPU-a"), Gpu(number=1, uuid="GPU-b"), Gpu(number=2, uuid=""))


def test_a_sharers_pod_gets_the_library_and_sees_nothing_else_of_the_daemon() -> None:
    parts = share_parts(SHARE, DEVICE, ON)
    assert {each["name"]: each["value"] for each in parts.environment} == {
        "LD_PRELOAD": "/run/springtide/public/libspringtide_gpu.so",
        "SPRINGTIDE_GPU_SOCKET": "/run/springtide/public/gpu-tenants.sock",
    }
    (mount,), (volume,) = parts.mounts, parts.volumes
    assert mount == {"name": volume["name"], "mountPath": "/run/springtide/public", "readOnly": True}
    assert volume["hostPath"] == {"path": "/run/springtide/public", "type": "Directory"}
    assert json.loads(parts.annotations[SHARE_ANNOTATION]) == {"request": 0.25, "limit": 0.5, "memory_mb": 4000}


def test_a_pod_without_a_share_daemon_gets_no_path_of_the_node() -> None:
    assert not any((share_parts(None, DEVICE, ON).annotations, share_parts(None, DEVICE, ON).volumes)), (
        "a whole device is nobody's part"
    )
    for settings in (
        KubernetesSettings(share_directory=""),
        KubernetesSettings(device_kind="cpu", share_directory="/r"),
    ):
        parts = share_parts(SHARE, DEVICE, settings)
        assert (parts.environment, parts.mounts, parts.volumes) == ((), (), ())
        assert SHARE_ANNOTATION in parts.annotations


def test_a_share_is_read_as_it_was_written() -> None:
    other = Share(request=0.1, limit=1.0)
    written = {"metadata": {"annotations": {SHARE_ANNOTATION: share_text(other)}}}
    assert share_of(written) == other
    assert share_of(pod()) == SHARE


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "{}",
        "[0.1, 0.2]",
        '{"request": 0.5}',
        '{"request": 0.5, "limit": 0.4}',
        '{"request": 0, "limit": 0.4}',
        '{"request": 0.5, "limit": 1.1}',
        '{"request": "0.5", "limit": 0.6}',
        '{"request": 0.5, "limit": 0.6, "memory_mb": -1}',
        '{"request": 0.5, "limit": 0.6, "memory_mb": 1e99}',
        '{"request": 0.5, "limit": 0.6, "more": 1}',
        '{"request": NaN, "limit": 0.6}',
        "\ud800",
    ],
)
def test_nonsense_is_no_share(text: str) -> None:
    assert share_of(pod(share=text)) is None


def test_the_agent_reads_the_sharers_of_its_node() -> None:
    pods = [
        pod("b-0"),
        pod("a-0", role="training", index=0),
        pod("whole", share=None),
        pod("over", phase="Succeeded"),
        pod("elsewhere", node="m"),
    ]
    found = tenants_of(pods, "n", GPUS)
    assert found.problems == ()
    (first, second) = found.entries
    assert (first.pod_uid, first.device_uuid, first.is_slo, first.share) == ("uid-a-0", "GPU-a", False, SHARE)
    assert (second.pod_uid, second.device_uuid, second.is_slo) == ("uid-b-0", "GPU-b", True)
    assert second.replica_id == "r.0@ml"
    assert second.process is None
    assert tenants_of(reversed(pods), "n", GPUS) == found, "the order of a listing means nothing"


def test_a_share_that_cannot_be_read_frees_nobody() -> None:
    before = tenants_of([pod()], "n", GPUS).entries
    for share in ("{}", None):
        found = tenants_of([pod(share=share)], "n", GPUS, before)
        assert [entry.share for entry in found.entries] == [SHARE]
        assert "held to 0.25..0.5 as before" in found.problems[0]
    fresh = tenants_of([pod(share="{}")], "n", GPUS)
    assert fresh.entries == ()
    assert fresh.problems == (f"ml/r-0: its annotation {SHARE_ANNOTATION} is no share",)


@pytest.mark.parametrize("index", [2, 3, "x", ""])
def test_a_gpu_that_the_driver_does_not_name_is_told(index: object) -> None:
    found = tenants_of([pod(index=index)], "n", GPUS)
    assert found.entries == ()
    assert "the driver of this node tells of 0, 1, 2" in found.problems[0]


def test_people_are_told_what_holds_sharers_and_what_not() -> None:
    holders = [("w", "w.1", DeviceId("n/1"), SHARE), ("v", "v.0", DeviceId("n/0"), SHARE)]
    held = pod_sharing(holders, ON)
    assert (held.mechanism, [tenant.replica_id for tenant in held.tenants]) == ("cuda-preload", ["v.0", "w.1"])
    assert "static programs" in held.enforced
    assert pod_sharing(holders, KubernetesSettings(share_directory="")).mechanism == "none"
    cpu = pod_sharing(holders, KubernetesSettings(device_kind="cpu"))
    assert (cpu.mechanism, cpu.device_cpus) == ("pod-limits", 1.0)
    assert "from its next start on" in cpu.enforced
    assert pod_sharing([], ON).enforced.startswith("no device is shared yet")


class _Agent:
    def __init__(self, problem: str, status: GpuDaemonStatus | None) -> None:
        self.problem = problem
        self._status = status

    def status(self) -> GpuDaemonStatus | None:
        return self._status


def test_the_agents_pages() -> None:
    tenant = TenantStatus(
        workload_id='w"\n', replica_id="w.0@ml", device_id="n/0", request=0.3, limit=0.6, used=0.25, num_launches=7
    )
    sharing = SharingStatus(mechanism="cuda-preload", tenants=(tenant,))
    well = _Agent("", GpuDaemonStatus(pid=1, written_at_s=0.0, sharing=sharing))
    ill = _Agent("the share daemon does not run, or says nothing", None)

    async def ask(about: _Agent, question: bytes) -> tuple[int, bytes]:
        server = await serve_pages(about, "127.0.0.1", 0)
        try:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(question)
            answer = await asyncio.wait_for(reader.read(), 20)
            writer.close()
        finally:
            server.close()
        return int(answer.split()[1]) if answer else 0, answer.partition(b"\r\n\r\n")[2]

    def get(about: _Agent, path: str) -> tuple[int, bytes]:
        return asyncio.run(ask(about, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()))

    assert [get(well, path)[0] for path in ("/livez", "/readyz", "/healthz", "/sharing?x=1")] == [200, 200, 200, 200]
    assert {get(ill, path)[0] for path in ("/livez", "/healthz")} == {200}, "starting it anew would mend nothing"
    assert get(ill, "/readyz") == (503, b"the share daemon does not run, or says nothing\n")
    assert get(ill, "/sharing")[0] == 503
    assert json.loads(get(well, "/sharing")[1])["tenants"][0]["used"] == 0.25
    text = get(well, "/metrics")[1].decode()
    assert 'springtide_node_share_launches_total{workload="w\\"\\n",replica="w.0@ml",device="n/0"} 7\n' in text
    assert "springtide_node_share_daemon_up 1\n" in text
    assert "springtide_node_share_daemon_up 0\n" in get(ill, "/metrics")[1].decode()
    assert get(well, "/nothing")[0] == 404
    assert asyncio.run(ask(well, b"POST /readyz HTTP/1.1\r\n\r\n"))[0] == 405
    assert asyncio.run(ask(well, b"HEAD /readyz HTTP/1.1\r\n\r\n")) == (200, b"")
    assert asyncio.run(ask(well, b"\r\n\r\n"))[0] == 405
    assert asyncio.run(ask(well, b"GET /" + b"a" * 20000 + b" HTTP/1.1\r\n\r\n"))[0] == 0, "a line without end"
