"""`springtide quote`: what is asked of the platform and how its answer reads; a measurement that cleans up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from msgspec.structs import replace

from springtide.cli.commands import quote as quote_command
from springtide.cli.jobs.offers import alternative_text, dollars, options_table, quote_text, refusal_text, times
from springtide.core.decision import PlannedRun
from springtide.core.status.platform import JobStatus
from springtide.core.status.quote import Alternative, CountedOn, Quote, QuoteOption, Range

Run = Callable[..., Result]
MakeJob = Callable[..., JobStatus]
CHOSEN = QuoteOption(
    name="chosen",
    workers=2,
    batch_per_worker=256,
    finish_s=Range(p10=460.0, p90=510.0),
    cost_usd=Range(p10=0.10, p90=0.11),
    communication_fraction=0.1,
    verdict="fits deadline and budget",
)
CHEAPEST = QuoteOption(
    name="cheapest",
    workers=1,
    batch_per_worker=512,
    finish_s=Range(p10=850.0, p90=930.0),
    cost_usd=Range(p10=0.08, p90=0.09),
    communication_fraction=0.0,
    verdict="misses the deadline by 5m30",
)
REFUSED = Quote(
    verdict="refused",
    reason="cannot finish within 2m00: needs >= 6 workers from now; this pool has 2 (1 held by 'sentiment')",
    alternatives=(
        Alternative(change="--deadline 8m30s", finish_s=Range(p10=400.0, p90=505.0), cost_usd=Range(p10=0.1, p90=0.12)),
        Alternative(change="--epochs 3"),
        Alternative(change="--best-effort"),
    ),
)


@pytest.fixture
def training_file(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(
        'import springtide as st\n\n@st.train(deadline="10m", epochs=3)\ndef fit(ctx):\n    ...\n', encoding="utf-8"
    )
    return str(path)


def test_a_script_has_no_batch_per_worker() -> None:
    line = options_table([replace(CHOSEN, batch_per_worker=None)]).splitlines()[1]
    assert line.split()[:4] == ["chosen", "->", "2", "-"]


def test_the_table_reads_like_the_page_says() -> None:
    quote = Quote(
        verdict="accepted",
        reason="its deadline in 10m00 is promised, with 1m30 to spare as planned",
        options=(CHEAPEST, CHOSEN),
        minimum_share=2,
        schedule=(PlannedRun(start_s=0, end_s=100, num_devices=2), PlannedRun(start_s=100, end_s=500, num_devices=4)),
        evidence=("2 of 4 devices free now",),
    )
    assert quote_text(quote).splitlines() == [
        "           workers  batch/worker  finish (p10..p90)  cost   verdict",
        "cheapest   1        512           14m10 .. 15m30     $0.09  misses the deadline by 5m30",
        "chosen ->  2        256           7m40 .. 8m30       $0.11  fits deadline and budget",
        "ACCEPTED its deadline in 10m00 is promised, with 1m30 to spare as planned",
        "  because 2 of 4 devices free now",
        "  minimum share: 2 from now on",
        "  workers over time: 2 from now, 4 from 1m40",
    ]


def test_what_is_not_known_is_a_dash() -> None:
    assert times(Range()) == "-"
    assert dollars(Range()) == "-"
    assert dollars(Range(p10=0.0, p90=0.0)) == "$0.00"
    assert dollars(Range(p10=0.001, p90=0.002)) == "< $0.01"
    assert alternative_text(Alternative(change="--epochs 3")) == "--epochs 3"


def test_what_promises_count_on_is_told_where_servers_are_loaned() -> None:
    stretches = (
        CountedOn(num_devices=6, num_loaned=2, until_s=5400.0),
        CountedOn(num_devices=1, num_loaned=0),
    )
    told = quote_text(Quote(verdict="accepted", reason="fits", counts_on=stretches)).splitlines()
    assert told[-1] == "  promises count on: 6 devices (2 on loan) until 1h30 from now, then 1 device"
    assert "count on" not in quote_text(Quote(verdict="accepted", reason="fits"))
    many = tuple(CountedOn(num_devices=n, num_loaned=0, until_s=60.0 * n) for n in range(1, 9))
    assert quote_text(Quote(verdict="accepted", reason="fits", counts_on=many)).endswith(
        "4 devices until 4m00 from now, ..."
    )


def test_best_effort_is_offered_once() -> None:
    assert refusal_text("no", ()) == "REFUSED no\n  would work: --best-effort"
    assert refusal_text("no", ["--best-effort (9m)"]).count("--best-effort") == 1


def test_what_a_quote_knows_not_to_work_is_not_offered():
    assert refusal_text("no", (), is_quoted=True) == "REFUSED no"
    assert refusal_text("no", ["--workers 1..2"], is_quoted=True) == "REFUSED no\n  would work: --workers 1..2"


def test_the_quote_is_asked_with_what_a_run_would_send(client: Any, springtide: Run, training_file: str) -> None:
    result = springtide("quote", training_file, "--budget", "0.50", "--samples", "5000", "--soft", "--wait")
    assert result.exit_code == 0, result.output
    assert "ACCEPTED it is expected to finish in 7m40 .. 8m30" in result.output
    assert result.output.splitlines()[-1].endswith("--budget 0.50 --samples 5000 --soft --wait")
    ((verb, asked),) = client.calls
    assert (verb, asked["name"]) == ("quote", "fit")
    options = asked["options"]
    assert (options["deadline_s"], options["budget_usd"], options["num_samples"]) == (600.0, 0.5, 5000)
    assert options["is_soft"]
    assert options["waits"]


def test_a_refused_quote_is_an_answer(client: Any, springtide: Run, training_file: str) -> None:
    client.quoted = REFUSED
    result = springtide("quote", training_file)
    assert result.exit_code == 0
    assert "REFUSED cannot finish within 2m00: needs >= 6 workers" in result.output
    assert "would work: --deadline 8m30s (8m25, $0.12) | --epochs 3 | --best-effort" in result.output
    answer = json.loads(springtide("quote", training_file, "--json").stdout)
    assert answer["verdict"] == "refused"
    assert answer["alternatives"][0]["change"] == "--deadline 8m30s"


def test_a_refused_run_tells_the_quote_s_alternatives(
    client: Any, springtide: Run, make_job: MakeJob, training_file: str
) -> None:
    client.add(make_job(state="REJECTED", reason="the policy's own words", alternatives=("--deadline 20m",)))
    client.quoted = REFUSED
    result = springtide("run", training_file)
    assert result.exit_code == 1
    assert (
        result.output.partition("\n")[2]
        == refusal_text(REFUSED.reason, [alternative_text(offer) for offer in REFUSED.alternatives], is_quoted=True)
        + "\n"
    )
    answer = json.loads(springtide("run", training_file, "--json").stdout)
    assert answer["alternatives"] == ["--deadline 8m30s", "--epochs 3", "--best-effort"]


def test_measuring_runs_on_one_worker_then_on_two_and_ends_it(
    client: Any, springtide: Run, make_job: MakeJob, training_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quote_command, "MEASURE_S", 0.0)
    monkeypatch.setattr(quote_command, "_POLL_S", 0.0)
    client.add(make_job(num_workers=1), make_job(num_workers=1), make_job(num_workers=2))
    result = springtide("quote", training_file, "--profile")
    assert result.exit_code == 0, result.output
    assert [call[0] for call in client.calls] == ["submit_job", "scale", "cancel", "quote"]
    assert "deadline_s" not in client.calls[0][1]["options"]
    assert client.calls[0][1]["options"]["max_workers"] == 1
    assert client.calls[1][1:] == ("fit-3f2a", 2, 2)


def test_a_script_cannot_be_measured(client: Any, springtide: Run, tmp_path: Path) -> None:
    path = tmp_path / "plain.py"
    path.write_text("print(1)\n", encoding="utf-8")
    result = springtide("quote", str(path), "--profile")
    assert result.exit_code == 2
    assert client.calls == []
