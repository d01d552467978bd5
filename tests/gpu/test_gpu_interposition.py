"""The interposition library with the real driver and the real runtime; skipped where there is no device.

The full plan (arms, pairs, loads, 20 pairs of overhead) is benchmarks/gpu_interposition.py; here it is run small, and
what must hold on any device is asserted. Bounds on time are asserted nowhere: the plan reports them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from springtide.backends.sharing.gpu.library import find_library, preload
from springtide.core.shares import Share
from springtide_studies.interposition.daemon import WHOLE, BenchTenant, RunningDaemon

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no CUDA device on this machine: nothing is shown"),
]

ROOT = Path(__file__).parents[2]
SECONDS = 4.0
# A program of torch that says which device it is on, waits to be told of its share, and does what it is told.
PROGRAM = """
import json, sys, time
import torch
device = torch.device("cuda:0")
x = torch.randn(2048, 2048, device=device)
torch.cuda.synchronize()
print(json.dumps({"uuid": str(torch.cuda.get_device_properties(device).uuid).replace("-", "")}), flush=True)
sys.stdin.readline()
def say(**answer):
    print(json.dumps(answer), flush=True)
"""
EAGER = """
for _ in range(1000):
    x = x @ x * 1e-3
torch.cuda.synchronize()
say(done=1000)
"""
GRAPH = """
y = x.clone()
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    y = x @ x
stream.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    for _ in range(10):
        y = x @ x * 1e-3
for _ in range(200):
    graph.replay()
torch.cuda.synchronize()
say(done=200)
"""
BUSY = """
began, done = time.monotonic(), 0
while time.monotonic() - began < %s:
    for _ in range(20):
        x = x @ x * 1e-3
    torch.cuda.synchronize()
    done += 20
say(per_s=done / (time.monotonic() - began))
"""
FILL = """
held, taken = [], 0
try:
    while True:
        held.append(torch.empty(64_000_000, dtype=torch.uint8, device=device))
        taken += 64_000_000
except torch.OutOfMemoryError:
    pass
free, total = torch.cuda.mem_get_info(device)
say(taken=taken, free=free, total=total)
"""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[RunningDaemon]:
    with RunningDaemon(tmp_path) as running:
        yield running


def held_run(daemon: RunningDaemon, text: str, share: Share = WHOLE) -> tuple[dict[str, Any], int]:
    """What the program says, and how many launches were counted."""
    around = {**os.environ, **preload(os.environ, find_library()), **daemon.environment(is_there=True)}
    command = [sys.executable, "-c", PROGRAM + textwrap.dedent(text)]
    with subprocess.Popen(command, env=around, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        uuid = json.loads(process.stdout.readline())["uuid"]
        daemon.grant({"held": BenchTenant(process.pid, uuid, share)})
        time.sleep(1.5)
        process.stdin.write("go\n")
        process.stdin.flush()
        answer: dict[str, Any] = json.loads(process.stdout.readline())
        return answer, daemon.num_launches("held")


@pytest.mark.parametrize(("text", "least"), [(EAGER, 1000), (GRAPH, 200)], ids=["eager", "graph"])
def test_launches_of_the_real_runtime_are_counted(daemon: RunningDaemon, text: str, least: int) -> None:
    answer, num_launches = held_run(daemon, text)
    assert answer["done"] == least
    assert num_launches >= least


def test_a_share_of_three_tenths_is_three_tenths(daemon: RunningDaemon) -> None:
    alone, _ = held_run(daemon, BUSY % SECONDS)
    held, _ = held_run(daemon, BUSY % SECONDS, Share(request=0.3, limit=0.3))
    assert 0.2 < held["per_s"] / alone["per_s"] < 0.4


def test_the_memory_limit_holds_and_is_what_the_program_sees(daemon: RunningDaemon) -> None:
    answer, _ = held_run(daemon, FILL, Share(request=1.0, limit=1.0, memory_mb=2048))
    assert answer["total"] <= 2_048_000_000
    assert 1_000_000_000 < answer["taken"] <= 2_048_000_000


def test_the_whole_plan_runs_small(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_interposition.py"), "--small", "--out", str(out)]
    subprocess.run(command, check=True)
    report = json.loads(out.read_text(encoding="utf-8"))
    assert not report["is_rehearsal"]
    ours = [arm for pair in report["pairs"] for arm in pair["arms"] if arm["arm"] == "ours"]
    assert ours
    assert all(arm["launches"] > 0 for arm in ours)
    assert report["overhead"]["num_launches"] > 0
    assert abs(report["memory_cap"]["error"]) < 0.05
