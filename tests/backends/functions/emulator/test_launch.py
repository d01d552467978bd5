"""Real boto3 calls, real processes that run awslambdaric: what a function gets, and how it ends."""

import json
import os
import queue
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from kits.functions.emulated_service import Caller, running_emulator, small_service
from springtide.backends.functions.emulator import __main__ as emulator_command
from springtide.backends.functions.emulator.config import EmulatorConfig, EmulatorFaults
from springtide.backends.functions.emulator.launch import (
    emulator_status,
    ensure_emulator,
    inject,
    kill_instance,
    set_faults,
    stop_emulator,
)
from springtide.backends.functions.emulator.limits import make_cpu_groups
from springtide.backends.processes import read_stat

LIMIT_S = 30.0


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    os.environ["SPRINGTIDE_TEST_SECRET"] = "not for functions"
    try:
        with running_emulator(
            tmp_path_factory.mktemp("emulator"), role_environment={"STORE_KEY": "the role's"}
        ) as running:
            yield running
    finally:
        del os.environ["SPRINGTIDE_TEST_SECRET"]


@pytest.fixture
def caller(emulated):
    return Caller(emulated[1])


def wait_until(holds):
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.01)


def is_gone(pid):
    stat = read_stat(pid)
    return stat is None or stat.state in "ZX"


def client_of(address, key=None):
    return boto3.client(
        "lambda",
        endpoint_url=address.endpoint,
        region_name="us-east-1",
        aws_access_key_id=key or address.token,
        aws_secret_access_key="any",
        config=Config(retries={"total_max_attempts": 1}),
    )


@pytest.mark.slow
def test_a_function_answers_and_is_charged_by_its_report_line(caller):
    end = caller.call({"text": "hello"})
    assert end.outcome == "returned"
    assert json.loads(end.payload)["echo"] == {"text": "hello"}
    assert "doing echo" in end.log
    assert "REPORT RequestId" in end.log
    assert end.duration_s > 0
    assert 0 < end.max_memory_mb < 1769


def test_it_stays_warm_and_only_the_first_start_is_charged(caller, emulated):
    first = caller.result({})
    before = emulator_status(emulated[0])["counts"]["num_cold_starts"]
    end = caller.call({})
    assert json.loads(end.payload)["pid"] == first["pid"]
    assert emulator_status(emulated[0])["counts"]["num_cold_starts"] == before
    assert end.init_s == 0


def test_it_gets_lambdas_environment_and_nothing_of_the_platforms(caller, emulated):
    seen = caller.result({}, memory_mb=128)
    environment = seen["environment"]
    assert environment["AWS_LAMBDA_FUNCTION_MEMORY_SIZE"] == "128"
    assert environment["STORE_KEY"] == "the role's"
    assert float(environment["SPRINGTIDE_LINK_UP_BYTES_PER_S"]) == 70e6
    assert "SPRINGTIDE_TEST_SECRET" not in environment
    assert not any(emulated[0].token in value for value in environment.values())
    assert seen["cwd"] == environment["HOME"]
    assert 0 < seen["left_ms"] <= 20_000


def test_what_the_handler_raises_is_told_in_one_sentence(caller):
    end = caller.call({"do": "raise", "text": "no such layer"})
    assert (end.outcome, end.error) == ("failed", "ValueError: no such layer")
    assert end.duration_s > 0
    assert caller.call({}).outcome == "returned"


def test_a_process_that_ends_by_itself_fails_and_is_replaced(caller):
    end = caller.call({"do": "exit", "code": 3})
    assert end.outcome == "failed"
    assert "exit status 3" in end.error
    assert caller.call({}).outcome == "returned"


def test_memory_above_the_limit_ends_it(caller, emulated):
    end = caller.call({"do": "hold", "mb": 400, "seconds": 15}, memory_mb=128)
    assert end.outcome == "out_of_memory"
    assert "128 MB" in end.error
    assert end.max_memory_mb == 128
    assert end.duration_s < 15


@pytest.mark.slow
def test_what_a_function_leaves_behind_ends_with_it(caller, emulated):
    child = caller.result({"do": "child"})["pid"]
    daemon = caller.result({"do": "child", "daemon": True})["pid"]
    status = emulator_status(emulated[0])
    caller.call({"do": "exit", "code": 0})
    if status["cpu_method"] == "cgroup":
        wait_until(lambda: is_gone(daemon))
        groups = list(Path("/sys/fs/cgroup").rglob(f"springtide-emulator-{emulated[0].process.pid}/*/cgroup.procs"))
        living = {instance["id"] for instance in emulator_status(emulated[0])["instances"]}
        wait_until(lambda: all(not group.exists() for group in groups if group.parent.name not in living))
    else:
        # A process that exits by itself leaves its children to nobody; only a control group finds them.
        os.kill(daemon, signal.SIGKILL)
        os.kill(child, signal.SIGKILL)
    wait_until(lambda: is_gone(child) or status["cpu_method"] != "cgroup")


