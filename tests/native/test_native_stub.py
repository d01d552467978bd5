"""The stub driver itself, without the library: it counts, keeps time, and refuses what a real driver refuses."""

from __future__ import annotations

from native_build import Native

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


def test_ten_launches_take_ten_times_as_long_as_one(native: Native) -> None:
    outcome = native.run(LAUNCHES, preload=False)
    assert 25.0 <= float(outcome.stdout) <= 25.1
    assert outcome.calls["cuLaunchKernel"] == 10
    assert outcome.stub["devices"][1]["blocks"] == 10 * 2**32
    assert outcome.stub["devices"][0]["kernels"] == 0
