"""Launches that are not quite the usual ones: on several devices at once, on none, and such as fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kits.native.gate_scene import VARIABLE, DeviceScene, open_devices
from kits.native.native_build import Native

PROGRAM = r"""
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#define MUST(call) if ((call) != CUDA_SUCCESS) { fprintf(stderr, "%s failed\n", #call); exit(2); }
static CUfunction function_of(CUcontext context) {
    CUmodule module;
    CUfunction function;
    MUST(cuCtxPushCurrent(context));
    MUST(cuModuleLoadData(&module, "image"));
    MUST(cuModuleGetFunction(&function, module, "both@1000"));
    MUST(cuCtxPopCurrent(&context));
    return function;
}
static CUstream stream_of(CUcontext context) {
    CUstream stream;
    MUST(cuCtxPushCurrent(context));
    MUST(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    MUST(cuCtxPopCurrent(&context));
    return stream;
}
int main(int argc, char **argv) {
    CUcontext contexts[2];
    CUDA_LAUNCH_PARAMS parts[2];
    memset(parts, 0, sizeof parts);
    MUST(cuInit(0));
    for (int k = 0; k < 2; k++) {
        CUdevice device;
        MUST(cuDeviceGet(&device, k));
        MUST(cuDevicePrimaryCtxRetain(&contexts[k], device));
        parts[k].function = function_of(contexts[k]);
        parts[k].hStream = stream_of(contexts[k]);
        parts[k].gridDimX = parts[k].gridDimY = parts[k].gridDimZ = 1;
        parts[k].blockDimX = parts[k].blockDimY = parts[k].blockDimZ = 1;
    }
    MUST(cuCtxSetCurrent(contexts[0]));
    int result = 0;
    if (strcmp(argv[1], "both") == 0) {
        result = cuLaunchCooperativeKernelMultiDevice(parts, 2, 0);
    } else if (strcmp(argv[1], "none") == 0) {
        result = cuLaunchCooperativeKernelMultiDevice(NULL, 0, 0);
    } else {
        result = cuLaunchKernel(parts[0].function, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
    }
    CUcontext current = NULL;
    MUST(cuCtxGetCurrent(&current));
    printf("{\"result\": %d, \"is_current\": %d}\n", result, current == contexts[0]);
    return 0;
}
"""


@pytest.fixture
def scene(native: Native, tmp_path: Path) -> Iterator[DeviceScene]:
    with open_devices(native, tmp_path) as found:
        yield found


def run(scene: DeviceScene, what: str, **environment: object) -> int:
    around = {VARIABLE: scene.daemon.path, "STUB_CLOCK": "off", **environment}
    said = scene.native.run(PROGRAM, what, env=around).json()
    assert said["is_current"] == 1
    return int(said["result"])


def test_a_launch_on_two_devices_is_one_on_each(scene: DeviceScene) -> None:
    assert run(scene, "both") == 0
    assert [scene.num_launches(number) for number in range(2)] == [1, 1]
    assert all(segment.used_ns > 0 for segment in scene.segments)


def test_a_launch_on_two_devices_that_fails_is_given_back(scene: DeviceScene) -> None:
    assert run(scene, "both", STUB_FAIL="cuLaunchCooperativeKernelMultiDevice=719") == 719
    assert [segment.used_ns for segment in scene.segments] == [0, 0]


def test_a_launch_on_no_device_is_refused_by_the_driver_itself(scene: DeviceScene) -> None:
    bare = scene.native.run(PROGRAM, "none", env={"STUB_CLOCK": "off"}, preload=False).json()
    assert run(scene, "none") == bare["result"]
    assert [segment.used_ns for segment in scene.segments] == [0, 0]


def test_a_launch_that_fails_is_given_back(scene: DeviceScene) -> None:
    assert run(scene, "plain") == 0
    used_ns = scene.segments[0].used_ns
    assert used_ns > 0
    assert run(scene, "plain", STUB_FAIL="cuLaunchKernel=719") == 719
    assert scene.segments[0].used_ns == used_ns
