"""Objects as the client makes and checks them, before any cluster is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from springtide.client.goals import TrainOptions, auto
from springtide.client.kubernetes import check_object, inference_object, training_object
from springtide.client.serving_goals import ServeOptions
from springtide.client.sources.source import for_pods, read_source
from springtide.core.errors import InvalidRequest


def obj(spec=None, **changes):
    body = {
        "apiVersion": "springtide.dev/v1alpha1",
        "kind": "TrainingFunction",
        "metadata": {"name": "digits"},
        "spec": {"source": {"configMap": "c"}} if spec is None else spec,
    }
    return body | changes


def test_a_good_object_is_let_through():
    assert check_object(obj(), "a.yaml") == obj()
    params = {"source": {"configMap": "c"}, "params": {"whatever": 1}, "stepProfile": {"any": 1}, "speeds": {"1": 2.0}}
    check_object(obj(params), "a.yaml")
    check_object(obj({"source": {"files": {"any.py": "x"}}}), "a.yaml")


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (["x"], "is no object"),
        (obj(kind="Deployment"), "kubectl apply the rest"),
        (obj(apiVersion="springtide.dev/v1"), "has springtide.dev/v1alpha1"),
        (obj(metadata={}), "no metadata.name"),
        (obj(spec="x"), "has no spec"),
        (obj({"deadlin": "1m"}), "did you mean deadline?"),
        (obj({"source": {"configmap": "c"}}), "spec.source has no field 'configmap'; did you mean configMap?"),
        (obj({"container": {"env": [{"nam": "a"}]}}), r"spec.container.env\[0\] has no field 'nam'"),
        (obj({True: "functions"}), "has no field True"),
    ],
)
def test_what_nobody_would_read_is_refused_with_the_mend(body, told):
    with pytest.raises(InvalidRequest, match=told.replace("?", r"\?")):
        check_object(body, "a.yaml")


@pytest.fixture
def source(tmp_path: Path):
    (tmp_path / "model.py").write_text("import layers\nimport torch\n")
    (tmp_path / "layers.py").write_text("from model import x\n")
    (tmp_path / "unused.py").write_text("")
    (tmp_path / "train.py").write_text("import os\nfrom model import Net\ndef fit(ctx): ...\n")
    return read_source(tmp_path / "train.py", "fit")


def test_files_that_are_imported_go_along_and_others_do_not(source):
    sent = for_pods(source)
    assert (sorted(sent.files), sent.import_root, sent.text) == (["layers.py", "model.py"], "", source.text)


def test_a_package_goes_along_with_its_folders(source, tmp_path: Path):
    (tmp_path / "layers.py").unlink()
    (tmp_path / "layers" / "deep").mkdir(parents=True)
    for name in ("__init__.py", "deep/__init__.py", "deep/cells.py"):
        (tmp_path / "layers" / name).write_text("")
    files = training_object(source, TrainOptions(), "x")["spec"]["source"]["files"]
    assert sorted(files) == [
        "layers/__init__.py",
        "layers/deep/__init__.py",
        "layers/deep/cells.py",
        "model.py",
        "train.py",
    ]


def test_what_no_object_could_hold_is_refused_before_it_is_sent(source, tmp_path: Path):
    (tmp_path / "layers.py").write_text(f"TABLE = {'x' * 900_000!r}\n")
    with pytest.raises(
        InvalidRequest, match=r"an object of the cluster takes 900,000; put what is large \(layers.py\)"
    ):
        training_object(source, TrainOptions(), "x")


def test_a_training_function_as_it_was_asked_for(source):
    options = TrainOptions(deadline="10m", budget="$4", workers=auto, epochs=3, name="fit", params={"lr": 0.1})
    made = training_object(source, options, "x", namespace="ml", container={"image": "i"})
    assert made["metadata"]["name"].startswith("fit-")
    assert made["metadata"]["annotations"] == {"springtide.dev/name": "fit"}
    spec = made["spec"]
    assert (spec["workers"], spec["deadline"], spec["budget"], spec["epochs"]) == ("auto", "600s", "$4", 3)
    assert spec["container"] == {"image": "i"}
    assert sorted(spec["source"]["files"]) == ["layers.py", "model.py", "train.py"]
    assert check_object(made, "made") is made
    assert training_object(source, options, "x")["metadata"]["name"] != made["metadata"]["name"]


def test_functions_have_no_pods(source):
    with pytest.raises(InvalidRequest, match="function service"):
        training_object(source, TrainOptions(on="functions"), "x")


def test_an_inference_function_bears_its_own_name(tmp_path: Path):
    (tmp_path / "serve.py").write_text("class Echo: ...\n")
    source = read_source(tmp_path / "serve.py", "Echo", "class")
    made = inference_object(source, ServeOptions(scale=(0, 4), slo="p99 < 200ms"), "echo")
    assert made["metadata"] == {"name": "echo"}
    assert (made["spec"]["scale"], made["spec"]["slo"]) == ("0..4", "200ms")
    assert made["spec"]["source"]["class"] == "Echo"
    assert check_object(made, "made") is made
