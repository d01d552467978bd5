"""Layer profiles in a request: whose they are, where they are kept, and who cannot have one."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from springtide.client.functions import job_request
from springtide.client.goals import TrainOptions
from springtide.client.layer_profiles import cache_folder, read_layers, with_layers
from springtide.client.sources.source import read_source
from springtide.core.errors import InvalidRequest
from springtide.core.functions import LayerProfile, ModelProfile
from springtide.core.options.rules import NO_FUNCTIONS
from springtide.runtime.profiling.layer_profiling import LayerProfileFile, write_layer_profile

TEXT = "import springtide as st\nwave = st.Task(model=dict, dataset=list, loss=print, optimizer=print)\n"
LAYER = LayerProfile(
    name="0",
    parameter_bytes=8,
    activation_bytes=8,
    output_bytes=8,
    gradient_bytes=8,
    forward_s=(0.1,),
    backward_s=(0.2,),
)


@pytest.fixture
def source(tmp_path: Path) -> Any:
    path = tmp_path / "wave.py"
    path.write_text(TEXT)
    return read_source(path, "wave")


def write_profile(path: Path, **values: Any) -> Path:
    profile = ModelProfile(model="wave", micro_batch_size=4, memory_mb=(2048,), bytes_per_s=(7e7,), layers=(LAYER,))
    digest = hashlib.sha256(TEXT.encode()).hexdigest()
    settings = {"profile": profile, "num_samples": 90, "num_layers": 1, "source_sha256": digest, "object_name": "wave"}
    write_layer_profile(path, LayerProfileFile(**{**settings, **values}))  # type: ignore[arg-type]
    return path


class Platform:
    """A platform with so many places at a function service. Tests only."""

    def __init__(self, num_places: int) -> None:
        kinds = ["cpu", "cpu", *["function"] * num_places]
        self.devices = tuple(type("Device", (), {"kind": kind}) for kind in kinds)
        self.cluster = None

    def status(self) -> Any:
        return self


def test_a_profile_that_is_given_goes_with_the_request(source: Any, tmp_path: Path) -> None:
    said: list[str] = []
    path = write_profile(tmp_path / "p.json")
    told = with_layers({"seed": 3}, source, "wave", micro_batch=4, profile=path, on_progress=said.append)
    assert (told["seed"], told["num_samples"], said) == (3, 90, [])
    assert told["layer_profile"]["layers"][0]["forward_s"] == (0.1,)
    declared = with_layers({"num_samples": 7}, source, "wave", micro_batch=4, profile=path)
    assert declared["num_samples"] == 7, "what the owner says goes before what was counted"


def test_a_changed_file_is_told_and_another_task_refused(source: Any, tmp_path: Path) -> None:
    said: list[str] = []
    path = write_profile(tmp_path / "p.json", source_sha256="0" * 64)
    with_layers({}, source, "wave", micro_batch=4, profile=path, on_progress=said.append)
    assert "has changed since its layers were profiled" in said[0]
    other = write_profile(tmp_path / "q.json", object_name="tide")
    with pytest.raises(InvalidRequest, match=r"is a profile of 'tide', wave\.py has 'wave'"):
        with_layers({}, source, "wave", micro_batch=4, profile=other)


def test_functions_must_be_there_before_anything_is_measured(source: Any) -> None:
    options = TrainOptions(on="functions")
    with pytest.raises(InvalidRequest) as caught:
        job_request(source, options, "wave", Platform(0))  # type: ignore[arg-type]
    assert str(caught.value) == NO_FUNCTIONS


def test_a_quote_compares_only_where_there_is_something_to_compare(source: Any, tmp_path: Path) -> None:
    path = write_profile(tmp_path / "p.json")
    alone = job_request(source, TrainOptions(), "wave", Platform(0), profile=path, compares=True)  # type: ignore[arg-type]
    assert "layer_profile" not in alone["options"]
    both = job_request(source, TrainOptions(), "wave", Platform(1), profile=path, compares=True)  # type: ignore[arg-type]
    assert both["options"]["layer_profile"]["model"] == "wave"
    assert "on" not in both["options"]
    assert both["options"]["max_workers"] == 2


def test_profiles_are_kept_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "springtide" / "layers"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "springtide" / "layers"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"on": "moon"}, "on must be one of 'cluster', 'functions', 'auto'"),
        ({"on": "functions", "global_batch": (8, 64)}, "one global batch"),
        ({"micro_batch": 0}, "micro_batch must be a whole number"),
        ({"micro_batch": 64}, "more than the global batch of 32"),
    ],
)
def test_what_can_never_run_on_functions_is_refused_where_it_is_written(changes: Any, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        TrainOptions(**changes)


def test_a_task_on_a_stream_names_it_and_has_no_length(source: Any, tmp_path: Path) -> None:
    path = write_profile(tmp_path / "p.json", num_samples=None, stream="clicks")
    told = with_layers({"on": "functions"}, source, "wave", micro_batch=4, profile=path)
    assert told["stream"] == "clicks"
    assert "num_samples" not in told
    compared = with_layers({}, source, "wave", micro_batch=4, profile=path)
    assert "stream" not in compared, "machines train on none: the quote for them says so"


def test_layers_are_those_of_the_jobs_params(source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from springtide.runtime.profiling import layer_profiling

    asked: list[Any] = []
    taken = layer_profiling.read_layer_profile(write_profile(tmp_path / "p.json", params={"width": "8"}))

    def known(*_: Any, **options: Any) -> LayerProfileFile:
        asked.append(options["params"])
        return taken

    monkeypatch.setattr(layer_profiling, "cached_source_layers", known)
    with_layers({"params": {"width": "8"}}, source, "wave", micro_batch=4)
    with_layers({}, source, "wave", micro_batch=4)
    assert asked == [{"width": "8"}, {}]
    said: list[str] = []
    with_layers(
        {"params": {"width": "16"}}, source, "wave", micro_batch=4, profile=tmp_path / "p.json", on_progress=said.append
    )
    assert said == [f"{tmp_path / 'p.json'} was taken with params {{'width': '8'}}, the job has {{'width': '16'}}; "
                    "its layers may be others"]  # fmt: skip
    with_layers(
        {"params": {"width": "8"}}, source, "wave", micro_batch=4, profile=tmp_path / "p.json", on_progress=said.append
    )
    assert len(said) == 1


def test_the_micro_batch_is_never_more_than_the_batch() -> None:
    assert TrainOptions(global_batch=2).micro_batch_size() == 2
    assert TrainOptions(global_batch=64).micro_batch_size() == 4
    assert TrainOptions(global_batch=64, micro_batch=16).micro_batch_size() == 16


def test_layers_for_a_move_are_read_as_requests_send_them(tmp_path: Path) -> None:
    path = write_profile(tmp_path / "wave.layers.json")
    layers = read_layers(path)
    assert layers is not None
    assert (layers["micro_batch_size"], layers["layers"][0]["forward_s"]) == (4, (0.1,))
    assert read_layers(None) is None
    path.write_text("{}")
    with pytest.raises(InvalidRequest, match="is no profile of layers"):
        read_layers(path)
