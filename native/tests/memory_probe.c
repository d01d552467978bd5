/* A program that gets and frees device memory in every way there is, told line by line what to do, and answers each line
 * with the driver's result and a value. Objects are numbered in the order in which they were made, from 0, whatever
 * their kind. The numbers of "held" are the stub driver's, which knows nothing of any limit.
 */
#define _GNU_SOURCE
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "stub_api.h"

#define MAX_OBJECTS 65536
#define NUM_NUMBERS 4

union object {
    CUdeviceptr address;
    CUarray array;
    CUmipmappedArray mipmapped;
    CUexternalMemory external;
    CUmemGenericAllocationHandle handle;
    CUmemoryPool pool;
    CUcontext context;
    CUstream stream;
    CUgraph graph;
    CUgraphExec exec;
};
static union object objects[MAX_OBJECTS];
static int num_objects;
static uint64_t value, value_2;

static union object *made(void) {
    value = (uint64_t)num_objects;
    return &objects[num_objects++ % MAX_OBJECTS];
}

static union object *at(uint64_t number) {
    return &objects[number % MAX_OBJECTS];
}

/* --- linear memory and arrays --- */

static CUresult do_plain(const char *word, const uint64_t *n) {
    size_t pitch;
    unsigned int old_pitch;
    CUdeviceptr_v1 old = 0;
    CUresult result = CUDA_ERROR_NOT_FOUND;
    if (strcmp(word, "alloc") == 0) {
        return cuMemAlloc_v2(&made()->address, n[0]);
    } else if (strcmp(word, "managed") == 0) {
        return cuMemAllocManaged(&made()->address, n[0], CU_MEM_ATTACH_GLOBAL);
    } else if (strcmp(word, "pitch") == 0) {
        return cuMemAllocPitch_v2(&made()->address, &pitch, n[0], n[1], 4);
    } else if (strcmp(word, "old_alloc") == 0) {
        result = cuMemAlloc(&old, (unsigned int)n[0]);
        made()->address = old;
    } else if (strcmp(word, "old_pitch") == 0) {
        result = cuMemAllocPitch(&old, &old_pitch, (unsigned int)n[0], (unsigned int)n[1], 4);
        made()->address = old;
    } else if (strcmp(word, "free") == 0) {
        return cuMemFree_v2(at(n[0])->address);
    } else if (strcmp(word, "old_free") == 0) {
        return cuMemFree((CUdeviceptr_v1)at(n[0])->address);
    } else if (strcmp(word, "free_address") == 0) {
        return cuMemFree_v2(n[0]);
    }
    return result;
}

static CUresult do_array(const char *word, const uint64_t *n) {
    CUDA_ARRAY_DESCRIPTOR flat = {n[0], n[1], CU_AD_FORMAT_FLOAT, 4};
    CUDA_ARRAY_DESCRIPTOR_v1 old = {(unsigned int)n[0], (unsigned int)n[1], CU_AD_FORMAT_HALF, 2};
    CUDA_ARRAY3D_DESCRIPTOR deep = {n[0], n[1], n[2], CU_AD_FORMAT_UNSIGNED_INT8, 4, (unsigned int)n[3]};
    CUDA_ARRAY3D_DESCRIPTOR levels = {n[0], n[1], 0, CU_AD_FORMAT_UNSIGNED_INT16, 1, 0};
    CUDA_EXTERNAL_MEMORY_HANDLE_DESC outside = {.type = CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD, .size = n[0]};
    if (strcmp(word, "array") == 0) {
        return cuArrayCreate_v2(&made()->array, &flat);
    } else if (strcmp(word, "old_array") == 0) {
        return cuArrayCreate(&made()->array, &old);
    } else if (strcmp(word, "array_3d") == 0) {
        return cuArray3DCreate_v2(&made()->array, &deep);
    } else if (strcmp(word, "free_array") == 0) {
        return cuArrayDestroy(at(n[0])->array);
    } else if (strcmp(word, "mipmapped") == 0) {
        return cuMipmappedArrayCreate(&made()->mipmapped, &levels, (unsigned int)n[2]);
    } else if (strcmp(word, "free_mipmapped") == 0) {
        return cuMipmappedArrayDestroy(at(n[0])->mipmapped);
    } else if (strcmp(word, "import") == 0) {
        return cuImportExternalMemory(&made()->external, &outside);
    } else if (strcmp(word, "free_import") == 0) {
        return cuDestroyExternalMemory(at(n[0])->external);
    }
    return CUDA_ERROR_NOT_FOUND;
}

/* --- memory that is mapped; pools --- */

