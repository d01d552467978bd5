/* The stub driver's memory pools: allocations in the order of a stream, and the memory of graphs.
 *
 * As with the real one a pool takes memory from the device in chunks (STUB_POOL_CHUNK, 2 MiB), keeps what is freed until
 * the next synchronisation, and then whatever its release threshold says.
 */
#include "stub_memory.h"

#include <stdlib.h>

struct CUmemPoolHandle_st {
    int device;
    uint64_t used;
    uint64_t reserved;
    uint64_t threshold;
    uint64_t used_high;
    uint64_t reserved_high;
    bool is_gone;
    struct CUmemPoolHandle_st *next;
};

static struct CUmemPoolHandle_st *pools;
static struct CUmemPoolHandle_st *defaults[STUB_MAX_DEVICES];
static struct CUmemPoolHandle_st *currents[STUB_MAX_DEVICES];

static uint64_t in_chunks(uint64_t bytes) {
    static uint64_t chunk;
    if (chunk == 0) {
        chunk = stub_number("STUB_POOL_CHUNK", 2u << 20);
    }
    return (bytes + chunk - 1) / chunk * chunk;
}

static struct CUmemPoolHandle_st *new_pool(int device) {
    struct CUmemPoolHandle_st *pool = calloc(1, sizeof(*pool));
    pool->device = device;
    pool->next = pools;
    pools = pool;
    return pool;
}

static struct CUmemPoolHandle_st *default_pool(int device) {
    pthread_mutex_lock(&stub_lock);
    if (defaults[device] == NULL) {
        defaults[device] = new_pool(device);
    }
    pthread_mutex_unlock(&stub_lock);
    return defaults[device];
}

static struct CUmemPoolHandle_st *current_pool(int device) {
    return currents[device] != NULL ? currents[device] : default_pool(device);
}

/* The caller holds the lock. */
static bool pool_grow(struct CUmemPoolHandle_st *pool, size_t bytes) {
    uint64_t wanted = in_chunks(pool->used + bytes);
    if (wanted > pool->reserved) {
        if (!stub_take_memory(pool->device, wanted - pool->reserved)) {
            return false;
        }
        pool->reserved = wanted;
    }
    pool->used += bytes;
    pool->used_high = pool->used > pool->used_high ? pool->used : pool->used_high;
    pool->reserved_high = pool->reserved > pool->reserved_high ? pool->reserved : pool->reserved_high;
    return true;
}

/* The caller holds the lock. */
static void keep_at_least(struct CUmemPoolHandle_st *pool, uint64_t bytes) {
    uint64_t keep = in_chunks(pool->used > bytes ? pool->used : bytes);
    if (keep < pool->reserved) {
        stub_give_memory(pool->device, pool->reserved - keep);
        pool->reserved = keep;
    }
}

void stub_pool_shrink(struct CUmemPoolHandle_st *pool, size_t bytes) {
    pthread_mutex_lock(&stub_lock);
    pool->used -= bytes;
    if (pool->is_gone) {
        keep_at_least(pool, 0);
    }
    pthread_mutex_unlock(&stub_lock);
}

void stub_pools_synchronised(int device) {
    pthread_mutex_lock(&stub_lock);
    for (struct CUmemPoolHandle_st *pool = pools; pool != NULL; pool = pool->next) {
        if (pool->device == device) {
            keep_at_least(pool, pool->threshold);
        }
    }
    pthread_mutex_unlock(&stub_lock);
}

static CUresult allocate_from(struct CUmemPoolHandle_st *pool, CUdeviceptr *address, size_t bytes,
                              struct CUstream_st *stream) {
    if (stream == NULL) {
        return stub_check_context();
    }
    if (stream->capture != NULL) {
        struct CUgraphNode_st *node = stub_add_node(stream->capture->graph, CU_GRAPH_NODE_TYPE_MEM_ALLOC, NULL, 0);
        node->alloc_bytes = bytes;
        node->address = *address = stub_new_address(bytes);
        return CUDA_SUCCESS;
    }
    struct stub_allocation *it = calloc(1, sizeof(*it));
    pthread_mutex_lock(&stub_lock);
    bool fits = pool_grow(pool, bytes);
    pthread_mutex_unlock(&stub_lock);
    if (!fits) {
        free(it);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    it->bytes = bytes;
    it->context = stub_current();
    it->device = pool->device;
    it->pool = pool;
    it->address = stub_new_address(bytes);
    stub_keep(it);
    *address = it->address;
    return CUDA_SUCCESS;
}

PAIR(cuMemAllocAsync, _ptsz, (CUdeviceptr *address, size_t bytes, CUstream handle), {
    struct CUstream_st *stream = stub_stream(handle, per_thread);
    return stream == NULL ? stub_check_context()
                          : allocate_from(current_pool(stream->context->device), address, bytes, stream);
})

PAIR(cuMemAllocFromPoolAsync, _ptsz, (CUdeviceptr *address, size_t bytes, CUmemoryPool pool, CUstream handle), {
    return pool == NULL ? CUDA_ERROR_INVALID_VALUE
                        : allocate_from(pool, address, bytes, stub_stream(handle, per_thread));
})

PAIR(cuMemFreeAsync, _ptsz, (CUdeviceptr address, CUstream handle), {
    struct CUstream_st *stream = stub_stream(handle, per_thread);
    if (stream == NULL) {
        return stub_check_context();
    }
    if (stream->capture != NULL) {
        stub_add_node(stream->capture->graph, CU_GRAPH_NODE_TYPE_MEM_FREE, NULL, 0)->address = address;
        return CUDA_SUCCESS;
    }
    return stub_release(address);
})

CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *properties) {
    ENTER(cuMemPoolCreate);
    if (properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE || properties->location.id < 0 ||
        properties->location.id >= stub_num_devices) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    pthread_mutex_lock(&stub_lock);
    *pool = new_pool(properties->location.id);
    pthread_mutex_unlock(&stub_lock);
    return CUDA_SUCCESS;
}

