/* The stub driver's memory: linear allocations of all kinds, with real amounts and made-up addresses. */
#include "stub_memory.h"

#include <stdlib.h>

#define NUM_BUCKETS 4096
static struct stub_allocation *allocations[NUM_BUCKETS];
static _Atomic uint64_t next_address = STUB_FIRST_ADDRESS;
static _Atomic uint64_t next_small_address = 0x10000000; /* for the oldest functions, whose addresses have 32 bits */

static size_t bucket_of(CUdeviceptr address) {
    return (address >> 9) % NUM_BUCKETS;
}

CUdeviceptr stub_new_address(size_t bytes) {
    return atomic_fetch_add(&next_address, (bytes + 0x3ff) & ~(size_t)0x1ff);
}

void stub_keep(struct stub_allocation *allocation) {
    pthread_mutex_lock(&stub_lock);
    struct stub_allocation **at = &allocations[bucket_of(allocation->address)];
    allocation->next = *at;
    *at = allocation;
    pthread_mutex_unlock(&stub_lock);
}

static void give_back(struct stub_allocation *allocation) {
    if (allocation->pool != NULL) {
        stub_pool_shrink(allocation->pool, allocation->bytes);
    } else if (allocation->counts) {
        stub_give_memory(allocation->device, allocation->bytes);
    }
    free(allocation->host);
    free(allocation);
}

CUresult stub_may_allocate(void) {
    CUresult result = stub_check_context();
    return result == CUDA_SUCCESS ? stub_forbid_in_capture() : result;
}

static CUresult allocate(CUdeviceptr *address, size_t bytes, bool is_managed, bool is_small) {
    CUresult result = stub_may_allocate();
    if (result != CUDA_SUCCESS) {
        return result;
    }
    if (bytes == 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    struct CUctx_st *context = stub_current();
    if (!stub_take_memory(context->device, bytes)) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    struct stub_allocation *it = calloc(1, sizeof(*it));
    it->bytes = bytes;
    it->context = context;
    it->device = context->device;
    it->counts = true;
    it->host = is_managed ? calloc(1, bytes) : NULL;
    it->address = is_managed ? (CUdeviceptr)(uintptr_t)it->host
                  : is_small ? atomic_fetch_add(&next_small_address, (bytes + 0x3ff) & ~(size_t)0x1ff)
                             : stub_new_address(bytes);
    stub_keep(it);
    *address = it->address;
    return CUDA_SUCCESS;
}

CUresult stub_release(CUdeviceptr address) {
    struct stub_allocation *found = NULL;
    pthread_mutex_lock(&stub_lock);
    for (struct stub_allocation **at = &allocations[bucket_of(address)]; *at != NULL; at = &(*at)->next) {
        if ((*at)->address == address) {
            found = *at;
            *at = found->next;
            break;
        }
    }
    pthread_mutex_unlock(&stub_lock);
    if (found == NULL) {
        return address == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    }
    give_back(found);
    return CUDA_SUCCESS;
}

/* The allocation around an address; the caller holds the lock. */
static struct stub_allocation *around(CUdeviceptr address) {
    for (size_t i = 0; i < NUM_BUCKETS; i++) {
        for (struct stub_allocation *it = allocations[i]; it != NULL; it = it->next) {
            if (address >= it->address && address < it->address + it->bytes) {
                return it;
            }
        }
    }
    return NULL;
}

void stub_drop_memory_of(struct CUctx_st *context) {
    for (size_t i = 0; i < NUM_BUCKETS; i++) {
        for (struct stub_allocation **at = &allocations[i]; *at != NULL;) {
            struct stub_allocation *it = *at;
            if (it->context == context && it->pool == NULL) {
                *at = it->next;
                give_back(it);
            } else {
                at = &it->next;
            }
        }
    }
    stub_drop_arrays_of(context);
}

CUresult cuMemAlloc(CUdeviceptr_v1 *address, unsigned int bytes) {
    ENTER(cuMemAlloc);
    CUdeviceptr wide;
    CUresult result = allocate(&wide, bytes, false, true);
    if (result == CUDA_SUCCESS) {
        *address = (CUdeviceptr_v1)wide;
    }
    return result;
}

CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes) {
    ENTER(cuMemAlloc_v2);
    return allocate(address, bytes, false, false);
}

CUresult cuMemAllocManaged(CUdeviceptr *address, size_t bytes, unsigned int flags) {
    ENTER(cuMemAllocManaged);
    return allocate(address, bytes, true, false);
}

CUresult cuMemAllocPitch(CUdeviceptr_v1 *address, unsigned int *pitch, unsigned int width, unsigned int height,
                         unsigned int element) {
    ENTER(cuMemAllocPitch);
    CUdeviceptr wide;
    unsigned int row = (width + 511u) & ~511u;
    CUresult result = allocate(&wide, (size_t)row * height, false, true);
    if (result == CUDA_SUCCESS) {
        *address = (CUdeviceptr_v1)wide;
        *pitch = row;
    }
    return result;
}

