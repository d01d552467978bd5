"""A headless browser, and a service whose platform is a double, for tests of the pages."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import fcntl
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from springtide.core.status.admission import AdmissionStatus
from springtide.core.status.platform import (
    DeviceStatus,
    Explanation,
    HistoryEntry,
    Interval,
    JobStatus,
    Mark,
    PlatformStatus,
    ReplicaStatus,
    ServiceStatus,
    Timeline,
)
from springtide.service.api.dashboard import dashboard_routes

NOW_S = 1000.0
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WINDOW = {"width": 1280, "height": 800}
EVIL = "<img src=x onerror=document.title='owned'>"


def make_job(job_id: str, name: str, **values: object) -> JobStatus:
    """A job of the double, in the midst of its training unless `values` say otherwise."""
    settings: dict[str, object] = {
        "job_id": job_id,
        "name": name,
        "kind": "function",
        "state": "RUNNING",
        "reason": "",
        "submitted_at_s": NOW_S - 400,
        "started_at_s": NOW_S - 398,
        "ended_at_s": None,
        "deadline_at_s": None,
        "budget_usd": None,
        "min_workers": 1,
        "max_workers": 4,
        "num_workers": 1,
        "global_batch_size": 64,
        "generation": 1,
        "step": 0,
        "total_steps": None,
        "progress_fraction": None,
        "epoch": 0,
        "num_epochs": 10,
        "loss": None,
        "metrics": {},
        "samples_per_s": None,
        "eta_s": None,
        "slack_s": None,
        "num_resizes": 0,
        "num_restarts": 0,
        "num_preemptions": 0,
        "last_pause_s": None,
        "resize_pause_s": {},
        "checkpoint_step": None,
        "artifact_path": "",
        "device_seconds": 0.0,
        "alternatives": (),
        "replicas": (),
    }
    return JobStatus(**(settings | values))  # type: ignore[arg-type]


def make_service(**values: object) -> ServiceStatus:
    """The service of the double."""
    settings: dict[str, object] = {
        "service_id": "sentiment-7c1d",
        "name": "sentiment",
        "state": "READY",
        "reason": "one replica answers 41 requests/s",
        "deployed_at_s": NOW_S - 300,
        "revision": 2,
        "min_replicas": 0,
        "max_replicas": 3,
        "num_ready": 1,
        "num_starting": 0,
        "slo_s": 0.2,
        "arrivals_per_s": 41.3,
        "in_flight": 3,
        "queued": 0,
        "latency_p50_s": 0.012,
        "latency_p99_s": 0.088,
        "device_seconds": 200.0,
        "admission": AdmissionStatus(refused=12, refused_lately=7, notes=("so that the SLO is kept",)),
        "url": "/f/sentiment",
        "replicas": (
            ReplicaStatus(replica_id="s1", device_id="local/3", state="READY", rank=None, started_at_s=700.0),
        ),
    }
    return ServiceStatus(**(settings | values))  # type: ignore[arg-type]


def make_replica(replica_id: str, device: int, rank: int) -> ReplicaStatus:
    return ReplicaStatus(
        replica_id=replica_id, device_id=f"local/{device}", state="READY", rank=rank, started_at_s=NOW_S - 200
    )


def busy_status() -> PlatformStatus:
    """Four devices, two jobs running, one waiting, two ended, one service."""
    digits = make_job(
        "digits-3f2a", "digits", reason="grown from 1 to 2 workers: local/1 became free", deadline_at_s=NOW_S + 180,
        num_workers=2, generation=4, step=5210, total_steps=9100, progress_fraction=0.5725, epoch=5, loss=0.41237,
        metrics={"accuracy": 0.8734},
        samples_per_s=812.4, eta_s=112.0, slack_s=68.0, num_resizes=3, num_restarts=0, last_pause_s=0.041,
        checkpoint_step=5000, replicas=(make_replica("d1", 0, 0), make_replica("d4", 1, 1)),
    )  # fmt: skip
    gpt = make_job(
        "gpt-91bc", "gpt", reason="one worker: digits has the nearer deadline", submitted_at_s=NOW_S - 260,
        deadline_at_s=NOW_S + 60, step=310, total_steps=1200, progress_fraction=0.258, loss=2.7182, samples_per_s=95.1,
        eta_s=95.0, slack_s=-35.0, is_promised=True, given_up_at_s=NOW_S - 30, num_resizes=1, num_restarts=1,
        last_pause_s=1.83, checkpoint_step=300, replicas=(make_replica("g3", 2, 0),),
    )  # fmt: skip
    waiting = make_job(
        "sweep-lr-0.01-aa07", "sweep-lr-0.01", state="PENDING", submitted_at_s=NOW_S - 21, started_at_s=None,
        reason="all 4 devices are held by work with an earlier deadline; digits should free two in about 1m52",
        num_workers=0, generation=0,
    )  # fmt: skip
    done = make_job(
        "warmup-0c11", "warmup", state="SUCCEEDED", reason="", submitted_at_s=100.0, started_at_s=102.0, step=900,
        ended_at_s=420.0, deadline_at_s=600.0, total_steps=900, progress_fraction=1.0, epoch=9, loss=0.0312,
        samples_per_s=640.0, num_workers=0, num_resizes=2, last_pause_s=0.037, checkpoint_step=900,
    )  # fmt: skip
    refused = make_job(
        "huge-11aa", EVIL, state="REJECTED", reason="cannot finish in 2m00: needs at least 6 workers, this pool has 4",
        alternatives=("--deadline 8m30", "--epochs 3"), submitted_at_s=700.0, started_at_s=None, ended_at_s=700.1,
        deadline_at_s=820.0, num_workers=0,
    )  # fmt: skip
    holders = [digits, digits, gpt, None]
    replicas = ["d1", "d4", "g3", "s1"]
    devices = tuple(
        DeviceStatus(
            device_id=f"local/{index}", node_id="local", kind="cpu",
            workload_id=job.job_id if job else "sentiment-7c1d",
            workload_name=job.name if job else "sentiment", replica_id=replicas[index],
        )
        for index, job in enumerate(holders)
    )  # fmt: skip
    return PlatformStatus(
        version="0.1.0", policy="elastic", seq=412, now_s=NOW_S, wall_clock_offset_s=time.time() - NOW_S,
        devices=devices, jobs=(done, digits, gpt, refused, waiting), services=(make_service(),),
    )  # fmt: skip


def busy_timeline() -> Timeline:
    """The story behind `busy_status`: growth, a crash, a shrink for the service."""
    rows = (
        ("local/0", "warmup-0c11", "warmup", "w1", 102.0, 420.0),
        ("local/1", "warmup-0c11", "warmup", "w2", 180.0, 420.0),
        ("local/2", "warmup-0c11", "warmup", "w3", 260.0, 340.0),
        ("local/0", "digits-3f2a", "digits", "d1", 602.0, None),
        ("local/1", "digits-3f2a", "digits", "d2", 640.0, 742.0), ("local/1", "gpt-91bc", "gpt", "g1", 744.0, 861.0),
        ("local/2", "digits-3f2a", "digits", "d3", 655.0, 742.0), ("local/2", "gpt-91bc", "gpt", "g3", 864.0, None),
        ("local/1", "digits-3f2a", "digits", "d4", 880.0, None),
    )  # fmt: skip
    intervals = [
        Interval(
            device_id=device_id, workload_id=workload_id, workload_name=name, workload_kind="job",
            replica_id=replica_id, start_s=start_s, end_s=end_s,
        )
        for device_id, workload_id, name, replica_id, start_s, end_s in rows
    ]  # fmt: skip
    intervals += [
        Interval(
            device_id="local/3", workload_id="sentiment-7c1d", workload_name="sentiment", workload_kind="service",
            replica_id=replica_id, start_s=start_s, end_s=end_s,
        )
        for replica_id, start_s, end_s in (("s0", 710.0, 760.0), ("s1", 815.0, None))
    ]  # fmt: skip
    marks = (
        Mark(at_s=182.0, workload_id="warmup-0c11", kind="grow", text="1 to 2 workers, pause 37 ms"),
        Mark(at_s=420.0, workload_id="warmup-0c11", kind="succeeded", text="ended SUCCEEDED at step 900"),
        Mark(at_s=604.0, workload_id="digits-3f2a", kind="start", text="started with 1 worker"),
        Mark(at_s=656.0, workload_id="digits-3f2a", kind="grow", text="1 to 3 workers, pause 52 ms"),
        Mark(at_s=741.0, workload_id="digits-3f2a", kind="shrink", text="3 to 1 worker for gpt, pause 19 ms"),
        Mark(at_s=746.0, workload_id="gpt-91bc", kind="start", text="started with 1 worker"),
        Mark(at_s=861.0, workload_id="gpt-91bc", kind="crash", text="replica g1 was killed (signal 9)"),
        Mark(at_s=866.0, workload_id="gpt-91bc", kind="recover", text="back from checkpoint 300, pause 1.8 s"),
        Mark(at_s=882.0, workload_id="digits-3f2a", kind="grow", text="1 to 2 workers, pause 41 ms"),
    )
    return Timeline(now_s=NOW_S, intervals=tuple(intervals), marks=marks)


class PlatformDouble:
    """Stands in for the platform's API behind the real page: it answers with made-up status. Tests only."""

    def __init__(self, status: PlatformStatus, timeline: Timeline, *, refuses: bool = False) -> None:
        self.status = status
        self.timeline = timeline
        self.refuses = refuses
        self.goes_away = False
        self.stopping = threading.Event()

    def routes(self) -> list[Route]:
        return [
            Route("/v1/status", self.answer_status),
            Route("/v1/timeline", self.answer_timeline),
            Route("/v1/stream", self.answer_stream),
            Route("/v1/workloads/{workload_id}/why", self.answer_why),
            Route("/healthz", self.answer_health),
        ]

    def _json(self, value: object) -> Response:
        if self.refuses:
            return Response('{"error": {"code": "unauthorized", "message": "no token"}}', status_code=401)
        if self.goes_away:
            return Response("gone", status_code=503)
        return Response(msgspec.json.encode(value), media_type="application/json")

    async def answer_status(self, request: Request) -> Response:
        return self._json(self.status)

    async def answer_timeline(self, request: Request) -> Response:
        return self._json(self.timeline)

    async def answer_why(self, request: Request) -> Response:
        job = next(job for job in self.status.jobs if job.job_id == request.path_params["workload_id"])
        entry = HistoryEntry(seq=7, at_s=NOW_S - 20, kind="submitted", text=f"submitted as {job.name}")
        explanation = Explanation(
            workload_id=job.job_id, name=job.name, state=job.state, reason=job.reason,
            evidence=("4 of 4 devices are held",), next_steps=(f"springtide cancel {job.job_id}",), history=(entry,),
        )  # fmt: skip
        return self._json(explanation)

    async def answer_health(self, request: Request) -> Response:
        return self._json({"status": "ok"})

    async def answer_stream(self, request: Request) -> Response:
        if self.refuses or self.goes_away:
            return self._json(None)
        return StreamingResponse(self._events(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    async def _events(self) -> AsyncIterator[bytes]:
        sent: PlatformStatus | None = None
        while not self.stopping.is_set() and not self.goes_away:
            if self.status is not sent:
                sent = self.status
                yield b"data: " + msgspec.json.encode(sent) + b"\n\n"
            await asyncio.sleep(0.05)


@contextmanager
def serving(double: PlatformDouble) -> Iterator[str]:
    """Run the real page over the double on a port of its own and yield its address."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    app = FastAPI(routes=[*dashboard_routes(), *double.routes()])
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        double.stopping.set()
        server.should_exit = True
        thread.join()
        listener.close()


class Browser:
    """A headless chromium, driven through its DevTools pipe: commands in, answers out. Each page has its own profile.

    It goes when the pipe does, so none outlives the tests.
    """

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        flags = (
            "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-extensions",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--disable-dev-shm-usage", "--window-size=1280,800", "--remote-debugging-pipe",
            f"--user-data-dir={profile}", "about:blank",
        )  # fmt: skip
        commands_read, self._commands = os.pipe()
        self._answers, answers_write = os.pipe()
        # Chromium reads commands from descriptor 3 and writes answers to 4; copies above 9 cannot be overwritten.
        low, high = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (commands_read, answers_write))
        nothing = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
        ends = [(os.POSIX_SPAWN_DUP2, low, 3), (os.POSIX_SPAWN_DUP2, high, 4)]
        environment = dict(os.environ)
        self._pid = os.posix_spawn(CHROMIUM, [CHROMIUM, *flags], environment, file_actions=[*nothing, *ends])
        for fd in (commands_read, answers_write, low, high):
            os.close(fd)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self._context: str | None = None

    def close(self) -> None:
        with contextlib.suppress(OSError, AssertionError):
            self.send("Browser.close", browser=True)
        for fd in (self._commands, self._answers):
            os.close(fd)
        os.waitpid(self._pid, 0)

    def send(self, method: str, *, browser: bool = False, **params: Any) -> Any:
        """Send one command and return its result; events that come in between are dropped."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None and not browser:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = json.loads(self._receive())
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _receive(self) -> bytes:
        while b"\0" not in self._buffer:
            data = os.read(self._answers, 1 << 16)
            assert data, "the browser went away"
            self._buffer += data
        message, self._buffer = self._buffer.split(b"\0", 1)
        return message

    def open(self, address: str, *, dark: bool = False) -> None:
        self._context = self.send("Target.createBrowserContext", browser=True)["browserContextId"]
        target = self.send(
            "Target.createTarget", browser=True, url="about:blank", browserContextId=self._context, **WINDOW
        )["targetId"]
        self._session = self.send("Target.attachToTarget", browser=True, targetId=target, flatten=True)["sessionId"]
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url=address)

    def leave(self) -> None:
        """Close the page with all that it kept and all its connections."""
        self.send("Target.disposeBrowserContext", browser=True, browserContextId=self._context)
        self._session = self._context = None

    def evaluate(self, expression: str) -> Any:
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Return once the JavaScript condition holds; the test's own time limit ends a wait that is in vain."""
        while not self.evaluate(f"Boolean({condition})"):
            time.sleep(0.05)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        data = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))


_running: list[Browser] = []


@contextmanager
def browsing(address: str, profile: Path, *, dark: bool = False) -> Iterator[Browser]:
    """Open the address in an empty profile. Starting a browser takes seconds: one is kept until a test fails in it."""
    browser = _running.pop() if _running else Browser(profile)
    try:
        browser.open(address, dark=dark)
        yield browser
        browser.leave()
    except BaseException:
        browser.close()
        raise
    _running.append(browser)


DRAWN = "document.querySelector('#live.is-live') && document.querySelector('#gantt .bar')"


def count(browser: Browser, selector: str) -> int:
    return int(browser.evaluate(f"document.querySelectorAll({json.dumps(selector)}).length"))


def text(browser: Browser, selector: str) -> str:
    return str(browser.evaluate(f"document.querySelector({json.dumps(selector)}).textContent"))
