"""Gradients are summed over the members while the backward pass runs: bucket by bucket, in the order in which it ends.

Parameters are taken in the reverse of their order in the model, because their gradients come in about that order. Small
ones share a flat buffer, whose parts become their gradients; a large one is reduced where its gradient lies, without a
copy. Buckets are sent strictly in one order, so that all members make the same calls whatever gradient comes first.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from springtide.core.errors import CollectiveError, InvalidRequest
from springtide.runtime.elastic.group import Group

# The first bucket is small, so that the exchange begins early.
_FIRST_BUCKET_BYTES = 1 << 20
_BUCKET_BYTES = 25 << 20
# From this size on a copy costs more than a message of its own.
_IN_PLACE_BYTES = 8 << 20


@dataclass(slots=True, eq=False)
class Bucket:
    """Parameters whose gradients travel together, as elements of `dtype`; `is_in_place` for one large parameter."""

    dtype: torch.dtype
    parameters: list[torch.Tensor] = field(default_factory=list)
    num_bytes: int = 0
    is_in_place: bool = False


def buckets_of(parameters: Sequence[torch.Tensor]) -> list[Bucket]:
    """Cut the parameters, in their order in the model, into buckets in the order in which these are full."""
    buckets: list[Bucket] = []
    # The bucket that small parameters go into: a large one between them does not end it.
    small: Bucket | None = None
    limit = _FIRST_BUCKET_BYTES
    for parameter in reversed(parameters):
        # Halves are added as floats.
        dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        num_bytes = parameter.numel() * dtype.itemsize
        if num_bytes >= _IN_PLACE_BYTES and parameter.dtype == dtype:
            buckets.append(Bucket(dtype, [parameter], num_bytes, is_in_place=True))
            continue
        # A model of a worker with several devices may lie on all of them.
        fits = small is not None and (small.dtype, small.parameters[0].device) == (dtype, parameter.device)
        if small is None or not fits or small.num_bytes + num_bytes > limit:
            limit = _FIRST_BUCKET_BYTES if small is None else _BUCKET_BYTES
            small = Bucket(dtype)
        else:
            buckets.remove(small)
        small.parameters.append(parameter)
        small.num_bytes += num_bytes
        buckets.append(small)
    return buckets


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill their memory without gaps, in whatever order."""
    spans = ((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return 1 + sum(spans) == tensor.numel()


def _parts(flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The buffer's parts, each with the shape of its parameter and the layout, which fused optimizers want."""
    views, at = [], 0
    for parameter in parameters:
        part = flat[at : at + parameter.numel()]
        at += parameter.numel()
        strided = _is_dense(parameter)
        views.append(
            part.as_strided(parameter.shape, parameter.stride(), part.storage_offset())
            if strided
            else part.view(parameter.shape)
        )
    return views


class Reducer:
    """Sums the gradients of one backward pass over a group. `begin`; the pass; `send_rest`; `attach`.

    Outside of that its hooks do nothing.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = list(parameters)
        self._buckets = buckets_of(parameters)
        self._lock = threading.Lock()
        # By bucket, the parts of its buffer by parameter; None for a parameter reduced in place.
        self._views: list[list[torch.Tensor] | None] = []
        self._flats: list[torch.Tensor | None] = []
        self._group: Group | None = None
        self.works: list[Any] = []
        self._num_sent = 0
        self._num_missing: list[int] = []
        self._error: CollectiveError | None = None
        self._measures = False
        # The square norms of this member's buckets, if they are measured.
        self._squares: list[torch.Tensor] = []
        for index, bucket in enumerate(self._buckets):
            for parameter in bucket.parameters:
                self._watch(index, parameter)

    def reserve(self) -> None:
        """Allocate the buffers, with all pages touched, unless they are there. From any thread."""
        with self._lock:
            if self._flats:
                return
            flats: list[torch.Tensor | None] = []
            for bucket in self._buckets:
                size, device = bucket.num_bytes // bucket.dtype.itemsize, bucket.parameters[0].device
                flats.append(None if bucket.is_in_place else torch.zeros(size, dtype=bucket.dtype, device=device))
            self._views = [
                None if flat is None else _parts(flat, bucket.parameters)
                for flat, bucket in zip(flats, self._buckets, strict=True)
            ]
            self._flats = flats

    @property
    def square(self) -> float:
        """The square norm of what this member sent in a measured pass."""
        return sum(float(square) for square in self._squares)

    def begin(self, group: Group, *, is_measured: bool = False) -> None:
        """Sum over this group the gradients that there are after the next backward pass."""
        self._measures, self._squares = is_measured, []
        self.reserve()
        self._group = group
        self.works = []
        self._num_sent = 0
        self._num_missing = [len(bucket.parameters) for bucket in self._buckets]
        self._error = None

    def send_rest(self) -> list[bool]:
        """Send the buckets that the pass has not filled, with zeros; for each parameter, whether it got a gradient.

        `works` are then the sums to wait for. Raises CollectiveError, also for what could not be sent during the pass.
        """
        has_gradient = [parameter.grad is not None for parameter in self._parameters]
        while self._num_sent < len(self._buckets):
            self._send_next()
        if self._error is not None:
            raise self._error
        return has_gradient

    def attach(self, has_gradient: Sequence[bool]) -> None:
        """Make the sums the gradients of the parameters of which any member had one."""
        for bucket, views in zip(self._buckets, self._views, strict=True):
            if views is not None:
                for parameter, view in zip(bucket.parameters, views, strict=True):
                    parameter.grad = view.to(parameter.dtype)
        for parameter, has in zip(self._parameters, has_gradient, strict=True):
            if not has:
                parameter.grad = None
        self.works = []
        self._group = None

    def abandon(self) -> None:
        """Give the pass up. What was sent may still be written to, so that memory is not used again."""
        with self._lock:
            if self.works:
                self._flats, self._views = [], []
        self.works = []
        self._group = None

    def _watch(self, index: int, parameter: torch.Tensor) -> None:
        def is_ready(_: torch.Tensor) -> None:
            if self._group is None:
                return
            if index < self._num_sent:
                raise InvalidRequest(
                    "a parameter got its gradient in two parts within one backward pass, as with reentrant "
                    "checkpoints; call torch.utils.checkpoint with use_reentrant=False, or give the job exact=True"
                )
            self._num_missing[index] -= 1
            while self._num_sent < len(self._buckets) and self._num_missing[self._num_sent] <= 0:
                self._send_next()

        parameter.register_post_accumulate_grad_hook(is_ready)  # type: ignore[no-untyped-call]

    def _send_next(self) -> None:
        """Fill the next bucket and begin to sum it. After a failure nothing is sent any more."""
        index, group = self._num_sent, self._group
        assert group is not None
        self._num_sent += 1
        if self._error is not None:
            return
        with torch.no_grad():
            tensor = self._filled(index)
            if self._measures:
                self._squares.append(torch.dot(tensor, tensor))
        try:
            self.works.append(group.start_all_reduce(tensor))
        except CollectiveError as error:
            # Not raised out of the user's backward pass: `send_rest` raises it.
            self._error = error

    def _filled(self, index: int) -> torch.Tensor:
        """The gradients of a bucket as one contiguous tensor, which its sum replaces."""
        bucket, flat, views = self._buckets[index], self._flats[index], self._views[index]
        if flat is None or views is None:
            (parameter,) = bucket.parameters
            gradient = torch.zeros_like(parameter) if parameter.grad is None else dense(parameter.grad)
            if gradient.stride() != parameter.stride() or not _is_dense(gradient):
                gradient = torch.empty_like(parameter, memory_format=torch.contiguous_format).copy_(gradient)
            parameter.grad = gradient
            return gradient.as_strided((gradient.numel(),), (1,), gradient.storage_offset())
        for parameter, view in zip(bucket.parameters, views, strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(dense(parameter.grad))
        return flat


def dense(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient with all its elements, as an embedding with `sparse=True` does not give it."""
    return gradient.to_dense() if gradient.is_sparse else gradient
