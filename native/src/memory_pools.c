/* Stream-ordered memory. A pool has more of the device than the program has of the pool: what was freed stays in it
 * until a synchronisation, or for good. What counts is what the pool has; the driver is asked, and where it does not
 * say, it is what the program has. Room is taken in pages of the device. A driver that grows its pools in longer steps
 * can pass the limit by such a step, once: what the pool has then is counted, and the next allocation is refused.
 *
 * What graphs allocate is had when they run, by the device and not by a pool; it is looked at after every
 * synchronisation once there is such a graph. Nothing is asked while a stream captures.
 */
#include "memory_rooms.h"

#define NUM_POOLS 256
/* A pool grows by whole pages of the device, the driver's own steps may be longer. */
#define STEP_BYTES (2u << 20)

struct pool {
    CUmemoryPool handle; /* NULL: destroyed, and only what was taken from it is left */
    struct st_account *account; /* NULL: not on a device */
    uint64_t used;              /* by the program, as far as we know */
    uint64_t reserved;          /* by the pool, when the driver was last asked */
    uint64_t counted;           /* in the account */
    bool is_taken;
};

/* Whether what pools or graphs have can change without us: while a pool has more than is in use of it, which may go at
 * any synchronisation, and for good once there are graphs with memory. */
_Atomic bool st_memory_is_unsettled;
static struct pool pools[NUM_POOLS];

/* --- pools, all locked --- */

static struct pool *pool_with(CUmemoryPool handle) {
    for (size_t i = 0; i < NUM_POOLS; i++) {
        if (pools[i].is_taken && pools[i].handle == handle) {
            return &pools[i];
        }
    }
    return NULL;
}

static struct pool *pool_made(CUmemoryPool handle, struct st_account *account) {
    for (size_t i = 0; i < NUM_POOLS; i++) {
        if (!pools[i].is_taken) {
            pools[i] = (struct pool){.handle = handle, .account = account, .is_taken = true};
            return &pools[i];
        }
    }
    return NULL;
}

static void look(struct pool *pool) {
    cuuint64_t reserved = 0;
    if (pool->handle == NULL) {
        pool->reserved = 0;
    } else if (st_real_cuMemPoolGetAttribute != NULL && atomic_load(&st_num_captures) == 0) {
        CUresult result =
            st_real_cuMemPoolGetAttribute(pool->handle, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved);
        pool->reserved = result == CUDA_SUCCESS ? reserved : 0;
    }
}

static uint64_t had_by(const struct pool *pool) {
    return pool->used > pool->reserved ? pool->used : pool->reserved;
}

/* Count what the pool has now. */
static void settle(struct pool *pool) {
    look(pool);
    if (pool->account != NULL) {
        st_account_settle(pool->account, &pool->counted, had_by(pool));
    }
    if (pool->handle == NULL && pool->used == 0) {
        pool->is_taken = false;
    }
}

static void settle_graphs(struct st_account *account) {
    cuuint64_t reserved = 0;
    if (account->has_graph_memory && st_real_cuDeviceGetGraphMemAttribute != NULL &&
        atomic_load(&st_num_captures) == 0 &&
        st_real_cuDeviceGetGraphMemAttribute(account->device->ordinal, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT,
                                             &reserved) == CUDA_SUCCESS) {
        st_account_settle(account, &account->graph_bytes, reserved);
    }
}

void st_memory_settle_slowly(void) {
    bool is_unsettled = false;
    struct st_account *account;
    st_memory_lock();
    for (size_t i = 0; i < NUM_POOLS; i++) {
        if (pools[i].is_taken) {
            settle(&pools[i]);
            is_unsettled = is_unsettled || pools[i].reserved > pools[i].used;
        }
    }
    for (size_t i = 0; (account = st_account_at(i)) != NULL; i++) {
        settle_graphs(account);
        is_unsettled = is_unsettled || account->has_graph_memory;
    }
    atomic_store(&st_memory_is_unsettled, is_unsettled);
    st_memory_unlock();
}

void st_pools_reclaim(struct st_account *account) {
    if (atomic_load(&st_num_captures) != 0) {
        return;
    }
    for (size_t i = 0; i < NUM_POOLS; i++) {
        if (pools[i].is_taken && pools[i].account == account) {
            if (pools[i].handle != NULL && st_real_cuMemPoolTrimTo != NULL) {
                st_real_cuMemPoolTrimTo(pools[i].handle, 0);
            }
            settle(&pools[i]);
        }
    }
    if (account->has_graph_memory && st_real_cuDeviceGraphMemTrim != NULL) {
        st_real_cuDeviceGraphMemTrim(account->device->ordinal);
        settle_graphs(account);
    }
}

