"""A service and a job on one GPU of a real platform: held to their shares of its time and memory, whatever dies.

The machine is a stub driver and a stand-in for nvidia-smi; the library, its daemon and the platform are the real ones.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from kits.end_to_end.live_platform import LivePlatform, wait_for
from kits.nvidia_smi import STUB_UUIDS, install_nvidia_smi
from springtide.backends.sharing.gpu.table import STATUS_NAME, GpuDaemonStatus
from springtide.backends.sharing.table import read_whole
from springtide.backends.sockets import socket_directory
from springtide.core.errors import BackendError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.xdist_group("measures")]

KERNEL_S = 0.002
JOB_SHARE = {"request": 0.4, "limit": 0.8}
SERVICE_SHARE = {"request": 0.3, "limit": 0.6, "memory_mb": 1000}
OUT_OF_MEMORY = 2
# How a program without any framework uses a GPU. The kernel's name says to the stub driver how long it takes.
DEVICE = """
import ctypes, json, os, time

class Gpu:
    def __init__(self):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        device, context, module, self.kernel = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self.ask("cuInit", 0)
        self.ask("cuDeviceGet", ctypes.byref(device), 0)
        self.ask("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.ask("cuCtxSetCurrent", context)
        self.ask("cuModuleLoadData", ctypes.byref(module), b"code")
        self.ask("cuModuleGetFunction", ctypes.byref(self.kernel), module, b"layer@2000000")
    def ask(self, name, *arguments):
        code = getattr(self.cuda, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} answered {code}")
    def compute(self, launches):
        for _ in range(launches):
            self.ask("cuLaunchKernel", self.kernel, 1, 1, 1, 32, 1, 1, 0, None, None, None)
        self.ask("cuCtxSynchronize")
    def allocate(self, mb):
        return self.cuda.cuMemAlloc_v2(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(mb * 1_000_000))
"""
SERVICE = f"""{DEVICE}
class Scorer:
    def __init__(self):
        self.gpu = Gpu()
    def predict(self, orders: list[int]) -> list[float]:
        answers = []
        for order in orders:
            if order > 0:
                self.gpu.compute(order)
            answers.append(0.0 if order > 0 else float(self.gpu.allocate(-order)))
        return answers
"""
# A line for every few launches: how many there were by then, when, and on which device.
JOB = f"""{DEVICE}
import sys
gpu, count = Gpu(), 0
with open(sys.argv[1], "a", buffering=1) as file:
    while True:
        gpu.compute(2)
        count += 2
        file.write(json.dumps([count, time.monotonic(), os.environ["CUDA_VISIBLE_DEVICES"]]) + "\\n")
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a machine with two GPUs, and a user's cache, into which the platform builds the library."""
    from kits.native.native_build import Native
    from springtide.backends.sharing.gpu.build import find_compiler, find_headers

    folder = tmp_path_factory.mktemp("machine")
    try:
        find_compiler()
        stub = Native(folder / "native", find_headers()).stub_dir
    except BackendError as error:
        pytest.skip(f"the native parts cannot be compiled here: {error}")
    install_nvidia_smi(folder)
    return {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": str(stub),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "STUB_CLOCK": "real",
        "STUB_SHARED": str(folder / "devices"),
    }


class Gpus:
    """The platform, and what its service and job do on a GPU."""

    def __init__(self, platform: LivePlatform, log: Path) -> None:
        self.platform = platform
        self.log = log

    def deploy(self, **share: Any) -> None:
        source = {"filename": "scorer.py", "text": SERVICE, "object_name": "Scorer", "kind": "class"}
        options = {"min_replicas": 1, "max_replicas": 1, "share": {**SERVICE_SHARE, **share}}
        self.platform.request("PUT", "/v1/services/scorer", {"source": source, "options": options})

    def submit(self, **share: Any) -> str:
        body = {
            "name": "burn",
            "source": {"filename": "burn.py", "text": JOB, "kind": "script", "args": [str(self.log)]},
            "options": {"max_workers": 1, "share": {**JOB_SHARE, **share}},
        }
        return str(self.platform.request("POST", "/v1/jobs", body)["job_id"])

    def ask(self, *orders: int) -> list[float]:
        return list(self.platform.request("POST", "/f/scorer", {"orders": list(orders)})["outputs"])

    def tenant(self, name: str) -> dict[str, Any]:
        tenants = self.platform.request("GET", "/v1/sharing")["tenants"]
        return next((tenant for tenant in tenants if tenant["workload_id"].split("-")[0] == name), {})

    def launched(self) -> list[tuple[int, float, str]]:
        if not self.log.exists():
            return []
        return [tuple(json.loads(line)) for line in self.log.read_text().splitlines() if line.endswith("]")]

    def wait_launches(self) -> None:
        before = len(self.launched())
        wait_for(lambda: len(self.launched()) > before, 60.0, "the job to launch")

    def daemon(self) -> GpuDaemonStatus:
        found: list[GpuDaemonStatus] = []

        def is_there() -> bool:
            status = read_whole(socket_directory(self.platform.state_dir) / STATUS_NAME, GpuDaemonStatus)
            found.extend([status] if status is not None else [])
            return bool(found)

        wait_for(is_there, 60.0, "the GPU daemon to say something")
        return found[-1]

    def pid(self, name: str) -> int:
        (pid,) = [pid for replica, pid in self.platform.worker_pids().items() if replica.startswith(name)]
        return pid


@pytest.fixture
def gpus(platform: LivePlatform, machine: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gpus:
    for name in ("CUDA_VISIBLE_DEVICES", "LD_PRELOAD", "SPRINGTIDE_SHARE_MECHANISM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in machine.items():
        monkeypatch.setenv(name, value)
    Path(machine["STUB_SHARED"]).unlink(missing_ok=True)
    platform.slots = None
    platform.start(policy="springtide")
    return Gpus(platform, tmp_path / "launches.jsonl")


@pytest.fixture
def shared(gpus: Gpus) -> Gpus:
    """Both on one GPU, both at work."""
    gpus.deploy()
    job_id = gpus.submit()
    gpus.platform.wait_job(job_id, 120.0, states=("RUNNING",))
    gpus.wait_launches()
    assert gpus.ask(1) == [0.0]
    wait_for(lambda: gpus.tenant("scorer").get("num_launches", 0) > 0, 60.0, "the launches of both to be told")
    wait_for(lambda: gpus.tenant("burn").get("num_launches", 0) > 0, 60.0, "the launches of both to be told")
    return gpus


def test_both_are_on_one_gpu_by_uuid_and_are_told_so(shared: Gpus, machine: dict[str, str]) -> None:
    sharing = shared.platform.request("GET", "/v1/sharing")
    assert sharing["mechanism"] == "cuda-preload"
    assert sharing["enforced"].startswith("shares of a GPU are held by a library")
    assert {tenant["device_id"] for tenant in sharing["tenants"]} == {"local/0"}
    assert shared.launched()[-1][2] == STUB_UUIDS[0]
    # The stub driver's own book: one virtual clock, then until when each device of the machine has work.
    _, first, second = struct.unpack_from("=3Q", Path(machine["STUB_SHARED"]).read_bytes())
    assert first > 0
    assert second == 0
    status = shared.platform.request("GET", "/v1/status")
    assert [device["kind"] for device in status["devices"]] == ["gpu", "gpu"]
    why = shared.platform.request("GET", "/v1/workloads/scorer/why")
    assert any("kernels and graphs" in line for line in why["evidence"]), why["evidence"]
    assert shared.platform.http is not None
    figures = shared.platform.http.get("/metrics").text
    assert 'springtide_gpu_share{device="local/0",what="limit",workload="scorer"} 0.6' in figures
    assert 'springtide_gpu_memory_bytes{device="local/0",what="limit",workload="scorer"} 1e+09' in figures

    devices = command(shared.platform, "devices")
    assert "local/0 (gpu)  2 sharers" in devices
    assert "LAUNCHES" in devices
    assert " of 1000 MB" in devices
    assert "by cuda-preload" in devices
    assert "cuda-preload on 2 GPUs, known by UUID" in command(shared.platform, "doctor")


def command(platform: LivePlatform, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "springtide", *words, "--state", str(platform.state_dir)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_device_time_stays_within_the_limit(gpus: Gpus) -> None:
    """By the program's own count and clock: other work on this machine can only make it less.

    Launches while the daemon could not say anything for a tenth of a second are held by nobody, and told of.
    """
    gpus.submit(request=0.1, limit=0.2)
    gpus.wait_launches()
    count, since_s, _ = gpus.launched()[-1]
    wait_for(lambda: gpus.launched()[-1][1] - since_s > 4.0, 60.0, "four seconds of launches")
    now_count, now_s, _ = gpus.launched()[-1]
    told = gpus.tenant("burn")
    assert told["throttled_s"] > 0.0
    num_held = now_count - count - told["num_open"]
    assert num_held * KERNEL_S / (now_s - since_s) <= 0.2 * 1.1
    assert told["num_open"] < num_held / 4


def test_memory_stays_within_the_limit_which_can_be_changed_and_is_free_again_after_a_kill(shared: Gpus) -> None:
    assert shared.ask(-600) == [0.0]
    assert shared.ask(-600) == [OUT_OF_MEMORY]
    assert shared.ask(-300) == [0.0]
    wait_for(lambda: shared.tenant("scorer").get("memory_used_mb") == 900, 60.0, "what it holds to be told")
    assert shared.tenant("scorer")["num_denied"] == 1
    pids = shared.platform.worker_pids()
    shared.deploy(request=0.5, limit=0.7, memory_mb=2000)
    wait_for(lambda: shared.tenant("scorer").get("memory_mb") == 2000, 60.0, "the new share to be in force")
    assert shared.ask(-1000) == [0.0]
    assert shared.platform.worker_pids() == pids, "it is changed in place"
    pid = shared.pid("scorer")
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: pid not in shared.platform.worker_pids().values(), 60.0, "the replica to be gone")
    assert shared.ask(-1900) == [0.0]
    shared.wait_launches()


def test_a_surge_is_met_by_the_limit_and_the_job_gives_way(shared: Gpus) -> None:
    is_over = threading.Event()

    def keep_asking() -> None:
        while not is_over.is_set():
            shared.ask(20)

    askers = [threading.Thread(target=keep_asking) for _ in range(3)]
    for asker in askers:
        asker.start()
    try:
        wait_for(
            lambda: shared.tenant("scorer").get("granted") == 0.6 and shared.tenant("burn").get("granted", 1.0) <= 0.4,
            60.0,
            lambda: f"the surge to be met: {shared.tenant('scorer')}, {shared.tenant('burn')}",
        )
    finally:
        is_over.set()
        for asker in askers:
            asker.join()
    wait_for(lambda: shared.tenant("burn").get("granted") == 0.8, 60.0, "the job to have its limit again")


def test_nobody_stops_when_the_daemon_is_killed_and_it_comes_back(shared: Gpus) -> None:
    pids = shared.platform.worker_pids()
    before = shared.daemon()
    os.kill(before.pid, signal.SIGKILL)
    shared.wait_launches()
    assert shared.ask(1) == [0.0]
    wait_for(lambda: shared.daemon().pid != before.pid, 60.0, "another daemon")
    after = shared.daemon()
    assert (after.num_made, after.num_adopted) == (0, 2), "the files of both are the same"
    shared.wait_launches()
    launched = shared.launched()
    longest_s = max(later[1] - earlier[1] for earlier, later in itertools.pairwise(launched))
    assert longest_s < 5.0, "nobody hung"
    assert shared.platform.worker_pids() == pids


def test_a_killed_platform_leaves_its_sharers_held_and_finds_them_again(shared: Gpus) -> None:
    pids, daemon = shared.platform.worker_pids(), shared.daemon().pid
    shared.platform.kill()
    shared.wait_launches()
    shared.platform.start(policy="springtide")
    wait_for(lambda: shared.tenant("burn").get("num_launches", 0) > 0, 60.0, "the job to be told of")
    assert shared.daemon().pid == daemon
    assert shared.platform.worker_pids() == pids
    assert shared.ask(1) == [0.0]


def test_whoever_turns_it_off_is_told_that_nothing_is_held(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus.platform.stop()
    monkeypatch.setenv("SPRINGTIDE_SHARE_MECHANISM", "none")
    gpus.platform.start(policy="springtide")
    gpus.submit(request=0.1, limit=0.1)
    gpus.wait_launches()
    sharing = gpus.platform.request("GET", "/v1/sharing")
    assert sharing["mechanism"] == "none"
    assert "not enforced" in sharing["enforced"]
    assert b"libspringtide_gpu" not in Path(f"/proc/{gpus.pid('burn')}/maps").read_bytes()
