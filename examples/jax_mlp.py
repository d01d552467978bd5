"""Handwritten digits in JAX: a network of two layers and Adam, written as functions (pip install 'springtide[jax]').

python examples/jax_mlp.py                                                  here, in this process
springtide run examples/jax_mlp.py --on functions --budget 0.05 --search    on functions, found by search
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

import springtide as st

NUM_TRAINING_IMAGES = 1500
RATE, KEPT_MEAN, KEPT_SQUARE = 3e-3, 0.9, 0.999


def init(key: Any, params: Mapping[str, str]) -> dict[str, Any]:
    """The first weights; `--param width=128` makes the hidden layer wider."""
    width = int(params.get("width", 64))
    one, two = jax.random.split(key)
    return {
        "hidden": {"w": jax.random.normal(one, (64, width)) / 8, "b": jnp.zeros(width)},
        "out": {"w": jax.random.normal(two, (width, 10)) / width**0.5, "b": jnp.zeros(10)},
    }


def scores(weights: Any, x: Any) -> Any:
    """Of each of the ten digits, shape (n, 10)."""
    hidden = jax.nn.relu(x @ weights["hidden"]["w"] + weights["hidden"]["b"])
    return hidden @ weights["out"]["w"] + weights["out"]["b"]


def loss(weights: Any, x: Any, y: Any) -> Any:
    """The mean cross entropy."""
    return -jnp.mean(jax.nn.log_softmax(scores(weights, x))[jnp.arange(len(y)), y])


def start(weights: Any) -> dict[str, Any]:
    """Adam's memory: steps, and running means of gradients and of their squares."""
    zeros = jax.tree.map(jnp.zeros_like, weights)
    return {"step": jnp.zeros(()), "mean": zeros, "square": zeros}


def update(weights: Any, gradients: Any, memory: Any) -> tuple[Any, Any]:
    """One step of Adam (Kingma and Ba, 2015, algorithm 1)."""
    step = memory["step"] + 1
    mean = jax.tree.map(lambda old, g: KEPT_MEAN * old + (1 - KEPT_MEAN) * g, memory["mean"], gradients)
    square = jax.tree.map(lambda old, g: KEPT_SQUARE * old + (1 - KEPT_SQUARE) * g**2, memory["square"], gradients)

    def moved(weight: Any, mean: Any, square: Any) -> Any:
        return weight - RATE * (mean / (1 - KEPT_MEAN**step)) / (jnp.sqrt(square / (1 - KEPT_SQUARE**step)) + 1e-8)

    return jax.tree.map(moved, weights, mean, square), {"step": step, "mean": mean, "square": square}


def load_images(first: int = 0, end: int = NUM_TRAINING_IMAGES) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """The images from `first` to `end`, shape (n, 64), and the digit that each one shows; in a fixed, mixed order."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(1).permutation(len(labels))[first:end]
    return (images[order] / 16).astype(np.float32), labels[order]


jax_mlp = st.Task(
    model=st.jax_model(init, loss, update, start=start),
    dataset=load_images,
    name="jax-mlp",
    global_batch=60,
    epochs=8,
)


def main() -> None:
    """Run as a program: train here, and tell how many images it has never seen are named rightly."""
    from safetensors.numpy import load_file

    trained = load_file(jax_mlp.local().artifact_path)
    weights = {layer: {part: trained[f"{layer}/{part}"] for part in ("w", "b")} for layer in ("hidden", "out")}
    images, labels = load_images(NUM_TRAINING_IMAGES, 1797)
    score = float((scores(weights, images).argmax(axis=1) == labels).mean())
    print(f"accuracy on {len(labels)} images it has never seen: {score:.1%}")


if __name__ == "__main__":
    main()
