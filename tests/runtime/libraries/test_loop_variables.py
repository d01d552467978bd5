"""Plain variables around a loop go from one run of it to another, others stay."""

from __future__ import annotations

import torch

from springtide.runtime.libraries.loop_variables import LoopVariables

PROGRAM = """
import torch
constant, untold = 5, object()

def inner(batches, counted):
    done = 0
    for batch in batches:
        done += 1
        counted.append(done)
    return done

def main(batches, shift):
    best, name, waited, counted, kept = 1e9, "a" * shift, 0, [], {"a": (0, None)}
    same, total, own, large = counted, torch.zeros(()), {1, 2}, [0] * 20_000
    def closure():
        return waited
    for epoch in range(2):
        done = inner(batches(epoch), counted)
        best, waited, total = best - shift, waited + 1, total + shift
        kept["a"] = (epoch, shift)
        own.add(epoch)
        large[0] += 1
    return best, waited, counted, kept, same is counted, total, own, large[0], closure(), name, constant
"""


def unseen(function):
    """The function as if of no file, so that it is none of the program's."""
    function.__code__ = function.__code__.replace(co_filename="<test>")
    return function


def run(batches, shift):
    namespace = {"__name__": "__main__"}
    exec(compile(PROGRAM, "/program/main.py", "exec"), namespace)
    return namespace["main"](unseen(batches), shift)


def carried(shift=3):
    """The result of a run that is set, in its second epoch, to what another had after its first one."""
    found = {}

    def leader(epoch):
        if not epoch:
            found["variables"] = LoopVariables()
        for number in range(4):
            if epoch and number == 2:
                found["state"] = found["variables"].read()
            yield number

    def joiner(epoch):
        if not epoch:
            found["variables"] = LoopVariables()
            yield 0
            return
        found["variables"].write(found["state"])
        yield from range(2, 4)

    expected = run(leader, shift)
    return expected, run(joiner, shift)


def test_counters_sums_and_lists_are_those_of_the_other_run():
    expected, found = carried()
    best, waited, counted, kept, is_same, total = found[:6]
    assert (best, waited, counted, kept) == expected[:4]
    assert counted == [1, 2, 3, 4, 1, 2, 3, 4]
    # Names of the same list stay names of the same list, and cells of closures are set.
    assert is_same
    assert found[8] == waited
    assert torch.equal(total, expected[5])
    # Large ones and sets stay as they were here.
    assert (found[6], found[7]) == ({0, 1, 2}, 2)


def test_what_has_not_changed_is_not_sent():
    states = []

    def batches(epoch):
        variables = LoopVariables()
        yield 0
        states.append(variables.read())

    run(batches, 1)
    for inner, main, *_ in states:
        assert inner["function"] == "inner"
        assert inner["values"].keys() == {"batch", "done", "counted"}
        assert main["function"] == "main"
        # The same list as that of the loop.
        assert main["values"].keys() == {"counted", "same"}


def test_what_has_changed_only_here_goes_back():
    seen = []

    def program(source, action):
        exec(compile(source, "/program/other.py", "exec"), {"__name__": "__main__", "action": action, "seen": seen})

    source = "waited = 0\naction('begin')\nwaited = 2\naction('write')\nseen.append(waited)"
    held = {}

    def action(what):
        if what == "begin":
            held["variables"] = LoopVariables()
        else:
            held["variables"].write([{"function": "<module>", "values": {}}])

    program(source, unseen(action))
    assert seen == [0]


def test_nothing_is_set_where_the_functions_around_the_loop_are_others():
    held = {}

    def batches(epoch):
        variables = held.setdefault("variables", LoopVariables())
        yield 0
        variables.write([{"function": "another", "values": {"done": 100}}])

    assert run(batches, 1)[2] == [1, 1]