static CUresult do_mapped(const char *word, const uint64_t *n) {
    CUmemAllocationProp about = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                 .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = (int)n[1]}};
    if (strcmp(word, "create") == 0) {
        return cuMemCreate(&made()->handle, n[0], &about, 0);
    } else if (strcmp(word, "create_host") == 0) {
        about.location = (CUmemLocation){.type = CU_MEM_LOCATION_TYPE_HOST_NUMA};
        return cuMemCreate(&made()->handle, n[0], &about, 0);
    } else if (strcmp(word, "reserve") == 0) {
        return cuMemAddressReserve(&made()->address, n[0], 0, 0, 0);
    } else if (strcmp(word, "map") == 0) { /* address, offset in it, handle, bytes */
        return cuMemMap(at(n[0])->address + n[1], n[3], 0, at(n[2])->handle, 0);
    } else if (strcmp(word, "unmap") == 0) {
        return cuMemUnmap(at(n[0])->address + n[1], n[2]);
    } else if (strcmp(word, "release") == 0) {
        return cuMemRelease(at(n[0])->handle);
    } else if (strcmp(word, "retain") == 0) {
        return cuMemRetainAllocationHandle(&made()->handle, (void *)(uintptr_t)(at(n[0])->address + n[1]));
    }
    return CUDA_ERROR_NOT_FOUND;
}

static CUresult do_pool(const char *word, const uint64_t *n) {
    CUmemPoolProps about = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                            .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = (int)n[0]}};
    cuuint64_t threshold = n[1];
    if (strcmp(word, "async") == 0) {
        return cuMemAllocAsync(&made()->address, n[0], NULL);
    } else if (strcmp(word, "async_ptsz") == 0) {
        return cuMemAllocAsync_ptsz(&made()->address, n[0], NULL);
    } else if (strcmp(word, "async_on") == 0) { /* stream, bytes */
        return cuMemAllocAsync(&made()->address, n[1], at(n[0])->stream);
    } else if (strcmp(word, "from_pool") == 0) {
        return cuMemAllocFromPoolAsync(&made()->address, n[1], at(n[0])->pool, NULL);
    } else if (strcmp(word, "from_pool_ptsz") == 0) {
        return cuMemAllocFromPoolAsync_ptsz(&made()->address, n[1], at(n[0])->pool, NULL);
    } else if (strcmp(word, "free_async") == 0) {
        return cuMemFreeAsync(at(n[0])->address, NULL);
    } else if (strcmp(word, "free_async_ptsz") == 0) {
        return cuMemFreeAsync_ptsz(at(n[0])->address, NULL);
    } else if (strcmp(word, "free_async_on") == 0) {
        return cuMemFreeAsync(at(n[1])->address, at(n[0])->stream);
    } else if (strcmp(word, "pool") == 0) {
        return cuMemPoolCreate(&made()->pool, &about);
    } else if (strcmp(word, "default_pool") == 0) {
        return cuDeviceGetDefaultMemPool(&made()->pool, (CUdevice)n[0]);
    } else if (strcmp(word, "free_pool") == 0) {
        return cuMemPoolDestroy(at(n[0])->pool);
    } else if (strcmp(word, "trim") == 0) {
        return cuMemPoolTrimTo(at(n[0])->pool, n[1]);
    } else if (strcmp(word, "threshold") == 0) {
        return cuMemPoolSetAttribute(at(n[0])->pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold);
    }
    return CUDA_ERROR_NOT_FOUND;
}

/* --- contexts, streams, graphs --- */

static CUresult do_context(const char *word, const uint64_t *n) {
    if (strcmp(word, "primary") == 0) {
        CUcontext primary;
        CUresult result = cuDevicePrimaryCtxRetain(&primary, (CUdevice)n[0]);
        made()->context = primary;
        return result == CUDA_SUCCESS ? cuCtxSetCurrent(primary) : result;
    } else if (strcmp(word, "reset") == 0) {
        return cuDevicePrimaryCtxReset_v2((CUdevice)n[0]);
    } else if (strcmp(word, "context") == 0) {
        return cuCtxCreate_v2(&made()->context, 0, (CUdevice)n[0]);
    } else if (strcmp(word, "current") == 0) {
        return cuCtxSetCurrent(at(n[0])->context);
    } else if (strcmp(word, "free_context") == 0) {
        return cuCtxDestroy_v2(at(n[0])->context);
    } else if (strcmp(word, "stream") == 0) {
        return cuStreamCreate(&made()->stream, CU_STREAM_NON_BLOCKING);
    } else if (strcmp(word, "sync") == 0) {
        return cuCtxSynchronize();
    }
    return CUDA_ERROR_NOT_FOUND;
}

