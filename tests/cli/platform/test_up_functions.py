"""Jobs on functions as people see them: tables, bars, money, quotes, and the flags that start a function service."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from msgspec.structs import replace

from springtide.cli.doctor.functions import check_functions
from springtide.cli.jobs.offers import quote_text
from springtide.cli.jobs.progress import JobWatcher
from springtide.cli.platform import lifecycle, platform_process
from springtide.cli.platform.up_functions import NAMES_OF_FUNCTIONS, functions_text, settings_of
from springtide.cli.settings import resolve
from springtide.cli.tables import functions as function_tables
from springtide.cli.tables.statuses import final_line, job_details, jobs_table, progress_line
from springtide.client import layer_profiles
from springtide.core.errors import InvalidRequest
from springtide.core.functions import Bill, FunctionPlan, FunctionStage, LayerProfile, ModelProfile
from springtide.core.status.functions import FunctionRunStatus, PlaceStatus
from springtide.core.status.platform import JobStatus
from springtide.core.status.quote import FunctionQuoteOption, PlaceQuote, Quote, Range
from springtide.core.wire.functions import LaneTimes

Run = Callable[..., Result]
MakeJob = Callable[..., JobStatus]
TASK = """
import springtide as st
wave = st.Task(model=dict, dataset=list, loss=print, optimizer=print, global_batch=16, epochs=2)

@st.train
def fit(ctx):
    pass
