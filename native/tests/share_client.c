/* A program of a tenant, told what to do line by line; it answers each line with one line of JSON. It says its process
 * number first, and uses the device from its first order on.
 *
 *   run MILLISECONDS   launches kernels, one after the other, for so long, and waits for the device after every tenth
 *   launch NUMBER      so many launches, in the same way
 *   sync               waits for the device
 *   alloc MEGABYTES    allocates; free gives back what was allocated last
 *   fork               goes on as a child, which uses the device anew; the parent waits for it
 * Arguments: the device's number, and the name of the kernel (see stub_api.h).
 */
#include "stub_api.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MAX_ALLOCATIONS 64

static CUdevice device;
static CUfunction function;
static const char *kernel;
static CUdeviceptr allocations[MAX_ALLOCATIONS];
static int num_allocations;

static long long now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void must(CUresult result, const char *what) {
    if (result != CUDA_SUCCESS) {
        fprintf(stderr, "%s: %d\n", what, (int)result);
        exit(3);
    }
}

static void begin(const char *number) {
    CUcontext context;
    CUmodule module;
    must(cuInit(0), "cuInit");
    must(cuDeviceGet(&device, atoi(number)), "cuDeviceGet");
    must(cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
    must(cuCtxSetCurrent(context), "cuCtxSetCurrent");
    must(cuModuleLoadData(&module, "x"), "cuModuleLoadData");
    must(cuModuleGetFunction(&function, module, kernel), "cuModuleGetFunction");
}

/* Launches until one of the two is over, and says how long the longest launch took. */
static void launch(long most, long long limit_ns) {
    long num_launches = 0;
    long num_failed = 0;
    long long longest_ns = 0;
    long long began_ns = now_ns();
    for (long long at_ns = began_ns; num_launches < most && at_ns - began_ns < limit_ns;) {
        num_failed += cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL) != CUDA_SUCCESS;
        if (num_launches % 10 == 9) {
            num_failed += cuCtxSynchronize() != CUDA_SUCCESS;
        }
        long long after_ns = now_ns();
        longest_ns = after_ns - at_ns > longest_ns ? after_ns - at_ns : longest_ns;
        at_ns = after_ns;
        num_launches++;
    }
    printf("{\"launches\": %ld, \"failed\": %ld, \"longest_ns\": %lld, \"took_ns\": %lld}\n", num_launches, num_failed,
           longest_ns, now_ns() - began_ns);
}

static void allocate(size_t megabytes) {
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    if (num_allocations < MAX_ALLOCATIONS) {
        result = cuMemAlloc(&allocations[num_allocations], megabytes * 1000000);
        num_allocations += result == CUDA_SUCCESS;
    }
    printf("{\"result\": %d}\n", (int)result);
}

static void give_back(void) {
    CUresult result = num_allocations > 0 ? cuMemFree(allocations[--num_allocations]) : CUDA_ERROR_INVALID_VALUE;
    printf("{\"result\": %d}\n", (int)result);
}

static void obey(const char *order, long number) {
    if (strcmp(order, "run") == 0) {
        launch(1L << 40, number * 1000000LL);
    } else if (strcmp(order, "launch") == 0) {
        launch(number, 1LL << 60);
    } else if (strcmp(order, "sync") == 0) {
        printf("{\"result\": %d}\n", (int)cuCtxSynchronize());
    } else if (strcmp(order, "alloc") == 0) {
        allocate((size_t)number);
    } else if (strcmp(order, "free") == 0) {
        give_back();
    } else {
        exit(4);
    }
}

int main(int argc, char **argv) {
    char order[16];
    char line[64];
    if (argc < 3) {
        return 2;
    }
    kernel = argv[2];
    bool has_begun = false;
    printf("{\"pid\": %d}\n", (int)getpid());
    fflush(stdout);
    while (fgets(line, sizeof line, stdin) != NULL) {
        long number = 0;
        if (sscanf(line, "%15s %ld", order, &number) < 1) {
            continue;
        }
        if (!has_begun) {
            begin(argv[1]);
            has_begun = true;
        }
        if (strcmp(order, "fork") == 0) {
            pid_t child = fork();
            if (child != 0) {
                int status = 0;
                waitpid(child, &status, 0);
                return WIFEXITED(status) ? WEXITSTATUS(status) : 5;
            }
            num_allocations = 0;
            begin(argv[1]);
            printf("{\"pid\": %d}\n", (int)getpid());
        } else {
            obey(order, number);
        }
        fflush(stdout);
    }
    return 0;
}