static CUresult do_graph(const char *word, const uint64_t *n) {
    CUDA_MEM_ALLOC_NODE_PARAMS about = {
        .poolProps = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}},
        .bytesize = n[1]};
    CUgraphNodeParams general = {.type = CU_GRAPH_NODE_TYPE_MEM_ALLOC, .alloc = {.poolProps = about.poolProps, .bytesize = n[1]}};
    CUgraphNode node;
    if (strcmp(word, "graph") == 0) {
        return cuGraphCreate(&made()->graph, 0);
    } else if (strcmp(word, "graph_alloc") == 0) {
        CUresult result = cuGraphAddMemAllocNode(&node, at(n[0])->graph, NULL, 0, &about);
        made()->address = about.dptr;
        return result;
    } else if (strcmp(word, "graph_alloc_any") == 0) {
        return cuGraphAddNode_v2(&node, at(n[0])->graph, NULL, NULL, 0, &general);
    } else if (strcmp(word, "begin_capture") == 0) {
        return cuStreamBeginCapture_v2(at(n[0])->stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
    } else if (strcmp(word, "end_capture") == 0) {
        return cuStreamEndCapture(at(n[0])->stream, &made()->graph);
    } else if (strcmp(word, "instantiate") == 0) {
        return cuGraphInstantiateWithFlags(&made()->exec, at(n[0])->graph, 0);
    } else if (strcmp(word, "launch_graph") == 0) {
        return cuGraphLaunch(at(n[0])->exec, NULL);
    } else if (strcmp(word, "trim_graphs") == 0) {
        return cuDeviceGraphMemTrim(0);
    }
    return CUDA_ERROR_NOT_FOUND;
}

/* --- reports --- */

typedef struct {
    unsigned long long total, free, used;
} nvml_memory;
typedef struct {
    unsigned int version;
    unsigned long long total, reserved, free, used;
} nvml_memory_v2;

/* As a monitor does it: NVML by dlopen and dlsym, the device by its number. */
static CUresult ask_nvml(bool is_v2, unsigned int number) {
    void *library = dlopen("libnvidia-ml.so.1", RTLD_LAZY);
    int (*init)(void) = library == NULL ? NULL : (int (*)(void))dlsym(library, "nvmlInit_v2");
    int (*find)(unsigned int, void **) =
        library == NULL ? NULL : (int (*)(unsigned int, void **))dlsym(library, "nvmlDeviceGetHandleByIndex_v2");
    void *ask = library == NULL ? NULL : dlsym(library, is_v2 ? "nvmlDeviceGetMemoryInfo_v2" : "nvmlDeviceGetMemoryInfo");
    void *device;
    if (init == NULL || find == NULL || ask == NULL || init() != 0 || find(number, &device) != 0) {
        return CUDA_ERROR_NOT_FOUND;
    }
    nvml_memory memory;
    nvml_memory_v2 memory_v2 = {.version = sizeof(memory_v2) | (2u << 24)};
    int result = is_v2 ? ((int (*)(void *, void *))ask)(device, &memory_v2) : ((int (*)(void *, void *))ask)(device, &memory);
    value = is_v2 ? memory_v2.free : memory.free;
    value_2 = is_v2 ? memory_v2.total : memory.total;
    return (CUresult)result;
}

