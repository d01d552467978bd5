/* What a launch costs the thread that makes it, on each path, asked for by lines on the standard input.
 *
 * The functions are found as the CUDA runtime finds them: dlopen, dlsym of cuGetProcAddress_v2, and through that all
 * the rest with version and flags. Whether the interposition library is preloaded is not this program's business:
 * somebody runs it with and without, asks both by turns and compares. It begins with a line {"uuid": "HEX"} that names
 * the device; then every line "PATH COUNT" is answered with one of JSON:
 *   {"path": "legacy", "count": 10000, "cpu_ns": 123456, "wall_ns": 123999, "calls": 10000}
 * where `calls` is how many arrived at the driver, if it is one that counts (null otherwise). It runs on a device, too.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#include <dlfcn.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* A kernel that does nothing, for drivers that look into what they load. */
static const char image[] = ".version 6.0\n.target sm_50\n.address_size 64\n.visible .entry bench() { ret; }\n";

static void *driver;
static __typeof__(&cuGetProcAddress_v2) ask;
static uint64_t (*calls_of)(const char *symbol);

static struct {
    __typeof__(&cuLaunchKernel) named, legacy, ptsz;
    __typeof__(&cuLaunchKernelEx) ex, ex_ptsz;
    __typeof__(&cuLaunchCooperativeKernel) cooperative, cooperative_ptsz;
    __typeof__(&cuGraphLaunch) graph, graph_ptsz;
    __typeof__(&cuCtxSynchronize) synchronize;
} of;

static CUfunction function;
static CUgraphExec executable;
static CUuuid uuid;
static CUlaunchConfig config;

static void fail(const char *what, int code) {
    fprintf(stderr, "interpose: %s failed with %d\n", what, code);
    exit(2);
}

#define MUST(call)                                                                                                     \
    do {                                                                                                               \
        CUresult must = (call);                                                                                        \
        if (must != CUDA_SUCCESS) {                                                                                    \
            fail(#call, (int)must);                                                                                    \
        }                                                                                                              \
    } while (0)

static void *get(const char *name, int version, cuuint64_t flags) {
    void *address = NULL;
    CUdriverProcAddressQueryResult status;
    CUresult result = ask(name, &address, version, flags, &status);
    if (result != CUDA_SUCCESS || address == NULL) {
        fail(name, (int)result);
    }
    return address;
}

static void set_up(void) {
    CUdevice device;
    CUcontext context;
    CUmodule module;
    CUgraph graph;
    CUgraphNode node;
    MUST(((__typeof__(&cuInit))get("cuInit", 2000, 0))(0));
    MUST(((__typeof__(&cuDeviceGet))get("cuDeviceGet", 2000, 0))(&device, 0));
    MUST(((__typeof__(&cuDevicePrimaryCtxRetain))get("cuDevicePrimaryCtxRetain", 7000, 0))(&context, device));
    MUST(((__typeof__(&cuCtxSetCurrent))get("cuCtxSetCurrent", 4000, 0))(context));
    MUST(((__typeof__(&cuModuleLoadData))get("cuModuleLoadData", 2000, 0))(&module, image));
    MUST(((__typeof__(&cuModuleGetFunction))get("cuModuleGetFunction", 2000, 0))(&function, module, "bench"));
    MUST(((__typeof__(&cuDeviceGetUuid))get("cuDeviceGetUuid", 9020, 0))(&uuid, device));
    CUDA_KERNEL_NODE_PARAMS_v2 parameters;
    memset(&parameters, 0, sizeof parameters);
    parameters.func = function;
    parameters.gridDimX = parameters.gridDimY = parameters.gridDimZ = 1;
    parameters.blockDimX = 32;
    parameters.blockDimY = parameters.blockDimZ = 1;
    MUST(((__typeof__(&cuGraphCreate))get("cuGraphCreate", 10000, 0))(&graph, 0));
    MUST(((__typeof__(&cuGraphAddKernelNode_v2))get("cuGraphAddKernelNode", 12000, 0))(&node, graph, NULL, 0,
                                                                                      &parameters));
    MUST(((__typeof__(&cuGraphInstantiateWithFlags))get("cuGraphInstantiateWithFlags", 11040, 0))(&executable, graph,
                                                                                                 0));
    config.gridDimX = config.gridDimY = config.gridDimZ = 1;
    config.blockDimX = 32;
    config.blockDimY = config.blockDimZ = 1;
}

static void find_launches(void) {
    const cuuint64_t per_thread = CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
    of.named = (__typeof__(of.named))dlsym(driver, "cuLaunchKernel");
    of.legacy = (__typeof__(of.legacy))get("cuLaunchKernel", 4000, 0);
    of.ptsz = (__typeof__(of.ptsz))get("cuLaunchKernel", 7000, per_thread);
    of.ex = (__typeof__(of.ex))get("cuLaunchKernelEx", 11060, 0);
    of.ex_ptsz = (__typeof__(of.ex_ptsz))get("cuLaunchKernelEx", 11060, per_thread);
    of.cooperative = (__typeof__(of.cooperative))get("cuLaunchCooperativeKernel", 9000, 0);
    of.cooperative_ptsz = (__typeof__(of.cooperative_ptsz))get("cuLaunchCooperativeKernel", 9000, per_thread);
    of.graph = (__typeof__(of.graph))get("cuGraphLaunch", 10000, 0);
    of.graph_ptsz = (__typeof__(of.graph_ptsz))get("cuGraphLaunch", 10000, per_thread);
    of.synchronize = (__typeof__(of.synchronize))get("cuCtxSynchronize", 2000, 0);
}

#define KERNEL(name, launch)                                                                                           \
    static CUresult run_##name(void) {                                                                                 \
        return of.launch(function, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL);                                            \
    }
