"""`st.jax_model`: a model made of JAX functions. JAX is imported only when the model is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from springtide.core.errors import InvalidRequest
from springtide.core.model import Model

__all__ = ["JaxModelFactory", "jax_model"]


class JaxModelFactory:
    """A factory of the model of a JAX task; `st.jax_model` makes it. Workers call it."""

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
        # Jitted functions by purpose, shared by all models of one process.
        self.compiled: dict[str, Callable[..., Any]] = {}

    def __call__(self, params: Mapping[str, str]) -> Model:
        """Make the model with initial weights; `params` are the job's, passed to an `init` that names them.

        Raises InvalidRequest if JAX is not installed.
        """
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
    """Make a model of JAX functions, for jobs on functions:

        task = st.Task(model=st.jax_model(init, loss, optax.adam(1e-3)), dataset=make_dataset)

    `init(key)` returns the weights as arrays in dicts, lists or tuples. `loss(weights, x, y)` returns the mean loss
    over the samples. `update(weights, gradients, memory)` returns the next weights and memory; `start(weights)` returns
    the first memory (default None). Instead of `update` an optimizer with Optax's `init` and `update` may be given.
    `resize(weights, epoch)` returns the weights with which an epoch starts; if it changes their shapes, the memory is
    made anew. Raises InvalidRequest if an argument is not a function.
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
