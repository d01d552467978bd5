/* The stub driver's launches, direct ones of all kinds; a stream that captures takes them into its graph. */
#include "stub.h"

#include <stdlib.h>

uint64_t stub_kernel_time(const struct CUfunc_st *function, uint64_t num_blocks) {
    return function->ns + function->ns_a_block * num_blocks;
}

struct CUfunc_st *stub_function(CUfunction handle) {
    return handle;
}

/* The device does one thing after another, whoever wants it. */
uint64_t stub_run(struct CUstream_st *stream, uint64_t ns) {
    if (stub_clock == STUB_OFF) {
        return 0;
    }
    uint64_t now = stub_tick();
    uint64_t ready = atomic_load_explicit(&stream->ready_ns, memory_order_relaxed);
    if (stub_queue_ns != 0 && stub_clock == STUB_REAL && ready > now + stub_queue_ns) {
        stub_wait_until(ready - stub_queue_ns);
        now = stub_now_ns();
    }
    struct stub_device *device = &stub_devices[stream->context->device];
    _Atomic uint64_t *busy_until = &stub_machine->busy_until_ns[device->physical];
    uint64_t busy = atomic_load_explicit(busy_until, memory_order_relaxed);
    uint64_t end;
    do {
        uint64_t start = busy > now ? busy : now;
        end = (start > ready ? start : ready) + ns;
    } while (!atomic_compare_exchange_weak_explicit(busy_until, &busy, end, memory_order_relaxed, memory_order_relaxed));
    while (ready < end && !atomic_compare_exchange_weak(&stream->ready_ns, &ready, end)) {
    }
    atomic_fetch_add_explicit(&device->busy_ns, ns, memory_order_relaxed);
    return end;
}

CUresult stub_launch(struct CUfunc_st *function, uint64_t num_blocks, const CUDA_KERNEL_NODE_PARAMS_v2 *kernel,
                     struct CUstream_st *stream) {
    if (stream == NULL) {
        return stub_check_context();
    }
    if (function == NULL || num_blocks == 0) {
        return function == NULL ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE;
    }
    if (__builtin_expect(stub_num_captures != 0, 0)) {
        struct stub_capture *capture = stream->capture;
        if (capture != NULL) {
            if (capture->status != CU_STREAM_CAPTURE_STATUS_ACTIVE) {
                return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
            }
            stub_add_node(capture->graph, CU_GRAPH_NODE_TYPE_KERNEL, NULL, 0)->kernel = *kernel;
            return CUDA_SUCCESS;
        }
        if (stream == stream->context->legacy && stub_forbid_in_capture() != CUDA_SUCCESS) {
            return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        }
    }
    struct stub_device *device = &stub_devices[stream->context->device];
    atomic_fetch_add_explicit(&device->num_kernels, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&device->num_blocks, num_blocks, memory_order_relaxed);
    stub_run(stream, stub_kernel_time(function, num_blocks));
    return CUDA_SUCCESS;
}

#define KERNEL(f, gx, gy, gz, bx, by, bz, shared, values, more)                                                        \
    (CUDA_KERNEL_NODE_PARAMS_v2) {                                                                                     \
        .func = f, .gridDimX = gx, .gridDimY = gy, .gridDimZ = gz, .blockDimX = bx, .blockDimY = by, .blockDimZ = bz,  \
        .sharedMemBytes = shared, .kernelParams = values, .extra = more                                                \
    }

static uint64_t product(unsigned int x, unsigned int y, unsigned int z) {
    return (uint64_t)x * y * z;
}

PAIR(cuLaunchKernel, _ptsz,
     (CUfunction function, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by,
      unsigned int bz, unsigned int shared, CUstream stream, void **parameters, void **extra),
     {
         CUDA_KERNEL_NODE_PARAMS_v2 kernel = KERNEL(function, gx, gy, gz, bx, by, bz, shared, parameters, extra);
         return stub_launch(stub_function(function), product(gx, gy, gz), &kernel, stub_stream(stream, per_thread));
     })

PAIR(cuLaunchCooperativeKernel, _ptsz,
     (CUfunction function, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by,
      unsigned int bz, unsigned int shared, CUstream stream, void **parameters),
     {
         CUDA_KERNEL_NODE_PARAMS_v2 kernel = KERNEL(function, gx, gy, gz, bx, by, bz, shared, parameters, NULL);
         return stub_launch(stub_function(function), product(gx, gy, gz), &kernel, stub_stream(stream, per_thread));
     })

PAIR(cuLaunchKernelEx, _ptsz, (const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra), {
    CUDA_KERNEL_NODE_PARAMS_v2 kernel =
        KERNEL(function, config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX, config->blockDimY,
               config->blockDimZ, config->sharedMemBytes, parameters, extra);
    return stub_launch(stub_function(function), product(config->gridDimX, config->gridDimY, config->gridDimZ), &kernel,
                       stub_stream(config->hStream, per_thread));
})

CUresult cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *list, unsigned int count, unsigned int flags) {
    ENTER(cuLaunchCooperativeKernelMultiDevice);
    for (unsigned int i = 0; i < count; i++) {
        const CUDA_LAUNCH_PARAMS *one = &list[i];
        CUDA_KERNEL_NODE_PARAMS_v2 kernel =
            KERNEL(one->function, one->gridDimX, one->gridDimY, one->gridDimZ, one->blockDimX, one->blockDimY,
                   one->blockDimZ, one->sharedMemBytes, one->kernelParams, NULL);
        /* Each of its streams belongs to another device; default streams are not allowed here. */
        if (one->hStream == NULL) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        CUresult result = stub_launch(stub_function(one->function),
                                      product(one->gridDimX, one->gridDimY, one->gridDimZ), &kernel, one->hStream);
        if (result != CUDA_SUCCESS) {
            return result;
        }
    }
    return CUDA_SUCCESS;
}

/* The oldest ways: the block's shape was set on the function before; here it is 1. */
static CUresult launch_grid(CUfunction function, int width, int height, CUstream stream) {
    CUDA_KERNEL_NODE_PARAMS_v2 kernel = KERNEL(function, (unsigned int)width, (unsigned int)height, 1, 1, 1, 1, 0, NULL, NULL);
    return stub_launch(stub_function(function), (uint64_t)width * (uint64_t)height, &kernel, stub_stream(stream, false));
}

CUresult cuFuncSetBlockShape(CUfunction function, int x, int y, int z) {
    ENTER(cuFuncSetBlockShape);
    return CUDA_SUCCESS;
}

CUresult cuLaunch(CUfunction function) {
    ENTER(cuLaunch);
    return launch_grid(function, 1, 1, NULL);
}

CUresult cuLaunchGrid(CUfunction function, int width, int height) {
    ENTER(cuLaunchGrid);
    return launch_grid(function, width, height, NULL);
}

CUresult cuLaunchGridAsync(CUfunction function, int width, int height, CUstream stream) {
    ENTER(cuLaunchGridAsync);
    return launch_grid(function, width, height, stream);
}

PAIR(cuLaunchHostFunc, _ptsz, (CUstream handle, CUhostFn function, void *data), {
    struct CUstream_st *stream = stub_stream(handle, per_thread);
    if (stream == NULL) {
        return stub_check_context();
    }
    if (stream->capture != NULL) {
        stub_add_node(stream->capture->graph, CU_GRAPH_NODE_TYPE_HOST, NULL, 0);
        return CUDA_SUCCESS;
    }
    function(data);
    return CUDA_SUCCESS;
})
