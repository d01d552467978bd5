"""What is measured of families: speeds by size and progress, gradient noise, and the speed on one batch."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kits.scheduling.goodput_jobs import BATCH, KNOWN, NOISE, TRUTH, snapshot, view
from springtide.core.job_parts import GradientNoise
from springtide.perf.goodput import gain, step_total_s
from springtide.scheduling.families.candidates import read_rows, size_grid
from springtide.scheduling.families.family import (
    FamilySpeed,
    JobFamily,
    family_key,
    read_family,
    stretch_of,
    write_family,
)
from springtide_studies.fapes.truth import split_batch


@pytest.mark.parametrize("batch", [BATCH, None])
def test_seconds_to_the_end_are_those_of_the_truth(batch):
    job = view("a", batch=batch).job
    family = JobFamily(steps=KNOWN, noise={stretch_of(1.0): (1.0, 20.0), stretch_of(12_000.0): (1.0, 20.0)})
    pace = FamilySpeed(family, [1, 4, 8], 4, job)
    found = pace.seconds(np.array([0.0, 9000.0]), np.array([10_000.0, 10_000.0]))
    for column, (num_nodes, workers) in enumerate(((1, 1), (1, 4), (2, 8))):
        size, _ = pace.batch_for(num_nodes, workers, NOISE)
        local, passes = split_batch(size, workers, batch, 32)
        step_s, sync_s = TRUTH.step_s(num_nodes, workers, local)
        rate = float(gain(NOISE, size / 32) / step_total_s(step_s, sync_s, passes)) if batch else 1.0 / float(step_s)
        assert found[0, column] == pytest.approx(10_000.0 / rate, rel=0.15)
        assert found[1, column] == pytest.approx(found[0, column] / 10, rel=0.05)


def test_beyond_what_was_measured_noise_grows_with_progress():
    job = view("a").job
    seen = FamilySpeed(JobFamily(steps=KNOWN, noise={stretch_of(1000.0): (1.0, 5.0)}), [1, 16], 4, job)
    far = FamilySpeed(JobFamily(steps=KNOWN, noise={stretch_of(16_000.0): (1.0, 80.0)}), [1, 16], 4, job)
    (near_s,), (later_s,), (known_s,) = (
        pace.seconds(np.array([begin]), np.array([begin + 100.0]))
        for pace, begin in ((seen, 900.0), (seen, 15_900.0), (far, 15_900.0))
    )
    assert later_s[1] == pytest.approx(known_s[1], rel=0.05)
    assert later_s[1] < near_s[1]


def test_families_survive_the_journal_and_change_only_with_news():
    family = JobFamily().with_view(view("a", steps=KNOWN, noise=NOISE, progress=100.0), 5.0)
    assert read_family(msgspec.json.decode(msgspec.json.encode(write_family(family)))) == family
    assert family.with_view(view("b", steps=KNOWN, noise=NOISE, progress=101.0), 9.0) is family
    assert family.noise_at(1e6) == NOISE
    assert family_key(view("a").job) == family_key(view("b").job)
    assert family_key(view("a").job, alone=True) != family_key(view("b").job, alone=True)


def test_sizes_are_few_within_a_node_and_finer_above():
    assert size_grid(5) == (1, 2, 3, 4)
    assert size_grid(64) == (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64)


@pytest.mark.slow
def test_the_speed_on_one_batch_is_the_best_of_all_batches_that_are_kept_to_the_end():
    noises = {stretch: (1.0, 2.0 + 0.5 * stretch) for stretch in range(20, 54)}
    pace = FamilySpeed(JobFamily(steps=KNOWN, noise=noises), [1, 4, 8], 4, view("a").job)
    done, total = 300.0, 10_000.0
    found = pace.rates_of_one_batch(done, total)
    points = np.linspace(done, total, 4000)
    ways = [noises[min(max(stretch_of(point), 20), 53)] for point in points]
    for column, (num_nodes, workers) in enumerate(((1, 1), (1, 4), (2, 8))):
        best = 0.0
        for size in np.unique(np.geomspace(32, 2048, 200).astype(int)):
            local, passes = split_batch(int(size), workers, BATCH, 32)
            if local < BATCH.min_local_size:
                continue
            step_s = float(step_total_s(*pace.model.step_s(num_nodes, workers, local), passes))
            gains = [float(gain(GradientNoise(grad_sqr=s, grad_var=v), local * passes * workers / 32)) for s, v in ways]
            best = max(best, 1.0 / np.mean([step_s / each for each in gains]))
        assert found[column] == pytest.approx(best, rel=0.02)
    # A batch that may change along the way is never slower.
    assert (pace.seconds(np.array([done]), np.array([total]))[0] <= (total - done) / found * 1.02).all()


def test_without_any_noise_the_one_batch_is_the_initial_one():
    pace = FamilySpeed(JobFamily(steps=KNOWN), [1, 2], 4, view("a").job)
    assert pace.rates_of_one_batch(0.0, 1000.0) == pytest.approx(pace.rates_at(None))


def seconds_alone(*views, lengths=()) -> list[float]:
    """To the end of each job on one device, by the model of their family."""
    family = JobFamily(steps=KNOWN, noise={stretch_of(1.0): (1.0, 20.0)}, lengths=lengths)
    pace = FamilySpeed(family, [1, 4, 8], 4, views[0].job)
    rows = read_rows(views, snapshot(*views), {}, lambda job: job.family, {"net": family}, {"net": pace}, 16)
    return [float(row.seconds[row.sizes == 1][0]) for row in rows]


def test_jobs_of_unknown_length_are_as_long_as_each_other_and_the_furthest_is_half_done():
    fresh, begun, furthest = (view(str(done), progress=done, total=None) for done in (0.0, 60_000.0, 100_000.0))
    alone = seconds_alone(furthest)
    last, second, first = seconds_alone(fresh, begun, furthest)
    assert [first] == alone
    assert last > second > first
    # 100,000 done, and a power of two of at least as much left.
    assert last == pytest.approx(seconds_alone(view("k", total=231_072.0))[0])
    # One that says its length changes nothing for the others.
    assert seconds_alone(fresh, view("k", progress=500_000.0, total=600_000.0), begun)[0] < last
    # What has ended is known better.
    assert seconds_alone(fresh, furthest, lengths=(120_000.0,))[1] < first
