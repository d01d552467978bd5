"""A search for a job's functions as people see it: what was tried, what it cost, batches, streams, flags, quotes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from msgspec.structs import replace

from springtide.cli.jobs.offers import quote_text
from springtide.cli.jobs.progress import JobWatcher
from springtide.cli.tables.search import MAX_TRIED, search_quote_text
from springtide.cli.tables.statuses import final_line, job_details, jobs_table
from springtide.core.function_search import BatchPhase
from springtide.core.functions import Bill, FunctionPlan, FunctionStage
from springtide.core.status.functions import FunctionRunStatus, PlaceStatus, PlanChange
from springtide.core.status.platform import JobStatus
from springtide.core.status.quote import Quote
from springtide.core.status.search import SearchQuote, SearchStatus, StreamStatus, TriedConfiguration

Run = Callable[..., Result]
MakeJob = Callable[..., JobStatus]
TASK = """
import springtide as st
wave = st.Task(model=dict, dataset=list, loss=print, optimizer=print, global_batch=16, epochs=6, deadline="1h")
"""


def plan(workers: int, memory_mb: int) -> FunctionPlan:
    return FunctionPlan(stages=(FunctionStage(first_layer=0, end_layer=7, memory_mb=memory_mb),), num_replicas=workers)


def tried(workers: int, memory_mb: int, **values: Any) -> TriedConfiguration:
    settings: dict[str, Any] = {
        "num_workers": workers,
        "memory_mb": memory_mb,
        "global_batch_size": 64,
        "gradient_bytes": 1 << 20,
        "num_steps": 12,
        "step_s": 2.0,
        "step_usd": 0.00031,
        "sync_s": 0.5,
        "collective": "duplex",
        "model_step_s": 1.5,
    }
    return TriedConfiguration(**{**settings, **values})


SEARCH = SearchStatus(
    goal="fastest within $0.05",
    phase="searching",
    reason="tries 8 workers of 2048 MB: may save 12 s of 60 s",
    num_workers=8,
    memory_mb=2048,
    max_workers=16,
    sizes_mb=(512, 4096),
    tried=(tried(4, 1024, is_left=True), tried(8, 2048, is_running=True, step_s=1.0, model_step_s=None)),
    num_left=1,
    num_earlier=3,
    search_s=6.2,
    search_usd=0.00071,
    model_error_fraction=0.31,
    error_fraction=0.06,
)
RUN = FunctionRunStatus(service="emulator", plan=plan(8, 2048), bill=Bill(function_usd=0.01), budget_usd=0.05)


@pytest.fixture
def searched(make_job: MakeJob) -> Callable[..., JobStatus]:
    def make(**changes: Any) -> JobStatus:
        return make_job(
            **{"on": "emulator", "functions": RUN, "search": SEARCH, "cost_usd": 0.01, "budget_usd": 0.05, **changes}
        )

    return make


def test_details_tell_goal_phase_cost_errors_and_what_was_tried(searched: MakeJob) -> None:
    told = job_details(searched(study="widths"), now_s=100.0)
    assert "goal            fastest within $0.05" in told
    assert "searching, now 8 x 2048 MB: tries 8 workers of 2048 MB" in told
    assert "6.2 s and $0.00071 beyond the best one known, in steps of 1 configuration left again" in told
    assert "the model alone was off by 31%, 6% after correction by what was measured, 3 measurements known" in told
    assert "study           widths" in told
    rows = [line.split() for line in told.splitlines() if " MB " in line and "duplex" in line]
    assert rows[0] == [
        "4",
        "1024",
        "MB",
        "64",
        "12",
        "2.0",
        "s",
        "1.5",
        "s",
        "(-25%)",
        "$0.00031",
        "25%",
        "duplex",
        "left",
    ]
    assert rows[1][-2:] == ["runs", "now"]
    assert rows[1][7] == "-", "nobody knows what the model would have said"


def test_before_anything_was_measured_there_is_no_table(searched: MakeJob) -> None:
    bare = replace(
        SEARCH, phase="waiting", tried=(), num_left=0, num_earlier=0, model_error_fraction=None, error_fraction=None
    )
    told = job_details(searched(search=bare), now_s=100.0)
    assert "begins with 8 x 2048 MB" in told
    assert "what was tried" not in told
    assert "searching cost" not in told


def test_of_a_long_search_the_newest_are_shown(searched: MakeJob) -> None:
    many = tuple(tried(1 + index, 1024) for index in range(MAX_TRIED + 5))
    told = job_details(searched(search=replace(SEARCH, tried=many)), now_s=100.0)
    assert "(5 earlier ones: --json)" in told
    assert sum(" 1024 MB " in line for line in told.splitlines()) == MAX_TRIED


def test_one_line_says_what_runs_and_that_it_may_change(searched: MakeJob) -> None:
    assert "8 x 2048 MB?" in jobs_table([searched()])
    settled = jobs_table([searched(search=replace(SEARCH, phase="settled"))])
    assert "8 x 2048 MB" in settled
    assert "8 x 2048 MB?" not in settled


def test_a_batch_schedule_names_the_present_batch_and_the_next(searched: MakeJob) -> None:
    phases = tuple(
        BatchPhase(from_epoch=epoch, global_batch_size=size) for epoch, size in ((0, 64), (4, 128), (6, 256))
    )
    told = job_details(searched(batch_schedule=phases, epoch=5), now_s=100.0)
    assert "64 from epoch 0, 128 from epoch 4, 256 from epoch 6; now 128, next 256 from epoch 6 on" in told
    assert "global batch" not in told


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "37 samples waiting of 4,133 that came, 4,096 used, 1.4 a second arrive"),
        ({"is_idle": True}, "idle: no function runs, nothing is charged"),
        ({"is_closed": True}, "closed: the rest is trained, then the job ends"),
    ],
)
def test_a_stream_tells_its_lag_and_that_idling_is_free(
    searched: MakeJob, changes: dict[str, Any], sentence: str
) -> None:
    stream = StreamStatus(name="clicks", num_samples=4133, num_used=4096, num_waiting=37, arrivals_per_s=1.4)
    assert sentence in job_details(searched(stream=replace(stream, **changes)), now_s=0.0)


def test_what_the_search_does_is_told_as_it_happens(searched: MakeJob) -> None:
    watcher = JobWatcher()
    began = PlanChange(step=0, at_s=1.0, plan=plan(4, 1024))
    first = searched(
        search=replace(SEARCH, num_workers=4, memory_mb=1024),
        functions=replace(RUN, plan=plan(4, 1024), changes=(began,)),
    )
    assert watcher.observe(first) == []
    assert watcher.observe(searched(functions=replace(RUN, changes=(began,)))) == [
        "4 x 1024 MB -> 8 x 2048 MB: tries 8 workers of 2048 MB: may save 12 s of 60 s"
    ]
    made = PlanChange(step=18, at_s=9.0, plan=plan(8, 2048), pause_s=0.41, num_stayed=4)
    there = searched(functions=replace(RUN, changes=(began, made)))
    assert watcher.observe(there) == ["now standstill 410 ms, 4 of 8 functions stayed"]
    settled = searched(
        functions=there.functions, search=replace(SEARCH, phase="settled", reason="stays with 8 workers of 2048 MB")
    )
    assert watcher.observe(settled) == ["settled on 8 x 2048 MB: stays with 8 workers of 2048 MB"]
    larger = searched(
        functions=there.functions, search=replace(SEARCH, reason="the batch grew"), global_batch_size=1024
    )
    assert watcher.observe(larger) == ["searches again: the batch grew", "batch 512 -> 1024 at step 570"]


def test_a_batch_that_grew_names_the_epoch_of_its_schedule(searched: MakeJob) -> None:
    watcher = JobWatcher()
    phases = tuple(BatchPhase(from_epoch=epoch, global_batch_size=size) for epoch, size in ((0, 64), (2, 128)))
    watcher.observe(searched(batch_schedule=phases, global_batch_size=64, epoch=1))
    told = watcher.observe(searched(batch_schedule=phases, global_batch_size=128, epoch=3))
    assert told == ["batch 64 -> 128, as scheduled from epoch 2 on"]


def test_a_stream_that_runs_dry_comes_back_and_is_closed_is_told(searched: MakeJob) -> None:
    watcher = JobWatcher()
    stream = StreamStatus(name="clicks", num_samples=4133, num_used=4096, num_waiting=37, arrivals_per_s=1.4)
    assert watcher.observe(searched(stream=stream)) == []
    (dry,) = watcher.observe(searched(stream=replace(stream, is_idle=True)))
    assert dry.startswith("idle: 37 samples of 'clicks' are fewer than a batch")
    (back,) = watcher.observe(searched(stream=replace(stream, num_waiting=128)))
    assert back == "goes on: 128 samples of 'clicks' have come"
    (closed,) = watcher.observe(searched(stream=replace(stream, is_closed=True, num_waiting=5)))
    assert closed == "'clicks' is closed: 5 samples left to train"


def test_a_change_that_is_prepared_and_those_that_were_made_are_told(searched: MakeJob) -> None:
    made = (PlanChange(step=0, at_s=1.0, plan=plan(4, 1024)),
            PlanChange(step=18, at_s=9.0, plan=plan(8, 2048), pause_s=0.41, num_stayed=4))  # fmt: skip
    joining = tuple(
        PlaceStatus(stage=0, replica=index, incarnation=1, phase=phase, memory_mb=2048)
        for index, phase in enumerate(("warm", "starting"))
    )
    run = replace(RUN, changes=made, upcoming=plan(10, 2048), joining=joining)
    told = job_details(searched(functions=run), now_s=0.0)
    assert "1 change, the last after step 18: standstill 410 ms, 4 of 8 functions stayed" in told
    assert "1 of 2 are warm for 10 functions (1 stage x 10 replicas), 2048 MB" in told


def test_the_end_says_what_the_search_came_to(searched: MakeJob) -> None:
    told = final_line(searched(state="SUCCEEDED", ended_at_s=60.0, search=replace(SEARCH, phase="over")))
    assert "search ended with 8 x 2048 MB" in told
    assert "searching cost 6.2 s and $0.00071" in told


def test_a_quote_says_what_the_search_may_cost() -> None:
    search = SearchQuote(num_configurations=480, num_trials=9, trial_s=3.4, trial_usd=0.0021, error_fraction=0.25)
    text = search_quote_text(search)
    assert text.startswith("up to 9 more configurations are tried while it trains")
    assert "at most 3.4 s and $0.0021 more" in text
    quote = Quote(verdict="accepted", reason="fine", on="emulator", search=search)
    assert f"the search: {text}" in quote_text(quote)
    assert "the search" not in quote_text(replace(quote, verdict="refused"))


# --- what is asked --------------------------------------------------------------------------------------------------


@pytest.fixture
def task(tmp_path: Path) -> Path:
    path = tmp_path / "task.py"
    path.write_text(TASK)
    return path


@pytest.fixture
def known_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    from springtide.core.functions import LayerProfile, ModelProfile
    from springtide.runtime.profiling import layer_profiling

    layer = LayerProfile(
        name="0", parameter_bytes=8, activation_bytes=8, output_bytes=8, gradient_bytes=8, forward_s=(0.1,),
        backward_s=(0.2,),
    )  # fmt: skip
    profile = ModelProfile(model="wave", micro_batch_size=4, memory_mb=(2048,), bytes_per_s=(7e7,), layers=(layer,))

    def known(*_: Any, **__: Any) -> layer_profiling.LayerProfileFile:
        return layer_profiling.LayerProfileFile(
            profile=profile, num_samples=1600, num_layers=1, source_sha256="", object_name="wave"
        )

    monkeypatch.setattr(layer_profiling, "cached_source_layers", known)


@pytest.mark.usefixtures("known_layers")
def test_flags_are_sent_and_fastest_takes_the_place_of_the_files_deadline(
    springtide: Run, client: Any, searched: MakeJob, task: Path
) -> None:
    client.num_places = 2
    client.add(searched(state="SUCCEEDED", ended_at_s=9.0))
    result = springtide(
        "run", str(task), "--on", "functions", "--fastest", "--budget", "0.05", "--batch-schedule", "0:16,4:64",
        "--search", "--study", "widths", "--detach",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    options = client.calls[0][1]["options"]
    assert options["is_fastest"] is True
    assert "deadline_s" not in options
    assert options["search"] is True
    assert options["study"] == "widths"
    assert options["batch_schedule"][1]["global_batch_size"] == 64
    springtide("run", str(task), "--on", "functions", "--no-search", "--detach")
    options = client.calls[-1][1]["options"]
    assert options["search"] is False
    assert options["deadline_s"] == 3600.0
    assert "is_fastest" not in options


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--on", "functions", "--fastest", "--deadline", "1h"), "two goals"),
        (("--on", "functions", "--batch-schedule", "0:16,0:32"), "epochs ascend"),
        (("--on", "functions", "--batch-schedule", "sixteen"), "write it like"),
        (("--on", "functions", "--batch-schedule", "9:16"), "numbered 0 to 5"),
        (("--fastest",), "fastest is for jobs on functions"),
        (("--search",), "search is for jobs on functions"),
        (("--batch-schedule", "0:16"), "batch_schedule is for jobs on functions"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(
    springtide: Run, client: Any, task: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    client.num_places = 2
    result = springtide("run", str(task), *arguments)
    assert result.exit_code == 2
    assert sentence in result.output
    assert not client.calls or client.calls[-1][0] != "submit_job"
