"""The models of Table 1 of FuncPipe: their parameters, and that small ones of the same make train layer by layer."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")

from springtide.runtime.models.layers import layers_of  # noqa: E402
from springtide.runtime.profiling.layer_profiler import profile_layers  # noqa: E402

MODELS = Path(__file__).parents[2] / "examples" / "models"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", MODELS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "build", "num_layers", "mib"),
    [
        ("resnet101", lambda module: module.resnet101(), 35, 170),
        ("amoebanet", lambda module: module.amoebanet(18), 24, 476),
        ("amoebanet", lambda module: module.amoebanet(36), 42, 900),
        ("bert_large", lambda module: module.bert_large(), 26, 1153),
    ],
)
def test_parameters_are_those_of_table_1(
    name: str, build: Callable[[ModuleType], torch.nn.Module], num_layers: int, mib: int
) -> None:
    # Without memory: the largest has more than a gigabyte of parameters.
    with torch.device("meta"):
        model = build(load(name))
    assert len(layers_of(model)) == num_layers
    assert sum(parameter.nbytes for parameter in model.parameters()) / (1 << 20) == pytest.approx(mib, rel=0.02)


def test_cells_of_two_inputs_train_layer_by_layer() -> None:
    module = load("amoebanet")
    model = module.amoebanet(3, num_filters=32, num_classes=5)
    x, y = torch.rand(2, 3, 64, 64), torch.tensor([1, 4])
    assert model(x).shape == (2, 5)
    profile = profile_layers(
        layers_of(model),
        x,
        y,
        torch.nn.functional.cross_entropy,
        name="small",
        micro_batch_size=2,
        num_rounds=1,
        memory_mb=1024,
    )
    assert len(profile.layers) == 9
    # A cell hands on its own output and that of the one before it, and takes the gradients of both.
    cell, following = profile.layers[3], profile.layers[4]
    assert following.gradient_bytes == cell.output_bytes > 0
    assert all(layer.parameter_bytes > 0 and layer.activation_bytes > 0 for layer in profile.layers)


@pytest.mark.slow
def test_shapes_of_the_other_two() -> None:
    resnet, bert = load("resnet101"), load("bert_large")
    with torch.device("meta"):
        assert resnet.resnet101(7)(torch.rand(2, 3, 224, 224)).shape == (2, 7)
    tokens, text = bert.masked_text(3)
    assert tokens.shape == text.shape == (3, bert.LENGTH)
    assert int(tokens.max()) == bert.MASK
    assert int(text.max()) < bert.MASK
    with torch.device("meta"):
        model = bert.bert_large()
        scores = model(torch.zeros(3, bert.LENGTH, dtype=torch.int64))
    assert scores.shape == (3, bert.LENGTH, bert.ALPHABET)
    assert bert.loss(torch.zeros(3, bert.LENGTH, bert.ALPHABET), text).item() == pytest.approx(5.549, abs=1e-3)
