"""The stub driver itself, without the library: it counts, keeps time, and refuses what a real driver refuses.

What is told by it is only as true as this: it stands for a driver where there is no device.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kits.native.native_build import STUB, Native

LAUNCHES = """
#include <stdio.h>
#include "stub_api.h"
int main(void) {
    CUcontext context; CUmodule module; CUfunction function; CUevent first, last; float ms;
    if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 1) || cuCtxSetCurrent(context)) return 1;
    if (cuModuleLoadData(&module, "x") || cuModuleGetFunction(&function, module, "layer@2500000")) return 2;
    if (cuEventCreate(&first, 0) || cuEventCreate(&last, 0) || cuEventRecord(first, NULL)) return 3;
    for (int i = 0; i < 10; i++)
        if (cuLaunchKernel(function, 65536, 65536, 1, 32, 1, 1, 0, NULL, NULL, NULL)) return 4;
    if (cuEventRecord(last, NULL) || cuEventQuery(last) != CUDA_ERROR_NOT_READY || cuEventSynchronize(last)) return 5;
    if (cuEventElapsedTime(&ms, first, last)) return 6;
    printf("%.3f\\n", ms);
    return 0;
}
"""
WRITES_BEYOND_ITS_MEMORY = """
#include <stdlib.h>
int main(int argc, char **argv) {
    char *memory = malloc((size_t)argc);
    memory[argc] = 1;
    return memory[0];
}
"""
OVERFLOWS = """
#include <limits.h>
int main(int argc, char **argv) {
    int largest = INT_MAX - 1 + argc;
    return largest + argc == 0;
}
"""
MEMORY_IN_NVML = """
#include <stdio.h>
#include "stub_api.h"
struct memory { unsigned long long total, free, used; };
int nvmlInit_v2(void);
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device);
int nvmlDeviceGetMemoryInfo(void *device, struct memory *memory);
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, void *list);
int main(void) {
    CUcontext context; CUdeviceptr address; void *device; struct memory memory; unsigned count = 0;
    if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context)) return 1;
    if (cuMemAlloc(&address, 3 << 20)) return 2;
    if (nvmlInit_v2() || nvmlDeviceGetHandleByUUID("GPU-53545542-0000-4000-8000-000000000002", &device)) return 3;
    if (nvmlDeviceGetMemoryInfo(device, &memory)) return 4;
    if (nvmlDeviceGetComputeRunningProcesses_v3(device, &count, NULL) != 7) return 5;
    printf("%llu %llu %u\\n", memory.total >> 20, memory.used >> 20, count);
    return 0;
}
"""


def test_ten_launches_take_ten_times_as_long_as_one(native: Native) -> None:
    outcome = native.run(LAUNCHES, preload=False)
    assert 25.0 <= float(outcome.stdout) <= 25.1
    assert outcome.calls["cuLaunchKernel"] == 10
    assert outcome.stub["devices"][1]["blocks"] == 10 * 2**32
    assert outcome.stub["devices"][0]["kernels"] == 0


@pytest.mark.parametrize(
    ("case", "environment"),
    [
        ("time", {}),
        ("order", {}),
        ("captures", {}),
        ("graphs", {}),
        ("memory", {"STUB_MEMORY_MB": 64}),
        ("contexts", {}),
        ("faults", {"STUB_FAIL": "cuLaunchKernel:1-2=700"}),
        ("fork refused", {}),
        ("fork allowed", {"STUB_FORK": "allow"}),
    ],
)
def test_it_does_as_a_real_driver_does(native: Native, case: str, environment: dict[str, object]) -> None:
    outcome = native.run("stub_probe", *case.split(), env=environment, preload=False)
    assert outcome.stdout.strip() == "0", "the line of stub_probe.c that was not as it should be"


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (None, "0 1 2"),
        ("1", "1"),
        ("2,0", "2 0"),
        ("GPU-53545542-0000-4000-8000-000000000003", "2"),
        ("GPU-53545542-0000-4000-8000-000000000002,0", "1 0"),
        ("1,9,0", "1"),
    ],
)
def test_visible_devices_are_chosen_as_the_driver_chooses(native: Native, visible: str | None, seen: str) -> None:
    chosen = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    outcome = native.run("stub_probe", "devices", env={"STUB_DEVICES": 3, **chosen}, preload=False)
    assert outcome.stdout.split() == [*seen.split(), "0"]


def test_real_time_passes_with_the_real_clock(native: Native) -> None:
    outcome = native.run(LAUNCHES, env={"STUB_CLOCK": "real"}, preload=False)
    assert float(outcome.stdout) >= 25.0


def test_processes_share_a_machine(native: Native, tmp_path: Path) -> None:
    """NVML counts what CUDA allocated, by UUID whatever the process calls the device; the dead hold nothing."""
    shared = {"STUB_SHARED": tmp_path / "machine", "CUDA_VISIBLE_DEVICES": "1", "STUB_MEMORY_MB": "100,200"}
    for _ in range(2):
        outcome = native.run(MEMORY_IN_NVML, env=shared, preload=False, links=("-lcuda", "-lnvidia-ml"))
        assert outcome.stdout.split() == ["200", "3", "1"]


def test_versions_are_those_of_the_headers(native: Native) -> None:
    """What asking for a name at a version means, as far as the headers say it."""
    typedefs = (native.headers / "cudaTypedefs.h").read_text(encoding="utf-8")
    known = set(re.findall(r"PFN_(cu\w+?)_v(\d+)(_ptsz|_ptds)?\)", typedefs))
    table = (STUB / "stub_functions.def").read_text(encoding="utf-8")
    rows = re.findall(r"^STUB\((\w+), (\w+), (\d+), (true|false)\)", table, re.MULTILINE)
    assert len(rows) > 250
    assert len({symbol for _, symbol, _, _ in rows}) == len(rows)
    newer = {"cuGraphAddNode_v3", "cuStreamBeginRecaptureToGraph", "cuStreamBeginRecaptureToGraph_ptsz"}
    for api, symbol, since, per_thread in rows:
        twin = symbol[-5:] if per_thread == "true" else ""
        assert (api, since, twin) in known or symbol in newer, symbol


@pytest.mark.parametrize(("program", "code"), [(WRITES_BEYOND_ITS_MEMORY, 99), (OVERFLOWS, 98)])
@pytest.mark.slow
def test_the_sanitizers_see_what_they_are_there_for(native_asan: Native, program: str, code: int) -> None:
    outcome = native_asan.run(program, links=(), check=False)
    assert outcome.returncode == code
    assert "Sanitizer" in outcome.stderr or "runtime error" in outcome.stderr
