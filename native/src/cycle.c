/* Launch cycles: from the first launch after a synchronisation to the end of the next synchronisation. Their lengths
 * are how the daemon sees that a tenant has become slower. What ends one is a call in which the program waits for
 * results: the synchronisations, the copies to host memory that return only when they are done, and, for programs that
 * would rather look again and again, a stream that is found to be empty. An event that is found to have happened ends
 * none: allocators ask that of long finished events all the time.
 */
#include "hooks.h"
#include "memory_rooms.h"

void st_cycle_begin_slowly(struct st_bucket *bucket) {
    uint64_t none = 0;
    uint64_t now_ns = st_now_ns();
    if (atomic_compare_exchange_strong(&bucket->cycle_started_ns, &none, now_ns)) {
        atomic_fetch_add_explicit(&bucket->usage->num_cycles_begun, 1, memory_order_relaxed);
        atomic_store_explicit(&bucket->usage->cycle_started_ns, now_ns, memory_order_release);
    }
}

/* The bucket in which a cycle of the calling thread's device runs; NULL if none does. */
static struct st_bucket *running(void) {
    struct st_device *device = st_current_device();
    struct st_bucket *bucket = device == NULL ? NULL : atomic_load_explicit(&device->bucket, memory_order_acquire);
    if (bucket == NULL || atomic_load_explicit(&bucket->cycle_started_ns, memory_order_relaxed) == 0) {
        return NULL;
    }
    return bucket;
}

/* The program has waited for its results. */
static void cycle_end(struct st_bucket *bucket) {
    uint64_t started_ns = atomic_exchange(&bucket->cycle_started_ns, 0);
    if (started_ns == 0) {
        return; /* another thread was first */
    }
    struct st_usage *usage = bucket->usage;
    /* The length first, the count of those that can be read afterwards. */
    uint64_t number = atomic_load_explicit(&usage->num_cycles_ended, memory_order_relaxed);
    atomic_store_explicit(&usage->cycle_ns[number % ST_NUM_CYCLES], st_now_ns() - started_ns, memory_order_relaxed);
    /* Of the tenant's other processes one may have begun since, whose mark stays. */
    atomic_compare_exchange_strong(&usage->cycle_started_ns, &started_ns, 0);
    atomic_fetch_add_explicit(&usage->num_cycles_ended, 1, memory_order_release);
}

static CUresult ended(CUresult result) {
    if (result == CUDA_SUCCESS) {
        struct st_bucket *bucket = running();
        if (bucket != NULL) {
            cycle_end(bucket);
        }
        st_memory_settle();
    }
    return result;
}

/* Whether a copy to this unified address is one to host memory. The driver knows no plain host memory. */
static bool is_host(CUdeviceptr address) {
    unsigned int kind = 0;
    if (st_real_cuPointerGetAttribute == NULL) {
        return false;
    }
    CUresult result = st_real_cuPointerGetAttribute(&kind, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address);
    return result != CUDA_SUCCESS || kind == CU_MEMORYTYPE_HOST;
}

static bool goes_to_host(CUmemorytype kind, CUdeviceptr unified) {
    return kind == CU_MEMORYTYPE_HOST || (kind == CU_MEMORYTYPE_UNIFIED && is_host(unified));
}

/* --- the hooks --- */

/* A function of ours that waits: the driver's, and then the cycle is over. */
#define WAITS(symbol, parameters, arguments)                                                                           \
    ST_EXPORT CUresult symbol parameters {                                                                             \
        if (!st_resolve() || st_real_##symbol == NULL) {                                                               \
            return ST_MISSING;                                                                                         \
        }                                                                                                              \
        return ended(st_real_##symbol arguments);                                                                      \
    }
/* A copy that waits where it goes to host memory. Nobody is asked about that while no cycle runs. */
#define COPIES(symbol, parameters, arguments, to_host)                                                                 \
    ST_EXPORT CUresult symbol parameters {                                                                             \
        if (!st_resolve() || st_real_##symbol == NULL) {                                                               \
            return ST_MISSING;                                                                                         \
        }                                                                                                              \
        CUresult result = st_real_##symbol arguments;                                                                  \
        return result == CUDA_SUCCESS && running() != NULL && (to_host) ? ended(result) : result;                      \
    }

WAITS(cuCtxSynchronize, (void), ())
WAITS(cuCtxSynchronize_v2, (CUcontext context), (context))
WAITS(cuStreamSynchronize, (CUstream stream), (stream))
WAITS(cuStreamSynchronize_ptsz, (CUstream stream), (stream))
WAITS(cuStreamQuery, (CUstream stream), (stream))
WAITS(cuStreamQuery_ptsz, (CUstream stream), (stream))
WAITS(cuEventSynchronize, (CUevent event), (event))
WAITS(cuMemcpyDtoH_v2, (void *to, CUdeviceptr from, size_t bytes), (to, from, bytes))
WAITS(cuMemcpyDtoH_v2_ptds, (void *to, CUdeviceptr from, size_t bytes), (to, from, bytes))
WAITS(cuMemcpyAtoH_v2, (void *to, CUarray from, size_t offset, size_t bytes), (to, from, offset, bytes))
WAITS(cuMemcpyAtoH_v2_ptds, (void *to, CUarray from, size_t offset, size_t bytes), (to, from, offset, bytes))
COPIES(cuMemcpy, (CUdeviceptr to, CUdeviceptr from, size_t bytes), (to, from, bytes), is_host(to))
COPIES(cuMemcpy_ptds, (CUdeviceptr to, CUdeviceptr from, size_t bytes), (to, from, bytes), is_host(to))
COPIES(cuMemcpy2D_v2, (const CUDA_MEMCPY2D *copy), (copy), goes_to_host(copy->dstMemoryType, copy->dstDevice))
COPIES(cuMemcpy2D_v2_ptds, (const CUDA_MEMCPY2D *copy), (copy), goes_to_host(copy->dstMemoryType, copy->dstDevice))
COPIES(cuMemcpy2DUnaligned_v2, (const CUDA_MEMCPY2D *copy), (copy),
       goes_to_host(copy->dstMemoryType, copy->dstDevice))
COPIES(cuMemcpy2DUnaligned_v2_ptds, (const CUDA_MEMCPY2D *copy), (copy),
       goes_to_host(copy->dstMemoryType, copy->dstDevice))
COPIES(cuMemcpy3D_v2, (const CUDA_MEMCPY3D *copy), (copy), goes_to_host(copy->dstMemoryType, copy->dstDevice))
COPIES(cuMemcpy3D_v2_ptds, (const CUDA_MEMCPY3D *copy), (copy), goes_to_host(copy->dstMemoryType, copy->dstDevice))

void st_cycle_forked(void) {
    /* Whatever cycle ran is the parent's, and its mark is in the parent's bucket; the child gets its own. */
}
