"""Recognise handwritten digits: a small convolutional network on the images that scikit-learn brings along.

springtide run examples/digits.py --deadline 10m
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import springtide as st

NUM_TRAINING_IMAGES = 1500


class Net(nn.Sequential):
    """Images of 8 x 8 grey values from 0 to 1, flat or not, to ten scores."""

    def __init__(self) -> None:
        super().__init__(
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


def load_images() -> tuple[Tensor, Tensor]:
    """All 1797 images, shape (n, 64), and the digit that each one shows; in a fixed, mixed order."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    return torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The fraction of images that the model names rightly."""
    return float((model(images).argmax(dim=1) == labels).float().mean())


@st.train(deadline="10m", global_batch=64, epochs=60)
def digits(ctx: st.TrainContext) -> None:
    """Written for one device; the platform decides how many workers run it, and changes its mind while it runs."""
    images, labels = (part.to(ctx.device) for part in load_images())
    train, test = slice(NUM_TRAINING_IMAGES), slice(NUM_TRAINING_IMAGES, None)
    model, _ = ctx.prepare(Net(), lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9))
    epoch = ctx.epoch
    for batch in ctx.batches((images[train], labels[train])):
        if batch.epoch != epoch:
            epoch = batch.epoch
            ctx.metrics(accuracy=accuracy(model, images[test], labels[test]))
        ctx.step(cross_entropy(model(batch.x), batch.y))
    score = accuracy(model, images[test], labels[test])
    ctx.metrics(accuracy=score)
    print(f"accuracy on {len(labels[test])} images it has never seen: {score:.1%}")
    ctx.save()
