"""Dynamic batching: small batches while the model learns fast, large ones later; functions follow the batch.

springtide run examples/dynamic_batching.py --on functions --deadline 3m     (springtide up --functions emulator)

Every sample of every epoch is used once, whatever the batch. What a step costs changes with its batch, so the platform
looks for another number of functions and another memory as soon as it does, and moves there while the job runs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import springtide as st

NUM_TRAINING_IMAGES = 1500
# From this epoch on, so many samples a step.
SCHEDULE = [(0, 32), (2, 96), (4, 288)]


def make_model() -> nn.Sequential:
    """Images of 8 x 8 grey values from 0 to 1, flat, to ten scores."""
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def load_images(first: int = 0, end: int = NUM_TRAINING_IMAGES) -> tuple[Tensor, Tensor]:
    """The images from `first` to `end`, shape (n, 64), and the digit that each one shows; in a fixed, mixed order."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))[first:end]
    return torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]


def make_optimizer(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)  # type: ignore[arg-type]


dynamic_batching = st.Task(
    model=make_model,
    dataset=load_images,
    loss=cross_entropy,
    optimizer=make_optimizer,
    name="dynamic-batching",
    global_batch=SCHEDULE[0][1],
    batch_schedule=SCHEDULE,
    epochs=8,
)


def main() -> None:
    """Run as a program: how many of the images it has never seen the newest model names rightly."""
    from safetensors.torch import load_file

    model = make_model()
    model.load_state_dict(load_file(st.model_path("dynamic-batching")))
    images, labels = load_images(NUM_TRAINING_IMAGES, 1797)
    with torch.no_grad():
        score = float((model(images).argmax(dim=1) == labels).float().mean())
    print(f"accuracy on {len(labels)} images it has never seen: {score:.1%}")


if __name__ == "__main__":
    main()
