"""Avoiding page faults: for a large model, faults on fresh memory can take more time than the arithmetic."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch

# From malloc.h of glibc.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4


def keep_freed_memory() -> None:
    """Make malloc keep freed memory, so that gradients freed and allocated again in each step use no fresh pages.

    By default every large tensor is an mmap of its own, whose pages the kernel zeroes again in every step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        # -1 (all bits set) disables trimming.
        mallopt(_M_TRIM_THRESHOLD, -1)


def touch_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Allocate and free as much memory as all gradients need, so that the first backward finds it paged in."""
    made = [torch.zeros_like(parameter) for parameter in parameters if parameter.device.type == "cpu"]
    made.clear()
