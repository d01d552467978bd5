"""The stub driver, the library and test programs, built once and run against each other."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from springtide.backends.sharing.gpu.build import (
    LIBRARY_FLAGS,
    LIBRARY_LINKS,
    LIBRARY_NAME,
    build_interposer,
    build_library,
    find_compiler,
)

ROOT = Path(__file__).parents[3]
NATIVE = ROOT / "native"
STUB = NATIVE / "stub"
PROGRAMS = NATIVE / "tests"
# A broken source tree to build the library from, and where the stub driver and the programs lie ready.
BROKEN_TREE = "SPRINGTIDE_TEST_TREE"
SHARED_BUILD = "SPRINGTIDE_TEST_BUILD"
STUB_FLAGS = (
    "-std=gnu11",
    "-O2",
    "-g",
    "-fPIC",
    "-shared",
    "-pthread",
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",
    "-Werror",
)
PROGRAM_FLAGS = (
    "-std=gnu11",
    "-O1",
    "-g",
    "-pthread",
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",
    "-Wno-deprecated-declarations",
)
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer")
ASAN_OPTIONS = "detect_leaks=1:abort_on_error=0:exitcode=99:handle_segv=1:verify_asan_link_order=0"
UBSAN_OPTIONS = "print_stacktrace=1:halt_on_error=1:exitcode=98"
# What an old driver did not have: cudart falls back to dlsym where cuGetProcAddress_v2 is missing.
OLD_DRIVER_LACKS = (
    "cuGetProcAddress_v2",
    "cuLaunchKernelEx",
    "cuLaunchKernelEx_ptsz",
    "cuGraphInstantiateWithParams",
    "cuGraphInstantiateWithParams_ptsz",
    "cuGraphExecUpdate_v2",
    "cuGraphAddNode",
    "cuGraphAddNode_v2",
    "cuGraphExecNodeSetParams",
    "cuStreamBeginCaptureToGraph",
    "cuStreamBeginCaptureToGraph_ptsz",
    "cuCtxGetId",
    "cuCtxGetDevice_v2",
    "cuCtxSynchronize_v2",
    "cuEventElapsedTime_v2",
    "cuLibraryLoadData",
    "cuLibraryGetKernel",
    "cuKernelGetFunction",
    "cuFuncGetName",
)


def headers_version(headers: Path) -> int:
    """The CUDA version of a folder of headers, as in 13000."""
    found = re.search(r"^#define\s+CUDA_VERSION\s+(\d+)", (headers / "cuda.h").read_text(), re.MULTILINE)
    assert found, f"{headers / 'cuda.h'} does not say its CUDA_VERSION"
    return int(found[1])


@dataclass(frozen=True)
class Outcome:
    """How a program ended, what it said, and what the stub driver counted."""

    returncode: int
    stdout: str
    stderr: str
    stub: dict[str, Any] = field(default_factory=dict)

    @property
    def calls(self) -> dict[str, int]:
        """How often each symbol of the driver was called; 0 for the others."""
        return self.stub.get("calls", {})

    def json(self) -> Any:
        """The last line that the program printed, which is JSON."""
        return json.loads(self.stdout.strip().splitlines()[-1])


class Native:
    """Everything built from one source tree with one set of flags, in one folder; each thing on first use."""

    def __init__(
        self, folder: Path, headers: Path, *, native: Path = NATIVE, sanitize: bool = False, shared: Path | None = None
    ) -> None:
        self.folder = folder
        self.headers = headers
        self.native = native
        # Where the stub drivers and the programs lie: another build's folder where only the library differs.
        self.shared = shared or folder
        self.sanitize = sanitize
        self._flags = SANITIZE if sanitize else ()

    @functools.cached_property
    def stub_dir(self) -> Path:
        """Holds libcuda.so.1 (and libcuda.so, to link with) and libnvidia-ml.so.1: for LD_LIBRARY_PATH."""
        return self._build_stub(self.shared / "stub", hidden=())

    @functools.cached_property
    def old_stub_dir(self) -> Path:
        """A driver from before CUDA 11.6: no cuGetProcAddress_v2, no cuLaunchKernelEx."""
        return self._build_stub(self.shared / "stub-old", hidden=OLD_DRIVER_LACKS)

    @functools.cached_property
    def ancient_stub_dir(self) -> Path:
        """A driver from before CUDA 11.3: no cuGetProcAddress at all."""
        return self._build_stub(self.shared / "stub-ancient", hidden=(*OLD_DRIVER_LACKS, "cuGetProcAddress"))

    @functools.cached_property
    def library(self) -> Path:
        """The interposition library."""
        target = self.folder / LIBRARY_NAME
        if target.exists():
            return target
        if self.shared == self.folder:
            return build_interposer(target, native=self.native, headers=self.headers, flags=self._flags)
        # A tree of which little differs from what was built before: what is the same is not compiled again.
        objects = [self._object(source) for source in sorted((self.native / "src").glob("*.c"))]
        return build_library(target, sources=objects, headers=[], flags=LIBRARY_FLAGS, links=LIBRARY_LINKS)

    def _object(self, source: Path) -> Path:
        include = self.native / "include"
        others = [*sorted(source.parent.glob("*.h")), *sorted(source.parent.glob("*.def")), *sorted(include.iterdir())]
        mark = hashlib.sha256(b"\0".join(path.read_bytes() for path in (source, *others))).hexdigest()[:16]
        target = self.shared / "objects" / f"{source.stem}-{mark}.o"
        if not target.exists():
            flags = [*(flag for flag in LIBRARY_FLAGS if flag != "-shared"), "-c"]
            build_library(target, sources=[source], headers=[include, source.parent, self.headers], flags=flags)
        return target

    @functools.cached_property
    def _stub_object(self) -> Path:
        """The stub driver, compiled once for all drivers that are linked of it."""
        target = self.shared / "stub.o"
        if not target.exists():
            sources = sorted(path for path in STUB.glob("stub_*.c") if path.name != "stub_nvml.c")
            flags = [*(flag for flag in STUB_FLAGS if flag != "-shared"), "-r", *self._flags]
            build_library(target, sources=sources, headers=[STUB, self.headers], flags=flags)
        return target

    def _build_stub(self, folder: Path, *, hidden: Sequence[str]) -> Path:
        driver, management = folder / "libcuda.so.1", folder / "libnvidia-ml.so.1"
        folder.mkdir(parents=True, exist_ok=True)
        script = folder / "exports.map"
        hide = " ".join(f"{name};" for name in hidden)
        script.write_text(f"{{ global: cu*; stub_*; {'local: ' + hide if hide else ''} }};\n", encoding="utf-8")
        if not driver.exists():
            links = ["-Wl,-soname,libcuda.so.1", "-Wl,-Bsymbolic", f"-Wl,--version-script={script}"]
            flags = [*STUB_FLAGS, *self._flags]
            build_library(driver, sources=[self._stub_object], headers=[], flags=flags, links=links)
        if not management.exists():
            build_library(
                management,
                sources=[STUB / "stub_nvml.c"],
                headers=[STUB, self.headers],
                flags=[*STUB_FLAGS, *self._flags],
                links=["-Wl,-soname,libnvidia-ml.so.1", "-Wl,-Bsymbolic"],
            )
        for name in ("libcuda.so", "libnvidia-ml.so"):
            link = folder / name
            if not link.is_symlink():
                try:
                    link.symlink_to(f"{name}.1")
                except FileExistsError:
                    pass
        return folder

    def program(self, source: str, *, links: Sequence[str] = ("-lcuda",), flags: Sequence[str] = ()) -> Path:
        """A program from C text, or from native/tests/NAME.c; linked with the stub driver like a driver-API program."""
        path = PROGRAMS / f"{source}.c"
        text = source if "\n" in source else path.read_text(encoding="utf-8")
        helpers = "".join(each.read_text(encoding="utf-8") for each in sorted(PROGRAMS.glob("*.h")))
        mark = hashlib.sha256("\0".join([text, helpers, *links, *flags]).encode()).hexdigest()[:16]
        target = self.shared / "programs" / mark
        if not target.exists():
            file = path
            if "\n" in source:
                target.parent.mkdir(parents=True, exist_ok=True)
                file = target.with_suffix(".c")
                file.write_text(text, encoding="utf-8")
            build_library(
                target,
                sources=[file],
                headers=[PROGRAMS, STUB, self.native / "include", self.headers],
                flags=[*PROGRAM_FLAGS, *flags, *self._flags],
                links=[f"-L{self.stub_dir}", *links, "-ldl", "-lm"],
            )
        return target

    def environment(
        self, env: Mapping[str, object] | None = None, *, preload: bool = True, stub: Path | None = None
    ) -> dict[str, str]:
        """What a program needs around it: the stub driver, the library preloaded, nothing of the caller's CUDA."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("STUB_", "CUDA_", "SPRINGTIDE_", "LD_"))}
        kept["LD_LIBRARY_PATH"] = str(stub or self.stub_dir)
        preloads = [self._sanitizer] if self.sanitize else []
        preloads += [str(self.library)] if preload else []
        if preloads:
            kept["LD_PRELOAD"] = ":".join(preloads)
        if self.sanitize:
            kept |= {"ASAN_OPTIONS": ASAN_OPTIONS, "UBSAN_OPTIONS": UBSAN_OPTIONS}
        return kept | {key: str(value) for key, value in (env or {}).items()}

    @functools.cached_property
    def _sanitizer(self) -> str:
        command = [str(find_compiler()), "-print-file-name=libasan.so"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def run(
        self,
        source: str,
        *args: object,
        env: Mapping[str, object] | None = None,
        preload: bool = True,
        stub: Path | None = None,
        timeout_s: float = 60.0,
        check: bool = True,
        links: Sequence[str] = ("-lcuda",),
    ) -> Outcome:
        """Compile the program if need be and run it to its end; fails where it fails, unless `check` is false."""
        program = self.program(source, links=links)
        report = program.with_name(f"{program.name}-{os.getpid()}.report")
        report.unlink(missing_ok=True)
        around = self.environment({"STUB_REPORT": report, **(env or {})}, preload=preload, stub=stub)
        done = subprocess.run(
            [str(program), *map(str, args)], env=around, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        stub_said = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
        if check and done.returncode != 0:
            raise AssertionError(f"{source[:60]!r} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
        return Outcome(done.returncode, done.stdout, done.stderr, stub_said)


RunProgram = Callable[..., Outcome]
