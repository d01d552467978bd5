"""The closed form of a step's time (equations 7 to 11) beside a walk through its tasks, lane by lane."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from springtide.core.functions import FunctionPlan, ModelProfile
from springtide.core.wire.functions import Place
from springtide.perf.functions.pipeline.step_time import StageTimes, estimate_step
from springtide.perf.functions.pipeline.tasks import Message, StageTask, step_tasks


class PipelineWalk(msgspec.Struct, frozen=True, kw_only=True):
    """A step's time by the closed form and by the walk."""

    closed_s: float
    walked_s: float

    @property
    def difference_fraction(self) -> float:
        """By how much the closed form is above the walk."""
        return self.closed_s / self.walked_s - 1.0


def walk(profile: ModelProfile, plan: FunctionPlan) -> PipelineWalk:
    """Both times of one plan. Every task takes what the profile says; updates take nothing, as in section 3.4.2.

    Raises InvalidRequest where a stage does not fit.
    """
    estimate = estimate_step(profile, plan)
    num_stages = len(plan.stages)
    graphs = {
        Place(stage, replica): step_tasks(Place(stage, replica), num_stages, plan.num_replicas, plan.num_micro_batches)
        for stage in range(num_stages)
        for replica in range(plan.num_replicas)
    }
    ends = finish_times(graphs, lambda place, task: _duration_s(estimate.stages[place.stage], task))
    return PipelineWalk(closed_s=estimate.step_s, walked_s=max(max(times) for times in ends.values()))


def finish_times(
    graphs: Mapping[Place, Sequence[StageTask]], duration_s: Callable[[Place, StageTask], float]
) -> dict[Place, list[float]]:
    """When every task of one step ends, in seconds from its start, if each lane runs one task at a time.

    A download begins when its message has been sent, an exchange when all replicas of the stage have reached it. Raises
    ValueError if the graphs wait for each other in a cycle or for a message that is never sent.
    """
    done: dict[Place, list[float | None]] = {place: [None] * len(tasks) for place, tasks in graphs.items()}
    sent: dict[Message, float] = {}
    queues = {
        (place, lane): [index for index, task in enumerate(tasks) if task.lane == lane]
        for place, tasks in graphs.items()
        for lane in ("compute", "upload", "download", "sync")
    }
    free_s = dict.fromkeys(queues, 0.0)
    while any(queues.values()):
        moved = False
        for (place, lane), queue in queues.items():
            while queue:
                task = graphs[place][queue[0]]
                begin_s = _begin_s(task, place, graphs, done, sent)
                if begin_s is None:
                    break
                end_s = max(begin_s, free_s[place, lane]) + duration_s(place, task)
                done[place][queue.pop(0)] = free_s[place, lane] = end_s
                moved = True
                if task.message is not None and task.lane == "upload":
                    sent[task.message] = end_s
        if not moved:
            stuck = next((place, graphs[place][queue[0]]) for (place, _), queue in queues.items() if queue)
            raise ValueError(f"{stuck[0]} waits for ever: {stuck[1].kind} of micro-batch {stuck[1].micro_batch}")
    return {place: [end_s for end_s in ends if end_s is not None] for place, ends in done.items()}


def _begin_s(
    task: StageTask,
    place: Place,
    graphs: Mapping[Place, Sequence[StageTask]],
    done: Mapping[Place, Sequence[float | None]],
    sent: Mapping[Message, float],
) -> float | None:
    """The earliest start of a task by its dependencies; None if that is not known yet."""
    begin_s = 0.0
    waited = [done[place][index] for index in task.needs]
    if task.lane == "download":
        assert task.message is not None
        waited.append(sent.get(task.message))
    if task.lane == "sync":
        for other, tasks in graphs.items():
            if other.stage == place.stage and other != place:
                index = next((at for at, found in enumerate(tasks) if found.kind == "exchange"), None)
                if index is not None:
                    waited += [done[other][need] for need in tasks[index].needs]
    for end_s in waited:
        if end_s is None:
            return None
        begin_s = max(begin_s, end_s)
    return begin_s


def _duration_s(stage: StageTimes, task: StageTask) -> float:
    match task.kind:
        case "forward":
            return stage.forward_s
        case "backward":
            return stage.backward_s
        case "send-output":
            return stage.upload_s
        case "take-input":
            return stage.download_s
        case "send-gradient":
            return stage.gradient_upload_s
        case "take-gradient":
            return stage.gradient_download_s
        case "exchange":
            return stage.sync_s
        case "update":
            return 0.0
