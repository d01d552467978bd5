"""One trial of the bench of shared devices: a platform of its own with two services and a training job under load."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from springtide.client.api import Client, connect
from springtide.client.sources.source import SourceFile
from springtide.core.errors import BackendError, SpringtideError
from springtide.core.shares import Share
from springtide.core.status.platform import JobStatus, PlatformStatus, ServiceStatus
from springtide.core.status.shares import SharingStatus
from springtide_studies.sharing.load import LoadReply, Order, Surge, Target, draw_moments

SERVICES = ("first", "second")
JOB = "training"
# Devices of the platform: so many that each of the three may have one of its own, and one is left to the rest of it.
NUM_SLOTS = 4
WARM_UP_S = 3.0
ANSWER_TIMEOUT_S = 5.0
START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 60.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_ROW = [round(index / 16, 4) for index in range(16)]

SERVICE_SOURCE = '''
"""A deep, narrow network: a request takes a few milliseconds, and a second one in the same batch less."""
import os

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
import numpy as np


class Network:
    def load(self):
        self.num_layers = int(self.params["num_layers"])
        draw = np.random.default_rng(5)
        self.weights = [draw.normal(0, 0.07, (192, 192)).astype(np.float32) for _ in range(4)]
        self.first = draw.normal(0, 0.25, (16, 192)).astype(np.float32)

    def predict(self, rows: list[list[float]]) -> list[float]:
        values = np.asarray(rows, dtype=np.float32) @ self.first
        for layer in range(self.num_layers):
            values = np.tanh(values @ self.weights[layer % 4])
        return [float(value) for value in values.sum(axis=1)]
'''
TRAINING_SOURCE = '''
"""A network that fits a core's cache; the moment of each step is written down."""
import os
import struct
import time

import torch


