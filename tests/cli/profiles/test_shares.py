"""`springtide profile --shares` and `--surface`: what is measured, shown, written and refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from springtide.backends.sharing import trials as share_trials
from springtide.core.errors import BackendError
from springtide.perf.share_profile import read_share_profiles
from springtide.runtime.profiling.share_profiler import ShareSpec

Run = Callable[..., Result]
SOURCE = """
import springtide as st

@st.serve(slo="p99 < 100ms", name="reader")
class Reader:
    def predict(self, xs: list[float]) -> list[float]:
        return xs

@st.train(global_batch=16, params={"lr": "0.1"})
def fit(ctx):
    ...
"""
BATCHES, PERCENTS = (1, 2, 4, 8), (10, 20, 50, 100)


def latency_s(batch_size: int, share: float) -> float:
    return 0.005 + 0.004 * batch_size / min(share, 0.6)


class Trials:
    """Stands in for the process that is held to shares: a device of a formula."""

    made: list[Trials] = []

    def __init__(self, spec: ShareSpec, **options: Any) -> None:
        self.spec, self.options = spec, options
        self.mechanism, self.enforced, self.peak_mb, self.is_batchable = "cgroup-v2", "held by a test", 77, True
        self.asked: list[tuple[int, float]] = []
        type(self).made.append(self)

    def __enter__(self) -> Trials:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def latency_s(self, batch_size: int, share: float, bound_s: float) -> float:
        self.asked.append((batch_size, share))
        return latency_s(batch_size, share)

    def throughput_per_s(self, share: float) -> float:
        self.asked.append((1, share))
        return 300.0 * min(1.0, share / 0.5)


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> type[Trials]:
    monkeypatch.setattr(Trials, "made", [])
    monkeypatch.setattr(share_trials, "ShareTrials", Trials)
    return Trials


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "both.py"
    path.write_text(SOURCE, encoding="utf-8")
    return path


@pytest.fixture
def surface(tmp_path: Path) -> Path:
    path = tmp_path / "net.csv"
    rows = [f"{size},{percent},{latency_s(size, percent / 100)},1" for size in BATCHES for percent in PERCENTS]
    path.write_text("\n".join(rows), encoding="utf-8")
    return path


def test_a_service_is_profiled_and_its_profile_kept_beside_the_file(
    springtide: Run, trials: type[Trials], source: Path
) -> None:
    result = springtide("profile", f"{source}:Reader", "--shares", "--input", '{"xs": [1.5]}', "--cpus", "0.5")
    assert result.exit_code == 0, result.output
    (made,) = trials.made
    assert (made.spec.kind, made.spec.call, made.spec.entrypoint.object_name) == (
        "inference",
        '{"xs": [1.5]}',
        "Reader",
    )
    assert made.options["device_cpus"] == 0.5
    (profile,) = read_share_profiles(source.with_name("both.shares.json"))
    assert (profile.name, profile.mechanism, profile.device_cpus) == ("reader", "cgroup-v2", 0.5)
    assert profile.share.memory_mb == 77
    # The limit is measured last, apart from the search.
    assert made.asked[-1] == (profile.batch_size, profile.share.limit)
    assert len(made.asked) == len(profile.trials) + 1
    assert "reader: SLO 100 ms, of which a batch may take half" in result.output
    assert f"request {profile.share.request:.0%}, limit {profile.share.limit:.0%} of a device" in result.output
    assert "held by a test" in result.output
    assert "springtide deploy" in result.output
    assert "--share auto" in result.output


def test_a_service_whose_share_is_what_a_profile_says_can_be_profiled(
    springtide: Run, trials: type[Trials], tmp_path: Path
) -> None:
    path = tmp_path / "auto.py"
    text = SOURCE.replace('name="reader"', 'share="auto", params={"size": 3}').replace(
        'params={"lr"', 'share="auto", params={"lr"'
    )
    path.write_text(text, encoding="utf-8")
    assert springtide("profile", f"{path}:Reader", "--shares").exit_code == 0
    assert trials.made[-1].spec.params == {"size": "3"}
    assert springtide("profile", f"{path}:fit", "--shares").exit_code == 0


def test_a_training_function_is_profiled_into_the_same_file(
    springtide: Run, trials: type[Trials], source: Path
) -> None:
    assert springtide("profile", f"{source}:Reader", "--shares", "--slo", "200ms").exit_code == 0
    result = springtide("profile", f"{source}:fit", "--shares", "--batch", "64", "--param", "width=3", "--json")
    assert result.exit_code == 0, result.output
    spec = trials.made[-1].spec
    assert spec.kind == "training"
    assert spec.params == {"lr": "0.1", "width": "3"}
    assert spec.job is not None
    assert spec.job.global_batch_size == 64
    answer = json.loads(result.stdout)
    assert answer["kind"] == "training"
    assert 0.37 < answer["share"]["request"] < 0.42
    assert 0.48 < answer["share"]["limit"] < 0.52
    both = read_share_profiles(source.with_name("both.shares.json"))
    assert [profile.object_name for profile in both] == ["Reader", "fit"]
    text = springtide("profile", f"{source}:fit", "--shares").output
    assert "SAMPLES/S" in text
    assert "of the throughput on a whole device" in text


def test_a_training_function_that_contradicts_itself_is_told_so(
    springtide: Run, trials: type[Trials], source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "throughput_per_s", lambda self, share: 100.0 if share < 0.6 else 50.0)
    assert "trials contradict each other" in springtide("profile", f"{source}:fit", "--shares").output


def test_an_slo_out_of_reach_names_one_that_would_do(springtide: Run, trials: type[Trials], source: Path) -> None:
    result = springtide("profile", f"{source}:Reader", "--shares", "--slo", "10ms")
    assert result.exit_code == 2
    assert "an SLO of 10 ms is out of reach" in result.stderr
    assert "would do" in result.stderr
    assert not source.with_name("both.shares.json").exists()


def test_what_does_not_belong_together_is_refused(
    springtide: Run, trials: type[Trials], source: Path, surface: Path, tmp_path: Path
) -> None:
    plain = tmp_path / "plain.py"
    plain.write_text("print(1)\n", encoding="utf-8")
    for arguments, sentence in (
        ((source, "--shares"), "several to choose from"),
        ((f"{source}:none", "--shares"), "has no service 'none'"),
        ((plain, "--shares"), "declares nothing to profile"),
        (("--shares",), "give the file to profile"),
        ((), "give the file to profile"),
        ((f"{source}:Reader", "--shares", "--batch", "8"), "--batch is for training functions"),
        ((f"{source}:fit", "--shares", "--slo", "1s"), "--slo is for services"),
        ((f"{source}:fit", "--shares", "--iterations", "3"), "--iterations says nothing about shares"),
        ((f"{source}:fit", "--shares", "--cpus", "-1"), "--cpus is how many cores make a device"),
        ((f"{source}:Reader", "--shares", "--input", "@none.json"), "none.json cannot be read"),
        ((f"{source}:Reader", "--shares", "--slo", "1s", "--slo", "2s"), "give --slo once"),
        ((f"{source}:Reader", "--shares", "--out", tmp_path / "no" / "x"), "there is no folder"),
        ((source, "--slo", "1s"), "--slo is about shares of a device; add --shares"),
        (("--surface", surface), "say what is to be kept"),
        (("--surface", surface, "--slo", "1s", "--exec", "1s"), "in one of two ways"),
        (("--surface", surface, "--slo", "1s", "--slo", "2s"), "2 times for 1 surfaces"),
        (("--surface", surface, "--slo", "1s", "--batch", "8"), "so --batch says nothing"),
        (("--surface", surface, "--slo", "9s..1s"), "is no range"),
        ((source, "--surface", surface, "--slo", "1s"), "leave out FILE"),
        (("--surface", tmp_path / "none.csv", "--slo", "1s"), "there is no file"),
    ):
        result = springtide("profile", *(str(argument) for argument in arguments))
        assert result.exit_code == 2, (arguments, result.output)
        assert sentence in result.stderr, (arguments, result.stderr)
    assert trials.made == []


def test_one_surface_shows_the_trials_and_the_optimum(springtide: Run, surface: Path) -> None:
    result = springtide("profile", "--surface", str(surface), "--slo", "80ms")
    assert result.exit_code == 0, result.output
    assert "net: SLO 80 ms (a batch may take 40 ms)" in result.output
    assert "every setting tried:" in result.output
    assert "hybrid growth search as published:" in result.output
    answer = json.loads(springtide("profile", "--surface", str(surface), "--exec", "40ms", "--json").stdout)
    assert answer["missed_fraction"] == 0.0
    best = answer["search"]["best"]
    assert best["efficacy"] == answer["optimum"]["efficacy"]
    assert best["latency_s"] <= 0.04
    # 10 % and 20 % have no double that was recorded but 20 % and 100 %.
    if round(best["share"] * 200) in PERCENTS:
        assert answer["capacity_per_s"] > 0
    refused = springtide("profile", "--surface", str(surface), "--slo", "2ms")
    assert refused.exit_code == 0
    assert "an SLO of 2 ms is out of reach" in refused.output
    assert "none meets it" in refused.output


@pytest.mark.slow
def test_several_surfaces_are_a_table_and_a_range_of_slos_a_summary(springtide: Run, surface: Path) -> None:
    two = springtide("profile", "--surface", str(surface), "--surface", str(surface), "--exec", "20ms", "--exec", "1s")
    assert two.exit_code == 0, two.output
    lines = two.output.splitlines()
    assert lines[0].split()[:3] == ["SURFACE", "A", "BATCH"]
    assert [line.split()[:3] for line in lines[1:3]] == [["net", "20", "ms"], ["net", "1000", "ms"]]
    swept = springtide("profile", "--surface", str(surface), "--slo", "10ms..60ms", "--json")
    (row,) = json.loads(swept.stdout)
    assert row["num_slos"] + row["num_out_of_reach"] == 26
    assert row["num_told"] == row["num_out_of_reach"] > 0
    assert row["num_exact"] >= row["published_num_exact"]
    assert "of 26" in springtide("profile", "--surface", str(surface), "--slo", "10ms..60ms").output


def test_what_fails_in_the_process_ends_the_command_with_its_sentence(
    springtide: Run, trials: type[Trials], source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Trials) -> Trials:
        raise BackendError("nothing here holds a process to a share of the CPU")

    monkeypatch.setattr(trials, "__enter__", fail)
    result = springtide("profile", f"{source}:Reader", "--shares")
    assert result.exit_code != 0
    assert "nothing here holds a process" in result.stderr
