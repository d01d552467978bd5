"""Merges neighbouring layers into groups with about equal computation, for planning (FuncPipe, section 4)."""

from __future__ import annotations

import msgspec
import numpy as np

from springtide.core.errors import InvalidRequest
from springtide.core.functions import FunctionPlan, LayerProfile, ModelProfile


def merged(profile: ModelProfile, num_layers: int) -> tuple[ModelProfile, tuple[int, ...]]:
    """The profile in at most `num_layers` layers, and where each ends in the original. Raises InvalidRequest.

    Minimises the longest computation of a group. Plans of the merged profile are also plans of the original (see
    `unmerged`), but the best of them may be worse than the best plan of the original.
    """
    if num_layers < 1:
        raise InvalidRequest(f"merging to {num_layers} layers leaves none; give at least 1")
    if num_layers >= len(profile.layers):
        return profile, tuple(range(1, len(profile.layers) + 1))
    ends = _ends(np.array([_computation_s(layer) for layer in profile.layers]), num_layers)
    begins = (0, *ends[:-1])
    groups = tuple(_group(profile.layers[begin:end]) for begin, end in zip(begins, ends, strict=True))
    return msgspec.structs.replace(profile, layers=groups), ends


def unmerged(plan: FunctionPlan, ends: tuple[int, ...]) -> FunctionPlan:
    """A plan for a merged profile, converted to the original's layers."""
    begins = (0, *ends)
    stages = tuple(
        msgspec.structs.replace(stage, first_layer=begins[stage.first_layer], end_layer=begins[stage.end_layer])
        for stage in plan.stages
    )
    return msgspec.structs.replace(plan, stages=stages)


def _computation_s(layer: LayerProfile) -> float:
    """Forward and backward time on the largest size on which the layer was measured."""
    both = [f + b for f, b in zip(layer.forward_s, layer.backward_s, strict=True) if f is not None and b is not None]
    return both[-1] if both else 0.0


def _ends(times: np.ndarray[tuple[int], np.dtype[np.float64]], num_groups: int) -> tuple[int, ...]:
    """The ends of the groups that minimise the longest group, by bisection of its length."""
    low, high = float(times.max()), float(times.sum())
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if len(_filled(times, middle)) <= num_groups else (middle, high)
    ends = _filled(times, high)
    while len(ends) < num_groups:
        # There are groups to spare: split the longest one with more than one layer in half.
        begins = [0, *ends[:-1]]
        longest = max(
            (n for n in range(len(ends)) if ends[n] - begins[n] > 1),
            key=lambda n: float(times[begins[n] : ends[n]].sum()),
        )
        sums = np.cumsum(times[begins[longest] : ends[longest]])
        cut = begins[longest] + 1 + int(np.abs(2 * sums[:-1] - sums[-1]).argmin())
        ends.insert(longest, cut)
    return tuple(ends)


def _filled(times: np.ndarray[tuple[int], np.dtype[np.float64]], most_s: float) -> list[int]:
    """The ends of groups if each takes as many layers as fit into `most_s`."""
    ends, total = [], 0.0
    for number, time_s in enumerate(times):
        if number and total + time_s > most_s:
            ends.append(number)
            total = 0.0
        total += float(time_s)
    return [*ends, len(times)]


def _group(layers: tuple[LayerProfile, ...]) -> LayerProfile:
    if len(layers) == 1:
        return layers[0]

    def sums(rows: list[tuple[float | None, ...]]) -> tuple[float | None, ...]:
        return tuple(_total(column) for column in zip(*rows, strict=True))

    return LayerProfile(
        name=f"{layers[0].name}..{layers[-1].name}",
        parameter_bytes=sum(layer.parameter_bytes for layer in layers),
        activation_bytes=sum(layer.activation_bytes for layer in layers),
        output_bytes=layers[-1].output_bytes,
        gradient_bytes=layers[0].gradient_bytes,
        forward_s=sums([layer.forward_s for layer in layers]),
        backward_s=sums([layer.backward_s for layer in layers]),
    )


def _total(times: tuple[float | None, ...]) -> float | None:
    known = [time_s for time_s in times if time_s is not None]
    return sum(known) if len(known) == len(times) else None