/* What was allocated from it stays allocated until it is freed. */
CUresult cuMemPoolDestroy(CUmemoryPool pool) {
    ENTER(cuMemPoolDestroy);
    if (pool == NULL || pool == defaults[pool->device]) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    pthread_mutex_lock(&stub_lock);
    pool->is_gone = true;
    keep_at_least(pool, 0);
    if (currents[pool->device] == pool) {
        currents[pool->device] = NULL;
    }
    pthread_mutex_unlock(&stub_lock);
    return CUDA_SUCCESS;
}

CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t bytes) {
    ENTER(cuMemPoolTrimTo);
    pthread_mutex_lock(&stub_lock);
    keep_at_least(pool, bytes);
    pthread_mutex_unlock(&stub_lock);
    return CUDA_SUCCESS;
}

CUresult cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value) {
    ENTER(cuMemPoolGetAttribute);
    pthread_mutex_lock(&stub_lock);
    CUresult result = CUDA_SUCCESS;
    switch ((int)attribute) {
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
        *(cuuint64_t *)value = pool->threshold;
        break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
        *(cuuint64_t *)value = pool->reserved;
        break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
        *(cuuint64_t *)value = pool->reserved_high;
        break;
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
        *(cuuint64_t *)value = pool->used;
        break;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
        *(cuuint64_t *)value = pool->used_high;
        break;
    default:
        result = CUDA_ERROR_INVALID_VALUE;
    }
    pthread_mutex_unlock(&stub_lock);
    return result;
}

CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value) {
    ENTER(cuMemPoolSetAttribute);
    if (attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD) {
        pool->threshold = *(cuuint64_t *)value;
    }
    return CUDA_SUCCESS;
}

#define NEED_DEVICE(device)                                                                                            \
    if ((device) < 0 || (device) >= stub_num_devices) {                                                                \
        return CUDA_ERROR_INVALID_DEVICE;                                                                              \
    }

CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice device) {
    ENTER(cuDeviceGetDefaultMemPool);
    NEED_DEVICE(device)
    *pool = default_pool(device);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice device) {
    ENTER(cuDeviceGetMemPool);
    NEED_DEVICE(device)
    *pool = current_pool(device);
    return CUDA_SUCCESS;
}

CUresult cuDeviceSetMemPool(CUdevice device, CUmemoryPool pool) {
    ENTER(cuDeviceSetMemPool);
    NEED_DEVICE(device)
    currents[device] = pool;
    return CUDA_SUCCESS;
}

/* --- the memory of graphs: taken at a graph's first launch, kept until it is trimmed --- */

static uint64_t graph_reserved[STUB_MAX_DEVICES];
static uint64_t graph_used[STUB_MAX_DEVICES];

bool stub_graph_takes(int device, uint64_t bytes) {
    pthread_mutex_lock(&stub_lock);
    uint64_t wanted = in_chunks(graph_used[device] + bytes);
    bool fits = wanted <= graph_reserved[device] || stub_take_memory(device, wanted - graph_reserved[device]);
    if (fits) {
        graph_reserved[device] = wanted > graph_reserved[device] ? wanted : graph_reserved[device];
        graph_used[device] += bytes;
    }
    pthread_mutex_unlock(&stub_lock);
    return fits;
}

void stub_graph_gives(int device, uint64_t bytes) {
    pthread_mutex_lock(&stub_lock);
    graph_used[device] -= bytes;
    pthread_mutex_unlock(&stub_lock);
}

CUresult cuDeviceGraphMemTrim(CUdevice device) {
    ENTER(cuDeviceGraphMemTrim);
    NEED_DEVICE(device)
    pthread_mutex_lock(&stub_lock);
    uint64_t keep = in_chunks(graph_used[device]);
    if (keep < graph_reserved[device]) {
        stub_give_memory(device, graph_reserved[device] - keep);
        graph_reserved[device] = keep;
    }
    pthread_mutex_unlock(&stub_lock);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attribute, void *value) {
    ENTER(cuDeviceGetGraphMemAttribute);
    NEED_DEVICE(device)
    bool is_used = attribute == CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT || attribute == CU_GRAPH_MEM_ATTR_USED_MEM_HIGH;
    *(cuuint64_t *)value = is_used ? graph_used[device] : graph_reserved[device];
    return CUDA_SUCCESS;
}
