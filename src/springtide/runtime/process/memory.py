"""Keeping memory pages: page faults on fresh memory can cost a large model more time than its arithmetic."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch

# From malloc.h of glibc.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4


def keep_freed_memory() -> None:
    """Have malloc keep what is freed: a step's gradients, freed and made anew, then touch no fresh page.

    By default every large tensor is a mapping of its own, and the kernel clears its pages again in every step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        # All ones stands for no trimming at all.
        mallopt(_M_TRIM_THRESHOLD, -1)


def touch_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Use as much memory as all gradients need and free it, so that the first backward finds its pages there."""
    made = [torch.zeros_like(parameter) for parameter in parameters if parameter.device.type == "cpu"]
    made.clear()
