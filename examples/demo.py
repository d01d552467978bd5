"""The demo: two training jobs with deadlines and a service under load share four device slots, for real.

python examples/demo.py        (`make demo` installs everything first)

It starts an embedded platform of its own, hands over the work, prints what the platform decides and what each resize
cost, checks that every promise was kept, and takes everything down again. Exit code 0: all of it held.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import springtide as st
from springtide.client.api import Client, connect
from springtide.core.errors import CapacityError
from springtide.core.quantities import format_duration
from springtide.core.status.platform import JobStatus, PlatformStatus, ServiceStatus

HERE = Path(__file__).parent
NUM_SLOTS = 4
TENANTS = 6


@st.serve(slo="p99 < 500ms", scale=(0, 2), idle="3s", max_batch=16, name="nearest-digit")
class NearestDigit:
    """Names a digit by the closest mean image: small, real, and ready in a moment."""

    def load(self) -> None:
        import torch
        from sklearn.datasets import load_digits

        images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
        self.means = torch.stack([images[labels == digit].mean(dim=0) for digit in range(10)]).float() / 16

    def predict(self, images: list[list[float]]) -> list[int]:
        """The digit that each image (64 grey values from 0 to 1) is closest to."""
        import torch

        return [int(digit) for digit in torch.cdist(torch.tensor(images), self.means).argmin(dim=1)]


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGAN:6.1f} s  {text}", flush=True)


BEGAN = time.monotonic()


@contextlib.contextmanager
def platform() -> Iterator[tuple[Client, str]]:
    """A platform with a state directory of its own, taken down at the end whatever happens."""
    command = [sys.executable, "-m", "springtide"]
    with tempfile.TemporaryDirectory(prefix="springtide-demo-") as folder:
        state = str(Path(folder) / "state")
        subprocess.run([*command, "--state", state, "up", "--slots", str(NUM_SLOTS), "--port", "0"], check=True)
        try:
            with connect(state_dir=state) as client:
                yield client, state
        finally:
            subprocess.run([*command, "--state", state, "down"], check=True)


def submit(client: Client, example: str, name: str, **options: object) -> JobStatus:
    """Hand over one of the examples' training functions, as `springtide run` does."""
    from springtide.client.sources.source import read_source

    return client.submit_job(name, read_source(HERE / f"{example}.py", example, "function"), {**options})


class Story:
    """Watches the platform and says what changes."""

    def __init__(self, state: str) -> None:
        self._state = state
        self._seen: dict[str, tuple[object, ...]] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Story:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()

    def _watch(self) -> None:
        with connect(state_dir=self._state) as own:
            for status in own.stream():
                if self._done.is_set():
                    return
                self._tell(status)

    def _tell(self, status: PlatformStatus) -> None:
        for job in status.jobs:
            if self._is_new(job.job_id, (job.state, job.num_resizes, job.num_restarts)):
                pause = f", pause {job.last_pause_s * 1000:.1f} ms" if job.last_pause_s is not None else ""
                progress = f"step {job.step}" + (f" of {job.total_steps}" if job.total_steps else "")
                say(f"{job.name:<14} {job.state:<10} {job.num_workers} workers  {progress}{pause}  ({job.reason})")
        for service in status.services:
            if self._is_new(service.service_id, (service.state, service.num_ready)):
                say(f"{service.name:<14} {service.state:<10} {service.num_ready} replicas  ({service.reason})")

    def _is_new(self, key: str, value: tuple[object, ...]) -> bool:
        is_new = self._seen.get(key) != value
        self._seen[key] = value
        return is_new


def load(state: str, for_s: float) -> tuple[int, int, list[float]]:
    """Ask the service from several threads. Returns answers, refusals and latencies in seconds."""
    image = [0.0] * 20 + [1.0] * 8 + [0.0] * 36
    latencies: list[float] = []
    refused = [0]
    end = time.monotonic() + for_s

    def tenant() -> None:
        with connect(state_dir=state) as own:
            while time.monotonic() < end:
                begin = time.monotonic()
                try:
                    own.infer("nearest-digit", {"images": [image]})
                    latencies.append(time.monotonic() - begin)
                except CapacityError as error:
                    refused[0] += 1
                    time.sleep(error.retry_after_s)

    threads = [threading.Thread(target=tenant) for _ in range(TENANTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(latencies), refused[0], sorted(latencies)


def wait(client: Client, what: str, arrived: object, timeout_s: float = 120.0) -> None:
    end = time.monotonic() + timeout_s
    while not arrived():  # type: ignore[operator]
        if time.monotonic() > end:
            raise SystemExit(f"demo: waited {timeout_s:.0f} s in vain for {what}")
        time.sleep(0.1)


def main() -> int:
    """Play the demo. Returns the exit code."""
    with platform() as (client, state), Story(state):
        say(f"{NUM_SLOTS} device slots, a job with a deadline of 100 s")
        digits = submit(
            client, "digits", "digits", deadline_s=100.0, max_workers=4, num_epochs=30, global_batch_size=64
        )
        wait(client, "the first job to take all slots", lambda: client.job(digits.job_id).num_workers == NUM_SLOTS)
        time.sleep(3.0)
        say("a second job, deadline 120 s")
        gpt = submit(client, "gpt", "gpt", deadline_s=120.0, max_workers=4, num_epochs=1, global_batch_size=32)
        wait(client, "the second job to run", lambda: client.job(gpt.job_id).state == "RUNNING")
        time.sleep(3.0)
        say("a service, and people who ask it all at once")
        NearestDigit.deploy(client=client)
        answers, refusals, latencies = load(state, for_s=8.0)
        p50, p99 = latencies[len(latencies) // 2], latencies[int(len(latencies) * 0.99)]
        say(f"{answers} answers, {refusals} refusals, p50 {p50 * 1000:.0f} ms, p99 {p99 * 1000:.0f} ms")
        wait(client, "the service to scale to zero", lambda: client.service("nearest-digit").num_ready == 0)
        for job_id in (digits.job_id, gpt.job_id):
            wait(client, f"{job_id} to end", lambda job_id=job_id: client.job(job_id).ended_at_s is not None)
        time.sleep(0.5)
        return report(client.status(), answers)


def report(status: PlatformStatus, answers: int) -> int:
    """Say what was promised and what was kept."""
    print("\nWhat was promised, what was kept", flush=True)
    kept = answers > 0
    for job in status.jobs:
        assert job.deadline_at_s is not None
        pause_ms = (job.last_pause_s or 0.0) * 1000
        in_time = job.state == "SUCCEEDED" and job.ended_at_s is not None and job.ended_at_s <= job.deadline_at_s
        left_s = job.deadline_at_s - (job.ended_at_s or status.now_s)
        kept = kept and in_time
        print(
            f"  {job.name:<14} {job.state.lower()} {'in time' if in_time else 'LATE'}, {format_duration(left_s)} "
            f"to spare; resized {job.num_resizes} times, restarted {job.num_restarts} times, "
            f"last pause {pause_ms:.1f} ms"
        )
    for service in status.services:
        print(f"  {_service_line(service)}, {answers} answers")
    if not any(job.num_resizes for job in status.jobs):
        print("  no job was resized")
        kept = False
    print(f"  {'all of it held' if kept else 'NOT all of it held'}", flush=True)
    return 0 if kept else 1


def _service_line(service: ServiceStatus) -> str:
    return f"{service.name:<14} {service.state.lower()}: {service.reason}"


if __name__ == "__main__":
    sys.exit(main())
