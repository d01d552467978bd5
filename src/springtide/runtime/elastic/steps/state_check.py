"""Whether all members of a group hold the same state: SPRINGTIDE_DEBUG_STATE=1 asks that at every change of it."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable

from springtide.core.errors import PeerLost
from springtide.runtime.elastic.group import Group, wait_for_keys
from springtide.runtime.models.named_tensors import TrainingState
from springtide.runtime.models.packing import as_bytes


def first_difference(group: Group, state: TrainingState, is_wanted: Callable[[], bool]) -> str:
    """The first tensor of the state in which a member differs from rank 0, with its rank; "" if none does.

    All members call this at the same step. Raises CollectiveError, also once `is_wanted` returns false.
    """
    packed, model_tensors, other_tensors = state.pack_all()
    tensors = {**model_tensors, **other_tensors}
    checksums = {name: zlib.crc32(as_bytes(tensor).cpu().numpy().data) for name, tensor in tensors.items()}
    checksums["hyperparameters"] = zlib.crc32(json.dumps(packed["groups"]).encode())
    keys = [f"checksums/{rank}" for rank in range(group.world_size)]
    try:
        group.store.set(keys[group.rank], json.dumps(checksums))
        wait_for_keys(group.store, keys, is_wanted)
        first, *others = (json.loads(group.store.get(key)) for key in keys)
    except RuntimeError as error:
        raise PeerLost(f"the meeting place is gone: {error}") from error
    for name in {**first, **{name: 0 for other in others for name in other}}:
        for rank, other in enumerate(others, 1):
            if other.get(name) != first.get(name):
                return f"{name} of rank {rank}"
    return ""
