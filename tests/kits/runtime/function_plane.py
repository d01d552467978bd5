"""A coordinator for tests: it invokes the real handler in threads over a store in memory, and replaces who dies."""

from __future__ import annotations

import functools
import threading
import time

import msgspec

from kits.runtime.pipeline_tasks_of_users import job_of
from springtide.core.errors import ObjectMissing
from springtide.core.functions import FunctionPlan, FunctionStage
from springtide.core.wire.functions import (
    ControlRecord,
    FunctionOrder,
    FunctionReport,
    FunctionResult,
    Keys,
    Place,
    StageState,
)
from springtide.runtime.function_handler import handler
from springtide.runtime.functions import worker as function_worker
from springtide.runtime.functions.source import UserSource
from springtide.storage.bundles import pack
from springtide.storage.stores.open import open_store

SOURCE = """
import torch
from torch import nn
import springtide as st


def model():
    made = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 3))
    # The functions of a test are threads and share the process's generator, so the model has one of its own.
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return made


def dataset():
    generator = torch.Generator().manual_seed(5)
    return torch.randn(44, 6, generator=generator), torch.randint(0, 3, (44,), generator=generator)


task = st.Task(
    model=model,
    dataset=dataset,
    loss=nn.functional.cross_entropy,
    optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
)
"""
NUM_LAYERS = 6
KEYS = Keys("jobs/job-1")
_PROCESS = threading.RLock()


def _one_at_a_time(work):
    @functools.wraps(work)
    def alone(*arguments, **options):
        with _PROCESS:
            return work(*arguments, **options)

    return alone


# The functions of a test are threads, in truth each is a process of its own: what importing, building and forgetting do
# to the whole process (modules, paths, seeds, torch's hooks) must not meet what another one's do.
function_worker.build_place_worker = _one_at_a_time(function_worker.build_place_worker)
UserSource.forget = _one_at_a_time(UserSource.forget)


class Killed(BaseException):
    """What a process that is killed does not live to see."""


class Context:
    """What a provider tells of an invocation."""

    memory_limit_in_mb = "512"

    def __init__(self, remaining_s=900.0):
        self.remaining_s = remaining_s

    def get_remaining_time_in_millis(self):
        return int(1000 * self.remaining_s)


