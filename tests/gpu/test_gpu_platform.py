"""The same platform on a machine with GPUs: devices are found, workers train on them. Skipped where there is none."""

from __future__ import annotations

import shutil

import pytest

from kits.end_to_end import live_platform

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no CUDA device on this machine"),
]

ON_DEVICE = """
import torch
def fit(ctx):
    torch.manual_seed(7)
    x, y = torch.randn(96, 6), torch.randn(96, 1)
    model, optimizer = ctx.prepare(torch.nn.Linear(6, 1), lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9))
    print("trains on", ctx.device, next(model.parameters()).device, flush=True)
    for batch in ctx.batches((x, y)):
        ctx.step(torch.nn.functional.mse_loss(model(batch.x.to(ctx.device)), batch.y.to(ctx.device)))
"""


def test_a_job_trains_on_every_gpu_there_is(tmp_path):
    live = live_platform.LivePlatform(tmp_path / "state", slots=None)
    live.start()
    try:
        devices = live.request("GET", "/v1/status")["devices"]
        assert {device["kind"] for device in devices} == {"gpu"}
        job_id = live.submit("on-device", text=ON_DEVICE, num_epochs=4, max_workers=len(devices), num_virtual_shards=8)
        assert live.wait_job(job_id)["state"] == "SUCCEEDED"
        logs = live.http.get(f"/v1/workloads/{job_id}/logs").text
        assert logs.count("trains on cuda") == len(devices)
        live_platform.assert_exactly_once(live.workload(job_id), num_samples=96, batch=16, num_epochs=4)
    finally:
        live.stop()
