/* The memory limit, on the plain ways to get memory: room is taken before the driver is asked, and given back if it
 * fails. What is freed is looked up before the driver frees it, for the driver may give the same address to another
 * thread before we are back. What we do not know was had before us or from somebody else, and is freed without a word.
 */
#include <string.h>

#include "memory_rooms.h"

#define PITCH_BYTES 512

uint64_t st_plus(uint64_t a, uint64_t b) {
    uint64_t sum;
    return __builtin_add_overflow(a, b, &sum) ? UINT64_MAX : sum;
}

uint64_t st_times(uint64_t a, uint64_t b) {
    uint64_t product;
    return __builtin_mul_overflow(a, b, &product) ? UINT64_MAX : product;
}

/* --- claims --- */

bool st_claim_begin(struct st_claim *claim, struct st_device *device, uint64_t bytes) {
    claim->account = st_account_of(device);
    claim->bytes = bytes;
    if (claim->account == NULL) {
        return true;
    }
    st_memory_lock();
    bool has_room = st_account_take(claim->account, bytes);
    if (!has_room) {
        st_pools_reclaim(claim->account);
        has_room = st_account_take(claim->account, bytes);
    }
    if (!has_room) {
        st_account_denied(claim->account);
    }
    st_memory_unlock();
    return has_room;
}

/* Whether `context` is the primary one of the account's device. Asked once for each generation of contexts. */
static bool is_primary(struct st_account *account, CUcontext context) {
    uint32_t epoch = atomic_load(&st_context_epoch) + 1;
    st_memory_lock();
    bool is_known = account->primary_epoch == epoch;
    CUcontext primary = account->primary;
    st_memory_unlock();
    if (!is_known) {
        unsigned int flags;
        int is_active = 0;
        CUdevice device = account->device->ordinal;
        primary = NULL;
        if (st_real_cuDevicePrimaryCtxGetState == NULL || st_real_cuDevicePrimaryCtxRetain == NULL ||
            st_real_cuDevicePrimaryCtxRelease_v2 == NULL || atomic_load(&st_num_captures) != 0) {
            return false;
        }
        if (st_real_cuDevicePrimaryCtxGetState(device, &flags, &is_active) == CUDA_SUCCESS && is_active &&
            st_real_cuDevicePrimaryCtxRetain(&primary, device) == CUDA_SUCCESS) {
            st_real_cuDevicePrimaryCtxRelease_v2(device);
        }
        st_memory_lock();
        account->primary = primary;
        account->primary_epoch = epoch;
        st_memory_unlock();
    }
    return primary == context;
}

/* Of a device's primary context 0 is remembered, which is how device.c tells of its end. */
static uint64_t owner_of(struct st_account *account) {
    CUcontext context = NULL;
    if (st_real_cuCtxGetCurrent == NULL || st_real_cuCtxGetCurrent(&context) != CUDA_SUCCESS ||
        is_primary(account, context)) {
        return 0;
    }
    return (uint64_t)(uintptr_t)context;
}

CUresult st_claim_end(struct st_claim *claim, enum st_held_kind kind, uint64_t key, CUresult result) {
    if (claim->account == NULL) {
        return result;
    }
    bool is_held = result == CUDA_SUCCESS && key != 0;
    struct st_held held = {.kind = kind, .key = key, .account = claim->account, .bytes = claim->bytes};
    if (is_held) {
        held.owner = owner_of(claim->account);
    }
    st_memory_lock();
    if (!is_held || !st_table_put(&held)) {
        st_account_give(claim->account, claim->bytes);
    }
    st_memory_unlock();
    return result;
}

/* The driver gave another amount than was asked for; returns false where there is no room for it. */
static bool claim_is_now(struct st_claim *claim, uint64_t bytes) {
    if (claim->account == NULL || bytes == claim->bytes) {
        return true;
    }
    st_memory_lock();
    bool has_room = true;
    if (bytes < claim->bytes) {
        st_account_give(claim->account, claim->bytes - bytes);
    } else {
        has_room = st_account_take(claim->account, bytes - claim->bytes);
        if (!has_room) {
            st_account_denied(claim->account);
        }
    }
    claim->bytes = has_room ? bytes : claim->bytes;
    st_memory_unlock();
    return has_room;
}