def test_a_kill_by_chance_is_told_from_a_limit(caller, emulated):
    inject(emulated[0], "kill", seconds=0.05)
    assert caller.call({"do": "sleep", "seconds": 15}).outcome == "killed"
    running = caller.start({"do": "sleep", "seconds": 15})
    busy = []
    wait_until(lambda: busy.extend(i for i in emulator_status(emulated[0])["instances"] if i["invocation"]) or busy)
    kill_instance(emulated[0], busy[0]["id"])
    assert running.get(timeout=LIMIT_S).outcome == "killed"


@pytest.mark.slow
def test_above_the_concurrency_it_throttles(emulated, caller):
    # The provider would say so by itself; a client of another process is told by the service.
    running = [caller.start({"do": "sleep", "seconds": 1.0}) for _ in range(3)]
    wait_until(lambda: emulator_status(emulated[0])["num_running"] == 3)
    with pytest.raises(ClientError) as raised:
        client_of(emulated[0]).invoke(FunctionName="springtide-128", Payload=b"{}")
    assert raised.value.response["Error"]["Code"] == "TooManyRequestsException"
    assert raised.value.response["ResponseMetadata"]["HTTPStatusCode"] == 429
    assert [ends.get(timeout=LIMIT_S).outcome for ends in running] == ["returned"] * 3


def test_injected_throttling_reaches_the_coordinator_with_a_time_to_come_back(emulated, caller):
    inject(emulated[0], "throttled", num_times=2)
    ends = [caller.call({}) for _ in range(3)]
    assert [end.outcome for end in ends] == ["throttled", "throttled", "returned"]
    assert ends[0].retry_after_s == 1.0
    assert ends[0].duration_s == 0


def test_an_answer_that_is_lost_may_have_been_work_that_was_done(emulated, caller):
    inject(emulated[0], "answer-lost")
    end = caller.call({"text": "done, but nobody hears of it"})
    assert end.outcome == "lost"
    assert end.duration_s is None


def test_a_late_start_is_late_and_works(emulated, caller):
    before = emulator_status(emulated[0])["counts"]["num_late"]
    inject(emulated[0], "late", seconds=0.1)
    assert caller.call({}).outcome == "returned"
    assert emulator_status(emulated[0])["counts"]["num_late"] == before + 1


def test_chance_can_be_changed_while_it_runs(emulated, caller):
    try:
        set_faults(emulated[0], EmulatorFaults(throttled_fraction=1.0))
        assert caller.call({}).outcome == "throttled"
    finally:
        set_faults(emulated[0], EmulatorFaults())
    assert caller.call({}).outcome == "returned"


def test_only_who_knows_the_token_gets_in(emulated):
    with pytest.raises(ClientError, match="UnrecognizedClientException"):
        client_of(emulated[0], key="somebody").invoke(FunctionName="springtide-128", Payload=b"{}")


def test_a_function_that_is_not_there_and_a_body_that_is_no_json(emulated):
    with pytest.raises(ClientError, match="ResourceNotFoundException"):
        client_of(emulated[0]).invoke(FunctionName="nobody", Payload=b"{}")
    with pytest.raises(ClientError, match="InvalidRequestContentException"):
        client_of(emulated[0]).invoke(FunctionName="springtide-128", Payload=b"{")


def test_an_event_is_accepted_and_runs(emulated, caller):
    before = time.time()
    answer = client_of(emulated[0]).invoke(
        FunctionName="springtide-1769", InvocationType="Event", Payload=b'{"do": "echo"}'
    )
    assert answer["StatusCode"] == 202
    identity = answer["ResponseMetadata"]["RequestId"]
    wait_until(lambda: any(f"END RequestId: {identity}" in line.text for line in caller.provider.tail(before - 1)))


def test_the_log_can_be_read_from_a_moment_on(caller):
    caller.call({"do": "echo"})
    lines = caller.provider.tail(0)
    assert any(line.text == "doing echo" for line in lines)
    assert [line.at_s for line in lines] == sorted(line.at_s for line in lines)
    assert caller.provider.tail(lines[-1].at_s + 3600) == []


@pytest.mark.slow
def test_the_lifetime_is_a_limit(tmp_path):
    with running_emulator(tmp_path, service=small_service(lifetime_s=1, memory_mb=(128,))) as (_, provider):
        end = Caller(provider).call({"do": "sleep", "seconds": 30}, memory_mb=128)
    assert end.outcome == "timed_out"
    assert "after 1.00 seconds" in end.error
    assert end.duration_s >= 1


@pytest.mark.slow
def test_a_lost_invocation_is_never_run_nor_answered(tmp_path):
    service = small_service(lifetime_s=1, memory_mb=(128,))
    with running_emulator(tmp_path, service=service) as (address, provider):
        inject(address, "lost")
        assert Caller(provider).call({}, memory_mb=128).outcome == "lost"
        assert emulator_status(address)["counts"]["num_cold_starts"] == 0


