"""The image's recipe and sizes; and, in the slow lane, its file list run without anything else of this installation."""

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from kits.functions.emulated_service import Caller, small_service
from springtide.backends.functions.emulator.config import DEFAULT_HANDLER, EmulatorConfig
from springtide.backends.functions.emulator.launch import ensure_emulator, stop_emulator
from springtide.backends.functions.image import (
    LAMBDA_ROOTS,
    MARKER,
    closure,
    copy_source,
    dockerfile,
    size_report,
    write_package,
)
from springtide.backends.functions.providers.aws import emulator_provider
from springtide.core.errors import InvalidRequest


@pytest.fixture(scope="module")
def report():
    return size_report()


@pytest.mark.slow
def test_what_is_required_comes_along_and_the_platform_stays_at_home(report):
    names = {package.name for package in report.packages}
    assert {"torch", "numpy", "awslambdaric", "obstore", "springtide", "typing-extensions"} <= names
    assert not names & {"boto3", "botocore", "fastapi", "uvicorn", "pytest", "moto", "scipy"}


def test_sizes_are_those_of_the_files(report):
    measured = next(package for package in report.packages if package.name == "msgspec")
    files = [Path(str(metadata.distribution("msgspec").locate_file(file))) for file in metadata.files("msgspec")]
    files = [path for path in files if path.suffix != ".pyc"]
    assert measured.num_bytes == sum(path.stat().st_size for path in files)
    assert report.total_bytes == sum(package.num_bytes for package in report.packages)


def test_torch_fits_an_image_and_no_zip_file(report):
    assert report.fits_image
    assert not report.fits_zip
    assert report.total_bytes > 250 << 20


def test_an_image_that_cannot_load_torch_is_told(report):
    torch = next(package for package in report.packages if package.name == "torch")
    if torch.glibc > (2, 26):
        assert any("cannot load torch" in note for note in report.notes)
        assert "public.ecr.aws/lambda/python:3.11" not in dockerfile("lambda")


@pytest.mark.slow
def test_the_build_context_is_complete_and_can_be_written_again(tmp_path):
    out = tmp_path / "image"
    write_package(out)
    pinned_before = (out / "requirements.txt").read_text()
    (out / "springtide" / "left_over.py").write_text("x = 1\n")
    write_package(out)
    assert (out / "requirements.txt").read_text() == pinned_before
    assert not (out / "springtide" / "left_over.py").exists()
    assert (out / "springtide" / "runtime" / "function_handler.py").is_file()
    assert not (out / "springtide" / "service" / "pages").exists()
    pinned = (out / "requirements.txt").read_text().splitlines()
    assert f"msgspec=={metadata.version('msgspec')}" in pinned
    assert f"torch=={metadata.version('torch').partition('+')[0]}+cpu" in pinned
    assert not any(line.startswith("springtide") for line in pinned)
    recipe = (out / "Dockerfile").read_text()
    assert '"-m", "awslambdaric"' in recipe
    assert DEFAULT_HANDLER in recipe


@pytest.mark.slow
def test_function_computes_image_serves_http_and_needs_no_lambda_runtime(tmp_path):
    report = write_package(tmp_path / "image", "alibaba")
    assert "awslambdaric" not in {package.name for package in report.packages}
    assert "container_server" in (tmp_path / "image" / "Dockerfile").read_text()


def test_a_directory_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("all of it")
    with pytest.raises(InvalidRequest, match="something else"):
        write_package(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(InvalidRequest, match="is a file"):
        write_package(tmp_path / "thesis.tex")
    assert not (tmp_path / MARKER).exists()


def test_what_is_not_installed_is_named_with_its_mend():
    with pytest.raises(InvalidRequest, match=r"no-such-package.*pip install"):
        closure(["no-such-package"])


@pytest.mark.slow
def test_the_images_files_alone_run_the_handler(tmp_path):
    """No container engine: the same files in a folder, run by an interpreter that sees nothing else of this one."""
    task = tmp_path / "task"
    for name in closure(LAMBDA_ROOTS):
        distribution = metadata.distribution(name)
        for file in distribution.files or ():
            path = Path(str(distribution.locate_file(file)))
            if ".." not in file.parts and path.suffix != ".pyc" and path.is_file():
                target = task / file
                target.parent.mkdir(parents=True, exist_ok=True)
                try:
                    os.link(path, target)
                except OSError:
                    shutil.copyfile(path, target)
    copy_source(task / "springtide")
    bare = str(Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}")
    worker = "springtide.runtime.functions.pipeline.worker"
    imports = f"import torch, numpy, obstore, redis, safetensors.torch, springtide as st, {worker}"
    code = f"{imports}; print(st.Task, springtide.__file__)"
    code = code.replace("springtide as st", "springtide, springtide as st")
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(task), "PYTHONNOUSERSITE": "1"}
    told = subprocess.run([bare, "-c", code], env=environment, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    assert str(task) in told.stdout

    service = small_service(memory_mb=(1769,), lifetime_s=60)
    config = EmulatorConfig(service=service, python=bare, python_path=(str(task),), cpu_fraction=2.0)
    address = ensure_emulator(tmp_path / "emulator", config)
    provider = emulator_provider(address, service)
    try:
        provider.deploy([1769])
        order = {
            "order": "train",
            "job_id": "job-1",
            "store_url": f"file://{tmp_path}/store",
            "prefix": "jobs/job-1",
            "generation": 1,
            "attempt": 1,
            "stage": 0,
            "replica": 0,
            "incarnation": 1,
        }
        end = Caller(provider).call(order, 1769)
        # There is no such job: the handler itself says so, out of the store that it opened.
        assert end.outcome == "returned", end
        assert b'"outcome":"failed"' in end.payload.replace(b" ", b"")
        assert Caller(provider).call({"order": "nothing"}, 1769).error.startswith("InvalidRequest")
    finally:
        provider.close()
        stop_emulator(tmp_path / "emulator")