KERNEL(named, named)
KERNEL(legacy, legacy)
KERNEL(ptsz, ptsz)
/* Not the same work again and again: 256 shapes by turns, as in a large model. */
static CUresult run_shapes(void) {
    static unsigned number;
    number = (number + 1) % 256;
    return of.legacy(function, 1 + number, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL);
}
static CUresult run_ex(void) {
    return of.ex(&config, function, NULL, NULL);
}
static CUresult run_ex_ptsz(void) {
    return of.ex_ptsz(&config, function, NULL, NULL);
}
static CUresult run_cooperative(void) {
    return of.cooperative(function, 1, 1, 1, 32, 1, 1, 0, NULL, NULL);
}
static CUresult run_cooperative_ptsz(void) {
    return of.cooperative_ptsz(function, 1, 1, 1, 32, 1, 1, 0, NULL, NULL);
}
static CUresult run_graph(void) {
    return of.graph(executable, NULL);
}
static CUresult run_graph_ptsz(void) {
    return of.graph_ptsz(executable, NULL);
}

static const struct path {
    const char *name;
    const char *symbol; /* of the driver, under which a launch is counted there */
    CUresult (*run)(void);
} paths[] = {
    {"named", "cuLaunchKernel", run_named},
    {"legacy", "cuLaunchKernel", run_legacy},
    {"shapes", "cuLaunchKernel", run_shapes},
    {"ptsz", "cuLaunchKernel_ptsz", run_ptsz},
    {"ex", "cuLaunchKernelEx", run_ex},
    {"ex_ptsz", "cuLaunchKernelEx_ptsz", run_ex_ptsz},
    {"cooperative", "cuLaunchCooperativeKernel", run_cooperative},
    {"cooperative_ptsz", "cuLaunchCooperativeKernel_ptsz", run_cooperative_ptsz},
    {"graph", "cuGraphLaunch", run_graph},
    {"graph_ptsz", "cuGraphLaunch_ptsz", run_graph_ptsz},
};

static uint64_t clock_ns(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void measure(const struct path *path, uint64_t count) {
    uint64_t before = calls_of != NULL ? calls_of(path->symbol) : 0;
    uint64_t num_failed = 0;
    uint64_t wall_ns = clock_ns(CLOCK_MONOTONIC);
    uint64_t cpu_ns = clock_ns(CLOCK_THREAD_CPUTIME_ID);
    for (uint64_t k = 0; k < count; k++) {
        num_failed += path->run() != CUDA_SUCCESS;
    }
    cpu_ns = clock_ns(CLOCK_THREAD_CPUTIME_ID) - cpu_ns;
    wall_ns = clock_ns(CLOCK_MONOTONIC) - wall_ns;
    MUST(of.synchronize());
    if (num_failed != 0) {
        fail(path->name, (int)num_failed);
    }
    printf("{\"path\": \"%s\", \"count\": %llu, \"cpu_ns\": %llu, \"wall_ns\": %llu, \"calls\": ", path->name,
           (unsigned long long)count, (unsigned long long)cpu_ns, (unsigned long long)wall_ns);
    if (calls_of != NULL) {
        printf("%llu}\n", (unsigned long long)(calls_of(path->symbol) - before));
    } else {
        printf("null}\n");
    }
    fflush(stdout);
}

int main(void) {
    driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (driver == NULL) {
        fprintf(stderr, "interpose: %s\n", dlerror());
        return 3;
    }
    ask = (__typeof__(ask))dlsym(driver, "cuGetProcAddress_v2");
    calls_of = (__typeof__(calls_of))dlsym(driver, "stub_calls");
    if (ask == NULL) {
        fprintf(stderr, "interpose: this driver has no cuGetProcAddress_v2\n");
        return 3;
    }
    find_launches();
    set_up();
    printf("{\"uuid\": \"");
    for (int k = 0; k < 16; k++) {
        printf("%02x", (unsigned char)uuid.bytes[k]);
    }
    printf("\"}\n");
    fflush(stdout);
    char line[128];
    while (fgets(line, sizeof line, stdin) != NULL) {
        char name[64];
        unsigned long long count;
        if (sscanf(line, "%63s %llu", name, &count) != 2) {
            fail("reading", 0);
        }
        bool is_known = false;
        for (size_t k = 0; k < sizeof paths / sizeof paths[0] && !is_known; k++) {
            is_known = strcmp(paths[k].name, name) == 0;
            if (is_known) {
                measure(&paths[k], count);
            }
        }
        if (!is_known) {
            fail(name, 0);
        }
    }
    return 0;
}
