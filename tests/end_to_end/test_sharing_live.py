"""A service and a job on one device of a real platform: held to their shares, changed in place, killed, asleep.

Whatever dies - a replica, the daemon that holds shares, the platform - nobody stays held back and everything goes on.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kits.end_to_end.live_platform import TINY, LivePlatform, ended_after, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SERVICE = """
class Busy:
    def predict(self, numbers: list[float]) -> list[float]:
        total = sum(index * 1e-9 for index in range(20000))
        return [2 * number + 0 * total for number in numbers]
"""
JOB_SHARE = {"request": 0.4, "limit": 0.8}
SERVICE_SHARE = {"request": 0.3, "limit": 0.6}
# A worker stopped by signals is in state T; nobody may be left so.
STOPPED = "T"
# So long a job pauses at each part of a step where nothing has to be held back.
PAUSE_S = 0.02
# The tests on one platform are one worker's: another would start the same again.
one_platform = pytest.mark.xdist_group("sharing")


def deploy(platform: LivePlatform, share: dict[str, float] | None, name: str = "busy", **options: Any) -> Any:
    source = {"filename": "busy.py", "text": SERVICE, "object_name": "Busy", "kind": "class"}
    settings: dict[str, Any] = {"min_replicas": 1, **options}
    if share is not None:
        settings["share"] = share
    return platform.request("PUT", f"/v1/services/{name}", {"source": source, "options": settings})


def submit(
    platform: LivePlatform, name: str = "busy-job", share: dict[str, float] | None = None, pause_s: float = PAUSE_S
) -> str:
    """A job that trains practically for ever."""
    return platform.submit(
        name,
        text=TINY.replace("96", "4096"),
        num_epochs=100_000,
        max_workers=1,
        global_batch_size=256,
        share=share or JOB_SHARE,
        shard_s=pause_s,
    )


def ask(platform: LivePlatform, name: str = "busy") -> None:
    assert platform.request("POST", f"/f/{name}", {"numbers": [1.0, 2.0]})["outputs"] == [2.0, 4.0]


def tenants(platform: LivePlatform) -> dict[str, dict[str, Any]]:
    """Who is held to which share now, by the id of the workload."""
    return {tenant["workload_id"]: tenant for tenant in platform.request("GET", "/v1/sharing")["tenants"]}


def wait_tenants(platform: LivePlatform, *workload_ids: str) -> dict[str, dict[str, Any]]:
    wait_for(
        lambda: set(tenants(platform)) == set(workload_ids),
        120.0,
        lambda: f"{sorted(workload_ids)} to be held to their shares; held are {sorted(tenants(platform))}",
    )
    return tenants(platform)


def wait_trains(platform: LivePlatform, job_id: str) -> None:
    """Wait until the job has taken steps that it had not taken when this was called."""
    before = platform.job(job_id)["step"]
    wait_for(lambda: platform.job(job_id)["step"] > before, 120.0, lambda: f"steps after {before} of {job_id}")


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def is_ever_running(pid: int) -> bool:
    """Whether the process is not held for good: one that is held by turns is seen running sooner or later."""
    end = time.monotonic() + 30.0
    while time.monotonic() < end:
        if state_of(pid) != STOPPED:
            return True
        time.sleep(0.001)
    return False


def daemon_pids(platform: LivePlatform) -> list[int]:
    """The share daemons of this platform: children of their own sessions, known by the directory they serve."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            environment = (folder / "environ").read_bytes()
        except OSError:
            continue
        if (
            b"springtide.backends.sharing.cpu.daemon" in words
            and str(platform.state_dir.parent).encode() in environment
        ):
            found.append(int(folder.name))
    return found


@pytest.fixture(scope="module")
def sharing_platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LivePlatform, str]]:
    """One platform for the tests that leave its service and its job at work, whatever died in between.

    Its job computes without a pause, so that it is held back.
    """
    live = LivePlatform(tmp_path_factory.mktemp("sharing") / "state")
    with pytest.MonkeyPatch.context() as patch, ended_after(live):
        yield live, start_sharing(live, patch, pause_s=0.0)


