/* The faults of earlier interposition libraries on the way from a program to the driver, replayed one by one.
 *
 * The functions are looked for as the CUDA runtime looks for them: the driver by dlopen, cuGetProcAddress_v2 in it by
 * dlsym, everything else through that, every launch twice, for both kinds of default streams.
 */
#include "work_probe.h"

#include <dlfcn.h>
#include <inttypes.h>

/* The first question to the daemon is given up after 50 ms, and a busy machine may take longer to answer: launch until
 * the bucket is there. */
static void begin_with_bucket(void) {
    probe_begin(UINT64_MAX / 2);
    CUfunction warm = probe_kernel("warm@1000");
    for (int i = 0; i < 500 && own_launches() == 0; i++) {
        for (int k = 0; k < 32; k++) {
            MUST(probe_try(warm, 1, NULL));
        }
        usleep(10000);
    }
    if (own_launches() == 0) {
        fprintf(stderr, "the daemon in this process does not answer\n");
        exit(5);
    }
}

typedef CUresult (*get_v1)(const char *, void **, int, cuuint64_t);
typedef CUresult (*get_v2)(const char *, void **, int, cuuint64_t, CUdriverProcAddressQueryResult *);

static void *driver;
static get_v2 get_address;

static void *found_by_name(const char *name) {
    void *address = dlsym(driver, name);
    if (address == NULL) {
        fprintf(stderr, "dlsym does not find %s\n", name);
        exit(4);
    }
    return address;
}

static void *found(const char *api, int version, cuuint64_t flags) {
    void *address = NULL;
    CUdriverProcAddressQueryResult status;
    MUST(get_address(api, &address, version, flags, &status));
    return address;
}

static void find_driver(void) {
    driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (driver == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        exit(4);
    }
    get_address = (get_v2)found_by_name("cuGetProcAddress_v2");
}

/* --- every path counts, and calls its own twin --------------------------------------------------------------------- */

static CUfunction kernel;
static CUgraphExec exec;

static CUresult by_kernel(void *function) {
    return ((__typeof__(&cuLaunchKernel))function)(kernel, 2, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL);
}

static CUresult by_cooperative(void *function) {
    return ((__typeof__(&cuLaunchCooperativeKernel))function)(kernel, 2, 1, 1, 32, 1, 1, 0, NULL, NULL);
}

static CUresult by_config(void *function) {
    CUlaunchConfig config = {.gridDimX = 2, .gridDimY = 1, .gridDimZ = 1, .blockDimX = 32, .blockDimY = 1, .blockDimZ = 1};
    return ((__typeof__(&cuLaunchKernelEx))function)(&config, kernel, NULL, NULL);
}

static CUresult by_devices(void *function) {
    static CUstream stream;
    if (stream == NULL) {
        MUST(cuStreamCreate(&stream, 0));
    }
    CUDA_LAUNCH_PARAMS one = {.function = kernel, .gridDimX = 2, .gridDimY = 1, .gridDimZ = 1, .blockDimX = 32,
                              .blockDimY = 1, .blockDimZ = 1, .hStream = stream};
    return ((__typeof__(&cuLaunchCooperativeKernelMultiDevice))function)(&one, 1, 0);
}

static CUresult by_graph(void *function) {
    return ((__typeof__(&cuGraphLaunch))function)(exec, NULL);
}

static CUresult by_launch(void *function) {
    return ((__typeof__(&cuLaunch))function)(kernel);
}

static CUresult by_grid(void *function) {
    return ((__typeof__(&cuLaunchGrid))function)(kernel, 2, 1);
}

static CUresult by_grid_async(void *function) {
    return ((__typeof__(&cuLaunchGridAsync))function)(kernel, 2, 1, NULL);
}

static void make_graph(void) {
    CUgraph graph;
    CUgraphNode node;
    MUST(cuGraphCreate(&graph, 0));
    for (int i = 0; i < 5; i++) {
        CUDA_KERNEL_NODE_PARAMS_v2 one = {.func = kernel, .gridDimX = 2, .gridDimY = 1, .gridDimZ = 1, .blockDimX = 32,
                                          .blockDimY = 1, .blockDimZ = 1};
        MUST(cuGraphAddKernelNode_v2(&node, graph, NULL, 0, &one));
    }
    MUST(cuGraphInstantiateWithFlags(&exec, graph, 0));
}

