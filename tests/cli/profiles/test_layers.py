"""`springtide profile FILE --layers`: the table, the file it writes, and what has no layers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from springtide.cli.profiles.layers import layers_text
from springtide.core.functions import MIB, LayerProfile, ModelProfile
from springtide.runtime.profiling import layer_profiling
from springtide.runtime.profiling.layer_profiling import LayerProfileFile, read_layer_profile

Run = Callable[..., Result]
TASK = """
import springtide as st

task = st.Task(model=lambda: None, dataset=(), loss=lambda x, y: x, optimizer=lambda p: None, name="job")
"""
FUNCTION = "import springtide as st\n\n@st.train\ndef fit(ctx):\n    ...\n"


def make_file(num_layers: int = 2) -> LayerProfileFile:
    layers = tuple(
        LayerProfile(
            name=f"blocks.{index}",
            parameter_bytes=3 * MIB,
            activation_bytes=512,
            output_bytes=2048,
            gradient_bytes=0,
            forward_s=(0.001 * (index + 1),),
            backward_s=(0.004,),
        )
        for index in range(num_layers)
    )
    profile = ModelProfile(
        model="job",
        micro_batch_size=4,
        memory_mb=(1024,),
        bytes_per_s=(1.0,),
        layers=layers,
        slowdown=1.25,
        source="measured",
    )
    return LayerProfileFile(
        profile=profile, num_samples=64, num_layers=num_layers, source_sha256="0", object_name="task"
    )


def test_a_table_has_a_line_for_each_layer_and_one_for_all() -> None:
    text = layers_text(make_file())
    lines = text.splitlines()
    assert lines[0] == "job: 2 layers, micro-batches of 4, 64 samples; measured"
    assert lines[3].split() == ["0", "blocks.0", "1", "ms", "4", "ms", "3", "MB", "512", "B", "2", "KB", "0", "B"]
    assert lines[5].split() == ["all", "3", "ms", "8", "ms", "6", "MB", "1", "KB"]
    assert lines[-1].endswith("300 MB beside them; computation takes 1.25 times as long beside communication")


def test_of_many_layers_the_longest_are_shown() -> None:
    text = layers_text(make_file(100))
    assert "the 40 longest of 100 layers" in text
    assert " blocks.99 " in text
    assert " blocks.59 " not in text


def test_the_file_and_the_next_commands_are_told(
    springtide: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {}

    def measure(entrypoint: object, **options: object) -> LayerProfileFile:
        asked.update(options, object_name=entrypoint.object_name)  # type: ignore[attr-defined]
        return make_file()

    monkeypatch.setattr(layer_profiling, "profile_source_layers", measure)
    path, out = tmp_path / "job.py", tmp_path / "p.json"
    path.write_text(TASK)
    result = springtide("profile", str(path), "--layers", "--micro-batch", "8", "--seed", "3", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert (asked["object_name"], asked["micro_batch_size"], asked["seed"], asked["name"]) == ("task", 8, 3, "job")
    assert read_layer_profile(out) == make_file()
    assert "springtide plan-pipeline --profile" in result.output
    result = springtide("profile", str(path), "--layers", "--out", str(out), "--json")
    assert json.loads(result.stdout)["num_layers"] == 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["job.py", "--layers", "--iterations", "3"], "--iterations says nothing about layers"),
        (["job.py", "--layers", "--param", "a=b"], "--param says nothing about layers"),
        (["job.py", "--micro-batch", "3"], "add --layers"),
        (["fit.py", "--layers"], "fit.py has a training function: only the model of a declared st.Task"),
        (["plain.py", "--layers"], "plain.py has no task: only the model"),
        (["job.py", "--layers", "--out", "nowhere/p.json"], "there is no folder nowhere"),
    ],
)
def test_what_has_no_layers_is_refused(
    springtide: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("job", TASK), ("fit", FUNCTION), ("plain", "print(1)\n")):
        (tmp_path / f"{name}.py").write_text(text)
    result = springtide("profile", *arguments)
    assert result.exit_code != 0
    assert sentence in " ".join(result.output.split())