@pytest.mark.slow
def test_nothing_outlives_an_emulator_that_is_killed(tmp_path):
    with running_emulator(tmp_path) as (address, provider):
        caller = Caller(provider)
        child = caller.result({"do": "child"})["pid"]
        daemon = caller.result({"do": "child", "daemon": True})["pid"]
        running = caller.start({"do": "sleep", "seconds": 30})
        status = {}
        wait_until(lambda: status.update(emulator_status(address)) or status["num_running"])
        functions = [instance["pid"] for instance in status["instances"]]
        os.kill(address.process.pid, signal.SIGKILL)
        assert running.get(timeout=LIMIT_S).outcome == "lost"
        # A daemon left its group; where control groups are, it is found all the same.
        expected = [*functions, child, *([daemon] if status["cpu_method"] == "cgroup" else [])]
        wait_until(lambda: all(is_gone(pid) for pid in expected))
        if status["cpu_method"] != "cgroup":
            os.kill(daemon, signal.SIGKILL)
        wait_until(lambda: not has_control_group(address.process.pid))


def has_control_group(pid: int) -> bool:
    """Whether the emulator's control groups are still there; while others go, a walk may stumble over the gap."""
    try:
        return any(Path("/sys/fs/cgroup").rglob(f"springtide-emulator-{pid}"))
    except FileNotFoundError:
        return True


def test_one_state_directory_has_one_emulator(emulated, capsys):
    command = Path(f"/proc/{emulated[0].process.pid}/cmdline").read_bytes().split(b"\0")
    state_dir = Path(command[command.index(b"--state-dir") + 1].decode())
    for name in ("emulator.json", "config.json"):
        assert (state_dir / name).stat().st_mode & 0o077 == 0
    assert emulator_command.main(["--state-dir", str(state_dir)]) == 1
    assert "another emulator runs" in capsys.readouterr().err


def test_two_that_start_one_at_the_same_time_get_the_same(tmp_path):
    config = EmulatorConfig(service=small_service())
    try:
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(lambda _: ensure_emulator(tmp_path, config), range(2))
        assert first == second
    finally:
        stop_emulator(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["cgroup", "duty-cycle"])
def test_a_functions_cpu_is_that_of_its_memory(tmp_path, method):
    """At most its share, by the process's own account; a busy machine may have less for it."""
    if method == "cgroup" and not can_make_groups():
        pytest.skip("no control groups may be made here")
    service = small_service(memory_mb=(512, 1024, 1769))
    with running_emulator(tmp_path, service=service, cpu_fraction=0.5, cpu_method=method) as (_, provider):
        caller = Caller(provider)
        for size in service.sizes:
            caller.result({}, size.memory_mb)
            spun = caller.result({"do": "spin", "seconds": 3}, size.memory_mb)
            share = spun["cpu_s"] / spun["wall_s"]
            assert share <= size.vcpus * 0.5 * 1.1 + 0.03
            assert share > 0


def can_make_groups():
    groups = make_cpu_groups(f"springtide-test-{os.getpid()}")
    if groups is not None:
        groups.remove()
    return groups is not None


@pytest.mark.slow
def test_a_platform_that_comes_back_finds_its_emulator(tmp_path):
    with running_emulator(tmp_path) as (address, _), running_emulator(tmp_path) as (again, provider):
        assert again == address
        assert Caller(provider).call({}).outcome == "returned"


@pytest.mark.slow
def test_whatever_happens_each_invocation_ends_once_and_nothing_is_left(tmp_path):
    faults = EmulatorFaults(
        seed=5,
        kill_fraction=0.3,
        kill_within_s=0.2,
        throttled_fraction=0.1,
        answer_lost_fraction=0.1,
        late_fraction=0.1,
        late_s=0.1,
        slow_fraction=0.1,
        lost_fraction=0.02,
    )
    service = small_service(memory_mb=(128, 512, 1769), concurrency=6, lifetime_s=5)
    ends, begun, told = queue.Queue(), set(), []
    with running_emulator(tmp_path, service=service, warm_template=True, preload=(), faults=faults) as (
        address,
        provider,
    ):
        for number in range(120):
            if number >= 6:
                told.append(ends.get(timeout=LIMIT_S))
            payload = {"do": "sleep", "seconds": 0.05} if number % 4 else {"do": "raise", "text": "x"}
            memory_mb = (128, 512, 1769)[number % 3]
            begun.add(provider.invoke(memory_mb, json.dumps(payload).encode(), ends.put))
        told += [ends.get(timeout=LIMIT_S) for _ in range(6)]
        status = emulator_status(address)
    assert sorted(end.invocation_id for end in told) == sorted(begun)
    outcomes = {end.outcome for end in told}
    assert outcomes == {"returned", "failed", "killed", "throttled", "lost"}
    assert sum(end.outcome == "throttled" for end in told) == status["counts"]["num_throttled"]
    assert status["num_running"] == 0
    assert not list((tmp_path / "instances").iterdir())
    assert (tmp_path / "emulator.log").read_text() == ""
