"""Programs of libraries in real workers: what happens to their group, and what must not change by it."""

from __future__ import annotations

import json

import msgspec
import pytest

from kits.runtime.runtime_plane import Plane, make_job
from springtide.core.workload import Entrypoint


def of_library(plane, library):
    """The plane, whose job is the whole program."""
    entrypoint = Entrypoint(source_path=plane.job.entrypoint.source_path, kind="script", library=library)
    plane.job = msgspec.structs.replace(plane.job, entrypoint=entrypoint, exact=False)
    return plane


# For a place in a program where a step begins, within a method: the second member fails once the others have step STEP.
FAILS_AFTER_THE_EXCHANGE = """        from springtide.core.errors import PeerLost
        from springtide.runtime.libraries.loop import LOOP
        ours = LOOP.loop._trainer
        if ours.step == STEP and ours.rank == 1 and ours.membership.generation == 2:
            reduce = ours._reduce
            def fail(pending):
                del ours._reduce
                reduce(pending)
                raise PeerLost("as if a member had died after the exchange")
            ours._reduce = fail"""


class UndisturbedRuns:
    """Runs of one worker that nothing happens to, by source and environment; each is made once."""

    def __init__(self, zygote, new_directory, library):
        self._zygote, self._new_directory, self._library = zygote, new_directory, library
        self._made = {}

    def of(self, source, environment):
        key = json.dumps([source, environment])
        if key not in self._made:
            directory = self._new_directory()
            values = {"STEP_S": "0", **environment}
            plane = Plane(self._zygote.path, directory, make_job(directory, source), environment=values)
            try:
                of_library(plane, self._library).start_group("a")
                plane.wait_finished()
            finally:
                plane.close()
            self._made[key] = plane
        return self._made[key]


def join(plane, *names):
    """Have workers join while the others stand still, so that they find the training under way."""
    hold = plane.work_dir / "hold"
    hold.touch()
    plane.start(*names)
    plane.wait_ready(*names)
    hold.unlink()
    plane.form(*plane.members, *names)


def go_on(plane, num_steps=2):
    plane.wait_step(len(plane.steps()) + num_steps)


def lose(plane, role, gone, *left):
    """Have a worker kill itself in the midst of a backward pass."""
    (plane.work_dir / f"kill-{role}").touch()
    plane.wait(lambda: gone in plane.exits, f"the end of {gone}")
    plane.form(*left, forced=True)


def churn(plane):
    """A group that grows, shrinks, and loses a follower and then its leader."""
    plane.start_group("a")
    plane.wait_step(2)
    join(plane, "b")
    go_on(plane)
    lose(plane, "follower", "b", "a")
    join(plane, "c")
    go_on(plane)
    lose(plane, "leader", "a", "c")
    join(plane, "d", "e")
    go_on(plane)
    plane.form("e", "d")
    plane.wait_exit("c")
    go_on(plane)
    plane.form("d")
    plane.wait_exit("e")
    plane.wait_finished()


def seen_in(plane):
    """What workers saw: learning rates by step, validation losses by the step after which they were found."""
    rates, losses = {}, {}
    for path in plane.work_dir.glob("lines-*"):
        for line in path.read_text().splitlines(keepends=True):
            # A worker that was killed may have left a part of a line.
            if line.endswith("\n"):
                found = json.loads(line)
                if "step" in found:
                    rates.setdefault(found["step"], set()).add(found["rate"])
                else:
                    losses.setdefault(found["after"], []).append(found["val"])
    return rates, losses


def assert_as(plane, expected):
    """The same learning rates, validation losses, samples and losses as in the undisturbed run."""
    rates, losses = seen_in(plane)
    expected_rates, expected_losses = seen_in(expected)
    assert rates == expected_rates
    assert sorted(losses) == sorted(expected_losses)
    for after, values in losses.items():
        assert values == pytest.approx([expected_losses[after][0]] * len(values), rel=1e-5)
    # After a restart from a checkpoint steps are done again: the last line is the valid one.
    last, others = {record["step"]: record for record in plane.steps()}, expected.steps()
    assert [last[step]["ids_digest"] for step in sorted(last)] == [record["ids_digest"] for record in others]
    assert [last[step]["loss"] for step in sorted(last)] == pytest.approx(
        [record["loss"] for record in others], rel=1e-5
    )
