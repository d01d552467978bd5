"""SMLT's measurements: parts, rows, growth and verdict; and one small case on real processes and servers."""

from __future__ import annotations

import json

import pytest

from springtide.storage.stores.linked import DuplexLink, LinkedStore
from springtide.storage.stores.open import memory_store
from springtide_studies.exchange.member import Done, MarkedStore, Marks
from springtide_studies.exchange.smlt import (
    CARD_LINKS,
    OBJECT_STORE_LATENCY_S,
    SMALL,
    SYSTEMS,
    SmltPlan,
    SmltTimes,
    growth_of,
    has_passed,
    measure_all,
    parts_of,
    predict,
    rows_of,
    run_probe,
    table_of,
)
from springtide_studies.exchange.stores import missing


def measured(system, n, *times_s, store="redis", num_bytes=500_000, latency_s=0.001) -> SmltTimes:
    return SmltTimes(
        system=system,
        store=store,
        collective="smlt",
        n=n,
        num_bytes=num_bytes,
        latency_s=latency_s,
        num_chunks=1,
        num_shards=n,
        times_s=times_s,
        predicted_s=1.0,
        parts_s={"UL-Shard": 0.25, "DL-grad": 0.75},
    )


def systems_of(**times):
    """Each system with two and with eight workers."""
    usual = {"smlt": (1.8, 1.6), "siren": (1.0, 4.0), "cirrus": (2.0, 5.0), "lambdaml": (1.1, 1.5), "ours": (0.5, 0.9)}
    return [
        measured(name, n, seconds)
        for name, both in {**usual, **times}.items()
        for n, seconds in zip((2, 8), both, strict=True)
    ]


def stores_of(redis_s=1.6, s3_s=1.9, near_s=1.5):
    return [
        measured("stores", 8, redis_s),
        measured("stores", 8, s3_s, store="s3", latency_s=OBJECT_STORE_LATENCY_S),
        measured("stores", 8, near_s, store="s3", latency_s=0.0),
    ]


def done(began_s=10.0, ended_s=14.0, **marks) -> Done:
    return Done(began_s=began_s, ended_s=ended_s, marks=Marks(**marks))


def test_the_parts_of_smlt_are_its_four_phases_and_add_up():
    parts = parts_of("smlt", [done(raw_put_s=1.0, raw_got_s=2.0, sum_put_s=2.5, sum_got_s=4.0)] * 3)
    assert parts == pytest.approx({"UL-Shard": 1.0, "DL-Shard": 1.0, "UL-aggr": 0.5, "DL-grad": 1.5})


def test_a_worker_that_merges_no_shard_skips_two_parts():
    parts = parts_of("smlt", [done(raw_put_s=1.0, sum_got_s=4.0)])
    assert parts == pytest.approx({"UL-Shard": 1.0, "DL-Shard": 0.0, "UL-aggr": 0.0, "DL-grad": 3.0})


def test_the_others_upload_a_gradient_and_download():
    ranks = [done(raw_put_s=1.0, raw_got_s=4.0), done(raw_put_s=2.0, raw_got_s=4.0)]
    assert parts_of("all-to-all", ranks) == pytest.approx({"UL-grad": 1.5, "DL-grad": 2.5})
    assert parts_of("parameter-server", ranks) == pytest.approx({"UL-grad": 2.0, "DL-grad": 2.0}), "the server is none"


def test_marks_are_of_the_last_request_of_each_kind():
    ticks = iter(range(10, 100))
    store = MarkedStore(LinkedStore(memory_store("marks"), DuplexLink()), lambda: float(next(ticks)))
    store.put("p/raw/0.0", b"x")
    store.put("p/raw/1.0", b"x")
    store.put("p/sum/0", b"x")
    store.wait("p/sum/0", 1.0)
    assert store.marks(10.0) == Marks(raw_put_s=1.0, sum_put_s=2.0, sum_got_s=3.0)


