"""A model as a sequence of layers, and stages of consecutive layers with the names of the model's state_dict."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from springtide.core.errors import InvalidRequest
from springtide.core.functions import MAX_LAYERS


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: `module(x)` is the next layer's input. `name` is its prefix in the state_dict, or `layer<index>`."""

    name: str
    module: torch.nn.Module


class Stage(torch.nn.Module):
    """The layers from `first_layer` up to, not including, `end_layer`: the part of a model that one function holds.

    `names` maps each parameter and buffer of this module to its names in the user's state_dict: none for a
    non-persistent buffer, several for tied tensors.
    """

    def __init__(self, layers: Sequence[Layer], first_layer: int, end_layer: int) -> None:
        super().__init__()
        self.names: dict[str, list[str]] = {}
        self.first_layer = first_layer
        self.end_layer = end_layer
        self.layers = torch.nn.ModuleDict({str(index): layers[index].module for index in range(first_layer, end_layer)})

    def forward(self, x: Any) -> Any:
        for layer in self.layers.values():
            x = layer(x)
        return x

    @property
    def starts_in_place(self) -> bool:
        """Whether the first layer may modify its input in place, which autograd forbids for leaves."""
        first = self.layers[str(self.first_layer)]
        return any(getattr(module, "inplace", False) for module in first.modules())


def layers_of(model: torch.nn.Module) -> list[Layer]:
    """The layers whose composition is the model's forward, in order.

    Nested nn.Sequential modules are flattened; any other model lists its layers in a method `pipeline_layers()`. Raises
    InvalidRequest for a model with neither, or whose layers share parameters.
    """
    names = {id(module): name for name, module in model.named_modules()}
    declared = getattr(model, "pipeline_layers", None)
    if callable(declared):
        modules = _declared_layers(model, declared())
    elif is_plain_sequence(model):
        modules = list(_flattened(model))
    else:
        raise InvalidRequest(
            f"{type(model).__name__} cannot be cut into layers: make it an nn.Sequential, or give it a method "
            "pipeline_layers() that returns the list of modules whose composition is its forward"
        )
    if not modules:
        raise InvalidRequest(f"{type(model).__name__} has no layers; a model needs at least one")
    if len(modules) > MAX_LAYERS:
        raise InvalidRequest(f"the model has {len(modules)} layers; put some together, {MAX_LAYERS} are the most")
    layers = [Layer(names.get(id(module)) or f"layer{index}", module) for index, module in enumerate(modules)]
    _check_owners(model, layers)
    return layers


def build_stage(model: torch.nn.Module, layers: Sequence[Layer], first_layer: int, end_layer: int) -> Stage:
    """The stage of layers `first_layer` up to, not including, `end_layer`; `layers` are the model's `layers_of`.

    Raises InvalidRequest if there are fewer layers.
    """
    if not 0 <= first_layer < end_layer <= len(layers):
        raise InvalidRequest(
            f"the plan has a stage of layers {first_layer} to {end_layer}, but the model has {len(layers)}; "
            "profile the model again"
        )
    stage = Stage(layers, first_layer, end_layer)
    of_tensor: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor):
            of_tensor.setdefault(id(tensor), []).append(name)
    for name, tensor in _tensors(stage):
        found = of_tensor.get(id(tensor))
        if found:
            stage.names[name] = found
    return stage


def borders(value: Any, where: str) -> tuple[tuple[torch.Tensor, ...], bool]:
    """The tensors of a layer's output, and whether it was a tuple. Raises InvalidRequest for anything else."""
    if isinstance(value, torch.Tensor):
        return (value,), False
    if isinstance(value, tuple | list) and value and all(isinstance(item, torch.Tensor) for item in value):
        return tuple(value), True
    raise InvalidRequest(
        f"{where} gives a {type(value).__name__}; what travels between layers is a tensor or a tuple of tensors"
    )


def has_gradient(tensor: torch.Tensor) -> bool:
    """Whether a tensor of this dtype can have a gradient; integers (token ids) and booleans (masks) cannot."""
    return tensor.is_floating_point() or tensor.is_complex()


def is_plain_sequence(module: torch.nn.Module) -> bool:
    """Whether the module is an nn.Sequential whose forward is not overridden, so that its parts can replace it."""
    return isinstance(module, torch.nn.Sequential) and type(module).forward is torch.nn.Sequential.forward


def _flattened(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    # children() would skip a module that occurs twice.
    for module in model._modules.values():
        if module is not None and is_plain_sequence(module):
            yield from _flattened(module)
        elif module is not None:
            yield module


def _declared_layers(model: torch.nn.Module, declared: Any) -> list[torch.nn.Module]:
    if not isinstance(declared, Iterable):
        raise InvalidRequest(f"{type(model).__name__}.pipeline_layers() must return the list of its layers")
    modules = list(declared)
    for module in modules:
        if not isinstance(module, torch.nn.Module):
            raise InvalidRequest(
                f"{type(model).__name__}.pipeline_layers() has a {type(module).__name__} in its list; every layer is "
                "an nn.Module that is called with what the one before it gave"
            )
    return modules


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _check_owners(model: torch.nn.Module, layers: Sequence[Layer]) -> None:
    """Raise InvalidRequest unless every tensor of the model belongs to exactly one layer."""
    names = {id(tensor): name for name, tensor in _tensors(model)}
    owners: dict[int, int] = {}
    for index, layer in enumerate(layers):
        for name, tensor in _tensors(layer.module):
            before = owners.setdefault(id(tensor), index)
            if before != index:
                shared = names.get(id(tensor), name)
                raise InvalidRequest(
                    f"the layers {layers[before].name} and {layer.name} share {shared!r}; on functions every "
                    "tensor lives in one layer: give each layer its own, or put both into one layer"
                )
            if id(tensor) not in names:
                raise InvalidRequest(
                    f"the layer {layer.name} holds {name!r}, which the model itself does not; "
                    "make its layers in __init__ and keep them as attributes"
                )
    left_out = [name for key, name in names.items() if key not in owners]
    if left_out:
        raise InvalidRequest(
            f"{left_out[0]!r} is in none of the model's layers; put it into one of pipeline_layers(), "
            "whose composition must be the whole forward"
        )