static const struct path {
    const char *symbol; /* that the driver must be called by */
    const char *api;
    int version;
    cuuint64_t flags;
    CUresult (*launch)(void *function);
} paths[] = {
    {"cuLaunchKernel", "cuLaunchKernel", 4000, 0, by_kernel},
    {"cuLaunchKernel_ptsz", "cuLaunchKernel", 7000, 2, by_kernel},
    {"cuLaunchKernelEx", "cuLaunchKernelEx", 11060, 0, by_config},
    {"cuLaunchKernelEx_ptsz", "cuLaunchKernelEx", 11060, 2, by_config},
    {"cuLaunchCooperativeKernel", "cuLaunchCooperativeKernel", 9000, 0, by_cooperative},
    {"cuLaunchCooperativeKernel_ptsz", "cuLaunchCooperativeKernel", 9000, 2, by_cooperative},
    {"cuLaunchCooperativeKernelMultiDevice", "cuLaunchCooperativeKernelMultiDevice", 9000, 0, by_devices},
    {"cuGraphLaunch", "cuGraphLaunch", 10000, 0, by_graph},
    {"cuGraphLaunch_ptsz", "cuGraphLaunch", 10000, 2, by_graph},
    {"cuLaunch", "cuLaunch", 2000, 0, by_launch},
    {"cuLaunchGrid", "cuLaunchGrid", 2000, 0, by_grid},
    {"cuLaunchGridAsync", "cuLaunchGridAsync", 2000, 0, by_grid_async},
};

static void launch_on(const struct path *path, const char *way, void *function) {
    enum { NUM = 100 };
    uint64_t counted = own_launches();
    uint64_t called = stub_calls(path->symbol);
    for (int i = 0; i < NUM; i++) {
        MUST(path->launch(function));
    }
    char name[96];
    snprintf(name, sizeof(name), "%s %s", path->symbol, way);
    say(name, (own_launches() - counted) * 1000 + (stub_calls(path->symbol) - called));
}

static void launch_by_all_paths(void) {
    find_driver();
    begin_with_bucket();
    kernel = probe_kernel("layer@1000");
    make_graph();
    for (size_t i = 0; i < sizeof(paths) / sizeof(paths[0]); i++) {
        launch_on(&paths[i], "asked", found(paths[i].api, paths[i].version, paths[i].flags));
        launch_on(&paths[i], "named", found_by_name(paths[i].symbol));
    }
    said();
}

/* --- what cuGetProcAddress says ------------------------------------------------------------------------------------ */

static uint64_t answer_of(const char *api, int version, cuuint64_t flags) {
    void *address = NULL;
    CUdriverProcAddressQueryResult status = 77;
    CUresult result = get_address(api, &address, version, flags, &status);
    return (uint64_t)result * 1000 + (uint64_t)status * 10 + (address != NULL);
}

static void ask_for_addresses(void) {
    find_driver();
    say("known", answer_of("cuLaunchKernel", 13000, 0));
    say("unknown", answer_of("cuNoSuchThing", 13000, 0));
    say("too_old", answer_of("cuLaunchKernelEx", 11000, 0));
    say("wrong_flags", answer_of("cuLaunchKernel", 13000, 8));
    void *other = NULL;
    MUST(get_address("cuMemHostAlloc", &other, 13000, 0, NULL));
    say("others_are_the_drivers", other == found_by_name("cuMemHostAlloc"));
    get_v2 second = (get_v2)found("cuGetProcAddress", 12000, 0);
    get_v1 first = (get_v1)found("cuGetProcAddress", 11030, 0);
    void *by_second = NULL, *by_first = NULL;
    MUST(second("cuLaunchKernel", &by_second, 7000, 2, NULL));
    MUST(first("cuLaunchKernel", &by_first, 4000, 0));
    say("second_is_ours", by_second == (void *)cuLaunchKernel_ptsz);
    say("first_is_ours", by_first == (void *)cuLaunchKernel);
    say("twins_differ", by_second != by_first);
    said();
}

/* --- without cuGetProcAddress_v2, or any --------------------------------------------------------------------------- */

static void fall_back_to_names(void) {
    driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    say("has_second", driver == NULL || dlsym(driver, "cuGetProcAddress_v2") != NULL);
    say("has_first", driver == NULL || dlsym(driver, "cuGetProcAddress") != NULL);
    say("has_config", driver == NULL || dlsym(driver, "cuLaunchKernelEx") != NULL);
    begin_with_bucket();
    kernel = probe_kernel("layer@1000");
    launch_on(&paths[0], "named", found_by_name("cuLaunchKernel"));
    launch_on(&paths[1], "named", found_by_name("cuLaunchKernel_ptsz"));
    said();
}

