"""Evaluations by a group: who computes which part, what comes out, and what a death or a late member changes."""

from __future__ import annotations

import json
import threading
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from kits.runtime.runtime_plane import TRAIN, make_job
from springtide.core.errors import InvalidRequest, PeerLost
from springtide.core.wire.workers import CheckpointWritten, Preempt, Progress, Switched
from springtide.runtime.elastic import evaluation, group
from springtide.runtime.elastic.evaluation import (
    Evaluations,
    PartScores,
    compute_alone,
    compute_shared,
    scores_of,
    weighted_means,
)
from springtide.runtime.local.inprocess import run_local


def counting(done, pause_s=0.0):
    def compute(numbers):
        for number in numbers:
            time.sleep(pause_s)
            done.append(number)
            yield number, PartScores(float(number + 1), {"loss": 0.1 * number})

    return compute


def nothing():
    pass


def whole():
    return False


def test_members_divide_the_parts_and_get_the_same(together):
    done = {0: [], 1: [], 2: []}

    def act(group):
        known = {}
        compute_shared(group, "3/a", 40, known, counting(done[group.rank], 0.002), nothing, whole)
        return [known[number] for number in range(40)]

    alone = {}
    compute_alone(40, alone, counting([]), nothing)
    assert together(3, act) == [[alone[number] for number in range(40)]] * 3
    assert sorted(done[0] + done[1] + done[2]) == list(range(40))
    assert all(done.values())


def test_who_does_not_ask_is_not_waited_for_and_who_asks_late_gets_the_result(together):
    late = []

    def act(group):
        known = {}
        if group.rank == 0:
            compute_shared(group, "3/a", 5, known, counting([]), nothing, whole)
            group.set_flag("done")
        elif group.rank == 1:
            while not group.has_flag("done"):
                time.sleep(0.001)
            compute_shared(group, "3/a", 5, known, counting(late), nothing, whole)
        return len(known)

    assert together(3, act) == [5, 5, 0]
    assert late == []


def test_other_names_are_other_evaluations(together):
    done = []

    def act(group):
        for name in ("3/a", "3/b"):
            compute_shared(group, name, 4, {}, counting(done), nothing, whole)

    together(2, act)
    assert sorted(done) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_member_that_stops_in_the_midst_fails_the_others_in_time(together, monkeypatch):
    monkeypatch.setattr(evaluation, "EVALUATION_PATIENCE_S", 0.3)

    def act(group):
        if group.rank == 0:
            group.store.add("evaluation/3/a/next", 1)
            return None
        compute_shared(group, "3/a", 3, {}, counting([]), nothing, whole)
        return None

    _, error = together(2, act)
    assert isinstance(error, PeerLost)
    assert "no further" in str(error)


def test_a_broken_group_is_not_waited_for_and_what_is_missing_is_computed(together):
    done = []

    def act(group):
        if group.rank == 0:
            group.store.add("evaluation/3/a/next", 1)
            return None
        while not group.store.add("evaluation/3/a/next", 0):
            time.sleep(0.001)
        known = {}
        compute_shared(group, "3/a", 3, known, counting([]), nothing, lambda: True)
        assert sorted(known) == [1, 2]
        compute_alone(3, known, counting(done), nothing)
        return sorted(known)

    assert together(2, act) == [None, [0, 1, 2]]
    assert done == [0]


def test_an_exchange_waits_as_long_as_an_evaluation_gets_further(together, monkeypatch):
    monkeypatch.setattr(group, "EVALUATION_PATIENCE_S", 0.2)

    def act(its):
        its.timeout_s = 0.2
        if its.rank == 0:
            compute_shared(its, "3/a", 12, {}, counting([], 0.1), nothing, whole)
        vector = torch.ones(4)
        its.finish([its.start_all_reduce(vector)])
        return vector.tolist()

    assert together(2, act) == [[2.0] * 4] * 2


def test_an_exchange_does_not_wait_for_one_that_stands_still(together, monkeypatch):
    monkeypatch.setattr(group, "EVALUATION_PATIENCE_S", 0.2)
    over = threading.Event()

    def act(its):
        its.timeout_s = 0.2
        if its.rank == 0:
            its.note_evaluation()
            over.wait(30.0)
            return None
        try:
            its.finish([its.start_all_reduce(torch.ones(4))])
        finally:
            over.set()
        return None

    _, error = together(2, act)
    assert isinstance(error, PeerLost)


def test_means_are_weighted_and_checked():
    parts = [PartScores(1.0, {"a": 1.0}), PartScores(3.0, {"a": 2.0}), PartScores(0.0, {"a": float("nan")})]
    assert weighted_means(parts) == {"a": 1.75}
    with pytest.raises(InvalidRequest, match="same names"):
        weighted_means([*parts, PartScores(1.0, {"b": 1.0})])
    with pytest.raises(InvalidRequest, match="add up to nothing"):
        weighted_means(parts[2:])


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (0.5, "a dict of means"),
        ({}, "a dict of means"),
        ({"a": torch.ones(2)}, "single numbers"),
        ({"a": "much"}, "single numbers"),
        (({"a": 1.0}, -1.0), "at least 0"),
        (({"a": 1.0}, float("nan")), "at least 0"),
    ],
)
def test_what_is_no_score_is_refused(returned, says):
    with pytest.raises(InvalidRequest, match=says):
        scores_of(returned, 4)


