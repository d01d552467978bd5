"""A stage's state in the store: a frame of tensors, and then a record that makes it valid.

The replicas take turns to write a state; functions that start an attempt read it. This module imports no framework.
"""

from __future__ import annotations

import hashlib

import msgspec

from springtide.core.decoding import decode_json
from springtide.core.errors import CheckpointError, ObjectMissing, StorageError
from springtide.core.functions import MAX_LAYERS
from springtide.core.ports import Store
from springtide.core.wire.functions import MAX_RECORD_BYTES, Keys, StageState
from springtide.runtime.functions.step import Position
from springtide.storage.frames import Frame, decode


def write_frame(
    store: Store, keys: Keys, stage: int, layers: tuple[int, int], data: bytes, position: Position
) -> StageState:
    """Write a stage's frame after `position.step` steps, and then its record. `layers` is (first, end).

    Raises StorageError.
    """
    key = keys.state(position.step, stage)
    meta = StageState(
        stage=stage,
        step=position.step,
        num_seen=position.num_seen,
        key=key,
        num_bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        first_layer=layers[0],
        end_layer=layers[1],
        ids_digest=position.ids_digest,
    )
    store.put(key, data)
    store.put(keys.state_meta(position.step, stage), msgspec.json.encode(meta))
    return meta


def read_meta(store: Store, keys: Keys, step: int, stage: int) -> StageState | None:
    """The record of a stage's state, None if there is none. Raises CheckpointError, StorageError."""
    try:
        data = store.get(keys.state_meta(step, stage))
    except ObjectMissing:
        return None
    try:
        if len(data) > MAX_RECORD_BYTES:
            raise ValueError(f"{len(data)} bytes")
        meta = decode_json(data, StageState)
    except (msgspec.MsgspecError, ValueError) as error:
        raise CheckpointError(f"the record of stage {stage}'s state after step {step} is unreadable: {error}") from None
    if meta.stage != stage or meta.step != step or meta.key != keys.state(step, stage):
        raise CheckpointError(f"the record of stage {stage}'s state after step {step} is another's")
    return meta


def chain_of_metas(store: Store, keys: Keys, step: int, end_layer: int) -> list[StageState]:
    """The records of consecutive stages up to `end_layer`. Raises CheckpointError if one is missing; StorageError."""
    metas: list[StageState] = []
    covered = 0
    while covered < end_layer and len(metas) < MAX_LAYERS:
        meta = read_meta(store, keys, step, len(metas))
        if meta is None:
            raise CheckpointError(f"the state after step {step} lacks stage {len(metas)}; an older one has to do")
        if meta.first_layer != covered or meta.end_layer <= covered:
            raise CheckpointError(f"the state after step {step} is of stages that do not follow each other")
        covered = meta.end_layer
        metas.append(meta)
    return metas


def state_words(meta: StageState) -> str:
    return f"the state of stage {meta.stage} after step {meta.step}"


def read_frame(store: Store, meta: StageState) -> Frame:
    """The frame of a record, checked against its digest. Raises CheckpointError, StorageError."""
    where = state_words(meta)
    try:
        data = store.get(meta.key)
    except ObjectMissing:
        raise CheckpointError(f"{where} has a record but no tensors") from None
    if len(data) != meta.num_bytes or hashlib.sha256(data).hexdigest() != meta.sha256:
        raise CheckpointError(f"{where} is torn: its bytes are not those that were written")
    try:
        return decode(data)
    except StorageError as error:
        raise CheckpointError(f"{where} is malformed: {error}") from error
