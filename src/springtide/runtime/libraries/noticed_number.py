"""A number that notices whether it was used in a computation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def noticed(number: torch.Tensor) -> tuple[torch.Tensor, Callable[[], bool]]:
    """The number as a tensor that behaves like it, and whether anything was computed with it or read from it since."""
    is_used = False

    class Noticed(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal is_used
            is_used = True
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))

    return number.as_subclass(Noticed), lambda: is_used
