"""share="auto": what a profile beside the file says, and what is said where it is of something else."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest

from springtide.client.goals import TrainOptions
from springtide.client.serving_goals import ServeOptions
from springtide.client.share_profiles import job_as_profiled, service_as_profiled
from springtide.client.sources.source import SourceFile, read_source
from springtide.core.errors import InvalidRequest
from springtide.core.shares import Share
from springtide.core.status.shares import SharingStatus
from springtide.perf.share_profile import (
    InferenceShareProfile,
    TrainingShareProfile,
    shares_path,
    write_share_profile,
)

TEXT = (
    "class Reader:\n    def predict(self, n: list[int]) -> list[int]:\n        return n\n\n\ndef fit(ctx):\n    ...\n"
)


@pytest.fixture
def source(tmp_path: Any) -> SourceFile:
    path = tmp_path / "work.py"
    path.write_text(TEXT)
    common: dict[str, Any] = {
        "source_sha256": hashlib.sha256(TEXT.encode()).hexdigest(),
        "mechanism": "cgroup-v1",
        "device_cpus": 1.0,
        "trials": (),
    }
    write_share_profile(
        shares_path(path),
        InferenceShareProfile(
            name="reader",
            object_name="Reader",
            share=Share(request=0.2, limit=0.4, memory_mb=700),
            slo_s=0.2,
            batch_size=4,
            latency_s=0.08,
            limit_latency_s=0.05,
            request_capacity_per_s=50.0,
            capacity_per_s=80.0,
            left_fraction=0.0,
            **common,
        ),
    )
    write_share_profile(
        shares_path(path),
        TrainingShareProfile(
            name="fit",
            object_name="fit",
            share=Share(request=0.5, limit=0.8),
            throughput_per_s=100.0,
            request_throughput_per_s=80.0,
            limit_throughput_per_s=99.0,
            is_consistent=True,
            **common,
        ),
    )
    return read_source(path, "Reader", "class")


def job_source(source: SourceFile) -> SourceFile:
    return read_source(f"{source.import_root}/{source.filename}", "fit")


def test_a_service_takes_share_batch_capacity_and_objective_from_its_profile(source: SourceFile) -> None:
    sent = service_as_profiled(ServeOptions(share="auto"), source).as_request()
    assert sent["share"] == {"request": 0.2, "limit": 0.4, "memory_mb": 700}
    assert (sent["max_batch_size"], sent["capacity_per_s"], sent["slo_s"]) == (4, 80.0, 0.2)


def test_what_its_owner_names_stands(source: SourceFile) -> None:
    told: list[str] = []
    options = ServeOptions(share="auto", slo="300ms", max_batch=16, capacity=20, memory="1GB")
    sent = service_as_profiled(options, source, told.append).as_request()
    assert (sent["max_batch_size"], sent["capacity_per_s"], sent["slo_s"]) == (16, 20.0, 0.3)
    assert sent["share"]["memory_mb"] == 1000
    assert told[0] == "as profiled: 0.2..0.4 of a device, batches of 4, 80 samples/s of one replica at its limit"
    assert told[1:] == ["its share was profiled in batches of 4, and max_batch says 16"]


def test_a_job_takes_its_share_from_its_profile(source: SourceFile) -> None:
    found = job_as_profiled(TrainOptions(share="auto", epochs=3), job_source(source)).values
    assert (found["share"], found["memory"], found["epochs"]) == ((0.5, 0.8), None, 3)


def test_a_share_that_is_named_needs_no_profile(source: SourceFile) -> None:
    options = ServeOptions(share=0.3)
    assert service_as_profiled(options, replace_source(source, object_name="Other")) is options
    job = TrainOptions()
    assert job_as_profiled(job, source) is job


def replace_source(source: SourceFile, **changes: Any) -> SourceFile:
    return replace(source, **changes)


def test_without_a_profile_the_way_to_one_is_told(source: SourceFile) -> None:
    with pytest.raises(InvalidRequest, match=r"`springtide profile work\.py --shares`"):
        service_as_profiled(ServeOptions(share="auto"), replace_source(source, object_name="Other"))
    with pytest.raises(InvalidRequest, match="not one of a training job"):
        job_as_profiled(TrainOptions(share="auto"), source)


def test_a_profile_of_something_else_is_used_and_told(source: SourceFile) -> None:
    told: list[str] = []
    changed = replace_source(source, text=TEXT + "\n")
    service_as_profiled(
        ServeOptions(share="auto", slo="100ms"), changed, told.append, sharing=SharingStatus(device_cpus=0.5)
    )
    assert told[1:] == [
        "work.py has changed since its share was profiled; another share may be right now",
        "its share was profiled on a device of 1 cores, and one has 0.5 here; profile it anew on such a device",
        "Reader was profiled for 200 ms, longer than its objective of 100 ms; profile it anew with --slo 100ms",
    ]
    told.clear()
    job_as_profiled(TrainOptions(share="auto"), job_source(source), told.append, sharing=SharingStatus(device_cpus=1.0))
    assert told == ["as profiled: 0.5..0.8 of a device, 80 to 99 samples/s of one worker"]


@pytest.mark.parametrize("mechanism", ["cuda-preload", "mps", "cgroup-v1 and cuda-preload"])
def test_memory_of_a_processor_is_no_limit_on_a_gpu(source: SourceFile, mechanism: str) -> None:
    told: list[str] = []
    gpus = SharingStatus(mechanism=mechanism)
    options = service_as_profiled(ServeOptions(share="auto"), source, told.append, gpus)
    assert options.values["memory"] is None
    assert any("profiled on processors" in line for line in told)
    named = job_as_profiled(TrainOptions(share="auto", memory="2GB"), job_source(source), told.append, gpus)
    assert named.values["memory"] == "2GB"
    on_cpu = service_as_profiled(ServeOptions(share="auto"), source, told.append, SharingStatus(mechanism="cgroup-v1"))
    assert on_cpu.values["memory"] == "700MB"
