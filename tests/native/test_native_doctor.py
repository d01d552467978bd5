"""What the doctor says of shares of GPUs: it looks for the driver as programs do, and tells whom it finds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kits.native.native_build import Native
from kits.nvidia_smi import STUB_UUIDS, install_nvidia_smi
from springtide.backends.local.devices import Gpu
from springtide.backends.sharing.gpu import enforcement
from springtide.backends.sharing.gpu.enforcement import Enforcement, choose_enforcement, is_mps_there
from springtide.cli.doctor import shares as doctor_shares
from springtide.cli.doctor.functions import Check
from springtide.cli.doctor.shares import check_gpu_shares, check_shares
from springtide.core.errors import BackendError

# The programs here are Python's: they are not built under sanitizers.
SANITIZED = False
GPUS = [Gpu(number=number, uuid=uuid) for number, uuid in enumerate(STUB_UUIDS[:2])]


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("LD_PRELOAD", "CUDA_VISIBLE_DEVICES", "SPRINGTIDE_SHARE_MECHANISM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "mps"))


def _doctor(library: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    chosen = Enforcement(mechanism="cuda-preload", enforced="held by a test", library=library)
    monkeypatch.setattr(doctor_shares, "choose_enforcement", lambda *asked, **options: chosen)
    (check,) = check_gpu_shares(GPUS)
    assert check.name == "shares"
    return check


@pytest.mark.parametrize("driver", ["stub_dir", "old_stub_dir"])
def test_a_program_finds_the_library_where_it_looks_for_the_driver(
    native: Native, driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(getattr(native, driver)))
    check = _doctor(native.library, monkeypatch)
    assert check.verdict == "ok"
    assert check.text.startswith("cuda-preload on 2 GPUs, known by UUID: ")
    assert f"finds those of {native.library}" in check.text
    assert check.text.endswith("; held by a test")


def test_a_library_that_programs_pass_by_is_told_of(
    native: Native, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from springtide.backends.sharing.gpu.build import LIBRARY_FLAGS, LIBRARY_NAME, build_library

    source = tmp_path / "empty.c"
    source.write_text("int springtide_nothing;\n")
    empty = build_library(tmp_path / LIBRARY_NAME, sources=[source], headers=[], flags=LIBRARY_FLAGS)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(native.stub_dir))
    check = _doctor(empty, monkeypatch)
    assert check.verdict == "warn"
    assert check.text.startswith(
        f"cuda-preload, but a program that looks for the driver's launches finds those of {native.stub_dir}"
    )
    assert check.mend


def test_a_driver_that_is_not_there_is_told_of(native: Native, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    check = _doctor(native.library, monkeypatch)
    assert check.verdict == "warn"
    assert "libcuda.so.1" in check.text


def test_a_machine_with_gpus_is_asked_about_them_and_not_about_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_nvidia_smi(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SPRINGTIDE_SHARE_MECHANISM", "none")
    (check,) = check_shares()
    assert check.verdict == "warn"
    assert check.text.startswith("none: shares of a GPU are planned and counted, not enforced")
    assert check.text.endswith("(the setting asks for none)")
    assert check.mend


def _mps(folder: Path, pid: int) -> dict[str, str]:
    folder.mkdir()
    (folder / "nvidia-cuda-mps-control.pid").write_text(f"{pid}\n")
    return {"CUDA_MPS_PIPE_DIRECTORY": str(folder)}


def test_mps_is_there_while_its_daemon_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_mps_there({"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "none")})
    assert not is_mps_there(_mps(tmp_path / "dead", 2**22 - 1))
    assert not is_mps_there(_mps(tmp_path / "other", os.getpid())), "the number is another program's by now"
    # The kernel keeps fifteen letters of a program's name.
    name = Path(f"/proc/{os.getpid()}/comm")
    before = name.read_text()
    name.write_text("nvidia-cuda-mps-control")
    try:
        assert is_mps_there(_mps(tmp_path / "alive", os.getpid()))
        hidden = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "hidden")}
        (tmp_path / "hidden").mkdir()
        assert not is_mps_there(hidden)
        (tmp_path / "hidden" / "control").touch()
        assert is_mps_there(hidden)
    finally:
        name.write_text(before.strip())


def test_what_mps_does_is_told_beside_the_library_and_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*, builds: bool = True) -> Path:
        raise BackendError("there is no C compiler")

    monkeypatch.setattr(enforcement, "is_mps_there", lambda environment: True)
    monkeypatch.setattr(enforcement, "find_library", lambda *, builds=True: Path("/x.so"))
    beside = choose_enforcement({})
    assert (beside.mechanism, beside.library) == ("cuda-preload", Path("/x.so"))
    assert "an MPS daemon runs here as well" in beside.enforced
    monkeypatch.setattr(enforcement, "find_library", missing)
    without = choose_enforcement({})
    assert (without.mechanism, without.library) == ("mps", None)
    assert "not enforced by this platform" in without.enforced
    assert without.enforced.endswith("(there is no C compiler)")
    assert choose_enforcement({}, "mps").reason == "the setting asks for mps"
