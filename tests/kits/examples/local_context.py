"""Examples loaded as modules, and a context that trains in this process."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"
torch = pytest.importorskip("torch")


class LocalContext:
    """Stands in for the platform's TrainContext: one worker, whole batches, a few steps. Tests only."""

    def __init__(self, max_steps: int, **params: str) -> None:
        self.params: Mapping[str, str] = params
        self.device = torch.device("cpu")
        self.max_steps = max_steps
        self.step_number = 0
        self.progress = 0.0
        self.epoch = 0
        self.losses: list[float] = []
        self.reported: dict[str, float] = {}
        self.saved: list[str] = []

    def prepare(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        self.model = model
        self.optimizer = optimizer(model.parameters())
        return model, self.optimizer

    def batches(self, dataset: Any) -> Iterator[Any]:
        from springtide.core.context import Batch

        x, y = dataset
        assert len(x) == len(y) > 0
        while self.step_number < self.max_steps:
            ids = tuple((self.step_number * 32 + index) % len(x) for index in range(32))
            chosen = torch.tensor(ids)
            self.epoch = self.step_number // 10
            yield Batch(x=x[chosen], y=y[chosen], ids=ids, epoch=self.epoch, step=self.step_number, shard=0)

    def step(self, loss: Any) -> None:
        assert loss.shape == ()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(float(loss.detach()))
        self.step_number += 1
        self.progress += 1.0

    def metrics(self, **values: float) -> None:
        self.reported.update(values)

    def save(self, name: str = "model") -> str:
        self.saved.append(name)
        return name


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    for example in EXAMPLES.glob("*.py"):
        monkeypatch.delitem(sys.modules, example.stem, raising=False)
    return importlib.import_module(name)


def fell(losses: list[float]) -> bool:
    quarter = max(1, len(losses) // 4)
    return sum(losses[-quarter:]) < 0.95 * sum(losses[:quarter])
