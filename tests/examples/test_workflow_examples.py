"""The three workflows' examples without a platform: they import, what they declare fits, and their models learn."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from springtide.core.model import Model, call_factory
from springtide.storage.datasets.reference import DatasetReference

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    def loaded(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"workflow_{name}", EXAMPLES / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return loaded


def test_dynamic_batching_declares_its_schedule(load) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    module = load("dynamic_batching")
    task = module.dynamic_batching
    assert task.options.values["batch_schedule"] == module.SCHEDULE
    assert task.options.values["global_batch"] == module.SCHEDULE[0][1]
    assert all(epoch < task.options.values["epochs"] for epoch, _ in module.SCHEDULE)
    images, digits = module.load_images()
    torch.manual_seed(0)
    model = module.make_model()
    optimizer = module.make_optimizer(model.parameters())
    losses = []
    for step in range(30):
        part = slice(32 * step, 32 * step + 32)
        loss = task.loss(model(images[part]), digits[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])


def test_a_search_over_networks_builds_what_a_trial_suggests(load) -> None:
    pytest.importorskip("torch")
    optuna = pytest.importorskip("optuna")
    module = load("nas_optuna")
    small = {"width": "16", "depth": "1", "lr": "0.1"}
    large = {"width": "512", "depth": "3", "lr": "0.1"}
    sizes = []
    for params in (small, large, {}):
        model = call_factory(module.nas_optuna.model, params=params)
        sizes.append(sum(parameter.numel() for parameter in model.parameters()))
        optimizer = call_factory(module.nas_optuna.optimizer, model.parameters(), params=params)
        assert optimizer.param_groups[0]["lr"] == float(params.get("lr", "0.05"))
    assert sizes[0] < sizes[2] < sizes[1]
    found = optuna.trial.FixedTrial({"width": 16, "depth": 2, "lr": 0.01})
    assert module.search_space(found) == {"width": 16, "depth": 2, "lr": 0.01}


def test_online_learning_learns_from_bursts_without_torch(load) -> None:
    module = load("online_learning")
    task = module.online_learning
    assert isinstance(task.dataset, DatasetReference)
    assert task.dataset.is_stream
    assert task.loss is task.optimizer is None
    model = module.ClickModel()
    assert isinstance(model, Model)
    losses = []
    for seed in range(3):
        clicks = module.burst(seed)
        assert clicks["x"].shape == (module.BURST, module.NUM_FEATURES)
        for low in range(0, module.BURST, 100):
            loss, gradients = model.gradients(clicks["x"][low : low + 100], clicks["y"][low : low + 100])
            model.apply(gradients)
            losses.append(loss)
    assert np.mean(losses[-10:]) < 0.6 * np.mean(losses[:10])
    other = module.ClickModel()
    other.load(model.state())
    clicks = module.burst(9)
    assert other.gradients(clicks["x"], clicks["y"])[0] == model.gradients(clicks["x"], clicks["y"])[0]


def test_gradients_of_the_clicks_are_those_of_their_loss(load) -> None:
    module = load("online_learning")
    clicks = module.burst(1)
    model = module.ClickModel()
    model.weights = np.random.default_rng(0).normal(size=module.NUM_FEATURES)
    _, gradients = model.gradients(clicks["x"], clicks["y"])
    for index in (0, 5, 63):
        losses = []
        for change in (1e-5, -1e-5):
            moved = module.ClickModel()
            moved.weights = model.weights.copy()
            moved.weights[index] += change
            losses.append(moved.gradients(clicks["x"], clicks["y"])[0])
        assert gradients["weights"][index] == pytest.approx((losses[0] - losses[1]) / 2e-5, rel=1e-4)
