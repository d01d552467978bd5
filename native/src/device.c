/* The state of each device of this process, by UUID; what survives a fork. */
#include "client.h"

#include <pthread.h>
#include <string.h>

#define MAX_DEVICES 64

_Atomic uint32_t st_context_epoch = 1;
_Atomic uint32_t st_fork_epoch = 1;

/* By ordinal. An entry is filled once, under the lock, and read without it once it says so. */
static struct st_device devices[MAX_DEVICES];
static _Atomic bool is_known[MAX_DEVICES];
static struct st_lock filling;
/* The only device, in a process that sees one: then no launch has to ask whose context is current. */
static _Atomic(struct st_device *) only_device;

/* What the calling thread found when it last asked whose its current context is. */
struct here {
    CUcontext context;
    struct st_device *device;
    uint32_t epoch;
};
static __thread __attribute__((tls_model("initial-exec"))) struct here here;

/* --- devices ------------------------------------------------------------------------------------------------------- */

static bool read_uuid(CUdevice ordinal, uint8_t uuid[ST_UUID_BYTES]) {
    CUuuid found;
    /* The newer form tells the parts of a divided GPU apart, the older one names the GPU they are parts of. */
    if (!((st_real_cuDeviceGetUuid_v2 != NULL && st_real_cuDeviceGetUuid_v2(&found, ordinal) == CUDA_SUCCESS) ||
          (st_real_cuDeviceGetUuid != NULL && st_real_cuDeviceGetUuid(&found, ordinal) == CUDA_SUCCESS))) {
        return false;
    }
    memcpy(uuid, found.bytes, ST_UUID_BYTES);
    return true;
}

static struct st_device *find_out(CUdevice ordinal) {
    uint8_t uuid[ST_UUID_BYTES];
    size_t total_bytes = 0;
    if (!st_resolve() || !read_uuid(ordinal, uuid)) {
        return NULL;
    }
    if (st_real_cuDeviceTotalMem_v2 == NULL || st_real_cuDeviceTotalMem_v2(&total_bytes, ordinal) != CUDA_SUCCESS) {
        total_bytes = 0;
    }
    int num_devices = 0;
    bool is_only = st_real_cuDeviceGetCount != NULL && st_real_cuDeviceGetCount(&num_devices) == CUDA_SUCCESS &&
                   num_devices == 1;
    while (!st_lock_within(&filling, 1000000000ull)) {
    }
    struct st_device *device = &devices[ordinal];
    if (!atomic_load(&is_known[ordinal])) {
        device->ordinal = ordinal;
        memcpy(device->uuid, uuid, ST_UUID_BYTES);
        device->total_bytes = total_bytes;
        atomic_store_explicit(&is_known[ordinal], true, memory_order_release);
    }
    if (is_only) {
        atomic_store_explicit(&only_device, device, memory_order_release);
    }
    st_lock_free(&filling);
    return device;
}

struct st_device *st_device_of(CUdevice ordinal) {
    if (ordinal < 0 || ordinal >= MAX_DEVICES) {
        return NULL;
    }
    return ST_LIKELY(atomic_load_explicit(&is_known[ordinal], memory_order_acquire)) ? &devices[ordinal]
                                                                                     : find_out(ordinal);
}

struct st_device *st_device_with(const uint8_t uuid[ST_UUID_BYTES]) {
    for (int i = 0; i < MAX_DEVICES; i++) {
        if (atomic_load_explicit(&is_known[i], memory_order_acquire) &&
            memcmp(devices[i].uuid, uuid, ST_UUID_BYTES) == 0) {
            return &devices[i];
        }
    }
    return NULL;
}

struct st_device *st_current_device(void) {
    struct st_device *only = atomic_load_explicit(&only_device, memory_order_acquire);
    if (only != NULL) {
        return only;
    }
    CUcontext context = NULL;
    if (!st_resolve() || st_real_cuCtxGetCurrent == NULL || st_real_cuCtxGetCurrent(&context) != CUDA_SUCCESS ||
        context == NULL) {
        return NULL;
    }
    uint32_t epoch = atomic_load_explicit(&st_context_epoch, memory_order_acquire);
    if (ST_LIKELY(here.context == context && here.epoch == epoch)) {
        return here.device;
    }
    CUdevice ordinal;
    if (st_real_cuCtxGetDevice == NULL || st_real_cuCtxGetDevice(&ordinal) != CUDA_SUCCESS) {
        return NULL;
    }
    struct st_device *device = st_device_of(ordinal);
    if (device != NULL) {
        here = (struct here){context, device, epoch};
    }
    return device;
}

/* --- contexts that end --------------------------------------------------------------------------------------------- */

