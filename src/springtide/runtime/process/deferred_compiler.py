"""A faster start: torch's optimizers import its compiler, 800 modules, only to keep it from tracing them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

# Where torch keeps the function that it calls in place of a wrapped one.
_KEPT = "__dynamo_disable"


def defer_compiler() -> None:
    """Let optimizers be made and used without importing torch's compiler, as long as nothing else has imported it.

    The first call of `Optimizer.add_param_group` or `step` imports `torch._dynamo` (torch 2.4 and newer): over a second
    of CPU time and 90 MB. Where nothing has imported it nothing can be traced, so both are called without it; from an
    import on torch's own way is taken, and `torch.compile` works as ever. What looks otherwise in another version of
    torch is left as it is.
    """
    for made in vars(torch.optim.Optimizer).values():
        if _comes_from(made, torch._compile._disable_dynamo, "inner") and not hasattr(made.__wrapped__, _KEPT):
            setattr(made.__wrapped__, _KEPT, functools.partial(_call_untraced, made, made.__wrapped__))
    for kind in vars(torch.optim).values():
        if isinstance(kind, type) and _comes_from(vars(kind).get("step"), torch.optim.Optimizer.__init__, "_use_grad"):
            kind.step = _step_untraced(kind.step)  # type: ignore[attr-defined]


def _comes_from(made: Any, neighbour: Any, name: str) -> bool:
    """Whether `made` is a function of this name from the file of `neighbour` that wraps another one."""
    if not all(hasattr(made, attribute) for attribute in ("__code__", "__wrapped__")):
        return False
    return (made.__code__.co_filename, made.__code__.co_name) == (neighbour.__code__.co_filename, name)


def _call_untraced(made: Any, wrapped: Any, *args: Any, **kwargs: Any) -> Any:
    if "torch._dynamo" not in sys.modules:
        return wrapped(*args, **kwargs)
    delattr(wrapped, _KEPT)
    return made(*args, **kwargs)


def _step_untraced(made: Any) -> Callable[..., Any]:
    @functools.wraps(made)
    def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" in sys.modules:
            return made(self, *args, **kwargs)
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return made.__wrapped__(self, *args, **kwargs)

    return step
