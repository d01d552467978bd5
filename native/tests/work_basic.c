/* Launches of several kernels, and what each was counted as. The first argument chooses the scene. */
#include "work_probe.h"

#include <sys/wait.h>

static void learn(void) {
    CUfunction kernel = probe_kernel("layer@250000");
    say("first_ns", probe_launch(kernel, 64, NULL));
    MUST(cuCtxSynchronize());
    probe_loop(kernel, 64, 40);
    say("settled_ns", own_used_ns());
    say("learned_ns", probe_launch(kernel, 64, NULL));
    say("busy_ns", stub_busy_ns(0));
}

/* A kernel's time changes while it runs, for other data or because others run beside it. */
static void follow(void) {
    CUfunction kernel = probe_kernel("layer@200000");
    probe_loop(kernel, 64, 200);
    say("before_ns", probe_launch(kernel, 64, NULL));
    stub_set_kernel_ns(kernel, 50000, 0);
    uint64_t measured_ns = atomic_load(&own_files[0].usage->measured_ns);
    int num_down = 0;
    while (num_down < 4000 && probe_launch(kernel, 64, NULL) > 80000) {
        MUST(cuCtxSynchronize());
        num_down++;
    }
    say("num_down", num_down);
    probe_loop(kernel, 64, 2000);
    say("low_ns", probe_launch(kernel, 64, NULL));
    stub_set_kernel_ns(kernel, 200000, 0);
    int num_up = 0;
    while (num_up < 20000 && probe_launch(kernel, 64, NULL) < 170000) {
        MUST(cuCtxSynchronize());
        num_up++;
    }
    say("num_up", num_up);
    say("was_measured", atomic_load(&own_files[0].usage->measured_ns) > measured_ns);
}

static void shapes(void) {
    CUfunction kernel = probe_kernel("matmul@100*");
    probe_loop(kernel, 1, 20);
    probe_loop(kernel, 10000, 60);
    probe_loop(kernel, 2000, 60);
    say("one_ns", probe_launch(kernel, 1, NULL));
    say("many_ns", probe_launch(kernel, 10000, NULL));
    say("some_ns", probe_launch(kernel, 2000, NULL));
    /* A shape that was never seen, of a function that is known by others. */
    say("unseen_ns", probe_launch(kernel, 5000, NULL));
}

static void huge(void) {
    CUfunction one = probe_kernel("tiny@1000");
    CUfunction other = probe_kernel("huge@1000");
    uint64_t before_ns = own_used_ns();
    MUST(cuLaunchKernel(one, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL));
    say("one_block_ns", own_used_ns() - before_ns);
    before_ns = own_used_ns();
    MUST(cuLaunchKernel(other, 65536, 65536, 1, 1, 1, 1, 0, NULL, NULL, NULL)); /* 2^32 blocks */
    say("two_to_32_ns", own_used_ns() - before_ns);
    before_ns = own_used_ns();
    MUST(cuLaunchKernel(other, 2147483647, 65535, 65535, 1024, 1, 1, 0, NULL, NULL, NULL));
    say("largest_ns", own_used_ns() - before_ns);
}

static void many(void) {
    CUfunction kernel = probe_kernel("small@3000");
    for (int i = 0; i < 200000; i++) {
        MUST(probe_try(kernel, 64, NULL));
        if (i % 50 == 49) {
            MUST(cuCtxSynchronize());
        }
    }
    say("last_ns", probe_launch(kernel, 64, NULL));
    say("events", stub_alive("events"));
}

static void never_synchronised(void) {
    CUfunction kernel = probe_kernel("small@1000000000");
    for (int i = 0; i < 20000; i++) {
        MUST(probe_try(kernel, 64, NULL));
    }
    say("events", stub_alive("events"));
}

static void failing(void) {
    CUfunction kernel = probe_kernel("layer@100000");
    int num_failed = 0;
    for (int i = 0; i < 60; i++) {
        num_failed += probe_try(kernel, 64, NULL) != CUDA_SUCCESS;
        MUST(cuCtxSynchronize());
    }
    say("num_failed", num_failed);
    say("used_ns", own_used_ns());
    say("busy_ns", stub_busy_ns(0));
}

