/* What a program is told of the device's memory by NVML: the same as by the driver. A program finds NVML's functions by
 * dlsym, where resolve.c lets us take their place, or links them directly, where ours come first because we are
 * preloaded. NVML's types are declared here: its header is not everywhere where cuda.h is.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#include "client.h"
#include "memory_rooms.h"

#define NVML_SUCCESS 0
#define NVML_ERROR_FUNCTION_NOT_FOUND 13
#define UUID_TEXT_BYTES 96
#define NUM_UNUSED 16

typedef int nvmlReturn_t;
typedef struct nvmlDevice_st *nvmlDevice_t;
typedef struct {
    unsigned long long total;
    unsigned long long free;
    unsigned long long used;
} nvmlMemory_t;
typedef struct {
    unsigned int version;
    unsigned long long total;
    unsigned long long reserved;
    unsigned long long free;
    unsigned long long used;
} nvmlMemory_v2_t;

ST_EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory);
ST_EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory);

static nvmlReturn_t (*_Atomic true_info)(nvmlDevice_t, nvmlMemory_t *);
static nvmlReturn_t (*_Atomic true_info_v2)(nvmlDevice_t, nvmlMemory_v2_t *);

/* Buckets of devices that this process has not used yet; NVML may be asked before the driver is initialised. */
static pthread_mutex_t unused_lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    uint8_t uuid[ST_UUID_BYTES];
    struct st_bucket *bucket;
    uint64_t ask_again_ns;
} unused[NUM_UNUSED];
static size_t num_unused;

void *st_nvml_ours(const char *name, void *true_address) {
    if (strcmp(name, "nvmlDeviceGetMemoryInfo") == 0) {
        atomic_store(&true_info, (nvmlReturn_t(*)(nvmlDevice_t, nvmlMemory_t *))true_address);
        return (void *)nvmlDeviceGetMemoryInfo;
    }
    if (strcmp(name, "nvmlDeviceGetMemoryInfo_v2") == 0) {
        atomic_store(&true_info_v2, (nvmlReturn_t(*)(nvmlDevice_t, nvmlMemory_v2_t *))true_address);
        return (void *)nvmlDeviceGetMemoryInfo_v2;
    }
    return NULL;
}

void st_nvml_forked(void) {
    unused_lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    num_unused = 0;
}

/* --- which device --- */

static int hex_of(char digit) {
    if (digit >= '0' && digit <= '9') {
        return digit - '0';
    }
    if (digit >= 'a' && digit <= 'f') {
        return digit - 'a' + 10;
    }
    return digit >= 'A' && digit <= 'F' ? digit - 'A' + 10 : -1;
}

/* "GPU-01234567-89ab-...": a part of a device ("MIG-...") is not ours to speak of. */
static bool read_uuid(const char *text, uint8_t uuid[ST_UUID_BYTES]) {
    if (strncmp(text, "GPU-", 4) != 0) {
        return false;
    }
    int num_digits = 0;
    for (text += 4; *text != 0; text++) {
        int digit = hex_of(*text);
        if (*text == '-') {
            continue;
        }
        if (digit < 0 || num_digits == 2 * ST_UUID_BYTES) {
            return false;
        }
        uuid[num_digits / 2] = (uint8_t)(num_digits % 2 == 0 ? digit << 4 : uuid[num_digits / 2] | digit);
        num_digits++;
    }
    return num_digits == 2 * ST_UUID_BYTES;
}