def test_scores_are_numbers_or_tensors_of_one():
    assert scores_of({"a": torch.tensor([0.5]), "b": True}, 4) == PartScores(4.0, {"a": 0.5, "b": 1.0})
    assert scores_of(({"a": 1}, torch.tensor(7)), 4) == PartScores(7.0, {"a": 1.0})


class Rows(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return {"x": torch.full((2,), float(index)), "noise": torch.rand(())}


def evaluated(tmp_path, evaluate):
    """What `evaluate(ctx, model)` returned in the midst of a run, and the numbers that training drew."""
    found, drawn = [], []

    def fit(ctx):
        model, _ = ctx.prepare(torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Dropout()), torch.optim.Adam)
        model[1].eval()
        for batch in ctx.batches(torch.ones(16, 2)):
            ctx.step(model(batch.x).mean())
            drawn.append(torch.rand(()).item())
            if ctx.step_number == 2:
                found.append(evaluate(ctx, model))
            drawn.append(torch.rand(()).item())
            assert model[0].training
            assert not model[1].training

    job = make_job(tmp_path, "", global_batch_size=4, num_epochs=1, exact=False)
    run_local(fit, job, tmp_path / "out", lambda line: None)
    return (found[0] if found else None), drawn


def test_an_evaluation_covers_every_sample_once_and_disturbs_nothing(tmp_path):
    sizes = []

    def function(batch):
        sizes.append(len(batch.ids))
        assert not torch.is_grad_enabled()
        return {"mean": batch["x"].mean(), "ids": sum(batch.ids) / len(batch.ids), "drawn": torch.rand(())}

    _, undisturbed = evaluated(tmp_path, lambda ctx, model: {})
    results = []
    for dataset, options in [
        (Rows(), {"batch": 4}),
        (DataLoader(Rows(), batch_size=4), {}),
        (DataLoader(Rows(), batch_size=4, num_workers=2, persistent_workers=True), {}),
        (Rows(), {"num_workers": 1}),
    ]:

        def twice(ctx, model, dataset=dataset, options=options):
            first, second = (ctx.evaluate(dataset, function, **options) for _ in range(2))
            assert first == second
            assert not model.training or model[0].training
            return first

        result, drawn = evaluated(tmp_path, twice)
        assert drawn == undisturbed
        results.append(result)
    assert results[0]["mean"] == results[0]["ids"] == 4.5
    assert all(result == results[0] for result in results)
    assert sizes == [4, 4, 2] * 8


def test_a_batch_may_say_its_weight(tmp_path):
    def function(batch):
        return {"mean": batch["x"].mean()}, batch["x"].sum()

    result, _ = evaluated(tmp_path, lambda ctx, model: ctx.evaluate(Rows(), function, batch=5))
    assert result == {"mean": pytest.approx((2 * 10 + 7 * 35) / 45)}


def test_an_evaluation_before_prepare_is_refused(tmp_path):
    job = make_job(tmp_path, "", num_epochs=1)
    with pytest.raises(InvalidRequest, match=r"ctx\.evaluate\(\) needs a model first"):
        run_local(lambda ctx: ctx.evaluate(Rows(), len), job, tmp_path / "out", lambda line: None)


# Evaluates every fourth step, and notes what came out.
EVALUATED = (
    TRAIN.replace(
        "        ctx.step(loss)",
        """        if ctx.step(loss) and ctx.step_number % 4 == 0:
            evaluate(ctx, model, data)
    evaluate(ctx, model, data)""",
    )
    .replace(
        "def fit(ctx):",
        """def evaluate(ctx, model, data):
    def scored(batch):
        assert not model.training
        time.sleep(float(os.environ.get("PART_S", "0")))
        logits = model(batch.x)
        part(ctx, batch)
        accuracy = (logits.argmax(1) == batch.y).float().mean()
        return {"loss": nn.functional.cross_entropy(logits, batch.y), "accuracy": accuracy}

    # Another function on as many samples is another evaluation.
    assert ctx.evaluate(data, lambda batch: {"one": 1}, batch=200) == {"one": 1.0}
    result = ctx.evaluate(data, scored, batch=20)
    other = ctx.evaluate(data, lambda batch: {"mean": batch.x.mean()}, batch=20)
    assert list(other) == ["mean"]
    with open(os.path.join(os.path.dirname(__file__), f"evaluated-{os.getpid()}"), "a") as file:
        file.write(json.dumps([ctx.step_number, ctx.num_workers, result]) + "\\n")

def part(ctx, batch):
    with open(os.path.join(os.path.dirname(__file__), f"parts-{os.getpid()}"), "a") as file:
        file.write(f"{ctx.step_number} {batch.ids[0]}\\n")

def fit(ctx):""",
    )
    .replace("import os, time", "import json, os, time")
)
EPOCHS = 3
NUM_STEPS = EPOCHS * 13


