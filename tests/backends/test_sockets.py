from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from springtide.backends.local import devices
from springtide.backends.sockets import MAX_SOCKET_PATH_BYTES, remove_outside, socket_directory
from springtide.core.errors import BackendError, InvalidRequest
from springtide.core.resources import make_node


def test_sockets_lie_in_the_state_directory_where_the_path_is_short(tmp_path: Path) -> None:
    directory = socket_directory(tmp_path)
    assert directory == tmp_path / "run"
    assert directory.stat().st_mode & 0o777 == 0o700


@pytest.fixture
def short_path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        yield Path(directory)


def test_a_long_state_path_gets_a_short_private_place(
    short_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))
    long = tmp_path / ("x" * 60) / ("y" * 60)
    directory = socket_directory(long)
    assert directory.parent == short_path
    assert str(os.getuid()) in directory.name
    assert len(os.fsencode(directory / "control.sock")) < MAX_SOCKET_PATH_BYTES
    assert directory == socket_directory(long)
    assert directory != socket_directory(long / "z")


def test_a_place_that_is_not_a_directory_of_ours_is_refused(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "run").symlink_to(elsewhere)
    with pytest.raises(BackendError, match="another user"):
        socket_directory(tmp_path)


def test_a_machine_without_gpus_offers_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    node = devices.discover_node(3)
    assert [device.device_id for device in node.devices] == ["local/0", "local/1", "local/2"]
    assert {device.kind for device in node.devices} == {"cpu"}
    assert len(devices.discover_node().devices) == os.cpu_count()


def test_gpus_are_offered_before_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: A 1 (UUID: GPU-1)'\necho 'GPU 1: B (UUID: GPU-2)'\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert [device.kind for device in devices.discover_node().devices] == ["gpu", "gpu"]
    assert [device.accelerator for device in devices.discover_node().devices] == ["A-1", "B"]
    assert len(devices.discover_node(1).devices) == 1
    program.write_text("#!/bin/sh\nexit 9\n")
    assert {device.kind for device in devices.discover_node(2).devices} == {"cpu"}


def test_a_machine_without_a_slot_is_no_machine() -> None:
    with pytest.raises(InvalidRequest, match="at least one slot"):
        devices.discover_node(0)


@pytest.mark.parametrize(
    ("pools", "owners"),
    [
        ({"inference": 2}, "ttii"),
        ({"training": 1}, "tiii"),
        ({"training": 3, "inference": 1}, "ttti"),
        ({"inference": 4}, "iiii"),
        ({"inference": 0}, "tttt"),
    ],
)
def test_a_machine_cut_into_nodes_that_pools_own(pools, owners) -> None:
    nodes = devices.split_node(make_node("local", 4, kind="gpu"), pools)
    assert [node.node_id for node in nodes] == ["local-0", "local-1", "local-2", "local-3"]
    assert [[device.device_id for device in node.devices] for node in nodes] == [
        [f"local-{number}/0"] for number in range(4)
    ]
    assert "".join(node.owner[0] for node in nodes) == owners
    assert not any(node.is_loaned for node in nodes)
    assert all(device.kind == "gpu" and device.node_id == node.node_id for node in nodes for device in node.devices)


@pytest.mark.parametrize("pools", [{"inference": 5}, {"training": 3, "inference": 2}, {"training": 1, "inference": 2}])
def test_pools_that_do_not_fit_the_machine(pools) -> None:
    with pytest.raises(InvalidRequest, match=r"the pools take \d slots and there are 4: ask for 4 together"):
        devices.split_node(make_node("local", 4), pools)


def test_a_directory_outside_goes_with_its_executor_and_one_inside_stays(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    deep = tmp_path / ("d" * 120)
    outside = socket_directory(deep)
    (outside / "lock").write_text("")
    remove_outside(outside, deep)
    assert not outside.exists()
    inside = socket_directory(tmp_path / "s") if len(str(tmp_path)) < 60 else tmp_path / "s" / "run"
    inside.mkdir(parents=True, exist_ok=True)
    remove_outside(inside, tmp_path / "s")
    assert inside.is_dir()
