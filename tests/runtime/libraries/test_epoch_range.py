"""The number of epochs is that of the range around the loop, where its text tells that."""

from __future__ import annotations

import linecache
import textwrap

import pytest

from springtide.runtime.libraries.epoch_range import is_repeated, num_rounds
from springtide.runtime.libraries.loop_variables import program_frames


def found_in(text, look=num_rounds):
    """What is found where the program's loop asks for its first batch."""
    found = []

    def batches():
        # Of no file, so that it is none of the program's functions.
        found.append(look(program_frames()))
        yield 0

    batches.__code__ = batches.__code__.replace(co_filename="<test>")
    source = textwrap.dedent(text)
    path = f"/program/{hash(source)}.py"
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    exec(compile(source, path, "exec"), {"batches": batches, "tqdm": lambda what, **more: what, "__name__": "__main__"})
    return found[0]


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("for epoch in range(3):\n    for batch in batches(): pass", 3),
        (
            "first, last = 2, 10\nfor epoch in range(first, last + 1, 2):\n    for batch in enumerate(batches()): pass",
            5,
        ),
        (
            "for epoch in tqdm(range(4), disable=True):\n    with open('/dev/null'):\n        for b in batches(): pass",
            4,
        ),
        # The loop over epochs is in the function that calls.
        (
            "def one():\n    for b in batches(): pass\ndef main(epochs=6):\n    for e in range(epochs): one()\nmain()",
            6,
        ),
        # Nothing around it, an unknown length, something that it would have to call, and several around it.
        ("for batch in batches(): pass", None),
        ("while True:\n    for batch in batches(): pass\n    break", None),
        ("for epoch in [1, 2]:\n    for batch in batches(): pass", None),
        ("for epoch in range(len('ab')):\n    for batch in batches(): pass", None),
        ("for fold in range(2):\n    for epoch in range(3):\n        for batch in batches(): pass", None),
        # The loop around the definition of a function is none around its call.
        ("for one in range(2):\n    def run():\n        for batch in batches(): pass\nrun()", None),
    ],
)
def test_the_range_around_the_loop_is_found(text, length):
    assert found_in(text) == length


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("next(batches())", False),
        ("for fold in [1, 2]:\n    next(batches())", True),
        ("def train(): next(batches())\nfor seed in range(3): train()", True),
        ("for run in range(1):\n    next(batches())", False),
        # Tried again until it does not fail.
        ("while True:\n    next(batches())\n    break", False),
    ],
)
def test_a_call_within_a_for_is_repeated_unless_that_goes_round_once(text, expected):
    assert found_in(text, is_repeated) == expected
