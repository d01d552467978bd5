"""A stage's state in the store: one frame of tensors, and then a record that makes it valid.

The frame has `model/NAME` for tensors in the user's state_dict, `rest/NAME` for non-persistent buffers,
`optimizer/NAME`, and `values`, the optimizer's plain values as JSON. A state saved under another plan is combined from
the frames of its stages, so that a job can change its plan.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from springtide.core.errors import CheckpointError, StorageError
from springtide.core.ports import Store
from springtide.core.wire.functions import Keys, StageState
from springtide.runtime.functions.pipeline.messages import frame_tensors, torch_tensors
from springtide.runtime.functions.saved_states import chain_of_metas, read_frame, read_meta, state_words, write_frame
from springtide.runtime.functions.step import Position
from springtide.runtime.models.layers import Stage
from springtide.runtime.models.packing import dtype_name, pack, unpack
from springtide.storage.frames import Frame, FrameTensor, encode

_CPU = torch.device("cpu")


@dataclass(slots=True)
class _Saved:
    """A saved state as read from the store: tensors by name, and the optimizer's values."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    optimizer: dict[str, torch.Tensor] = field(default_factory=dict)
    groups: Any = None
    states: dict[str, Any] = field(default_factory=dict)


class StageTraining:
    """A stage and its optimizer as tensors under the names of the user's model."""

    def __init__(self, stage: Stage, optimizer: torch.optim.Optimizer | None) -> None:
        self.stage = stage
        self.optimizer = optimizer
        first_names = {name: names[0] for name, names in stage.names.items()}
        # Tensors that are not in the user's state_dict keep their names in the stage, which contain the layer.
        self.parameters = {first_names.get(name, name): parameter for name, parameter in stage.named_parameters()}

    def update(self) -> None:
        """Take one step of the optimizer; does nothing for a stage without parameters."""
        if self.optimizer is not None:
            self.optimizer.step()

    def model_tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers: `model/` with the names in the user's state_dict, `rest/` with those in the stage."""
        found: dict[str, torch.Tensor] = {}
        for name, tensor in [*self.stage.named_parameters(), *self.stage.named_buffers()]:
            for key in self.keys_of(name):
                found[key] = tensor.detach()
        return found

    def keys_of(self, name: str) -> list[str]:
        """The keys in a frame of a tensor of the stage."""
        known = [f"model/{one}" for one in self.stage.names.get(name, ())]
        return known if name in self.stage.names else [f"rest/{name}"]

    def frame_tensors(self) -> dict[str, FrameTensor]:
        tensors: dict[str, torch.Tensor] = {}
        groups: list[Any] = []
        states: dict[str, Any] = {}
        if self.optimizer is not None:
            for index, group in enumerate(self.optimizer.param_groups):
                plain = {key: value for key, value in group.items() if key != "params"}
                groups.append(pack(plain, f"group.{index}", tensors))
            for name, parameter in self.parameters.items():
                state = self.optimizer.state.get(parameter)
                if state:
                    states[name] = pack(dict(state), f"state.{name}", tensors)
        text = json.dumps({"groups": groups, "states": states}).encode()
        values = FrameTensor("uint8", (len(text),), np.frombuffer(text, dtype=np.uint8))
        framed = {**frame_tensors(self.model_tensors(), ""), **frame_tensors(tensors, "optimizer/")}
        return {**framed, "values": values}

    def frame(self) -> bytes:
        return encode(self.frame_tensors())

    def take_frame(self, frame: Frame) -> None:
        """Restore the state in a frame. Raises CheckpointError if it does not fit; the model is then unchanged."""
        saved = _Saved()
        try:
            _add(saved, frame)
        except (StorageError, ValueError, KeyError) as error:
            raise CheckpointError(f"the saved state is malformed: {error}") from error
        self.take(saved)

    def take(self, saved: _Saved) -> None:
        """Restore a saved state. Raises CheckpointError if it does not fit; the model is then unchanged."""
        wanted = self.model_tensors()
        for name, tensor in wanted.items():
            found = saved.tensors.get(name)
            if found is None:
                raise CheckpointError(f"the saved state has no {name.partition('/')[2]!r}; it is of another model")
            if found.dtype != tensor.dtype or found.shape != tensor.shape:
                raise CheckpointError(
                    f"{name.partition('/')[2]!r} was saved as {dtype_name(found.dtype)} {list(found.shape)}, the "
                    f"model has {dtype_name(tensor.dtype)} {list(tensor.shape)}"
                )
        if self.optimizer is not None:
            self._take_optimizer(self.optimizer, saved)
        with torch.no_grad():
            for name, tensor in wanted.items():
                tensor.copy_(saved.tensors[name])

    def _take_optimizer(self, optimizer: torch.optim.Optimizer, saved: _Saved) -> None:
        live = optimizer.param_groups
        try:
            if saved.groups is None or len(saved.groups) != len(live):
                raise CheckpointError("the state was saved with an optimizer of other parameter groups")
            tensors: dict[str, torch.Tensor] = {}
            for group, packed in zip(live, saved.groups, strict=True):
                group.update(unpack(packed, {key: group[key] for key in group if key != "params"}, _CPU, tensors))
            optimizer.state.clear()
            for name, parameter in self.parameters.items():
                if name in saved.states:
                    optimizer.state[parameter] = unpack(saved.states[name], {}, _CPU, tensors)
            with torch.no_grad():
                for name, tensor in tensors.items():
                    tensor.copy_(saved.optimizer[name])
        except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"the saved state of the optimizer is malformed: {error!r}") from error


