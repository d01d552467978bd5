"""Handwritten digits again, as a declared job: a list of layers that can be cut into a pipeline of functions.

springtide run examples/functions_digits.py                    on the machines of the cluster
springtide run examples/functions_digits.py --on functions     on functions (springtide up --functions emulator)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import springtide as st

NUM_TRAINING_IMAGES = 1500


def make_model() -> nn.Sequential:
    """Images of 8 x 8 grey values from 0 to 1, flat, to ten scores."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def load_images(first: int = 0, end: int = NUM_TRAINING_IMAGES) -> tuple[Tensor, Tensor]:
    """The images from `first` to `end`, shape (n, 64), and the digit that each one shows; in a fixed, mixed order."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))[first:end]
    return torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]


def make_optimizer(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)  # type: ignore[arg-type]


functions_digits = st.Task(
    model=make_model,
    dataset=load_images,
    loss=cross_entropy,
    optimizer=make_optimizer,
    name="functions-digits",
    global_batch=60,
    epochs=8,
)


def main() -> None:
    """Run as a program: how many of the images it has never seen the newest model names rightly."""
    from safetensors.torch import load_file

    model = make_model()
    model.load_state_dict(load_file(st.model_path("functions-digits")))
    images, labels = load_images(NUM_TRAINING_IMAGES, 1797)
    with torch.no_grad():
        score = float((model(images).argmax(dim=1) == labels).float().mean())
    print(f"accuracy on {len(labels)} images it has never seen: {score:.1%}")


if __name__ == "__main__":
    main()