/* NVML's nvmlDeviceGetUUID, from the library that one of its functions is in. */
static bool uuid_of(void *sibling, nvmlDevice_t device, uint8_t uuid[ST_UUID_BYTES]) {
    Dl_info about;
    char text[UUID_TEXT_BYTES] = "";
    void *library = dladdr(sibling, &about) == 0 ? NULL : dlopen(about.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    if (library == NULL) {
        return false;
    }
    nvmlReturn_t (*get_uuid)(nvmlDevice_t, char *, unsigned int) =
        (nvmlReturn_t(*)(nvmlDevice_t, char *, unsigned int))dlsym(library, "nvmlDeviceGetUUID");
    bool is_read = get_uuid != NULL && get_uuid(device, text, sizeof(text)) == NVML_SUCCESS;
    dlclose(library);
    text[sizeof(text) - 1] = 0;
    return is_read && read_uuid(text, uuid);
}

static struct st_bucket *bucket_of_unused(const uint8_t uuid[ST_UUID_BYTES]) {
    struct st_bucket *bucket = NULL;
    pthread_mutex_lock(&unused_lock);
    size_t i = 0;
    while (i < num_unused && memcmp(unused[i].uuid, uuid, ST_UUID_BYTES) != 0) {
        i++;
    }
    if (i < NUM_UNUSED) {
        if (i == num_unused) {
            memcpy(unused[i].uuid, uuid, ST_UUID_BYTES);
            unused[i].bucket = NULL;
            unused[i].ask_again_ns = 0;
            num_unused++;
        }
        uint64_t now_ns = st_now_ns();
        if (unused[i].bucket == NULL && now_ns >= unused[i].ask_again_ns) {
            uint32_t retry_ms = 0;
            unused[i].bucket = st_ask_daemon(uuid, &retry_ms);
            unused[i].ask_again_ns = now_ns + (uint64_t)retry_ms * 1000000;
            if (unused[i].bucket != NULL) {
                /* Whatever program ran in this process before, what it held is gone; this one holds nothing here. */
                atomic_store(&unused[i].bucket->process->memory_bytes, 0);
            }
        }
        bucket = unused[i].bucket;
    }
    pthread_mutex_unlock(&unused_lock);
    return bucket;
}

/* The tenant's limit and what it uses of this device; false where it has no limit. */
static bool limit_of(void *sibling, nvmlDevice_t device, uint64_t *limit_bytes, uint64_t *used_bytes) {
    uint8_t uuid[ST_UUID_BYTES];
    if (!st_memory_is_counted() || !uuid_of(sibling, device, uuid)) {
        return false;
    }
    struct st_device *known = st_device_with(uuid);
    if (known != NULL) {
        st_memory_settle();
    }
    const struct st_bucket *bucket = known != NULL ? st_bucket_of(known) : bucket_of_unused(uuid);
    return bucket != NULL && st_memory_of_tenant(bucket, limit_bytes, used_bytes);
}

/* --- the hooks --- */

static unsigned long long least(unsigned long long a, unsigned long long b) {
    return a < b ? a : b;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    nvmlReturn_t (*real)(nvmlDevice_t, nvmlMemory_t *) = atomic_load(&true_info);
    if (real == NULL) {
        real = (nvmlReturn_t(*)(nvmlDevice_t, nvmlMemory_t *))dlsym(RTLD_NEXT, "nvmlDeviceGetMemoryInfo");
        atomic_store(&true_info, real);
    }
    if (real == NULL) {
        return NVML_ERROR_FUNCTION_NOT_FOUND;
    }
    nvmlReturn_t result = real(device, memory);
    uint64_t limit, used;
    if (result == NVML_SUCCESS && memory != NULL && limit_of((void *)real, device, &limit, &used)) {
        memory->total = least(memory->total, limit);
        memory->free = least(memory->free, used < limit ? limit - used : 0);
        memory->used = least(used, memory->total);
    }
    return result;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    nvmlReturn_t (*real)(nvmlDevice_t, nvmlMemory_v2_t *) = atomic_load(&true_info_v2);
    if (real == NULL) {
        real = (nvmlReturn_t(*)(nvmlDevice_t, nvmlMemory_v2_t *))dlsym(RTLD_NEXT, "nvmlDeviceGetMemoryInfo_v2");
        atomic_store(&true_info_v2, real);
    }
    if (real == NULL) {
        return NVML_ERROR_FUNCTION_NOT_FOUND;
    }
    nvmlReturn_t result = real(device, memory);
    uint64_t limit, used;
    if (result == NVML_SUCCESS && memory != NULL && limit_of((void *)real, device, &limit, &used)) {
        /* What the driver keeps for itself is outside of the tenant's memory. */
        memory->reserved = 0;
        memory->total = least(memory->total, limit);
        memory->free = least(memory->free, used < limit ? limit - used : 0);
        memory->used = least(used, memory->total);
    }
    return result;
}
