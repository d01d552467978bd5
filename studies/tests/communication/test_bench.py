"""The bench of communication predictors: its report, its judgement, and measured samples in place of drawn ones."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from springtide.core.errors import InvalidRequest
from springtide.perf.communication.query import write_samples
from springtide_studies.communication.bench import markdown, run_bench
from springtide_studies.communication.gnn_training import Training
from springtide_studies.fapes.nccl_samples import Drawn, clusters, draw_sets, sample_file

QUICK = Training(num_steps=3, num_members=1, batch_placements=8)


@pytest.fixture(autouse=True)
def few_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    import springtide_studies.communication.communication_trees as trees

    fit = trees._fit
    monkeypatch.setattr(trees, "_fit", lambda rows, target, seed, num_trees: fit(rows, target, seed, 3))


def ticking() -> Callable[[], float]:
    now = count(0.0, 0.001)
    return lambda: float(next(now))


def few() -> dict[str, Drawn]:
    return draw_sets(0, num_train=16, num_held_out=6, sizes_each=3)


def test_every_predictor_is_judged_on_every_set_that_is_held_out() -> None:
    report = run_bench(seed=0, timer=ticking(), drawn=few(), training=QUICK)
    names = [(one["samples"], one["model"]) for one in report["models"]]
    assert len(names) == len(set(names))
    assert {name for _, name in names} >= {"bytes/bandwidth", "alpha-beta", "pollux form", "graph network", "no noise"}
    assert {samples for samples, _ in names} == {"test", "final"}
    assert report["num_samples"] == 48
    assert 0 < report["candidate_lists"]["num_candidates"] <= 64
    assert "| final | graph network |" in markdown(report)
    assert not report["passed"], "three steps teach nothing"


def test_errors_are_relative_to_what_was_measured() -> None:
    drawn = few()
    test = drawn["test"]
    drawn["test"] = Drawn(queries=test.queries, measured_s=2 * test.true_s, true_s=test.true_s)
    del drawn["final"]
    report = run_bench(seed=0, timer=ticking(), drawn=drawn, training=QUICK)
    floor = next(one for one in report["models"] if one["model"] == "no noise")
    assert floor["mean"] == pytest.approx(0.5)
    assert floor["true_mean"] == 0.0
    row = report["rows"][1]
    baselines = [
        one["mean"] for one in report["models"] if one["model"] not in ("no noise", "no messages", "graph network")
    ]
    assert row["baseline"] == min(baselines)
    assert row["bound"] == pytest.approx(0.5 * min(baselines))


def test_measured_samples_are_split_by_placement(tmp_path: Path) -> None:
    cluster = clusters()[1]
    ids = [[device.device_id for device in node.devices] for node in cluster.nodes[:4]]
    placements = [ids[0], ids[0][:2], ids[0][:3], ids[0] + ids[1], ids[0] + ids[1][:1], ids[0][:1] + ids[1][:1]]
    path = tmp_path / "samples.json"
    write_samples(path, sample_file(cluster, placements, sizes_each=4, seed=0))
    report = run_bench(seed=0, timer=ticking(), samples=path, training=QUICK)
    assert {one["samples"] for one in report["models"]} == {"test"}
    assert report["num_rounds"] == 4
    # Six placements in four rounds: two, two, one and one of them held out; all in the end.
    assert report["num_placements"] == 4
    assert all(one["num_placements"] == 6 and one["num_samples"] == 24 for one in report["models"])
    assert all(one["true_mean"] is None for one in report["models"])


def test_too_few_placements_are_refused(tmp_path: Path) -> None:
    cluster = clusters()[1]
    path = tmp_path / "samples.json"
    ids = [device.device_id for device in cluster.nodes[0].devices]
    write_samples(path, sample_file(cluster, [ids], sizes_each=4, seed=0))
    with pytest.raises(InvalidRequest, match="at least 4"):
        run_bench(seed=0, timer=ticking(), samples=path)
