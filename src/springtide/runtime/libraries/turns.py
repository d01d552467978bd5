"""Programs that call their optimizers' steps themselves, of several optimizers or of one, as often as they like.

A backward pass leaves gradients of this worker's part of the batch. They are exchanged by optimizer, once it is to
update or its gradients are clipped: until then the program may add to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from springtide.runtime.libraries.loop import COMPUTED_AGAIN, Exchanged, LibraryLoop, NotDivisible


class StepAgain(BaseException):
    """Leaves a program's code in the midst of a step: a member was lost, and the step is to be done again.

    No Exception, so that the program does not take it for one of its own.
    """


class OptimizerTurns:
    """The turns that a program's optimizers take in its steps.

    For each step `begin_step`; around each backward pass `before_backward` and `after_backward`; `before_update` before
    an optimizer's update; `before_clip` before gradients are clipped.
    """

    def __init__(self, loop: LibraryLoop, optimizers: Sequence[torch.optim.Optimizer], backward: str) -> None:
        """`backward` is the call by which the program is to run its backward passes."""
        self._loop = loop
        self._changed = (
            f"come of loss.backward(): call {backward}, and change gradients by torch.nn.utils.clip_grad_norm_ alone"
        )
        self._optimizers = list(optimizers)
        self._parameters = [_parameters(optimizer) for optimizer in optimizers]
        # By place: whose gradients are of this worker's part alone; whose are exchanged and not yet used, with the
        # versions of their gradients before the present backward pass.
        self._own: set[int] = set()
        self._exchanged: dict[int, list[Any]] = {}
        # Who has updated since the last backward pass, and the versions of all gradients after it.
        self._updated: set[int] = set()
        self._seen: list[list[Any]] = []
        # A gradient that was there when the step began, and whether it was in the last backward pass.
        self._left: list[tuple[torch.Tensor, torch.Tensor] | None] = []
        self._is_carried = [False] * len(self._optimizers)
        # Whether an optimizer's step runs, and whether it has exchanged already.
        self._is_updating = self._is_decided = False
        self._places = {id(one): place for place, parameters in enumerate(self._parameters) for one in parameters}
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._before_step)
        # Also of those that another one has made for its parameters.
        register_optimizer_step_post_hook(self._after_update)

    def _before_step(self, optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
        self._is_updating, self._is_decided = True, False

    def _after_update(self, optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
        self._is_updating = False
        if any(self._places.get(id(one)) in self._own for one in _parameters(optimizer)):
            raise NotDivisible(
                "an optimizer has updated past the library, with gradients of one worker's part of the batch; call "
                "step() of the optimizer that the library has returned"
            )

    def begin_step(self) -> None:
        """A step begins: its first pass comes next."""
        self._own, self._exchanged, self._updated = set(), {}, set()
        self._is_updating = False
        self._is_carried = [False] * len(self._optimizers)
        self._left = [
            next(((one, one.grad) for one in parameters if one.grad is not None), None)
            for parameters in self._parameters
        ]

    def before_backward(self, number: int, loss: torch.Tensor, told: float) -> None:
        """A backward pass of `loss` comes, in pass `number` of the step; weights it by this worker's part.

        The loss of the step that is told is the sum of `told` times the loss over all backward passes.
        """
        if self._is_updating and self._is_decided:
            raise NotDivisible(COMPUTED_AGAIN)
        self._is_carried = [_is_there(left) for left in self._left]
        for place in list(self._exchanged):
            if _is_zeroed(self._parameters[place]):
                del self._exchanged[place]
            else:
                self._exchanged[place] = _versions(self._parameters[place])
        self._loop.weigh_turn(number, loss, told)

    def after_backward(self) -> None:
        """The backward pass is over. Raises InvalidRequest if it has added to gradients that were exchanged."""
        for place, versions in self._exchanged.items():
            if _versions(self._parameters[place]) != versions:
                raise NotDivisible(
                    "a backward pass adds to gradients that are clipped already; call the optimizer's step() after "
                    "clipping, before the next backward pass"
                )
        self._own = set(range(len(self._optimizers))) - self._exchanged.keys()
        self._updated = set()
        self._seen = [_versions(parameters) for parameters in self._parameters]

    def before_update(self, optimizer: Any) -> Exchanged:
        """The optimizer is to update: exchange its gradients, unless they are, or there are no new ones."""
        place = self._place(optimizer)
        if place is None or place in self._updated:
            return Exchanged.DONE
        self._updated.add(place)
        if self._exchanged.pop(place, None) is not None:
            return Exchanged.DONE
        if place in self._own:
            return self._exchange(place)
        if any(parameter.grad is not None for parameter in self._parameters[place]):
            raise NotDivisible(f"an optimizer's step() uses gradients that are not of this batch, or {self._changed}")
        return Exchanged.DONE

    def before_clip(self, parameters: Iterable[torch.Tensor]) -> Exchanged:
        """The gradients of these parameters are to be clipped: exchange those of their optimizers."""
        wanted = {id(parameter) for parameter in parameters}
        for place in sorted(self._own):
            if any(id(parameter) in wanted for parameter in self._parameters[place]):
                outcome = self._exchange(place)
                if outcome is not Exchanged.DONE:
                    return outcome
                self._exchanged[place] = []
        return Exchanged.DONE

    def _exchange(self, place: int) -> Exchanged:
        if self._is_carried[place]:
            raise NotDivisible(
                "an optimizer's step uses gradients of an earlier batch, after which another optimizer has updated; "
                "call zero_grad() before the backward pass, let all optimizers accumulate alike"
            )
        versions = _versions(self._parameters[place])
        if any(versions) and versions != self._seen[place]:
            raise NotDivisible(f"gradients were changed after their backward pass, or {self._changed}")
        self._own.discard(place)
        self._is_decided = True
        return self._loop.exchange_turn(place)

    def _place(self, optimizer: Any) -> int | None:
        inner = getattr(optimizer, "optimizer", optimizer)
        return next((place for place, one in enumerate(self._optimizers) if one is inner), None)


def watch_clipping(before_clip: Callable[[list[torch.Tensor]], None]) -> None:
    """Have `before_clip` called before torch's functions clip the gradients of parameters.

    Call it before the program is imported.
    """
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        clip = getattr(torch.nn.utils, name)
        watched = _after(before_clip, clip)
        for module in (torch.nn.utils, torch.nn.utils.clip_grad):
            setattr(module, name, watched)


def _after(before_clip: Callable[[list[torch.Tensor]], None], clip: Callable[..., Any]) -> Callable[..., Any]:
    def watched(parameters: Any, *arguments: Any, **keywords: Any) -> Any:
        found = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        before_clip(found)
        if all(one.grad is None for one in found) and clip.__name__ == "clip_grad_value_":
            # A step that is given up has none, and torch's function fails without one.
            return None
        return clip(found, *arguments, **keywords)

    return watched


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _is_there(left: tuple[torch.Tensor, torch.Tensor] | None) -> bool:
    """Whether a gradient of an earlier step was neither dropped nor set to zero."""
    return left is not None and left[0].grad is left[1] and bool(left[1].any())


def _is_zeroed(parameters: Sequence[torch.Tensor]) -> bool:
    found = next((one.grad for one in parameters if one.grad is not None), None)
    return found is None or not bool(found.any())


def _versions(parameters: Sequence[torch.Tensor]) -> list[Any]:
    return [None if one.grad is None else (id(one.grad), one.grad._version) for one in parameters]
