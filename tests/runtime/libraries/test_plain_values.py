"""What a program keeps in objects of its own goes from one run of it to another."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from springtide.runtime.libraries.plain_values import ChangedValues, values_in

CLASSES = """
import torch

class Meter:
    def __init__(self):
        self.total, self.seen, self.training, self._hidden = 0.0, [], "yes", 0

class Shadow:
    def __init__(self):
        self.weights, self.last = {"a.b": torch.zeros(3)}, None

class Engine:
    def __init__(self):
        self.meter, self.state, self.unknown = Meter(), {"step": 0, "thing": object()}, object()
        self.itself, self.meters = self, [Meter(), object()]

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.calls, self._of_library = 0, 0
        self.layer = torch.nn.Linear(2, 1)
"""


@pytest.fixture
def classes(tmp_path, monkeypatch):
    """The classes as of a program's own file."""
    path = tmp_path / "classes_of_a_program.py"
    path.write_text(CLASSES, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return importlib.import_module(path.stem)


def test_attributes_of_the_programs_own_objects_move(classes):
    def make():
        return {"engine": classes.Engine(), "free": SimpleNamespace(best=1.0), "other": object()}

    def work(roots):
        engine = roots["engine"]
        engine.meter.total, engine.meter._hidden, engine.state["step"] = 2.5, 4, 7
        engine.meter.seen.append(1)
        engine.meters[0].total = 9.0
        roots["free"].best = 0.5

    first, second = make(), make()
    changed, taken = ChangedValues(first), ChangedValues(second)
    work(first)
    found = changed.read(first)
    held = second["engine"].meter.seen
    # Only here: it goes back.
    second["engine"].meter.training = "no"
    taken.write(second, found)
    assert values_in(second).plain == values_in(first).plain
    assert held == [1]
    assert second["engine"].meter.training == "yes"
    assert "engine/meter/training" not in found["values"]


def test_objects_with_a_state_and_tensors_that_gather_move_once_they_have_changed(classes, capsys):
    def make():
        torch.manual_seed(0)
        model = classes.Model()
        return {"model": model, "average": AveragedModel(model), "shadow": classes.Shadow(), "batch": torch.zeros(4)}

    first, second = make(), make()
    changed, taken = (ChangedValues(roots, [id(roots["model"])]) for roots in (first, second))
    assert changed.read(first) == {"values": {}, "states": {}, "tensors": {}}
    with torch.no_grad():
        first["model"].layer.weight.add_(1.0)
    first["average"].update_parameters(first["model"])
    first["shadow"].weights["a.b"].add_(2.0)
    # What was not there before is of the present batch, and what is trained moves by itself.
    first["shadow"].last = torch.ones(5)
    first["model"].calls, first["model"]._of_library = 3, 3
    found = changed.read(first)
    assert (found["states"].keys(), found["tensors"].keys()) == ({"average"}, {"shadow/weights"})
    taken.write(second, found)
    assert torch.equal(second["average"].module.layer.weight, first["average"].module.layer.weight)
    assert second["average"].n_averaged == 1
    assert second["shadow"].weights["a.b"].tolist() == [2.0, 2.0, 2.0]
    assert second["shadow"].weights["a.b"].data_ptr() != first["shadow"].weights["a.b"].data_ptr()
    assert (second["shadow"].last, second["model"].calls, second["model"]._of_library) == (None, 3, 0)
    assert not torch.equal(second["model"].layer.weight, first["model"].layer.weight)
    taken.write(second, {"values": {}, "states": {"average": {"other": 1}}, "tensors": {}})
    assert "springtide: what average has gathered did not move to this worker" in capsys.readouterr().err


def test_tensors_that_were_made_late_are_made_here_too(classes, capsys):
    first, second = {"shadow": classes.Shadow()}, {"shadow": classes.Shadow()}
    changed, taken = ChangedValues(first), ChangedValues(second)
    first["shadow"].late = {"a": torch.ones(3), "b": torch.zeros(2)}
    first["shadow"].kept = [torch.ones(2)]
    second["shadow"].late = second["shadow"].kept = None
    taken.write(second, changed.read(first))
    assert second["shadow"].late["a"].tolist() == [1.0, 1.0, 1.0]
    assert second["shadow"].kept[0].tolist() == [1.0, 1.0]
    first["shadow"].late["a"].add_(1.0)
    assert second["shadow"].late["a"].tolist() == [1.0, 1.0, 1.0]
    first["shadow"].average = AveragedModel(torch.nn.Linear(2, 1))
    taken.write(second, changed.read(first))
    assert "what shadow.average has gathered did not move to this worker" in capsys.readouterr().err
