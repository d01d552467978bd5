"""Hostile users and bad luck on real processes: whatever one workload does, the others and the platform go on."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from kits.end_to_end.live_platform import ECHO, TINY, LivePlatform, artifact_digest, assert_exactly_once, wait_for
from kits.simulation.sweeps import part
from springtide.backends.sockets import socket_directory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DATA = """
import ctypes, os, signal, sys, threading, time, torch
torch.manual_seed(7)
X = torch.randn(96, 6)
Y = X @ torch.randn(6, 1)
def make():
    return torch.nn.Linear(6, 1)
def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.01)
def mse(model, batch):
    return torch.nn.functional.mse_loss(model(batch.x), batch.y)
"""
LOOP = """
    model, _ = ctx.prepare(make(), sgd)
    for batch in ctx.batches((X, Y)):
        ctx.step(mse(model, batch))
"""
# The body of a training function, how it must end, and a part of the sentence that its owner reads.
ODD = {
    "empty-dataset": (LOOP.replace("(X, Y)", "(X[:0], Y[:0])"), "FAILED", "the dataset is empty"),
    "batch-larger-than-dataset": (LOOP.replace("(X, Y)", "(X[:3], Y[:3])"), "SUCCEEDED", ""),
    "loss-is-nan": (LOOP.replace("batch))", "batch) * float('nan'))"), "SUCCEEDED", "not a finite number"),
    "no-parameters": (LOOP.replace("make()", "torch.nn.ReLU()"), "FAILED", "empty parameter list"),
    "optimizer-instance": (
        LOOP.replace("ctx.prepare(make(), sgd)", "(lambda m: ctx.prepare(m, sgd(m.parameters())))(make())"),
        "SUCCEEDED",
        "",
    ),
    "prepare-twice": ("\n    ctx.prepare(make(), sgd)" + LOOP, "FAILED", "prepare() was called a second time"),
    "batches-twice": (
        LOOP + "    for batch in ctx.batches((X, Y)):\n        pass\n",
        "FAILED",
        "goes through all epochs",
    ),
    "step-without-batches": (LOOP.replace("for batch in ctx.batches((X, Y))", "if True"), "FAILED", "batch"),
    "batch-without-step": (LOOP.replace("ctx.step(mse(model, batch))", "pass"), "FAILED", "was not trained on"),
    "no-loop": ("\n    ctx.prepare(make(), sgd)\n", "FAILED", "before its first step was complete"),
    "swallows-errors": (
        LOOP.replace(
            "        ctx.step(mse(model, batch))",
            "        try:\n            ctx.step(mse(model, batch))\n            raise ValueError\n"
            "        except Exception:\n            continue",
        ),
        "SUCCEEDED",
        "",
    ),
    "leaves-threads": ("\n    threading.Thread(target=time.sleep, args=(3600,)).start()" + LOOP, "SUCCEEDED", ""),
    "segfault": ("\n    ctypes.string_at(0)\n", "FAILED", "SIGSEGV"),
    "sys-exit": ("\n    sys.exit(0)\n", "FAILED", "SystemExit"),
    "too-much-memory": ("\n    torch.empty(1 << 50)\n", "FAILED", "allocate memory"),
    "no-dataset": (LOOP.replace("(X, Y)", "iter(X)"), "FAILED", "__len__ and __getitem__"),
    "recursion": ("\n    fit(ctx)\n", "FAILED", "recursion"),
    "one-bad-sample": (
        LOOP.replace("        ctx", "        assert not (batch.x == X[17]).all(1).any(), 'sample 17'\n        ctx"),
        "FAILED",
        "sample 17",
    ),
}
STUBBORN = f"""{DATA}
def fit(ctx):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        model, _ = ctx.prepare(make(), sgd)
        for batch in ctx.batches((X, Y)):
            time.sleep(0.02)
            ctx.step(mse(model, batch))
    except BaseException:
        while True:
            try:
                time.sleep(3600)
            except BaseException:
                pass
