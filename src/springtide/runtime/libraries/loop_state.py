"""What a loop of Accelerate knows beside weights and optimizer, and what moves to a worker that joins."""

from __future__ import annotations

import copy
import gc
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from springtide.runtime.libraries.loop import NotDivisible
from springtide.runtime.libraries.loop_variables import LoopVariables


class LoopState:
    """The place of the next step, schedulers, registered objects, and the plain variables around the loop."""

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[Any],
        variables: LoopVariables,
        accelerator: Any = None,
    ) -> None:
        """`schedulers` are those of torch, the same on all workers. `accelerator` is Accelerate's, if it is used."""
        self._accelerator = accelerator
        self._groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._schedulers = schedulers
        self._variables = variables
        # Where the next step begins: the number of the epoch, and of the batch in it.
        self.epoch = 0
        self.position = 0
        # A state that came before the loop was where it is to go on.
        self.loaded: dict[str, Any] | None = None

    @property
    def _objects(self) -> list[Any]:
        return self._accelerator._custom_objects if self._accelerator else []

    def read(self) -> dict[str, Any]:
        """Copies of all that is known now."""
        if self.loaded is not None:
            # It was handed on before the loop came to where it goes on.
            return self.loaded
        return {
            "epoch": self.epoch,
            "position": self.position,
            "num_saved": self._accelerator.project_configuration.iteration if self._accelerator else 0,
            "schedulers": [copy.deepcopy(scheduler.state_dict()) for scheduler in self._schedulers],
            "objects": [copy.deepcopy(thing.state_dict()) for thing in self._objects],
            "groups": [
                {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
                for group in self._groups
            ],
            "variables": self._variables.read(),
        }

    def take(self, state: dict[str, Any]) -> None:
        """Keep a state until `set_loaded`."""
        self.loaded = state

    def set_loaded(self) -> None:
        """Be as the state that was taken."""
        state, self.loaded = self.loaded, None
        if state is not None:
            self.set(state)

    def set(self, state: dict[str, Any]) -> None:
        """Be as a state of this loop or of another worker's; weights and the optimizer's moments are not in it."""
        # Copies, because what takes a state may keep parts of it.
        state = copy.deepcopy(state)
        if self._accelerator:
            self._accelerator.project_configuration.iteration = state["num_saved"]
        for scheduler, found in zip(self._schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(found)
        for thing, found in zip(self._objects, state["objects"], strict=True):
            thing.load_state_dict(found)
        for group, values in zip(self._groups, state["groups"], strict=True):
            group.update(values)
        self._variables.write(state["variables"])


def schedulers_of(prepared: Sequence[Any], optimizers: Sequence[Any], wrappers: Sequence[Any]) -> list[Any]:
    """The schedulers of these optimizers, those `prepared` first; a scheduler may have got an optimizer's wrapper.

    Raises InvalidRequest if their order is not known.
    """
    pairs = zip(optimizers, wrappers, strict=True)
    return [*prepared, *(one for pair in pairs for one in _unprepared(pair, prepared))]


def _unprepared(optimizer: tuple[Any, Any], prepared: Sequence[Any]) -> list[Any]:
    others = [
        thing
        for thing in gc.get_objects()
        # By its type: some objects compute what they say is their class.
        if issubclass(type(thing), LRScheduler)
        and any(getattr(thing, "optimizer", None) is one for one in optimizer)
        and not any(thing is one for one in prepared)
    ]
    inner = [part for one in [*prepared, *others] for part in getattr(one, "_schedulers", ())]
    outer = [one for one in others if not any(one is part for part in inner)]
    if len(outer) > 1:
        raise NotDivisible(
            "an optimizer has several schedulers that the library does not know in their order; join them by "
            "torch.optim.lr_scheduler.ChainedScheduler, pass them through accelerator.prepare()"
        )
    return outer