void st_pool_freed(uint64_t pool, uint64_t bytes) {
    if (pool < NUM_POOLS && pools[pool].is_taken) {
        pools[pool].used -= bytes < pools[pool].used ? bytes : pools[pool].used;
        settle(&pools[pool]);
        atomic_store(&st_memory_is_unsettled, true);
    }
}

void st_pools_of_context_gone(struct st_account *account) {
    for (size_t i = 0; i < NUM_POOLS; i++) {
        struct pool *pool = &pools[i];
        if (!pool->is_taken || pool->account != account) {
            continue;
        }
        look(pool);
        if (pool->reserved == 0) {
            size_t index = 0;
            for (struct st_held *held = st_table_next(&index); held != NULL; held = st_table_next(&index)) {
                struct st_held gone;
                if (held->is_pooled && held->owner == i && st_table_take(held->kind, held->key, &gone)) {
                    index--;
                }
            }
            pool->used = 0;
        }
        settle(pool);
    }
}

void st_pools_forked(void) {
    for (size_t i = 0; i < NUM_POOLS; i++) {
        pools[i].is_taken = false;
    }
    atomic_store(&st_memory_is_unsettled, false);
}

/* --- allocations --- */

/* The device of a stream, which need not be the current one. */
static struct st_device *device_of(CUstream stream) {
    CUcontext context = NULL, current = NULL;
    bool is_default = stream == NULL || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD;
    if (is_default || st_real_cuStreamGetCtx == NULL || st_real_cuCtxGetCurrent == NULL ||
        st_real_cuCtxPushCurrent_v2 == NULL || st_real_cuCtxPopCurrent_v2 == NULL ||
        st_real_cuStreamGetCtx(stream, &context) != CUDA_SUCCESS || st_real_cuCtxGetCurrent(&current) != CUDA_SUCCESS ||
        context == current || st_real_cuCtxPushCurrent_v2(context) != CUDA_SUCCESS) {
        return st_current_device();
    }
    struct st_device *device = st_current_device();
    st_real_cuCtxPopCurrent_v2(&context);
    return device;
}

/* Take room for what the pool will have with `bytes` more in use. Locked. */
static bool grow(struct pool *pool, uint64_t bytes) {
    uint64_t used = pool->used;
    look(pool);
    pool->used = st_plus(used, bytes);
    if (pool->account == NULL) {
        return true;
    }
    uint64_t had = had_by(pool);
    if (had > pool->reserved && had < UINT64_MAX - STEP_BYTES) {
        had = (had + STEP_BYTES - 1) / STEP_BYTES * STEP_BYTES;
    }
    if (had > pool->counted) {
        if (!st_account_take(pool->account, had - pool->counted)) {
            pool->used = used;
            return false;
        }
        pool->counted = had;
    }
    return true;
}

/* Room for an allocation from this pool, NULL: the device's own. Without a pool that we can keep in mind it counts like
 * any other memory. Returns whether the driver may be asked. */
static bool claim_of_pool(struct st_claim *claim, CUmemoryPool handle, CUstream stream, uint64_t bytes,
                          struct pool **pool) {
    struct st_device *device = device_of(stream);
    claim->account = st_account_of(device);
    claim->bytes = bytes;
    *pool = NULL;
    if (claim->account == NULL) {
        return true;
    }
    if (handle == NULL && st_real_cuDeviceGetMemPool != NULL &&
        st_real_cuDeviceGetMemPool(&handle, device->ordinal) != CUDA_SUCCESS) {
        handle = NULL;
    }
    if (handle == NULL) {
        return st_claim_begin(claim, device, bytes);
    }
    st_memory_lock();
    *pool = pool_with(handle);
    *pool = *pool != NULL ? *pool : pool_made(handle, claim->account);
    if (*pool == NULL) {
        st_memory_unlock();
        return st_claim_begin(claim, device, bytes);
    }
    bool has_room = grow(*pool, bytes);
    if (!has_room) {
        st_pools_reclaim((*pool)->account);
        has_room = grow(*pool, bytes);
    }
    if (!has_room) {
        settle(*pool);
        st_account_denied((*pool)->account);
    }
    st_memory_unlock();
    return has_room;
}

