"""AmoebaNet-D with 18 and 36 normal cells and 256 filters, as sequences of cells that take two inputs and give two.

springtide profile examples/models/amoebanet.py:d18 --layers
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad, relu

import springtide as st

IMAGE_PIXELS = 224
# Pairs of operations whose results are added: (state, operation). States 0 and 1 are the cell's inputs (Real and
# others 2019, figure 7; which states a normal cell puts together is as in the authors' TensorFlow code).
NORMAL = [(1, "1x1"), (1, "max3"), (1, "none"), (0, "7x7"), (0, "1x1"), (0, "7x7"), (2, "max3"), (2, "none"),
          (1, "avg3"), (5, "1x1")]  # fmt: skip
REDUCTION = [(0, "max2"), (0, "max3"), (2, "none"), (1, "3x3"), (2, "7x7"), (2, "max3"), (3, "none"), (1, "max2"),
             (2, "avg3"), (3, "1x1")]  # fmt: skip
JOINED = {False: (0, 3, 4, 6), True: (4, 5, 6)}


class Conv(nn.Module):
    """ReLU, a convolution without bias, batch norm."""

    def __init__(self, inputs: int, outputs: int, size: tuple[int, int] = (1, 1), stride: int = 1) -> None:
        super().__init__()
        padding = (size[0] // 2, size[1] // 2)
        self.look = nn.Conv2d(inputs, outputs, size, stride, padding, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.look(relu(x)))


class Halve(nn.Module):
    """Half the width and height, from even and from odd places."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.even, self.odd = (nn.Conv2d(inputs, outputs // 2, 1, 2, bias=False) for _ in range(2))
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = relu(x)
        return self.norm(torch.cat([self.even(x), self.odd(pad(x[:, :, 1:, 1:], (0, 1, 0, 1)))], 1))


def operation(name: str, channels: int, stride: int) -> nn.Module:
    """One of the operations above on that many channels."""
    if name in ("max3", "max2", "avg3"):
        size = int(name[-1])
        pool = nn.MaxPool2d if name[:3] == "max" else partial(nn.AvgPool2d, count_include_pad=False)
        return pool(size, stride=stride, padding=size // 2 if size == 3 else 0)
    if name == "none":
        return nn.Identity() if stride == 1 else Halve(channels, channels)
    if name == "1x1":
        return Conv(channels, channels, stride=stride)
    narrow = channels // 4
    middle = [Conv(narrow, narrow, (3, 3), stride)]
    if name == "7x7":
        # A row, then a column.
        middle = [Conv(narrow, narrow, (1, 7)), Conv(narrow, narrow, (7, 1), stride)]
    return nn.Sequential(Conv(channels, narrow), *middle, Conv(narrow, channels))


class Cell(nn.Module):
    """Takes the outputs of the two cells before it and gives its own and that of the one before it."""

    def __init__(self, before: int, previous: int, channels: int, halves: bool, previous_halved: bool) -> None:
        super().__init__()
        self.enter, self.enter_before = Conv(previous, channels), nn.Identity()
        if previous_halved:
            self.enter_before = Halve(before, channels)
        elif before != channels:
            self.enter_before = Conv(before, channels)
        self.states, names = zip(*(REDUCTION if halves else NORMAL), strict=True)
        self.joined = JOINED[halves]
        strides = [2 if halves and state < 2 else 1 for state in self.states]
        self.operations = nn.ModuleList(map(operation, names, [channels] * len(names), strides))

    def forward(self, inputs: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        previous, before = inputs if isinstance(inputs, tuple) else (inputs, inputs)
        states = [self.enter(previous), self.enter_before(before)]
        for place in range(0, len(self.operations), 2):
            left, right = (self.operations[place + side](states[self.states[place + side]]) for side in range(2))
            states.append(left + right)
        return torch.cat([states[state] for state in self.joined], 1), previous


class Head(nn.Module):
    """From the last cell's maps to the scores of the classes."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.score = nn.Linear(channels, num_classes)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        return self.score(inputs[0].mean((2, 3)))


def amoebanet(num_cells: int, num_filters: int = 256, num_classes: int = 1000) -> nn.Sequential:
    """Images (n, 3, 224, 224) to scores (n, num_classes), in num_cells + 6 layers. `num_cells` is a multiple of 3."""
    channels = num_filters // 4
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, 2, padding=1, bias=False)]
    before = previous = channels
    previous_halved = False
    for halves in [True, True, *[False] * (num_cells // 3), *[True, *[False] * (num_cells // 3)] * 2]:
        channels *= 2 if halves else 1
        layers.append(Cell(before, previous, channels, halves, previous_halved))
        before, previous = previous, channels * len(JOINED[halves])
        previous_halved = halves
    return nn.Sequential(*layers, Head(previous, num_classes))


def images(num_images: int = 16) -> tuple[Tensor, Tensor]:
    """Random images and classes: what a step takes does not depend on what is in them."""
    generator = torch.Generator().manual_seed(1)
    pixels = torch.rand(num_images, 3, IMAGE_PIXELS, IMAGE_PIXELS, generator=generator)
    return pixels, torch.randint(1000, (num_images,), generator=generator)


def optimizer(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)  # type: ignore[arg-type]


d18 = st.Task(
    model=partial(amoebanet, 18), dataset=images, loss=cross_entropy, optimizer=optimizer, name="amoebanet-d18"
)
d36 = st.Task(
    model=partial(amoebanet, 36), dataset=images, loss=cross_entropy, optimizer=optimizer, name="amoebanet-d36"
)
