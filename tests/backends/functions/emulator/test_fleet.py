"""Who gets an invocation, what ends it, and what is injected: the fleet on functions that are coroutines here."""

import asyncio
import json
import signal

import pytest

from springtide.backends.functions.emulator import fleet as fleets
from springtide.backends.functions.emulator.boxes import Boxes
from springtide.backends.functions.emulator.config import EmulatorConfig, EmulatorFaults
from springtide.backends.functions.emulator.fleet import Fleet, Injection, Lost, Throttled
from springtide.backends.functions.emulator.instances import EmulatedInvocation, Function, Instance
from springtide.backends.functions.emulator.launchers import FunctionProcess, PlainLauncher
from springtide.backends.functions.emulator.limits import NoShare
from springtide.backends.functions.emulator.logs import LogIndex
from springtide.backends.functions.emulator.template import ForkRequest
from springtide.core.errors import BackendError
from springtide.perf.functions.services import emulator

LIMIT_S = 20.0
FUNCTION = Function(name="f", memory_mb=128, timeout_s=5.0, handler="h.handler", environment={})
OTHER = Function(name="g", memory_mb=128, timeout_s=5.0, handler="h.handler", environment={})


class PlayedProcess(FunctionProcess):
    """Ends when it is told to."""

    def kill(self):
        self.end(-signal.SIGKILL)

    def end(self, code):
        if not self.exited.done():
            self.exited.set_result(code)


class PlayedBoxes:
    """Stands for Boxes: instances are real, their processes are coroutines that do what the payload says."""

    cpu_method = "none"

    def __init__(self, directory):
        self.directory = directory
        self.logs = LogIndex(lambda: 0)
        self.started, self.forgotten, self.tasks = [], [], []
        self.fails_to_start = False

    def box(self, function):
        identity = f"i{len(self.started)}"
        return Instance(function, self.directory / identity, NoShare(), 1.0, self.logs, identity)

    async def start(self, instance, address):
        if self.fails_to_start:
            raise BackendError("no process can be had")
        instance.process = PlayedProcess(1 << 22, asyncio.get_running_loop().create_future())
        self.started.append(instance)
        self.tasks.append(asyncio.ensure_future(self._play(instance)))

    async def _play(self, instance):
        if instance.function.handler == "broken":
            instance.process.end(1)
            return
        while (order := await instance.next_order()) is not None:
            invocation, _ = order
            verb = json.loads(invocation.payload)
            if verb == "die":
                instance.process.end(3)
                return
            if verb == "wait":
                continue
            instance.pipe.drain()
            invocation.answer("", b'"done"')

    async def warm_up(self):
        pass

    def forget(self, instance):
        self.forgotten.append(instance.id)

    def clear_up(self):
        pass

    async def close(self):
        for task in self.tasks:
            task.cancel()


def play(scene, tmp_path, num_places=4, concurrency=4, **changes):
    """Run a scene on a fleet, and end it."""

    async def run():
        config = EmulatorConfig(service=emulator((128,), concurrency=concurrency, cold_start_s=0.0), **changes)
        boxes = PlayedBoxes(tmp_path)
        fleet = Fleet(config, boxes, {port: f"127.0.0.1:{port}" for port in range(1, num_places + 1)})
        fleet.functions = {"f": FUNCTION, "g": OTHER}
        try:
            return await asyncio.wait_for(scene(fleet, boxes), LIMIT_S)
        finally:
            await fleet.close()
            assert not fleet.instances

    return asyncio.run(run())


def invoke(fleet, verb="work", function=FUNCTION):
    return fleet.invoke(function, json.dumps(verb).encode(), "id")


def test_an_instance_is_used_again_and_only_by_its_function(tmp_path):
    async def scene(fleet, boxes):
        answers = [await invoke(fleet), await invoke(fleet), await invoke(fleet, function=OTHER)]
        assert [answer.payload for answer in answers] == [b'"done"'] * 3
        return [instance.function.name for instance in boxes.started]

    assert play(scene, tmp_path) == ["f", "g"]


def test_the_report_charges_the_cold_start_once(tmp_path):
    async def scene(fleet, boxes):
        return (await invoke(fleet)).log.decode(), (await invoke(fleet)).log.decode()

    first, second = play(scene, tmp_path)
    assert "Init Duration" in first
    assert "Init Duration" not in second
    assert first.startswith("START RequestId: id")


def test_an_exit_is_told_as_lambda_tells_it_and_the_place_is_free_again(tmp_path):
    async def scene(fleet, boxes):
        answer = await invoke(fleet, "die")
        again = await invoke(fleet)
        return answer, again, boxes

    answer, again, boxes = play(scene, tmp_path)
    assert answer.function_error == "Unhandled"
    assert "exit status 3" in json.loads(answer.payload)["errorMessage"]
    assert again.payload == b'"done"'
    assert boxes.forgotten == ["i0", "i1"]


def test_the_lifetime_ends_what_does_not_end(tmp_path):
    short = Function(name="f", memory_mb=128, timeout_s=0.05, handler="h.handler", environment={})

    async def scene(fleet, boxes):
        return await invoke(fleet, "wait", short), fleet.counts

    answer, counts = play(scene, tmp_path)
    assert "Task timed out after 0.05 seconds" in answer.payload.decode()
    assert b"Status: timeout" in answer.log
    assert counts.num_timed_out == 1


def test_above_the_concurrency_and_above_the_places_it_throttles(tmp_path):
    async def crowded(fleet, boxes):
        first = asyncio.ensure_future(invoke(fleet, "wait"))
        await asyncio.sleep(0)
        with pytest.raises(Throttled):
            await invoke(fleet)
        first.cancel()
        return fleet.counts.num_throttled

    assert play(crowded, tmp_path / "a", concurrency=1) == 1
    assert play(crowded, tmp_path / "b", num_places=1) == 1


