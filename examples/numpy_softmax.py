"""Handwritten digits in plain NumPy: softmax regression with momentum, as a model that has its own gradients.

python examples/numpy_softmax.py                                                    here, in this process
springtide run examples/numpy_softmax.py --on functions --deadline 10m --search     on functions, found by search
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

import springtide as st

NUM_TRAINING_IMAGES = 1500
NUM_PIXELS, NUM_DIGITS = 64, 10
Array = npt.NDArray[np.float32]


class Softmax:
    """Scores are linear in the pixels. What st.Model asks for is these four methods."""

    def __init__(self, params: Mapping[str, str] | None = None) -> None:
        self.rate = np.float32((params or {}).get("rate", 0.5))
        self.weights: Array = np.zeros((NUM_PIXELS, NUM_DIGITS), dtype=np.float32)
        self.biases: Array = np.zeros(NUM_DIGITS, dtype=np.float32)
        self.velocity: Array = np.zeros_like(self.weights)

    def gradients(self, x: Array, y: npt.NDArray[np.int64]) -> tuple[float, dict[str, Array]]:
        """The mean cross entropy over these images, and its gradients."""
        chances = self.chances(x)
        rows = np.arange(len(y))
        loss = -float(np.log(chances[rows, y] + 1e-12).mean())
        chances[rows, y] -= 1
        return loss, {"weights": x.T @ chances / np.float32(len(y)), "biases": chances.mean(axis=0)}

    def apply(self, gradients: Mapping[str, Array]) -> None:
        """Gradient descent with momentum."""
        self.velocity = np.float32(0.9) * self.velocity + gradients["weights"]
        self.weights = self.weights - self.rate * self.velocity
        self.biases = self.biases - self.rate * gradients["biases"]

    def state(self) -> dict[str, Array]:
        """Everything that is needed to go on from here."""
        return {"weights": self.weights, "biases": self.biases, "optimizer/velocity": self.velocity}

    def load(self, state: Mapping[str, Array]) -> None:
        """Go on from a saved state."""
        self.weights, self.biases = state["weights"], state["biases"]
        self.velocity = state["optimizer/velocity"]

    def chances(self, x: Array) -> Array:
        """What each image shows with which probability, shape (n, 10)."""
        scores = x @ self.weights + self.biases
        powers: Array = np.exp(scores - scores.max(axis=1, keepdims=True))
        powers /= powers.sum(axis=1, keepdims=True)
        return powers


def load_images(first: int = 0, end: int = NUM_TRAINING_IMAGES) -> tuple[Array, npt.NDArray[np.int64]]:
    """The images from `first` to `end`, shape (n, 64), and the digit that each one shows; in a fixed, mixed order."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(1).permutation(len(labels))[first:end]
    return (images[order] / 16).astype(np.float32), labels[order]


numpy_softmax = st.Task(model=Softmax, dataset=load_images, name="numpy-softmax", global_batch=60, epochs=12)


def main() -> None:
    """Run as a program: train here, and tell how many images it has never seen are named rightly."""
    from safetensors.numpy import load_file

    model = Softmax()
    trained = load_file(numpy_softmax.local().artifact_path)
    model.weights, model.biases = trained["weights"], trained["biases"]
    images, labels = load_images(NUM_TRAINING_IMAGES, 1797)
    score = float((model.chances(images).argmax(axis=1) == labels).mean())
    print(f"accuracy on {len(labels)} images it has never seen: {score:.1%}")


if __name__ == "__main__":
    main()