def evaluations(plane):
    """By step: the results of all members, each with the size of its group."""
    found = {}
    for path in plane.work_dir.glob("evaluated-*"):
        for step, size, result in map(json.loads, path.read_text().splitlines()):
            found.setdefault(step, []).append((size, result))
    return found


def num_parts(plane):
    return sum(len(path.read_text().splitlines()) for path in plane.work_dir.glob("parts-*"))


@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True])
def test_members_evaluate_alike_through_joins_departures_and_deaths(make_plane, exact):
    plane = make_plane(EVALUATED, step_s=0.01, num_epochs=EPOCHS, exact=exact, environment={"PART_S": "0.02"})
    plane.start_group("a", "b")
    plane.wait_step(5)
    plane.grow("c")
    plane.wait_step(len(plane.steps()) + 5)
    plane.form("c", "a")
    plane.wait_exit("b")
    plane.wait_step(len(plane.steps()) + 5)
    plane.kill("a")
    plane.form("c", forced=True)
    plane.wait_finished()
    found = evaluations(plane)
    assert set(found) == {*range(4, NUM_STEPS + 1, 4), NUM_STEPS}
    for results in found.values():
        assert all(result == results[0][1] for _, result in results)
    assert {size for results in found.values() for size, _ in results} == {1, 2, 3}
    # No part is computed twice, but for those that a member had in hand when it died.
    assert num_parts(plane) <= 10 * len(found) + 10


@pytest.mark.slow
def test_an_exact_job_evaluates_to_the_same_bits_on_any_number_of_workers(make_plane):
    results = []
    for members in (("a",), ("a", "b", "c")):
        plane = make_plane(EVALUATED, num_epochs=EPOCHS, exact=True)
        plane.start_group(*members)
        plane.wait_finished()
        found = evaluations(plane)
        results.append({step: found[step][0][1] for step in found})
        assert num_parts(plane) == 10 * len(found)
    assert results[0] == results[1]


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["a", "b"])
def test_a_death_in_the_midst_of_an_evaluation_leaves_its_result(make_plane, victim):
    source = EVALUATED.replace(
        "def part(ctx, batch):",
        """def part(ctx, batch):
    if ctx.step_number == 8 and ctx.num_workers == 2 and ctx.is_leader == (os.environ["VICTIM"] == "a"):
        os.kill(os.getpid(), 9)
""",
    )
    still = make_plane(EVALUATED, num_epochs=EPOCHS, exact=True)
    still.start_group("a")
    still.wait_finished()
    environment = {"PART_S": "0.02", "VICTIM": victim}
    plane = make_plane(source, num_epochs=EPOCHS, exact=True, environment=environment)
    plane.start_group("a", "b")
    plane.wait_exit(victim, code=-9)
    (survivor,) = {"a", "b"} - {victim}
    plane.form(survivor, forced=True)
    plane.wait_finished()
    expected, found = evaluations(still), evaluations(plane)
    assert {step: results[0][1] for step, results in found.items()} == {
        step: results[0][1] for step, results in expected.items()
    }
    assert plane.result_hash() == still.result_hash()


@pytest.mark.slow
def test_a_joiner_waits_for_an_evaluation_that_takes_longer_than_an_exchange_may(make_plane):
    # The joiner has step 8 behind it when the others evaluate: its exchange takes as long as they do.
    plane = make_plane(EVALUATED, step_s=0.05, num_epochs=EPOCHS, exact=False, environment={"PART_S": "1.3"})
    plane.start_group("a")
    plane.wait_step(1)
    plane.start("b")
    plane.wait_ready("b")
    plane.form("a", "b", wait=False)
    plane.wait(lambda: plane.of(Switched, "b", generation=plane.generation), "the switch")
    plane.wait_step(8)
    # Nothing was given up: the joiner has been in one group since.
    assert [report.generation for report in plane.of(Switched, "b")] == [plane.generation]
    # While steps stand still, the control plane hears that work goes on.
    at_four = [report for report in plane.of(Progress) if report.step == 4]
    assert len(at_four) > 2


@pytest.mark.slow
def test_a_member_that_is_to_leave_does_so_once_the_evaluation_is_complete(make_plane):
    plane = make_plane(EVALUATED, num_epochs=EPOCHS, exact=False, environment={"PART_S": "0.1"})
    plane.start_group("a", "b")
    plane.wait_step(4)
    plane.order(Preempt(generation=plane.generation, grace_s=30.0), "a", "b")
    plane.wait_exit("a", "b")
    assert [len(results) for results in evaluations(plane).values()] == [2]
    assert {written.checkpoint.step for written in plane.of(CheckpointWritten)} == {5}


def test_evaluations_of_one_moment_are_told_apart() -> None:
    evaluations = Evaluations()
    assert evaluations.name_of(1, 5, "test") == "5/0/test"
    assert evaluations.name_of(1, 5, "other") == "5/0/other"
    assert evaluations.name_of(1, 5, "test") == "5/1/test"
    # Members that join here have asked for none before.
    assert evaluations.name_of(2, 5, "test") == "5/0/test"
