"""Moving a whole training state: within a group at a step boundary, and message by message over a socket."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch

from springtide.core.decoding import convert
from springtide.core.errors import PeerLost
from springtide.runtime.elastic.group import Group, wait_for_keys
from springtide.runtime.elastic.step_log import StepMemory
from springtide.runtime.elastic.training_cursor import Cursor
from springtide.runtime.models.named_tensors import TrainingState
from springtide.runtime.models.packing import as_bytes

_SMALL_BYTES = 1 << 20
_HEADER = struct.Struct(">II")
_MAX_HEADER_BYTES = 64 << 20


def synchronise(
    group: Group,
    state: TrainingState,
    step_log: StepMemory,
    cursor: Cursor | None,
    is_wanted: Callable[[], bool],
    restore: Callable[[], Cursor | None],
) -> tuple[Cursor, bool]:
    """Copy the state of the members with the highest position to all others, with the step log's last lines.

    `cursor` is this member's, None if it has no state. If no member has any, rank 0 calls `restore`. Returns the
    group's cursor, and whether the state was restored. Raises CollectiveError, also once `is_wanted` returns false.
    """
    claims: list[float] = [0 if cursor is None else cursor.position + 1]
    if group.world_size > 1:
        if cursor is not None:
            # Tells a joiner that waits for a catch-up stream that there will be none.
            group.set_flag("sync")
        group.use_store(lambda: group.store.set(f"claim/{group.rank}", str(claims[0])))
        keys = [f"claim/{rank}" for rank in range(group.world_size)]
        wait_for_keys(group.store, keys, is_wanted)
        claims = group.use_store(lambda: [float(group.store.get(key)) for key in keys])
    highest = max(claims)
    sources = [rank for rank, claim in enumerate(claims) if claim == highest] if highest else [0]
    now = cursor or Cursor()
    if not highest:
        if group.rank == 0:
            now = restore() or Cursor()
        if group.world_size > 1:
            if group.rank == 0:
                group.set_flag("restored")
            wait_for_keys(group.store, ["restored"], is_wanted)
    behind = [rank for rank in range(group.world_size) if rank not in sources]
    for index, rank in enumerate(behind):
        source = sources[index % len(sources)]
        if group.rank == source:
            send_state(group, state, now, rank, step_log)
        elif group.rank == rank:
            now = receive_state(group, state, source, step_log)
    return now, not highest


def send_state(group: Group, state: TrainingState, cursor: Cursor, rank: int, step_log: StepMemory) -> None:
    """Send the model, the optimizer, the cursor and the log's last lines to `rank`, which runs `receive_state`."""
    packed, model_tensors, optimizer_tensors = state.pack_all()
    plain = {"cursor": msgspec.to_builtins(cursor), "packed": packed, "steps": step_log.newest()}
    header = json.dumps(plain).encode()
    group.send(torch.tensor([len(header)], dtype=torch.int64, device=state.device), rank)
    group.send(torch.frombuffer(bytearray(header), dtype=torch.uint8).to(state.device), rank)
    small, large = _split(model_tensors, optimizer_tensors)
    if small:
        group.send(torch.cat([as_bytes(tensor).to(state.device) for tensor in small]), rank)
    for tensor in large:
        group.send(as_bytes(tensor), rank)


def receive_state(group: Group, state: TrainingState, rank: int, step_log: StepMemory) -> Cursor:
    """Receive the state that `rank` sends; returns its cursor."""
    length = torch.zeros(1, dtype=torch.int64, device=state.device)
    group.receive(length, rank)
    raw = torch.zeros(int(length), dtype=torch.uint8, device=state.device)
    group.receive(raw, rank)
    header = json.loads(bytes(raw.cpu().numpy()))
    *tensors, load_objects = state.unpack_all(header["packed"])
    small, large = _split(*tensors)
    with torch.no_grad():
        if small:
            blob = torch.empty(sum(_num_bytes(tensor) for tensor in small), dtype=torch.uint8, device=state.device)
            group.receive(blob, rank)
            at = 0
            for tensor in small:
                part = blob[at : at + _num_bytes(tensor)].clone()
                tensor.copy_(part.view(tensor.dtype).view(tensor.shape))
                at += _num_bytes(tensor)
        for tensor in large:
            if tensor.is_contiguous():
                group.receive(as_bytes(tensor), rank)
            else:
                landing = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
                group.receive(as_bytes(landing), rank)
                tensor.copy_(landing)
    load_objects()
    step_log.take_over(header["steps"])
    return convert(header["cursor"], Cursor)


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _split(
    model_tensors: Mapping[str, torch.Tensor], optimizer_tensors: Mapping[str, torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """All tensors in order of their names, the small ones (sent as one message) and the large ones.

    Sender and receiver have the same names, so no names are sent.
    """
    tensors = [tensor for mapping in (model_tensors, optimizer_tensors) for _, tensor in sorted(mapping.items())]
    tensors = [tensor for tensor in tensors if tensor.numel()]
    small = [tensor for tensor in tensors if _num_bytes(tensor) < _SMALL_BYTES]
    return small, [tensor for tensor in tensors if _num_bytes(tensor) >= _SMALL_BYTES]


def send_message(link: socket.socket, header: Mapping[str, Any], tensors: list[torch.Tensor]) -> None:
    """Write a JSON header and the tensors' bytes. Raises OSError."""
    raw = json.dumps(header).encode()
    link.sendall(_HEADER.pack(len(raw), len(tensors)) + raw)
    for tensor in tensors:
        if tensor.numel():
            link.sendall(as_bytes(tensor.cpu()).numpy().data)


def receive_header(link: socket.socket) -> dict[str, Any]:
    """Read the next header. Raises PeerLost at the end of the stream, OSError on a broken one."""
    length, _ = _HEADER.unpack(_receive_exactly(link, _HEADER.size))
    if length > _MAX_HEADER_BYTES:
        raise PeerLost(f"a message header of {length} bytes is over the limit")
    header = json.loads(_receive_exactly(link, length))
    assert isinstance(header, dict)
    return header


def receive_tensor(link: socket.socket, tensor: torch.Tensor) -> None:
    """Fill the tensor with the next bytes of the message."""
    if not tensor.numel():
        return
    in_place = tensor.is_contiguous() and tensor.device.type == "cpu"
    landing = tensor.detach() if in_place else torch.empty(tensor.shape, dtype=tensor.dtype)
    view = as_bytes(landing).numpy().data
    at = 0
    while at < len(view):
        count = link.recv_into(view[at:])
        if count == 0:
            raise PeerLost("the stream ended within a message")
        at += count
    if not in_place:
        with torch.no_grad():
            tensor.copy_(landing)


def _receive_exactly(link: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        part = link.recv(num_bytes - len(data))
        if not part:
            raise PeerLost("the stream ended")
        data += part
    return bytes(data)
