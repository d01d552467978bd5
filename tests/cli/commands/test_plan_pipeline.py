"""`springtide plan-pipeline`, as a user calls it."""

import json

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from kits.perf.pipeline_profiles import plan_pipeline
from springtide.cli.main import cli
from springtide.core.functions import LayerProfile, ModelProfile
from springtide.perf.functions.pipeline.plan import WEIGHTS


def profile_of(num_layers, *, seed=0, parameter_bytes=20 << 20, memory_mb=(512, 1024, 2048)):
    rng = np.random.default_rng(seed)
    return ModelProfile(
        model="toy",
        micro_batch_size=4,
        memory_mb=memory_mb,
        bytes_per_s=tuple(50e6 for _ in memory_mb),
        layers=tuple(
            LayerProfile(
                name=f"block{i}",
                parameter_bytes=parameter_bytes,
                activation_bytes=4 << 20,
                output_bytes=1 << 19,
                gradient_bytes=1 << 19,
                forward_s=tuple(float(rng.uniform(0.2, 0.6)) * 1024 / m for m in memory_mb),
                backward_s=tuple(float(rng.uniform(0.4, 1.2)) * 1024 / m for m in memory_mb),
            )
            for i in range(num_layers)
        ),
        base_bytes=50 << 20,
    )


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "p.json"
    path.write_bytes(msgspec.json.encode(profile_of(6)))
    return str(path)


def call(*words):
    return CliRunner().invoke(cli, ["plan-pipeline", *words])


def test_json_has_every_plan_with_its_breakdown_and_the_time_it_took(file):
    answer = json.loads(call("--profile", file, "--json").stdout)
    expected = plan_pipeline(profile_of(6), 16)
    assert [row["objective"] for row in answer["plans"]] == [one.value for one in expected]
    assert [tuple(row["weights"]) for row in answer["plans"]] == list(WEIGHTS)
    for row in answer["plans"]:
        assert row["proved"]
        assert row["computation_s"] + row["flush_s"] + row["sync_s"] == pytest.approx(row["step_s"])
        assert row["solve_s"] >= 0
        assert row["plan"]["stages"][-1]["end_layer"] == 6
    assert sum(row["recommended"] for row in answer["plans"]) == 1
    assert answer["num_micro_batches"] == 16


def test_text_marks_the_recommended_plan_and_draws_each(file):
    said = call("--profile", file, "--weights", "1,0", "--weights", "1,65536", "--micro-batches", "4").stdout
    assert "toy: 6 layers, 3 memory sizes, 4 micro-batches of 4 a step" in said
    assert "\n*  " in said
    assert said.count(" micro-batches each") == 2
    assert " MB] > [" in said


def test_the_check_tries_every_plan(file):
    answer = json.loads(call("--profile", file, "--check", "--front", "--json").stdout)
    assert all(row["check"]["agrees"] and row["check"]["method"] == "every plan" for row in answer["plans"])
    assert answer["front"]["is_complete"]
    points = [(point["cost_mb_s"], -point["step_s"]) for point in answer["front"]["points"]]
    assert points == sorted(points)
    for row in answer["plans"]:
        assert any(point["step_s"] == pytest.approx(row["step_s"]) for point in answer["front"]["points"])


@pytest.mark.slow
def test_a_front_of_many_layers_is_a_sweep(tmp_path):
    path = tmp_path / "large.json"
    path.write_bytes(msgspec.json.encode(profile_of(16)))
    answer = json.loads(call("--profile", str(path), "--front", "--degrees", "1,2", "--json").stdout)
    assert not answer["front"]["is_complete"]
    assert len(answer["front"]["points"]) > 2


def test_merged_plans_are_in_the_profiles_own_layers(file):
    answer = json.loads(call("--profile", file, "--merge", "3", "--json").stdout)
    assert (answer["num_layers"], answer["num_layers_planned"]) == (6, 3)
    assert all(row["plan"]["stages"][-1]["end_layer"] == 6 for row in answer["plans"])
    assert "6 layers merged to 3" in call("--profile", file, "--merge", "3").stdout


def test_a_profile_of_one_core_is_scaled_to_a_service(tmp_path):
    path = tmp_path / "one.json"
    path.write_bytes(msgspec.json.encode(profile_of(3, memory_mb=(3008,))))
    answer = json.loads(call("--profile", str(path), "--service", "aws", "--json").stdout)
    assert answer["memory_mb"][-1] == 10240
    assert call("--profile", str(path), "--json").exit_code == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--weights", "1"), "no pair of numbers"),
        (("--weights", "0,0"), "two finite numbers"),
        (("--weights", "nan,1"), "two finite numbers"),
        (("--degrees", "1,x"), "no list of whole numbers"),
        (("--degrees", "99"), "too many for this step"),
        (("--global-batch", "4", "--micro-batches", "4"), "not both"),
        (("--service", "aws"), "already"),
    ],
)
def test_bad_words_get_one_sentence(file, words, said):
    result = call("--profile", file, *words)
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_a_layer_that_fits_no_function_is_named(tmp_path):
    path = tmp_path / "huge.json"
    path.write_bytes(msgspec.json.encode(profile_of(3, parameter_bytes=3 << 30)))
    result = call("--profile", str(path))
    assert result.exit_code == 2
    assert "layer 0 (block0) fits no function" in result.stderr
    assert "the largest has 2048 MB" in result.stderr


def test_files_that_are_no_profile_get_one_sentence(tmp_path):
    assert "cannot be read" in call("--profile", str(tmp_path / "none.json")).stderr
    (tmp_path / "bad.json").write_text("hello")
    assert "is no layer profile" in call("--profile", str(tmp_path / "bad.json")).stderr
