"""Models of other frameworks in the examples: they learn, and are what functions take."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from springtide.runtime.profiling.task_profiler import profile_task

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
pytest.importorskip("sklearn")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "framework", "most"),
    [("numpy_softmax", "numpy", 0.3), pytest.param("jax_mlp", "jax", 0.9, marks=pytest.mark.slow)],
)
def test_it_learns_here_and_can_be_profiled_for_functions(
    name: str, framework: str, most: float, tmp_path: Path
) -> None:
    pytest.importorskip(framework)
    module = load(name)
    task = getattr(module, name)
    result = task.local(tmp_path, epochs=4)
    assert result.num_steps == 4 * 25
    assert result.loss < most
    taken = profile_task(task, name=name, micro_batch_size=30, memory_mb=512, num_rounds=1)
    assert taken.num_samples == module.NUM_TRAINING_IMAGES
    assert [layer.name for layer in taken.profile.layers] == ["model"]
