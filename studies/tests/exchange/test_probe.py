"""The probe of all-reduces: rows and verdict, and one small case on real processes and servers."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from springtide.core.errors import BackendError
from springtide.storage.stores.open import memory_store
from springtide_studies.exchange import __main__ as exchange
from springtide_studies.exchange.member import Done, MemberTask, drawn, expected_sha256, run_task
from springtide_studies.exchange.probe import (
    FULL,
    SMALL,
    Members,
    Scale,
    SyncPlan,
    Timing,
    chunks_of,
    enough_chunks,
    has_passed,
    measure_all,
    rows_of,
    table_of,
)
from springtide_studies.exchange.stores import missing

FAST = FULL.cases[0][2]


def timing(schedule, *times_s, n=4, bound_s=1.5):
    return Timing(
        store="file",
        n=n,
        latency_s=0.03,
        schedule=schedule,
        num_chunks=4 if schedule == "duplex" else 1,
        times_s=times_s,
        over_bound=min(times_s) / bound_s,
        size_over_rate_s=1.0,
        predicted_s=bound_s,
        bound_s=bound_s,
        cpu_s=0.1,
        num_misses=3,
    )


def test_rows_put_ours_beside_each_schedule_in_seconds():
    rows = rows_of([timing("lambdaml", 2.5), timing("funcpipe", 2.2, 2.0), timing("duplex", 1.9, 1.6)])
    assert [row.baseline_name.split(" (")[0] for row in rows] == [
        "pipelined scatter-reduce",
        "three-phase scatter-reduce",
    ]
    assert [(row.ours, row.baseline, row.bound) for row in rows] == [(1.6, 2.0, 1.5), (1.6, 2.5, 1.5)]
    assert rows[0].ratio == pytest.approx(0.8)
    assert rows[0].case == "file, n=4, 30 ms latency"
    assert "in flight" in rows[0].baseline_name


@pytest.mark.parametrize(
    ("ours_s", "pipelined_s", "skipped", "passed"),
    [
        (1.8, 2.0, [], True),
        (1.88, 2.0, [], False),
        (1.8, 1.79, [], False),
        (1.8, 2.0, ["redis: there is none"], False),
    ],
)
def test_the_verdict_is_the_criterion(ours_s, pipelined_s, skipped, passed):
    rows = rows_of([timing("funcpipe", pipelined_s), timing("lambdaml", 0.1), timing("duplex", ours_s)])
    assert has_passed(rows, skipped) is passed


def test_nothing_measured_has_not_passed():
    assert not has_passed([], [])


def test_the_table_names_every_schedule():
    text = table_of([timing("smlt", 3.25), timing("duplex", 1.6, 1.7)])
    assert "smlt" in text
    assert "1.60, 1.70" in text


def test_what_is_measured_covers_what_is_asked():
    assert [(store, n) for store, n, _ in FULL.cases] == [(s, n) for s in ("file", "redis", "s3") for n in (2, 4, 8)]
    assert FULL.latencies_s == (0.0, 0.03)
    # In time it is what 64 MB are at 70 MB/s.
    assert pytest.approx(64 / 70, rel=0.01) == FAST.num_bytes / FAST.bytes_per_s
    assert {(store, n) for store, n, _ in SMALL.cases} < {(store, n) for store, n, _ in FULL.cases}


def test_papers_schedules_are_measured_as_published():
    assert chunks_of("funcpipe", 8, FAST, 0.0) == 1
    assert chunks_of("duplex", 8, FAST, 0.0) == 2


def test_the_order_of_addition_shows_in_the_digest():
    total = drawn(0, 2, 1000, 0) + drawn(0, 1, 1000, 0) + drawn(0, 0, 1000, 0)
    assert hashlib.sha256(total.tobytes()).hexdigest() != expected_sha256(0, 3, 1000, 0)


def test_doubled_values_have_the_doubled_sum():
    digest = hashlib.sha256((4 * sum(drawn(0, rank, 100, 0) for rank in (0, 1))).tobytes()).hexdigest()
    assert digest == expected_sha256(0, 2, 100, 2)


def test_a_task_is_timed_and_digested():
    task = MemberTask(
        store_url="",
        prefix="p",
        rank=0,
        num_ranks=1,
        collective="duplex",
        num_chunks=2,
        num_in_flight=2,
        num_elements=50,
        bytes_per_s=1e9,
        latency_s=0.0,
        seed=3,
    )
    values = drawn(3, 0, 50, 0)
    done = run_task(task, memory_store(), values)
    assert done.ended_s >= done.began_s
    assert done.sha256 == expected_sha256(3, 1, 50, 0)
    assert msgspec.json.decode(msgspec.json.encode(done), type=Done) == done
    assert values.dtype == np.float32


def test_what_cannot_be_measured_is_said(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert "no redis-server" in missing("redis")
    assert missing("file") == ""


@pytest.mark.slow
def test_three_stores_are_measured_on_real_processes():
    quick = Scale(200_000, 2e6, 1, ("smlt",), ())
    stores = tuple((store, 2, quick) for store in ("file", "redis", "s3") if not missing(store))
    timings, skipped = measure_all(SyncPlan(stores, latencies_s=(0.0, 0.01)))
    assert skipped == []
    assert len(timings) == len(stores) * (3 + 2)
    assert all(one.over_bound > 1.0 for one in timings)


@pytest.mark.slow
def test_a_wrong_sum_ends_the_measurement():
    members = Members(2)
    try:
        task = MemberTask(
            store_url="shm://springtide-probe-test",
            prefix="p",
            rank=0,
            num_ranks=2,
            collective="duplex",
            num_chunks=1,
            num_in_flight=1,
            num_elements=50,
            bytes_per_s=1e9,
            latency_s=0.0,
            seed=3,
        )
        with pytest.raises(BackendError, match="has another sum"):
            members.measure([task, msgspec.structs.replace(task, rank=1)], expected_sha256(4, 2, 50, 0))
        with pytest.raises(BackendError, match="cannot begin: InvalidRequest"):
            members.measure([msgspec.structs.replace(task, store_url="ftp://x", num_ranks=1)], "")
    finally:
        members.close()
    assert replace(SMALL, seed=1).seed == 1


def test_each_probe_is_started_with_its_own_options(monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(exchange.probe, "run_probe", lambda **given: asked.append(("sync", given)) or 0)
    monkeypatch.setattr(exchange.smlt, "run_probe", lambda **given: asked.append(("smlt-sync", given)) or 3)
    assert exchange.main(["sync", "--json", "--small", "--seed", "7"]) == 0
    assert exchange.main(["smlt-sync"]) == 3
    assert asked == [
        ("sync", {"as_json": True, "small": True, "seed": 7}),
        ("smlt-sync", {"as_json": False, "small": False, "seed": 0}),
    ]


@pytest.mark.parametrize(("n", "chunks"), [(1, 1), (2, 12), (4, 4), (8, 2)])
def test_enough_chunks_are_the_fewest_that_come_close(n, chunks):
    assert enough_chunks("duplex", n, 64e6, 70e6, 0.0, 4, 0.04) == chunks
    assert enough_chunks("funcpipe", n, 64e6, 70e6, 0.0, 4, 0.04) == 1
