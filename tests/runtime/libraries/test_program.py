"""A program that does not train by its library ends with a sentence."""

from __future__ import annotations

import pytest

from kits.runtime.library_plane import of_library
from springtide.core.wire.workers import Failed


def failure(plane, library):
    of_library(plane, library).start("a")
    plane.wait(lambda: plane.of(Failed, "a"), "Failed")
    # The next plane takes the zygote over, and with it what this one would wait for at its end.
    plane.wait_exit("a", code=1)
    return plane.of(Failed, "a")[0].error


@pytest.mark.slow
def test_a_program_that_trains_nothing_fails(make_plane):
    assert "without Lightning's Trainer.fit()" in failure(make_plane("print('no loop')"), "lightning")
    told = failure(make_plane("print('no loop')"), "accelerate")
    assert "without a loop over a DataLoader that accelerator.prepare() has returned" in told


@pytest.mark.slow
def test_what_the_program_raises_and_its_exit_code_are_told(make_plane):
    assert failure(make_plane("raise KeyError('rate')"), "transformers").startswith("KeyError: 'rate' (user_code.py:1)")
    assert "exit code 3" in failure(make_plane("import sys\nsys.exit(3)"), "transformers")
