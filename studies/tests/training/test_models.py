"""The models of the bench of training steps: of the sizes that their names say, with batches cut over the ranks."""

from __future__ import annotations

import pytest
import torch

from springtide_studies.training.models import batches_of_rank, bench_model


@pytest.mark.parametrize(("name", "num_millions"), [("mlp", 9.5), ("cnn", 0.7), ("gpt", 10.0)])
def test_each_has_the_size_that_is_said(name: str, num_millions: float) -> None:
    with torch.device("meta"):
        model = bench_model(name).make()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert num_parameters / 1e6 == pytest.approx(num_millions, rel=0.06)


def test_ranks_share_the_batches_of_one() -> None:
    model = bench_model("mlp")
    whole = batches_of_rank(model, 0, 1)
    halves = [batches_of_rank(model, rank, 2) for rank in range(2)]
    for _ in range(20):
        x, y = next(whole)
        parts = [next(half) for half in halves]
        assert torch.equal(torch.cat([part[0] for part in parts]), x)
        assert torch.equal(torch.cat([part[1] for part in parts]), y)
