"""Objects that are prepared beside a model and its optimizer: schedulers, a GradScaler, an average of the weights.

Each has `state_dict` and `load_state_dict`, and what these give travels and is stored like the rest of the state. A
dict is its own state.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from springtide.core.errors import InvalidRequest
from springtide.runtime.models.packing import Packed, pack, unpack


class PreparedObjects:
    """The objects of one job, named by their place and type: the same names on every worker and in checkpoints."""

    def __init__(self, objects: Sequence[Any], device: torch.device) -> None:
        """Raises InvalidRequest for an object whose state cannot be moved."""
        self._device = device
        self._objects = {f"{place}.{type(item).__name__}": item for place, item in enumerate(objects)}
        if len({id(item) for item in objects}) < len(objects):
            raise InvalidRequest("ctx.prepare() got the same object twice; hand each over once")
        # Found here rather than when another worker joins, or in the first checkpoint.
        json.dumps(self.pack()[0])

    @property
    def scalers(self) -> list[torch.amp.GradScaler]:
        """The scalers of losses among the objects."""
        return [item for item in self._objects.values() if isinstance(item, torch.amp.GradScaler)]

    def pack(self) -> tuple[dict[str, Packed], dict[str, torch.Tensor]]:
        """The state of all objects: plain values by object, and tensors, which are not copied."""
        tensors: dict[str, torch.Tensor] = {}
        return {name: pack(_state_of(item), f"object.{name}", tensors) for name, item in self._objects.items()}, tensors

    def unpack(self, packed: Mapping[str, Packed]) -> tuple[dict[str, torch.Tensor], Callable[[], None]]:
        """The tensors of a packed state, to be filled by the caller, and what then hands the objects their state.

        Objects that it lacks keep the state they have. What is returned raises InvalidRequest if an object refuses.
        """
        tensors: dict[str, torch.Tensor] = {}
        states: dict[str, Any] = {}
        for name in sorted(packed.keys() ^ self._objects.keys()):
            place, _, kind = name.partition(".")
            lacks = "keeps its fresh state: the stored one has none for it"
            what = lacks if name in self._objects else "is not prepared, so its stored state is left out"
            sys.stderr.write(f"springtide: {kind}, object {place} {what}\n")
        for name, item in self._objects.items():
            if name in packed:
                states[name] = unpack(packed[name], _state_of(item), self._device, tensors)

        def load() -> None:
            for name, state in states.items():
                item = self._objects[name]
                if type(item) is dict:
                    item.clear()
                    item.update(state)
                    continue
                try:
                    item.load_state_dict(state)
                except Exception as error:
                    raise InvalidRequest(
                        f"{name.partition('.')[2]}.load_state_dict() refuses a state of its own kind: "
                        f"{type(error).__name__}: {error}"
                    ) from error

        return tensors, load


def _state_of(item: Any) -> Any:
    return item if type(item) is dict else item.state_dict()
