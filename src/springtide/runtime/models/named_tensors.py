"""A model and its optimizer as named tensors and plain values, the form that checkpoints store and joiners receive."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from springtide.core.errors import CheckpointError, InvalidRequest

_LARGEST_NUMBER = 1e38
Packed = Any  # JSON values; tensors are {"$tensor": name, "dtype", "shape", "device"}.


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as a flat uint8 tensor, sharing memory where it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def pack(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Packed:
    """Encode a value as JSON values, adding its tensors to `tensors`. Raises InvalidRequest for other types."""
    if isinstance(value, torch.Tensor):
        tensors[name] = value.detach()
        device = "cpu" if value.device.type == "cpu" else "device"
        return {"$tensor": name, "dtype": dtype_name(value.dtype), "shape": list(value.shape), "device": device}
    if isinstance(value, list | tuple):
        key = "$list" if isinstance(value, list) else "$tuple"
        return {key: [pack(item, f"{name}.{index}", tensors) for index, item in enumerate(value)]}
    if isinstance(value, dict):
        return {"$dict": [[str(key), pack(item, f"{name}.{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise InvalidRequest(f"the optimizer holds a {type(value).__name__} in {name!r}; only tensors and numbers can move")


def unpack(packed: Packed, live: Any, device: torch.device, tensors: dict[str, torch.Tensor]) -> Any:
    """Decode a value of `pack`. Its tensors, to be filled by the caller, are put into `tensors`.

    A tensor of `live` is reused if dtype and shape fit, else a new one is made.
    """
    if not isinstance(packed, dict):
        return packed
    if "$float" in packed:
        return float(packed["$float"])
    if "$dict" in packed:
        old = live if isinstance(live, dict) else {}
        return {key: unpack(item, old.get(key), device, tensors) for key, item in packed["$dict"]}
    if "$list" in packed or "$tuple" in packed:
        items: list[Packed] = packed["$list"] if "$list" in packed else packed["$tuple"]
        olds = live if isinstance(live, list | tuple) and len(live) == len(items) else [None] * len(items)
        values = [unpack(item, old, device, tensors) for item, old in zip(items, olds, strict=True)]
        return values if "$list" in packed else tuple(values)
    dtype = getattr(torch, packed["dtype"])
    if not isinstance(live, torch.Tensor) or live.dtype != dtype or list(live.shape) != packed["shape"]:
        live = torch.empty(packed["shape"], dtype=dtype, device="cpu" if packed["device"] == "cpu" else device)
    tensors[packed["$tensor"]] = live
    return live


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
    """The whole state of a training: parameters, buffers, optimizer state and hyperparameters, by name."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.model = model
        self.optimizer = optimizer
        self.device = device
        self.parameters: dict[str, torch.nn.Parameter] = dict(model.named_parameters())
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        self.optimised: list[str] = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names.setdefault(id(parameter), f"extra.{len(self.optimised)}")
                self.parameters.setdefault(name, parameter)
                self.optimised.append(name)
        self._number_slots = _number_slots(optimizer.param_groups)
        self._buffers = [
            (f"{prefix}.{name}" if prefix else name, module, name)
            for prefix, module in model.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def buffers(self) -> dict[str, torch.Tensor]:
        """The buffers as they are now: a forward pass may have replaced them."""
        found: dict[str, torch.Tensor] = {}
        for name, module, attribute in self._buffers:
            buffer = module._buffers[attribute]
            assert buffer is not None
            found[name] = buffer
        return found

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
        for index, key, item in self._number_slots:
            value: Any = self.optimizer.param_groups[index].get(key)
            value = value[item] if item is not None and isinstance(value, tuple) else value
            values.append(float(value) if _is_number(value) else 0.0)
        return values

    def set_numbers(self, numbers: list[float]) -> None:
        """Set the numbers that another member returned. Values that are not plain numbers here stay unchanged."""
        for (index, key, item), number in zip(self._number_slots, numbers, strict=True):
            group = self.optimizer.param_groups[index]
            value: Any = group.get(key)
            if item is None and _is_number(value):
                group[key] = type(value)(number)
            elif isinstance(value, tuple) and item is not None and _is_number(value[item]):
                group[key] = (*value[:item], type(value[item])(number), *value[item + 1 :])

    def update(self, learning_rate_factor: float = 1.0) -> None:
        """Take one step of the optimizer with every learning rate multiplied by the factor during the step.

        The rates are restored afterwards, because schedulers compute the next rate from the one in the group.
        """
        if learning_rate_factor == 1.0:
            self.optimizer.step()
            return
        groups = self.optimizer.param_groups
        rates = [group.get("lr") for group in groups]
        try:
            for group, rate in zip(groups, rates, strict=True):
                if rate is not None:
                    group["lr"] = rate * learning_rate_factor
            self.optimizer.step()
        finally:
            for group, rate in zip(groups, rates, strict=True):
                if rate is not None:
                    group["lr"] = rate

    def pack_groups(self) -> tuple[Packed, dict[str, torch.Tensor]]:
        tensors: dict[str, torch.Tensor] = {}
        groups = [
            {key: pack(value, f"group.{index}.{key}", tensors) for key, value in group.items() if key != "params"}
            for index, group in enumerate(self.optimizer.param_groups)
        ]
        return groups, tensors

    def unpack_groups(self, packed: Packed) -> dict[str, torch.Tensor]:
        """Set the hyperparameters; returns the tensors among them, to be filled by the caller."""
        tensors: dict[str, torch.Tensor] = {}
        live = self.optimizer.param_groups
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
            state = self.optimizer.state.get(self.parameters[name])
            if state:
                packed[name] = pack(dict(state), f"state.{name}", tensors)
        return packed, tensors

    def unpack_optimizer(self, names: Iterable[str], packed: Mapping[str, Packed]) -> dict[str, torch.Tensor]:
        """Set the optimizer's state of the named parameters; returns its tensors, to be filled by the caller."""
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            parameter = self.parameters[name]
            if name in packed:
                live = dict(self.optimizer.state.get(parameter, {}))
                self.optimizer.state[parameter] = unpack(packed[name], live, self.device, tensors)
            else:
                self.optimizer.state.pop(parameter, None)
        return tensors

    def pack_all(self) -> tuple[dict[str, Packed], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The whole state: plain values, the model's tensors, the optimizer's tensors."""
        groups, group_tensors = self.pack_groups()
        states, state_tensors = self.pack_optimizer(self.optimised)
        return {"groups": groups, "states": states}, self.model_tensors(), {**group_tensors, **state_tensors}

    def unpack_all(self, packed: Mapping[str, Packed]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Set the plain values; returns the model's and the optimizer's tensors, to be filled by the caller."""
        group_tensors = self.unpack_groups(packed["groups"])
        state_tensors = self.unpack_optimizer(self.optimised, packed["states"])
        return self.model_tensors(), {**group_tensors, **state_tensors}
