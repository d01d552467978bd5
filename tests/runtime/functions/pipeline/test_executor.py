import threading
import time

import pytest

from springtide.core.wire.functions import Place
from springtide.perf.functions.pipeline.tasks import StageTask, step_tasks
from springtide.runtime.functions.pipeline.executor import StepExecutor


class Asked(Exception):
    pass


def nothing():
    return None


def executor(check=nothing, num_in_flight=2):
    return StepExecutor(num_in_flight, check, time.monotonic)


@pytest.mark.parametrize("num_in_flight", [1, 2, 4])
def test_every_task_runs_once_after_what_it_needs(num_in_flight):
    tasks = step_tasks(Place(1, 0), 3, 2, 4)
    ended = []
    lock = threading.Lock()

    def work(task, is_ended):
        with lock:
            assert {tasks.index(tasks[need]) for need in task.needs} <= {index for index, _ in ended}
            ended.append((tasks.index(task), threading.current_thread() is threading.main_thread()))

    took_s = executor(num_in_flight=num_in_flight).run(tasks, work)
    assert sorted(index for index, _ in ended) == list(range(len(tasks)))
    assert set(took_s) == {task.kind for task in tasks}
    for index, on_main in ended:
        assert on_main == (tasks[index].lane == "compute")
    computed = [index for index, _ in ended if tasks[index].lane == "compute"]
    assert computed == sorted(computed)


def test_a_transfer_passes_beside_computation():
    both = threading.Barrier(2, timeout=10)
    tasks = (StageTask(kind="send-output", lane="upload"), StageTask(kind="forward", lane="compute"))
    executor().run(tasks, lambda task, is_ended: both.wait())


def test_transfers_of_one_link_overlap_up_to_the_limit():
    under_way = []
    most = []
    lock = threading.Lock()

    def work(task, is_ended):
        with lock:
            under_way.append(task)
            most.append(len(under_way))
        with lock:
            under_way.remove(task)

    tasks = tuple(StageTask(kind="take-input", lane="download", micro_batch=at) for at in range(20))
    executor(num_in_flight=3).run(tasks, work)
    assert max(most) <= 3


@pytest.mark.parametrize("lane", ["upload", "download", "sync", "compute"])
def test_an_error_in_any_lane_ends_the_step(lane):
    kinds = {"upload": "send-output", "download": "take-input", "sync": "exchange", "compute": "forward"}
    tasks = tuple(StageTask(kind=kind, lane=name) for name, kind in kinds.items())
    left = []

    def work(task, is_ended):
        if task.lane == lane:
            raise OSError(lane)
        if task.lane != "compute":
            while not is_ended():
                time.sleep(0.001)
            left.append(task.lane)

    before = set(threading.enumerate())
    running = executor()
    with pytest.raises(OSError, match=lane):
        running.run(tasks, work)
    running.close()
    assert set(left) <= {"upload", "download", "sync"} - {lane}
    # Threads of tests that ran before, in the same process, are not its own.
    begun = [thread for thread in threading.enumerate() if thread not in before]
    assert not [thread for thread in begun if thread.name.startswith("springtide-")]


@pytest.mark.slow
def test_whoever_waits_is_asked_whether_to_go_on():
    def check():
        raise Asked

    tasks = (
        StageTask(kind="take-input", lane="download"),
        StageTask(kind="forward", lane="compute", needs=(0,)),
    )

    def work(task, is_ended):
        while not is_ended():
            time.sleep(0.001)

    running = executor(check)
    with pytest.raises(Asked):
        running.run(tasks, work)
    running.close()
