"""What goes into a function's image: its recipe, the pinned packages, and how large they are against the limits.

Nothing is built here: the recipe is for any container engine. Sizes are of the files that this installation holds.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Literal

import msgspec

import springtide
from springtide.core.errors import InvalidRequest

Platform = Literal["lambda", "alibaba"]
# Distributions that the handler imports, at once or later; their requirements are added.
ROOTS = ("torch", "numpy", "msgspec", "obstore", "redis", "safetensors")
LAMBDA_ROOTS = (*ROOTS, "awslambdaric")
# Taken along where it is installed: with it a function reads from Redis with a tenth of the CPU.
_WELCOME = ("hiredis",)
# Torch's wheels need a newer C library than Lambda's own image for Python 3.11 has (Amazon Linux 2: 2.26).
LAMBDA_IMAGE_GLIBC = (2, 26)
BASE_IMAGE = "python:3.11-slim-bookworm"
BASE_IMAGE_GLIBC = (2, 36)
MIB = 1 << 20
MAX_IMAGE_BYTES = 10 * 1024 * MIB
MAX_ZIP_BYTES = 250 * MIB
MARKER = ".springtide-package"
# Dependencies that only the command line, the service and its pages have are not packaged.
_NOT_IN_FUNCTIONS = ("service/pages", "cli/samples")
_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
_INSTALL = "pip install 'springtide[runtime,functions]'"
_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)")
_GLIBC_TAG = re.compile(r"manylinux_(\d+)_(\d+)_")
_OLD_TAGS = (("manylinux2014", (2, 17)), ("manylinux2010", (2, 12)), ("manylinux1", (2, 5)))


class PackageSize(msgspec.Struct, frozen=True, kw_only=True):
    """One package of the image. `glibc` is the oldest C library that its wheel loads with (empty: any)."""

    name: str
    version: str
    num_files: int
    num_bytes: int
    glibc: tuple[int, ...] = ()


class SizeReport(msgspec.Struct, frozen=True, kw_only=True):
    """The packages of an image, largest first, without its base image. `glibc` is the oldest version they accept."""

    platform: Platform
    packages: tuple[PackageSize, ...]
    total_bytes: int
    glibc: tuple[int, ...]
    fits_image: bool
    fits_zip: bool
    notes: tuple[str, ...] = ()


def size_report(platform: Platform = "lambda") -> SizeReport:
    """Measure the installed files. Raises InvalidRequest if a package that functions need is not installed."""
    packages = [_measured(name) for name in closure((*roots_of(platform), *filter(_is_installed, _WELCOME)))]
    packages.append(_own_size())
    packages.sort(key=lambda one: (-one.num_bytes, one.name))
    total_bytes = sum(one.num_bytes for one in packages)
    glibc = max((one.glibc for one in packages), default=())
    return SizeReport(
        platform=platform,
        packages=tuple(packages),
        total_bytes=total_bytes,
        glibc=glibc,
        fits_image=total_bytes <= MAX_IMAGE_BYTES,
        fits_zip=total_bytes <= MAX_ZIP_BYTES,
        notes=_notes(packages, glibc),
    )


def write_package(directory: Path, platform: Platform = "lambda") -> SizeReport:
    """Write the build context into `directory`: Dockerfile, requirements.txt, springtide's source, sizes.json.

    An older one is replaced. Raises InvalidRequest for a directory with anything else in it.
    """
    if directory.exists() and not directory.is_dir():
        raise InvalidRequest(f"{directory} is a file; name a directory with --out")
    if directory.is_dir() and any(directory.iterdir()) and not (directory / MARKER).is_file():
        raise InvalidRequest(f"{directory} holds something else; name an empty directory with --out")
    report = size_report(platform)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / MARKER).write_text("The build context that `springtide package` wrote; it is replaced as a whole.\n")
    copy_source(directory / "springtide")
    (directory / "requirements.txt").write_text(requirements(report))
    (directory / "Dockerfile").write_text(dockerfile(platform))
    (directory / ".dockerignore").write_text(f"{MARKER}\nsizes.json\n**/__pycache__\n")
    (directory / "sizes.json").write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    return report


def roots_of(platform: Platform) -> tuple[str, ...]:
    """What is named; the rest follows. Function Compute's containers speak HTTP, which Python does by itself."""
    return LAMBDA_ROOTS if platform == "lambda" else ROOTS


def closure(roots: Sequence[str]) -> tuple[str, ...]:
    """The packages and all that they require and this installation has, in alphabetical order.

    What an extra would add is left out; what a marker excludes here is not installed here. Raises InvalidRequest.
    """
    found: dict[str, None] = {}
    waiting = list(roots)
    while waiting:
        name = _normal(waiting.pop())
        if name in found:
            continue
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            if name in map(_normal, roots):
                raise InvalidRequest(f"functions need {name}, which is not installed here; {_INSTALL}") from None
            continue
        found[name] = None
        for text in requires:
            _, _, marker = text.partition(";")
            match = _REQUIREMENT.match(text)
            if match is not None and "extra ==" not in marker:
                waiting.append(match.group(1))
    return tuple(sorted(found))


