"""A run in this process: the same bits as a worker of the platform, into a directory of the caller's choice."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file

from kits.runtime.runtime_plane import artifact_hash, make_job
from springtide.core.errors import InvalidRequest
from springtide.runtime.local.inprocess import run_local


def load_fit(job):
    """The function of the job's source file."""
    spec = importlib.util.spec_from_file_location("local_user_code", job.entrypoint.source_path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.fit


def local_hash(path):
    """What `artifact_hash` says of a model in the job's directory, for any file."""
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(path).items()):
        digest.update(name.encode() + tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_same_bits_as_one_worker_of_the_platform(make_plane, tmp_path, monkeypatch, optimizer):
    # 200 samples in batches of 16 leave a last batch with empty shards; the model drops out, normalises and is noisy.
    plane = make_plane(optimizer=optimizer)
    plane.start_group("a")
    plane.wait_finished()
    monkeypatch.setenv("OPTIMIZER", optimizer)
    lines = []
    result = run_local(load_fit(plane.job), plane.job, tmp_path / "out", lines.append)
    assert local_hash(result.artifact_path) == artifact_hash(plane.work_dir)
    assert result.num_steps == len(plane.steps())
    assert result.loss == plane.steps()[-1]["loss"]
    assert lines[0].startswith("job step 1/26  loss ")
    assert lines[-1].startswith("job step 26/26  loss ")


def test_what_it_writes_to_the_folder_of_results_is_beside_its_model(tmp_path, monkeypatch):
    monkeypatch.setenv("SPRINGTIDE_OUT", "as it was")
    job = make_job(tmp_path, FIT)
    fit = load_fit(job)

    def writing(ctx):
        (Path(os.environ["SPRINGTIDE_OUT"]) / "note.txt").write_text("text")
        fit(ctx)

    run_local(writing, job, tmp_path / "out", lambda line: None)
    assert {"model.safetensors", "note.txt"} <= {path.name for path in (tmp_path / "out").iterdir()}
    assert os.environ["SPRINGTIDE_OUT"] == "as it was"


def test_another_seed_gives_other_bits(tmp_path):
    hashes = set()
    for seed in (1, 2):
        job = make_job(tmp_path, FIT, seed=seed)
        hashes.add(local_hash(run_local(load_fit(job), job, tmp_path / str(seed), lambda line: None).artifact_path))
    assert len(hashes) == 2


FIT = """
import torch

def fit(ctx):
    model, _ = ctx.prepare(torch.nn.Linear(2, 1), lambda p: torch.optim.SGD(p, lr=0.1))
    for batch in ctx.batches(torch.ones(20, 2)):
        ctx.metrics(seen=batch.step)
        ctx.step(model(batch.x).square().mean())
    ctx.save("halfway")
"""


def test_what_is_saved_lands_in_the_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = make_job(tmp_path, FIT)
    result = run_local(load_fit(job), job, write=lambda line: None)
    assert result.artifact_path == str(tmp_path / "springtide-out" / "job" / "model.safetensors")
    assert sorted(path.name for path in (tmp_path / "springtide-out" / "job").iterdir()) == [
        "halfway.safetensors",
        "model.safetensors",
    ]
    assert result.metrics == {"seen": 3.0}


def test_the_number_of_threads_is_given_back(tmp_path):
    before = torch.get_num_threads()
    job = make_job(tmp_path, "def fit(ctx):\n    raise ValueError('no')\n")
    with pytest.raises(ValueError, match="no"):
        run_local(load_fit(job), job, tmp_path, lambda line: None)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("pass", "it has trained nothing"),
        ("ctx.prepare(torch.nn.Linear(1, 1), torch.optim.SGD)\n    list(ctx.batches(torch.ones(0, 1)))", "is empty"),
        ("list(ctx.batches(torch.ones(1, 1)))", "needs a model first"),
    ],
)
def test_wrong_use_is_told_with_its_mend(body, sentence, tmp_path):
    job = make_job(tmp_path, f"import torch\ndef fit(ctx):\n    {body}\n".replace("optim.SGD", "optim.Adam"))
    with pytest.raises(InvalidRequest, match=sentence):
        run_local(load_fit(job), job, tmp_path, lambda line: None)


def test_its_variables_are_set_while_it_trains_and_as_before_afterwards(tmp_path, monkeypatch):
    monkeypatch.setenv("MODE", "before")
    monkeypatch.delenv("HF_HOME", raising=False)
    body = FIT.replace(
        "    model,", '    import os\n    ctx.seen = os.environ["MODE"], os.environ["HF_HOME"]\n    model,'
    )
    job = replace(make_job(tmp_path, body), env={"MODE": "job", "HF_HOME": "/data"})
    seen = []
    fit = load_fit(job)
    run_local(lambda ctx: (fit(ctx), seen.append(ctx.seen)), job, tmp_path, lambda line: None)
    assert seen == [("job", "/data")]
    assert (os.environ["MODE"], "HF_HOME" in os.environ) == ("before", False)