@pytest.fixture
def shared(sharing_platform: tuple[LivePlatform, str]) -> tuple[LivePlatform, str]:
    """A platform of one device with a service and a job on it, both at work."""
    platform, job_id = sharing_platform
    ask(platform)
    wait_tenants(platform, "busy", job_id)
    wait_trains(platform, job_id)
    return platform, job_id


@pytest.fixture
def own(platform: LivePlatform, monkeypatch: pytest.MonkeyPatch) -> tuple[LivePlatform, str]:
    """The same for a test that ends the one or the other."""
    return platform, start_sharing(platform, monkeypatch)


def start_sharing(platform: LivePlatform, patch: pytest.MonkeyPatch, pause_s: float = PAUSE_S) -> str:
    """Start the platform, its service and its job; returns the job's id once both are at work."""
    # By this the daemon of this platform is told from those of others on the machine.
    patch.setenv("SPRINGTIDE_TEST_OF", str(platform.state_dir.parent))
    platform.slots = 1
    platform.start(policy="springtide")
    deploy(platform, SERVICE_SHARE)
    job_id = submit(platform, pause_s=pause_s)
    platform.wait_job(job_id, 120.0, states=("RUNNING",))
    ask(platform)
    wait_tenants(platform, "busy", job_id)
    wait_trains(platform, job_id)
    return job_id


def test_what_does_not_fit_waits_and_comes_when_there_is_room(own):
    platform, job_id = own
    waiting = submit(platform, "second", {"request": 0.5, "limit": 0.5})
    assert platform.job(waiting)["state"] == "PENDING"
    why = platform.request("GET", f"/v1/workloads/{waiting}/why")
    assert any("0.5 of a device" in line for line in (why["reason"], *why["evidence"])), why
    platform.request("POST", f"/v1/jobs/{job_id}/cancel")
    platform.wait_job(waiting, 120.0, states=("RUNNING",))
    wait_trains(platform, waiting)
    ask(platform)


def test_a_job_is_held_to_its_limit(platform):
    """By the CPU time that it uses: other work on the machine can only make it less."""
    platform.slots = 1
    platform.start(policy="springtide")
    job_id = submit(platform, share={"request": 0.1, "limit": 0.2}, pause_s=0.0)
    platform.wait_job(job_id, 240.0, states=("RUNNING",))
    wait_tenants(platform, job_id)
    wait_trains(platform, job_id)
    sharing = platform.request("GET", "/v1/sharing")
    if sharing["mechanism"] == "none":
        pytest.skip(f"nothing is enforced on this machine: {sharing['enforced']}")
    (pid,) = [pid for replica, pid in platform.worker_pids().items() if replica.startswith("busy-job")]
    used_s, from_s = cpu_s(pid), time.monotonic()
    wait_for(lambda: time.monotonic() - from_s > 4.0, 60.0, "four seconds to pass")
    rate = (cpu_s(pid) - used_s) / (time.monotonic() - from_s)
    assert rate <= 0.2 * sharing["device_cpus"] * 1.25 + 0.02
    assert tenants(platform)[job_id]["throttled_s"] > 0.0


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_platform_that_ends_takes_its_daemon_and_its_groups_along(own):
    platform, job_id = own
    platform.request("POST", f"/v1/jobs/{job_id}/cancel")
    platform.request("DELETE", "/v1/services/busy")
    platform.stop()
    wait_for(lambda: not daemon_pids(platform), 60.0, "the share daemon to end")


def test_a_service_sleeps_and_wakes_on_a_shared_device(platform):
    platform.slots = 1
    platform.start(policy="springtide")
    deploy(platform, SERVICE_SHARE, min_replicas=0, idle_s=1.0)
    job_id = submit(platform)
    platform.wait_job(job_id, 120.0, states=("RUNNING",))
    for _ in range(2):
        ask(platform)
        wait_tenants(platform, "busy", job_id)
        wait_for(lambda: set(tenants(platform)) == {job_id}, 120.0, "the service to go to sleep")
        wait_trains(platform, job_id)


