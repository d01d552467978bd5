"""`springtide deploy`: a language model without a file, and an SLO that cannot be kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kits.cli.fake_client import SERVICE
from springtide.cli.commands.deploy import slo_problem
from springtide.core.status.admission import AdmissionStatus
from springtide.core.status.platform import ServiceStatus


def test_a_model_is_deployed_by_its_path_and_deploy_says_how_to_ask_it(
    client: Any, springtide: Any, make_service: Callable[..., ServiceStatus], tmp_path: Path
) -> None:
    client.add(make_service(name="tiny-model"))
    model = tmp_path / "Tiny_Model"
    model.mkdir()
    result = springtide("deploy", "--llm", str(model), "--name", "tiny-model", "--context", "128", "--scale", "1..2")
    assert result.exit_code == 0, result.output
    ((_, asked),) = client.calls
    assert asked["name"] == "tiny-model"
    assert f"model={str(model)!r}" in asked["source"].text
    assert "context=128" in asked["source"].text
    assert (asked["options"]["concurrency"], asked["options"]["max_replicas"]) == (16, 2)
    assert "/v1/chat/completions" in result.output
    assert "as api_key" in result.output
    assert "folder" not in asked, "no file travels"


def test_the_engine_follows_from_the_name_of_a_file(
    client: Any, springtide: Any, make_service: Callable[..., ServiceStatus], tmp_path: Path
) -> None:
    client.add(make_service(name="story-q8_0"))
    model = tmp_path / "Story-Q8_0.gguf"
    model.touch()
    result = springtide("deploy", "--llm", str(model))
    assert result.exit_code == 0, result.output
    ((_, asked),) = client.calls
    assert (asked["name"], asked["options"]["concurrency"]) == ("story-q8_0", 4)
    assert "engine='llama.cpp'" in asked["source"].text
    refused = springtide("deploy", "--llm", str(model), "--engine", "vllm")
    assert "does not take files in GGUF" in refused.output.replace("\n", " ")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ([], "name one of three: a Python file"),
        (["serve.py", "--llm", "a/b"], "name one of three: a Python file"),
        (["--llm", "./nothing-here"], "there is no model at"),
        (["serve.py", "--context", "128"], "go with --llm"),
    ],
)
def test_what_does_not_fit_together_is_refused(springtide: Any, given: list[str], why: str) -> None:
    result = springtide("deploy", *given)
    assert result.exit_code != 0
    assert why in result.output.replace("\n", " ")


def test_an_slo_below_the_calls_of_the_revision_before_is_said() -> None:
    calls = AdmissionStatus(call_p99_s=0.061)
    told = slo_problem(replace(SERVICE, slo_s=0.02), calls)
    assert "20 ms lies below 61 ms" in told
    assert not slo_problem(replace(SERVICE, slo_s=0.1), calls)
    assert not slo_problem(replace(SERVICE, slo_s=None), calls)
    assert not slo_problem(replace(SERVICE, slo_s=0.02), AdmissionStatus()), "nothing is known yet"
    assert not slo_problem(replace(SERVICE, slo_s=0.02), None)
