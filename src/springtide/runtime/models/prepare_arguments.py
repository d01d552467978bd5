"""What `ctx.prepare` was called with: models, then their optimizers, then whatever else has a state."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel

from springtide.core.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Prepared:
    """The arguments, with optimizers and objects in the place of factories."""

    models: list[torch.nn.Module]
    optimizers: list[torch.optim.Optimizer]
    objects: list[Any]

    @property
    def model(self) -> torch.nn.Module:
        """The model, or a list of several: names of parameters then begin with the model's number."""
        return self.models[0] if len(self.models) == 1 else torch.nn.ModuleList(self.models)

    def has_stray_scheduler(self) -> bool:
        """Whether a scheduler of torch's sets the rates of an optimizer, and none that does was prepared."""
        scheduled = [
            optimizer for optimizer in self.optimizers if any("initial_lr" in group for group in optimizer.param_groups)
        ]
        known = [getattr(item, "optimizer", None) for item in self.objects]
        return any(not any(optimizer is other for other in known) for optimizer in scheduled)

    def has_stray_average(self) -> bool:
        """Whether there is an average of weights by torch's AveragedModel that was not prepared."""
        averages = [thing for thing in gc.get_objects() if issubclass(type(thing), AveragedModel)]
        return any(not any(one is item for item in [*self.models, *self.objects]) for one in averages)


def prepared_arguments(given: Sequence[Any], devices: Sequence[torch.device]) -> Prepared:
    """Sort the arguments, move models to the first device, and call factories. Raises InvalidRequest.

    A model of which a part is on one of the devices already stays where it is if there are several.
    """
    device = devices[0]
    left = list(given)
    models: list[torch.nn.Module] = []
    while left and isinstance(left[0], torch.nn.Module):
        model = left.pop(0)
        models.append(model if _is_placed(model, devices) else model.to(device))
    if not models:
        raise InvalidRequest(f"ctx.prepare() needs a torch.nn.Module, got {type(left[0]).__name__}")
    optimizers: list[torch.optim.Optimizer] = []
    while left and isinstance(left[0], torch.optim.Optimizer):
        optimizers.append(left.pop(0))
    if not optimizers:
        factories, left = left[: len(models)], left[len(models) :]
        if len(factories) < len(models):
            raise InvalidRequest(f"ctx.prepare() got {len(models)} models and no optimizer for each of them")
        optimizers = [_built(factory, model) for factory, model in zip(factories, models, strict=True)]
    return Prepared(models, optimizers, [_object(item, optimizers, device) for item in left])


def _is_placed(model: torch.nn.Module, devices: Sequence[torch.device]) -> bool:
    return len(devices) > 1 and any(parameter.device in devices for parameter in model.parameters())


def _built(factory: Callable[[Any], Any], model: torch.nn.Module) -> torch.optim.Optimizer:
    made = factory(model.parameters()) if callable(factory) else factory
    if not isinstance(made, torch.optim.Optimizer):
        raise InvalidRequest(f"ctx.prepare() needs a torch optimizer or a factory of one, got {type(made).__name__}")
    return made


def _object(given: Any, optimizers: Sequence[torch.optim.Optimizer], device: torch.device) -> Any:
    if type(given) is dict:
        return given
    is_factory = isinstance(given, type) or not hasattr(given, "state_dict")
    made = given(*optimizers) if is_factory and callable(given) else given
    if isinstance(made, torch.nn.Module):
        made.to(device)
    if isinstance(made, torch.optim.Optimizer):
        raise InvalidRequest("ctx.prepare() takes all optimizers right after the models; put this one there")
    if not callable(getattr(made, "state_dict", None)) or not callable(getattr(made, "load_state_dict", None)):
        raise InvalidRequest(
            f"ctx.prepare() got a {type(made).__name__} after the optimizer; give it state_dict() and "
            "load_state_dict(state), as schedulers have, or hand over a dict, so that its state can follow the training"
        )
    return made
