"""The model of a declared task: its value, or what its factory returns. This module imports no framework."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from springtide.core.errors import InvalidRequest
from springtide.core.model import Model, call_factory, is_model

# Package names of frameworks and the extras of springtide that install them.
_EXTRAS: Mapping[str, str] = MappingProxyType({"torch": "runtime", "jax": "jax", "jaxlib": "jax"})


def check_task(task: Any) -> None:
    """Raise InvalidRequest unless the object declares a model and a dataset."""
    if not all(hasattr(task, name) for name in ("model", "dataset")):
        raise InvalidRequest(
            "only a declared st.Task can run on functions: a training function's own loop cannot be shared among "
            "them; write st.Task(model=..., dataset=..., loss=..., optimizer=...), or st.Task(model=..., dataset=...) "
            "for a model that has gradients() and apply() itself"
        )


def model_of(task: Any, params: Mapping[str, str]) -> Model:
    """The task's model: a copy of its value, or the result of its factory.

    Raises InvalidRequest if it does not implement core.model.Model, and whatever the factory raises.
    """
    given: Any = task.model
    if is_model(given):
        handed_over: Model = copy.deepcopy(given)
        return handed_over
    # A torch module is callable too, but is not a factory.
    is_factory = callable(given) and (isinstance(given, type) or not hasattr(given, "forward"))
    made = call_factory(given, params=params) if is_factory else given
    if not is_model(made):
        missing = [name for name in ("gradients", "apply", "state", "load") if not callable(getattr(made, name, None))]
        raise InvalidRequest(
            f"the task's model is a {type(made).__name__} without {', '.join(missing)}(); a model has gradients(x, y), "
            "apply(gradients), state() and load(state), and a torch module comes with a loss and an optimizer: "
            "st.Task(model=..., dataset=..., loss=..., optimizer=...)"
        )
    found: Model = made
    return found


@contextmanager
def explain_missing_framework() -> Iterator[None]:
    """Turn the ImportError of a missing framework into an InvalidRequest that says how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in _EXTRAS:
            raise
        raise InvalidRequest(
            f"this model needs {name}, which is not installed where it runs: pip install 'springtide[{_EXTRAS[name]}]'"
        ) from error
