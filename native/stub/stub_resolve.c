/* How programs find the stub driver's functions: a table, as in the real one; dlsym is not asked. */
#include "stub.h"

#include <stdio.h>
#include <stdlib.h>

struct entry {
    const char *api;
    const char *symbol;
    int since;
    bool per_thread;
    void *function;
};

/* The library is linked with -Bsymbolic: these are its own functions, whoever was loaded before it. */
static const struct entry entries[STUB_NUM_SYMBOLS] = {
#define STUB(api, symbol, since, per_thread) {#api, #symbol, since, per_thread, (void *)(symbol)},
#include "stub_functions.def"
#undef STUB
};

/* From CUDA 12 on the old name means another symbol. */
static const struct entry renamed = {"cuGraphInstantiate", "cuGraphInstantiateWithFlags", 12000, false,
                                     (void *)cuGraphInstantiateWithFlags};

static CUresult not_here(void) {
    return CUDA_ERROR_NOT_SUPPORTED;
}

static bool is_in_list(const char *variable, const char *name) {
    const char *list = getenv(variable);
    size_t length = strlen(name);
    while (list != NULL && *list != '\0') {
        const char *end = strchr(list, ',');
        size_t size = end == NULL ? strlen(list) : (size_t)(end - list);
        if (size == length && strncmp(list, name, length) == 0) {
            return true;
        }
        list = end == NULL ? NULL : end + 1;
    }
    return false;
}

static void note_lookup(const char *api, int version, cuuint64_t flags, const char *symbol) {
    const char *path = getenv("STUB_LOOKUPS");
    FILE *file = path == NULL || *path == '\0' ? NULL : fopen(path, "a");
    if (file != NULL) {
        fprintf(file, "%s %d %llu %s\n", api, version, (unsigned long long)flags, symbol);
        fclose(file);
    }
}

static const struct entry *newest(const char *api, int version, bool per_thread) {
    const struct entry *best = NULL;
    for (int i = 0; i <= STUB_NUM_SYMBOLS; i++) {
        const struct entry *entry = i == STUB_NUM_SYMBOLS ? &renamed : &entries[i];
        if (entry->per_thread == per_thread && entry->since <= version && strcmp(entry->api, api) == 0 &&
            !is_in_list("STUB_WITHOUT", entry->symbol) && (best == NULL || entry->since > best->since)) {
            best = entry;
        }
    }
    return best;
}

static CUresult look_up(const char *api, void **function, int version, cuuint64_t flags,
                        CUdriverProcAddressQueryResult *status) {
    if (api == NULL || function == NULL || flags > 2) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const struct entry *found = NULL;
    if (flags == CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) {
        found = newest(api, version, true);
    }
    found = found == NULL ? newest(api, version, false) : found;
    CUdriverProcAddressQueryResult what = CU_GET_PROC_ADDRESS_SUCCESS;
    *function = NULL;
    if (found != NULL) {
        *function = found->function;
    } else if (newest(api, INT32_MAX, false) != NULL) {
        what = CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
    } else if (stub_number("STUB_ALL_NAMES", 0) != 0 && strncmp(api, "cu", 2) == 0) {
        *function = (void *)not_here;
    } else {
        what = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    }
    note_lookup(api, version, flags, found != NULL ? found->symbol : *function != NULL ? "not_here" : "-");
    if (status != NULL) {
        *status = what;
    }
    return what == CU_GET_PROC_ADDRESS_SUCCESS ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult cuGetProcAddress(const char *symbol, void **function, int version, cuuint64_t flags) {
    ENTER(cuGetProcAddress);
    return look_up(symbol, function, version, flags, NULL);
}

CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *status) {
    ENTER(cuGetProcAddress_v2);
    return look_up(symbol, function, version, flags, status);
}

/* Undocumented tables are not imitated: a real runtime stops here, after it has resolved its names. */
CUresult cuGetExportTable(const void **table, const CUuuid *id) {
    ENTER(cuGetExportTable);
    return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuGetErrorName(CUresult error, const char **name) {
    ENTER(cuGetErrorName);
    static _Thread_local char text[32];
    snprintf(text, sizeof(text), "STUB_ERROR_%d", (int)error);
    *name = text;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    ENTER(cuGetErrorString);
    *text = error == CUDA_SUCCESS ? "no error" : "an error of the stub driver";
    return CUDA_SUCCESS;
}
