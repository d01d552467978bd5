"""The bench of serving: its rows, what passes, what is refused, and a short run with real processes."""

from __future__ import annotations

import json
import sys

import pytest
from click.testing import CliRunner

from kits.simulation.sweeps import only_in_full
from springtide.cli.main import cli
from springtide_studies.serving.bench import NUM_CLIENTS, Found, ServingRounds, has_passed, rows_of, rows_of_direct
from springtide_studies.serving.load import ServingLoad
from springtide_studies.serving.servers import BARE, OURS, PEERS


def rounds(*, seconds: float = 1.0, p99_ms: float = 5.0, cpu_us: float = 300.0, num_errors: int = 0) -> ServingRounds:
    """Three rounds of 1,000 requests."""
    load = ServingLoad(
        num_requests=1000,
        num_errors=num_errors,
        first_error="",
        seconds=seconds,
        p50_ms=1.0,
        p99_ms=p99_ms,
        client_cpu_s=0.1,
    )
    return ServingRounds(loads=[load] * 3, cpu_us=[cpu_us] * 3)


def found(ours: ServingRounds, name: str = "litserve") -> Found:
    return {(OURS, 16): ours, (name, 16): rounds()}


def test_what_is_level_passes_in_every_metric():
    rows = rows_of("sums", found(rounds()))
    assert [(row.metric, row.passed) for row in rows] == [
        ("requests/s", True),
        ("p50", None),
        ("p99", True),
        ("CPU", True),
    ]
    assert all(row.ratio == 1.0 for row in rows)
    assert has_passed(rows)


@pytest.mark.parametrize(
    ("ours", "failed"),
    [
        (rounds(seconds=1.06), {"requests/s"}),
        (rounds(p99_ms=5.3), {"p99"}),
        (rounds(cpu_us=316.0), {"CPU"}),
        (rounds(num_errors=1), {"requests/s", "p99", "CPU"}),
    ],
)
def test_being_behind_in_one_metric_is_not_passed(ours, failed):
    rows = rows_of("sums", found(ours))
    assert {row.metric for row in rows if row.passed is False} == failed
    assert not has_passed(rows)


def test_bare_http_is_told_and_is_no_peer_that_could_be_passed():
    rows = rows_of("sums", found(rounds(cpu_us=900.0), BARE))
    assert all(row.passed is None for row in rows)
    assert not has_passed(rows)


@pytest.mark.parametrize(("ours", "passed"), [(250.0, True), (251.0, False)])
def test_the_gateway_may_add_100_us_to_a_call_of_its_replica(ours, passed):
    told = {"rows": [{"case": "c=1 CPU per request", "ours": ours, "baseline": 150.0}, {"case": "c=1 throughput"}]}
    assert [row.passed for row in rows_of_direct(told)] == [passed]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--only", "resnet"], "none of sums, mlp"),
        (["--peer", "torchserve=/usr/bin/python3"], "the peers are uvicorn, litserve, bentoml, ray"),
        (["--peer", "litserve"], "is not like litserve=/path/to/python"),
        (["--peer", "ray=/no/python"], "there is no interpreter /no/python"),
    ],
)
def test_what_cannot_be_measured_is_refused(options, said):
    result = CliRunner().invoke(cli, ["bench", "serving", *options])
    assert result.exit_code == 2
    assert said in result.output


@only_in_full
@pytest.mark.slow
def test_a_short_run_measures_the_platform_and_bare_http():
    result = CliRunner().invoke(cli, ["bench", "serving", "--small", "--only", "sums", "--json"])
    report = json.loads(result.stdout)
    assert result.exit_code in (0, 1)
    assert report["versions"][BARE]
    assert set(report["missing"]) <= set(PEERS) - {BARE}
    beside = [row for row in report["rows"] if row["baseline_name"] == BARE]
    assert len(beside) == 4 * len(NUM_CLIENTS)
    assert all(row["ours"] > 0 and row["baseline"] > 0 for row in beside if row["metric"] != "CPU")
    assert all(not each["loads"][0]["num_errors"] for each in report["rounds"]["sums"].values())
    assert report["idle"]["sums"][OURS]["processes"] > 1
    assert report["machine"]["python"].startswith(f"{sys.version_info.major}.")
