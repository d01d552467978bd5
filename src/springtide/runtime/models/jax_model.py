"""Adapts JAX functions to core.model.Model: weights are a tree of arrays, gradients come from a jitted loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import numpy as np
from jax import tree_util

from springtide.core.errors import CheckpointError, InvalidRequest
from springtide.core.model import OPTIMIZER_PREFIX, call_factory


class JaxParts(Protocol):
    """The user's functions; see client.models.jax_model."""

    init: Callable[..., Any]
    loss: Callable[[Any, Any, Any], Any]
    update: Any
    start: Callable[[Any], Any] | None
    resize: Callable[[Any, int], Any] | None
    compiled: dict[str, Callable[..., Any]]


class JaxModel:
    """Implements core.model.Model. The initial weights are drawn with a key from numpy's global generator.

    Weights are named by their paths in the tree, like `layers/0/w`; the optimizer's memory is saved leaf by leaf.
    """

    def __init__(self, parts: JaxParts, params: Mapping[str, str]) -> None:
        self._parts = parts
        optimizer = parts.update
        self._is_optimizer = callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))
        if not parts.compiled:
            parts.compiled.update(step=jax.jit(jax.value_and_grad(parts.loss)), update=jax.jit(self._updated))
        self._step, self._update = parts.compiled["step"], parts.compiled["update"]
        key = jax.random.key(int(np.random.randint(2**31)))  # noqa: NPY002 - the job's seed is in this generator.
        self._begin(call_factory(parts.init, key, params=params))

    def _begin(self, weights: Any) -> None:
        self.weights = weights
        names = [_name(path) for path, _ in tree_util.tree_flatten_with_path(weights)[0]]
        if not names or len(set(names)) < len(names):
            raise InvalidRequest("init(key) must give at least one array, and each in a place with a name of its own")
        if any(name.startswith(OPTIMIZER_PREFIX) for name in names):
            raise InvalidRequest("no weights may be called 'optimizer': what the optimizer holds is saved under that")
        self._names = names
        start = self._parts.update.init if self._is_optimizer else self._parts.start
        self.memory = start(weights) if start is not None else None

    def _updated(self, weights: Any, gradients: Any, memory: Any) -> Any:
        if not self._is_optimizer:
            return self._parts.update(weights, gradients, memory)
        changes, memory = self._parts.update.update(gradients, memory, weights)
        return tree_util.tree_map(lambda weight, change: weight + change, weights, changes), memory

    def begin_epoch(self, epoch: int) -> None:
        """Let `resize` set the weights that the epoch starts with; new shapes also reset the optimizer's memory."""
        if self._parts.resize is None:
            return
        before = _shapes(self.weights)
        weights = self._parts.resize(self.weights, epoch)
        if _shapes(weights) != before:
            self._begin(weights)
        else:
            self.weights = weights

    def gradients(self, x: Any, y: Any) -> tuple[float, Mapping[str, Any]]:
        """The mean loss over these samples, and its gradients."""
        loss, gradients = self._step(self.weights, x, y)
        leaves = tree_util.tree_leaves(gradients)
        return float(loss), {name: np.asarray(leaf) for name, leaf in zip(self._names, leaves, strict=True)}

    def apply(self, gradients: Mapping[str, Any]) -> None:
        """Take one step of the optimizer. Raises InvalidRequest if `update` does not return weights and memory."""
        tree = _with_leaves(self.weights, [gradients[name] for name in self._names])
        updated = self._update(self.weights, tree, self.memory)
        if not (isinstance(updated, tuple) and len(updated) == 2):
            raise InvalidRequest("update(weights, gradients, memory) must give two: the next weights and memory")
        self.weights, self.memory = updated

    def state(self) -> Mapping[str, Any]:
        """Weights by path, and the leaves of the optimizer's memory by index."""
        weights = zip(self._names, tree_util.tree_leaves(self.weights), strict=True)
        memory = enumerate(tree_util.tree_leaves(self.memory))
        return {
            **{name: np.asarray(leaf) for name, leaf in weights},
            **{f"{OPTIMIZER_PREFIX}{index}": np.asarray(leaf) for index, leaf in memory},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state. Raises CheckpointError if it was saved with another optimizer."""
        num_leaves = len(tree_util.tree_leaves(self.memory))
        names = [f"{OPTIMIZER_PREFIX}{index}" for index in range(num_leaves)]
        if sum(name.startswith(OPTIMIZER_PREFIX) for name in state) != num_leaves:
            raise CheckpointError("the state was saved with another optimizer")
        self.weights = _with_leaves(self.weights, [state[name] for name in self._names])
        self.memory = _with_leaves(self.memory, [state[name] for name in names])


def _with_leaves(tree: Any, leaves: list[Any]) -> Any:
    """A tree of the same structure with these leaves, each cast to the dtype of the one that it replaces."""
    olds, structure = tree_util.tree_flatten(tree)
    # jax.numpy.asarray gives plain numbers the dtype that JAX computes with.
    dtypes = [jax.numpy.asarray(old).dtype for old in olds]
    news = [jax.numpy.asarray(np.asarray(new).astype(dtype)) for dtype, new in zip(dtypes, leaves, strict=True)]
    return tree_util.tree_unflatten(structure, news)


def _name(path: tuple[Any, ...]) -> str:
    return tree_util.keystr(path, simple=True, separator="/") or "weights"


def _shapes(tree: Any) -> list[tuple[str, tuple[int, ...]]]:
    return [(_name(path), np.shape(leaf)) for path, leaf in tree_util.tree_flatten_with_path(tree)[0]]
