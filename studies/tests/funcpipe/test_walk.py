"""The walk through the tasks of a step: every shape ends, transfers pass beside computation."""

from __future__ import annotations

import itertools

import pytest

from springtide.core.wire.functions import Place
from springtide.perf.functions.pipeline.tasks import step_tasks
from springtide_studies.funcpipe.walk import finish_times

SHAPES = list(itertools.product((1, 2, 3, 5), (1, 2, 3), (0, 1, 2, 4)))


def graphs_of(num_stages, num_replicas, num_micro_batches):
    places = [Place(stage, replica) for stage in range(num_stages) for replica in range(num_replicas)]
    return {place: step_tasks(place, num_stages, num_replicas, num_micro_batches) for place in places}


@pytest.mark.parametrize(("num_stages", "num_replicas", "num_micro_batches"), SHAPES)
def test_a_step_ends_whatever_its_shape(num_stages, num_replicas, num_micro_batches):
    graphs = graphs_of(num_stages, num_replicas, num_micro_batches)
    ends = finish_times(graphs, lambda place, task: 1.0)
    assert all(len(ends[place]) == len(tasks) for place, tasks in graphs.items())


def test_replicas_may_have_different_numbers_of_micro_batches():
    graphs = {
        Place(stage, replica): step_tasks(Place(stage, replica), 2, 2, 3 if replica == 0 else 0)
        for stage in range(2)
        for replica in range(2)
    }
    ends = finish_times(graphs, lambda place, task: 1.0)
    assert ends[Place(0, 1)][-1] == ends[Place(0, 0)][-1]


def test_transfers_pass_beside_computation():
    """Two stages, four micro-batches: with one second for everything the pipeline is as long as FuncPipe's formula."""
    ends = finish_times(graphs_of(2, 1, 4), lambda place, task: 0.0 if task.kind == "update" else 1.0)
    # First micro-batch forward: compute, upload, download, compute; then a lag of one second for each of the others.
    forward_s = 4 + 3
    # The last stage goes back at once; the other one's last backward ends an upload, a download and its own later.
    assert max(end for times in ends.values() for end in times) == forward_s + 4 + 3
    alone = finish_times(graphs_of(1, 1, 4), lambda place, task: 0.0 if task.kind == "update" else 1.0)
    assert alone[Place(0, 0)][-1] == 8


def test_a_slow_link_sets_the_pace():
    ends = finish_times(graphs_of(2, 1, 3), lambda place, task: 5.0 if task.lane == "upload" else 1.0)
    forwards = [
        end
        for end, task in zip(ends[Place(1, 0)], step_tasks(Place(1, 0), 2, 1, 3), strict=True)
        if task.kind == "forward"
    ]
    assert [later - earlier for earlier, later in itertools.pairwise(forwards)] == [5.0, 5.0]


def test_graphs_that_wait_for_each_other_are_found():
    graphs = graphs_of(2, 1, 2)
    del graphs[Place(0, 0)]
    with pytest.raises(ValueError, match=r"1\.0 waits for ever: forward of micro-batch 0"):
        finish_times(graphs, lambda place, task: 1.0)
