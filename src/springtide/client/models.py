"""`st.jax_model`: a model from JAX functions. Importing this needs no JAX; making the model does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from springtide.core.errors import InvalidRequest
from springtide.core.model import Model

__all__ = ["JaxModelFactory", "jax_model"]


class JaxModelFactory:
    """Makes the model of a JAX task, in whatever process needs it. Calling it raises InvalidRequest without JAX."""

    def __init__(
        self,
        init: Callable[..., Any],
        loss: Callable[[Any, Any, Any], Any],
        update: Any,
        *,
        start: Callable[[Any], Any] | None,
        resize: Callable[[Any, int], Any] | None,
    ) -> None:
        self.init = init
        self.loss = loss
        self.update = update
        self.start = start
        self.resize = resize
        # What the models of one process share once it is compiled, by what it is for.
        self.compiled: dict[str, Callable[..., Any]] = {}

    def __call__(self, params: Mapping[str, str]) -> Model:
        """The model with its first weights; `params` are the job's, for an `init` that names them."""
        try:
            from springtide.runtime.models.jax_model import JaxModel
        except ModuleNotFoundError as error:
            raise InvalidRequest(
                f"this model needs {error.name}, which is not installed where it runs: pip install 'springtide[jax]'"
            ) from None
        return JaxModel(self, params)


def jax_model(
    init: Callable[..., Any],
    loss: Callable[[Any, Any, Any], Any],
    update: Any,
    *,
    start: Callable[[Any], Any] | None = None,
    resize: Callable[[Any, int], Any] | None = None,
) -> JaxModelFactory:
    """A model from JAX functions, for `st.Task(model=st.jax_model(...), dataset=...)`.

    `init(key)` gives the weights: arrays in dicts, lists or tuples. `loss(weights, x, y)` is the mean loss over the
    samples. `update(weights, gradients, memory)` gives the next weights and memory; `start(weights)` makes the first
    memory (without it the memory is None). An object with `init` and `update` as Optax's optimizers have them may be
    handed over instead. `resize(weights, epoch)`, where there is one, gives the weights that an epoch begins with; the
    memory begins anew where their shapes have changed. Raises InvalidRequest for what is no function.
    """
    is_optimizer = callable(getattr(update, "init", None)) and callable(getattr(update, "update", None))
    for name, given in (("init", init), ("loss", loss), ("start", start), ("resize", resize)):
        if not callable(given) and (given is not None or name in {"init", "loss"}):
            raise InvalidRequest(f"st.jax_model needs {name} to be a function, not a {type(given).__name__}")
    if not callable(update) and not is_optimizer:
        raise InvalidRequest(
            "st.jax_model needs update(weights, gradients, memory) that gives the next weights and memory, or an "
            "optimizer with init and update"
        )
    if is_optimizer and start is not None:
        raise InvalidRequest("an optimizer makes its own first memory; st.jax_model takes `start` with a function only")
    return JaxModelFactory(init, loss, update, start=start, resize=resize)
