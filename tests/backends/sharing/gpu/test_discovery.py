"""GPUs as the driver tells of them: by UUID, with their memory, and only those that CUDA would show."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kits.nvidia_smi import STUB_UUIDS, install_nvidia_smi
from springtide.backends.local.devices import Gpu, discover_gpus, discover_node, gpus_of, split_node
from springtide.backends.sharing.gpu import discovery
from springtide.core.resources import make_node

FIRST, SECOND = STUB_UUIDS[:2]
MEMORY_MB = 16384 * (1 << 20) // 1_000_000


@pytest.fixture(autouse=True)
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return install_nvidia_smi(tmp_path)


def test_gpus_have_a_uuid_and_memory() -> None:
    assert discover_gpus() == (
        Gpu(number=0, uuid=FIRST, memory_mb=MEMORY_MB, name="Stub GPU"),
        Gpu(number=1, uuid=SECOND, memory_mb=MEMORY_MB, name="Stub GPU"),
    )
    node = discover_node()
    assert [(device.device_id, device.kind, device.memory_mb) for device in node.devices] == [
        ("local/0", "gpu", MEMORY_MB),
        ("local/1", "gpu", MEMORY_MB),
    ]
    assert len(discover_node(1).devices) == 1


def test_an_old_driver_lists_and_does_not_know_the_question(smi: Path) -> None:
    smi.write_text(smi.read_text().replace("--query-gpu", "--other"))
    assert [(gpu.uuid, gpu.memory_mb) for gpu in discover_gpus()] == [(FIRST, 0), (SECOND, 0)]
    assert discover_node().devices[0].memory_mb == 0


def test_parts_of_a_divided_gpu_are_devices(smi: Path) -> None:
    part = "MIG-0b2c3d4e-0000-4000-8000-00000000000"
    smi.write_text(
        "#!/bin/sh\ncase $1 in\n-L)\n"
        f"echo 'GPU 0: H200 (UUID: {FIRST})'\n"
        f"echo '  MIG 3g.71gb     Device  0: (UUID: {part}1)'\n"
        f"echo '  MIG 1g.18gb+me  Device  1: (UUID: {part}2)'\n"
        f"echo 'GPU 1: H200 (UUID: {SECOND})' ;;\n"
        f"*) echo '{FIRST}, 143771, Enabled, H200'; echo '{SECOND}, 143771, Disabled, H200' ;;\nesac\n"
    )
    whole_mb = 143771 * (1 << 20) // 1_000_000
    assert [(gpu.visible_as, gpu.memory_mb, gpu.name) for gpu in discover_gpus()] == [
        (f"{part}1", 71_000, "MIG 3g.71gb"),
        (f"{part}2", 18_000, "MIG 1g.18gb+me"),
        (SECOND, whole_mb, "H200"),
    ]


def test_a_list_without_uuids_is_told_by_number(smi: Path) -> None:
    smi.write_text("#!/bin/sh\n[ \"$1\" = -L ] || exit 2\necho 'GPU 0: H200'\necho 'GPU 1: H200 (UUID: GPU-aa)'\n")
    assert discover_gpus() == (Gpu(number=0, uuid="", name="H200"), Gpu(number=1, uuid="GPU-aa", name="H200"))


def test_memory_that_is_not_told_is_not_counted(smi: Path) -> None:
    smi.write_text("#!/bin/sh\necho 'GPU-aa, [N/A], [N/A], NVIDIA GB10'\n")
    assert discover_gpus() == (Gpu(number=0, uuid="GPU-aa", memory_mb=0, name="NVIDIA GB10"),)


@pytest.mark.parametrize(
    ("asked", "numbers"),
    [
        ("", []),
        ("1", [1]),
        ("1,0", [1, 0]),
        (SECOND, [1]),
        (SECOND[:-1] + "2", [1]),
        ("0,7,1", [0]),
        ("-1", []),
        ("0,0", [0]),
        ("GPU-5354", []),
        ("none", []),
    ],
)
def test_what_is_hidden_from_cuda_is_not_offered(
    asked: str, numbers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", asked)
    assert [gpu.number for gpu in discover_gpus()] == numbers


@pytest.mark.parametrize("script", ["exit 9", "sleep 30", "echo nonsense", "printf '\\377\\376\\n'"])
def test_a_driver_that_does_not_answer_has_no_gpus(script: str, smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "_QUERY_TIMEOUT_S", 0.2)
    smi.write_text(f"#!/bin/sh\n{script}\n")
    assert discover_gpus() == ()


def test_a_gpu_is_called_by_its_uuid_where_that_is_known() -> None:
    assert Gpu(number=3, uuid=FIRST).visible_as == FIRST
    assert Gpu(number=3, uuid="").visible_as == "3"


def test_devices_are_gpus_in_the_drivers_order_however_the_machine_is_cut() -> None:
    gpus = discover_gpus()
    nodes = split_node(discover_node(), {"inference": 1})
    assert [device.memory_mb for node in nodes for device in node.devices] == [MEMORY_MB, MEMORY_MB]
    assert {name: gpu.uuid for name, gpu in gpus_of(nodes, gpus).items()} == {"local-0/0": FIRST, "local-1/0": SECOND}
    assert gpus_of([make_node("local", 2)], gpus) == {}