bool st_release_begin(struct st_held *held, enum st_held_kind kind, uint64_t key) {
    if (!st_memory_is_counted()) {
        return false;
    }
    st_memory_lock();
    bool is_held = st_table_take(kind, key, held);
    st_memory_unlock();
    return is_held;
}

CUresult st_release_end(bool is_held, const struct st_held *held, CUresult result) {
    if (is_held) {
        st_memory_lock();
        if (result != CUDA_SUCCESS) {
            st_table_put(held);
        } else if (held->is_pooled) {
            st_pool_freed(held->owner, held->bytes);
        } else {
            st_account_give(held->account, held->bytes);
        }
        st_memory_unlock();
    }
    return result;
}

/* --- arrays --- */

static bool is_among(unsigned int format, const uint8_t *formats, size_t num_formats) {
    return memchr(formats, (int)format, num_formats) != NULL;
}

/* What one texel takes. The driver's own padding cannot be asked for. */
static uint64_t bits_of_texel(unsigned int format, unsigned int num_channels) {
    /* Formats that say all of a texel themselves; numbers, because older headers lack some of the names. */
    static const uint8_t bits_4[] = {0x91, 0x92, 0x97, 0x98};
    static const uint8_t bits_8[] = {0x93, 0x94, 0x95, 0x96, 0x99, 0x9a, 0x9b, 0x9c, 0x9d, 0x9e, 0xc0, 0xc6};
    static const uint8_t bits_12[] = {0xb0, 0x53, 0x59};
    static const uint8_t bits_16[] = {0xa2, 0xa5, 0x51, 0x55, 0x5b, 0xc1, 0xc3, 0xc7, 0xc9};
    static const uint8_t bits_24[] = {0x9f, 0xa1, 0xb2, 0xb4, 0x52, 0x54, 0x57, 0x5a, 0x5d};
    static const uint8_t bits_32[] = {0xa3, 0xa4, 0xa6, 0xa7, 0xa8, 0xa9, 0x50, 0x56, 0x5c, 0xc2, 0xc4, 0xc8, 0xca};
    static const uint8_t bits_48[] = {0xb3, 0xb5, 0x58, 0x5e};
    static const uint8_t bits_64[] = {0xb1, 0xc5, 0xcb};
    static const struct {
        const uint8_t *formats;
        size_t num_formats;
        uint64_t bits;
    } whole[] = {
        {bits_4, sizeof(bits_4), 4},    {bits_8, sizeof(bits_8), 8},    {bits_12, sizeof(bits_12), 12},
        {bits_16, sizeof(bits_16), 16}, {bits_24, sizeof(bits_24), 24}, {bits_32, sizeof(bits_32), 32},
        {bits_48, sizeof(bits_48), 48}, {bits_64, sizeof(bits_64), 64},
    };
    for (size_t i = 0; i < sizeof(whole) / sizeof(whole[0]); i++) {
        if (is_among(format, whole[i].formats, whole[i].num_formats)) {
            return whole[i].bits;
        }
    }
    uint64_t bits = 32;
    if (format == CU_AD_FORMAT_UNSIGNED_INT8 || format == CU_AD_FORMAT_SIGNED_INT8) {
        bits = 8;
    } else if (format == CU_AD_FORMAT_UNSIGNED_INT16 || format == CU_AD_FORMAT_SIGNED_INT16 ||
               format == CU_AD_FORMAT_HALF) {
        bits = 16;
    }
    return bits * (num_channels == 0 ? 1 : num_channels);
}

static uint64_t bytes_of_texels(uint64_t width, uint64_t height, uint64_t depth, uint64_t bits) {
    uint64_t texels = st_times(st_times(width, height == 0 ? 1 : height), depth == 0 ? 1 : depth);
    uint64_t all_bits = st_times(texels, bits);
    return all_bits == UINT64_MAX ? UINT64_MAX : (all_bits + 7) / 8;
}