def plan_of(num_stages=2, num_replicas=2, **fields):
    ends = [(stage + 1) * NUM_LAYERS // num_stages for stage in range(num_stages)]
    stages = tuple(
        FunctionStage(first_layer=first, end_layer=end, memory_mb=512)
        for first, end in zip([0, *ends[:-1]], ends, strict=True)
    )
    fields = {"num_micro_batches": 3, "micro_batch_size": 4, **fields}
    return FunctionPlan(stages=stages, num_replicas=num_replicas, **fields)


class Invoked(threading.Thread):
    """One invocation under way."""

    def __init__(self, order, context):
        super().__init__(name=f"invocation-{order.stage}.{order.replica}.{order.incarnation}", daemon=True)
        self.order = order
        self.context = context
        self.place = Place(order.stage, order.replica)
        self.result = None
        self.error = None

    def run(self):
        try:
            event = msgspec.json.decode(msgspec.json.encode(self.order))
            self.result = msgspec.convert(handler(event, self.context), FunctionResult)
        except BaseException as error:
            self.error = error


class FunctionPlane:
    """A job on functions without a platform: one plan, one store, and a record that the test changes."""

    def __init__(self, url, *, source=SOURCE, plan=None, save_every=1, generation=1, last_step=None, **job):
        self.url = url
        self.store = open_store(url)
        self.job = job_of(**{"batch": 16, "epochs": 3, **job})
        self.plan = plan or plan_of()
        self.record = ControlRecord(
            generation=generation,
            attempt=0,
            restore_step=0,
            plan=self.plan,
            incarnations={},
            save_every=save_every,
            last_step=last_step,
        )
        self.store.put(KEYS.job, msgspec.json.encode(self.job))
        self.store.put(KEYS.bundle, pack("task.py", source))
        self.invoked = []

    @property
    def places(self):
        return [
            Place(stage, replica) for stage in range(len(self.plan.stages)) for replica in range(self.plan.num_replicas)
        ]

    def write(self, **fields):
        self.record = msgspec.structs.replace(self.record, **fields)
        self.store.put(KEYS.control, msgspec.json.encode(self.record))

    def order(self, place, incarnation, *, is_successor=False):
        return FunctionOrder(
            job_id=self.job.job_id,
            store_url=self.url,
            prefix=KEYS.prefix,
            generation=self.record.generation,
            attempt=self.record.attempt,
            stage=place.stage,
            replica=place.replica,
            incarnation=incarnation,
            restore_step=self.record.restore_step,
            is_successor=is_successor,
            follows=incarnation - 1 if is_successor else -1,
        )

    def invoke(self, place, incarnation, *, is_successor=False, context=None):
        invoked = Invoked(self.order(place, incarnation, is_successor=is_successor), context or Context())
        self.invoked.append(invoked)
        invoked.start()
        return invoked

    def start(self, contexts=None):
        """All places, first incarnation."""
        self.write(incarnations={str(place): 0 for place in self.places})
        for place in self.places:
            self.invoke(place, 0, context=(contexts or {}).get(place))

    def newest_saved(self):
        """The newest step of which every stage's state is there."""
        step = 0
        for candidate in range(1, 200):
            if all(self.meta(candidate, stage) for stage in range(len(self.plan.stages))):
                step = candidate
        return step

    def meta(self, step, stage):
        try:
            return msgspec.json.decode(self.store.get(KEYS.state_meta(step, stage)), type=StageState)
        except ObjectMissing:
            return None

    def replace(self):
        """Somebody is gone: a new attempt from the newest state, new functions wherever there is none."""
        alive = {invoked.place for invoked in self.invoked if invoked.is_alive()}
        incarnations = {
            name: number + (name not in {str(place) for place in alive})
            for name, number in self.record.incarnations.items()
        }
        self.write(attempt=self.record.attempt + 1, restore_step=self.newest_saved(), incarnations=incarnations)
        return [self.invoke(place, incarnations[str(place)]) for place in self.places if place not in alive]

    def run(self, timeout_s=60.0, *, dead=()):
        """Until every place is done; replace those that die. The results of those who finished, by place."""
        deadline_s = time.monotonic() + timeout_s
        waiting = [invoked for invoked in self.invoked if invoked not in dead]
        done = {}
        while len(done) < len(self.places):
            assert time.monotonic() < deadline_s, f"still running: {[each.name for each in waiting]}"
            for invoked in list(waiting):
                invoked.join(0.02)
                if invoked.is_alive():
                    continue
                waiting.remove(invoked)
                if isinstance(invoked.error, Killed):
                    waiting += self.replace()
                    done = {place: done[place] for place in done if place not in {each.place for each in waiting}}
                elif invoked.error is not None:
                    raise invoked.error
                elif (
                    invoked.result.outcome == "finished"
                    and self.report(invoked.place, invoked.order.incarnation).attempt < self.record.attempt
                ):
                    # It had finished before it heard of the new attempt.
                    waiting += self.replace()
                elif invoked.result.outcome != "superseded":
                    done[invoked.place] = invoked.result
                if invoked.result is not None and invoked.result.outcome == "left":
                    del done[invoked.place]
                    self.write(
                        incarnations={**self.record.incarnations, str(invoked.place): invoked.order.incarnation + 1}
                    )
            waiting += [each for each in self.invoked if each not in waiting and each.is_alive()]
        return done

    def join(self):
        for invoked in self.invoked:
            invoked.join(20)
            assert not invoked.is_alive(), invoked.name

    def report(self, place, incarnation=0):
        return msgspec.json.decode(self.store.get(KEYS.report(place, incarnation)), type=FunctionReport)

    def losses(self):
        """The mean loss of every step, over all reports of the last stage; a step that was redone counts once."""
        last = len(self.plan.stages) - 1
        found = {}
        for invoked in self.invoked:
            if invoked.place.stage != last:
                continue
            try:
                report = self.report(invoked.place, invoked.order.incarnation)
            except ObjectMissing:
                continue
            for step, loss, num_samples in report.losses:
                before = found.setdefault(step, {}).setdefault(invoked.place.replica, (loss, num_samples))
                assert before == (loss, num_samples), f"step {step} came out otherwise when it was redone"
        return {
            step: sum(loss * count for loss, count in parts.values()) / sum(count for _, count in parts.values())
            for step, parts in sorted(found.items())
        }, {step: sum(count for _, count in parts.values()) for step, parts in sorted(found.items())}