"""
LAYER = LayerProfile(
    name="0",
    parameter_bytes=8,
    activation_bytes=8,
    output_bytes=8,
    gradient_bytes=8,
    forward_s=(0.1,),
    backward_s=(0.2,),
)
PROFILE = ModelProfile(model="wave", micro_batch_size=4, memory_mb=(2048,), bytes_per_s=(7e7,), layers=(LAYER, LAYER))
PLAN = FunctionPlan(
    stages=(
        FunctionStage(first_layer=0, end_layer=4, memory_mb=2048),
        FunctionStage(first_layer=4, end_layer=7, memory_mb=1024),
    ),
    num_replicas=2,
    num_micro_batches=8,
    micro_batch_size=4,
)


def place(stage: int, replica: int, **values: Any) -> PlaceStatus:
    lanes = LaneTimes(step_s=2.0, forward_s=0.4, backward_s=0.6, flush_s=0.6, sync_s=0.4)
    settings: dict[str, Any] = {
        "stage": stage,
        "replica": replica,
        "incarnation": 1,
        "phase": "training",
        "memory_mb": PLAN.stages[stage].memory_mb,
        "memory_used_bytes": 512 << 20,
        "lifetime_left_s": 41.0,
        "step": 12,
        "lanes": lanes,
    }
    return PlaceStatus(**{**settings, **values})


RUN = FunctionRunStatus(
    service="emulator",
    plan=PLAN,
    places=(place(0, 0), place(0, 1), place(1, 0), place(1, 1, phase="lost", lifetime_left_s=None, error="killed")),
    step_s=2.0,
    predicted_step_s=1.6,
    num_invocations=7,
    num_replaced=1,
    num_handovers=2,
    num_redone_steps=1,
    bill=Bill(function_usd=0.0103, request_usd=0.0018),
    budget_usd=0.05,
)


@pytest.fixture
def on_functions(make_job: MakeJob) -> Callable[..., JobStatus]:
    def make(**changes: Any) -> JobStatus:
        return make_job(**{"on": "emulator", "functions": RUN, "cost_usd": 0.0121, "budget_usd": 0.05, **changes})

    return make


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0.0, "$0.00"),
        (4.2, "$4.20"),
        (1234.5, "$1,234.50"),
        (0.1, "$0.10"),
        (0.0123, "$0.0123"),
        (0.05, "$0.05"),
        (0.000456, "$0.000456"),
        (0.00000001, "< $0.000001"),
    ],
)
def test_money_keeps_the_digits_that_count(amount: float, text: str) -> None:
    assert function_tables.usd(amount) == text


def test_details_tell_places_bars_prediction_and_bill(on_functions: MakeJob) -> None:
    told = job_details(on_functions(), now_s=100.0)
    assert "emulator: 4 functions (2 stages x 2 replicas), 2048+1024 MB" in told
    assert "8 micro-batches of 4 samples in each replica, gradients exchanged by duplex" in told
    assert "2.0 s measured, 1.6 s predicted (25% more)" in told
    assert "7 invocations, 1 replaced after they died, 2 handed over in time, 1 step redone" in told
    assert "$0.0121 of $0.05, $0.0379 left  (functions $0.0103, object requests $0.0018)" in told
    assert "stage 1, replica 1  lost      512 of 1024 MB  12    -              0            0\n" in told
    assert "last fault of stage 1, replica 1: killed" in told
    bar = next(line for line in told.splitlines() if line.strip().startswith("stage 0 "))
    assert "[###############.........======]" in bar
    assert "computation 50 %  flush 30 %  synchronisation 20 %" in bar
    assert "workers" not in told.replace("whatever the number of workers", "")


def test_a_step_that_takes_much_longer_is_told_in_times(on_functions: MakeJob) -> None:
    assert "5.0 times as long" in job_details(on_functions(functions=replace(RUN, predicted_step_s=0.4)), now_s=0.0)


def test_one_line_each_in_ps_and_while_it_runs(make_job: MakeJob, on_functions: MakeJob) -> None:
    table = jobs_table([on_functions(), make_job(job_id="fit-0001", cost_usd=0.02)])
    header, mine, other = table.splitlines()
    assert "ON" in header.split()
    assert "COST" in header.split()
    assert "4 fn (2 x 2)" in mine
    assert "$0.0121" in mine
    assert "cluster" in other
    assert "ON" not in jobs_table([make_job()]).splitlines()[0].split(), "without functions ps is what it was"
    line = progress_line(on_functions())
    assert line.startswith("fit-3f2a RUNNING 4 functions [")
    assert line.endswith("$0.0121 of $0.05")


def test_the_end_names_the_bill_and_no_device_seconds(on_functions: MakeJob) -> None:
    told = final_line(on_functions(state="SUCCEEDED", ended_at_s=60.0, artifact_path="/m.safetensors"))
    assert "cost $0.0121 of $0.05" in told
    assert "model /m.safetensors" in told
    assert "device-seconds" not in told


def test_what_befalls_functions_is_told_as_it_happens(on_functions: MakeJob) -> None:
    watcher = JobWatcher()
    assert watcher.observe(on_functions(num_workers=1)) == []
    replaced = replace(RUN, num_replaced=2, num_redone_steps=3, places=(place(0, 0), place(0, 1, num_replaced=1)))
    told = watcher.observe(on_functions(num_workers=1, functions=replaced))
    assert told == ["1 function died and was replaced (stage 0, replica 1), 2 steps redone"]
    handed = replace(replaced, num_handovers=4, num_throttled=1)
    assert watcher.observe(on_functions(num_workers=1, functions=handed)) == [
        "2 functions handed over to a warm successor: the lifetime was nearly over",
        "emulator put off 1 invocation (throttling)",
    ]
    smaller = replace(handed, plan=replace(PLAN, num_replicas=1))
    (changed,) = watcher.observe(on_functions(num_workers=1, functions=smaller))
    assert changed.startswith("runs as 2 functions (2 stages x 1 replica)")


def test_a_quote_shows_ways_the_bill_and_the_other_place() -> None:
    option = FunctionQuoteOption(
        name="chosen",
        plan=PLAN,
        step_s=1.6,
        finish_s=Range(p10=100.0, p90=130.0),
        cost_usd=Range(p10=0.011, p90=0.014),
        bill=RUN.bill,
        verdict="fits",
    )
    other = PlaceQuote(on="cluster", verdict="refused", reason="needs 2 workers", finish_s=Range(p10=1.0, p90=2.0))
    quote = Quote(
        verdict="accepted", reason="fine", finish_s=option.finish_s, cost_usd=option.cost_usd, on="emulator",
        bill=RUN.bill, function_options=(option,), elsewhere=(other,),
    )  # fmt: skip
    told = " ".join(quote_text(quote).split())
    assert "chosen -> 4 (2 x 2) 6144 MB 1.6 s 1m40 .. 2m10 $0.011 .. $0.014 fits" in told
    assert "the bill: $0.0121 expected: functions $0.0103, object requests $0.0018" in told
    assert "cluster refused 1.0 s .. 2.0 s" in told


# --- what is asked --------------------------------------------------------------------------------------------------


@pytest.fixture
def task(tmp_path: Path) -> Path:
    path = tmp_path / "task.py"
    path.write_text(TASK)
    return path


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """The layers are known without measuring; who asked is remembered."""
    from springtide.runtime.profiling import layer_profiling

    asked: list[Any] = []

    def known(entrypoint: Any, cache: Path, **options: Any) -> layer_profiling.LayerProfileFile:
        asked.append((entrypoint, cache, options["micro_batch_size"]))
        return layer_profiling.LayerProfileFile(
            profile=PROFILE, num_samples=1600, num_layers=2, source_sha256="", object_name="wave"
        )

    monkeypatch.setattr(layer_profiling, "cached_source_layers", known)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return asked


def test_run_on_functions_sends_the_layers(
    springtide: Run, client: Any, on_functions: MakeJob, task: Path, measured: list[Any]
) -> None:
    client.num_places = 2
    client.add(on_functions(state="SUCCEEDED", ended_at_s=9.0))
    result = springtide("run", f"{task}:wave", "--on", "functions", "--detach")
    assert result.exit_code == 0, result.output
    options = client.calls[0][1]["options"]
    assert options["on"] == "functions"
    assert options["num_samples"] == 1600
    assert options["layer_profile"]["layers"][0]["backward_s"] == (0.2,)
    assert options["max_workers"] == 2, "places at a function service are no devices for workers"
    ((entrypoint, cache, micro_batch),) = measured
    assert entrypoint.source_path == str(task)
    assert cache == layer_profiles.cache_folder()
    assert micro_batch == 4


def test_run_on_auto_sends_the_layers_of_a_task_and_tells_the_place(
    springtide: Run, client: Any, on_functions: MakeJob, task: Path, measured: list[Any]
) -> None:
    client.num_places = 2
    client.add(on_functions(place_reason="on functions: they make its goal"))
    result = springtide("run", f"{task}:wave", "--on", "auto", "--detach")
    options = client.calls[-1][1]["options"]
    assert (options["on"], options["num_samples"]) == ("auto", 1600)
    assert "on functions: they make its goal" in result.output
    springtide("run", f"{task}:fit", "--on", "auto", "--detach")
    assert "layer_profile" not in client.calls[-1][1]["options"], "a training function cannot be cut"
    client.num_places = 0
    springtide("run", f"{task}:wave", "--on", "auto", "--detach")
    assert "layer_profile" not in client.calls[-1][1]["options"], "no functions, nothing to profile for"


def test_quote_compares_where_there_are_functions(
    springtide: Run, client: Any, task: Path, measured: list[Any]
) -> None:
    springtide("quote", f"{task}:wave")
    assert "layer_profile" not in client.calls[-1][1]["options"], "no functions, nothing to profile for"
    client.num_places = 2
    springtide("quote", f"{task}:wave")
    options = client.calls[-1][1]["options"]
    assert options["layer_profile"]["micro_batch_size"] == 4
    assert "on" not in options
    springtide("quote", f"{task}:fit")
    assert "layer_profile" not in client.calls[-1][1]["options"], "a training function cannot be cut"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("task.py:fit", "--on", "functions"), "st.Task(model=..."),
        (("task.py:wave", "--on", "functions"), "springtide up --functions emulator"),
        (("task.py:wave", "--on", "functions", "--batch", "8..64"), "one global batch"),
        (("task.py:wave", "--micro-batch", "32"), "micro_batch 32 is more than the global batch of 16"),
        (("task.py:wave", "--on", "moon"), "'moon' is not one of"),
    ],
)
def test_what_cannot_run_on_functions_is_said(
    springtide: Run, task: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], sentence: str
) -> None:
    monkeypatch.chdir(task.parent)
    result = springtide("run", *arguments)
    assert sentence in result.output + str(result.exception)
    assert result.exit_code != 0


def test_a_profile_of_something_else_is_refused(springtide: Run, client: Any, task: Path, tmp_path: Path) -> None:
    from springtide.runtime.profiling.layer_profiling import LayerProfileFile, write_layer_profile

    client.num_places = 1
    path = tmp_path / "p.json"
    write_layer_profile(
        path, LayerProfileFile(profile=PROFILE, num_samples=9, num_layers=2, source_sha256="", object_name="other")
    )
    result = springtide("run", f"{task}:wave", "--on", "functions", "--profile", str(path))
    assert "is a profile of 'other'" in result.output


def test_resume_with_a_budget(springtide: Run, client: Any, on_functions: MakeJob) -> None:
    client.add(on_functions(state="PAUSED"))
    assert springtide("resume", "fit", "--budget", "$5").exit_code == 0
    assert client.calls == [("resume", "fit-3f2a", 5.0)]


# --- up --functions -------------------------------------------------------------------------------------------------

NOTHING: dict[str, Any] = dict.fromkeys(NAMES_OF_FUNCTIONS)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in NAMES_OF_FUNCTIONS:
        monkeypatch.delenv(f"SPRINGTIDE_{name.upper()}", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_flags_and_settings_make_a_function_service(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings_of(NOTHING) is None
    monkeypatch.setenv("SPRINGTIDE_FUNCTIONS", "emulator")
    monkeypatch.setenv("SPRINGTIDE_FUNCTIONS_LIFETIME_S", "60s")
    settings = settings_of({**NOTHING, "functions_bandwidth": "10MB", "functions_faults": "kill=0.05"})
    assert settings is not None
    assert (settings.provider, settings.lifetime_s, settings.bytes_per_s) == ("emulator", 60.0, 1e7)
    assert settings.faults == {"kill": 0.05}
    assert "each ends after 1m00; faults kill 5%" in functions_text(settings)
    assert settings_of({**NOTHING, "functions": "none"}) is None, "a flag goes before the environment"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"functions": "azure"}, "must be one of emulator, aws, alibaba"),
        ({"functions_store": "s3://b/p"}, "needs a function service"),
        ({"functions": "aws"}, "--functions-store s3://bucket/prefix"),
        ({"functions": "aws", "functions_store": "s3://b/p"}, "--functions-role"),
        ({"functions": "emulator", "functions_faults": "fire=1"}, "is not a fault"),
        ({"functions": "emulator", "functions_places": "0"}, "from 1 to 64"),
        ({"functions": "emulator", "functions_store": "ftp://x"}, "is not an address of a store"),
    ],
)
def test_what_does_not_go_together_names_the_flag(home: Path, given: dict[str, str], sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence.replace("(", "\\(")):
        settings_of({**NOTHING, **given})


def test_up_hands_the_settings_over_in_a_private_file(
    springtide: Run, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, Any]] = []

    def start(*arguments: Any, **options: Any) -> platform_process.PlatformFile:
        started.append(options)
        return platform_process.PlatformFile(pid=1, url="http://127.0.0.1:1")

    monkeypatch.setattr(lifecycle, "start_platform", start)
    (home / "token").write_text("t" * 20)
    url = "redis://:secret@127.0.0.1:6379/0"
    result = springtide("up", "--functions", "emulator", "--functions-parameter-store", url)
    assert result.exit_code == 0, result.output
    assert "functions  emulator" in result.output
    assert "secret" not in result.output
    path = started[0]["functions"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text())["parameter_store"] == url
    assert "--functions" in platform_process.service_command(home, 1, "fifo", 0, functions=path)
    assert springtide("up").exit_code == 0
    assert started[1]["functions"] is None
    assert not path.exists(), "the next start without functions is one without functions"


def test_config_show_keeps_passwords_to_itself(springtide: Run, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPRINGTIDE_FUNCTIONS_PARAMETER_STORE", "redis://:secret@h:6379/0")
    for arguments in (("config", "show", "--origin"), ("config", "show", "--json")):
        told = springtide(*arguments).output
        assert "redis://:...@h:6379/0" in told
        assert "secret" not in told
    assert resolve("functions_parameter_store").value == "redis://:secret@h:6379/0"


@pytest.mark.slow
def test_doctor_says_what_stands_between_the_settings_and_a_job(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (check,) = check_functions(home / "state")
    assert (check.verdict, check.text) == ("ok", "not used")
    monkeypatch.setenv("SPRINGTIDE_FUNCTIONS", "aws")
    (check,) = check_functions(home / "state")
    assert check.verdict == "fail"
    assert "--functions-store" in check.text
    monkeypatch.setenv("SPRINGTIDE_FUNCTIONS", "emulator")
    monkeypatch.setenv("SPRINGTIDE_FUNCTIONS_STORE", f"file://{home}/store")
    monkeypatch.setenv("SPRINGTIDE_FUNCTIONS_PARAMETER_STORE", "redis://127.0.0.1:1/0")
    checks = {check.name: check for check in check_functions(home / "state")}
    assert checks["functions"].verdict == "ok"
    assert checks["store"].text.startswith(f"file://{home}/store: put ")
    assert checks["parameters"].verdict == "fail"