static void twins(void) {
    CUfunction kernel = probe_kernel("layer@100000");
    CUstream stream;
    MUST(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    for (int i = 0; i < 50; i++) {
        MUST(cuLaunchKernel_ptsz(kernel, 64, 1, 1, 128, 1, 1, 0, NULL, NULL, NULL));
        MUST(cuLaunchKernel_ptsz(kernel, 32, 1, 1, 128, 1, 1, 0, stream, NULL, NULL));
        MUST(cuCtxSynchronize());
    }
    say("last_ns", probe_launch(kernel, 64, NULL));
    say("other_ns", probe_launch(kernel, 32, NULL));
    say("legacy_records", stub_calls("cuEventRecord"));
    say("twin_records", stub_calls("cuEventRecord_ptsz"));
}

/* Contexts come and go, and their events with them. */
static void contexts(void) {
    CUcontext context;
    CUmodule module;
    CUfunction kernel;
    uint64_t most_events = 0;
    for (int i = 0; i < 40; i++) {
        MUST(cuCtxCreate_v2(&context, 0, 0));
        MUST(cuModuleLoadData(&module, "another"));
        MUST(cuModuleGetFunction(&kernel, module, "layer@30000"));
        probe_loop(kernel, 64, 40);
        most_events = stub_alive("events") > most_events ? stub_alive("events") : most_events;
        MUST(cuCtxDestroy_v2(context));
    }
    kernel = probe_kernel("layer@30000");
    probe_loop(kernel, 64, 100);
    say("last_ns", probe_launch(kernel, 64, NULL));
    say("most_events", most_events);
}

/* Two devices in turn: each context has events of its own. */
static void devices(void) {
    CUcontext contexts[2];
    CUmodule module;
    CUfunction kernels[2];
    CUdevice device;
    for (int i = 0; i < 2; i++) {
        MUST(cuDeviceGet(&device, i));
        MUST(cuDevicePrimaryCtxRetain(&contexts[i], device));
        MUST(cuCtxSetCurrent(contexts[i]));
        probe_wait();
        MUST(cuModuleLoadData(&module, "each"));
        MUST(cuModuleGetFunction(&kernels[i], module, i == 0 ? "layer@40000" : "layer@90000"));
    }
    for (int i = 0; i < 200; i++) {
        MUST(cuCtxSetCurrent(contexts[i % 2]));
        MUST(probe_try(kernels[i % 2], 64, NULL));
        MUST(cuCtxSynchronize());
    }
    for (int i = 0; i < 2; i++) {
        say(i == 0 ? "first_used_ns" : "second_used_ns", atomic_load(&own_files[i].usage->used_ns));
        say(i == 0 ? "first_measured_ns" : "second_measured_ns", atomic_load(&own_files[i].usage->measured_ns));
    }
}

/* A child that begins anew, forked while its parent had measurements under way and a stream that captured. */
static void forked(void) {
    CUstream stream;
    CUcontext context;
    CUdevice device;
    CUmodule module;
    CUfunction kernel = probe_kernel("layer@50000");
    MUST(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    for (int i = 0; i < 40; i++) {
        MUST(probe_try(kernel, 64, NULL));
    }
    MUST(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    fflush(stdout);
    pid_t child = fork();
    if (child != 0) {
        int status = 0;
        waitpid(child, &status, 0);
        exit(WIFEXITED(status) ? WEXITSTATUS(status) : 99);
    }
    uint64_t num_records = stub_calls("cuEventRecord");
    uint64_t num_asked = stub_calls("cuStreamIsCapturing");
    MUST(cuInit(0));
    MUST(cuDeviceGet(&device, 0));
    MUST(cuDevicePrimaryCtxRetain(&context, device));
    MUST(cuCtxSetCurrent(context));
    probe_wait();
    MUST(cuModuleLoadData(&module, "the child's"));
    MUST(cuModuleGetFunction(&kernel, module, "layer@70000"));
    probe_loop(kernel, 64, 60);
    say("last_ns", probe_launch(kernel, 64, NULL));
    say("child_records", stub_calls("cuEventRecord") - num_records);
    say("child_asked", stub_calls("cuStreamIsCapturing") - num_asked);
}

int main(int count, char **values) {
    const struct {
        const char *name;
        void (*play)(void);
    } scenes[] = {{"learn", learn},     {"follow", follow},   {"shapes", shapes},
                  {"huge", huge},       {"many", many},       {"never_synchronised", never_synchronised},
                  {"failing", failing}, {"twins", twins},     {"contexts", contexts},
                  {"devices", devices}, {"forked", forked}};
    probe_begin(UINT64_MAX / 4);
    for (size_t i = 0; count == 2 && i < sizeof(scenes) / sizeof(scenes[0]); i++) {
        if (strcmp(scenes[i].name, values[1]) == 0) {
            scenes[i].play();
            said();
            return 0;
        }
    }
    return 2;
}
