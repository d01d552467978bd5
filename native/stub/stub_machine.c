/* The machine behind the stub driver: its devices, its clock, whose memory is whose; all of it set by the environment. */
#include "stub.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <strings.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

struct stub_machine *stub_machine;
struct stub_device stub_devices[STUB_MAX_DEVICES];
int stub_num_devices;
enum stub_clock stub_clock;
uint64_t stub_kernel_ns, stub_block_ns, stub_copy_ns, stub_queue_ns;
int stub_version;
_Atomic bool stub_is_initialised;
_Atomic bool stub_is_orphan;
pthread_mutex_t stub_lock;
struct stub_fault stub_faults[STUB_NUM_SYMBOLS];

static struct stub_machine own_machine;
static struct stub_process *own_process;
static uint64_t call_ns;

static const char *const symbol_names[STUB_NUM_SYMBOLS] = {
#define STUB(api, symbol, since, per_thread) [STUB_N_##symbol] = #symbol,
#include "stub_functions.def"
#undef STUB
};

uint64_t stub_number(const char *name, uint64_t otherwise) {
    const char *text = getenv(name);
    return text != NULL && *text != '\0' ? strtoull(text, NULL, 0) : otherwise;
}

/* --- time --- */

uint64_t stub_now_ns(void) {
    if (stub_clock == STUB_REAL) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
    }
    return atomic_load_explicit(&stub_machine->virtual_ns, memory_order_relaxed);
}

void stub_advance_ns(uint64_t ns) {
    atomic_fetch_add_explicit(&stub_machine->virtual_ns, ns, memory_order_relaxed);
}

uint64_t stub_tick(void) {
    if (stub_clock == STUB_VIRTUAL) {
        return atomic_fetch_add_explicit(&stub_machine->virtual_ns, call_ns, memory_order_relaxed) + call_ns;
    }
    return stub_clock == STUB_OFF ? 0 : stub_now_ns();
}

void stub_wait_until(uint64_t ns) {
    if (stub_clock == STUB_REAL) {
        struct timespec until = {.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};
        while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR) {
        }
        return;
    }
    uint64_t now = stub_now_ns();
    while (now < ns && !atomic_compare_exchange_weak(&stub_machine->virtual_ns, &now, ns)) {
    }
}

/* --- memory of the devices, over all processes --- */

static uint64_t used_bytes(int device) {
    uint64_t used = 0;
    int physical = stub_devices[device].physical;
    for (int i = 0; i < STUB_MAX_PROCESSES; i++) {
        struct stub_process *process = &stub_machine->processes[i];
        pid_t pid = (pid_t)process->pid;
        /* What a dead process held is free again, as a real driver sees to it. */
        if (pid != 0 && pid != getpid() && kill(pid, 0) != 0 && errno == ESRCH) {
            memset(process->memory_bytes, 0, sizeof(process->memory_bytes));
            uint32_t dead = (uint32_t)pid;
            atomic_compare_exchange_strong(&process->pid, &dead, 0);
        }
        if (process->pid != 0) {
            used += process->memory_bytes[physical];
        }
    }
    return used;
}

uint64_t stub_free_bytes(int device) {
    uint64_t used = used_bytes(device);
    uint64_t total = stub_devices[device].total_bytes;
    return used < total ? total - used : 0;
}

bool stub_take_memory(int device, size_t bytes) {
    struct stub_device *it = &stub_devices[device];
    atomic_fetch_add(&own_process->memory_bytes[it->physical], bytes);
    if (bytes > it->total_bytes || used_bytes(device) > it->total_bytes) {
        atomic_fetch_sub(&own_process->memory_bytes[it->physical], bytes);
        return false;
    }
    uint64_t held = atomic_fetch_add(&it->memory_bytes, bytes) + bytes;
    uint64_t peak = it->peak_bytes;
    while (peak < held && !atomic_compare_exchange_weak(&it->peak_bytes, &peak, held)) {
    }
    atomic_fetch_add(&stub_num_allocations, 1);
    return true;
}

