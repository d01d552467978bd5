"""ResNet101 as a sequence of layers: 44.5 million parameters (170 MiB), images of 224 x 224 in 1,000 classes.

springtide profile examples/models/resnet101.py --layers
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

import springtide as st

BLOCKS = (3, 4, 23, 3)
IMAGE_PIXELS = 224


def conv(inputs: int, outputs: int, size: int = 1, stride: int = 1) -> nn.Sequential:
    """A convolution without bias and its batch norm."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False), nn.BatchNorm2d(outputs)
    )


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around a residual (He and others 2016, figure 5)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.narrow, self.look, self.widen = conv(inputs, width), conv(width, width, 3, stride), conv(width, outputs)
        self.skip = nn.Identity() if inputs == outputs and stride == 1 else conv(inputs, outputs, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        y = relu(self.look(relu(self.narrow(x))))
        return relu(self.widen(y) + self.skip(x))


class Stem(nn.Module):
    """From the image to a quarter of its width and height."""

    def __init__(self) -> None:
        super().__init__()
        self.look, self.pool = conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(relu(self.look(x)))


class Head(nn.Module):
    """From the last maps to the scores of the classes."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.score = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.score(x.mean((2, 3)))


def resnet101(num_classes: int = 1000) -> nn.Sequential:
    """Images (n, 3, 224, 224) to scores (n, num_classes), in 35 layers."""
    layers: list[nn.Module] = [Stem()]
    channels = 64
    for place, repeats in enumerate(BLOCKS):
        width = 64 << place
        for index in range(repeats):
            layers.append(Bottleneck(channels, width, 2 if place > 0 and index == 0 else 1))
            channels = 4 * width
    return nn.Sequential(*layers, Head(channels, num_classes))


def images(num_images: int = 16) -> tuple[Tensor, Tensor]:
    """Random images and classes: what a step takes does not depend on what is in them."""
    generator = torch.Generator().manual_seed(1)
    pixels = torch.rand(num_images, 3, IMAGE_PIXELS, IMAGE_PIXELS, generator=generator)
    return pixels, torch.randint(1000, (num_images,), generator=generator)


task = st.Task(
    model=resnet101,
    dataset=images,
    loss=cross_entropy,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    name="resnet101",
    global_batch=16,
)
