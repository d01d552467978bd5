"""Online learning: clicks arrive in bursts for as long as they do; functions run while there is work, and idle is free.

springtide up --functions emulator
springtide data append clicks examples/online_learning.py:burst     a first burst
springtide run examples/online_learning.py --on functions           learns it, then waits without a function
springtide data append clicks examples/online_learning.py:burst     from another terminal: functions start again
springtide data close clicks                                        that was all: the job ends
python examples/online_learning.py                                  or a producer of six bursts, which closes the stream

The model is plain NumPy: whatever says what its gradients are can be trained on functions.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

import springtide as st

NUM_FEATURES = 64
BURST = 2000


class ClickModel:
    """Logistic regression with Adagrad: the chance that a visitor clicks, from what is known of them."""

    def __init__(self) -> None:
        self.weights = np.zeros(NUM_FEATURES)
        self.squares = np.full(NUM_FEATURES, 1e-3)

    def gradients(self, x: Any, y: Any) -> tuple[float, Mapping[str, Any]]:
        margin = np.where(np.asarray(y) > 0, 1.0, -1.0) * (np.asarray(x, dtype=np.float64) @ self.weights)
        slope = (np.asarray(y) > 0) - 1.0 / (1.0 + np.exp(-(np.asarray(x, dtype=np.float64) @ self.weights)))
        return float(np.logaddexp(0.0, -margin).mean()), {"weights": -(slope @ np.asarray(x)) / len(x)}

    def apply(self, gradients: Mapping[str, Any]) -> None:
        self.squares = self.squares + gradients["weights"] ** 2
        self.weights = self.weights - 0.3 * gradients["weights"] / np.sqrt(self.squares)

    def state(self) -> Mapping[str, Any]:
        return {"weights": self.weights, "optimizer/squares": self.squares}

    def load(self, state: Mapping[str, Any]) -> None:
        self.weights, self.squares = np.array(state["weights"]), np.array(state["optimizer/squares"])


online_learning = st.Task(
    model=ClickModel,
    dataset=st.stream("clicks"),
    name="online-learning",
    global_batch=100,
)


def burst(seed: int | None = None) -> dict[str, Any]:
    """So many people, what they are like and whether they clicked; others each time unless the seed is given."""
    drawn = np.random.default_rng(time.time_ns() if seed is None else seed)
    taste = np.random.default_rng(0).normal(size=NUM_FEATURES)
    x = drawn.normal(size=(BURST, NUM_FEATURES)).astype(np.float32)
    chance = 1.0 / (1.0 + np.exp(-(x @ taste)))
    return {"x": x, "y": (drawn.random(BURST) < chance).astype(np.int64)}


def main() -> None:
    """Run as a program: six bursts with a pause after each, then the end of the stream."""
    for number in range(6):
        status = st.append_dataset("clicks", burst(seed=number))
        print(f"burst {number + 1}: {status.num_samples} clicks so far")
        time.sleep(10.0)
    st.close_dataset("clicks")
    print("closed: the job learns the rest and ends")


if __name__ == "__main__":
    main()
