"""Samples for training and testing: sets that share no placement, from a seed."""

from __future__ import annotations

import numpy as np

from springtide.perf.communication.query import SampleFile
from springtide_studies.fapes.nccl_samples import (
    LARGEST_BYTES,
    NUM_SERVERS,
    SMALLEST_BYTES,
    clusters,
    draw_sets,
    sample_file,
)


def test_sets_share_no_placement_and_have_their_own_numbers_of_servers() -> None:
    drawn = draw_sets(3, num_train=80, num_held_out=24, sizes_each=3)
    shapes = {name: {query.subgraph for query in one.queries} for name, one in drawn.items()}
    assert [len(one.queries) for one in drawn.values()] == [240, 72, 72]
    assert not shapes["train"] & shapes["test"]
    assert not shapes["train"] & shapes["final"]
    assert not shapes["test"] & shapes["final"]
    spans = {name: {shape.num_servers for shape in found} - {1} for name, found in shapes.items()}
    own = {name: set(numbers) for name, numbers in NUM_SERVERS}
    assert spans["train"] <= own["train"]
    assert spans["test"] <= own["test"] | own["train"]
    assert spans["test"] & own["test"]
    assert spans["final"] & own["final"]
    assert not spans["final"] & own["test"]


def test_same_seed_same_samples() -> None:
    first, again, other = (draw_sets(seed, num_train=20, num_held_out=6, sizes_each=2) for seed in (1, 1, 2))
    assert np.array_equal(first["test"].measured_s, again["test"].measured_s)
    assert not np.array_equal(first["test"].measured_s, other["test"].measured_s)
    sizes = [query.num_bytes for query in first["train"].queries]
    assert min(sizes) >= SMALLEST_BYTES
    assert max(sizes) <= LARGEST_BYTES


def test_a_file_of_them_reads_as_measured_ones() -> None:
    cluster = clusters()[1]
    devices = [device.device_id for device in cluster.nodes[0].devices]
    made = sample_file(cluster, [devices, devices[:2]], sizes_each=4, seed=0)
    assert isinstance(made, SampleFile)
    queries, measured_s = made.queries()
    assert len(queries) == len(measured_s) == 8
    assert (measured_s > 0).all()
