"""Shares of a real GPU on a real platform: torch is counted, held, kept within its memory. Skipped where there is none.

Until it has run on a device it proves nothing of one; what stands in for the device meanwhile is tests/end_to_end.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from kits.end_to_end import live_platform

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no CUDA device on this machine"),
]

SERVICE = """
import torch
class Matrix:
    def __init__(self):
        self.kept = []
        self.a = torch.randn(2048, 2048, device="cuda")
    def predict(self, orders: list[int]) -> list[float]:
        answers = []
        for order in orders:
            try:
                if order < 0:
                    self.kept.append(torch.empty(-order * 1_000_000, dtype=torch.uint8, device="cuda"))
                for _ in range(max(0, order)):
                    self.a @ self.a
                torch.cuda.synchronize()
                answers.append(0.0)
            except torch.OutOfMemoryError:
                answers.append(2.0)
        return answers
"""
JOB = """
import sys, time, torch
a = torch.randn(4096, 4096, device="cuda")
while True:
    for _ in range(8):
        a @ a
    torch.cuda.synchronize()
    with open(sys.argv[1], "a") as file:
        print(time.monotonic(), file=file)
"""


def test_torch_is_held_to_its_share_of_a_gpu(tmp_path: Path) -> None:
    live = live_platform.LivePlatform(tmp_path / "state", slots=1)
    live.start(policy="springtide")

    def tenant(name: str) -> dict[str, Any]:
        tenants = live.request("GET", "/v1/sharing")["tenants"]
        return next((each for each in tenants if each["workload_id"].split("-")[0] == name), {})

    try:
        log = tmp_path / "rounds"
        source = {"filename": "burn.py", "text": JOB, "kind": "script", "args": [str(log)]}
        share = {"request": 0.2, "limit": 0.4, "memory_mb": 4000}
        live.request(
            "POST", "/v1/jobs", {"name": "burn", "source": source, "options": {"max_workers": 1, "share": share}}
        )
        live_platform.wait_for(
            lambda: log.exists() and len(log.read_text().splitlines()) > 20, 180.0, "rounds of the job"
        )
        source = {"filename": "matrix.py", "text": SERVICE, "object_name": "Matrix", "kind": "class"}
        share = {"request": 0.3, "limit": 0.6, "memory_mb": 4000}
        options = {"min_replicas": 1, "max_replicas": 1, "share": share}
        live.request("PUT", "/v1/services/matrix", {"source": source, "options": options})

        def ask(order: int) -> list[float]:
            return list(live.request("POST", "/f/matrix", {"orders": [order]})["outputs"])

        assert ask(10) == [0.0]
        assert live.request("GET", "/v1/sharing")["mechanism"] == "cuda-preload"
        assert ask(-3000) == [0.0]
        assert ask(-3000) == [2.0]
        live_platform.wait_for(lambda: tenant("matrix").get("num_denied", 0) > 0, 60.0, "the refusal to be told")
        assert 3000 <= tenant("matrix")["memory_used_mb"] <= 4000
        assert tenant("matrix")["num_launches"] >= 10
        live_platform.wait_for(lambda: tenant("burn").get("throttled_s", 0.0) > 0.0, 60.0, "the job to be held back")
        assert tenant("burn")["used"] <= 0.4 * 1.25
    finally:
        live.stop()
