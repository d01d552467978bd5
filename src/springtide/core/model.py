"""The interface to a user's model, whatever framework it uses: a step in, gradients out, state in and out.

A model with these four operations trains on functions: a NumPy class has the methods itself, `st.jax_model` makes them
from JAX functions, and a torch module gets them from the platform.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

# A part of a state whose name begins so is the optimizer's: it is saved, but does not come into the model's file.
OPTIMIZER_PREFIX = "optimizer/"
ONLY_ON_FUNCTIONS = (
    'a task whose model has its own gradients and update runs on functions (on="functions") or here (task.local()); '
    "machines train torch modules: st.Task(model=..., dataset=..., loss=..., optimizer=...)"
)


@runtime_checkable
class Model(Protocol):
    """A model with its optimizer, trained by gradients that are averaged over many workers.

    Arrays are numpy's, or whatever `numpy.asarray` takes. On every worker the same calls must give the same state:
    begin from fixed or seeded values (numpy's global generator is seeded by the job), and let the state change in
    `apply`, `load` and `begin_epoch` alone.

    It may have a further method, `begin_epoch(epoch)`, called before the first step of each epoch, from 0, in order;
    the model may change its size there. After a restart it is called for each epoch up to the saved one before `load`.
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
        """All that has to be known to go on: weights by name, and what the optimizer holds as `optimizer/NAME`."""
        ...

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over a state of the same names and shapes; the arrays are this model's to keep."""
        ...


def is_model(found: Any) -> bool:
    """Whether it is a Model itself, and not a class or function that makes one."""
    return not isinstance(found, type) and isinstance(found, Model)


def called_with(factory: Callable[..., Any], *arguments: Any, params: Mapping[str, str]) -> Any:
    """What a task's factory makes of `arguments`: it gets the job's parameters if it names them `params`, besides."""
    try:
        # What an optimizer calls so, its first argument, is the model's parameters.
        names = list(inspect.signature(factory).parameters)[len(arguments) :]
    except (TypeError, ValueError):
        # Some built-in classes do not tell their signature.
        names = []
    return factory(*arguments, params=params) if "params" in names else factory(*arguments)
