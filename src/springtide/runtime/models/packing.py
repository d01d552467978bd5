"""Nested values with tensors among them as JSON values and named tensors, and back."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import torch

from springtide.core.errors import InvalidRequest

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
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, list | tuple):
        key = "$list" if isinstance(value, list) else "$tuple"
        return {key: [pack(item, f"{name}.{index}", tensors) for index, item in enumerate(value)]}
    if isinstance(value, dict):
        return {"$dict": [[_key(key, name), pack(item, f"{name}.{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise InvalidRequest(
        f"the state of {name!r} is a {type(value).__name__}; only tensors, numbers, texts and lists and dicts of these "
        "can move to another worker"
    )


def _key(key: Any, name: str) -> str | int:
    if isinstance(key, str | int):
        return key
    raise InvalidRequest(f"the state of {name!r} has the key {key!r}; only texts and whole numbers can be keys")


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
        values = {key: unpack(item, old.get(key), device, tensors) for key, item in packed["$dict"]}
        if type(old) is dict:
            return values
        # A Counter or an OrderedDict stays one.
        kind = copy.copy(old)
        kind.clear()
        for key, item in values.items():
            kind[key] = item
        return kind
    if "$list" in packed or "$tuple" in packed:
        items: list[Packed] = packed["$list"] if "$list" in packed else packed["$tuple"]
        olds = live if isinstance(live, list | tuple) and len(live) == len(items) else [None] * len(items)
        parts = [unpack(item, old, device, tensors) for item, old in zip(items, olds, strict=True)]
        return parts if "$list" in packed else tuple(parts)
    dtype = getattr(torch, packed["dtype"])
    if not isinstance(live, torch.Tensor) or live.dtype != dtype or list(live.shape) != packed["shape"]:
        live = torch.empty(packed["shape"], dtype=dtype, device="cpu" if packed["device"] == "cpu" else device)
    tensors[packed["$tensor"]] = live
    return live
