"""What a member will get is told before: samples are fetched ahead by it."""

from __future__ import annotations

from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from kits.runtime.training_jobs import ADAPTIVE, make_job
from springtide.runtime.elastic.steps.choice import step_method
from springtide.runtime.elastic.steps.half_pass import HALF
from springtide.runtime.elastic.steps.method import parts_ahead
from springtide.runtime.elastic.training_cursor import TrainingCursor
from springtide.runtime.models.named_tensors import TrainingState


def made(job, micro_batch=0):
    model = nn.Linear(1, 1)
    state = TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.device("cpu"))
    cursor = TrainingCursor(job)
    # Batches of 16, and one of 5 at the end of each epoch.
    cursor.start(53)
    return step_method(job, state, measures_noise=cursor.measures_noise, micro_batch=micro_batch), cursor, model


@pytest.mark.parametrize(
    "options",
    [
        {"exact": False},
        {"exact": False, "micro_batch": 3},
        {"exact": True},
        {"exact": False, "batch": ADAPTIVE},
        {"exact": False, "batch": ADAPTIVE, "micro_batch": 3},
    ],
)
@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_parts_ahead_are_those_that_come(options, world_size):
    micro_batch = options.get("micro_batch", 0)
    batch = options.get("batch")
    job = make_job(exact=options["exact"], num_virtual_shards=8, max_workers=8, batch=batch)
    for rank in range(world_size):
        group = SimpleNamespace(rank=rank, world_size=world_size) if world_size > 1 else None
        method, cursor, model = made(job, micro_batch)
        if options["exact"]:
            # The passes below are none over real samples, and would be void.
            method._obstacle = "asked for"
            # Nor are plain passes made beside them to measure the price.
            method._price._num_begun = -100
        ahead = list(parts_ahead(cursor, method, group, HALF))
        come = []
        while not cursor.is_over:
            batch = cursor.next_batch()
            method.begin(batch, group, is_measured=cursor.measures_step)
            while method.has_part():
                part, bounds = method.begin_part()
                assert next(parts_ahead(cursor, method, group, part))[1:] == (part, bounds)
                come.append((batch.step, batch.ids.tolist(), part, bounds))
                _pass_without_exchange(method, model)
            method.discard()
            cursor.commit(batch, None, 0.0)
        assert [(batch.step, batch.ids.tolist(), part, bounds) for batch, part, bounds in ahead] == come


def _pass_without_exchange(method, model):
    """Go through a part as a pass over it does, without a group that would add up what it computes."""
    for reducer in getattr(method, "_reducers", ()):
        reducer.begin = lambda group, *, is_measured: None
    method.backward(model(torch.ones(1, 1)).sum())


def test_batches_ahead_end_with_the_job_and_begin_with_the_next_step():
    _, cursor, _ = made(make_job())
    whole = [batch.ids.tolist() for batch in cursor.batches_ahead()]
    assert len(whole) == 8
    cursor.commit(cursor.next_batch(), None, 0.0)
    assert [batch.ids.tolist() for batch in cursor.batches_ahead()] == whole[1:]
    assert cursor.next_batch().ids.tolist() == whole[1]
    cursor.set_batch_size(4)
    assert [len(batch.ids) for batch in islice(cursor.batches_ahead(), 3)] == [4, 4, 4]