/* --- what comes first ---------------------------------------------------------------------------------------------- */

/* The first of our functions that is called is the launch itself: nothing before it leads through us. */
static void begin_with(const char *what) {
    CUcontext context;
    CUmodule module;
    int version = 0, count = 0;
    driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (strcmp(what, "version") == 0) {
        MUST(((__typeof__(&cuDriverGetVersion))found_by_name("cuDriverGetVersion"))(&version));
    }
    MUST(((__typeof__(&cuInit))found_by_name("cuInit"))(0));
    MUST(((__typeof__(&cuDeviceGetCount))found_by_name("cuDeviceGetCount"))(&count));
    MUST(((__typeof__(&cuDevicePrimaryCtxRetain))found_by_name("cuDevicePrimaryCtxRetain"))(&context, 0));
    MUST(((__typeof__(&cuCtxSetCurrent))found_by_name("cuCtxSetCurrent"))(context));
    MUST(((__typeof__(&cuModuleLoadData))found_by_name("cuModuleLoadData"))(&module, "x"));
    MUST(((__typeof__(&cuModuleGetFunction))found_by_name("cuModuleGetFunction"))(&kernel, module, "layer"));
    MUST(by_kernel((void *)cuLaunchKernel));
    say("kernels", stub_kernels(0));
    printf("}\n");
}

/* --- what a launch costs ------------------------------------------------------------------------------------------- */

static uint64_t used_by(CUfunction function, unsigned x, unsigned y, unsigned threads) {
    uint64_t before_ns = own_used_ns();
    MUST(cuLaunchKernel(function, x, y, 1, threads, 1, 1, 0, NULL, NULL, NULL));
    return own_used_ns() - before_ns;
}

static void launch_big_grids(void) {
    begin_with_bucket();
    uint64_t blocks = stub_blocks(0);
    say("one_block", used_by(probe_kernel("first"), 1, 1, 128));
    say("all_blocks", used_by(probe_kernel("second"), 65536, 65536, 128));
    say("blocks", stub_blocks(0) - blocks);
    said();
}

/* Two kernels of the same blocks and threads, one ten times as long: what both count as when they have been measured. */
static void learn(void) {
    begin_with_bucket();
    CUfunction brief = probe_kernel("brief@100000"), lengthy = probe_kernel("lengthy@1000000");
    probe_loop(brief, 64, 300);
    probe_loop(lengthy, 64, 300);
    uint64_t used_ns = own_used_ns();
    probe_loop(brief, 64, 10);
    say("brief_ns", (own_used_ns() - used_ns) / 10);
    used_ns = own_used_ns();
    probe_loop(lengthy, 64, 10);
    say("lengthy_ns", (own_used_ns() - used_ns) / 10);
    said();
}

/* --- kernels of a library, launched without ever becoming functions ------------------------------------------------ */

static void launch_from_library(void) {
    CUlibrary library;
    CUkernel handle;
    begin_with_bucket();
    MUST(cuLibraryLoadData(&library, "x", NULL, NULL, 0, NULL, NULL, 0));
    MUST(cuLibraryGetKernel(&handle, library, "layer@1000"));
    kernel = (CUfunction)handle;
    launch_on(&paths[0], "named", (void *)cuLaunchKernel);
    said();
}

/* --- without a daemon ---------------------------------------------------------------------------------------------- */

static void launch_alone(void) {
    CUcontext context;
    MUST(cuInit(0));
    MUST(cuDevicePrimaryCtxRetain(&context, 0));
    MUST(cuCtxSetCurrent(context));
    MUST(cuModuleLoadData(&probe_module, "x"));
    kernel = probe_kernel("layer@1000");
    for (int i = 0; i < 10000; i++) {
        MUST(by_kernel((void *)cuLaunchKernel));
    }
    say("kernels", stub_kernels(0));
    printf("}\n");
}

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "";
    if (strcmp(what, "paths") == 0) {
        launch_by_all_paths();
    } else if (strcmp(what, "addresses") == 0) {
        ask_for_addresses();
    } else if (strcmp(what, "names") == 0) {
        fall_back_to_names();
    } else if (strcmp(what, "begin") == 0 && argc > 2) {
        begin_with(argv[2]);
    } else if (strcmp(what, "grids") == 0) {
        launch_big_grids();
    } else if (strcmp(what, "learn") == 0) {
        learn();
    } else if (strcmp(what, "library") == 0) {
        launch_from_library();
    } else if (strcmp(what, "alone") == 0) {
        launch_alone();
    } else {
        return 2;
    }
    return 0;
}
