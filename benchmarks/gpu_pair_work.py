"""One tenant of benchmarks/gpu_interposition.py: a service or a training job on a device, in a process of its own.

It reads lines of JSON and answers each with one. The models have the shapes of the ones that they are named after, with
random weights: what they compute means nothing, how long it takes does.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

WARMING = 20


class Bottleneck(nn.Module):
    """The bottleneck block of ResNet-152: three convolutions and a residual around them."""

    def __init__(self, width: int, inner: int, out: int, stride: int) -> None:
        super().__init__()
        self.inside = nn.Sequential(
            *(nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU()),
            *(nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU()),
            *(nn.Conv2d(inner, out, 1, bias=False), nn.BatchNorm2d(out)),
        )
        self.around = nn.Identity() if width == out else nn.Conv2d(width, out, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The convolutions' output plus the residual."""
        return torch.relu(self.inside(x) + self.around(x))


def resnet(blocks: tuple[int, ...]) -> nn.Module:
    """A ResNet with these numbers of blocks in its four stages."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    width = 64
    for stage, num in enumerate(blocks):
        inner = 64 << stage
        for block in range(num):
            layers.append(Bottleneck(width, inner, 4 * inner, 2 if stage and not block else 1))
            width = 4 * inner
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000))


def encoder(layers: int, width: int, heads: int) -> nn.Module:
    """Layers of attention, of one width."""
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def build(name: str, batch: int) -> tuple[nn.Module, torch.Tensor]:
    """A model and an input for it."""
    if name == "resnet152":
        return resnet((3, 8, 36, 3)), torch.randn(batch, 3, 224, 224)
    if name == "bert-base":
        return encoder(12, 768, 12), torch.randn(batch, 128, 768)
    if name == "roberta-large":
        return encoder(24, 1024, 16), torch.randn(batch, 128, 1024)
    if name == "gpt2-large":
        return encoder(36, 1280, 20), torch.randn(batch, 256, 1280)
    if name == "llm-decode":  # one token of a batch through large matrices: bound by memory, hundreds of small kernels
        return encoder(32, 4096, 32), torch.randn(batch, 1, 4096)
    if name == "tiny":  # for a rehearsal without a device
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), torch.randn(batch, 64)
    raise ValueError(f"there is no model {name!r}")


class Tenant:
    """A model on a device, with one step of its work."""

    def __init__(self, order: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.device = torch.device(order["device"])
        self.is_serving = order["kind"] == "serve"
        self.batch = int(order["batch"])
        model, data = build(order["model"], self.batch)
        self.model, self.data = model.to(self.device), data.to(self.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        self.step: Callable[[], object] = self._serve if self.is_serving else self._train
        if self.is_serving:
            self.model.eval()
        for _ in range(WARMING):
            self.step()
        self.wait()
        if order.get("is_graph"):
            self.step = self._captured()

    def wait(self) -> None:
        """Wait until the device has finished all work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def run_for(self, seconds: float) -> dict[str, Any]:
        """Steps in a closed loop, each one waited for; returns how many were done in this time."""
        began_s, steps = time.monotonic(), 0
        while time.monotonic() - began_s < seconds:
            self.step()
            self.wait()
            steps += 1
        return {"steps": steps, "samples": steps * self.batch, "seconds": time.monotonic() - began_s}

    def serve(self, starts_at_s: float, moments: list[float]) -> dict[str, Any]:
        """Requests at these moments after the start; each one's latency counts from when it was due."""
        latencies = []
        for moment in moments:
            due_s = starts_at_s + moment
            time.sleep(max(0.0, due_s - time.monotonic()))
            self.step()
            self.wait()
            latencies.append(time.monotonic() - due_s)
        return {"latencies_s": latencies}

    def fill(self, piece_bytes: int) -> dict[str, Any]:
        """Take memory until there is no more of it."""
        held, taken = [], 0
        try:
            while True:
                held.append(torch.empty(piece_bytes, dtype=torch.uint8, device=self.device))
                taken += piece_bytes
        except torch.OutOfMemoryError:
            reserved = torch.cuda.memory_reserved(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        del held
        torch.cuda.empty_cache()
        return {"taken_bytes": taken, "reserved_bytes": reserved, "free_bytes": free, "total_bytes": total}

    def _serve(self) -> object:
        with torch.inference_mode():
            return self.model(self.data)

    def _train(self) -> object:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(self.data).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss

    def _captured(self) -> Callable[[], object]:
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(graph):
            self.model(self.data)
        return graph.replay


def answer(tenant: Tenant, order: dict[str, Any]) -> dict[str, Any]:
    """Carry out one order and return its answer. Raises ValueError for an unknown one."""
    if order["do"] == "run":
        return tenant.run_for(order["seconds"])
    if order["do"] == "serve":
        return tenant.serve(order["starts_at_s"], order["moments"])
    if order["do"] == "fill":
        return tenant.fill(order["piece_bytes"])
    raise ValueError(f"unknown order {order['do']!r}")


def main() -> None:
    """Be one tenant until the orders on standard input end."""
    tenant = Tenant(json.loads(sys.stdin.readline()))
    uuid = ""
    if tenant.device.type == "cuda":
        uuid = str(torch.cuda.get_device_properties(tenant.device).uuid).replace("-", "")
    print(json.dumps({"uuid": uuid}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(tenant, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