def copy_source(directory: Path) -> None:
    """Springtide's own files, without those that only the platform needs."""
    source = Path(springtide.__file__).parent
    shutil.rmtree(directory, ignore_errors=True)
    for path in _own_files():
        target = directory / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def requirements(report: SizeReport) -> str:
    """Every package at the version installed here; torch as its build without CUDA, several GB smaller."""
    lines = [f"--extra-index-url {_TORCH_INDEX}"]
    for package in sorted(report.packages, key=lambda one: one.name):
        if package.name == "torch":
            lines.append(f"torch=={package.version.partition('+')[0]}+cpu")
        elif package.name != "springtide":
            lines.append(f"{package.name}=={package.version}")
    return "\n".join(lines) + "\n"


def dockerfile(platform: Platform) -> str:
    """The recipe. The newest layer is springtide itself, so that a new version pushes a few hundred kilobytes."""
    if platform == "lambda":
        start = (
            'ENTRYPOINT ["/usr/local/bin/python", "-m", "awslambdaric"]\n'
            'CMD ["springtide.runtime.function_handler.handler"]\n'
        )
    else:
        start = 'EXPOSE 9000\nCMD ["/usr/local/bin/python", "-m", "springtide.backends.functions.container_server"]\n'
    return (
        f"FROM {BASE_IMAGE}\n"
        "WORKDIR /var/task\n"
        "ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=/var/task\n"
        "COPY requirements.txt /tmp/requirements.txt\n"
        "RUN pip install --no-cache-dir --only-binary=:all: -r /tmp/requirements.txt \\\n"
        " && python -c \"import torch; assert torch.version.cuda is None, 'this is the CUDA build'\"\n"
        "COPY springtide /var/task/springtide\n"
        "RUN python -m compileall -q /var/task/springtide \\\n"
        ' && python -c "import springtide.runtime.function_handler"\n'
        f"{start}"
    )


def _measured(name: str) -> PackageSize:
    distribution = metadata.distribution(name)
    num_files = num_bytes = 0
    for file in distribution.files or ():
        path = Path(str(distribution.locate_file(file)))
        # Byte code is compiled again in the image, and it contains no scripts of the environment.
        if path.suffix != ".pyc" and path.is_file() and ".." not in file.parts:
            num_files += 1
            num_bytes += path.stat().st_size
    return PackageSize(
        name=_normal(name),
        version=distribution.version,
        num_files=num_files,
        num_bytes=num_bytes,
        glibc=_glibc_of(distribution.read_text("WHEEL") or ""),
    )


def _is_installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _own_size() -> PackageSize:
    sizes = [path.stat().st_size for path in _own_files()]
    return PackageSize(
        name="springtide", version=springtide.__version__, num_files=len(sizes), num_bytes=sum(sizes), glibc=()
    )


def _own_files() -> list[Path]:
    source = Path(springtide.__file__).parent
    left_out = tuple(source / name for name in _NOT_IN_FUNCTIONS)
    return [
        path
        for path in sorted(source.rglob("*"))
        if path.is_file() and path.suffix != ".pyc" and not any(one in path.parents for one in left_out)
    ]


def _glibc_of(wheel: str) -> tuple[int, ...]:
    """The oldest C library of a wheel's tags: any one of them suffices. Empty for pure Python."""
    found = [(int(match[1]), int(match[2])) for match in _GLIBC_TAG.finditer(wheel)]
    found += [version for tag, version in _OLD_TAGS if tag in wheel]
    return min(found, default=())


def _notes(packages: Sequence[PackageSize], glibc: tuple[int, ...]) -> tuple[str, ...]:
    notes = [f"the base image ({BASE_IMAGE}) comes on top of this"]
    torch = next(one for one in packages if one.name == "torch")
    if not torch.version.endswith("+cpu"):
        notes.append(f"torch {torch.version} is measured as it is installed here; the image gets its CPU build")
    if glibc > LAMBDA_IMAGE_GLIBC:
        needs, has = (".".join(map(str, version)) for version in (glibc, LAMBDA_IMAGE_GLIBC))
        notes.append(f"needs glibc {needs}: public.ecr.aws/lambda/python:3.11 has {has} and cannot load torch")
    if glibc > BASE_IMAGE_GLIBC:
        notes.append(f"{BASE_IMAGE} is too old for it: put a newer base image into the Dockerfile")
    return tuple(notes)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
