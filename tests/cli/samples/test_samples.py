"""The samples that `springtide hello` runs."""

from __future__ import annotations

from typing import Any

import pytest

from springtide.cli.samples.serving import Greeter


def test_the_service_greets_each_name() -> None:
    assert Greeter.local().predict(["a", "b"]) == ["hello, a", "hello, b"]


class _Context:
    """One worker without a platform."""

    params = {"pause": "0"}

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.is_saved = False

    def prepare(self, model: Any, optimizer: Any) -> Any:
        self._optimizer = optimizer
        return model, optimizer

    def batches(self, dataset: Any) -> Any:
        import springtide as st

        x, y = dataset
        for step in range(60):
            ids = tuple(range(step * 32, step * 32 + 32))
            yield st.Batch(x=x[list(ids)], y=y[list(ids)], ids=ids, epoch=0, step=step, shard=0)

    def step(self, loss: Any) -> None:
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self.losses.append(float(loss.detach()))

    def save(self) -> None:
        self.is_saved = True


@pytest.mark.slow
def test_the_training_sample_learns() -> None:
    from springtide.cli.samples.training import fit

    context = _Context()
    fit(context)  # type: ignore[arg-type]
    assert sum(context.losses[-10:]) < 0.8 * sum(context.losses[:10])
    assert context.is_saved
