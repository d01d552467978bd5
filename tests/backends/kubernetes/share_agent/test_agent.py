"""The share agent of a node with a real share daemon, in front of an API server that answers as the test says."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kits.kubernetes.scripted_server import Answer, Asked, ScriptedServer, scripted
from kits.kubernetes.share_pods import pod
from springtide.backends.kubernetes.client.api import KubeApi
from springtide.backends.kubernetes.pods.shares import share_text
from springtide.backends.kubernetes.settings import KubernetesSettings
from springtide.backends.kubernetes.share_agent import agent as share_agent
from springtide.backends.kubernetes.share_agent.agent import ShareAgent, main
from springtide.backends.sharing.gpu.discovery import Gpu
from springtide.core.shares import Share

UUID = "GPU-53545542-0000-4000-8000-000000000001"
LIMIT_S = 60.0


class Pods:
    """What the API server knows: pods with versions, told as whole lists; watches end at once and are asked again."""

    def __init__(self) -> None:
        self.version = 1
        self.pods: list[dict[str, Any]] = []
        self.is_away = False
        self.asked: list[str] = []

    def put(self, *pods: dict[str, Any]) -> None:
        self.version += 1
        for each in pods:
            each["metadata"]["resourceVersion"] = str(self.version)
        self.pods = list(pods)

    def answer(self, asked: Asked) -> Answer:
        self.asked.append(asked.target)
        if self.is_away:
            return Answer(503, b'{"kind": "Status", "code": 503, "message": "away"}')
        if "watch=true" in asked.target:
            # Too old, always: whatever has changed is in the next listing.
            gone = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired"}}
            return Answer(200, json.dumps(gone).encode() + b"\n", ends=True)
        listing = {"metadata": {"resourceVersion": str(self.version)}, "items": self.pods}
        return Answer(200, json.dumps(listing).encode())


@pytest.fixture
def pods(monkeypatch: pytest.MonkeyPatch) -> Pods:
    # No pod of these tests has a process on this machine, which is what one of them is about.
    monkeypatch.setattr(share_agent, "_VISIBILITY_S", 3600.0)
    return Pods()


@pytest.fixture
def server(pods: Pods) -> Iterator[ScriptedServer]:
    with scripted(pods.answer) as found:
        yield found


def run(
    tmp_path: Path,
    server: ScriptedServer,
    scenario: Callable[[ShareAgent], Awaitable[None]],
    discover: Callable[[], tuple[Gpu, ...]] = lambda: (Gpu(number=1, uuid=UUID),),
) -> None:
    library = tmp_path / "library.so"
    library.write_bytes(b"a library")
    settings = KubernetesSettings(name="p", namespaces=("ml",), share_directory=str(tmp_path / "run"))

    async def body() -> None:
        agent = ShareAgent(settings, "n", library, discover)
        api = KubeApi(server.url)
        running = asyncio.create_task(agent.run(api))
        try:
            await scenario(agent)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await api.close()

    asyncio.run(body())


async def until(condition: Callable[[], object], what: str) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.02)


def held(agent: ShareAgent) -> dict[str, tuple[float, float]]:
    status = agent.status()
    tenants = status.sharing.tenants if status is not None else ()
    return {tenant.replica_id: (tenant.request, tenant.limit) for tenant in tenants}


@pytest.mark.slow
def test_the_daemon_knows_what_the_pods_of_the_node_say(tmp_path: Path, pods: Pods, server: ScriptedServer) -> None:
    pods.put(pod("r-0"), pod("whole", share=None), pod("far", node="m"))

    async def scenario(agent: ShareAgent) -> None:
        await until(lambda: held(agent) == {"r.0@ml": (0.25, 0.5)}, "it is told")
        asked = next(target for target in pods.asked if "watch" not in target)
        assert asked.startswith("/api/v1/namespaces/ml/pods?")
        assert "spec.nodeName%3Dn" in asked
        assert "springtide.dev%2Fplatform%3Dp" in asked
        public, private = tmp_path / "run" / "public", tmp_path / "run" / "private"
        assert (public / "libspringtide_gpu.so").read_bytes() == b"a library"
        assert sorted(path.name for path in public.iterdir()) == ["gpu-tenants.sock", "libspringtide_gpu.so"]
        assert stat.S_IMODE(private.stat().st_mode) == 0o700
        assert stat.S_IMODE((private / "gpu.sock").stat().st_mode) == 0o600
        if os.geteuid() == 0:
            assert agent.problem == ""
            assert stat.S_IMODE((public / "gpu-tenants.sock").stat().st_mode) == 0o666

        pods.put(pod("r-0", share=share_text(Share(request=0.3, limit=0.9))))
        await until(lambda: held(agent) == {"r.0@ml": (0.3, 0.9)}, "another share")
        # A server that is away changes nothing about who is held.
        pods.is_away = True
        daemon = agent.status()
        assert daemon is not None
        os.kill(daemon.pid, 9)
        await until(lambda: (now := agent.status()) is not None and now.pid != daemon.pid, "another daemon")
        await until(lambda: held(agent) == {"r.0@ml": (0.3, 0.9)}, "it goes on with what was said")
        pods.is_away = False
        pods.put()
        await until(lambda: agent.status() is not None and not held(agent), "nobody holds anything any more")

    run(tmp_path, server, scenario)


def test_another_agent_goes_on_where_one_stopped_and_frees_nobody_meanwhile(
    tmp_path: Path, pods: Pods, server: ScriptedServer
) -> None:
    pods.put(pod("r-0"))

    async def begins(agent: ShareAgent) -> None:
        await until(lambda: held(agent), "it is told")

    run(tmp_path, server, begins)
    segments = sorted(path.name for path in (tmp_path / "run" / "private" / "segments").iterdir())
    assert len(segments) == 2, "its daemon was not asked to let go"
    pods.is_away = True

    async def goes_on(agent: ShareAgent) -> None:
        await until(lambda: (now := agent.status()) is not None and now.num_adopted == 1, "it goes on with the files")
        assert held(agent) == {"r.0@ml": (0.25, 0.5)}
        assert agent.problem
        pods.is_away = False
        # What its pod says now cannot be read: it is held as it was before both.
        pods.put(pod("r-0", share="{}"))
        if os.geteuid() == 0:
            await until(lambda: "is no share; held to 0.25..0.5" in agent.problem, "it is said")
        assert held(agent) == {"r.0@ml": (0.25, 0.5)}

    run(tmp_path, server, goes_on)


def test_sharers_whose_processes_cannot_be_seen_are_told(
    tmp_path: Path, pods: Pods, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(share_agent, "_VISIBILITY_S", 0.05)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    # There is no such pod on this machine, as if this were another numbering of processes than the pods'.
    pods.put(pod("r-0"))

    async def scenario(agent: ShareAgent) -> None:
        await until(lambda: "needs hostPID" in agent.problem, "it is said")
        pods.put(pod("r-0", phase="Pending"))
        await until(lambda: agent.problem == "", "a pod that does not run has no processes")

    run(tmp_path, server, scenario)


@pytest.mark.slow
def test_a_driver_that_comes_up_late_is_waited_for(tmp_path: Path, pods: Pods, server: ScriptedServer) -> None:
    pods.put(pod("r-0"))
    found = iter([(), (Gpu(number=1, uuid=UUID),)])

    async def scenario(agent: ShareAgent) -> None:
        assert agent.problem
        await until(lambda: held(agent), "the driver tells, and then the daemon is told")

    run(tmp_path, server, scenario, lambda: next(found))


def test_an_agent_that_lacks_something_says_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text("{name: p, namespace: p, share_directory: /run/springtide}")
    monkeypatch.delenv("NODE_NAME", raising=False)
    assert main(["--settings", str(settings)]) == 1
    assert "NODE_NAME has to name the node" in caplog.text
    assert main(["--settings", str(tmp_path / "nowhere.yaml")]) == 1
