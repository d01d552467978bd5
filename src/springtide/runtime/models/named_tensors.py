"""A model and its optimizer as named tensors and plain values, the form that checkpoints store and joiners receive."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from springtide.core.errors import CheckpointError, InvalidRequest
from springtide.runtime.models.packing import Packed, pack, unpack
from springtide.runtime.models.prepared_objects import PreparedObjects

_LARGEST_NUMBER = 1e38


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST_NUMBER


def _number_slots(groups: list[dict[str, Any]]) -> list[tuple[int, str, int | None]]:
    """The positions of numbers in parameter groups: group, key, and index within a tuple of numbers (else None)."""
    slots: list[tuple[int, str, int | None]] = []
    for index, group in enumerate(groups):
        for key in sorted(group):
            value = group[key]
            if isinstance(value, tuple):
                slots += [(index, key, item) for item in range(len(value)) if _is_number(value[item])]
            elif key != "params" and _is_number(value):
                slots.append((index, key, None))
    return slots


class TrainingState:
    """The whole state of a training, by name: parameters, buffers, the optimizer's, and that of prepared objects."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        device: torch.device,
        objects: Sequence[Any] = (),
    ) -> None:
        """`objects` are those prepared beside the model and its optimizers.

        Raises InvalidRequest if they cannot be, or if two optimizers have a parameter in common.
        """
        self.objects = PreparedObjects(objects, device)
        self.model = model
        self.optimizers = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
        self.device = device
        self.parameters: dict[str, torch.nn.Parameter] = dict(model.named_parameters())
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        self.optimised: list[str] = []
        # By name, the place of the optimizer that a parameter has.
        self.places: dict[str, int] = {}
        for place, optimizer in enumerate(self.optimizers):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    name = names.setdefault(id(parameter), f"extra.{len(self.optimised)}")
                    self.parameters.setdefault(name, parameter)
                    if self.places.setdefault(name, place) != place:
                        raise InvalidRequest(f"two optimizers have the parameter {name!r}; give it to one of them")
                    self.optimised.append(name)
        self._number_slots = _number_slots(self.groups)
        self._has_told_difference = False
        self._buffers = [
            (f"{prefix}.{name}" if prefix else name, module, name)
            for prefix, module in model.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def buffers(self) -> dict[str, torch.Tensor]:
        """The buffers as they are now: a forward pass may have replaced them."""
        found: dict[str, torch.Tensor] = {}
        for name, module, attribute in self._buffers:
            buffer = module._buffers[attribute]
            assert buffer is not None
            found[name] = buffer
        return found

    def replace_buffer(self, name: str, tensor: torch.Tensor) -> None:
        """Set a buffer by another tensor."""
        for known, module, attribute in self._buffers:
            if known == name:
                module._buffers[attribute] = tensor

    def model_tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers under the names of the model."""
        return {**{name: tensor.detach() for name, tensor in self.parameters.items()}, **self.buffers()}

    @property
    def num_numbers(self) -> int:
        """The length of `numbers()`. It stays the same even if a scheduler adds keys to the groups."""
        return len(self._number_slots)

    def numbers(self) -> list[float]:
        """The numbers in the parameter groups (learning rates, momenta, betas), in a fixed order."""
        values: list[float] = []
        groups = self.groups
        for index, key, item in self._number_slots:
            value: Any = groups[index].get(key)
            value = value[item] if item is not None and isinstance(value, tuple) else value
            values.append(float(value) if _is_number(value) else 0.0)
        return values

    def set_numbers(self, numbers: list[float]) -> None:
        """Set the numbers that rank 0 has. Values that are not plain numbers here stay unchanged.

        The log says once if this member had other ones: its code has set them on this worker alone.
        """
        groups = self.groups
        if not self._has_told_difference:
            self._tell_difference(numbers)
        for (index, key, item), number in zip(self._number_slots, numbers, strict=True):
            group = groups[index]
            value: Any = group.get(key)
            if item is None and _is_number(value):
                group[key] = type(value)(number)
            elif isinstance(value, tuple) and item is not None and _is_number(value[item]):
                group[key] = (*value[:item], type(value[item])(number), *value[item + 1 :])

    def _tell_difference(self, numbers: list[float]) -> None:
        for (_, key, _), own, number in zip(self._number_slots, self.numbers(), numbers, strict=True):
            if math.isfinite(own) and not math.isclose(own, number, rel_tol=1e-9):
                self._has_told_difference = True
                sys.stderr.write(
                    f"springtide: this worker's code has set {key}={own:.6g} in the optimizer, and that of the worker "
                    f"with rank 0 {number:.6g}, which counts; after a resize or a death this one's may count. Set it, "
                    "and step schedulers, by what is the same on every worker: ctx.step_number, batch.is_last, "
                    "ctx.loss, what ctx.evaluate returns, and objects and dicts handed to ctx.prepare\n"
                )
                return

    def update(self, learning_rate_factor: float = 1.0, places: Iterable[int] | None = None) -> None:
        """Take one step of the optimizers (None: of all) with learning rates multiplied by the factor during the step.

        The rates are restored afterwards, because schedulers compute the next rate from the one in the group.
        """
        for place in range(len(self.optimizers)) if places is None else places:
            self._step(self.optimizers[place], learning_rate_factor)

    def _step(self, optimizer: torch.optim.Optimizer, learning_rate_factor: float) -> None:
        if learning_rate_factor == 1.0:
            optimizer.step()
            return
        groups = optimizer.param_groups
        rates = [group.get("lr") for group in groups]
        try:
            for group, rate in zip(groups, rates, strict=True):
                if rate is not None:
                    group["lr"] = rate * learning_rate_factor
            optimizer.step()
        finally:
            for group, rate in zip(groups, rates, strict=True):
                if rate is not None:
                    group["lr"] = rate

    def pack_groups(self) -> tuple[Packed, dict[str, torch.Tensor]]:
        tensors: dict[str, torch.Tensor] = {}
        groups = [
            {key: pack(value, f"group.{index}.{key}", tensors) for key, value in group.items() if key != "params"}
            for index, group in enumerate(self.groups)
        ]
        return groups, tensors

    def unpack_groups(self, packed: Packed) -> dict[str, torch.Tensor]:
        """Set the hyperparameters; returns the tensors among them, to be filled by the caller."""
        tensors: dict[str, torch.Tensor] = {}
        live = self.groups
        if len(packed) != len(live):
            raise CheckpointError(f"the optimizer has {len(live)} parameter groups, the saved one {len(packed)}")
        for group, values in zip(live, packed, strict=True):
            for key, value in values.items():
                group[key] = unpack(value, group.get(key), self.device, tensors)
        return tensors

    def pack_optimizer(self, names: Iterable[str]) -> tuple[dict[str, Packed], dict[str, torch.Tensor]]:
        """The optimizer's state of the named parameters."""
        tensors: dict[str, torch.Tensor] = {}
        packed: dict[str, Packed] = {}
        for name in names:
            state = self._state_of(name).get(self.parameters[name])
            if state:
                packed[name] = pack(dict(state), f"state.{name}", tensors)
        return packed, tensors

    def unpack_optimizer(self, names: Iterable[str], packed: Mapping[str, Packed]) -> dict[str, torch.Tensor]:
        """Set the optimizer's state of the named parameters; returns its tensors, to be filled by the caller."""
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            parameter = self.parameters[name]
            if name in packed:
                live = dict(self._state_of(name).get(parameter, {}))
                self._state_of(name)[parameter] = unpack(packed[name], live, self.device, tensors)
            else:
                self._state_of(name).pop(parameter, None)
        return tensors

    def _state_of(self, name: str) -> dict[Any, Any]:
        return self.optimizers[self.places[name]].state

    def pack_all(self) -> tuple[dict[str, Packed], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The whole state: plain values, the model's tensors, those of the optimizer and of prepared objects."""
        groups, group_tensors = self.pack_groups()
        states, state_tensors = self.pack_optimizer(self.optimised)
        objects, object_tensors = self.objects.pack()
        packed = {"groups": groups, "states": states, "objects": objects}
        return packed, self.model_tensors(), {**group_tensors, **state_tensors, **object_tensors}

    def unpack_all(
        self, packed: Mapping[str, Packed]
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], Callable[[], None]]:
        """Set the plain values; returns the tensors as `pack_all` does, to be filled by the caller.

        The caller then calls the function that is returned, which hands prepared objects their state.
        """
        group_tensors = self.unpack_groups(packed["groups"])
        state_tensors = self.unpack_optimizer(self.optimised, packed["states"])
        # Checkpoints of earlier releases have no objects.
        object_tensors, load = self.objects.unpack(packed.get("objects", {}))
        return self.model_tensors(), {**group_tensors, **state_tensors, **object_tensors}, load

    def keep_controls(self, *, with_buffers: bool = False) -> Callable[[], None]:
        """Copy hyperparameters, prepared objects and, if asked to, buffers; returns what sets them again."""
        (groups, group_tensors), (objects, object_tensors) = self.pack_groups(), self.objects.pack()
        kept = {name: tensor.clone() for name, tensor in {**group_tensors, **object_tensors}.items()}
        buffers = {name: buffer.clone() for name, buffer in self.buffers().items()} if with_buffers else {}

        def restore() -> None:
            tensors, load = self.objects.unpack(objects)
            with torch.no_grad():
                for name, tensor in {**self.unpack_groups(groups), **tensors}.items():
                    tensor.copy_(kept[name])
                for name, buffer in self.buffers().items():
                    if name in buffers:
                        buffer.copy_(buffers[name])
            load()

        return restore
