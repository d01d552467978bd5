"""Measures the control plane on a real API server: a thousand nodes of eight devices, two thousand jobs as objects.

Nodes are objects without kubelets, so no pod ever starts: what is measured is everything before that. The control plane
is a process of its own, the one that `springtide k8s serve` runs. Beside it: one pod after the other by the same client
(bind rate), and the same small cluster behind a wire that is slow on purpose (decisions).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from springtide.backends.kubernetes.client.api import KubeApi
from springtide.backends.kubernetes.client.cache import ObjectChange
from springtide.backends.kubernetes.client.errors import AlreadyExists
from springtide.backends.kubernetes.client.kinds import (
    CUSTOM_RESOURCE_DEFINITION,
    NAMESPACE,
    NODE,
    POD,
    SERVICE_ACCOUNT,
    TRAINING_FUNCTION,
    Object,
    key_of,
    uid_of,
)
from springtide.backends.kubernetes.client.thread import ApiThread
from springtide.backends.kubernetes.client.writes import ensure_bound, ensure_created
from springtide.backends.kubernetes.resources.definitions import custom_resource_definitions
from springtide.backends.kubernetes.settings import (
    GROUP,
    NODE_LABEL,
    PLATFORM_LABEL,
    REPLICA_LABEL,
    KubernetesSettings,
)
from springtide.cli.commands.bench import Bench, Report, Tell
from springtide.core.errors import BackendError
from springtide_studies.kubernetes.cluster import SlowWire, api_server, free_port
from springtide_studies.kubernetes.report import DEVICES_PER_NODE, SLOW_WAY_S, BenchRun, BindRates, make_report
from springtide_studies.options import names_of, policies_option, small_option

NUM_NODES = 1000
NUM_JOBS = 2000
# All jobs together want every device that there is.
WORKERS_PER_JOB = 4
SMALL = (100, 200)
NUM_ONE_BY_ONE = 50
NUM_TOGETHER = 150
NUM_ROUNDS = 3
# How long bytes take to an API server on another machine, one way.
NEAR_WAY_S = 0.005
# When it was written, in a pod: by the clock that all processes of a machine share.
SENT_ANNOTATION = f"{GROUP}/sent"
PROBE_EVERY_S = 0.1
NUM_PROBES = 50
IDLE_S = 20.0
# Every device that jobs want is taken, or nothing was bound for so long: then no more is to come.
QUIET_S = 60.0
START_S = 120.0
LONGEST_S = 1800.0
RESOURCE = "springtide.dev/device"
_SOURCE = "import springtide as st\n\n\n@st.train\ndef bench(ctx):\n    pass\n"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def run_bench(
    *,
    num_nodes: int = NUM_NODES,
    num_jobs: int = NUM_JOBS,
    policy: str = "springtide",
    is_small: bool = False,
    tell: Tell = lambda line: None,
) -> dict[str, Any]:
    """Measure and return {"bench", "machine", "rows", "criterion", "passed"}. Raises BackendError: no API server."""
    if is_small:
        num_nodes, num_jobs = SMALL
    with api_server() as kubeconfig:
        asyncio.run(_prepare(kubeconfig))
        tell("pods alone, one after the other and many at once ...")
        binds = _bind_rates(kubeconfig)
        small_nodes, small_jobs = min(SMALL[0], num_nodes), min(SMALL[1], num_jobs)
        tell(f"decisions on {small_nodes} nodes and {small_jobs} jobs, with a quick API server ...")
        quick = _run_plane(kubeconfig, "quick", small_nodes, small_jobs, policy, 0.0, tell)
        tell(f"the same with {2 * SLOW_WAY_S * 1000:g} ms a call ...")
        slow = _run_plane(kubeconfig, "slow", small_nodes, small_jobs, policy, SLOW_WAY_S, tell)
        tell(f"{num_nodes} nodes and {num_jobs} jobs ...")
        whole = _run_plane(kubeconfig, "whole", num_nodes, num_jobs, policy, 0.0, tell)
    return make_report(whole, quick, slow, binds, num_nodes, num_jobs, policy)


def _run_plane(
    kubeconfig: Path, which: str, num_nodes: int, num_jobs: int, policy: str, delay_s: float, tell: Tell
) -> BenchRun:
    """One control plane, from its start to the last pod it binds, and a while after."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="springtide-bench-")))
        name = f"bench-{which}"
        seen = stack.enter_context(_Seen.of(kubeconfig, name))
        seen.thread.call(lambda api: _make_nodes(api, name, num_nodes), timeout_s=300)
        stack.callback(seen.remove)
        reached = kubeconfig
        if delay_s:
            wire = stack.enter_context(SlowWire(seen.thread.api.server, delay_s))
            reached = _at(kubeconfig, wire.port, folder)
        plane = stack.enter_context(_plane(reached, folder, name, policy))
        plane.wait_up()
        began_cpu_s, num_lags, num_plane_lags = plane.cpu_s(), len(seen.lags_s), len(plane.lags_s())
        tell("  the control plane is up; handing in ...")
        seen.thread.call(lambda api: _submit(api, name, num_jobs), timeout_s=600)
        num_bound, bind_s = seen.wait_bound(plane, min(num_nodes * DEVICES_PER_NODE, num_jobs * WORKERS_PER_JOB))
        cpu_s = plane.cpu_s() - began_cpu_s
        tell(f"  {num_bound} pods bound in {bind_s:.1f} s, {cpu_s:.1f} s of CPU")
        lags_s, plane_lags_s = seen.lags_s[num_lags:], plane.lags_s()[num_plane_lags:]
        idle_began_s, idle_began_cpu_s = time.monotonic(), plane.cpu_s()
        time.sleep(IDLE_S)
        idle_cpu = (plane.cpu_s() - idle_began_cpu_s) / (time.monotonic() - idle_began_s)
        return BenchRun(num_bound, bind_s, cpu_s, idle_cpu, lags_s, plane_lags_s, plane.turns())


