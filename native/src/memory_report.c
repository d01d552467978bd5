/* What a program is told of the device's memory: the tenant's limit as all there is, and what is left of it as free.
 * Frameworks take a part of what is free at their start, so what they are told decides whether they fit.
 */
#include "memory_rooms.h"

static uint64_t least(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

/* Both as the driver says them, then as the tenant has them. */
static void within_limit(struct st_device *device, uint64_t *free_bytes, uint64_t *total_bytes) {
    struct st_account *account = st_account_of(device);
    if (account == NULL) {
        return;
    }
    uint64_t limit, used;
    st_memory_lock();
    if (account->bucket != NULL && st_memory_of_tenant(account->bucket, &limit, &used)) {
        *total_bytes = least(*total_bytes, limit);
        *free_bytes = least(*free_bytes, used < limit ? limit - used : 0);
    }
    st_memory_unlock();
}

#define TELLS_INFO(symbol, type)                                                                                       \
    ST_EXPORT CUresult symbol(type *free_bytes, type *total_bytes) {                                                   \
        CALLS(symbol)                                                                                                  \
        CUresult result = st_real_##symbol(free_bytes, total_bytes);                                                   \
        if (result == CUDA_SUCCESS && free_bytes != NULL && total_bytes != NULL) {                                     \
            uint64_t is_free = *free_bytes, in_all = *total_bytes;                                                     \
            within_limit(st_current_device(), &is_free, &in_all);                                                      \
            *free_bytes = (type)is_free;                                                                               \
            *total_bytes = (type)in_all;                                                                               \
        }                                                                                                              \
        return result;                                                                                                 \
    }
TELLS_INFO(cuMemGetInfo, unsigned int)
TELLS_INFO(cuMemGetInfo_v2, size_t)

#define TELLS_TOTAL(symbol, type)                                                                                      \
    ST_EXPORT CUresult symbol(type *total_bytes, CUdevice device) {                                                    \
        CALLS(symbol)                                                                                                  \
        CUresult result = st_real_##symbol(total_bytes, device);                                                       \
        if (result == CUDA_SUCCESS && total_bytes != NULL && st_memory_is_counted()) {                                 \
            uint64_t is_free = 0, in_all = *total_bytes;                                                               \
            within_limit(st_device_of(device), &is_free, &in_all);                                                     \
            *total_bytes = (type)in_all;                                                                               \
        }                                                                                                              \
        return result;                                                                                                 \
    }
TELLS_TOTAL(cuDeviceTotalMem, unsigned int)
TELLS_TOTAL(cuDeviceTotalMem_v2, size_t)
