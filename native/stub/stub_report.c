/* What the stub driver counted: for programs, and as JSON when the process ends. */
#include "stub.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

_Atomic uint64_t stub_counts[STUB_NUM_SYMBOLS];
_Atomic uint64_t stub_num_events, stub_num_streams, stub_num_graphs, stub_num_execs, stub_num_contexts;
_Atomic uint64_t stub_num_allocations, stub_num_violations;
static pid_t first_process;

static const char *const names[STUB_NUM_SYMBOLS] = {
#define STUB(api, symbol, since, per_thread) [STUB_N_##symbol] = #symbol,
#include "stub_functions.def"
#undef STUB
};
static const struct {
    const char *name;
    _Atomic uint64_t *count;
} kinds[] = {
    {"events", &stub_num_events},     {"streams", &stub_num_streams},   {"graphs", &stub_num_graphs},
    {"execs", &stub_num_execs},       {"contexts", &stub_num_contexts}, {"allocations", &stub_num_allocations},
};
#define NUM_KINDS (sizeof(kinds) / sizeof(kinds[0]))

uint64_t stub_calls(const char *symbol) {
    for (int i = 0; i < STUB_NUM_SYMBOLS; i++) {
        if (strcmp(names[i], symbol) == 0) {
            return stub_counts[i];
        }
    }
    fprintf(stderr, "stub driver: asked for the calls of %s, which it does not have\n", symbol);
    abort();
}

uint64_t stub_kernels(CUdevice device) {
    return stub_devices[device].num_kernels;
}

uint64_t stub_blocks(CUdevice device) {
    return stub_devices[device].num_blocks;
}

uint64_t stub_busy_ns(CUdevice device) {
    return stub_devices[device].busy_ns;
}

uint64_t stub_memory_bytes(CUdevice device) {
    return stub_devices[device].memory_bytes;
}

uint64_t stub_peak_bytes(CUdevice device) {
    return stub_devices[device].peak_bytes;
}

uint64_t stub_violations(void) {
    return stub_num_violations;
}

uint64_t stub_alive(const char *kind) {
    for (size_t i = 0; i < NUM_KINDS; i++) {
        if (strcmp(kinds[i].name, kind) == 0) {
            return *kinds[i].count;
        }
    }
    fprintf(stderr, "stub driver: asked how many %s are alive, which it does not count\n", kind);
    abort();
}

static FILE *open_report(const char *pattern) {
    char path[4096];
    const char *mark = strstr(pattern, "%p");
    if (mark != NULL) {
        snprintf(path, sizeof(path), "%.*s%d%s", (int)(mark - pattern), pattern, (int)getpid(), mark + 2);
    } else if (getpid() == first_process) {
        snprintf(path, sizeof(path), "%s", pattern);
    } else {
        snprintf(path, sizeof(path), "%s.%d", pattern, (int)getpid());
    }
    return fopen(path, "w");
}

static void write_report(FILE *file) {
    fprintf(file, "{\"pid\": %d, \"calls\": {", (int)getpid());
    const char *comma = "";
    for (int i = 0; i < STUB_NUM_SYMBOLS; i++) {
        if (stub_counts[i] != 0) {
            fprintf(file, "%s\"%s\": %llu", comma, names[i], (unsigned long long)stub_counts[i]);
            comma = ", ";
        }
    }
    fprintf(file, "}, \"devices\": [");
    for (int i = 0; i < stub_num_devices; i++) {
        const struct stub_device *device = &stub_devices[i];
        fprintf(file, "%s{\"physical\": %d, \"kernels\": %llu, \"blocks\": %llu, \"busy_ns\": %llu, ", i == 0 ? "" : ", ",
                device->physical, (unsigned long long)device->num_kernels, (unsigned long long)device->num_blocks,
                (unsigned long long)device->busy_ns);
        fprintf(file, "\"memory_bytes\": %llu, \"peak_bytes\": %llu}", (unsigned long long)device->memory_bytes,
                (unsigned long long)device->peak_bytes);
    }
    fprintf(file, "], \"alive\": {");
    for (size_t i = 0; i < NUM_KINDS; i++) {
        fprintf(file, "%s\"%s\": %llu", i == 0 ? "" : ", ", kinds[i].name, (unsigned long long)*kinds[i].count);
    }
    fprintf(file, "}, \"violations\": %llu, \"now_ns\": %llu}\n", (unsigned long long)stub_num_violations,
            (unsigned long long)stub_now_ns());
}

__attribute__((constructor)) static void begin(void) {
    first_process = getpid();
}

__attribute__((destructor)) static void end(void) {
    const char *pattern = getenv("STUB_REPORT");
    FILE *file = pattern == NULL || *pattern == '\0' ? NULL : open_report(pattern);
    if (file != NULL) {
        write_report(file);
        fclose(file);
    }
}
