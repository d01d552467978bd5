"""Share profiles: what follows from a search, the file beside the user's, and what is refused of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from springtide.core.errors import InvalidRequest, StorageError
from springtide.core.shares import Share
from springtide.perf.share_profile import (
    InferenceShareProfile,
    Subject,
    TrainingShareProfile,
    chosen_trial,
    find_share_profile,
    inference_profile,
    read_share_profiles,
    shares_path,
    training_profile,
    write_share_profile,
)
from springtide.solvers.search.share_bisection import search_shares
from springtide.solvers.search.share_search import search_efficacy


def subject(object_name: str = "Reader") -> Subject:
    return Subject(
        name=object_name.lower(),
        object_name=object_name,
        source_sha256="ab" * 32,
        mechanism="cgroup-v2",
        device_cpus=1.0,
        memory_mb=321,
    )


def latency_s(batch_size: int, share: float) -> float:
    return 0.002 + 0.001 * batch_size / min(share, 0.7)


def service(object_name: str = "Reader", slo_s: float = 0.1) -> InferenceShareProfile:
    optimum = search_efficacy(latency_s, slo_s / 2)
    settled = chosen_trial(optimum)
    assert settled is not None
    at_limit_s = latency_s(settled.batch_size, min(1.0, 2 * settled.share))
    return inference_profile(subject(object_name), slo_s, optimum, at_limit_s)


def training(object_name: str = "fit") -> TrainingShareProfile:
    return training_profile(subject(object_name), search_shares(lambda share: 100.0 * min(1.0, share / 0.5)))


def test_a_service_gets_twice_its_request_and_its_capacities() -> None:
    profile = service()
    assert profile.share.limit == min(1.0, 2 * profile.share.request)
    assert profile.share.memory_mb == 321
    assert profile.latency_s <= profile.slo_s / 2
    assert profile.request_capacity_per_s == pytest.approx(profile.batch_size / profile.latency_s)
    assert profile.capacity_per_s == pytest.approx(profile.batch_size / profile.limit_latency_s)
    assert profile.capacity_per_s >= profile.request_capacity_per_s
    assert profile.is_consistent


def test_of_equally_efficient_shares_the_smallest_is_taken() -> None:
    """Work that is divided evenly: every share is as good as any other, but for the noise."""
    noise = {0.3: 1.01, 0.5: 0.99}
    optimum = search_efficacy(lambda size, share: 0.004 * size / share * noise.get(round(share, 1), 1.0), 0.1)
    settled = chosen_trial(optimum)
    assert settled is not None
    assert optimum.best is not None
    assert settled.share == min(trial.share for trial in optimum.trials if trial.is_within)
    assert settled.efficacy >= 0.95 * optimum.best.efficacy
    assert inference_profile(subject(), 0.2, optimum, 0.01).share.request == settled.share
    assert chosen_trial(search_efficacy(lambda size, share: 1.0, 0.1)) is None


def test_trials_that_contradict_each_other_are_told() -> None:
    optimum = search_efficacy(latency_s, 0.05)
    settled = chosen_trial(optimum)
    assert settled is not None
    assert settled.latency_s is not None
    slower = inference_profile(subject(), 0.1, optimum, settled.latency_s * 1.3)
    assert not slower.is_consistent


def test_an_slo_out_of_reach_is_refused_with_one_that_would_do() -> None:
    optimum = search_efficacy(lambda size, share: 0.0305 * size / share, 0.01)
    with pytest.raises(InvalidRequest, match=r"20 ms is out of reach.*half of it, 10 ms.*took 30\.5 ms; 62 ms would"):
        inference_profile(subject(), 0.02, optimum, 1.0)
    enough = search_efficacy(lambda size, share: 0.0305 * size / share, 0.031)
    assert enough.best is not None


def test_a_training_function_keeps_what_the_bisection_found() -> None:
    profile = training()
    assert 0.38 <= profile.share.request <= 0.42
    assert 0.48 <= profile.share.limit <= 0.52
    assert profile.throughput_per_s == 100.0
    assert profile.is_consistent


def test_one_file_holds_the_profiles_of_all_functions_of_a_source(tmp_path: Path) -> None:
    source = tmp_path / "digits.py"
    assert shares_path(source) == tmp_path / "digits.shares.json"
    assert find_share_profile(source, "Reader") is None
    write_share_profile(shares_path(source), service())
    write_share_profile(shares_path(source), training())
    newer = service(slo_s=0.2)
    write_share_profile(shares_path(source), newer)
    assert find_share_profile(source, "Reader") == newer
    assert find_share_profile(source, "fit") == training()
    assert find_share_profile(source, "other") is None
    assert len(read_share_profiles(shares_path(source))) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["digits.shares.json"]


def test_what_is_no_profile_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.shares.json"
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_share_profiles(path)
    write_share_profile(path, service())
    good = json.loads(path.read_text())
    for change in (
        {"share": {"request": 0.5, "limit": 0.4}},
        {"share": {"request": 0.0, "limit": 0.4}},
        {"share": {"request": 0.5, "limit": 1.4}},
        {"share": {"request": 0.5, "limit": 0.9, "memory_mb": -1}},
        {"capacity_per_s": 0.0},
        {"batch_size": 0},
        {"kind": "else"},
    ):
        path.write_text(json.dumps({**good, "profiles": [{**good["profiles"][0], **change}]}))
        with pytest.raises(InvalidRequest, match="take it again: springtide profile FILE --shares"):
            read_share_profiles(path)
    path.write_text("{}" * (1 << 20))
    with pytest.raises(InvalidRequest, match="over 1 MiB"):
        read_share_profiles(path)
    path.write_text("nothing of ours")
    with pytest.raises(InvalidRequest, match="is no share profile"):
        write_share_profile(path, service())
    assert path.read_text() == "nothing of ours"


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot write"):
        write_share_profile(tmp_path / "none" / "a.shares.json", service())


def test_a_share_of_a_profile_is_one_of_the_platform() -> None:
    assert isinstance(service().share, Share)
