"""Checkpoints: complete or invisible, verified before they are loaded, fenced."""

from __future__ import annotations

import json
import struct
from functools import partial

import pytest
import torch
from torch import nn

from springtide.core.errors import CheckpointError, Fenced, StorageError
from springtide.runtime.elastic import checkpoint
from springtide.runtime.elastic.checkpoint import (
    CheckpointWriter,
    StateSnapshot,
    list_checkpoints,
    load_checkpoint,
    load_newest,
    write_checkpoint,
)
from springtide.runtime.elastic.training_cursor import Cursor
from springtide.runtime.models.named_tensors import TrainingState
from springtide.storage.fence import Fence

CPU = torch.device("cpu")


def make_state(make_optimizer=torch.optim.AdamW, *, seed=0, width=4, num_steps=3):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(width, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    optimizer = make_optimizer(model.parameters(), lr=0.01)
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.randn(6, width)).square().mean().backward()
        optimizer.step()
    return TrainingState(model, optimizer, CPU)


def write(directory, state, *, step=3, generation=1):
    snapshot = StateSnapshot()
    snapshot.take(state, Cursor(step=step, num_seen=16 * step, global_batch_size=16), 0)
    return write_checkpoint(directory, snapshot, generation)


def contents(state):
    packed, model, optimizer = state.pack_all()
    return packed, {**model, **optimizer}


def assert_same(left, right):
    packed, tensors = contents(left)
    other_packed, other_tensors = contents(right)
    assert packed == other_packed
    assert tensors.keys() == other_tensors.keys()
    assert all(torch.equal(tensor, other_tensors[name]) for name, tensor in tensors.items())


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
def test_a_checkpoint_brings_back_every_bit(tmp_path, optimizer):
    state = make_state(optimizer)
    state.optimizers[0].param_groups[0]["lr"] = 0.123
    write(tmp_path, state)
    other = make_state(optimizer, seed=1, num_steps=0)
    assert load_newest(tmp_path, other) == Cursor(step=3, num_seen=48, global_batch_size=16)
    assert_same(state, other)


def test_no_checkpoint_at_all_is_none(tmp_path):
    assert load_newest(tmp_path, make_state()) is None


def test_the_newest_two_are_kept(tmp_path):
    state = make_state()
    for step in range(1, 5):
        write(tmp_path, state, step=step)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["00000001-0000000004", "00000001-0000000003"]


def test_a_writer_of_the_past_is_refused_and_leaves_nothing(tmp_path):
    Fence(tmp_path).raise_to(5)
    with pytest.raises(Fenced):
        write(tmp_path, make_state(), generation=4)
    assert list(tmp_path.glob("checkpoints/*")) == []
    assert list(tmp_path.glob("checkpoints/.*")) == []


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "remove"])
def test_a_damaged_checkpoint_is_never_loaded_and_the_older_one_is(tmp_path, name, damage):
    older, newer = make_state(), make_state(seed=1)
    write(tmp_path, older, step=3)
    path = tmp_path / "checkpoints" / "00000001-0000000009" / name
    write(tmp_path, newer, step=9)
    data = bytearray(path.read_bytes())
    if damage == "flip":
        # The manifest's first byte makes it no JSON; elsewhere a single bit of a weight is enough.
        at = 0 if name == "manifest.json" else len(data) - 3
        data[at] ^= 0x10
        path.write_bytes(data)
    elif damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
    live = make_state(seed=2)
    assert load_newest(tmp_path, live).step == 3
    assert_same(older, live)


def test_where_all_are_damaged_it_is_an_error_and_the_model_untouched(tmp_path):
    write(tmp_path, make_state())
    path = tmp_path / "checkpoints" / "00000001-0000000003" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    live, same = make_state(seed=2), make_state(seed=2)
    with pytest.raises(CheckpointError, match="does not match its manifest"):
        load_newest(tmp_path, live)
    assert_same(live, same)


def test_a_checkpoint_of_another_model_names_the_difference(tmp_path):
    write(tmp_path, make_state())
    with pytest.raises(CheckpointError, match=r"0\.weight"):
        load_newest(tmp_path, make_state(width=3))


def test_a_header_with_a_name_twice_or_too_long_is_refused(tmp_path):
    state = make_state()
    checkpoint = write(tmp_path, state)
    file = tmp_path / "checkpoints" / "00000001-0000000003" / "model.safetensors"
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = data[8 : 8 + length].rstrip()
    twice = header[:-1] + b',"0.bias":' + json.dumps(json.loads(header)["0.bias"]).encode() + b"}"
    for forged in (twice, header + b" " * (1 << 20)):
        forge(file, struct.pack("<Q", len(forged)) + forged + data[8 + length :])
        with pytest.raises(CheckpointError, match=r"twice|header of"):
            load_checkpoint(file.parent, state)
    assert checkpoint.num_bytes > 0


