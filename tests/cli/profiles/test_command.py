"""`springtide profile`: how a profile reads, what belongs to what, and what quote and run make of its file."""

from __future__ import annotations

import hashlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import Result

from springtide.cli.profiles.text import drawing, profile_text, samples_text, size_text
from springtide.core.status.platform import JobStatus
from springtide.core.workload import GradientBucket, StepProfile
from springtide.perf.timeline import exchange_intervals
from springtide.runtime.profiling import collective_sampler
from springtide.runtime.profiling import step_profiling as profiling
from springtide.runtime.profiling.collective_sampler import CollectiveTimes, _as_file, _node, server_links
from springtide.runtime.profiling.step_profiling import (
    FunctionProfile,
    Operator,
    OperatorTotal,
    platform_steps_per_s,
    with_speed_curve,
)

Run = Callable[..., Result]
MakeJob = Callable[..., JobStatus]
SOURCE = "import springtide as st\n\n@st.train(global_batch=16)\ndef fit(ctx):\n    ...\n"


@pytest.fixture
def profile() -> FunctionProfile:
    step = StepProfile(
        local_batch_size=8,
        forward_s=0.01,
        backward_s=0.02,
        update_s=0.01,
        buckets=(GradientBucket(ready_s=0.02, num_bytes=1 << 20), GradientBucket(ready_s=0.03, num_bytes=3000)),
    )
    measured = FunctionProfile(
        name="fit",
        object_name="fit",
        source_sha256=hashlib.sha256(SOURCE.encode()).hexdigest(),
        params={},
        device_kind="cpu",
        backend="gloo",
        num_workers=2,
        global_batch_size=16,
        num_iterations=10,
        num_samples=1000,
        step=step,
        fixed_fraction=0.25,
        exchange_s=(0.015, 0.005),
        exchange_samples=((1024, 0.0001), (1 << 20, 0.015)),
        measured_step_s=0.055,
        predicted_step_s=0.05,
        num_unused_parameters=0,
        operators=(Operator(name="aten::linear", part="forward", begin_s=0.0, duration_s=0.01, num_buckets=0),),
        operator_totals=(
            OperatorTotal(name="aten::mm", num_calls=4.0, self_s=0.03),
            OperatorTotal(name="aten::add", num_calls=2.0, self_s=0.01),
        ),
    )
    return with_speed_curve(measured, (1, 2, 4))


@pytest.fixture
def written(profile: FunctionProfile, tmp_path: Path) -> tuple[str, str]:
    """The user's file and its profile."""
    path = tmp_path / "train.py"
    path.write_text(SOURCE, encoding="utf-8")
    (tmp_path / "train.profile.json").write_bytes(msgspec.json.encode(profile))
    return str(path), str(tmp_path / "train.profile.json")


def test_the_timeline_is_drawn_to_scale(profile: FunctionProfile) -> None:
    above, below, scale, *_ = drawing(profile, exchange_intervals(profile.step, profile.exchange_s), width=65).split(
        "\n"
    )
    # A step of 50 ms on 50 columns: 10 forward, 20 backward, 10 waiting for exchanges, 10 update.
    assert above == "computation  |" + "F" * 10 + "B" * 20 + " " * 10 + "U" * 10 + "|"
    assert below == "exchanges    |" + " " * 20 + "0" * 15 + "1" * 5 + " " * 10 + "|"
    assert scale.rstrip().endswith("50 ms")


def test_a_profile_reads_from_the_whole_to_its_parts(profile: FunctionProfile) -> None:
    text = profile_text(profile, exchange_intervals(profile.step, profile.exchange_s))
    assert "fit: batch 16 on 2 cpu workers, 8 samples each, medians of 10" in text
    assert "forward 10 ms   backward 20 ms   update 10 ms   of the computation 25% does not depend" in text
    assert "a step: 50 ms on the critical path, 55 ms measured" in text
    assert "0       1 MiB     20 ms     15 ms" in text
    assert "aten::mm   4      30 ms     75%" in text
    assert "predicted, exchanges by alpha-beta, fitted to 2 exchanges between the two workers" in text
    assert [size_text(size) for size in (4, 2048, 3 << 19)] == ["4 B", "2 KiB", "1.5 MiB"]