static uint64_t bytes_of_array(const CUDA_ARRAY_DESCRIPTOR *array) {
    return array == NULL
               ? 0
               : bytes_of_texels(array->Width, array->Height, 1, bits_of_texel(array->Format, array->NumChannels));
}

static uint64_t bytes_of_array_3d(const CUDA_ARRAY3D_DESCRIPTOR *array, unsigned int num_levels) {
    if (array == NULL || (array->Flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING)) != 0) {
        return 0; /* an address without memory: that is created and mapped for itself */
    }
    uint64_t width = array->Width, height = array->Height, depth = array->Depth, bytes = 0;
    bool is_layered = (array->Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP)) != 0;
    for (unsigned int level = 0; level < num_levels && level < 64; level++) {
        bytes = st_plus(bytes, bytes_of_texels(width, height, depth, bits_of_texel(array->Format, array->NumChannels)));
        if (width <= 1 && height <= 1 && (is_layered || depth <= 1)) {
            break;
        }
        width = width > 1 ? width / 2 : width;
        height = height > 1 ? height / 2 : height;
        depth = !is_layered && depth > 1 ? depth / 2 : depth;
    }
    return bytes;
}

static uint64_t bytes_of_old_array(const CUDA_ARRAY_DESCRIPTOR_v1 *array) {
    return array == NULL
               ? 0
               : bytes_of_texels(array->Width, array->Height, 1, bits_of_texel(array->Format, array->NumChannels));
}

static uint64_t bytes_of_old_array_3d(const CUDA_ARRAY3D_DESCRIPTOR_v1 *array) {
    if (array == NULL) {
        return 0;
    }
    const CUDA_ARRAY3D_DESCRIPTOR same = {.Width = array->Width,
                                          .Height = array->Height,
                                          .Depth = array->Depth,
                                          .Format = array->Format,
                                          .NumChannels = array->NumChannels,
                                          .Flags = array->Flags};
    return bytes_of_array_3d(&same, 1);
}

/* --- the hooks --- */

/* Gets `amount` bytes of the current device; what it got is `*where`. */
#define GETS(symbol, parameters, arguments, amount, kind, where)                                                       \
    ST_EXPORT CUresult symbol parameters {                                                                             \
        CALLS(symbol)                                                                                                  \
        struct st_claim claim;                                                                                         \
        if (!st_claim_begin(&claim, st_current_device(), amount)) {                                                    \
            return CUDA_ERROR_OUT_OF_MEMORY;                                                                           \
        }                                                                                                              \
        CUresult result = st_real_##symbol arguments;                                                                  \
        return st_claim_end(&claim, kind, result == CUDA_SUCCESS ? (uint64_t)*where : 0, result);                      \
    }
