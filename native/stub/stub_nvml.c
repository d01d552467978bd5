/* The stub's libnvidia-ml.so.1: it sees every device of the machine, whatever CUDA_VISIBLE_DEVICES says, and, through
 * STUB_SHARED, every process on it. Its types are declared here: NVML's header comes with no package.
 */
#include "stub.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define NVML_SUCCESS 0
#define NVML_ERROR_INVALID_ARGUMENT 2
#define NVML_ERROR_NOT_FOUND 6
#define NVML_ERROR_INSUFFICIENT_SIZE 7

typedef int nvmlReturn_t;
typedef struct nvmlDevice_st {
    int physical;
} *nvmlDevice_t;
typedef struct {
    unsigned long long total, free, used;
} nvmlMemory_t;
typedef struct {
    unsigned int version;
    unsigned long long total, reserved, free, used;
} nvmlMemory_v2_t;
typedef struct {
    unsigned int pid;
    unsigned long long usedGpuMemory;
    unsigned int gpuInstanceId, computeInstanceId;
} nvmlProcessInfo_t;
typedef struct {
    unsigned int gpu, memory;
} nvmlUtilization_t;

static struct nvmlDevice_st devices[STUB_MAX_DEVICES];

/* The driver of the same process, if it is loaded where this can see it: for a machine that is not shared. */
extern struct stub_machine *stub_machine __attribute__((weak));

static uint64_t number(const char *name, uint64_t otherwise) {
    const char *text = getenv(name);
    return text != NULL && *text != '\0' ? strtoull(text, NULL, 0) : otherwise;
}

static struct stub_machine *machine(void) {
    static struct stub_machine *mapped;
    const char *path = getenv("STUB_SHARED");
    if (path == NULL || *path == '\0') {
        return &stub_machine == NULL ? NULL : stub_machine;
    }
    if (mapped == NULL) {
        int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        if (file < 0 || ftruncate(file, sizeof(struct stub_machine)) != 0) {
            return NULL;
        }
        void *memory = mmap(NULL, sizeof(struct stub_machine), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        close(file);
        mapped = memory == MAP_FAILED ? NULL : memory;
    }
    return mapped;
}

static bool is_alive(uint32_t pid) {
    return pid != 0 && (kill((pid_t)pid, 0) == 0 || errno == EPERM);
}

static uint64_t used_bytes(int physical) {
    struct stub_machine *all = machine();
    uint64_t used = 0;
    for (int i = 0; all != NULL && i < STUB_MAX_PROCESSES; i++) {
        if (is_alive(all->processes[i].pid)) {
            used += all->processes[i].memory_bytes[physical];
        }
    }
    return used;
}

static uint64_t total_bytes(int physical) {
    const char *list = getenv("STUB_MEMORY_MB");
    uint64_t megabytes = 16384;
    for (int i = 0; list != NULL && *list != '\0' && i <= physical; i++) {
        megabytes = strtoull(list, NULL, 0);
        list = strchr(list, ',');
        list = list == NULL ? NULL : list + 1;
    }
    return megabytes << 20;
}

static unsigned int num_devices(void) {
    uint64_t count = number("STUB_DEVICES", 2);
    return count > STUB_MAX_DEVICES ? STUB_MAX_DEVICES : (unsigned int)count;
}

nvmlReturn_t nvmlInit(void) {
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlInit_v2(void) {
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlShutdown(void) {
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *text, unsigned int size) {
    snprintf(text, size, "stub");
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCount(unsigned int *count) {
    *count = num_devices();
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count) {
    return nvmlDeviceGetCount(count);
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) {
    if (index >= num_devices()) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    devices[index].physical = (int)index;
    *device = &devices[index];
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t *device) {
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *text, unsigned int size) {
    snprintf(text, size, "GPU-53545542-0000-4000-8000-%012d", device->physical + 1);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    for (unsigned int i = 0; i < num_devices(); i++) {
        char text[64];
        devices[i].physical = (int)i;
        nvmlDeviceGetUUID(&devices[i], text, sizeof(text));
        if (strcmp(text, uuid) == 0) {
            *device = &devices[i];
            return NVML_SUCCESS;
        }
    }
    return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index) {
    *index = (unsigned int)device->physical;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *text, unsigned int size) {
    snprintf(text, size, "Stub device %d", device->physical);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    memory->total = total_bytes(device->physical);
    memory->used = used_bytes(device->physical);
    memory->free = memory->total - memory->used;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    if (memory->version != (unsigned int)(sizeof(*memory) | (2u << 24))) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    memory->total = total_bytes(device->physical);
    memory->reserved = 0;
    memory->used = used_bytes(device->physical);
    memory->free = memory->total - memory->used;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *rates) {
    rates->gpu = 0;
    rates->memory = 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *list) {
    struct stub_machine *all = machine();
    unsigned int num_found = 0;
    for (int i = 0; all != NULL && i < STUB_MAX_PROCESSES; i++) {
        uint64_t bytes = all->processes[i].memory_bytes[device->physical];
        if (!is_alive(all->processes[i].pid) || bytes == 0) {
            continue;
        }
        if (num_found < *count && list != NULL) {
            list[num_found] = (nvmlProcessInfo_t){all->processes[i].pid, bytes, UINT32_MAX, UINT32_MAX};
        }
        num_found++;
    }
    bool fits = num_found <= *count && list != NULL;
    *count = num_found;
    return fits || num_found == 0 ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}