# --- the cluster -----------------------------------------------------------------------------------------------------


async def _prepare(kubeconfig: Path) -> None:
    """The definitions of objects, once."""
    api = KubeApi.connect(kubeconfig)
    try:
        for definition in custom_resource_definitions():
            with contextlib.suppress(AlreadyExists):
                await api.create(CUSTOM_RESOURCE_DEFINITION, dict(definition))
        until_s = time.monotonic() + START_S
        while time.monotonic() < until_s:
            try:
                await api.list(TRAINING_FUNCTION)
                return
            except BackendError:
                await asyncio.sleep(0.2)
        raise BackendError("the API server has not taken the definitions of TrainingFunction and InferenceFunction")
    finally:
        await api.close()


async def _make_namespace(api: KubeApi, name: str) -> None:
    with contextlib.suppress(AlreadyExists):
        await api.create(NAMESPACE, {"metadata": {"name": name}})
    # There are no controllers beside the API server: what they would create is created here.
    with contextlib.suppress(AlreadyExists):
        await api.create(SERVICE_ACCOUNT, {"metadata": {"name": "default"}}, name)


async def _make_nodes(api: KubeApi, name: str, count: int) -> None:
    await _make_namespace(api, name)
    room = asyncio.Semaphore(16)
    resources = {RESOURCE: str(DEVICES_PER_NODE), "pods": "110", "cpu": "64", "memory": "256Gi"}
    status = {
        "capacity": resources,
        "allocatable": resources,
        "conditions": [{"type": "Ready", "status": "True", "reason": "Bench", "message": "an object, no machine"}],
    }

    async def make(index: int) -> None:
        async with room:
            labels = {NODE_LABEL: "true", "bench": name, "topology.kubernetes.io/zone": f"rack-{index // 16}"}
            node = f"{name}-{index:04d}"
            await api.create(NODE, {"metadata": {"name": node, "labels": labels}, "status": status})

    await asyncio.gather(*(make(index) for index in range(count)))


