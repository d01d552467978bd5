"""The way of one decision through the source: how many files it visits, and how often it goes from one to another.

A reader follows the same way. Both numbers are counts, the same on every machine; lower them when they can be lowered.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from types import FrameType

import springtide
from springtide.control.controller import Controller
from springtide.core import events
from springtide.core.resources import make_node
from springtide.core.workload import Entrypoint, Goal, TrainingJob
from springtide.scheduling.registry import make_policy

SOURCE = f"{Path(springtide.__file__).parent}/"
MAX_FILES = 35
# Keys of caches that are compared by identity are asked for in core/decision.py.
MAX_MOVES = 426


class CallPath:
    """Records, call by call and return by return, in which file of the product the program is."""

    def __init__(self) -> None:
        self.files: list[str] = []

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event not in ("call", "return") or not frame.f_code.co_filename.startswith(SOURCE):
            return
        back = frame.f_back
        came_from_source = back is not None and back.f_code.co_filename.startswith(SOURCE)
        here = back if event == "return" and came_from_source else frame
        assert here is not None
        self.files.append(here.f_code.co_filename.removeprefix(SOURCE))

    @property
    def num_moves(self) -> int:
        return sum(before != after for before, after in pairwise(self.files))


def path_of_first_decision() -> CallPath:
    """One turn of the controller under the default policy: a job with a deadline arrives on four idle devices."""
    job = TrainingJob(
        job_id="a",
        name="a",
        entrypoint=Entrypoint(source_path="job.py", object_name="fit"),
        max_workers=4,
        global_batch_size=64,
        total_steps=1000,
        goal=Goal(deadline_s=500.0),
        profile_steps_per_s={1: 10.0, 2: 19.0, 4: 36.0},
    )
    controller = Controller(make_policy("springtide"))
    controller.step(0.0, [events.NodeJoined(node=make_node("n", 4))])
    path = CallPath()
    sys.setprofile(path)
    try:
        step = controller.step(1.0, [events.JobSubmitted(job=job)])
    finally:
        sys.setprofile(None)
    assert [type(action).__name__ for action in step.actions] == ["AdmitJob", *["StartReplica"] * 4]
    return path


def test_one_decision_visits_few_files_and_moves_little_between_them():
    path = path_of_first_decision()
    visited = sorted(set(path.files))
    assert {"control/controller.py", "scheduling/policies/springtide/decision.py"} <= set(visited)
    assert len(visited) <= MAX_FILES, f"{len(visited)} files: {visited}"
    assert path.num_moves <= MAX_MOVES, f"{path.num_moves} moves between {len(visited)} files"
