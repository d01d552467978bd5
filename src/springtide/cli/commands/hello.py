"""`springtide hello`: check the platform by training and serving samples, and clean up."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from springtide.cli.platform.platform_process import running_platform, start_platform, wait_gone
from springtide.cli.session import Session, common_options
from springtide.cli.tables.columns import pause
from springtide.client.functions import deploy_service, submit_job
from springtide.client.goals import TrainOptions
from springtide.client.serving_goals import ServeOptions
from springtide.client.sources.source import read_source
from springtide.core.errors import BackendError
from springtide.core.quantities import format_duration
from springtide.core.status.platform import JobStatus, ServiceStatus
from springtide.core.workload import JobState

if TYPE_CHECKING:
    from springtide.client.api import Client

_SAMPLES = Path(__file__).parents[1] / "samples"
_TIMEOUT_S = 120.0
_POLL_S = 0.05
_STEPS_BEFORE_RESIZE = 20
_NUM_DEVICES = 2
_GREETING = ["hello, tide"]


class HelloReport(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements of `springtide hello`."""

    num_workers_before: int
    num_workers_after: int
    resize_pause_s: float | None
    num_restarts: int
    num_steps: int
    final_loss: float | None
    cold_start_s: float
    warm_request_s: float
    scaled_to_zero: bool
    took_s: float


@click.command()
@common_options
@click.pass_obj
def hello(session: Session) -> None:
    """Train, resize 1 -> 2 without a restart, serve, scale 0 -> 1 -> 0; about half a minute, then cleaned up."""
    if importlib.util.find_spec("torch") is None:
        raise BackendError("training needs torch, which is not installed here: pip install 'springtide[runtime]'")
    started_s = time.monotonic()
    with _platform(session) as client:
        job, before = _train(session, client)
        cold_start_s, warm_s, slept = _serve(session, client)
    report = HelloReport(
        num_workers_before=before,
        num_workers_after=job.num_workers,
        resize_pause_s=job.last_pause_s,
        num_restarts=job.num_restarts,
        num_steps=job.step,
        final_loss=job.loss,
        cold_start_s=cold_start_s,
        warm_request_s=warm_s,
        scaled_to_zero=slept,
        took_s=time.monotonic() - started_s,
    )
    hint = "next: springtide up, then springtide run FILE; this sample's source: " + str(_SAMPLES / "training.py")
    session.answer(report, f"it works ({format_duration(report.took_s)})", hint)


@contextmanager
def _platform(session: Session) -> Iterator[Client]:
    """The running platform, or a new one in a temporary folder that is removed afterwards."""
    if running_platform(session.state_dir) is not None:
        session.given_state_dir = session.state_dir
        free = [device for device in session.client.status().devices if device.workload_id is None]
        if len(free) >= _NUM_DEVICES:
            session.note(f"[ok] using the platform that runs with state {session.state_dir}")
            yield session.client
            return
        session.note("[ok] the running platform is busy; it is left alone")
    state_dir = Path(tempfile.mkdtemp(prefix="springtide-hello-"))
    try:
        platform = start_platform(state_dir, _NUM_DEVICES, "elastic", 0)
        session.note(f"[ok] a platform of its own with 2 slots at {platform.url}")
        client = session.connect(state_dir)
        try:
            yield client
        finally:
            client.shutdown(stop_workers=True)
            wait_gone(platform.pid, _TIMEOUT_S)
    finally:
        shutil.rmtree(state_dir, ignore_errors=True)


def _train(session: Session, client: Client) -> tuple[JobStatus, int]:
    """Run the sample, resize it under way, and return its last status with workers and how many it began with."""
    source = read_source(_SAMPLES / "training.py", "fit")
    options = TrainOptions(global_batch=64, epochs=12, workers=1, params={"pause": "0.003"})
    handle = submit_job(source, options, "hello", client, folder=False)
    try:
        small = _wait_job(client, handle.id, "to train", lambda job: job.step >= _STEPS_BEFORE_RESIZE)
        session.note(f"[ok] {handle.id} trains on {small.num_workers} worker, loss {small.loss or 0:.3f}")
        handle.scale(_NUM_DEVICES)
        large = _wait_job(client, handle.id, "to be resized", lambda job: job.num_resizes > small.num_resizes)
        ended = _wait_job(client, handle.id, "to end", lambda job: JobState(job.state).is_terminal)
    except BackendError:
        # Leave nothing behind on a platform that was already running.
        if not JobState(handle.status().state).is_terminal:
            handle.cancel()
        raise
    paused = "" if large.last_pause_s is None else f" with a pause of {pause(large.last_pause_s)}"
    session.note(
        f"[ok] resized {small.num_workers} -> {large.num_workers} at step {large.step}{paused}, "
        f"{ended.num_restarts} restarts, global batch {ended.global_batch_size} kept"
    )
    session.note(f"[ok] done: {ended.step} steps, loss {ended.loss or 0:.3f}, model saved as safetensors")
    seen = msgspec.structs.replace(ended, num_workers=large.num_workers, last_pause_s=large.last_pause_s)
    return seen, small.num_workers


def _wait_job(client: Client, job_id: str, what: str, reached: Callable[[JobStatus], bool]) -> JobStatus:
    end_s = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < end_s:
        job = client.job(job_id)
        if reached(job) and job.state not in ("FAILED", "REJECTED", "CANCELLED"):
            return job
        if JobState(job.state).is_terminal:
            last_words = "".join(f"\n  {line.rstrip()}" for line in list(client.logs(job_id, tail=8))[-8:])
            raise BackendError(f"{job_id} {job.state} while waiting for it {what}: {job.reason}{last_words}")
        time.sleep(_POLL_S)
    job = client.job(job_id)
    raise BackendError(f"gave up waiting for {job_id} {what}: it is {job.state} ({job.reason})")


def _serve(session: Session, client: Client) -> tuple[float, float, bool]:
    """Deploy the sample, send requests, and wait until it sleeps; returns cold and warm seconds, whether it slept."""
    source = read_source(_SAMPLES / "serving.py", "Greeter", "class")
    options = ServeOptions(scale=(0, 1), idle="1s")
    handle = deploy_service(source, options, "hello-api", client)
    try:
        cold_s = _timed_request(client, handle.name)
        warm_s = _timed_request(client, handle.name)
        asleep = _wait_asleep(client, handle.name)
        session.note(
            f"[ok] {handle.name} scaled 0 -> 1 for a request ({format_duration(cold_s)} cold, "
            f"{format_duration(warm_s)} warm)" + (" -> 0 when idle" if asleep else "")
        )
        if not asleep:
            raise BackendError(f"{handle.name} did not go back to 0 replicas: {handle.status().reason}")
        return cold_s, warm_s, asleep
    finally:
        handle.remove()


def _timed_request(client: Client, name: str) -> float:
    started_s = time.monotonic()
    outputs = client.infer(name, names=["tide"])
    took_s = time.monotonic() - started_s
    if outputs != _GREETING:
        raise BackendError(f"{name} answered {outputs!r:.200} where {_GREETING!r} is right")
    return took_s


def _wait_asleep(client: Client, name: str) -> bool:
    end_s = time.monotonic() + _TIMEOUT_S / 4
    while time.monotonic() < end_s:
        service: ServiceStatus = client.service(name)
        if not service.replicas:
            return True
        time.sleep(_POLL_S)
    return False