def test_samples_are_one_line_for_each_group() -> None:
    nodes = tuple(_node(f"node-{place}", 2, (f"rack-{place}", "spine"), "cpu") for place in range(2))
    measured = [
        CollectiveTimes(group=group, num_bytes=size, repeats_s=[1.0], duration_s=size / 1e6)
        for group in ([0, 1], [0, 1, 2])
        for size in (1024, 4096)
    ]
    lines = samples_text(_as_file(measured, nodes, server_links("x", "cpu", 1e9, 1e8, 1e7), "a test")).split("\n")
    assert re.split(r"\s{2,}", lines[0]) == ["WORKERS", "ON NODES | RACKS", "1 KiB", "4 KiB"]
    assert lines[2].split() == ["3", "2", "|", "1", "1.02", "ms", "4.1", "ms"]


def test_a_profile_is_measured_told_and_kept(
    springtide: Run,
    profile: FunctionProfile,
    written: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    asked: dict[str, Any] = {}

    def measure(entrypoint: Any, **options: Any) -> FunctionProfile:
        asked.update(options, source_path=entrypoint.source_path, object_name=entrypoint.object_name)
        return msgspec.structs.replace(profile, steps_per_s={}, predicted_exchange_s={})

    monkeypatch.setattr(profiling, "profile_function", measure)
    out = tmp_path / "out.json"
    result = springtide("profile", written[0], "--param", "lr=0.1", "--iterations", "3", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert asked["params"] == {"lr": "0.1"}
    assert (asked["global_batch_size"], asked["num_iterations"], asked["object_name"]) == (16, 3, "fit")
    assert profiling.read_profile(out).steps_per_s.keys() == {1, 2, 4, 8}
    assert f"--profile {out}" in result.output
    answer = json.loads(springtide("profile", written[0], "--batch", "32", "--out", str(out), "--json").stdout)
    assert answer["format"] == "springtide-profile-1"
    assert asked["global_batch_size"] == 32


def test_what_cannot_be_profiled_is_refused(
    springtide: Run, written: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = tmp_path / "plain.py"
    plain.write_text("print(1)\n", encoding="utf-8")
    assert "a plain script cannot be profiled" in springtide("profile", str(plain)).stderr
    assert (
        "--sizes is for `springtide profile communication`" in springtide("profile", written[0], "--sizes", "1").stderr
    )
    assert "--param is for `springtide profile FILE" in springtide("profile", "communication", "--param", "a=1").stderr
    assert (
        "--nic says what the network of --namespaces is to be"
        in springtide("profile", written[0], "--nic", "1MB").stderr
    )
    monkeypatch.setattr("springtide.runtime.profiling.namespaces.why_not_here", lambda: "")
    for racks in ("2,x", "1", "0,4", "20,20"):
        refused = springtide("profile", "communication", "--namespaces", "--racks", racks, "--out", str(tmp_path / "x"))
        assert f"--racks {racks!r} is no network; give 2 to 8 nodes" in refused.stderr
    assert "there is no folder" in springtide("profile", written[0], "--out", str(tmp_path / "no" / "x.json")).stderr


def test_communication_goes_on_without_namespaces(
    springtide: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured = [CollectiveTimes(group=[0, 1], num_bytes=1024, repeats_s=[0.001], duration_s=0.001)]
    samples = _as_file(measured, (_node("local", 2, (), "cpu"),), server_links("x", "cpu", 1e9, 1e9, 1e9), "a test")
    monkeypatch.setattr(collective_sampler, "sample_here", lambda *_, **__: samples)
    monkeypatch.setattr(
        "springtide.runtime.profiling.namespaces.why_not_here", lambda: "network namespaces need root, so none"
    )
    out = tmp_path / "samples.json"
    result = springtide("profile", "communication", "--namespaces", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert "network namespaces need root" in result.output
    assert "1 sample written to" in result.output
    assert out.is_file()


def test_a_quote_takes_speed_and_length_from_the_profile(
    client: Any, springtide: Run, written: tuple[str, str], profile: FunctionProfile
) -> None:
    file, profile_file = written
    assert springtide("quote", file, "--profile", profile_file).exit_code == 0
    options = client.calls[-1][1]["options"]
    rates = platform_steps_per_s(profile, 16, None)
    assert options["profile_steps_per_s"] == {str(count): rate for count, rate in rates.items()}
    assert springtide("quote", file, "--profile", profile_file, "--exact", "4").exit_code == 0
    options = client.calls[-1][1]["options"]
    # Two devices: four virtual shards of four samples each, of which one worker passes over all.
    rates = platform_steps_per_s(profile, 16, 4)
    assert options["profile_steps_per_s"] == {str(count): rate for count, rate in rates.items()}
    assert 1.0 / rates[1] == pytest.approx(4 * (0.25 + 0.75 / 2) * 0.03 + 0.01)
    assert 1.0 / rates[4] == pytest.approx((0.25 + 0.75 / 2) * 0.03 + sum(profile.predicted_exchange_s[4]) + 0.01)
    assert options["num_samples"] == 1000
    assert msgspec.convert(options["step_profile"], StepProfile) == profile.step
    larger = springtide("quote", file, "--profile", profile_file, "--batch", "64", "--samples", "7")
    assert larger.exit_code == 0
    options = client.calls[-1][1]["options"]
    assert options["num_samples"] == 7
    assert options["profile_steps_per_s"]["1"] < rates[1]


def test_a_run_takes_the_profile_too(client: Any, springtide: Run, written: tuple[str, str], make_job: MakeJob) -> None:
    client.add(make_job())
    result = springtide("run", written[0], "--profile", written[1], "--detach")
    assert result.exit_code == 0, result.output
    assert client.calls[-1][0] == "submit_job"
    assert set(client.calls[-1][1]["options"]["profile_steps_per_s"]) == {"1", "2", "4"}


def test_a_profile_of_something_else_is_told(client: Any, springtide: Run, written: tuple[str, str]) -> None:
    file, profile_file = written
    Path(file).write_text(SOURCE + "\n# changed\n", encoding="utf-8")
    assert "has changed since it was profiled" in springtide("quote", file, "--profile", profile_file).output
    assert "with the parameters {}" in springtide("quote", file, "--profile", profile_file, "--param", "a=1").output
    Path(file).write_text(SOURCE.replace("def fit", "def other"), encoding="utf-8")
    refused = springtide("quote", file, "--profile", profile_file)
    assert refused.exit_code == 2
    assert "is a profile of 'fit', train.py has 'other'; profile that one" in refused.stderr
    assert "write them the other way round" in springtide("quote", "--profile", file).stderr


TRAINED = """
import torch
import springtide as st

@st.train(global_batch=8)
def fit(ctx):
    model, _ = ctx.prepare(torch.nn.Linear(4, 2), lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    for batch in ctx.batches(torch.randn(64, 4)):
        ctx.step(model(batch.x).square().mean())
"""


@pytest.mark.slow
def test_the_command_measures_without_a_platform(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(TRAINED, encoding="utf-8")
    command = [sys.executable, "-m", "springtide", "profile", str(path), "--iterations", "1"]
    ran = subprocess.run([*command, "--json"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["num_samples"] == 64
    assert sorted(profiling.read_profile(tmp_path / "train.profile.json").steps_per_s) == [1, 2, 4, 8]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stdout
    for part in ("computation  |", "BUCKET", "OPERATOR", "WORKERS", "written to train.profile.json"):
        assert part in told


@pytest.mark.slow
def test_ctrl_c_ends_the_workers_too(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(TRAINED, encoding="utf-8")
    # Whoever runs the tests in the background has them ignore Ctrl-C, and children inherit that.
    command = ["env", "--default-signal=INT", sys.executable, "-m", "springtide"]
    command += ["profile", str(path), "--iterations", "100000"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline(), "it has begun to measure"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == 1
    finally:
        process.kill()
        process.communicate()
    members = [
        entry.name
        for entry in Path("/proc").iterdir()
        if entry.name.isdecimal() and f"SPRINGTIDE_MEASUREMENT_PARENT={process.pid}".encode() in _environment(entry)
    ]
    assert members == []


def _environment(entry: Path) -> list[bytes]:
    try:
        return (entry / "environ").read_bytes().split(b"\0")
    except OSError:
        return []