/* Memory of one process in another: the handle goes through a file. */
static CUresult do_shared(const char *word, const uint64_t *n) {
    CUipcMemHandle handle;
    CUresult result = CUDA_ERROR_NOT_FOUND;
    const char *path = getenv("PROBE_HANDLE");
    FILE *file = NULL;
    if (path == NULL || strncmp(word, "ipc_", 4) != 0) {
        return result;
    }
    if (strcmp(word, "ipc_give") == 0 && (file = fopen(path, "w")) != NULL) {
        result = cuIpcGetMemHandle(&handle, at(n[0])->address);
        fwrite(&handle, sizeof(handle), 1, file);
    } else if (strcmp(word, "ipc_take") == 0 && (file = fopen(path, "r")) != NULL) {
        result = fread(&handle, sizeof(handle), 1, file) == 1
                     ? cuIpcOpenMemHandle_v2(&made()->address, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
                     : CUDA_ERROR_INVALID_HANDLE;
    } else if (strcmp(word, "ipc_close") == 0) {
        result = cuIpcCloseMemHandle(at(n[0])->address);
    }
    if (file != NULL) {
        fclose(file);
    }
    return result;
}

static CUresult do_report(const char *word, const uint64_t *n) {
    CUresult result = CUDA_ERROR_NOT_FOUND;
    size_t free_bytes = 0, total_bytes = 0;
    unsigned int old_free = 0, old_total = 0;
    if (strcmp(word, "info") == 0) {
        result = cuMemGetInfo_v2(&free_bytes, &total_bytes);
        value = free_bytes;
        value_2 = total_bytes;
    } else if (strcmp(word, "old_info") == 0) {
        result = cuMemGetInfo(&old_free, &old_total);
        value = old_free;
        value_2 = old_total;
    } else if (strcmp(word, "total") == 0) {
        result = cuDeviceTotalMem_v2(&total_bytes, (CUdevice)n[0]);
        value = total_bytes;
    } else if (strcmp(word, "nvml") == 0 || strcmp(word, "nvml_v2") == 0) {
        result = ask_nvml(word[4] != 0, (unsigned int)n[0]);
    } else if (strcmp(word, "held") == 0) {
        result = CUDA_SUCCESS;
        value = stub_memory_bytes((CUdevice)n[0]);
        value_2 = stub_peak_bytes((CUdevice)n[0]);
    }
    return result;
}

/* --- many at once --- */

static uint64_t storm_bytes, storm_rounds;
static _Atomic uint64_t storm_refused;

static void *storm_thread(void *context) {
    cuCtxSetCurrent((CUcontext)context);
    for (uint64_t i = 0; i < storm_rounds; i++) {
        CUdeviceptr address;
        if (cuMemAlloc_v2(&address, storm_bytes) == CUDA_SUCCESS) {
            if (cuMemFree_v2(address) != CUDA_SUCCESS) {
                abort();
            }
        } else {
            storm_refused++;
        }
    }
    return NULL;
}

/* Threads, bytes, rounds: each thread gets and frees so often; how often it was refused. */
static CUresult do_storm(const char *word, const uint64_t *n) {
    pthread_t threads[64];
    CUcontext context = NULL;
    if (strcmp(word, "storm") != 0 || n[0] > 64 || cuCtxGetCurrent(&context) != CUDA_SUCCESS) {
        return CUDA_ERROR_NOT_FOUND;
    }
    storm_bytes = n[1];
    storm_rounds = n[2];
    storm_refused = 0;
    for (uint64_t i = 0; i < n[0]; i++) {
        pthread_create(&threads[i], NULL, storm_thread, context);
    }
    for (uint64_t i = 0; i < n[0]; i++) {
        pthread_join(threads[i], NULL);
    }
    value = storm_refused;
    return CUDA_SUCCESS;
}

static CUresult obey(const char *word, const uint64_t *n) {
    CUresult (*const rooms[])(const char *, const uint64_t *) = {
        do_plain, do_array, do_mapped, do_pool, do_context, do_graph, do_report, do_shared, do_storm};
    CUresult result = CUDA_ERROR_NOT_FOUND;
    for (size_t i = 0; i < sizeof(rooms) / sizeof(rooms[0]) && result == CUDA_ERROR_NOT_FOUND; i++) {
        result = rooms[i](word, n);
    }
    return result;
}

int main(int argc, char **argv) {
    char line[256], word[64];
    CUcontext context;
    setvbuf(stdin, NULL, _IONBF, 0); /* what was not obeyed yet is left for who comes after an exec or a fork */
    bool is_bare = argc > 1 && strcmp(argv[1], "bare") == 0; /* no driver before a line asks for it */
    if (!is_bare && (cuInit(0) != CUDA_SUCCESS || cuDevicePrimaryCtxRetain(&context, 0) != CUDA_SUCCESS ||
                     cuCtxSetCurrent(context) != CUDA_SUCCESS)) {
        return 1;
    }
    while (fgets(line, sizeof(line), stdin) != NULL) {
        uint64_t n[NUM_NUMBERS] = {0};
        value = value_2 = 0;
        if (sscanf(line, "%63s %lu %lu %lu %lu", word, &n[0], &n[1], &n[2], &n[3]) < 1) {
            return 2;
        }
        if (strcmp(word, "exec") == 0) { /* the same process, another program: nothing of what was held is left */
            execv("/proc/self/exe", argv);
            return 4;
        }
        if (strcmp(word, "fork") == 0) { /* the child goes on in the parent's place */
            pid_t child = fork();
            if (child > 0) {
                int status = 0;
                waitpid(child, &status, 0);
                return WIFEXITED(status) ? WEXITSTATUS(status) : 3;
            }
            value = (uint64_t)getpid();
            printf("[0, %lu, 0]\n", value);
        } else {
            CUresult result = strcmp(word, "init") == 0 ? cuInit(0) : obey(word, n);
            printf("[%d, %lu, %lu]\n", (int)result, value, value_2);
        }
        fflush(stdout);
    }
    return 0;
}