void stub_give_memory(int device, size_t bytes) {
    atomic_fetch_sub(&own_process->memory_bytes[stub_devices[device].physical], bytes);
    atomic_fetch_sub(&stub_devices[device].memory_bytes, bytes);
    atomic_fetch_sub(&stub_num_allocations, 1);
}

static void claim_process(void) {
    uint32_t pid = (uint32_t)getpid();
    for (int i = 0; i < STUB_MAX_PROCESSES; i++) {
        uint32_t owner = stub_machine->processes[i].pid;
        if (owner != 0 && kill((pid_t)owner, 0) != 0 && errno == ESRCH) {
            memset(stub_machine->processes[i].memory_bytes, 0, sizeof(stub_machine->processes[i].memory_bytes));
        } else if (owner != 0) {
            continue;
        }
        if (atomic_compare_exchange_strong(&stub_machine->processes[i].pid, &owner, pid)) {
            own_process = &stub_machine->processes[i];
            return;
        }
    }
    fprintf(stderr, "stub driver: more than %d processes share this machine\n", STUB_MAX_PROCESSES);
    abort();
}

static void open_machine(void) {
    const char *path = getenv("STUB_SHARED");
    stub_machine = &own_machine;
    if (path != NULL && *path != '\0') {
        int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        if (file < 0 || ftruncate(file, sizeof(struct stub_machine)) != 0) {
            perror("stub driver: STUB_SHARED");
            abort();
        }
        void *memory = mmap(NULL, sizeof(struct stub_machine), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        close(file);
        if (memory == MAP_FAILED) {
            perror("stub driver: STUB_SHARED");
            abort();
        }
        stub_machine = memory;
    }
    claim_process();
}

/* --- which devices are seen --- */

static void fill_uuid(int physical, CUuuid *uuid) {
    static const unsigned char beginning[16] = {'S', 'T', 'U', 'B', 0, 0, 0x40, 0, 0x80};
    memcpy(uuid->bytes, beginning, 16);
    uuid->bytes[15] = (char)(physical + 1);
}

static void uuid_text(const CUuuid *uuid, char text[64]) {
    char *to = text + sprintf(text, "GPU-");
    for (int i = 0; i < 16; i++) {
        to += sprintf(to, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", (unsigned char)uuid->bytes[i]);
    }
}

static int physical_called(const char *name, int num_physical) {
    char *end;
    long number = strtol(name, &end, 10);
    if (*name != '\0' && *end == '\0') {
        return number >= 0 && number < num_physical ? (int)number : -1;
    }
    for (int i = 0; i < num_physical && strlen(name) > 4; i++) {
        CUuuid uuid;
        char text[64];
        fill_uuid(i, &uuid);
        uuid_text(&uuid, text);
        if (strncasecmp(text, name, strlen(name)) == 0) {
            return i;
        }
    }
    return -1;
}

static void see_device(int physical) {
    struct stub_device *device = &stub_devices[stub_num_devices++];
    device->physical = physical;
    fill_uuid(physical, &device->uuid);
    uint64_t megabytes = 16384;
    const char *list = getenv("STUB_MEMORY_MB");
    for (int i = 0; list != NULL && *list != '\0' && i <= physical; i++) {
        megabytes = strtoull(list, NULL, 0);
        list = strchr(list, ',');
        list = list == NULL ? NULL : list + 1;
    }
    device->total_bytes = (size_t)megabytes << 20;
}

static void see_devices(void) {
    int num_physical = (int)stub_number("STUB_DEVICES", 2);
    num_physical = num_physical > STUB_MAX_DEVICES ? STUB_MAX_DEVICES : num_physical;
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (visible == NULL) {
        for (int i = 0; i < num_physical; i++) {
            see_device(i);
        }
        return;
    }
    char *copy = strdup(visible);
    char *rest = copy;
    for (char *name; (name = strsep(&rest, ",")) != NULL && stub_num_devices < STUB_MAX_DEVICES;) {
        int physical = physical_called(name, num_physical);
        if (physical < 0) {
            break; /* as the real driver does: what comes after a wrong one is not seen */
        }
        see_device(physical);
    }
    free(copy);
}

/* --- faults --- */

CUresult stub_refuse(enum stub_symbol symbol, uint64_t call) {
    if (stub_is_orphan) {
        return CUDA_ERROR_NOT_INITIALIZED;
    }
    const struct stub_fault *fault = &stub_faults[symbol];
    return call >= fault->first && call <= fault->last ? fault->code : CUDA_SUCCESS;
}

static void read_faults(void) {
    const char *text = getenv("STUB_FAIL");
    if (text == NULL) {
        return;
    }
    char *copy = strdup(text);
    char *rest = copy;
    for (char *one; (one = strsep(&rest, ",")) != NULL;) {
        struct stub_fault fault = {.first = 0, .last = UINT64_MAX, .code = CUDA_ERROR_LAUNCH_FAILED};
        char *code = strchr(one, '=');
        if (code != NULL) {
            *code = '\0';
            fault.code = (CUresult)strtoul(code + 1, NULL, 0);
        }
        char *range = strchr(one, ':');
        if (range != NULL) {
            *range = '\0';
            fault.first = strtoull(range + 1, &range, 0);
            fault.last = *range == '-' ? strtoull(range + 1, NULL, 0) : UINT64_MAX;
        }
        bool is_known = false;
        for (int i = 0; i < STUB_NUM_SYMBOLS; i++) {
            if (strcmp(symbol_names[i], one) == 0) {
                stub_faults[i] = fault;
                is_known = true;
            }
        }
        if (!is_known) {
            fprintf(stderr, "stub driver: STUB_FAIL names %s, which is no symbol of the stub\n", one);
            abort();
        }
    }
    free(copy);
}

/* --- beginning and fork --- */

static void before_fork(void) {
    pthread_mutex_lock(&stub_lock);
}

static void in_parent(void) {
    pthread_mutex_unlock(&stub_lock);
}

static void make_lock(void) {
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&stub_lock, &attributes);
    pthread_mutexattr_destroy(&attributes);
}

static void in_child(void) {
    make_lock();
    claim_process();
    const char *fork_mode = getenv("STUB_FORK");
    bool is_allowed = fork_mode != NULL && strcmp(fork_mode, "allow") == 0;
    if (stub_is_initialised && !is_allowed) {
        stub_is_orphan = true;
    }
    for (int i = 0; i < STUB_NUM_SYMBOLS; i++) {
        stub_counts[i] = 0;
    }
    for (int i = 0; i < stub_num_devices; i++) {
        struct stub_device *device = &stub_devices[i];
        device->num_kernels = device->num_blocks = device->busy_ns = 0;
        device->memory_bytes = device->peak_bytes = 0;
    }
    stub_num_violations = 0;
}

__attribute__((constructor)) static void begin(void) {
    const char *clock = getenv("STUB_CLOCK");
    stub_clock = clock == NULL || strcmp(clock, "virtual") == 0 ? STUB_VIRTUAL
                 : strcmp(clock, "real") == 0                   ? STUB_REAL
                                                                : STUB_OFF;
    stub_kernel_ns = stub_number("STUB_KERNEL_NS", 100000);
    stub_block_ns = stub_number("STUB_BLOCK_NS", 0);
    stub_copy_ns = stub_number("STUB_COPY_NS", 10000);
    stub_queue_ns = stub_number("STUB_QUEUE_NS", 0);
    call_ns = stub_number("STUB_CALL_NS", 1000);
    stub_version = (int)stub_number("STUB_VERSION", 13050);
    make_lock();
    open_machine();
    see_devices();
    read_faults();
    pthread_atfork(before_fork, in_parent, in_child);
}
