"""Predicts the time of a job's steps on any placement: a fitted model, with a model of its errors."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from springtide.core.job_parts import StepTime
from springtide.perf.throughput import Steps, ThroughputModel, fit_parameters

Floats = NDArray[np.float64]

# The residual error of the seven fitted parameters is 5 to 20 percent on Pollux's own tables. This prior error counts
# like this many measurements.
USUAL_ERROR = 0.15
USUAL_WEIGHT = 4.0
# The model assumes that exchanges over a link that was never used cost nothing, so a step may well take twice as long.
UNSEEN_ERROR = math.log(2.0)
# Half of an error's variance is shared with shapes nearby. A quarter is shared by placements of the same number of
# workers that are packed equally closely, for any local batch. The rest belongs to a single measurement.
SHAPE_FRACTION = 0.5
LAYOUT_FRACTION = 0.25
# Errors are clipped at this many times their median (about two standard deviations), which is taken as 3 percent at
# least.
CREDIBLE_ERRORS = 3.0
MEASURED_ERROR = 0.03
# Correlation falls by a factor e for every this many doublings of the workers or the local batch,
CORRELATED_DOUBLINGS = 2.0
# and by this factor between different kinds of links.
CORRELATED_LINKS = 0.5
# How many steps of a family are kept: more would add nothing to a fit of seven parameters.
MAX_FAMILY_STEPS = 128
# The model of a family counts as one measurement of the job itself when the two are compared.
FAMILY_WEIGHT = 1.0


class StepEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """The fitted model and a Gaussian process over its errors at the measured shapes.

    `shapes` [N, 4] are the measured (link, log2 workers, log2 local batch, whether on as few nodes as `node_width`
    workers a node allow), `weights` [N] the errors multiplied by the inverse of their covariance, `root` [N, N] the
    inverse of that covariance's Cholesky factor, `amplitudes` [3] the expected size of an error on each kind of link:
    one worker, one node, several nodes.
    """

    model: ThroughputModel
    shapes: Floats
    weights: Floats
    root: Floats
    amplitudes: Floats
    node_width: int

    def error(self, num_nodes: ArrayLike, num_workers: ArrayLike, local_batch_size: ArrayLike) -> tuple[Floats, Floats]:
        """Return (expected, spread) of the logarithm of true over modelled step seconds, arrays of shape [P].

        Near measured shapes the expected error is the measured one; far away it is zero, with the spread that is usual
        for the link. A step takes `model.step_s * exp(expected)`, within a factor `exp(spread)` two times out of three.
        """
        nodes, workers, local = np.broadcast_arrays(num_nodes, num_workers, local_batch_size)
        wanted = _shapes(nodes.ravel(), workers.ravel(), local.ravel(), self.node_width)
        across = _covariance(wanted, self.shapes, self.amplitudes)
        explained = across @ self.root.T
        before = self.amplitudes[wanted[:, 0].astype(np.int64)] ** 2
        return across @ self.weights, np.sqrt(before - (explained**2).sum(axis=1))


def fit_throughput(
    step_times: tuple[StepTime, ...], family_step_times: tuple[StepTime, ...] = ()
) -> StepEstimate | None:
    """Fit the model to a job's measured steps and, for shapes that it has not run on, to those of its family.

    Steps of the family are scaled by how much slower the job was on average than the family's model (with one further
    measurement of equal speed as a prior). None if nothing was measured. Deterministic; recent results are cached.
    """
    return _fit(tuple(step_times), tuple(family_step_times))


@lru_cache(maxsize=2048)
def fit_model(step_times: tuple[StepTime, ...]) -> ThroughputModel | None:
    """Fit only the model, to one job's own steps, as Pollux does; None if nothing was measured."""
    steps = _arrays(step_times)
    return None if steps is None else fit_parameters(steps)


