"""The Model in a declared task: what was handed over, or what its factory makes. No framework is imported here."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from springtide.core.errors import InvalidRequest
from springtide.core.model import Model, call_factory, is_model

# How a framework is installed that a task wants and the place lacks.
_EXTRAS: Mapping[str, str] = MappingProxyType({"torch": "runtime", "jax": "jax", "jaxlib": "jax"})


def check_task(task: Any) -> None:
    """Raises InvalidRequest for what declares no model and dataset."""
    if not all(hasattr(task, name) for name in ("model", "dataset")):
        raise InvalidRequest(
            "only a declared st.Task can run on functions: a training function's own loop cannot be shared among "
            "them; write st.Task(model=..., dataset=..., loss=..., optimizer=...), or st.Task(model=..., dataset=...) "
            "for a model that has gradients() and apply() itself"
        )


def model_of(task: Any, params: Mapping[str, str]) -> Model:
    """The task's model, a copy of its own where it was handed over as a value.

    Raises InvalidRequest for what does not speak core.model.Model, and whatever its factory raises.
    """
    given: Any = task.model
    if is_model(given):
        handed_over: Model = copy.deepcopy(given)
        return handed_over
    # A torch module can be called, too, but is no factory.
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
def told_if_missing() -> Iterator[None]:
    """Inside, a framework that is not installed is said in one sentence: InvalidRequest with what would do."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in _EXTRAS:
            raise
        raise InvalidRequest(
            f"this model needs {name}, which is not installed where it runs: pip install 'springtide[{_EXTRAS[name]}]'"
        ) from error