@pytest.mark.xdist_group("sharing refused")
@pytest.mark.parametrize(
    "share",
    [
        {"request": 0.0}, {"request": -0.1}, {"request": 1.5}, {"request": 0.5, "limit": 0.4},
        {"request": 0.5, "limit": 1.1}, {"request": "much"}, {"limit": 0.5}, {"request": 0.5, "memory_mb": -1},
        {"request": 0.5, "color": "red"}, {"request": None}, 0.5, [0.5, 0.6],
    ],
)  # fmt: skip
def test_a_share_that_cannot_be_is_refused_in_a_sentence(refusing, share):
    source = {"filename": "busy.py", "text": SERVICE, "object_name": "Busy", "kind": "class"}
    body = {"source": source, "options": {"share": share}}
    answer = refusing.http.request("PUT", "/v1/services/never", json=body)
    assert answer.status_code in (400, 422), answer.text
    message = answer.json()["error"]["message"]
    assert "share" in message, message
    assert refusing.request("GET", "/v1/services") == []


@pytest.fixture(scope="module")
def refusing(tmp_path_factory):
    live = LivePlatform(tmp_path_factory.mktemp("refusing") / "state", slots=1)
    live.start(policy="springtide")
    yield live
    live.stop()


@one_platform
def test_both_work_on_one_device_and_are_told_so(shared):
    platform, job_id = shared
    sharing = platform.request("GET", "/v1/sharing")
    assert sharing["mechanism"] in ("cgroup-v1", "cgroup-v2", "signals", "none")
    assert sharing["enforced"]
    held = tenants(platform)
    assert {tenant["device_id"] for tenant in held.values()} == {"local/0"}
    assert (held[job_id]["request"], held[job_id]["limit"]) == (0.4, 0.8)
    assert all(0.0 <= tenant["granted"] <= tenant["limit"] + 1e-6 for tenant in held.values())
    status = platform.request("GET", "/v1/status")
    assert {holder["workload_id"] for holder in status["devices"][0]["holders"]} == {"busy", job_id}
    why = platform.request("GET", "/v1/workloads/busy/why")
    assert any("beside busy-job" in line for line in why["evidence"]), why["evidence"]


@one_platform
def test_a_share_is_changed_in_place(shared):
    platform, job_id = shared
    pids = platform.worker_pids()
    deploy(platform, {"request": 0.5, "limit": 0.7})
    wait_for(lambda: tenants(platform)["busy"]["request"] == 0.5, 60.0, "the new share to be in force")
    ask(platform)
    assert platform.worker_pids() == pids, "a worker was started anew"
    wait_trains(platform, job_id)
    assert platform.job(job_id)["num_restarts"] == 0


@one_platform
def test_a_killed_replica_comes_back_and_the_job_does_not_notice(shared):
    platform, job_id = shared
    (pid,) = [pid for replica, pid in platform.worker_pids().items() if replica.startswith("busy.")]
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: pid not in platform.worker_pids().values(), 60.0, "the replica to be gone")
    ask(platform)
    wait_tenants(platform, "busy", job_id)
    wait_trains(platform, job_id)
    assert platform.job(job_id)["num_restarts"] == 0


@one_platform
def test_a_killed_share_daemon_leaves_nobody_held_and_comes_back(shared):
    platform, job_id = shared
    (daemon,) = daemon_pids(platform)
    os.kill(daemon, signal.SIGKILL)
    ask(platform)
    wait_trains(platform, job_id)
    assert all(is_ever_running(pid) for pid in platform.worker_pids().values())
    wait_for(lambda: daemon_pids(platform) not in ([], [daemon]), 120.0, "another share daemon")
    wait_tenants(platform, "busy", job_id)
    ask(platform)
    wait_trains(platform, job_id)


@one_platform
def test_a_killed_platform_leaves_its_sharers_at_work_and_finds_them_again(shared):
    platform, job_id = shared
    pids = platform.worker_pids()
    steps = platform.workload(job_id) / "steps.jsonl"
    platform.kill()
    size = steps.stat().st_size
    wait_for(lambda: steps.stat().st_size > size, 60.0, "steps without a platform")
    assert all(is_ever_running(pid) for pid in pids.values())
    platform.start(policy="springtide")
    wait_tenants(platform, "busy", job_id)
    assert platform.worker_pids() == pids, "the workers were taken over, not replaced"
    ask(platform)
    wait_trains(platform, job_id)
