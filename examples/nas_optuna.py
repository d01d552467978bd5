"""A search over networks: Optuna proposes widths and depths, each trial is a job on functions, all share one budget.

springtide up --functions emulator
springtide tune examples/nas_optuna.py --trials 10 --budget '$0.05' --parallel 2
python examples/nas_optuna.py                                                        the same, from Python

Trials warm-start each other: what one has shown of its functions is expected of the next, however large its network is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import springtide as st

if TYPE_CHECKING:
    from optuna import Trial

NUM_TRAINING_IMAGES = 1500


def search_space(trial: Trial) -> dict[str, int | float]:
    """What a trial may be; `springtide tune` looks for this name."""
    return {
        "width": trial.suggest_int("width", 16, 512, log=True),
        "depth": trial.suggest_int("depth", 1, 3),
        "lr": trial.suggest_float("lr", 0.005, 0.2, log=True),
    }


def make_model(params: Mapping[str, str]) -> nn.Sequential:
    """A network of the trial's width and depth. A factory with a parameter `params` gets those of its job."""
    width, depth = int(params.get("width", "64")), int(params.get("depth", "1"))
    layers: list[nn.Module] = [nn.Linear(64, width), nn.ReLU()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def load_images() -> tuple[Tensor, Tensor]:
    """Images of 8 x 8 grey values from 0 to 1, shape (n, 64), and the digits that they show; in a fixed order."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))[:NUM_TRAINING_IMAGES]
    return torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]


def make_optimizer(parameters: object, params: Mapping[str, str]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=float(params.get("lr", "0.05")), momentum=0.9)  # type: ignore[arg-type]


nas_optuna = st.Task(
    model=make_model,
    dataset=load_images,
    loss=cross_entropy,
    optimizer=make_optimizer,
    name="nas-optuna",
    global_batch=60,
    epochs=2,
)


def main() -> None:
    """Run as a program: ten trials for five cents."""
    study = st.tune(nas_optuna, trials=10, budget="$0.05", parallel=2, on_progress=print)
    for trial in study.trials:
        print(trial.number, trial.state, trial.params, trial.value, f"${trial.spent_usd:.5f}")
    best = study.best
    print(f"{study.reason}; spent ${study.spent_usd:.4f}; best: {None if best is None else best.params}")


if __name__ == "__main__":
    main()
