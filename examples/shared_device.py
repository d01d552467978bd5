r"""A service and a training job on one device: the service gets what it needs at once, training has the rest.

springtide up --slots 2
springtide deploy examples/shared_device.py:Scorer && springtide run examples/shared_device.py:fit --detach
springtide devices --watch

The service holds 0.3 of the device and may use up to 0.6 of it, the job 0.4 to 0.9. A client that sends requests
sees their latency hold; between them the job is granted what is unused. `python examples/shared_device.py` does both
here, without a platform.
"""

from __future__ import annotations

import torch
from torch import nn

import springtide as st

NUM_FEATURES = 32


def make_net() -> nn.Sequential:
    """A small network, the same for both."""
    return nn.Sequential(nn.Linear(NUM_FEATURES, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))


def make_data(num_samples: int = 4096) -> tuple[torch.Tensor, torch.Tensor]:
    """Points and a sum of waves over them, shapes (n, NUM_FEATURES) and (n, 1); the same at every call."""
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(num_samples, NUM_FEATURES, generator=generator)
    return x, torch.sin(4 * x).mean(dim=1, keepdim=True)


@st.train(share=(0.4, 0.9), global_batch=128, epochs=60, workers=1, name="waves")
def fit(ctx: st.TrainContext) -> None:
    """An ordinary training function: nothing in it knows of shares."""
    torch.manual_seed(3)
    model, _ = ctx.prepare(make_net(), lambda parameters: torch.optim.Adam(parameters, lr=0.003))
    for batch in ctx.batches(make_data()):
        ctx.step(nn.functional.mse_loss(model(batch.x), batch.y))


@st.serve(share=(0.3, 0.6), slo="p99 < 200ms", scale=(0, 1), name="scorer")
class Scorer:
    """List in, list out: rows of requests that arrive together are scored together."""

    def load(self) -> None:
        """Once for each replica, before it gets a request."""
        torch.manual_seed(3)
        self.net = make_net().eval()

    @torch.inference_mode()
    def predict(self, rows: list[list[float]]) -> list[float]:
        """The score of each row of NUM_FEATURES numbers."""
        return [float(score) for score in self.net(torch.tensor(rows))[:, 0]]


def main() -> None:
    """Both without a platform: one after the other, in this process, and neither is held to a share."""
    result = fit.local(epochs=5)
    print(f"trained to a loss of {result.loss:.4f}")
    print(f"a score: {Scorer.local().predict([[0.5] * NUM_FEATURES])[0]:.4f}")


if __name__ == "__main__":
    main()