async def _submit(api: KubeApi, namespace: str, count: int) -> None:
    room = asyncio.Semaphore(16)

    async def submit(index: int) -> None:
        spec = {
            "workers": WORKERS_PER_JOB,
            "epochs": 10,
            "globalBatch": 64,
            "source": {"function": "bench", "files": {"bench.py": _SOURCE}},
        }
        async with room:
            await api.create(TRAINING_FUNCTION, {"metadata": {"name": f"job-{index:04d}"}, "spec": spec}, namespace)

    await asyncio.gather(*(submit(index) for index in range(count)))


def _bind_rates(kubeconfig: Path) -> BindRates:
    """Pods a second that are made and bound, without a control plane: in turns, so that both meet the same machine."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="springtide-bench-")))
        server = KubeApi.connect(kubeconfig).server
        wire = stack.enter_context(SlowWire(server, NEAR_WAY_S))
        near = _at(kubeconfig, wire.port, folder)
        rates: dict[str, list[float]] = {name: [] for name in BindRates._fields}
        for number in range(NUM_ROUNDS):
            for config, one_by_one, together in (
                (kubeconfig, "one_by_one", "together"),
                (near, "one_by_one_afar", "together_afar"),
            ):
                with ApiThread(functools.partial(KubeApi.connect, config)) as thread:
                    namespace = f"bench-{one_by_one.replace('_', '-')}-{number}"
                    thread.call(functools.partial(_make_nodes, name=namespace, count=1), timeout_s=START_S)
                    rates[one_by_one].append(_one_by_one(thread, namespace))
                    rates[together].append(_together(thread, namespace))
                    thread.call(functools.partial(_clear, namespace=namespace), timeout_s=LONGEST_S)
        return BindRates(**{name: statistics.median(values) for name, values in rates.items()})


def _one_by_one(thread: ApiThread, namespace: str) -> float:
    async def bind(api: KubeApi) -> None:
        for index in range(NUM_ONE_BY_ONE):
            made = await api.create(POD, _pod(f"single-{index}"), namespace)
            await api.bind(key_of(made), f"{namespace}-0000", uid=uid_of(made))

    began_s = time.monotonic()
    thread.call(bind, timeout_s=LONGEST_S)
    return NUM_ONE_BY_ONE / (time.monotonic() - began_s)


def _together(thread: ApiThread, namespace: str) -> float:
    """As the control plane does it: in order for each pod, many pods at once."""

    async def start(api: KubeApi, index: int) -> None:
        made = await ensure_created(api, POD, _pod(f"pod-{index}"), namespace, is_ours=lambda found: True)
        await ensure_bound(api, key_of(made), f"{namespace}-0000", uid=uid_of(made))

    ended, waits = threading.Event(), [NUM_TOGETHER]
    refused: list[BackendError] = []

    def end(_: object) -> None:
        waits[0] -= 1
        if not waits[0]:
            ended.set()

    def fail(error: BackendError) -> None:
        refused.append(error)
        ended.set()

    began_s = time.monotonic()
    for index in range(NUM_TOGETHER):
        thread.write(index, functools.partial(start, index=index), done=end, failed=fail)
    if not ended.wait(LONGEST_S) or refused:
        raise BackendError(f"pods could not be bound: {refused or 'no answer'}")
    return NUM_TOGETHER / (time.monotonic() - began_s)


async def _clear(api: KubeApi, namespace: str) -> None:
    pods = await api.list(POD, namespace, metadata_only=True)
    room = asyncio.Semaphore(16)

    async def remove(name: str) -> None:
        async with room:
            await api.delete(POD, name, namespace, grace_s=0)

    await asyncio.gather(*(remove(obj["metadata"]["name"]) for obj in pods.items))
    await api.delete(NODE, f"{namespace}-0000")


def _pod(name: str) -> Object:
    container = {"name": "worker", "image": "bench", "resources": {"limits": {RESOURCE: "1"}}}
    spec = {"containers": [container], "schedulerName": "springtide", "automountServiceAccountToken": False}
    return {"metadata": {"name": name}, "spec": spec}


def _at(kubeconfig: Path, port: int, folder: Path) -> Path:
    """The kubeconfig with another port."""
    lines = []
    for line in kubeconfig.read_text().splitlines():
        head, found, rest = line.partition("https://127.0.0.1:")
        lines.append(f"{head}{found}{port}{rest.lstrip('0123456789')}" if found else line)
    path = folder / "slow.kubeconfig"
    path.write_text("\n".join(lines) + "\n")
    return path


class _Seen:
    """What an observer beside the control plane sees of its pods, and how long news takes to come."""

    def __init__(self, thread: ApiThread, name: str) -> None:
        self.thread = thread
        self.lags_s: list[float] = []
        self._name = name
        self._bound: dict[str, float] = {}
        self._is_over = False
        self._probes = [f"{name}-probe-{number}" for number in range(NUM_PROBES)]
        self._turns = itertools.cycle(self._probes)
        self._last_sent = dict.fromkeys(self._probes, "")
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._cache = thread.cache(POD, namespaces=[name], listener=self._changed)

    @classmethod
    @contextlib.contextmanager
    def of(cls, kubeconfig: Path, name: str) -> Iterator[_Seen]:
        """An observer that watches the pods of a namespace that is made for it."""
        with ApiThread(lambda: KubeApi.connect(kubeconfig)) as thread:
            thread.call(lambda api: _make_namespace(api, name))
            seen = cls(thread, name)
            thread.sync(START_S)
            thread.call(seen._make_probes)
            thread.every(PROBE_EVERY_S, seen._ask_on_time)
            yield seen

    async def _make_probes(self, api: KubeApi) -> None:
        """Pods that look like those of the control plane, so that its watch brings them, and that it has to do nothing
        about: they are on their way out already, which no kubelet is there to end."""
        for name in self._probes:
            pod = _pod(name)
            labels = {PLATFORM_LABEL: self._name, REPLICA_LABEL: name}
            pod["metadata"] |= {"labels": labels, "finalizers": [f"{GROUP}/bench"]}
            await api.create(POD, pod, self._name)
            await api.delete(POD, name, self._name, grace_s=0)

    def _ask_on_time(self) -> None:
        """Each probe is written even if the one before is not answered, as otherwise late news would stop the probes.
        Each time by another pod, since writes to one pod wait for each other."""
        name = next(self._turns)
        if not self._is_over and name not in self._asking:
            task = asyncio.get_running_loop().create_task(self._ask(name))
            self._asking[name] = task
            task.add_done_callback(lambda _: self._asking.pop(name))

    async def _ask(self, name: str) -> None:
        """Write the time into a pod: the watch that all pods come by brings it back."""
        now = {"metadata": {"annotations": {SENT_ANNOTATION: repr(time.monotonic())}}}
        with contextlib.suppress(BackendError):
            await self.thread.api.patch(POD, name, now, self._name)

    def _changed(self, change: ObjectChange) -> None:
        if change.now is None:
            return
        metadata, now_s = change.now["metadata"], time.monotonic()
        if change.key.name in self._last_sent:
            sent = (metadata.get("annotations") or {}).get(SENT_ANNOTATION, "")
            if sent != self._last_sent[change.key.name]:
                self._last_sent[change.key.name] = sent
                self.lags_s.append(now_s - float(sent))
        elif REPLICA_LABEL in (metadata.get("labels") or {}) and change.now["spec"].get("nodeName"):
            self._bound.setdefault(metadata["uid"], now_s)

    def wait_bound(self, plane: _Plane, wanted: int) -> tuple[int, float]:
        """How many pods were bound, and seconds from the first to the last, once no more are expected."""
        began_s = time.monotonic()
        while True:
            time.sleep(0.5)
            plane.check()
            times = list(self._bound.values())
            now_s = time.monotonic()
            if len(times) >= wanted or (times and now_s - max(times) > QUIET_S):
                return len(times), max(times) - min(times)
            if not times and now_s - began_s > START_S:
                raise BackendError(f"the control plane has bound no pod within {START_S:g} s: {plane.log()}")
            if now_s - began_s > LONGEST_S:
                raise BackendError(f"pods were still being bound after {LONGEST_S:g} s")

    def remove(self) -> None:
        """Nodes, jobs and pods of the run."""
        self.thread.call(self._remove, timeout_s=900)

    async def _remove(self, api: KubeApi) -> None:
        self._is_over = True
        room = asyncio.Semaphore(16)

        async def remove(obj: Object, kind: Any, grace_s: float | None) -> None:
            async with room:
                key = key_of(obj)
                await api.delete(kind, key.name, key.namespace, grace_s=grace_s)

        jobs = await api.list(TRAINING_FUNCTION, self._name, metadata_only=True)
        await asyncio.gather(*(remove(obj, TRAINING_FUNCTION, None) for obj in jobs.items))
        for name in self._probes:
            await api.patch(POD, name, {"metadata": {"finalizers": None}}, self._name)
        pods = await api.list(POD, self._name, metadata_only=True)
        await asyncio.gather(*(remove(obj, POD, 0.0) for obj in pods.items))
        nodes = await api.list(NODE, labels=f"bench={self._name}", metadata_only=True)
        await asyncio.gather(*(remove(obj, NODE, None) for obj in nodes.items))


# --- the control plane -----------------------------------------------------------------------------------------------


class _Plane:
    """The process of a control plane."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, port: int) -> None:
        self._process = process
        self._folder = folder
        self._port = port

    def wait_up(self) -> None:
        """Wait until it serves."""
        until_s = time.monotonic() + START_S
        while not (self._folder / "state" / "platform.json").exists():
            self.check()
            if time.monotonic() > until_s:
                raise BackendError(f"the control plane was not up within {START_S:g} s: {self.log()}")
            time.sleep(0.1)

    def check(self) -> None:
        """Raises BackendError where it has ended."""
        if self._process.poll() is not None:
            raise BackendError(f"the control plane ended with {self._process.returncode}: {self.log()}")

    def cpu_s(self) -> float:
        """The CPU time that it has used."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S

    def turns(self) -> list[tuple[float, float, int, float]]:
        """Every turn of its loop so far."""
        lines = (self._folder / "turns").read_text().splitlines()
        return [msgspec.convert(json.loads(line), tuple[float, float, int, float]) for line in lines if line]

    def lags_s(self) -> list[float]:
        """How long each news of the probe took to come to it, so far."""
        return [float(line) for line in (self._folder / "news").read_text().splitlines()]

    def log(self) -> str:
        """The end of what it wrote."""
        return (self._folder / "log").read_text(errors="replace")[-2000:]


@contextlib.contextmanager
def _plane(kubeconfig: Path, folder: Path, name: str, policy: str) -> Iterator[_Plane]:
    port = free_port()
    settings = KubernetesSettings(
        name=name,
        namespace=name,
        namespaces=(name,),
        advertise="127.0.0.1",
        control_port=free_port(),
        port=port,
        policy=policy,
        device_resource=RESOURCE,
        device_kind="cpu",
        node_selector={"bench": name},
        store_url=f"file://{folder}/store",
        pod=msgspec.structs.replace(KubernetesSettings().pod, image="bench"),
    )
    (folder / "settings.yaml").write_bytes(msgspec.json.encode(settings))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "springtide_studies.kubernetes.plane"),
                *("--settings", str(folder / "settings.yaml"), "--state", str(folder / "state")),
                *("--kubeconfig", str(kubeconfig), "--turns", str(folder / "turns")),
                *("--news", str(folder / "news"), "--sent", SENT_ANNOTATION),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            yield _Plane(process, folder, port)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _run(options: Mapping[str, Any], tell: Tell) -> Report:
    policy = next(iter(names_of(options["policies"])), "springtide")
    return run_bench(policy=policy, is_small=options["small"], tell=tell)


BENCH = Bench(run=_run, options=[small_option("100 nodes and 200 jobs."), policies_option("This one.")])
