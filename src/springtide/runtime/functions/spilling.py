"""Building a model that is larger than the function's memory: finished modules are moved to memory-mapped files.

A function needs only one stage of the model, but the user's code builds all of it, and the same initial weights require
all random draws in order. So each module moves to files as soon as the next one registers its first tensor.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from springtide.core.errors import StorageError
from springtide.core.functions import MIB
from springtide.storage.files import make_private, open_private

# Memory of a process that has imported torch; the rest of a function's memory is for the job.
BASE_BYTES = 400 * MIB
# The part of that rest that may hold finished modules; the stage's gradients and optimizer state come later.
_KEPT_FRACTION = 0.25
_LEAST_KEPT_BYTES = 16 * MIB
_SMALLEST_BYTES = 64 * 1024
# glibc keeps freed large blocks, fragmented by small ones; blocks from this size on are returned to the system at once.
_M_MMAP_THRESHOLD = -3
_GOES_BACK_BYTES = 256 * 1024
_USUAL_BYTES = 32 * MIB


def kept_bytes(memory_mb: int) -> int:
    """The bytes of a model that may stay in memory while it is built, for a function of `memory_mb`."""
    return max(_LEAST_KEPT_BYTES, int(_KEPT_FRACTION * (memory_mb * MIB - BASE_BYTES)))


@contextmanager
def spilled(folder: Path, keep_bytes: int) -> Iterator[None]:
    """Move tensors of finished modules beyond `keep_bytes` into files under `folder` while models are built inside.

    The tensors keep their identity and values and can be read and written; `bring_back` loads a module's into memory.
    The folder may be deleted once its tensors are brought back or not needed. Raises StorageError if a file cannot be
    written.
    """
    spill = _Spill(folder, keep_bytes)
    handles = [
        register_module_parameter_registration_hook(spill.take),
        register_module_buffer_registration_hook(spill.take),
    ]
    _return_blocks_from(_GOES_BACK_BYTES)
    try:
        yield
    finally:
        _return_blocks_from(_USUAL_BYTES)
        for handle in handles:
            handle.remove()


def bring_back(module: torch.nn.Module) -> None:
    """Load the tensors of a module that are in files into memory."""
    for tensor in (*module.parameters(), *module.buffers()):
        if _file_of(tensor):
            tensor.data = tensor.data.clone()


class _Spill:
    def __init__(self, folder: Path, keep_bytes: int) -> None:
        self._folder = folder
        self._keep_bytes = keep_bytes
        self._held_bytes = 0
        self._num_files = 0
        # The module that is registering tensors now, and those tensors, which are not initialised yet.
        self._module: torch.nn.Module | None = None
        self._pending: list[torch.Tensor] = []

    def take(self, module: torch.nn.Module, name: str, tensor: torch.Tensor | None) -> None:
        """The registration hook. A tensor of a new module means that the previous module is finished, so it is moved.

        If it is not finished after all, its tensors can still be written in the files.
        """
        if tensor is None:
            return
        if module is not self._module:
            pending, self._module, self._pending = self._pending, module, []
            for one in pending:
                self._move(one)
        self._pending.append(tensor)

    def _move(self, tensor: torch.Tensor) -> None:
        num_bytes = tensor.numel() * tensor.element_size()
        if _file_of(tensor) or not _can_move(tensor, num_bytes):
            return
        if self._held_bytes + num_bytes <= self._keep_bytes:
            self._held_bytes += num_bytes
        else:
            tensor.data = self._written(tensor.detach())

    def _written(self, tensor: torch.Tensor) -> torch.Tensor:
        path = self._folder / str(self._num_files)
        self._num_files += 1
        try:
            make_private(self._folder)
            with open_private(path, "wb") as file:
                tensor.reshape(-1).view(torch.uint8).numpy().tofile(file)
        except OSError as error:
            num_mib = tensor.numel() * tensor.element_size() / MIB
            raise StorageError(
                f"{num_mib:.0f} MB of the model do not fit the function's temporary storage ({error.strerror}); give "
                "the function more of it, or memory for the whole model"
            ) from error
        mapped = torch.from_file(str(path), shared=True, size=tensor.numel(), dtype=tensor.dtype)
        return mapped.view(tensor.shape)


def _return_blocks_from(num_bytes: int) -> None:
    """Make glibc return freed blocks of at least this size to the system; does nothing with another allocator."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, num_bytes)


def _can_move(tensor: torch.Tensor, num_bytes: int) -> bool:
    """Whether the tensor has a storage of its own and is large enough to be worth a file."""
    is_plain = tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.is_contiguous()
    return is_plain and num_bytes >= _SMALLEST_BYTES and tensor.untyped_storage().nbytes() == num_bytes


def _file_of(tensor: torch.Tensor) -> str:
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return ""
    return tensor.untyped_storage().filename or ""