"""
FLOOD = """
import os
def fit(ctx):
    while True:
        os.write(1, (b"x" * 1023 + b"\\n") * 64)
"""
HANGS = "import time\ntime.sleep(3600)\ndef fit(ctx):\n    pass\n"
SLOW_IMPORT = "import time\ntime.sleep(2)\n" + TINY
ONE_DIES = f"""{DATA}
def fit(ctx):
    model, _ = ctx.prepare(make(), sgd)
    for batch in ctx.batches((X, Y)):
        time.sleep(0.01)
        if ctx.step_number >= 4 and batch.shard >= 2:
            try:
                os.close(os.open(ctx.params["mark"], os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                pass
            else:
                os._exit(9)
        ctx.step(mse(model, batch))
"""


def ended(platform, job_id, state, timeout_s=60.0):
    status = platform.wait_job(job_id, timeout_s)
    assert status["state"] == state, status
    wait_for(lambda: not platform.job(job_id)["replicas"], 30.0, f"the workers of {job_id} to be gone")
    return status


def act(platform, job_id, verb):
    platform.request("POST", f"/v1/jobs/{job_id}/{verb}")


def is_gone(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"


# --- what a user's code may do ---------------------------------------------------------------------------------------


@pytest.mark.xdist_group("hostile users")
def test_odd_training_functions_end_with_a_sentence(standing):
    platform = standing
    jobs = {}
    for name, (body, _, _) in ODD.items():
        jobs[name] = platform.submit(
            name.ljust(56, "x"), text=f"{DATA}\ndef fit(ctx):{body}", num_epochs=1, max_workers=2, max_restarts=0
        )
    for name, (_, state, sentence) in ODD.items():
        status = platform.wait_job(jobs[name])
        assert (name, status["state"]) == (name, state), status
        assert sentence in status["reason"]


@pytest.mark.xdist_group("hostile users")
def test_jobs_that_refuse_to_end_flood_their_log_or_hang_harm_nobody_else(standing, tmp_path):
    platform = standing
    neighbour = platform.submit("neighbour", num_epochs=30, shard_s=0.01, max_workers=1)
    stubborn = platform.submit("stubborn", text=STUBBORN, max_workers=1, num_epochs=500, grace_s=1.0)
    flood = platform.submit("flood", text=FLOOD, max_workers=1)
    hang = platform.submit("hang", text=HANGS, max_workers=1)
    wait_for(lambda: platform.job(stubborn)["step"] >= 2, 60.0, "the stubborn one to train")
    log = platform.workload(flood) / "logs"
    wait_for(lambda: log.exists() and any(log.glob("*.log.1")), 60.0, "the flooded log to be cut")
    for verb, state in (("pause", "PAUSED"), ("resume", "STARTING"), ("cancel", "CANCELLED")):
        for job_id in (stubborn, flood, hang):
            act(platform, job_id, verb)
        for job_id in (stubborn, flood, hang):
            platform.wait_job(job_id, 30.0, states=(state, "RUNNING") if verb == "resume" else (state,))
    for job_id in (stubborn, flood, hang):
        ended(platform, job_id, "CANCELLED")
    dying = platform.submit(
        "dying", text=ONE_DIES, num_epochs=10, min_workers=2, max_workers=2, params={"mark": str(tmp_path / "mark")}
    )
    ended(platform, dying, "SUCCEEDED")
    assert (tmp_path / "mark").exists(), "no worker died"
    assert_exactly_once(platform.workload(dying), num_samples=96, batch=16, num_epochs=10)
    assert ended(platform, neighbour, "SUCCEEDED")["num_restarts"] == 0


@pytest.mark.xdist_group("hostile users")
def test_cancel_at_every_state_and_orders_at_the_worst_moments(standing):
    platform = standing
    options = {"num_epochs": 500, "shard_s": 0.02, "max_workers": 2}

    def running(name, **more):
        job_id = platform.submit(name, **{**options, **more})
        wait_for(lambda: platform.job(job_id)["step"] > 2, 60.0, f"{name} to train")
        return job_id

    pending = platform.submit("pending", **options)
    act(platform, pending, "cancel")
    ended(platform, pending, "CANCELLED")
    starting = platform.submit("starting", text=SLOW_IMPORT, **options)
    platform.wait_job(starting, states=("STARTING",))
    act(platform, starting, "cancel")
    ended(platform, starting, "CANCELLED")
    early = platform.submit("early", text=SLOW_IMPORT, **options)
    platform.wait_job(early, states=("STARTING",))
    for _ in range(2):
        act(platform, early, "pause")
    platform.wait_job(early, states=("PAUSED",))
    pausing, resizing = running("pausing"), running("resizing", max_workers=1)
    act(platform, pausing, "pause")
    platform.request("POST", f"/v1/workloads/{resizing}/scale", {"minimum": 1, "maximum": 4})
    for job_id in (early, pausing, resizing):
        act(platform, job_id, "cancel")
        ended(platform, job_id, "CANCELLED")
    shaken = running("shaken", num_epochs=12, max_workers=4)
    rng = random.Random(5)
    for _ in range(30):
        platform.request("POST", f"/v1/workloads/{shaken}/scale", {"minimum": 1, "maximum": rng.randint(1, 4)})
        # An order that comes too late for the state is refused with a sentence, which is fine here.
        platform.http.post(f"/v1/jobs/{shaken}/{rng.choice(['pause', 'resume', 'resume'])}")
        time.sleep(rng.choice([0.0, 0.02, 0.1]))
    platform.http.post(f"/v1/jobs/{shaken}/resume")
    ended(platform, shaken, "SUCCEEDED")
    assert_exactly_once(platform.workload(shaken), num_samples=96, batch=16, num_epochs=12)


def test_forty_jobs_from_eight_threads_run_once_each_and_a_hundred_more_leave_nothing_behind(platform):
    platform.start()

    def send(number):
        name = f"burst-{number % 40}"
        return platform.submit(name, key=name, num_epochs=1, max_workers=2)

    with ThreadPoolExecutor(8) as pool:
        burst = set(pool.map(send, range(120)))
    assert len(burst) == 40
    for job_id in burst:
        ended(platform, job_id, "SUCCEEDED")
        assert_exactly_once(platform.workload(job_id), num_samples=96, batch=16, num_epochs=1)
    assert len({artifact_digest(platform.workload(job_id)) for job_id in burst}) == 1
    proc = Path(f"/proc/{platform.process.pid}")

    def memory_mib():
        return int((proc / "status").read_text().split("VmRSS:")[1].split()[0]) / 1024

    def standing():
        places = socket_directory(platform.state_dir), platform.state_dir / "workers"
        files = [sorted(p.name for p in place.iterdir()) for place in places]
        return len(list((proc / "fd").iterdir())), files, platform.worker_pids()

    before, memory_before = standing(), memory_mib()
    threads = {task.name for task in (proc / "task").iterdir()}
    for _ in range(part(2, least=1)):
        for job_id in [platform.submit(f"short-{n}", num_epochs=1, max_workers=1) for n in range(50)]:
            ended(platform, job_id, "SUCCEEDED")
    # Fewer descriptors are no leak: connections of the burst were still closing when `before` was taken.
    wait_for(
        lambda: standing()[0] <= before[0] and standing()[1:] == before[1:],
        20.0,
        lambda: f"{standing()} to be at most {before}",
    )
    assert len(list((proc / "task").iterdir())) <= len(threads) + 8, "uvicorn's pool of threads may come and go"
    assert memory_mib() < memory_before + 30.0


# --- bad luck --------------------------------------------------------------------------------------------------------


def test_workers_that_were_stopped_and_wake_up_late_write_nothing(platform):
    platform.start()
    reference = platform.submit("reference", num_epochs=12, max_workers=1)
    job_id = platform.submit("frozen", num_epochs=12, shard_s=0.02, max_workers=3)
    wait_for(lambda: platform.job(job_id)["step"] >= 3, 60.0, "steps")
    one = platform.job(job_id)["replicas"][0]["replica_id"]
    os.kill(platform.worker_pids()[one], signal.SIGSTOP)
    wait_for(lambda: one not in platform.worker_pids(), 30.0, "the stopped one to be given up")
    wait_for(lambda: platform.job(job_id)["step"] >= 8, 60.0, "the others to go on")
    frozen = {name: pid for name, pid in platform.worker_pids().items() if name.startswith(job_id)}
    for pid in frozen.values():
        os.kill(pid, signal.SIGSTOP)
    platform.kill()
    # Without its note nobody can find a worker to end it: what it then does, only the fence can stop.
    for path in (platform.state_dir / "workers").glob(f"{job_id}*.json"):
        path.unlink()
    platform.start()
    wait_for(lambda: platform.job(job_id)["generation"] >= 3 and platform.worker_pids(), 60.0, "a fresh start")
    for pid in frozen.values():
        os.kill(pid, signal.SIGCONT)
    ended(platform, job_id, "SUCCEEDED")
    ended(platform, reference, "SUCCEEDED")
    wait_for(lambda: all(is_gone(pid) for pid in frozen.values()), 60.0, "those who woke up late to end")
    assert_exactly_once(platform.workload(job_id), num_samples=96, batch=16, num_epochs=12)
    assert artifact_digest(platform.workload(job_id)) == artifact_digest(platform.workload(reference))


def test_the_death_of_the_zygote_is_no_jobs_concern(platform):
    platform.start()
    job_id = platform.submit("child", num_epochs=20, shard_s=0.02, max_workers=2)
    wait_for(lambda: platform.job(job_id)["step"] >= 3, 60.0, "steps")
    child = next(iter(platform.worker_pids().values()))
    zygote = int(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(zygote, signal.SIGKILL)
    ended(platform, platform.submit("later", num_epochs=2), "SUCCEEDED")
    assert ended(platform, job_id, "SUCCEEDED")["num_restarts"] == 0
    assert_exactly_once(platform.workload(job_id), num_samples=96, batch=16, num_epochs=20)


def test_restarts_with_other_slots_and_policies_and_kills_between_states(platform):
    platform.start()
    # Its workers train on while the platform is down: the job has to outlast five starts on a busy machine.
    job_id = platform.submit("moved", num_epochs=80, shard_s=0.1)
    for slots, policy in ((4, "fifo"), (1, "edf"), (3, "elastic")):
        platform.kill()
        platform.slots = slots
        platform.start(policy=policy)
        wait_for(
            lambda n=slots: len(platform.job(job_id)["replicas"]) == n,
            60.0,
            lambda n=slots: f"{n} workers; the job is {platform.job(job_id)}",
        )
        held = {replica["device_id"] for replica in platform.job(job_id)["replicas"]}
        assert held <= {f"local/{index}" for index in range(slots)}
    act(platform, job_id, "pause")
    platform.kill()
    platform.start()
    platform.wait_job(job_id, states=("PAUSED",))
    platform.kill()
    platform.start()
    assert platform.job(job_id)["state"] == "PAUSED"
    act(platform, job_id, "resume")
    platform.wait_job(job_id, states=("RUNNING",))
    platform.process.send_signal(signal.SIGTERM)
    time.sleep(0.05)
    platform.kill()
    platform.start()
    # 480 steps of 0.2 s with three workers, most of which may still be to do.
    ended(platform, job_id, "SUCCEEDED", timeout_s=240.0)
    assert_exactly_once(platform.workload(job_id), num_samples=96, batch=16, num_epochs=80)
    loading = platform.submit("loading", text=SLOW_IMPORT)
    platform.wait_job(loading, states=("STARTING",))
    platform.stop()
    assert not platform.worker_pids()
    platform.start()
    ended(platform, loading, "SUCCEEDED")


def test_a_very_long_path_and_a_token_that_others_can_read(tmp_path):
    live = LivePlatform(tmp_path / ("d" * 150) / "state", slots=2)
    try:
        live.start()
        job_id = live.submit("deep", num_epochs=1)
        deploy(live, "n" * 56, ECHO)
        assert live.request("POST", f"/f/{'n' * 56}", {"numbers": [1.0]})["outputs"] == [2.0]
        ended(live, job_id, "SUCCEEDED")
    finally:
        live.stop()
    (live.state_dir / "token").chmod(0o644)
    live.start()
    assert live.process.wait(30.0) == 1
    assert "can be read by others; run `chmod 600" in live.log()


@pytest.mark.xdist_group("hostile users")
def test_garbage_on_the_control_socket_and_a_thousand_held_connections(standing):
    platform = standing
    job_id = platform.submit("steady", num_epochs=10, shard_s=0.01, max_workers=2)
    rng = random.Random(3)
    control = str(socket_directory(platform.state_dir) / "control.sock")
    with contextlib.ExitStack() as held:
        for _ in range(100):
            stranger = held.enter_context(socket.socket(socket.AF_UNIX))
            stranger.connect(control)
            with contextlib.suppress(OSError):
                stranger.sendall(rng.randbytes(rng.choice([0, 1, 5, 100, 70_000])))
        url = platform.http.base_url
        for number in range(1000):
            slow = held.enter_context(socket.create_connection((url.host, url.port), timeout=20.0))
            slow.sendall(b"GET /v1/status HTTP/1.1\r\nX-Slow: " if number % 2 else b"")
        ended(platform, platform.submit("beside", num_epochs=1), "SUCCEEDED")
        with httpx2.Client() as fresh:
            assert fresh.get(f"{url}/healthz").status_code == 200
        descriptors = Path(f"/proc/{platform.process.pid}/fd")
        wait_for(lambda: len(list(descriptors.iterdir())) < 100, 30.0, "the held connections to be closed")
    ended(platform, job_id, "SUCCEEDED")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_halts_decisions_and_loses_nothing(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("this machine lets nobody mount")
    live = LivePlatform(disk / "state")
    text = TINY.replace("        time.sleep(", "        print('a line', flush=True)\n        time.sleep(")
    try:
        live.start()
        reference = live.submit("reference", num_epochs=100, max_workers=1)
        ended(live, reference, "SUCCEEDED")
        options = {"text": text, "shard_s": 0.01, "checkpoint_interval_s": 0.5}
        # Long enough to be still at work when the disk is free again, however fast the machine.
        long = live.submit("long", num_epochs=100, max_workers=2, **{**options, "shard_s": 0.04})
        short = live.submit("short", num_epochs=4, max_workers=1, **options)
        wait_for(lambda: live.job(long)["checkpoint_step"] and live.job(short)["step"] > 1, 60.0, "a checkpoint")
        with open(disk / "fill", "wb", buffering=0) as fill, contextlib.suppress(OSError):
            while True:
                fill.write(b"x" * 4096)
        seen = live.job(long)
        # The short one reaches its end meanwhile and cannot write its result.
        time.sleep(5.0)
        answer = live.http.post(f"/v1/jobs/{long}/pause")
        assert answer.status_code == 503
        assert "ask for its state before repeating" in answer.json()["error"]["message"]
        assert live.job(long)["checkpoint_step"] <= seen["checkpoint_step"] + 1
        assert live.http.get("/readyz").status_code == 503
        assert "until the journal can be written" in live.request("GET", "/v1/status")["trouble"]
        (disk / "fill").unlink()
        live.wait_job(long, 30.0, states=("PAUSED",))
        assert live.http.get("/readyz").status_code == 200
        act(live, long, "resume")
        for job_id, num_epochs in ((long, 100), (short, 4)):
            assert ended(live, job_id, "SUCCEEDED")["num_restarts"] == 0
            assert_exactly_once(live.workload(job_id), num_samples=96, batch=16, num_epochs=num_epochs)
        assert artifact_digest(live.workload(long)) == artifact_digest(live.workload(reference))
    finally:
        live.stop()
        subprocess.run(["umount", "-l", str(disk)], check=True)


# --- services --------------------------------------------------------------------------------------------------------


def deploy(platform, name, text, **options):
    source = {"filename": "service.py", "text": text, "object_name": "Echo", "kind": "class"}
    platform.request("PUT", f"/v1/services/{name}", {"source": source, "options": options})


class Load:
    """Four clients that call one service without a pause and count the answers by status."""

    def __init__(self, platform, path):
        self.url = f"{str(platform.http.base_url).rstrip('/')}{path}"
        self.headers = dict(platform.http.headers)
        self.answers = {}
        self.done = threading.Event()
        self.threads = [threading.Thread(target=self.run) for _ in range(4)]
        for thread in self.threads:
            thread.start()

    def run(self):
        with httpx2.Client(headers=self.headers, timeout=60.0) as http:
            while not self.done.is_set():
                status = http.post(self.url, json={"numbers": [1.0]}).status_code
                self.answers[status] = self.answers.get(status, 0) + 1
                time.sleep(0.005)

    def wait_more(self, count):
        goal = self.answers.get(200, 0) + count
        wait_for(lambda: self.answers.get(200, 0) >= goal, 60.0, lambda: f"answers; so far {self.answers}")

    def end(self):
        self.done.set()
        for thread in self.threads:
            thread.join()


@pytest.mark.xdist_group("hostile users")
def test_a_service_under_load_is_redeployed_killed_and_removed_without_a_failed_request(standing):
    platform = standing
    deploy(platform, "echo", ECHO, min_replicas=2, max_replicas=2, idle_s=60.0)
    load = Load(platform, "/f/echo")
    try:
        load.wait_more(50)
        deploy(platform, "echo", ECHO.replace("2 *", "3 *"), min_replicas=2, max_replicas=2, idle_s=60.0)
        load.wait_more(100)
        os.kill(next(iter(platform.worker_pids().values())), signal.SIGKILL)
        load.wait_more(100)
        assert set(load.answers) == {200}
        platform.request("DELETE", "/v1/services/echo")
        wait_for(lambda: load.answers.get(404, 0) > 10, 30.0, "clear refusals")
    finally:
        load.end()
    assert set(load.answers) == {200, 404}


@pytest.mark.xdist_group("hostile users")
def test_services_that_do_not_load_die_or_are_slow(standing):
    platform = standing
    deploy(platform, "broken", ECHO + "    def load(self):\n        raise ValueError('no weights there')\n", idle_s=1.0)
    deploy(platform, "dies", ECHO.replace("return [", "import os; os._exit(5); return ["), idle_s=1.0)
    deploy(platform, "late", ECHO + "    def load(self):\n        import time; time.sleep(6)\n", idle_s=1.0)
    deploy(platform, "busy", ECHO.replace("return [", "import time; time.sleep(4); return ["), idle_s=1.0)

    def ask(name):
        answer = platform.http.post(f"/f/{name}", json={"numbers": [1.0]}, timeout=60.0)
        return answer.status_code, answer.text

    with ThreadPoolExecutor(4) as pool:
        broken, dies, late, busy = pool.map(ask, ("broken", "dies", "late", "busy"))
    assert broken[0] == 503
    assert "no weights there" in broken[1]
    assert dies[0] == 502
    assert "two replicas died" in dies[1]
    assert (late[0], busy[0]) == (200, 200)
    status = platform.request("GET", "/v1/services/broken")
    assert status["state"] == "FAILED"
    assert "no weights there" in status["reason"]
    for name in ("late", "busy"):
        wait_for(lambda n=name: platform.request("GET", f"/v1/services/{n}")["state"] == "IDLE", 30.0, "zero replicas")
