"""The interface to a user's model in any framework: compute gradients, apply them, save and load the state.

A model with these four operations can train on functions. A NumPy class implements the methods itself, `st.jax_model`
builds them from JAX functions, and the platform wraps torch modules.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

# Entries of a state with this prefix belong to the optimizer: they are saved, but left out of the model's artifact.
OPTIMIZER_PREFIX = "optimizer/"
ONLY_ON_FUNCTIONS = (
    'a task whose model has its own gradients and update runs on functions (on="functions") or here (task.local()); '
    "machines train torch modules: st.Task(model=..., dataset=..., loss=..., optimizer=...)"
)


@runtime_checkable
class Model(Protocol):
    """A model with its optimizer, trained by gradients that are averaged over many workers.

    Arrays are numpy's, or anything that `numpy.asarray` accepts. The same calls must give the same state on every
    worker: start from fixed or seeded values (numpy's global generator is seeded by the job), and change the state
    only in `apply`, `load` and `begin_epoch`.

    An optional method `begin_epoch(epoch)` is called before the first step of each epoch, in order, starting at 0; the
    model may change its size there. After a restart it is called for each epoch up to the saved one before `load`.
    """

    def gradients(self, x: Any, y: Any) -> tuple[float, Mapping[str, Any]]:
        """The mean loss over these samples, and its gradients by name: floats, the same names and shapes each time.

        `x` and `y` are arrays with the samples along the first axis (`y` is None for a dataset without targets). The
        means of all parts of a batch are averaged, weighted by their sizes, and given to `apply`.
        """
        ...

    def apply(self, gradients: Mapping[str, Any]) -> None:
        """One step of the optimizer with the gradients of the whole batch; `gradients` are this model's to keep."""
        ...

    def state(self) -> Mapping[str, Any]:
        """Everything needed to resume training: weights by name, and the optimizer's state as `optimizer/NAME`."""
        ...

    def load(self, state: Mapping[str, Any]) -> None:
        """Replace the state by one of the same names and shapes; the arrays are this model's to keep."""
        ...


def is_model(found: Any) -> bool:
    """Whether `found` is a Model, as opposed to a class or function that builds one."""
    return not isinstance(found, type) and isinstance(found, Model)


def call_factory(factory: Callable[..., Any], *arguments: Any, params: Mapping[str, str]) -> Any:
    """Call a task's factory with `arguments`, and with the job's parameters if it has a parameter `params`."""
    try:
        # Only names beyond `arguments` count: an optimizer's first parameter `params` means the model's weights.
        names = list(inspect.signature(factory).parameters)[len(arguments) :]
    except (TypeError, ValueError):
        # Some built-in classes have no readable signature.
        names = []
    return factory(*arguments, params=params) if "params" in names else factory(*arguments)