def forge(file, data):
    """Replace a file and make the manifest agree, as an attacker would."""
    import hashlib

    file.write_bytes(data)
    path = file.parent / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"][file.name] |= {"sha256": hashlib.sha256(data).hexdigest(), "num_bytes": len(data)}
    path.write_text(json.dumps(manifest))


def test_a_failed_write_keeps_the_old_checkpoint_and_training_going(tmp_path, monkeypatch, capsys):
    written, state = [], make_state()
    writer = CheckpointWriter(partial(write_checkpoint, tmp_path), written.append, pytest.fail)
    writer.write_now(state, Cursor(step=3), 0, 1)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("springtide.runtime.elastic.checkpoint.save_file", full)
    writer.write_in_background(state, Cursor(step=4), 0, 1)
    writer.wait()
    assert "No space left" in capsys.readouterr().err
    with pytest.raises(StorageError):
        writer.write_now(state, Cursor(step=5), 0, 1)
    assert [checkpoint.step for checkpoint in written] == [3]
    assert load_newest(tmp_path, state).step == 3


def test_leftovers_of_a_killed_writer_are_removed(tmp_path):
    leftover = tmp_path / "checkpoints" / ".staging-00000001-0000000001.4194999.tmp"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"torn")
    write(tmp_path, make_state())
    assert not leftover.exists()


def scheduled_state(*, is_scheduled=True):
    state = make_state()
    scheduler = torch.optim.lr_scheduler.StepLR(state.optimizers[0], 2)
    average = torch.optim.swa_utils.AveragedModel(state.model)
    objects = [scheduler, average] if is_scheduled else []
    return TrainingState(state.model, state.optimizers[0], CPU, objects), scheduler, average


def test_prepared_objects_come_back(tmp_path):
    state, scheduler, average = scheduled_state()
    for _ in range(3):
        state.optimizers[0].step()
        scheduler.step()
        average.update_parameters(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)))
    write(tmp_path, state)
    other, other_scheduler, other_average = scheduled_state()
    load_newest(tmp_path, other)
    assert_same(state, other)
    assert other_scheduler.last_epoch == 3
    assert int(other_average.n_averaged) == 3


def test_objects_that_an_earlier_checkpoint_lacks_stay_fresh(tmp_path, capsys):
    state, *_ = scheduled_state(is_scheduled=False)
    written = write(tmp_path, state)
    path = tmp_path / "checkpoints" / written.path.rpartition("/")[2] / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["values"]["objects"]
    path.write_text(json.dumps(manifest))
    other, scheduler, _ = scheduled_state()
    assert load_newest(tmp_path, other) is not None
    assert scheduler.last_epoch == 0
    assert "StepLR, object 0 keeps its fresh state" in capsys.readouterr().err


def test_objects_that_are_not_prepared_any_more_are_left_out(tmp_path, capsys):
    state, *_ = scheduled_state()
    write(tmp_path, state)
    other, *_ = scheduled_state(is_scheduled=False)
    assert load_newest(tmp_path, other) is not None
    assert "AveragedModel, object 1 is not prepared" in capsys.readouterr().err


def test_plain_values_that_could_not_be_read_are_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_MAX_MANIFEST_BYTES", 10_000)
    state, *_ = scheduled_state()
    write(tmp_path, state)
    many = make_state()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(many.optimizers[0], list(range(2000)))
    with pytest.raises(StorageError, match="return tensors for long lists"):
        write(tmp_path, TrainingState(many.model, many.optimizers, CPU, [scheduler]), step=4)
    assert len(list_checkpoints(tmp_path)) == 1


class Fussy:
    """An object that takes no state."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        raise ValueError("not mine")


def test_an_object_that_refuses_its_state_is_named(tmp_path):
    state = make_state()
    state = TrainingState(state.model, state.optimizers[0], CPU, [Fussy()])
    write(tmp_path, state)
    with pytest.raises(CheckpointError, match=r"cannot be restored: Fussy.load_state_dict\(\) refuses .*not mine"):
        load_newest(tmp_path, state)


def test_a_checkpoint_is_due_after_an_interval(tmp_path):
    written, state = [], make_state()
    writer = CheckpointWriter(partial(write_checkpoint, tmp_path), written.append, pytest.fail, interval_s=3600.0)
    writer.write_if_due(state, Cursor(step=3), 0, 1)
    writer.wait()
    assert not written
    writer = CheckpointWriter(partial(write_checkpoint, tmp_path), written.append, pytest.fail, interval_s=0.0)
    writer.write_if_due(state, Cursor(step=4), 0, 1)
    writer.wait()
    assert [checkpoint.step for checkpoint in written] == [4]
