"""st.jax_model on the side of the user: nothing of JAX is needed until a model is made."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import springtide as st
from springtide.client.models import jax_model
from springtide.core.errors import InvalidRequest


def init(key: Any) -> Any:
    return [key]


def loss(weights: Any, x: Any, y: Any) -> Any:
    return 0.0


def update(weights: Any, gradients: Any, memory: Any) -> Any:
    return weights, memory


def test_it_is_declared_without_jax() -> None:
    program = (
        "import sys, springtide as st\n"
        "st.Task(model=st.jax_model(len, max, min), dataset=[1])\n"
        "print(sorted({'jax', 'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_where_jax_is_missing_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)
    monkeypatch.delitem(sys.modules, "springtide.runtime.models.jax_model", raising=False)
    with pytest.raises(InvalidRequest, match=r"needs jax, .* pip install 'springtide\[jax\]'"):
        jax_model(init, loss, update)({})


def test_what_are_no_functions_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="needs init to be a function, not a int"):
        jax_model(3, loss, update)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="needs resize to be a function"):
        jax_model(init, loss, update, resize=3)  # type: ignore[arg-type]

    class Optimizer:
        def init(self, weights: Any) -> None: ...

        def update(self, gradients: Any, memory: Any, weights: Any) -> None: ...

    with pytest.raises(InvalidRequest, match="makes its own first memory"):
        jax_model(init, loss, Optimizer(), start=init)


def test_machines_refuse_what_only_functions_can_train() -> None:
    from springtide.runtime.process.entry import run_task

    class Context:
        params: dict[str, str] = {}

    own = st.Task(model=jax_model(init, loss, update), dataset=[1])
    assert own.brings_update
    with pytest.raises(InvalidRequest, match=r'runs on functions \(on="functions"\)'):
        run_task(own, Context())
    with pytest.raises(InvalidRequest, match=r'runs on functions \(on="functions"\)'):
        own.check_place(own.options)
    own.check_place(own.options.override({"on": "functions"}))
    torch = pytest.importorskip("torch")

    class Growing(torch.nn.Linear):  # type: ignore[misc]
        def begin_epoch(self, epoch: int) -> None: ...

    growing = st.Task(model=lambda: Growing(1, 1), dataset=[1], loss=loss, optimizer=list)
    with pytest.raises(InvalidRequest, match="Growing has begin_epoch"):
        run_task(growing, Context())
