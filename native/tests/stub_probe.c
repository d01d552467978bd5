/* The stub driver by itself: each case returns 0, or the number of the line that was not as a real driver has it. */
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "stub_api.h"

#define SHALL(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            return __LINE__;                                                                                           \
        }                                                                                                              \
    } while (0)
#define MB (1u << 20)

static CUcontext context;
static CUfunction kernel;

static int begin(void) {
    CUmodule module;
    SHALL(cuInit(0) == 0);
    SHALL(cuDevicePrimaryCtxRetain(&context, 0) == 0);
    SHALL(cuCtxSetCurrent(context) == 0);
    SHALL(cuModuleLoadData(&module, "x") == 0);
    SHALL(cuModuleGetFunction(&kernel, module, "layer@1000000") == 0);
    return 0;
}

static CUresult launch(CUstream stream) {
    return cuLaunchKernel(kernel, 4, 1, 1, 32, 1, 1, 0, stream, NULL, NULL);
}

static int keeps_time(void) {
    CUstream stream;
    CUevent first, last, untimed;
    float milliseconds;
    SHALL(cuStreamCreate(&stream, 0) == 0);
    SHALL(cuEventCreate(&first, 0) == 0 && cuEventCreate(&last, 0) == 0);
    SHALL(cuEventCreate(&untimed, CU_EVENT_DISABLE_TIMING) == 0);
    SHALL(cuEventRecord(first, stream) == 0 && launch(stream) == 0 && cuEventRecord(last, stream) == 0);
    SHALL(cuEventQuery(last) == CUDA_ERROR_NOT_READY);
    SHALL(cuEventElapsedTime(&milliseconds, first, last) == CUDA_ERROR_NOT_READY);
    SHALL(cuStreamQuery(stream) == CUDA_ERROR_NOT_READY);
    SHALL(cuStreamSynchronize(stream) == 0 && cuEventQuery(last) == 0);
    SHALL(cuEventElapsedTime(&milliseconds, first, last) == 0);
    SHALL(milliseconds >= 1.0f && milliseconds < 1.01f);
    SHALL(cuEventElapsedTime(&milliseconds, untimed, last) == CUDA_ERROR_INVALID_HANDLE);
    SHALL(cuLaunchKernel(kernel, 0, 1, 1, 32, 1, 1, 0, stream, NULL, NULL) == CUDA_ERROR_INVALID_VALUE);
    SHALL(cuEventDestroy_v2(first) == 0 && stub_alive("events") == 2);
    return 0;
}

/* Two streams of one device take turns: the device does one thing after another. */
static int does_one_thing_after_another(void) {
    CUstream streams[2];
    uint64_t begun_ns = stub_now_ns();
    for (int i = 0; i < 2; i++) {
        SHALL(cuStreamCreate(&streams[i], CU_STREAM_NON_BLOCKING) == 0);
        SHALL(launch(streams[i]) == 0 && launch(streams[i]) == 0);
    }
    SHALL(cuCtxSynchronize() == 0);
    SHALL(stub_now_ns() - begun_ns >= 4000000 && stub_busy_ns(0) == 4000000);
    return 0;
}