/* Whose context this is, while it lives. */
static struct st_device *device_of_context(CUcontext context) {
    CUcontext current = NULL;
    if (st_real_cuCtxGetCurrent == NULL || st_real_cuCtxGetCurrent(&current) != CUDA_SUCCESS) {
        return NULL;
    }
    if (current == context) {
        return st_current_device();
    }
    if (st_real_cuCtxPushCurrent_v2 == NULL || st_real_cuCtxPopCurrent_v2 == NULL ||
        st_real_cuCtxPushCurrent_v2(context) != CUDA_SUCCESS) {
        return NULL;
    }
    struct st_device *device = st_current_device();
    st_real_cuCtxPopCurrent_v2(&current);
    return device;
}

/* A context of this device has ended, `context` NULL being its primary one. The driver gives the address of a dead
 * context to the next one, perhaps of another device. */
static void forget_context(struct st_device *device, CUcontext context) {
    if (device != NULL) {
        st_memory_context_gone(device, context);
    }
    atomic_fetch_add(&st_context_epoch, 1);
}

/* The primary context lives until the last of those who retained it has released it. */
static void released(CUdevice ordinal) {
    unsigned int flags = 0;
    int is_active = 1;
    if (st_real_cuDevicePrimaryCtxGetState == NULL ||
        st_real_cuDevicePrimaryCtxGetState(ordinal, &flags, &is_active) != CUDA_SUCCESS || !is_active) {
        forget_context(st_device_of(ordinal), NULL);
    }
}

#define ENDS_CONTEXT(symbol)                                                                                           \
    ST_EXPORT CUresult CUDAAPI symbol(CUcontext context) {                                                             \
        if (!st_resolve() || st_real_##symbol == NULL) {                                                               \
            return ST_MISSING;                                                                                         \
        }                                                                                                              \
        struct st_device *device = context == NULL ? NULL : device_of_context(context);                                \
        CUresult result = st_real_##symbol(context);                                                                   \
        if (result == CUDA_SUCCESS) {                                                                                  \
            forget_context(device, context);                                                                           \
        }                                                                                                              \
        return result;                                                                                                 \
    }

ENDS_CONTEXT(cuCtxDestroy)
ENDS_CONTEXT(cuCtxDestroy_v2)

#define ENDS_PRIMARY(symbol, told)                                                                                     \
    ST_EXPORT CUresult CUDAAPI symbol(CUdevice ordinal) {                                                              \
        if (!st_resolve() || st_real_##symbol == NULL) {                                                               \
            return ST_MISSING;                                                                                         \
        }                                                                                                              \
        CUresult result = st_real_##symbol(ordinal);                                                                   \
        if (result == CUDA_SUCCESS) {                                                                                  \
            told(ordinal);                                                                                             \
        }                                                                                                              \
        return result;                                                                                                 \
    }

static void was_reset(CUdevice ordinal) {
    forget_context(st_device_of(ordinal), NULL);
}

ENDS_PRIMARY(cuDevicePrimaryCtxRelease, released)
ENDS_PRIMARY(cuDevicePrimaryCtxRelease_v2, released)
ENDS_PRIMARY(cuDevicePrimaryCtxReset, was_reset)
ENDS_PRIMARY(cuDevicePrimaryCtxReset_v2, was_reset)

/* Gives back one use of a context; only after the last one it ends, which nobody says. Whoever remembers a context looks
 * again; its memory is counted until it is freed, which errs to the safe side. */
ST_EXPORT CUresult CUDAAPI cuCtxDetach(CUcontext context) {
    if (!st_resolve() || st_real_cuCtxDetach == NULL) {
        return ST_MISSING;
    }
    CUresult result = st_real_cuCtxDetach(context);
    atomic_fetch_add(&st_context_epoch, 1);
    return result;
}

/* What was allocated in a part of a device lives in its primary context and does not go with the part. */
ST_EXPORT CUresult CUDAAPI cuGreenCtxDestroy(CUgreenCtx part) {
    if (!st_resolve() || st_real_cuGreenCtxDestroy == NULL) {
        return ST_MISSING;
    }
    CUresult result = st_real_cuGreenCtxDestroy(part);
    atomic_fetch_add(&st_context_epoch, 1);
    return result;
}

/* --- after a fork -------------------------------------------------------------------------------------------------- */

static void forget_parent(void) {
    atomic_store(&filling.word, 0);
    atomic_store(&only_device, NULL);
    for (int i = 0; i < MAX_DEVICES; i++) {
        atomic_store(&devices[i].bucket, NULL);
        atomic_store(&devices[i].ask_again_ns, 0);
    }
    atomic_fetch_add(&st_context_epoch, 1);
    atomic_fetch_add(&st_fork_epoch, 1);
}

static void in_child(void) {
    forget_parent();
    st_resolve_forked();
    st_client_forked();
    st_gate_forked();
    st_work_forked();
    st_graph_forked();
    st_memory_forked();
    st_cycle_forked();
}

/* Among the first of all constructors: handlers of others, registered later, run after ours in the child. */
__attribute__((constructor(101))) static void watch_forks(void) {
    pthread_atfork(NULL, NULL, in_child);
}
