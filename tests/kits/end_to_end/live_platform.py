"""A real platform: real processes, a real socket, a real journal on disk."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2

from springtide.core.workload import shards_for
from springtide_studies.chaos.checks import artifact_digest, assert_exactly_once, committed_steps
from springtide_studies.chaos.load import ECHO
from springtide_studies.chaos.load import TRAINING as TINY

__all__ = ["ECHO", "TINY", "artifact_digest", "assert_exactly_once", "committed_steps"]
# So much longer than anything should take it is waited for, since other things may keep the machine busy.
PATIENCE_S = 45.0


class LivePlatform:
    """`python -m springtide.service` on a state directory of its own, which may be killed and started again."""

    def __init__(self, state_dir: Path, slots: int | None = 4, python: str = sys.executable) -> None:
        self.state_dir = state_dir
        # Another environment's interpreter runs the version that is installed there.
        self.python = python
        self.slots = slots
        self.process: subprocess.Popen[bytes] | None = None
        self.http: httpx2.Client | None = None
        self.num_starts = 0

    def start(
        self,
        crash_at: str = "",
        policy: str = "elastic",
        options: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
    ) -> None:
        """Start it and wait until it answers or has ended. `env` is added to its environment."""
        self.num_starts += 1
        address = self.state_dir / "platform.json"
        address.unlink(missing_ok=True)
        self.state_dir.mkdir(parents=True, exist_ok=True)
        with open(self.state_dir.parent / f"platform-{self.num_starts}.log", "wb") as log:
            self.process = subprocess.Popen(
                [
                    *(self.python, "-m", "springtide.service", "--state", str(self.state_dir)),
                    *("--port", "0", "--policy", policy, *options),
                    *(() if self.slots is None else ("--slots", str(self.slots))),
                ],
                stdout=log,
                stderr=log,
                env={**os.environ, "SPRINGTIDE_CRASH_AT": crash_at, "OMP_NUM_THREADS": "1", **(env or {})},
            )
        wait_for(lambda: address.exists() or self.process.poll() is not None, 60.0, "the platform to come up")
        if self.http is not None:
            self.http.close()
            self.http = None
        if self.process.poll() is None and address.exists():
            url = json.loads(address.read_text())["url"]
            token = (self.state_dir / "token").read_text().strip()
            self.http = httpx2.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=30.0)

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """End in order; what does not end within its time is a failure of the test."""
        if self.http is not None:
            self.http.close()
            self.http = None
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(90.0)

    def log(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.state_dir.parent.glob("platform-*.log")))

    def request(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
        assert self.http is not None
        answer = self.http.request(method, path, json=body, headers=headers)
        assert answer.status_code < 400, f"{method} {path}: {answer.status_code} {answer.text}"
        return answer.json()

    def submit(self, name: str, *, text: str = TINY, key: str = "", shard_s: float = 0.0, **options: Any) -> str:
        """Submit a job, exact unless an option says otherwise, so that its model can be compared bit for bit."""
        if "batch" not in options:
            options.setdefault("num_virtual_shards", shards_for(options.get("max_workers", 4)))
        body = {
            "name": name,
            "source": {"filename": "job.py", "text": text, "object_name": "fit", "kind": "function"},
            "options": {
                "global_batch_size": 16,
                "num_epochs": 3,
                "min_workers": 1,
                "max_workers": 4,
                "max_restarts": 50,
                "params": {"shard_s": str(shard_s)},
                **options,
            },
        }
        headers = {"Idempotency-Key": key} if key else None
        return str(self.request("POST", "/v1/jobs", body, headers)["job_id"])

    def job(self, job_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.request("GET", f"/v1/jobs/{job_id}")
        return found

    def wait_job(self, job_id: str, timeout_s: float = 120.0, states: tuple[str, ...] = ()) -> dict[str, Any]:
        wanted = states or ("SUCCEEDED", "FAILED", "CANCELLED", "REJECTED")
        last: dict[str, Any] = {}

        def arrived() -> bool:
            last.update(self.job(job_id))
            return last["state"] in wanted

        wait_for(arrived, timeout_s, lambda: f"{job_id} to be one of {wanted}; now {last.get('state')}: {last}")
        return last

    def worker_pids(self) -> dict[str, int]:
        """The living worker processes by replica id, from their records."""
        found = {}
        for path in (self.state_dir / "workers").glob("*.json"):
            try:
                pid = int(json.loads(path.read_text())["process"]["pid"])
                os.kill(pid, 0)
            except (OSError, ValueError, KeyError, TypeError):
                continue
            found[path.stem] = pid
        return found

    def workload(self, job_id: str) -> Path:
        return self.state_dir / "workloads" / job_id


@contextlib.contextmanager
def ended_after(live: LivePlatform) -> Iterator[LivePlatform]:
    """The platform, ended in order afterwards, and by force what a failed test left behind."""
    try:
        yield live
    finally:
        if live.http is not None:
            live.http.close()
        if live.is_alive:
            live.process.send_signal(signal.SIGTERM)
            try:
                live.process.wait(60.0)
            except subprocess.TimeoutExpired:
                live.kill()
        # By its own records, never by name.
        for pid in live.worker_pids().values():
            os.kill(pid, signal.SIGKILL)


def wait_for(condition: Callable[[], bool], timeout_s: float, what: str | Callable[[], str]) -> None:
    end = time.monotonic() + PATIENCE_S + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"waited {PATIENCE_S + timeout_s:.0f} s for {what() if callable(what) else what}")
        time.sleep(0.05)