def fit(ctx):
    torch.manual_seed(7)
    x, y = torch.randn(4096, 64), torch.randn(4096, 1)
    layers = [torch.nn.Linear(64, 96), torch.nn.ReLU()]
    for _ in range(4):
        layers += [torch.nn.Linear(96, 96), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(96, 1))
    model, optimizer = ctx.prepare(model, lambda p: torch.optim.SGD(p, lr=0.01))
    log = os.open(ctx.params["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for batch in ctx.batches((x, y)):
        ctx.step(torch.nn.functional.mse_loss(model(batch.x), batch.y))
        os.write(log, struct.pack("<d", time.monotonic()))
'''


class TrialArm(msgspec.Struct, frozen=True, kw_only=True):
    """One way to place the two services and the job: what each holds of a device (None: the whole, held to nothing).

    `environment` is added to the platform's.
    """

    name: str
    what: str
    service: Share | None
    job: Share | None
    environment: Mapping[str, str] = {}


class OfferedLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The open-loop load of a trial: for each service its rate and its surges, counted from the end of the warm-up."""

    rate_per_s: float
    duration_s: float
    surges: tuple[tuple[Surge, ...], ...]
    slo_s: float
    num_layers: int


class SharingTrial(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one trial of an arm. Moments count from the end of the warm-up.

    `answers` are those of each service whose request was due after it. `num_steps` is how many steps the job took in
    `duration_s`; `cpu_s` is what each workload computed meanwhile, by name. `devices` says which replica ran where,
    `sharing` what the platform reported in the middle and `states` how often the control was seen in which state.
    """

    arm: str
    repetition: int
    duration_s: float
    answers: tuple[tuple[LoadReply, ...], ...]
    num_steps: int
    cpu_s: dict[str, float]
    devices: dict[str, str]
    sharing: SharingStatus
    states: dict[str, int]
    load_1m: float


def run_trial(
    arm: TrialArm, load: OfferedLoad, repetition: int, seed: int, tell: Callable[[str], None]
) -> SharingTrial:
    """Play the load on a platform that places workloads as `arm` says. Raises BackendError where it does not start."""
    with tempfile.TemporaryDirectory(prefix="springtide-sharing-") as folder:
        directory = Path(folder)
        with _platform(directory, arm) as client:
            log = directory / "steps.bin"
            _hand_over(client, arm, load, log)
            _wait_until_all_run(client, log)
            return _measure(client, arm, load, repetition, seed, log, tell)


@contextlib.contextmanager
def _platform(directory: Path, arm: TrialArm) -> Iterator[Client]:
    """A platform on a state directory of its own, ended with everything on it."""
    state = directory / "state"
    state.mkdir(mode=0o700)
    command = [sys.executable, "-m", "springtide.service", "--state", str(state), "--port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **arm.environment}
    with open(directory / "platform.log", "wb") as log:
        process = subprocess.Popen(
            [*command, "--slots", str(NUM_SLOTS)], stdout=log, stderr=log, env=environment, start_new_session=True
        )
    try:
        address = state / "platform.json"
        _wait_for(lambda: address.exists() or process.poll() is not None, "the platform to come up")
        if process.poll() is not None:
            raise BackendError(f"the platform did not start: {(directory / 'platform.log').read_text()[-300:]}")
        with connect(state_dir=state) as client:
            yield client
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _hand_over(client: Client, arm: TrialArm, load: OfferedLoad, log: Path) -> None:
    service = SourceFile(filename="network.py", text=SERVICE_SOURCE, object_name="Network", kind="class")
    options: dict[str, Any] = {
        "slo_s": load.slo_s,
        "min_replicas": 1,
        "max_replicas": 1,
        "max_batch_size": 4,
        "params": {"num_layers": str(load.num_layers)},
    }
    for name in SERVICES:
        client.deploy_service(name, service, options | _share_option(arm.service))
    training = SourceFile(filename="training.py", text=TRAINING_SOURCE, object_name="fit", kind="function")
    endless = {"global_batch_size": 256, "num_epochs": 100_000, "params": {"log": str(log)}}
    client.submit_job(JOB, training, endless | _share_option(arm.job))


def _share_option(share: Share | None) -> dict[str, Any]:
    return {} if share is None else {"share": {"request": share.request, "limit": share.limit}}


def _wait_until_all_run(client: Client, log: Path) -> None:
    """Until both services can answer and the job has taken some steps. Raises BackendError with those that do not."""

    def runs() -> bool:
        failed = [f"{job.name}: {job.reason}" for job in client.jobs() if job.state in ("FAILED", "REJECTED")]
        if failed:
            raise BackendError(f"a job of the bench failed: {failed[0]}")
        ready = [service for service in client.services() if service.num_ready]
        return len(ready) == len(SERVICES) and log.exists() and log.stat().st_size >= 80

    _wait_for(runs, "both services and the job to run")


def _wait_for(condition: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + START_TIMEOUT_S
    while not condition():
        if time.monotonic() > end_s:
            raise BackendError(f"waited {START_TIMEOUT_S:.0f} s for {what}; is the machine busy with other work?")
        time.sleep(0.1)


def _order(client: Client, load: OfferedLoad, seed: int, starts_at_s: float) -> Order:
    targets = []
    for number, (name, surges) in enumerate(zip(SERVICES, load.surges, strict=True)):
        shifted = [
            Surge(from_s=surge.from_s + WARM_UP_S, until_s=surge.until_s + WARM_UP_S, factor=surge.factor)
            for surge in surges
        ]
        moments = draw_moments(load.rate_per_s, WARM_UP_S + load.duration_s, shifted, 1000 * seed + number)
        body = msgspec.json.encode({"rows": [_ROW]}).decode()
        targets.append(Target(path=f"/f/{name}", body=body, moments=moments))
    return Order(
        port=urlsplit(client.url).port or 0,
        token=(Path(client.state_dir) / "token").read_text().strip(),
        starts_at_s=starts_at_s,
        timeout_s=ANSWER_TIMEOUT_S,
        targets=tuple(targets),
    )


def _measure(
    client: Client, arm: TrialArm, load: OfferedLoad, repetition: int, seed: int, log: Path, tell: Callable[[str], None]
) -> SharingTrial:
    # Time for the load's own process to start; the same seed gives every arm the same arrivals.
    starts_at_s = time.monotonic() + 1.5
    sender = subprocess.Popen(
        [sys.executable, "-m", "springtide_studies.sharing.load"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert sender.stdin is not None
    sender.stdin.write(msgspec.json.encode(_order(client, load, seed, starts_at_s)))
    sender.stdin.close()
    try:
        return _measure_under_load(sender, client, arm, load, repetition, starts_at_s, log, tell)
    finally:
        if sender.poll() is None:
            sender.kill()
            sender.wait()
        if sender.stdout is not None:
            sender.stdout.close()


def _measure_under_load(
    sender: subprocess.Popen[bytes],
    client: Client,
    arm: TrialArm,
    load: OfferedLoad,
    repetition: int,
    starts_at_s: float,
    log: Path,
    tell: Callable[[str], None],
) -> SharingTrial:
    from_s, until_s = starts_at_s + WARM_UP_S, starts_at_s + WARM_UP_S + load.duration_s
    _sleep_until(from_s)
    pids = _pids_of(client)
    before = {name: _cpu_s(pid) for name, pid in pids.items()}
    load_1m = os.getloadavg()[0]
    sharing, states = SharingStatus(), dict[str, int]()
    while time.monotonic() < until_s - 0.5:
        with contextlib.suppress(SpringtideError):
            sharing = client.request("GET", "/v1/sharing", SharingStatus)
        for tenant in sharing.tenants:
            states[tenant.state] = states.get(tenant.state, 0) + 1
        time.sleep(0.5)
    _sleep_until(until_s)
    after = {name: _cpu_s(pid) for name, pid in pids.items()}
    moments = _read_moments(log)
    assert sender.stdout is not None
    told = sender.stdout.read()
    if sender.wait() != 0:
        raise BackendError(f"the process that sends the load ended with code {sender.returncode}; its output says why")
    answers = msgspec.json.decode(told, type=list[list[LoadReply]])
    shifted = tuple(tuple(_after_warm_up(answer) for answer in each if answer.due_s >= WARM_UP_S) for each in answers)
    status = client.status()
    trial = SharingTrial(
        arm=arm.name,
        repetition=repetition,
        duration_s=load.duration_s,
        answers=shifted,
        num_steps=sum(from_s <= moment < until_s for moment in moments),
        cpu_s={name: after[name] - before[name] for name in pids},
        devices=_places(status),
        sharing=sharing,
        states=states,
        load_1m=load_1m,
    )
    tell(_told(trial, load.slo_s))
    return trial


def _told(trial: SharingTrial, slo_s: float) -> str:
    late = [sum(is_violation(answer, slo_s) for answer in each) for each in trial.answers]
    asked = [len(each) for each in trial.answers]
    return (
        f"{trial.arm} {trial.repetition + 1}: {late[0]} of {asked[0]} and {late[1]} of {asked[1]} requests too late, "
        f"{trial.num_steps} steps"
    )


def is_violation(answer: LoadReply, slo_s: float) -> bool:
    """Whether a request was not answered within the objective, counted from when it was due."""
    return answer.status != 200 or answer.answered_s - answer.due_s > slo_s


def _after_warm_up(answer: LoadReply) -> LoadReply:
    return LoadReply(
        due_s=answer.due_s - WARM_UP_S,
        sent_s=answer.sent_s - WARM_UP_S,
        answered_s=answer.answered_s - WARM_UP_S,
        status=answer.status,
    )


def _sleep_until(moment_s: float) -> None:
    time.sleep(max(0.0, moment_s - time.monotonic()))


def _read_moments(log: Path) -> Sequence[float]:
    data = log.read_bytes()
    return memoryview(data[: len(data) // 8 * 8]).cast("d")


def _workloads(status: PlatformStatus) -> list[JobStatus | ServiceStatus]:
    return [*status.jobs, *status.services]


def _places(status: PlatformStatus) -> dict[str, str]:
    """Which device each workload's replica is on, by the workload's name."""
    return {workload.name: workload.replicas[0].device_id for workload in _workloads(status) if workload.replicas}


def _pids_of(client: Client) -> dict[str, int]:
    """The worker processes by the workload's name, from the records that the platform keeps of them."""
    status = client.status()
    pids: dict[str, int] = {}
    for workload in _workloads(status):
        for replica in workload.replicas:
            record = Path(client.state_dir) / "workers" / f"{replica.replica_id}.json"
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                pids[workload.name] = int(msgspec.json.decode(record.read_bytes())["process"]["pid"])
    return pids


def _cpu_s(pid: int) -> float:
    """CPU time of a process, all threads, user and system; in steps of 10 ms."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