static CUresult claim_of_pool_end(struct st_claim *claim, struct pool *pool, const CUdeviceptr *address,
                                  CUresult result) {
    if (pool == NULL) {
        return st_claim_end(claim, ST_HELD_ADDRESS, result == CUDA_SUCCESS ? *address : 0, result);
    }
    st_memory_lock();
    bool is_held = false;
    if (result == CUDA_SUCCESS) {
        const struct st_held held = {.kind = ST_HELD_ADDRESS,
                                     .is_pooled = true,
                                     .key = *address,
                                     .account = claim->account,
                                     .bytes = claim->bytes,
                                     .owner = (uint64_t)(pool - pools)};
        is_held = st_table_put(&held);
        atomic_store(&st_memory_is_unsettled, true);
    }
    if (!is_held) {
        pool->used -= claim->bytes < pool->used ? claim->bytes : pool->used;
    }
    settle(pool);
    st_memory_unlock();
    return result;
}

/* Memory for a graph: it is had when the graph runs. What would never fit is refused now. */
static bool may_graph_have(struct st_device *device, uint64_t bytes) {
    struct st_account *account = st_account_of(device);
    if (account == NULL) {
        return true;
    }
    st_memory_lock();
    bool has_room = st_account_has_room(account, bytes);
    if (!has_room) {
        st_pools_reclaim(account);
        has_room = st_account_has_room(account, bytes);
    }
    if (has_room) {
        account->has_graph_memory = true;
        atomic_store(&st_memory_is_unsettled, true);
    } else {
        st_account_denied(account);
    }
    st_memory_unlock();
    return has_room;
}

