import itertools
from collections import Counter

import pytest

from springtide.core.wire.functions import Place
from springtide.perf.functions.pipeline.tasks import Message, micro_batch_bounds, step_tasks

SHAPES = list(itertools.product((1, 2, 3, 5), (1, 2, 3), (0, 1, 2, 4)))


def graphs_of(num_stages, num_replicas, num_micro_batches):
    places = [Place(stage, replica) for stage in range(num_stages) for replica in range(num_replicas)]
    return {place: step_tasks(place, num_stages, num_replicas, num_micro_batches) for place in places}


@pytest.mark.parametrize(("num_stages", "num_replicas", "num_micro_batches"), SHAPES)
def test_every_message_has_one_sender_and_one_reader(num_stages, num_replicas, num_micro_batches):
    sent, read = Counter(), Counter()
    for place, tasks in graphs_of(num_stages, num_replicas, num_micro_batches).items():
        for task in tasks:
            if task.lane == "upload":
                assert task.message.place == place
                sent[task.message] += 1
            elif task.lane == "download":
                assert task.message.reader == place
                read[task.message] += 1
            else:
                assert task.message is None
    assert sent == read
    assert set(sent.values()) <= {1}
    assert len({message.name for message in sent}) == len(sent)
    assert len(sent) == 2 * (num_stages - 1) * num_replicas * num_micro_batches


@pytest.mark.parametrize(("num_stages", "num_replicas", "num_micro_batches"), SHAPES)
def test_every_place_goes_forward_then_back_then_updates(num_stages, num_replicas, num_micro_batches):
    graphs = graphs_of(num_stages, num_replicas, num_micro_batches)
    for tasks in graphs.values():
        assert all(need < index for index, task in enumerate(tasks) for need in task.needs)
        computed = [(task.kind, task.micro_batch) for task in tasks if task.lane == "compute"]
        assert computed == [
            *(("forward", at) for at in range(num_micro_batches)),
            *(("backward", at) for at in reversed(range(num_micro_batches))),
            ("update", 0),
        ]
        assert [task.kind for task in tasks].count("exchange") == (num_replicas > 1)


@pytest.mark.parametrize("num_samples", [1, 2, 3, 5, 7, 16, 17, 32])
@pytest.mark.parametrize(("num_replicas", "micro_batch_size"), [(1, 4), (2, 4), (3, 2), (4, 8)])
def test_micro_batches_hold_every_sample_once(num_samples, num_replicas, micro_batch_size):
    parts = [
        micro_batch_bounds(num_samples, replica, num_replicas, micro_batch_size) for replica in range(num_replicas)
    ]
    flat = list(itertools.chain.from_iterable(parts))
    assert [low for low, _ in flat] == [0, *(high for _, high in flat)][:-1]
    assert flat[-1][1] == num_samples
    assert all(0 < high - low <= micro_batch_size for low, high in flat)
    most = -(-num_samples // num_replicas)
    assert max(len(part) for part in parts) <= -(-most // micro_batch_size)


def test_messages_are_told_apart_by_sender_direction_and_micro_batch():
    assert Message("a", Place(1, 2), 3).reader == Place(2, 2)
    assert Message("g", Place(1, 2), 3).reader == Place(0, 2)
    assert Message("g", Place(1, 2), 3).name == "g/1.2.3"