#define FREES(symbol, type, kind)                                                                                      \
    ST_EXPORT CUresult symbol(type what) {                                                                             \
        CALLS(symbol)                                                                                                  \
        struct st_held held;                                                                                           \
        bool is_held = st_release_begin(&held, kind, (uint64_t)what);                                                  \
        return st_release_end(is_held, &held, st_real_##symbol(what));                                                 \
    }

GETS(cuMemAlloc, (CUdeviceptr_v1 * address, unsigned int bytes), (address, bytes), bytes, ST_HELD_ADDRESS, address)
GETS(cuMemAlloc_v2, (CUdeviceptr * address, size_t bytes), (address, bytes), bytes, ST_HELD_ADDRESS, address)
GETS(cuMemAllocManaged, (CUdeviceptr * address, size_t bytes, unsigned int flags), (address, bytes, flags), bytes,
     ST_HELD_ADDRESS, address)
FREES(cuMemFree, CUdeviceptr_v1, ST_HELD_ADDRESS)
FREES(cuMemFree_v2, CUdeviceptr, ST_HELD_ADDRESS)

GETS(cuArrayCreate, (CUarray * array, const CUDA_ARRAY_DESCRIPTOR_v1 *about), (array, about),
     bytes_of_old_array(about), ST_HELD_ARRAY, array)
GETS(cuArrayCreate_v2, (CUarray * array, const CUDA_ARRAY_DESCRIPTOR *about), (array, about), bytes_of_array(about),
     ST_HELD_ARRAY, array)
GETS(cuArray3DCreate, (CUarray * array, const CUDA_ARRAY3D_DESCRIPTOR_v1 *about), (array, about),
     bytes_of_old_array_3d(about), ST_HELD_ARRAY, array)
GETS(cuArray3DCreate_v2, (CUarray * array, const CUDA_ARRAY3D_DESCRIPTOR *about), (array, about),
     bytes_of_array_3d(about, 1), ST_HELD_ARRAY, array)
GETS(cuMipmappedArrayCreate, (CUmipmappedArray * array, const CUDA_ARRAY3D_DESCRIPTOR *about, unsigned int num_levels),
     (array, about, num_levels), bytes_of_array_3d(about, num_levels), ST_HELD_ARRAY, array)
FREES(cuArrayDestroy, CUarray, ST_HELD_ARRAY)
FREES(cuMipmappedArrayDestroy, CUmipmappedArray, ST_HELD_ARRAY)

/* Imported from another interface: nobody else here counts it. Memory of another CUDA process (cuIpcOpenMemHandle,
 * cuMemImportFromShareableHandle) is counted where it was made. */
GETS(cuImportExternalMemory, (CUexternalMemory * memory, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *about),
     (memory, about), about == NULL ? 0 : about->size, ST_HELD_EXTERNAL, memory)
FREES(cuDestroyExternalMemory, CUexternalMemory, ST_HELD_EXTERNAL)

static uint64_t pitched(uint64_t width) {
    return width > UINT64_MAX - PITCH_BYTES ? UINT64_MAX : (width + PITCH_BYTES - 1) / PITCH_BYTES * PITCH_BYTES;
}

/* The pitch is the driver's choice: what it comes to is known afterwards. */
#define GETS_PITCHED(symbol, address_type, size_type, free_symbol)                                                     \
    ST_EXPORT CUresult symbol(address_type *address, size_type *pitch, size_type width, size_type height,              \
                              unsigned int element_bytes) {                                                            \
        CALLS(symbol)                                                                                                  \
        struct st_claim claim;                                                                                         \
        if (!st_claim_begin(&claim, st_current_device(), st_times(pitched(width), height))) {                          \
            return CUDA_ERROR_OUT_OF_MEMORY;                                                                           \
        }                                                                                                              \
        CUresult result = st_real_##symbol(address, pitch, width, height, element_bytes);                              \
        if (result == CUDA_SUCCESS && !claim_is_now(&claim, st_times(*pitch, height)) &&                               \
            st_real_##free_symbol != NULL) {                                                                           \
            st_real_##free_symbol(*address);                                                                           \
            result = CUDA_ERROR_OUT_OF_MEMORY;                                                                         \
        }                                                                                                              \
        return st_claim_end(&claim, ST_HELD_ADDRESS, result == CUDA_SUCCESS ? *address : 0, result);                   \
    }
GETS_PITCHED(cuMemAllocPitch, CUdeviceptr_v1, unsigned int, cuMemFree)
GETS_PITCHED(cuMemAllocPitch_v2, CUdeviceptr, size_t, cuMemFree_v2)

/* --- contexts that go take their memory with them --- */

static bool is_of_context(const struct st_held *held, const struct st_account *account, CUcontext context) {
    bool is_kind = held->kind == ST_HELD_ADDRESS || held->kind == ST_HELD_ARRAY || held->kind == ST_HELD_EXTERNAL;
    return is_kind && !held->is_pooled && held->account == account && held->owner == (uint64_t)(uintptr_t)context;
}

void st_memory_context_gone(struct st_device *device, CUcontext context) {
    st_memory_lock();
    struct st_account *account = st_account_known(device);
    if (account != NULL) {
        size_t index = 0;
        for (struct st_held *held = st_table_next(&index); held != NULL; held = st_table_next(&index)) {
            struct st_held gone;
            if (is_of_context(held, account, context) && st_table_take(held->kind, held->key, &gone)) {
                st_account_give(account, gone.bytes);
                index--;
            }
        }
        if (context == NULL) {
            st_pools_of_context_gone(account);
        }
    }
    st_memory_unlock();
}
