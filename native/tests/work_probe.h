/* What the programs about work and graphs have in common: a context, kernels by name, checks that say what failed. */
#ifndef WORK_PROBE_H
#define WORK_PROBE_H

#define _GNU_SOURCE
/* All versions of every function by their own names. */
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#include <stdbool.h>

#include "own_daemon.h"
#include "stub_api.h"

#define MUST(call)                                                                                                     \
    do {                                                                                                               \
        CUresult must_result = (call);                                                                                 \
        if (must_result != CUDA_SUCCESS) {                                                                             \
            fprintf(stderr, "%s:%d: %s said %d\n", __FILE__, __LINE__, #call, (int)must_result);                       \
            exit(3);                                                                                                   \
        }                                                                                                              \
    } while (0)

static CUmodule probe_module;

/* Until the library has this device's files: on a busy machine its first question may go unanswered for too long. It is
 * seen by a memory limit for a moment, without any launch. */
static void probe_wait(void) {
    const uint64_t limit_bytes = 123456789;
    size_t free_bytes, total_bytes = 0;
    for (int tries = 0; tries < 500 && total_bytes != limit_bytes; tries++) {
        for (unsigned i = 0; i < atomic_load(&own_num_files); i++) {
            atomic_store(&own_files[i].grant->memory_limit_bytes, limit_bytes);
        }
        MUST(cuMemGetInfo_v2(&free_bytes, &total_bytes));
        if (total_bytes != limit_bytes) {
            usleep(20000);
        }
    }
    for (unsigned i = 0; i < atomic_load(&own_num_files); i++) {
        atomic_store(&own_files[i].grant->memory_limit_bytes, 0);
    }
    if (total_bytes != limit_bytes) {
        fprintf(stderr, "the library has not found the daemon\n");
        exit(3);
    }
}

static CUcontext probe_begin(uint64_t granted_ns) {
    CUcontext context;
    CUdevice device;
    own_daemon_start(granted_ns);
    MUST(cuInit(0));
    MUST(cuDeviceGet(&device, 0));
    MUST(cuDevicePrimaryCtxRetain(&context, device));
    MUST(cuCtxSetCurrent(context));
    probe_wait();
    MUST(cuModuleLoadData(&probe_module, "probe"));
    return context;
}

static inline CUfunction probe_kernel(const char *name) {
    CUfunction function;
    MUST(cuModuleGetFunction(&function, probe_module, name));
    return function;
}

static inline CUresult probe_try(CUfunction function, unsigned blocks, CUstream stream) {
    return cuLaunchKernel(function, blocks, 1, 1, 128, 1, 1, 0, stream, NULL, NULL);
}

/* One launch; what it was counted as (also what a measurement settled meanwhile). */
static inline uint64_t probe_launch(CUfunction function, unsigned blocks, CUstream stream) {
    uint64_t before_ns = own_used_ns();
    MUST(probe_try(function, blocks, stream));
    return own_used_ns() - before_ns;
}

/* Launch and wait, again and again, as often as asked. */
static inline void probe_loop(CUfunction function, unsigned blocks, int count) {
    for (int i = 0; i < count; i++) {
        MUST(probe_try(function, blocks, NULL));
        MUST(cuCtxSynchronize());
    }
}

static inline void say(const char *name, uint64_t value) {
    static bool is_open;
    printf("%s\"%s\": %llu", is_open ? ", " : "{", name, (unsigned long long)value);
    is_open = true;
}

static inline void said(void) {
    say("launches", own_launches());
    say("measured_ns", atomic_load(&own_num_files) == 0 ? 0 : atomic_load(&own_files[0].usage->measured_ns));
    say("estimated_ns", atomic_load(&own_num_files) == 0 ? 0 : atomic_load(&own_files[0].usage->estimated_ns));
    say("event_records", stub_calls("cuEventRecord") + stub_calls("cuEventRecord_ptsz"));
    say("event_waits", stub_calls("cuEventSynchronize"));
    say("violations", stub_violations());
    printf("}\n");
    fflush(stdout);
}

#endif
