"""The name of the GPU that a process found, in each way in which device plugins and CUDA tell it."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from springtide.core.wire.workers import MAX_DEVICE_NAME
from springtide.runtime.process.device_seen import VARIABLES, device_seen

UUID = "GPU-8f6a1c2e-0000-1111-2222-333344445555"


def seen(monkeypatch: pytest.MonkeyPatch, cuda: str, nvidia: str, *, uuid: str = "", is_in_use: bool = False) -> str:
    for variable, value in zip(VARIABLES, (cuda, nvidia), strict=True):
        monkeypatch.setenv(variable, value) if value else monkeypatch.delenv(variable, raising=False)
    properties = SimpleNamespace(name="NVIDIA H100", **({"uuid": uuid} if uuid else {}))
    cuda_double = SimpleNamespace(
        is_initialized=lambda: is_in_use,
        current_device=lambda: 0,
        get_device_properties=lambda index: properties,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda_double))  # type: ignore[arg-type]
    return device_seen("gpu")


@pytest.mark.parametrize(
    ("cuda", "nvidia", "known", "name"),
    [
        ("", UUID, {}, UUID),
        ("", "GPU-7a", {"is_in_use": True, "uuid": UUID[4:]}, f"{UUID} (NVIDIA H100)"),
        ("", "MIG-7a", {"is_in_use": True, "uuid": UUID}, "MIG-7a (NVIDIA H100)"),
        # CDI: the variable only keeps the container runtime from doing the same a second time.
        ("", "void", {"is_in_use": True, "uuid": UUID[4:]}, f"{UUID} (NVIDIA H100)"),
        ("", "void", {}, ""),
        ("", "all", {"is_in_use": True}, "NVIDIA H100"),
        ("1", "", {}, "1"),
        ("1", "", {"is_in_use": True, "uuid": UUID[4:]}, f"{UUID} (NVIDIA H100)"),
        ("", "", {}, ""),
        ("", "x" * 300, {}, "x" * MAX_DEVICE_NAME),
    ],
)
def test_the_name_of_a_gpu(monkeypatch, cuda, nvidia, known, name):
    assert seen(monkeypatch, cuda, nvidia, **known) == name


def test_a_plugin_may_list_devices_as_files(monkeypatch, tmp_path):
    (tmp_path / UUID).touch()
    assert seen(monkeypatch, "", str(tmp_path)) == UUID
    assert seen(monkeypatch, "", str(tmp_path / "none")) == ""


@pytest.mark.parametrize(
    ("num_devices", "there", "names"),
    [
        (2, 2, "GPU-aaaaaaaa-0,GPU-aaaaaaaa-1 (NVIDIA H100)"),
        (2, 1, "GPU-aaaaaaaa-0 (NVIDIA H100)"),
        (8, 8, f"{','.join(['GPU-aaaaaaaa'] * 8)} (NVIDIA H100)"),
    ],
)
def test_a_worker_with_several_names_all(monkeypatch, num_devices, there, names):
    tail = "0" * 24 if num_devices == 8 else ""
    cuda_double = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: there,
        get_device_properties=lambda index: SimpleNamespace(name="NVIDIA H100", uuid=f"aaaaaaaa-{index}{tail}"),
    )
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda_double))  # type: ignore[arg-type]
    assert device_seen("gpu", num_devices) == names


def test_a_worker_on_a_cpu_device_names_none(monkeypatch):
    assert seen(monkeypatch, "", UUID) == UUID
    assert device_seen("cpu") == ""