static int forbids_in_captures(void) {
    CUstream stream, other;
    CUevent event;
    CUgraph graph;
    CUdeviceptr address;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    SHALL(cuStreamCreate(&stream, 0) == 0 && cuStreamCreate(&other, 0) == 0 && cuEventCreate(&event, 0) == 0);
    SHALL(cuStreamBeginCapture_v2(NULL, CU_STREAM_CAPTURE_MODE_GLOBAL) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    SHALL(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL) == 0 && launch(stream) == 0);
    SHALL(stub_kernels(0) == 0);
    SHALL(cuThreadExchangeStreamCaptureMode(&mode) == 0 && mode == CU_STREAM_CAPTURE_MODE_GLOBAL);
    SHALL(cuMemAlloc_v2(&address, MB) == 0 && stub_violations() == 0);
    SHALL(cuThreadExchangeStreamCaptureMode(&mode) == 0);
    SHALL(cuStreamEndCapture(other, &graph) == CUDA_ERROR_ILLEGAL_STATE);
    SHALL(cuEventRecord(event, stream) == 0 && cuStreamWaitEvent(other, event, 0) == 0 && launch(other) == 0);
    SHALL(cuStreamEndCapture(other, &graph) == CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
    SHALL(cuStreamEndCapture(stream, &graph) == 0);
    size_t count = 0;
    SHALL(cuGraphGetNodes(graph, NULL, &count) == 0 && count == 2);
    SHALL(cuGraphDestroy(graph) == 0);
    SHALL(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL) == 0);
    SHALL(cuEventQuery(event) == CUDA_ERROR_CAPTURED_EVENT || cuEventQuery(event) != 0);
    SHALL(cuMemAlloc_v2(&address, MB) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED && stub_violations() > 0);
    SHALL(launch(stream) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    SHALL(cuStreamEndCapture(stream, &graph) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    SHALL(launch(stream) == 0 && stub_kernels(0) == 1);
    return 0;
}

static int runs_graphs(void) {
    CUgraph graph, child;
    CUgraphNode node, inner;
    CUgraphExec exec;
    CUDA_KERNEL_NODE_PARAMS_v2 one = {.func = kernel, .gridDimX = 3, .gridDimY = 1, .gridDimZ = 1, .blockDimX = 1,
                                      .blockDimY = 1, .blockDimZ = 1};
    SHALL(cuGraphCreate(&child, 0) == 0 && cuGraphAddKernelNode_v2(&inner, child, NULL, 0, &one) == 0);
    SHALL(cuGraphCreate(&graph, 0) == 0 && cuGraphAddKernelNode_v2(&node, graph, NULL, 0, &one) == 0);
    CUgraphNode in_child;
    SHALL(cuGraphAddChildGraphNode(&in_child, graph, &node, 1, child) == 0);
    SHALL(cuGraphInstantiateWithFlags(&exec, graph, 0) == 0);
    SHALL(cuGraphLaunch(exec, NULL) == 0 && stub_kernels(0) == 2 && stub_blocks(0) == 6);
    one.gridDimX = 10;
    SHALL(cuGraphExecKernelNodeSetParams_v2(exec, node, &one) == 0);
    SHALL(cuGraphLaunch(exec, NULL) == 0 && stub_blocks(0) == 19);
    SHALL(cuGraphNodeSetEnabled(exec, node, 0) == 0);
    SHALL(cuGraphLaunch(exec, NULL) == 0 && stub_blocks(0) == 22 && stub_busy_ns(0) == 5000000);
    CUgraphExecUpdateResultInfo info;
    SHALL(cuGraphExecUpdate_v2(exec, child, &info) == CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
    SHALL(cuGraphExecUpdate_v2(exec, graph, &info) == 0);
    SHALL(cuGraphLaunch(exec, NULL) == 0 && stub_blocks(0) == 28);
    SHALL(cuGraphExecDestroy(exec) == 0 && cuGraphDestroy(graph) == 0 && cuGraphDestroy(child) == 0);
    SHALL(stub_alive("graphs") == 0 && stub_alive("execs") == 0);
    return 0;
}

static int keeps_memory(void) {
    CUdeviceptr first, second;
    CUmemGenericAllocationHandle handle;
    CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}};
    size_t free_bytes, total_bytes;
    SHALL(cuMemGetInfo_v2(&free_bytes, &total_bytes) == 0 && total_bytes == 64 * MB && free_bytes == total_bytes);
    SHALL(cuMemAlloc_v2(&first, 40 * MB) == 0);
    SHALL(cuMemAlloc_v2(&second, 40 * MB) == CUDA_ERROR_OUT_OF_MEMORY);
    SHALL(cuMemGetInfo_v2(&free_bytes, &total_bytes) == 0 && free_bytes == 24 * MB);
    SHALL(cuMemFree_v2(first) == 0 && cuMemFree_v2(first) == CUDA_ERROR_INVALID_VALUE);
    SHALL(cuMemAllocAsync(&first, MB, NULL) == 0 && stub_memory_bytes(0) == 2 * MB);
    SHALL(cuMemFreeAsync(first, NULL) == 0 && stub_memory_bytes(0) == 2 * MB);
    SHALL(cuCtxSynchronize() == 0 && stub_memory_bytes(0) == 0);
    SHALL(cuMemCreate(&handle, 4 * MB, &properties, 0) == 0 && cuMemAddressReserve(&first, 4 * MB, 0, 0, 0) == 0);
    SHALL(cuMemMap(first, 4 * MB, 0, handle, 0) == 0 && cuMemRelease(handle) == 0);
    SHALL(stub_memory_bytes(0) == 4 * MB && cuMemUnmap(first, 4 * MB) == 0 && stub_memory_bytes(0) == 0);
    SHALL(stub_peak_bytes(0) == 40 * MB);
    SHALL(cuMemAlloc_v2(&first, MB) == 0 && cuDevicePrimaryCtxReset_v2(0) == 0 && stub_memory_bytes(0) == 0);
    return 0;
}

static int ends_contexts(void) {
    CUcontext own, current;
    CUevent event;
    CUdevice device;
    SHALL(cuCtxCreate_v2(&own, 0, 1) == 0 && cuCtxGetDevice(&device) == 0 && device == 1);
    SHALL(cuEventCreate(&event, 0) == 0 && stub_alive("events") == 1);
    SHALL(cuCtxDestroy_v2(own) == 0 && stub_alive("events") == 0);
    SHALL(cuCtxGetCurrent(&current) == 0 && current == context);
    SHALL(cuCtxSetCurrent(own) == CUDA_ERROR_INVALID_CONTEXT);
    CUcontext next;
    SHALL(cuCtxCreate_v2(&next, 0, 0) == 0 && next == own);
    return 0;
}

static int refuses_children(int expected) {
    int status;
    int count = 0;
    pid_t child = fork();
    if (child == 0) {
        _exit(cuInit(0) == (CUresult)expected && cuDeviceGetCount(&count) == (CUresult)expected ? 0 : 1);
    }
    SHALL(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    SHALL(launch(NULL) == 0);
    return 0;
}

static int fails_as_told(void) {
    SHALL(launch(NULL) == 0 && launch(NULL) == 700 && launch(NULL) == 700 && launch(NULL) == 0);
    return 0;
}

static int sees_devices(void) {
    int count = 0;
    CUuuid uuid;
    SHALL(cuInit(0) == 0 && cuDeviceGetCount(&count) == 0);
    for (int i = 0; i < count; i++) {
        SHALL(cuDeviceGetUuid_v2(&uuid, i) == 0);
        printf("%d ", uuid.bytes[15] - 1);
    }
    SHALL(cuDevicePrimaryCtxRetain(&context, count) == CUDA_ERROR_INVALID_DEVICE);
    return 0;
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        int (*play)(void);
    } cases[] = {
        {"time", keeps_time},       {"order", does_one_thing_after_another}, {"captures", forbids_in_captures},
        {"graphs", runs_graphs},    {"memory", keeps_memory},                {"contexts", ends_contexts},
        {"faults", fails_as_told},
    };
    const char *name = argc > 1 ? argv[1] : "";
    int line = strcmp(name, "devices") == 0 ? sees_devices() : begin();
    if (strcmp(name, "fork") == 0 && argc > 2) {
        line = refuses_children(strcmp(argv[2], "allowed") == 0 ? 0 : CUDA_ERROR_NOT_INITIALIZED);
    }
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]) && line == 0; i++) {
        line = strcmp(cases[i].name, name) == 0 ? cases[i].play() : 0;
    }
    printf("%d\n", line);
    return 0;
}