def merge_step_times(kept: Iterable[StepTime], new: Iterable[StepTime]) -> tuple[StepTime, ...]:
    """Merge a family's steps: the newest of each shape, sorted by size, at most `MAX_FAMILY_STEPS`.

    If there are more, a subset that is evenly spaced in this order is kept.
    """
    merged = {(step.placement, step.local_batch_size): step for steps in (kept, new) for step in steps}
    keys = sorted(merged, key=lambda key: (sum(key[0]), len(key[0]), key[0], key[1]))
    if len(keys) > MAX_FAMILY_STEPS:
        keys = [keys[index * len(keys) // MAX_FAMILY_STEPS] for index in range(MAX_FAMILY_STEPS)]
    return tuple(merged[key] for key in keys)


# An estimate holds matrices of up to MAX_FAMILY_STEPS squared, so this many take a few dozen megabytes at most.
@lru_cache(maxsize=256)
def _fit(own: tuple[StepTime, ...], family: tuple[StepTime, ...]) -> StepEstimate | None:
    own_steps = _arrays(own)
    family_steps = _arrays(_others(own, family))
    if own_steps is None or family_steps is None:
        known = own_steps or family_steps
        model = fit_model(family if own_steps is None else own)
        return None if known is None or model is None else _estimate(known, model)
    family_model = fit_model(family)
    assert family_model is not None
    usual, _ = family_model.step_s(own_steps.num_nodes, own_steps.num_workers, own_steps.local)
    slower = float(np.log(own_steps.step_s / usual).sum() / (len(usual) + FAMILY_WEIGHT))
    both = Steps(
        num_nodes=np.concatenate([own_steps.num_nodes, family_steps.num_nodes]),
        num_workers=np.concatenate([own_steps.num_workers, family_steps.num_workers]),
        local=np.concatenate([own_steps.local, family_steps.local]),
        step_s=np.concatenate([own_steps.step_s, family_steps.step_s * math.exp(slower)]),
        compute_s=np.concatenate([own_steps.compute_s, family_steps.compute_s * math.exp(slower)]),
    )
    return _estimate(both, fit_parameters(both))


def _others(own: tuple[StepTime, ...], family: tuple[StepTime, ...]) -> tuple[StepTime, ...]:
    """The family's steps of shapes on which the job itself was not measured."""
    measured = {(step.placement, step.local_batch_size) for step in own}
    return tuple(step for step in family if (step.placement, step.local_batch_size) not in measured)


def _arrays(step_times: tuple[StepTime, ...]) -> Steps | None:
    """Measured steps as arrays, without impossible times; None if none is left."""
    steps = [
        (len(step.placement), sum(step.placement), step.local_batch_size, step.step_s, _pass_s(step))
        for step in step_times
        if step.placement and step.local_batch_size >= 1 and 0.0 < step.step_s < math.inf
    ]
    if not steps:
        return None
    nodes, workers, local, step_s, compute_s = zip(*steps, strict=True)
    return Steps(
        num_nodes=np.array(nodes, dtype=np.int64),
        num_workers=np.array(workers, dtype=np.int64),
        local=np.array(local, dtype=np.float64),
        step_s=np.array(step_s),
        compute_s=np.array(compute_s),
    )


def _pass_s(step: StepTime) -> float:
    """Seconds of a pass without the exchange; NaN if not known."""
    if step.sync_s is None:
        return step.step_s if sum(step.placement) == 1 else math.nan
    pass_s = step.step_s - step.sync_s
    return pass_s if 0.0 < pass_s <= step.step_s else math.nan


def _estimate(steps: Steps, model: ThroughputModel) -> StepEstimate:
    node_width = int(np.max(-(-steps.num_workers // steps.num_nodes)))
    shapes = _shapes(steps.num_nodes, steps.num_workers, steps.local, node_width)
    modelled, _ = model.step_s(steps.num_nodes, steps.num_workers, steps.local)
    errors = np.log(steps.step_s / modelled)
    # Only measurements beyond the number of parameters say something about errors: the others can be fitted exactly.
    spare = max(0, len(errors) - len(ThroughputModel.__struct_fields__))
    usual = math.sqrt((USUAL_WEIGHT * USUAL_ERROR**2 + float((errors**2).sum())) / (USUAL_WEIGHT + spare))
    links = shapes[:, 0].astype(np.int64)
    amplitudes = np.array([usual if np.any(links == link) else UNSEEN_ERROR for link in range(3)])
    # A single worker does not exchange, so its prediction is as certain without a measurement.
    amplitudes[0] = usual
    covariance = _covariance(shapes, shapes, amplitudes)
    covariance[np.diag_indices(len(shapes))] = amplitudes[links] ** 2
    root = np.linalg.inv(np.linalg.cholesky(covariance))
    # Clipped, because an outlier says nothing about its neighbours.
    bound = CREDIBLE_ERRORS * max(float(np.median(np.abs(errors))), MEASURED_ERROR)
    weights = root.T @ (root @ np.clip(errors, -bound, bound))
    return StepEstimate(
        model=model, shapes=shapes, weights=weights, root=root, amplitudes=amplitudes, node_width=node_width
    )


def _shapes(num_nodes: ArrayLike, num_workers: ArrayLike, local: ArrayLike, node_width: int) -> Floats:
    nodes, workers = np.asarray(num_nodes), np.asarray(num_workers, dtype=np.float64)
    link = np.where(nodes > 1, 2.0, np.where(workers > 1, 1.0, 0.0))
    is_packed = nodes <= np.ceil(workers / node_width)
    return np.stack([link, np.log2(workers), np.log2(np.asarray(local, dtype=np.float64)), is_packed], axis=1)


def _covariance(left: Floats, right: Floats, amplitudes: Floats) -> Floats:
    """Covariance of errors between shapes [P, 4] and [N, 4]: falls off exponentially with every doubling between."""
    links, workers, locals_, packed = (left[:, None, column] for column in range(4))
    by_workers = np.exp(-np.abs(workers - right[:, 1]) / CORRELATED_DOUBLINGS)
    by_local = np.exp(-np.abs(locals_ - right[:, 2]) / CORRELATED_DOUBLINGS)
    alike = np.where(links == right[:, 0], SHAPE_FRACTION, SHAPE_FRACTION * CORRELATED_LINKS) * by_workers
    alike = alike + LAYOUT_FRACTION * ((workers == right[:, 1]) * packed * right[:, 3])
    size = amplitudes[left[:, 0].astype(np.int64)][:, None] * amplitudes[right[:, 0].astype(np.int64)]
    return np.asarray(size * alike * by_local)
