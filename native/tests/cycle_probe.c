/* A program that launches and waits in every way there is, told line by line what to do; it answers each line with the
 * driver's result, a value (a child its number), and 0.
 */
#define _GNU_SOURCE
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define BYTES 4096
#define NUM_DEVICES 2

static CUcontext contexts[NUM_DEVICES];
static CUfunction kernels[NUM_DEVICES], long_kernel;
static CUdeviceptr device_memory[2];
static CUarray array;
static CUstream stream;
static CUevent event;
static char host_memory[BYTES];
static void *pinned_memory;

#define MUST(call)                                                                                                     \
    do {                                                                                                               \
        CUresult must_result = (call);                                                                                 \
        if (must_result != CUDA_SUCCESS) {                                                                             \
            fprintf(stderr, "%d: %s said %d\n", __LINE__, #call, (int)must_result);                                    \
            exit(3);                                                                                                   \
        }                                                                                                              \
    } while (0)

static void begin(void) {
    int num_devices = 0;
    MUST(cuInit(0));
    MUST(cuDeviceGetCount(&num_devices));
    for (int i = NUM_DEVICES - 1; i >= 0; i--) {
        CUmodule module;
        if (i < num_devices) {
            MUST(cuDevicePrimaryCtxRetain(&contexts[i], i));
            MUST(cuCtxSetCurrent(contexts[i]));
            MUST(cuModuleLoadData(&module, "probe"));
            MUST(cuModuleGetFunction(&kernels[i], module, "layer@1000"));
            MUST(cuModuleGetFunction(&long_kernel, module, "layer@30000000"));
        }
    }
    const CUDA_ARRAY_DESCRIPTOR shape = {BYTES / 4, 1, CU_AD_FORMAT_FLOAT, 1};
    MUST(cuMemAlloc_v2(&device_memory[0], BYTES));
    MUST(cuMemAlloc_v2(&device_memory[1], BYTES));
    MUST(cuMemAllocHost_v2(&pinned_memory, BYTES));
    MUST(cuArrayCreate_v2(&array, &shape));
    MUST(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    MUST(cuEventCreate(&event, CU_EVENT_DEFAULT));
    MUST(cuEventRecord(event, stream));
}

static CUresult launch(int device, CUstream where) {
    return cuLaunchKernel(kernels[device], 1, 1, 1, 32, 1, 1, 0, where, NULL, NULL);
}

/* A copy of rows from the device: to plain host memory, to device memory, or to an address that says nothing itself. */
static CUresult copy_rows(const char *way, bool is_unaligned, bool per_thread) {
    CUDA_MEMCPY2D rows = {.srcMemoryType = CU_MEMORYTYPE_DEVICE,
                          .srcDevice = device_memory[0],
                          .dstMemoryType = CU_MEMORYTYPE_HOST,
                          .dstHost = host_memory,
                          .WidthInBytes = 64,
                          .Height = 2};
    CUDA_MEMCPY3D deep = {.srcMemoryType = CU_MEMORYTYPE_DEVICE,
                          .srcDevice = device_memory[0],
                          .dstMemoryType = CU_MEMORYTYPE_HOST,
                          .dstHost = host_memory,
                          .WidthInBytes = 64,
                          .Height = 2,
                          .Depth = 1};
    if (strstr(way, "_inside") != NULL) {
        rows.dstMemoryType = deep.dstMemoryType = CU_MEMORYTYPE_DEVICE;
        rows.dstDevice = deep.dstDevice = device_memory[1];
    } else if (strstr(way, "_unified") != NULL) {
        rows.dstMemoryType = deep.dstMemoryType = CU_MEMORYTYPE_UNIFIED;
        rows.dstDevice = deep.dstDevice = (CUdeviceptr)(uintptr_t)host_memory;
    }
    if (way[0] == '3') {
        return per_thread ? cuMemcpy3D_v2_ptds(&deep) : cuMemcpy3D_v2(&deep);
    } else if (is_unaligned) {
        return per_thread ? cuMemcpy2DUnaligned_v2_ptds(&rows) : cuMemcpy2DUnaligned_v2(&rows);
    }
    return per_thread ? cuMemcpy2D_v2_ptds(&rows) : cuMemcpy2D_v2(&rows);
}

static CUresult wait_for(const char *way) {
    CUdeviceptr host = (CUdeviceptr)(uintptr_t)host_memory;
    bool per_thread = strstr(way, "_per_thread") != NULL;
    if (strcmp(way, "context") == 0) {
        return cuCtxSynchronize();
    } else if (strcmp(way, "context_v2") == 0) {
        return cuCtxSynchronize_v2(contexts[0]);
    } else if (strncmp(way, "stream", 6) == 0) {
        return per_thread ? cuStreamSynchronize_ptsz(stream) : cuStreamSynchronize(stream);
    } else if (strcmp(way, "event") == 0) {
        return cuEventSynchronize(event);
    } else if (strncmp(way, "to_host", 7) == 0) {
        return per_thread ? cuMemcpyDtoH_v2_ptds(host_memory, device_memory[0], 64)
                          : cuMemcpyDtoH_v2(host_memory, device_memory[0], 64);
    } else if (strncmp(way, "array_to_host", 13) == 0) {
        return per_thread ? cuMemcpyAtoH_v2_ptds(host_memory, array, 0, 64) : cuMemcpyAtoH_v2(host_memory, array, 0, 64);
    } else if (strncmp(way, "unified", 7) == 0) {
        return per_thread ? cuMemcpy_ptds(host, device_memory[0], 64) : cuMemcpy(host, device_memory[0], 64);
    } else if (strncmp(way, "2d", 2) == 0 || strncmp(way, "3d", 2) == 0) {
        return copy_rows(way, strstr(way, "unaligned") != NULL, per_thread);
    } else if (strcmp(way, "inside") == 0) {
        return cuMemcpy(device_memory[1], device_memory[0], 64);
    } else if (strcmp(way, "to_device") == 0) {
        return cuMemcpyHtoD_v2(device_memory[0], host_memory, 64);
    } else if (strcmp(way, "async") == 0) {
        return cuMemcpyDtoHAsync_v2(pinned_memory, device_memory[0], 64, stream);
    } else if (strcmp(way, "query") == 0) {
        return cuStreamQuery(NULL);
    } else if (strncmp(way, "look", 4) == 0) { /* until there is nothing left to do */
        CUresult result = CUDA_ERROR_NOT_READY;
        while (result == CUDA_ERROR_NOT_READY) {
            result = per_thread ? cuStreamQuery_ptsz(stream) : cuStreamQuery(stream);
        }
        return result;
    } else if (strcmp(way, "event_query") == 0) {
        return cuEventQuery(event);
    }
    return CUDA_ERROR_NOT_FOUND;
}

#define NUM_WAITERS 4
static pthread_barrier_t together;
static int num_rounds;

static void *wait_in_thread(void *number) {
    MUST(cuCtxSetCurrent(contexts[0]));
    for (int i = 0; i < num_rounds; i++) {
        if (number == &together) { /* one of them launches for all */
            MUST(launch(0, NULL));
        }
        pthread_barrier_wait(&together);
        MUST(cuCtxSynchronize());
        pthread_barrier_wait(&together);
    }
    return NULL;
}

static CUresult many_wait(int rounds) {
    pthread_t threads[NUM_WAITERS];
    num_rounds = rounds;
    pthread_barrier_init(&together, NULL, NUM_WAITERS);
    for (int i = 0; i < NUM_WAITERS; i++) {
        pthread_create(&threads[i], NULL, wait_in_thread, i == 0 ? &together : NULL);
    }
    for (int i = 0; i < NUM_WAITERS; i++) {
        pthread_join(threads[i], NULL);
    }
    pthread_barrier_destroy(&together);
    return CUDA_SUCCESS;
}

static CUresult obey(const char *word, const char *more) {
    CUgraph graph;
    size_t total_bytes;
    if (strcmp(word, "launch") == 0) {
        return launch(0, NULL);
    } else if (strcmp(word, "launch_long") == 0) {
        return cuLaunchKernel(long_kernel, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL);
    } else if (strcmp(word, "device") == 0) {
        return cuCtxSetCurrent(contexts[atoi(more)]);
    } else if (strcmp(word, "launch_on") == 0) {
        return launch(atoi(more), NULL);
    } else if (strcmp(word, "wait") == 0) {
        return wait_for(more);
    } else if (strcmp(word, "total") == 0) {
        return cuDeviceTotalMem_v2(&total_bytes, atoi(more));
    } else if (strcmp(word, "many_wait") == 0) {
        return many_wait(atoi(more));
    } else if (strcmp(word, "capture") == 0) {
        return cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED);
    } else if (strcmp(word, "launch_captured") == 0) {
        return launch(0, stream);
    } else if (strcmp(word, "end_capture") == 0) {
        CUresult result = cuStreamEndCapture(stream, &graph);
        return result == CUDA_SUCCESS ? cuGraphDestroy(graph) : result;
    }
    return CUDA_ERROR_NOT_FOUND;
}

int main(void) {
    char line[256], word[64], more[64];
    begin();
    MUST(cuEventSynchronize(event));
    while (fgets(line, sizeof(line), stdin) != NULL) {
        more[0] = 0;
        if (sscanf(line, "%63s %63s", word, more) < 1) {
            return 2;
        }
        if (strcmp(word, "fork") == 0) { /* the child goes on in the parent's place */
            pid_t child = fork();
            if (child > 0) {
                int status = 0;
                waitpid(child, &status, 0);
                return WIFEXITED(status) ? WEXITSTATUS(status) : 3;
            }
            begin();
            printf("[0, %d, 0]\n", (int)getpid());
        } else {
            printf("[%d, 0, 0]\n", (int)obey(word, more));
        }
        fflush(stdout);
    }
    return 0;
}
