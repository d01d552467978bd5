"""Functions that are forked from a warm process: the same handler's loop, the same limits, and no import again."""

import os
import signal
import time

import pytest

from kits.functions.emulated_service import Caller, running_emulator, small_service
from springtide.backends.functions.emulator.launch import emulator_status, inject, stop_emulator
from springtide.backends.processes import read_stat

LIMIT_S = 30.0


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    with running_emulator(tmp_path_factory.mktemp("emulator"), warm_template=True, preload=("json",)) as running:
        yield running


@pytest.fixture
def caller(emulated):
    return Caller(emulated[1])


def template_of(emulator_pid):
    """The process of the emulator's children that is the template."""
    with open(f"/proc/{emulator_pid}/task/{emulator_pid}/children") as file:
        children = [int(child) for child in file.read().split()]
    for child in children:
        with open(f"/proc/{child}/cmdline", "rb") as file:
            if b"emulator.template" in file.read():
                return child
    raise AssertionError("there is no template")


@pytest.mark.slow
def test_a_forked_function_is_as_one_that_was_started(caller):
    seen = caller.result({"text": "hello"})
    assert seen["echo"] == {"text": "hello"}
    assert seen["environment"]["AWS_LAMBDA_FUNCTION_MEMORY_SIZE"] == "1769"
    assert seen["cwd"] == seen["environment"]["HOME"]
    assert caller.result({})["pid"] == seen["pid"]


@pytest.mark.slow
def test_functions_share_nothing_but_their_start(caller, emulated):
    running = caller.start({"do": "sleep", "seconds": 0.5})
    other = caller.result({})
    end = running.get(timeout=LIMIT_S)
    assert end.outcome == "returned"
    assert read_stat(other["pid"]).process_group == other["pid"]


def test_its_end_is_told_as_that_of_any_other(caller, emulated):
    assert "exit status 3" in caller.call({"do": "exit", "code": 3}).error
    inject(emulated[0], "kill", seconds=0.05)
    assert caller.call({"do": "sleep", "seconds": 15}).outcome == "killed"
    assert caller.call({"do": "hold", "mb": 400, "seconds": 15}, memory_mb=128).outcome == "out_of_memory"
    assert "doing raise" in caller.call({"do": "raise", "text": "x"}).log


def test_a_template_that_dies_takes_its_functions_and_is_made_anew(caller, emulated):
    running = caller.start({"do": "sleep", "seconds": 30})
    deadline = time.monotonic() + LIMIT_S
    while not emulator_status(emulated[0])["num_running"]:
        assert time.monotonic() < deadline
    os.kill(template_of(emulated[0].process.pid), signal.SIGKILL)
    assert running.get(timeout=LIMIT_S).outcome in ("killed", "failed")
    assert caller.call({}).outcome == "returned"


@pytest.mark.slow
def test_a_module_that_cannot_be_imported_is_told_to_who_needs_it(tmp_path):
    options = {"warm_template": True, "preload": ("no_such_module",), "service": small_service(memory_mb=(128,))}
    with running_emulator(tmp_path, **options) as (_, provider):
        end = Caller(provider).call({}, memory_mb=128)
        assert end.outcome == "failed"
        assert "template" in end.error
        stop_emulator(tmp_path)
    assert "no_such_module" in (tmp_path / "emulator.log").read_text()
