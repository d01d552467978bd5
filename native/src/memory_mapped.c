/* Physical memory that a program creates, maps where it wants to, and releases (virtual memory management). The driver
 * keeps it until its last handle is released and its last mapping is gone, in whatever order, and so do we. Memory of
 * the host is nobody's concern here, and what was imported from another process is counted there.
 */
#include "memory_rooms.h"

static uint64_t last_number; /* of physical memory, under the lock */

static bool remember(struct st_account *account, uint64_t bytes, CUmemGenericAllocationHandle handle) {
    uint64_t number = ++last_number;
    const struct st_held physical = {
        .kind = ST_HELD_PHYSICAL, .key = number, .account = account, .bytes = bytes, .count = 1};
    const struct st_held its_handle = {.kind = ST_HELD_HANDLE, .key = handle, .owner = number, .count = 1};
    if (!st_table_put(&physical)) {
        return false;
    }
    if (!st_table_put(&its_handle)) {
        struct st_held nothing;
        st_table_take(ST_HELD_PHYSICAL, number, &nothing);
        return false;
    }
    return true;
}

/* One handle or mapping fewer of this physical memory. Locked. */
static void drop(uint64_t number) {
    struct st_held *physical = st_table_find(ST_HELD_PHYSICAL, number);
    if (physical != NULL && --physical->count == 0) {
        struct st_held gone;
        st_table_take(ST_HELD_PHYSICAL, number, &gone);
        st_account_give(gone.account, gone.bytes);
    }
}

/* One handle or mapping more. Locked. */
static bool keep(uint64_t number) {
    struct st_held *physical = st_table_find(ST_HELD_PHYSICAL, number);
    if (physical == NULL) {
        return false;
    }
    physical->count++;
    return true;
}

ST_EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *about,
                               unsigned long long flags) {
    CALLS(cuMemCreate)
    struct st_claim claim = {0};
    if (about != NULL && about->location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
        !st_claim_begin(&claim, st_device_of(about->location.id), bytes)) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    CUresult result = st_real_cuMemCreate(handle, bytes, about, flags);
    if (claim.account != NULL) {
        st_memory_lock();
        if (result != CUDA_SUCCESS || !remember(claim.account, bytes, *handle)) {
            st_account_give(claim.account, bytes);
        }
        st_memory_unlock();
    }
    return result;
}

ST_EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    CALLS(cuMemRelease)
    if (!st_memory_is_counted()) {
        return st_real_cuMemRelease(handle);
    }
    /* Before the driver, which may give the number of this handle to somebody else at once. */
    st_memory_lock();
    struct st_held *found = st_table_find(ST_HELD_HANDLE, handle);
    bool is_known = found != NULL;
    uint64_t number = is_known ? found->owner : 0;
    if (is_known && --found->count == 0) {
        struct st_held gone;
        st_table_take(ST_HELD_HANDLE, handle, &gone);
    }
    st_memory_unlock();
    CUresult result = st_real_cuMemRelease(handle);
    if (is_known) {
        st_memory_lock();
        if (result == CUDA_SUCCESS) {
            drop(number);
        } else if ((found = st_table_find(ST_HELD_HANDLE, handle)) != NULL) {
            found->count++;
        } else {
            const struct st_held again = {.kind = ST_HELD_HANDLE, .key = handle, .owner = number, .count = 1};
            st_table_put(&again);
        }
        st_memory_unlock();
    }
    return result;
}

ST_EXPORT CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                            unsigned long long flags) {
    CALLS(cuMemMap)
    CUresult result = st_real_cuMemMap(address, bytes, offset, handle, flags);
    if (result == CUDA_SUCCESS && st_memory_is_counted()) {
        st_memory_lock();
        const struct st_held *found = st_table_find(ST_HELD_HANDLE, handle);
        uint64_t number = found == NULL ? 0 : found->owner;
        const struct st_held mapping = {.kind = ST_HELD_MAPPING, .key = address, .bytes = bytes, .owner = number};
        if (keep(number) && !st_table_put(&mapping)) {
            drop(number);
        }
        st_memory_unlock();
    }
    return result;
}

ST_EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
    CALLS(cuMemUnmap)
    CUresult result = st_real_cuMemUnmap(address, bytes);
    if (result == CUDA_SUCCESS && st_memory_is_counted()) {
        /* Several mappings side by side can go at once; one that is not ours has no known length and ends the walk. */
        struct st_held gone;
        uint64_t done = 0;
        st_memory_lock();
        while (done < bytes && st_table_take(ST_HELD_MAPPING, address + done, &gone)) {
            drop(gone.owner);
            done += gone.bytes == 0 ? bytes : gone.bytes;
        }
        st_memory_unlock();
    }
    return result;
}

/* The number of what is mapped at an address inside of a mapping; 0: nothing of ours. Locked. */
static uint64_t mapped_at(uint64_t address) {
    size_t index = 0;
    for (const struct st_held *held = st_table_next(&index); held != NULL; held = st_table_next(&index)) {
        if (held->kind == ST_HELD_MAPPING && address >= held->key && address - held->key < held->bytes) {
            return held->owner;
        }
    }
    return 0;
}

ST_EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    CALLS(cuMemRetainAllocationHandle)
    CUresult result = st_real_cuMemRetainAllocationHandle(handle, address);
    if (result == CUDA_SUCCESS && st_memory_is_counted()) {
        st_memory_lock();
        uint64_t number = mapped_at((uint64_t)(uintptr_t)address);
        struct st_held *found = st_table_find(ST_HELD_HANDLE, *handle);
        if (keep(number)) {
            const struct st_held another = {.kind = ST_HELD_HANDLE, .key = *handle, .owner = number, .count = 1};
            if (found != NULL) {
                found->count++;
            } else if (!st_table_put(&another)) {
                drop(number);
            }
        }
        st_memory_unlock();
    }
    return result;
}