def test_rows_put_systems_and_stores_beside_each_other():
    rows = rows_of(systems_of(), stores_of())
    smlt = next(row for row in rows if row.case == "smlt, n=8" and "Siren" in row.baseline_name)
    assert (smlt.ours, smlt.baseline, smlt.ratio) == (1.6, 4.0, pytest.approx(0.4))
    ours = [row for row in rows if row.case == "ours, n=2"]
    assert len(ours) == len(SYSTEMS) - 1
    through = [row for row in rows if row.figure == 9]
    assert [row.baseline_name for row in through] == [
        "the same through S3, 35 ms a request",
        "the same through S3, 0 ms a request",
    ]
    assert "S3" in table_of(systems_of(), stores_of()) or "s3" in table_of([], stores_of())


def test_growth_is_from_the_fewest_workers_to_the_most():
    assert growth_of(systems_of(), "siren") == pytest.approx(4.0)
    assert growth_of([measured("siren", 8, 5.0, 4.0), measured("siren", 2, 1.0)], "siren") == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("systems", "stores", "passed"),
    [
        (systems_of(), stores_of(), True),
        (systems_of(siren=(1.0, 1.1)), stores_of(), False),
        (systems_of(cirrus=(2.0, 2.1)), stores_of(), False),
        (systems_of(siren=(0.2, 1.5)), stores_of(), False),
        (systems_of(ours=(1.2, 0.9)), stores_of(), False),
        (systems_of(), stores_of(s3_s=1.5), False),
        (systems_of(), stores_of(near_s=1.0), True),
        ([], [], False),
        (systems_of(), [], False),
    ],
)
def test_the_verdict_is_the_criterion(systems, stores, passed):
    assert has_passed(systems, stores) is passed


def test_what_is_measured_is_what_is_asked():
    assert SmltPlan().workers == (2, 4, 8)
    assert {system.store for system in SYSTEMS.values()} == {"redis", "s3"}
    assert 0.03 <= OBJECT_STORE_LATENCY_S <= 0.04
    assert 8 < CARD_LINKS < 16, "with sixteen workers the card is what they wait for, with eight it is not"


def test_the_model_says_what_many_workers_take():
    few, many = predict(SmltPlan(), (8, 100))
    assert few.seconds["smlt"] < few.seconds["smlt-s3"], "with few workers a Redis answers sooner"
    assert many.seconds["smlt"] > many.seconds["smlt-s3"], "with many its one network card is what they wait for"
    assert many.seconds["siren"] > 2 * many.seconds["smlt"]
    assert few.seconds["ours"] < few.seconds["smlt"]


def test_without_its_servers_nothing_has_passed(monkeypatch, capsys):
    monkeypatch.setattr("springtide_studies.exchange.smlt.missing", lambda kind: f"there is no {kind}")
    assert run_probe(as_json=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is False
    assert report["skipped"] == ["redis: there is no redis", "s3: there is no s3"]


@pytest.mark.slow
def test_real_processes_give_right_sums_through_both_stores():
    for kind in ("redis", "s3"):
        if missing(kind):
            pytest.skip(missing(kind))
    plan = SmltPlan(workers=(2, 3), num_bytes=40_000, bytes_per_s=4e6, small_bytes=4_000, num_repetitions=1)
    systems, stores = measure_all(plan)
    assert [(one.n, one.system) for one in systems] == [(n, name) for n in (2, 3) for name in SYSTEMS]
    assert len(stores) == 2 * 2 * 3
    for one in (*systems, *stores):
        assert one.best_s > 0.0
        assert all(seconds >= 0.0 for seconds in one.parts_s.values())
        # Means over the workers: no worker takes longer than all of them together.
        assert sum(one.parts_s.values()) <= one.best_s * 1.001
    smlt = next(one for one in systems if one.system == "smlt")
    assert set(smlt.parts_s) == {"UL-Shard", "DL-Shard", "UL-aggr", "DL-grad"}
    assert SMALL.num_repetitions == 1
