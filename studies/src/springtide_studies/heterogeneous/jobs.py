"""Gavel's jobs: throughputs of model variants on K80, P100 and V100, and traces drawn by its published rule."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import numpy as np

from springtide.core.errors import InvalidRequest
from springtide.core.workload import Entrypoint, TrainingJob, WorkloadId

MODELS = ("v100", "p100", "k80")
_TABLES = "simulation_throughputs.json"
# Gavel's generator (scheduler/utils.py): devices of a job, and minutes on V100s, log-uniform in one of two ranges.
_SCALES, _SCALE_PARTS = (1, 2, 4, 8), (0.70, 0.10, 0.15, 0.05)
_SHORT, _LONG, _SHORT_PART = (1.5, 3.0), (3.0, 4.0), 0.8
_LEAST_SHARDS = 4

# Steps a second of each variant with its number of devices, by model of device.
Throughputs = dict[tuple[str, int], dict[str, float]]


def read_throughputs(folder: Path) -> Throughputs:
    """The variants that were measured on every model. Raises InvalidRequest without the table."""
    path = folder / _TABLES
    if not path.is_file():
        raise InvalidRequest(f"{folder} has no {_TABLES}; name Gavel's folder with --data DIR")
    tables: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    found: Throughputs = {}
    for text in tables[MODELS[0]]:
        rates = {model: float(tables[model].get(text, {}).get("null") or 0.0) for model in MODELS}
        if all(rate > 0.0 for rate in rates.values()):
            name, scale = ast.literal_eval(text)
            found[str(name), int(scale)] = rates
    return found


def draw_throughputs(seed: int) -> Throughputs:
    """A stand-in for the table, with ratios between models that are spread as widely as there."""
    rng = np.random.default_rng(np.random.SeedSequence([seed, 7]))
    found: Throughputs = {}
    for number in range(26):
        slow = float(np.exp(rng.uniform(np.log(0.5), np.log(30.0))))
        fast = {"p100": float(np.exp(rng.normal(1.2, 0.5))), "v100": float(np.exp(rng.normal(1.4, 0.6))), "k80": 1.0}
        power = float(rng.uniform(0.7, 1.0))
        for scale in _SCALES:
            found[f"variant {number}", scale] = {model: slow * fast[model] * scale**power for model in MODELS}
    return found


def draw_jobs(
    tables: Throughputs, num_jobs: int, seed: int, jobs_per_hour: float, *, is_elastic: bool = False
) -> list[tuple[float, TrainingJob]]:
    """Jobs that arrive at random; all at once if `jobs_per_hour` is 0. Each has the devices that it asks for, or,
    if it is elastic, any number for which its variant was measured."""
    rng = np.random.default_rng(np.random.SeedSequence([seed, num_jobs]))
    by_scale = {scale: [name for name, each in tables if each == scale] for scale in _SCALES}
    at_s = 0.0
    found: list[tuple[float, TrainingJob]] = []
    for number in range(num_jobs):
        at_s += float(rng.exponential(3600.0 / jobs_per_hour)) if jobs_per_hour else 0.0
        scale = int(rng.choice(_SCALES, p=_SCALE_PARTS))
        name = by_scale[scale][int(rng.integers(len(by_scale[scale])))]
        span = _SHORT if rng.random() < _SHORT_PART else _LONG
        duration_s = 60.0 * 10.0 ** float(rng.uniform(*span))
        rates = tables[name, scale]
        sizes = [each for each in _SCALES if (name, each) in tables] if is_elastic else [scale]
        found.append(
            (
                at_s,
                TrainingJob(
                    job_id=WorkloadId(f"job-{number:04d}"),
                    name=f"job-{number:04d}",
                    entrypoint=Entrypoint(source_path="", object_name="train"),
                    min_workers=sizes[0],
                    max_workers=sizes[-1],
                    requested_workers=scale,
                    num_virtual_shards=max(_LEAST_SHARDS, sizes[-1]),
                    total_steps=max(1, round(duration_s * rates["v100"])),
                    family=name,
                    profiles={model: {each: tables[name, each][model] for each in sizes} for model in MODELS},
                ),
            )
        )
    return found
