"""The Open Inference Protocol over gRPC: real clients, a real platform, a gRPC process that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kits.end_to_end.live_platform import ECHO, LivePlatform, ended_after, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.xdist_group("grpc")]
CALLS = Path(__file__).parents[1] / "kits" / "end_to_end" / "triton_calls.py"
MODELS = {
    "echo": ECHO,
    "arrays": """
import numpy as np

class Arrays:
    def predict(self, x: np.ndarray) -> dict[str, list[float]]:
        return {"shape": list(x.shape), "doubled": (2.0 * x.astype(np.float64)).ravel().tolist()}
""",
    "texts": """
class Texts:
    def predict(self, texts: list[str]) -> list[str]:
        return [text + "!" for text in texts]
""",
    "blobs": """
class Blobs:
    def predict(self, blobs: list[bytes]) -> list[bytes]:
        return [blob + blob for blob in blobs]
""",
    "raises": """
class Raises:
    def predict(self, numbers: list[float]) -> list[float]:
        raise RuntimeError("on purpose")
""",
    "counts": """
from collections.abc import Iterator

class Counts:
    def predict(self, n: int) -> Iterator[float]:
        if n < 0:
            raise ValueError("a count is never negative")
        for number in range(n):
            yield number / 2
""",
    "sleeps": """
import asyncio
from pathlib import Path

class Sleeps:
    async def predict(self, seconds: float, marks: str) -> float:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            with open(marks, "a") as file:
                file.write("cancelled\\n")
            raise
        return seconds
""",
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LivePlatform]:
    with ended_after(LivePlatform(tmp_path_factory.mktemp("grpc") / "state", slots=8)) as live:
        live.start(options=("--grpc-port", "0"))
        for name, text in MODELS.items():
            source = {"filename": f"{name}.py", "text": text, "object_name": name.capitalize(), "kind": "class"}
            live.request("PUT", f"/v1/services/{name}", {"source": source, "options": {"min_replicas": 1}})
        for name in MODELS:
            wait_for(lambda name=name: ready(live, name), 60.0, f"{name} to be ready")
        yield live


def ready(live: LivePlatform, name: str) -> bool:
    return live.http.get(f"/v2/models/{name}/ready").json().get("state") == "ready"


def address_of(live: LivePlatform) -> str:
    return str(json.loads((live.state_dir / "platform.json").read_text())["grpc"])


def check(live: LivePlatform, name: str, key: str = "", *more: str) -> None:
    """Let a client in a process of its own make the calls of one check."""
    token = (live.state_dir / "token").read_text().strip()
    command = [
        sys.executable,
        str(CALLS),
        name,
        address_of(live),
        live.http.base_url.netloc.decode(),
        token,
        key,
        *more,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("name", ["health", "described", "tensors", "streams", "asynchronous"])
def test_clients_of_the_protocol_work_as_they_are(served: LivePlatform, name: str) -> None:
    check(served, name)


def test_what_is_refused_has_a_code_and_a_sentence(served: LivePlatform) -> None:
    key = served.request("POST", "/v1/keys", {"name": "shop", "services": ["echo"]})["secret"]
    check(served, "errors", key)


def test_a_deadline_and_a_cancelled_call_reach_predict(served: LivePlatform, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    check(served, "ends", "", str(marks))
    wait_for(lambda: marks.exists() and len(marks.read_text().splitlines()) == 2, 20.0, "both calls to be cancelled")


def grpc_pids(live: LivePlatform) -> list[int]:
    """The gRPC processes among the platform's children."""
    children = Path(f"/proc/{live.process.pid}/task").glob("*/children")
    pids = [int(pid) for path in children for pid in path.read_text().split()]
    return [pid for pid in pids if b"springtide.service.grpc" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_killed_process_is_started_again_and_http_hears_nothing_of_it(served: LivePlatform) -> None:
    (pid,) = grpc_pids(served)
    os.kill(pid, signal.SIGKILL)
    for _ in range(20):
        assert served.request("POST", "/f/echo", {"numbers": [1.0]})["outputs"] == [2.0]
    wait_for(lambda: (found := grpc_pids(served)) != [] and found != [pid], 30.0, "another process")
    wait_for(lambda: answers(served), 30.0, "it to answer at the same address")
    assert "the gRPC process ended by signal 9 (SIGKILL)" in served.log()


def answers(live: LivePlatform) -> bool:
    try:
        check(live, "health")
    except AssertionError:
        return False
    return True


def test_the_process_ends_with_a_platform_that_is_killed(tmp_path: Path) -> None:
    with ended_after(LivePlatform(tmp_path / "state", slots=1)) as live:
        live.start(options=("--grpc-port", "0"))
        (pid,) = grpc_pids(live)
        live.kill()
        wait_for(lambda: not Path(f"/proc/{pid}").exists(), 20.0, "the gRPC process to end")


def test_a_port_that_is_taken_is_told_at_the_start(served: LivePlatform, tmp_path: Path) -> None:
    port = address_of(served).rpartition(":")[2]
    with ended_after(LivePlatform(tmp_path / "state", slots=1)) as live:
        live.start(options=("--grpc-port", port))
        assert live.process.wait(30.0) == 1
        assert f"port {port} of 127.0.0.1 cannot be used for gRPC" in live.log()