def test_the_instance_that_was_idle_longest_makes_room(tmp_path):
    async def scene(fleet, boxes):
        await invoke(fleet)
        await invoke(fleet, function=OTHER)
        return [instance.ending for instance in boxes.started]

    assert play(scene, tmp_path, num_places=1) == ["idle", ""]


def test_what_has_been_idle_for_long_is_ended(tmp_path):
    async def scene(fleet, boxes):
        await invoke(fleet)
        await asyncio.wait_for(boxes.started[0].process.exited, LIMIT_S)
        return boxes.started[0].ending

    assert play(scene, tmp_path, idle_s=0.01) == "idle"


def test_code_that_never_gets_ready_fails_its_invocation(tmp_path):
    broken = Function(name="f", memory_mb=128, timeout_s=5.0, handler="broken", environment={})

    async def scene(fleet, boxes):
        first = await invoke(fleet, function=broken)
        boxes.fails_to_start = True
        return first, await invoke(fleet)

    first, second = play(scene, tmp_path)
    assert "exit status 1" in first.payload.decode()
    assert "no process can be had" in second.payload.decode()


def test_injections_come_first_and_in_order_and_then_chance(tmp_path):
    async def scene(fleet, boxes):
        fleet.inject(Injection(fault="throttled", num_times=2))
        fleet.inject(Injection(fault="answer-lost"))
        for _ in range(2):
            with pytest.raises(Throttled):
                await invoke(fleet)
        with pytest.raises(Lost):
            await invoke(fleet)
        await invoke(fleet)
        fleet.inject(Injection(fault="kill", seconds=0.0))
        killed = await invoke(fleet, "wait")
        fleet.set_faults(EmulatorFaults(throttled_fraction=1.0))
        with pytest.raises(Throttled):
            await invoke(fleet)
        return killed, fleet.counts

    killed, counts = play(scene, tmp_path)
    assert "signal: killed" in killed.payload.decode()
    assert (counts.num_throttled, counts.num_lost, counts.num_killed) == (3, 1, 1)
    assert counts.num_invocations == 6


def test_a_changed_function_gets_new_instances(tmp_path):
    changed = Function(name="f", memory_mb=128, timeout_s=5.0, handler="h.handler", environment={"A": "1"})

    async def scene(fleet, boxes):
        await invoke(fleet)
        fleet.functions["f"] = changed
        fleet.retire("f")
        await invoke(fleet, function=changed)
        return [instance.ending for instance in boxes.started]

    assert play(scene, tmp_path) == ["idle", ""]


def test_the_summary_tells_who_works(tmp_path):
    async def scene(fleet, boxes):
        running = asyncio.ensure_future(invoke(fleet, "wait"))
        while not fleet.instances or not next(iter(fleet.instances.values())).current:
            await asyncio.sleep(0)
        told = json.loads(fleets.summary(fleet))
        assert fleet.kill(told["instances"][0]["id"])
        assert not fleet.kill("nobody")
        await running
        return told

    told = play(scene, tmp_path)
    assert told["num_running"] == 1
    assert told["instances"][0]["function"] == "f"
    assert told["instances"][0]["invocation"] == "id"


def test_the_first_answer_counts_and_the_tail_is_four_kilobytes():
    async def scene():
        invocation = EmulatedInvocation(FUNCTION, b"1", "id")
        invocation.fail("Runtime.ExitError", "gone")
        invocation.answer("", b"late")
        for number in range(1000):
            invocation.note(f"line {number} " + "x" * 20)
        return await invocation.answered, invocation.tail()

    (function_error, payload), tail = asyncio.run(scene())
    assert function_error == "Unhandled"
    assert json.loads(payload)["errorMessage"] == "RequestId: id Error: gone"
    assert len(tail) == 4096
    assert tail.endswith(b"line 999 " + b"x" * 20 + b"\n")


def test_a_process_is_started_and_its_exit_code_is_told(tmp_path):
    async def scene():
        # No interpreter, but a program that takes the same place in the command.
        launcher = PlainLauncher("/bin/false")
        request = ForkRequest(
            instance="i", environment={}, directory=str(tmp_path), group_procs="", handler="h", num_threads=1
        )
        process = await launcher.launch(request, 2)
        code = await asyncio.wait_for(process.exited, LIMIT_S)
        process.kill()
        return code

    assert asyncio.run(scene()) == 1


def test_a_box_holds_nothing_of_the_platforms_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("SPRINGTIDE_SECRET", "x")

    async def scene():
        config = EmulatorConfig(
            service=emulator((128,)), cpu_method="none", python="/bin/true", role_environment={"ROLE": "r"}
        )
        boxes = Boxes(config, tmp_path, LogIndex(lambda: 0))
        requests = []

        async def launch(request, log):
            requests.append(request)
            return PlayedProcess(1 << 22, asyncio.get_running_loop().create_future())

        boxes._plain.launch = launch
        instance = boxes.box(FUNCTION)
        await boxes.start(instance, "127.0.0.1:1")
        instance.process.end(0)
        instance.clear(boxes.forget)
        await boxes.close()
        return requests[0]

    request = asyncio.run(scene())
    assert request.environment["ROLE"] == "r"
    assert request.environment["AWS_LAMBDA_RUNTIME_API"] == "127.0.0.1:1"
    assert request.environment["OMP_NUM_THREADS"] == "1"
    assert "SPRINGTIDE_SECRET" not in request.environment
    assert not list((tmp_path / "instances").iterdir())
