"""The handlers that every framework serves, one value a request, without batches. The file imports nothing of ours."""

from __future__ import annotations

from typing import Any


class Sums:
    """Adds up the numbers of a request: what is left is the cost of serving."""

    def load(self) -> None:
        """There is nothing to load."""

    def predict(self, values: list[float]) -> float:
        """The sum of the values."""
        return float(sum(values))


class Mlp:
    """A seeded MLP of 0.15 M parameters on one thread: 64 numbers in, one out."""

    net: Any

    def load(self) -> None:
        """Make the model, the same in each process."""
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(0)
        layers = [torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 512), torch.nn.ReLU()]
        self.net = torch.nn.Sequential(*layers, torch.nn.Linear(512, 1)).eval()

    def predict(self, values: list[float]) -> float:
        """The model's output for 64 values."""
        import torch

        with torch.inference_mode():
            return float(self.net(torch.tensor([values]))[0, 0])


HANDLERS = {"sums": Sums, "mlp": Mlp}