#define GETS_ASYNC(symbol, parameters, arguments, pool_handle, per_thread)                                             \
    ST_EXPORT CUresult symbol parameters {                                                                             \
        CALLS(symbol)                                                                                                  \
        if (!st_memory_is_counted()) {                                                                                 \
            return st_real_##symbol arguments;                                                                         \
        }                                                                                                              \
        if (st_is_capturing(stream, per_thread)) {                                                                     \
            bool has_room = may_graph_have(st_current_device(), bytes);                                                \
            return has_room ? st_real_##symbol arguments : CUDA_ERROR_OUT_OF_MEMORY;                                   \
        }                                                                                                              \
        struct st_claim claim;                                                                                         \
        struct pool *pool;                                                                                             \
        if (!claim_of_pool(&claim, pool_handle, stream, bytes, &pool)) {                                               \
            return CUDA_ERROR_OUT_OF_MEMORY;                                                                           \
        }                                                                                                              \
        if (claim.account == NULL) {                                                                                   \
            return st_real_##symbol arguments;                                                                         \
        }                                                                                                              \
        return claim_of_pool_end(&claim, pool, address, st_real_##symbol arguments);                                   \
    }

GETS_ASYNC(cuMemAllocAsync, (CUdeviceptr * address, size_t bytes, CUstream stream), (address, bytes, stream), NULL,
           false)
GETS_ASYNC(cuMemAllocAsync_ptsz, (CUdeviceptr * address, size_t bytes, CUstream stream), (address, bytes, stream), NULL,
           true)
GETS_ASYNC(cuMemAllocFromPoolAsync, (CUdeviceptr * address, size_t bytes, CUmemoryPool from, CUstream stream),
           (address, bytes, from, stream), from, false)
GETS_ASYNC(cuMemAllocFromPoolAsync_ptsz, (CUdeviceptr * address, size_t bytes, CUmemoryPool from, CUstream stream),
           (address, bytes, from, stream), from, true)

#define FREES_ASYNC(symbol, per_thread)                                                                                \
    ST_EXPORT CUresult symbol(CUdeviceptr address, CUstream stream) {                                                  \
        CALLS(symbol)                                                                                                  \
        struct st_held held;                                                                                           \
        bool is_held = !st_is_capturing(stream, per_thread) && st_release_begin(&held, ST_HELD_ADDRESS, address);      \
        return st_release_end(is_held, &held, st_real_##symbol(address, stream));                                      \
    }
FREES_ASYNC(cuMemFreeAsync, false)
FREES_ASYNC(cuMemFreeAsync_ptsz, true)

/* --- pools themselves --- */

ST_EXPORT CUresult cuMemPoolCreate(CUmemoryPool *handle, const CUmemPoolProps *about) {
    CALLS(cuMemPoolCreate)
    CUresult result = st_real_cuMemPoolCreate(handle, about);
    if (result != CUDA_SUCCESS || !st_memory_is_counted()) {
        return result;
    }
    bool is_on_device = about->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
    struct st_account *account = is_on_device ? st_account_of(st_device_of(about->location.id)) : NULL;
    st_memory_lock();
    pool_made(*handle, account);
    st_memory_unlock();
    return result;
}

ST_EXPORT CUresult cuMemPoolDestroy(CUmemoryPool handle) {
    CALLS(cuMemPoolDestroy)
    if (!st_memory_is_counted() || handle == NULL) {
        return st_real_cuMemPoolDestroy(handle);
    }
    /* Before the driver, which may give the handle to the next pool at once. */
    st_memory_lock();
    struct pool *pool = pool_with(handle);
    if (pool != NULL) {
        pool->handle = NULL;
    }
    st_memory_unlock();
    CUresult result = st_real_cuMemPoolDestroy(handle);
    if (pool != NULL) {
        st_memory_lock();
        pool->handle = result == CUDA_SUCCESS ? NULL : handle;
        settle(pool);
        st_memory_unlock();
    }
    return result;
}

ST_EXPORT CUresult cuMemPoolTrimTo(CUmemoryPool handle, size_t bytes) {
    CALLS(cuMemPoolTrimTo)
    CUresult result = st_real_cuMemPoolTrimTo(handle, bytes);
    if (result == CUDA_SUCCESS && st_memory_is_counted()) {
        st_memory_lock();
        struct pool *pool = handle == NULL ? NULL : pool_with(handle);
        if (pool != NULL) {
            settle(pool);
        }
        st_memory_unlock();
    }
    return result;
}

/* --- graphs --- */

ST_EXPORT CUresult cuDeviceGraphMemTrim(CUdevice device) {
    CALLS(cuDeviceGraphMemTrim)
    CUresult result = st_real_cuDeviceGraphMemTrim(device);
    if (result == CUDA_SUCCESS) {
        st_memory_settle();
    }
    return result;
}

ST_EXPORT CUresult cuGraphAddMemAllocNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies,
                                          size_t num_dependencies, CUDA_MEM_ALLOC_NODE_PARAMS *about) {
    CALLS(cuGraphAddMemAllocNode)
    if (about != NULL && about->poolProps.location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
        st_memory_is_counted() && !may_graph_have(st_device_of(about->poolProps.location.id), about->bytesize)) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    return st_real_cuGraphAddMemAllocNode(node, graph, dependencies, num_dependencies, about);
}

static bool may_add(const CUgraphNodeParams *about) {
    return about == NULL || about->type != CU_GRAPH_NODE_TYPE_MEM_ALLOC ||
           about->alloc.poolProps.location.type != CU_MEM_LOCATION_TYPE_DEVICE || !st_memory_is_counted() ||
           may_graph_have(st_device_of(about->alloc.poolProps.location.id), about->alloc.bytesize);
}

ST_EXPORT CUresult cuGraphAddNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies,
                                  size_t num_dependencies, CUgraphNodeParams *about) {
    CALLS(cuGraphAddNode)
    return may_add(about) ? st_real_cuGraphAddNode(node, graph, dependencies, num_dependencies, about)
                          : CUDA_ERROR_OUT_OF_MEMORY;
}

ST_EXPORT CUresult cuGraphAddNode_v2(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies,
                                     const CUgraphEdgeData *edges, size_t num_dependencies, CUgraphNodeParams *about) {
    CALLS(cuGraphAddNode_v2)
    return may_add(about) ? st_real_cuGraphAddNode_v2(node, graph, dependencies, edges, num_dependencies, about)
                          : CUDA_ERROR_OUT_OF_MEMORY;
}

#if CUDA_VERSION >= 13040
ST_EXPORT CUresult cuGraphAddNode_v3(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies,
                                     const CUgraphEdgeData *edges, size_t num_dependencies, CUgraphNodeParams *about) {
    CALLS(cuGraphAddNode_v3)
    return may_add(about) ? st_real_cuGraphAddNode_v3(node, graph, dependencies, edges, num_dependencies, about)
                          : CUDA_ERROR_OUT_OF_MEMORY;
}
#endif
