"""The examples: they import, their shapes fit, and a few local steps lower the loss."""

from __future__ import annotations

import ast
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kits.examples.local_context import EXAMPLES, LocalContext, fell, load, torch

MAX_LINES = 100
# It plays every part of the platform one after the other and says what it does.
THE_DEMONSTRATION = "demo.py"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(num_threads)


def test_digits_learns_and_reports_its_accuracy(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    pytest.importorskip("sklearn")
    digits = load("digits", monkeypatch)
    context = LocalContext(max_steps=60)
    digits.digits(context)
    assert fell(context.losses)
    assert context.reported["accuracy"] > 0.3, "ten classes: chance is 0.1"
    assert context.saved == ["model"]
    assert "never seen" in capsys.readouterr().out
    assert digits.digits.name == "digits", "serve_digits.py looks for the job by this name"


def test_serve_digits_reads_what_digits_saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    import springtide

    digits = load("digits", monkeypatch)
    net = digits.Net()
    path = tmp_path / "model.safetensors"
    save_file(net.state_dict(), path)
    serve_digits = load("serve_digits", monkeypatch)
    monkeypatch.setitem(vars(springtide), "model_path", {"digits": str(path)}.__getitem__)
    reader = serve_digits.DigitReader.local()
    images = torch.rand(3, 64)
    assert reader.predict(images.tolist()) == net(images).argmax(dim=1).tolist()


def test_growing_batch_learns_and_lets_the_platform_choose_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    growing_batch = load("growing_batch", monkeypatch)
    context = LocalContext(max_steps=200)
    growing_batch.growing(context)
    assert fell(context.losses)
    batch = growing_batch.growing.options.batch_bounds()
    assert (batch.min_size, batch.max_size, batch.max_local_size, batch.learning_rate) == (32, 1024, 128, "adascale")


def test_tide_learns_its_wave_and_reads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tide = load("tide", monkeypatch)
    context = LocalContext(max_steps=200, shard_s="0")
    tide.wave(context)
    assert fell(context.losses)
    assert tide.Reader.local().predict(["the tide goes out", "it comes"]) == [4, 2]
    wanted = tide.Reader.options.as_request()
    assert (wanted["min_replicas"], wanted["max_replicas"], wanted["target_in_flight"]) == (1, 3, 2)


def test_gpt_has_real_text_and_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    gpt = load("gpt", monkeypatch)
    x, y = gpt.load_windows(20_000)
    assert x.shape == y.shape == (312, gpt.CONTEXT_BYTES)
    assert torch.equal(x[0, 1:], y[0, :-1]), "the target is the text one byte later"
    scores = gpt.Gpt(width=32, num_blocks=1)(x[:2])
    assert scores.shape == (2, gpt.CONTEXT_BYTES, 256)
    context = LocalContext(max_steps=24, width="32", blocks="1")
    gpt.gpt(context)
    assert fell(context.losses)


def test_gpt_never_looks_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    gpt = load("gpt", monkeypatch)
    model = gpt.Gpt(width=32, num_blocks=2).eval()
    text = torch.randint(256, (1, 16))
    changed = text.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    before, after = model(text), model(changed)
    assert torch.allclose(before[:, :10], after[:, :10], atol=1e-6)
    assert not torch.allclose(before[:, 10:], after[:, 10:], atol=1e-6)


def test_declared_task_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = load("declared", monkeypatch)
    context = LocalContext(max_steps=60)
    declared.wave.function(context)
    assert fell(context.losses)
    assert declared.wave.source().object_name == "wave"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_layers"), [("functions_gpt", 11), ("functions_digits", 10)])
def test_jobs_for_functions_are_lists_of_layers_and_learn(
    name: str, num_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from springtide.runtime.models.layers import layers_of

    pytest.importorskip("sklearn")
    module = load(name, monkeypatch)
    task = getattr(module, name)
    assert len(layers_of(module.make_model())) == num_layers
    assert task.options.override({"on": "functions"}).micro_batch_size() == 4
    context = LocalContext(max_steps=40 if name == "functions_digits" else 20)
    task.function(context)
    assert fell(context.losses)


def test_the_gpt_for_functions_never_looks_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("functions_gpt", monkeypatch)
    model, text = module.make_model().eval(), torch.randint(256, (1, 16))
    changed = text.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    before, after = model(text), model(changed)
    assert torch.allclose(before[:, :10], after[:, :10], atol=1e-6)
    assert not torch.allclose(before[:, 10:], after[:, 10:], atol=1e-6)


def test_torchrun_loop_knows_nothing_of_springtide() -> None:
    tree = ast.parse((EXAMPLES / "torchrun_loop.py").read_text())
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not [module for module in modules if module.startswith("springtide")]


@pytest.mark.slow
def test_torchrun_loop_runs_under_torchruns_variables() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    members = []
    for rank in ("0", "1"):
        group = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, str(EXAMPLES / "torchrun_loop.py"), "--epochs", "3"]
        environment = os.environ | group | {"OMP_NUM_THREADS": "1"}
        members.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [member.communicate(timeout=100)[0] for member in members]
    assert [member.returncode for member in members] == [0, 0]
    losses = [float(line.split("loss ")[1].split()[0]) for line in outputs[0].splitlines()]
    assert len(losses) == 3
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_examples_are_short_and_annotated(path: Path) -> None:
    text = path.read_text()
    assert path.name == THE_DEMONSTRATION or len(text.splitlines()) <= MAX_LINES
    tree = ast.parse(text)
    assert ast.get_docstring(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            assert node.returns is not None, f"{path.name}: {node.name} does not say what it returns"


def test_own_policy_is_played_to_the_end(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    load("own_policy", monkeypatch).main()
    rows = capsys.readouterr().out.splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["ShortestFirst", "Elastic", "Fifo"]
    assert all(row.split()[1] == "60" for row in rows), "every job has ended"