CUresult cuMemAllocPitch_v2(CUdeviceptr *address, size_t *pitch, size_t width, size_t height, unsigned int element) {
    ENTER(cuMemAllocPitch_v2);
    size_t row = (width + 511) & ~(size_t)511;
    CUresult result = allocate(address, row * height, false, false);
    if (result == CUDA_SUCCESS) {
        *pitch = row;
    }
    return result;
}

CUresult cuMemFree(CUdeviceptr_v1 address) {
    ENTER(cuMemFree);
    CUresult result = stub_may_allocate();
    return result == CUDA_SUCCESS ? stub_release(address) : result;
}

CUresult cuMemFree_v2(CUdeviceptr address) {
    ENTER(cuMemFree_v2);
    CUresult result = stub_may_allocate();
    return result == CUDA_SUCCESS ? stub_release(address) : result;
}

CUresult cuMemGetInfo(unsigned int *free_bytes, unsigned int *total_bytes) {
    ENTER(cuMemGetInfo);
    CUresult result = stub_check_context();
    if (result == CUDA_SUCCESS) {
        uint64_t left = stub_free_bytes(stub_current()->device);
        uint64_t total = stub_devices[stub_current()->device].total_bytes;
        *free_bytes = left > UINT32_MAX ? UINT32_MAX : (unsigned int)left;
        *total_bytes = total > UINT32_MAX ? UINT32_MAX : (unsigned int)total;
    }
    return result;
}

CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes) {
    ENTER(cuMemGetInfo_v2);
    CUresult result = stub_check_context();
    if (result == CUDA_SUCCESS) {
        *free_bytes = stub_free_bytes(stub_current()->device);
        *total_bytes = stub_devices[stub_current()->device].total_bytes;
    }
    return result;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr address) {
    ENTER(cuMemGetAddressRange_v2);
    pthread_mutex_lock(&stub_lock);
    const struct stub_allocation *it = around(address);
    if (it != NULL && base != NULL) {
        *base = it->address;
    }
    if (it != NULL && size != NULL) {
        *size = it->bytes;
    }
    pthread_mutex_unlock(&stub_lock);
    return it == NULL ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr address) {
    ENTER(cuPointerGetAttribute);
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&stub_lock);
    const struct stub_allocation *it = around(address);
    if (it == NULL) {
        result = CUDA_ERROR_INVALID_VALUE;
    } else if (attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE) {
        *(unsigned int *)data = CU_MEMORYTYPE_DEVICE;
    } else if (attribute == CU_POINTER_ATTRIBUTE_IS_MANAGED) {
        *(unsigned int *)data = it->host != NULL;
    } else if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) {
        *(int *)data = it->device;
    } else if (attribute == CU_POINTER_ATTRIBUTE_CONTEXT) {
        *(CUcontext *)data = it->context;
    } else {
        result = CUDA_ERROR_INVALID_VALUE;
    }
    pthread_mutex_unlock(&stub_lock);
    return result;
}

/* Memory of the host is nobody's device memory. */
CUresult cuMemAllocHost_v2(void **address, size_t bytes) {
    ENTER(cuMemAllocHost_v2);
    *address = malloc(bytes);
    return stub_check_context();
}

CUresult cuMemHostAlloc(void **address, size_t bytes, unsigned int flags) {
    ENTER(cuMemHostAlloc);
    *address = malloc(bytes);
    return stub_check_context();
}

CUresult cuMemFreeHost(void *address) {
    ENTER(cuMemFreeHost);
    free(address);
    return CUDA_SUCCESS;
}

/* --- memory of another process --- */

struct shared_handle {
    uint64_t magic;
    uint64_t bytes;
};

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address) {
    ENTER(cuIpcGetMemHandle);
    pthread_mutex_lock(&stub_lock);
    const struct stub_allocation *it = around(address);
    struct shared_handle shared = {.magic = 0x53545542, .bytes = it == NULL ? 0 : it->bytes};
    pthread_mutex_unlock(&stub_lock);
    memset(handle, 0, sizeof(*handle));
    memcpy(handle, &shared, sizeof(shared));
    return shared.bytes == 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

static CUresult open_shared(CUdeviceptr *address, CUipcMemHandle handle) {
    CUresult result = stub_may_allocate();
    struct shared_handle shared;
    memcpy(&shared, &handle, sizeof(shared));
    if (result != CUDA_SUCCESS || shared.magic != 0x53545542) {
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_INVALID_VALUE;
    }
    struct stub_allocation *it = calloc(1, sizeof(*it));
    it->bytes = shared.bytes;
    it->context = stub_current();
    it->device = it->context->device;
    it->address = stub_new_address(it->bytes);
    stub_keep(it);
    *address = it->address;
    return CUDA_SUCCESS;
}

CUresult cuIpcOpenMemHandle(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags) {
    ENTER(cuIpcOpenMemHandle);
    return open_shared(address, handle);
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags) {
    ENTER(cuIpcOpenMemHandle_v2);
    return open_shared(address, handle);
}

CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    ENTER(cuIpcCloseMemHandle);
    return stub_release(address);
}