def save_state(store: Store, keys: Keys, stage: int, training: StageTraining, position: Position) -> StageState:
    """Write the state after `position.step` steps, and then its record. Raises StorageError."""
    layers = (training.stage.first_layer, training.stage.end_layer)
    return write_frame(store, keys, stage, layers, training.frame(), position)


def load_state(store: Store, keys: Keys, step: int, stage: int, training: StageTraining) -> Position:
    """Restore the state after `step` steps, saved under any plan, and return its position.

    Raises CheckpointError if it is missing, damaged or of another model; StorageError.
    """
    own = read_meta(store, keys, step, stage)
    first, end = training.stage.first_layer, training.stage.end_layer
    metas = [own] if own is not None and (own.first_layer, own.end_layer) == (first, end) else []
    if not metas:
        metas = [meta for meta in chain_of_metas(store, keys, step, end) if meta.end_layer > first]
    saved = _Saved()
    for meta in metas:
        _read_into(saved, store, meta)
    training.take(saved)
    return Position(step, metas[0].num_seen, metas[0].ids_digest if stage == 0 else "")


def take_stored(
    training: StageTraining,
    model: torch.nn.Module,
    values: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, torch.Tensor],
) -> None:
    """Restore what workers on machines have saved of `model`, of which `training` is a stage: a checkpoint's parts.

    There tensors have the names of the model's parameters and buffers, here those of its state_dict and its layers.
    Raises CheckpointError if it does not fit.
    """
    names = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    live = [*training.stage.named_parameters(), *training.stage.named_buffers()]
    saved = _Saved(optimizer=dict(optimizer))
    try:
        for name, tensor in live:
            for key in training.keys_of(name):
                saved.tensors[key] = tensors[names[id(tensor)]]
        own_names = {names[id(parameter)]: name for name, parameter in training.parameters.items()}
        saved.states = {own_names[name]: state for name, state in values["states"].items()}
        saved.groups = [{"$dict": [[key, value] for key, value in group.items()]} for group in values["groups"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"the checkpoint is of another model: {error!r}") from error
    training.take(saved)


def _read_into(saved: _Saved, store: Store, meta: StageState) -> None:
    frame = read_frame(store, meta)
    try:
        _add(saved, frame)
    except (StorageError, ValueError, KeyError) as error:
        raise CheckpointError(f"{state_words(meta)} is malformed: {error}") from error


def _add(saved: _Saved, frame: Frame) -> None:
    values = _values(frame)
    saved.tensors.update(
        {name: tensor for name, tensor in torch_tensors(frame, "").items() if name.startswith(("model/", "rest/"))}
    )
    saved.optimizer.update(torch_tensors(frame, "optimizer/"))
    # All stages' optimizers come from one factory, so their groups have the same hyperparameters.
    saved.groups = values.get("groups") or saved.groups
    saved.states.update(values.get("states", {}))


def _values(frame: Frame) -> Mapping[str, Any]:
    values = json.loads(bytes(frame.tensors["values"].data))
    if not isinstance(values, dict):
        raise ValueError("its values are no object")
    return values
