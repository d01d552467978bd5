/* Programs find us, and we the driver, however they look for it.
 *
 * Three ways lead to the driver, and we stand on each:
 *   - the dynamic linker: we are preloaded, so our names come before those of libcuda.so.1;
 *   - dlsym and dlvsym: a question that the driver would answer with a function we hook is answered with ours;
 *   - cuGetProcAddress and its second version, through which the CUDA runtime asks for everything: the driver is asked
 *     first, and what it says stands, except that a function we hook is replaced by ours.
 *
 * dlsym looks at its caller's address to know what comes "next" after the caller. So ours is no function that calls the
 * true one: it is a few instructions that ask st_find_ours and otherwise jump there as if they had never been called.
 *
 * Nothing here holds a lock while it calls the dynamic linker, whose own lock a thread may hold that waits for us. Two
 * threads may therefore look the driver up at the same time; both find the same.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "hooks.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <string.h>

/* Called before a sanitizer has begun its work, which is itself one of the callers of dlsym. */
#define ST_EARLY __attribute__((no_sanitize("address", "undefined", "thread")))
#define ST_HIDDEN __attribute__((visibility("hidden")))

#define ST_HOOK(api, symbol, since, per_thread) __typeof__(symbol) *st_real_##symbol;
#define ST_PLAIN(symbol) __typeof__(symbol) *st_real_##symbol;
#include "functions.def"
#undef ST_HOOK
#undef ST_PLAIN

struct st_hook {
    const char *api; /* what cuGetProcAddress is asked for */
    const char *symbol;
    void *ours;
    void **real;
    int since;
    bool is_per_thread;
};

static const struct st_hook st_hooks[] = {
#define ST_HOOK(api, symbol, since, per_thread)                                                                        \
    {#api, #symbol, (void *)&symbol, (void **)&st_real_##symbol, since, per_thread},
#define ST_PLAIN(symbol)
#include "functions.def"
#undef ST_HOOK
#undef ST_PLAIN
};
#define ST_NUM_HOOKS (sizeof st_hooks / sizeof st_hooks[0])

struct st_plain {
    const char *symbol;
    void **real;
};

static const struct st_plain st_plains[] = {
#define ST_HOOK(api, symbol, since, per_thread)
#define ST_PLAIN(symbol) {#symbol, (void **)&st_real_##symbol},
#include "functions.def"
#undef ST_HOOK
#undef ST_PLAIN
    {NULL, NULL},
};
#define ST_NUM_PLAINS (sizeof st_plains / sizeof st_plains[0] - 1)

_Atomic bool st_is_resolved;
static _Atomic(struct link_map *) st_driver_map; /* a handle of dlopen is a link_map, in this linker */
static pthread_mutex_t st_publishing = PTHREAD_MUTEX_INITIALIZER;
/* Above 0 while this thread is inside of the driver or the dynamic linker on our behalf: what is asked for then the
 * driver asks, or we do, and it is answered without a replacement. */
static __thread int st_num_inside __attribute__((tls_model("initial-exec")));

/* --- the true dlsym and dlvsym ------------------------------------------------------------------------------------ */

ST_HIDDEN void *(*st_true_dlsym)(void *handle, const char *name);
ST_HIDDEN void *(*st_true_dlvsym)(void *handle, const char *name, const char *version);
ST_EXPORT void *dlsym(void *restrict handle, const char *restrict name);
ST_EXPORT void *dlvsym(void *restrict handle, const char *restrict name, const char *restrict version);

ST_EARLY static bool st_is_same(const char *a, const char *b) {
    while (*a != '\0' && *a == *b) {
        a++;
        b++;
    }
    return *a == *b;
}

/* What the tables of one loaded object say; the dynamic linker has made addresses of their offsets, or it has not. */
ST_EARLY static const void *st_table(const struct link_map *map, ElfW(Sxword) tag) {
    for (const ElfW(Dyn) *entry = map->l_ld; entry->d_tag != DT_NULL; entry++) {
        if (entry->d_tag == tag) {
            ElfW(Addr) value = entry->d_un.d_ptr;
            return (const void *)(value < map->l_addr ? value + map->l_addr : value);
        }
    }
    return NULL;
}

/* The newest version of a function in one loaded object, through its hash table; NULL if it is not there. */
ST_EARLY static void *st_symbol_in(const struct link_map *map, const char *name) {
    const ElfW(Sym) *symbols = st_table(map, DT_SYMTAB);
    const char *strings = st_table(map, DT_STRTAB);
    const ElfW(Half) *versions = st_table(map, DT_VERSYM);
    const uint32_t *table = st_table(map, DT_GNU_HASH);
    if (symbols == NULL || strings == NULL || table == NULL || table[0] == 0) {
        return NULL;
    }
    uint32_t hash = 5381;
    for (const char *c = name; *c != '\0'; c++) {
        hash = hash * 33 + (unsigned char)*c;
    }
    const uint32_t *buckets = table + 4 + table[2] * (sizeof(ElfW(Addr)) / sizeof(uint32_t));
    const uint32_t *chain = buckets + table[0];
    for (uint32_t k = buckets[hash % table[0]]; k >= table[1]; k++) {
        uint32_t link = chain[k - table[1]];
        bool is_newest = versions == NULL || (versions[k] & 0x8000) == 0;
        if ((link | 1) == (hash | 1) && is_newest && symbols[k].st_shndx != SHN_UNDEF &&
            st_is_same(strings + symbols[k].st_name, name)) {
            return (void *)(map->l_addr + symbols[k].st_value);
        }
        if ((link & 1) != 0) {
            break;
        }
    }
    return NULL;
}

ST_EARLY static bool st_is_libc(const char *path) {
    const char *base = path;
    for (const char *c = path; *c != '\0'; c++) {
        base = *c == '/' ? c + 1 : base;
    }
    return st_is_same(base, "libc.so.6") || st_is_same(base, "libdl.so.2");
}

/* They are read from the C library's own tables: by name one would only find ourselves. The list is read without the
 * linker's lock; the C library stands near its beginning and never leaves. */
ST_EARLY static void st_find_true(void) {
    for (const struct link_map *map = _r_debug.r_map; map != NULL && st_true_dlsym == NULL; map = map->l_next) {
        if (map->l_name != NULL && st_is_libc(map->l_name)) {
            st_true_dlvsym = (__typeof__(st_true_dlvsym))st_symbol_in(map, "dlvsym");
            st_true_dlsym = (__typeof__(st_true_dlsym))st_symbol_in(map, "dlsym");
        }
    }
    if (st_true_dlsym == NULL || st_true_dlvsym == NULL) {
        __builtin_trap(); /* no C library that this was built for: better said at once than at some later jump */
    }
}

__attribute__((constructor(101))) static void st_begin(void) {
    if (st_true_dlsym == NULL) {
        st_find_true();
    }
}

/* --- the driver --------------------------------------------------------------------------------------------------- */

static void *st_load_driver(void) {
    static const char *const names[] = {"libcuda.so.1", "libcuda.so"};
    for (size_t k = 0; k < 2; k++) {
        void *handle = dlopen(names[k], RTLD_LAZY | RTLD_NOLOAD);
        handle = handle != NULL ? handle : dlopen(names[k], RTLD_LAZY);
        if (handle != NULL) {
            return handle;
        }
    }
    return NULL;
}

static bool st_is_driver_loaded(void) {
    st_num_inside++;
    void *handle = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    if (handle != NULL) {
        dlclose(handle);
    }
    dlerror();
    st_num_inside--;
    return handle != NULL;
}

/* Ask the driver's cuGetProcAddress, in whichever version it has. */
static void *st_ask_driver(void *get_v2, void *get_v1, const char *api, int version, cuuint64_t flags) {
    void *address = NULL;
    CUdriverProcAddressQueryResult status;
    CUresult result = CUDA_ERROR_NOT_FOUND;
    if (get_v2 != NULL) {
        result = ((__typeof__(&cuGetProcAddress_v2))get_v2)(api, &address, version, flags, &status);
    } else if (get_v1 != NULL) {
        result = ((__typeof__(&cuGetProcAddress))get_v1)(api, &address, version, flags);
    }
    return result == CUDA_SUCCESS ? address : NULL;
}

/* Whether this is a function that was found already, or even one of ours: a driver that was linked carelessly takes our
 * names for its own. */
static bool st_is_taken(void *const *addresses, const struct st_hook *but, const void *address) {
    for (size_t k = 0; k < ST_NUM_HOOKS; k++) {
        if ((st_hooks[k].real != but->real && addresses[k] == address) || st_hooks[k].ours == address) {
            return true;
        }
    }
    return false;
}

/* What the driver does not export it may yet give away. It answers a question for a twin that it does not have with the
 * function itself. */
static void *st_look_up_unnamed(void *get_v2, void *get_v1, const struct st_hook *hook) {
    const cuuint64_t twin = CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM, plain = CU_GET_PROC_ADDRESS_LEGACY_STREAM;
    void *found = st_ask_driver(get_v2, get_v1, hook->api, hook->since, hook->is_per_thread ? twin : plain);
    if (hook->is_per_thread && found == st_ask_driver(get_v2, get_v1, hook->api, hook->since, plain)) {
        return NULL;
    }
    return found;
}

static void st_look_up(void *handle, void **hooked, void **plain) {
    for (size_t k = 0; k < ST_NUM_HOOKS; k++) {
        hooked[k] = st_true_dlsym(handle, st_hooks[k].symbol);
    }
    for (size_t k = 0; k < ST_NUM_PLAINS; k++) {
        plain[k] = st_true_dlsym(handle, st_plains[k].symbol);
    }
    void *get_v2 = st_true_dlsym(handle, "cuGetProcAddress_v2");
    void *get_v1 = st_true_dlsym(handle, "cuGetProcAddress");
    for (size_t k = 0; k < ST_NUM_HOOKS; k++) {
        if (hooked[k] == NULL && strcmp(st_hooks[k].api, "cuGetProcAddress") != 0) {
            hooked[k] = st_look_up_unnamed(get_v2, get_v1, &st_hooks[k]);
            hooked[k] = st_is_taken(hooked, &st_hooks[k], hooked[k]) ? NULL : hooked[k];
        }
    }
}

bool st_resolve_slowly(void) {
    if (st_num_inside > 0) {
        return atomic_load_explicit(&st_is_resolved, memory_order_acquire);
    }
    void *hooked[ST_NUM_HOOKS];
    void *plain[ST_NUM_PLAINS + 1];
    st_num_inside++;
    void *handle = st_load_driver();
    if (handle != NULL) {
        st_look_up(handle, hooked, plain);
    }
    dlerror(); /* a name that was not found is no error of the program's */
    st_num_inside--;
    if (handle == NULL) {
        return false;
    }
    pthread_mutex_lock(&st_publishing);
    if (!atomic_load_explicit(&st_is_resolved, memory_order_relaxed)) {
        for (size_t k = 0; k < ST_NUM_HOOKS; k++) {
            *st_hooks[k].real = hooked[k];
        }
        for (size_t k = 0; k < ST_NUM_PLAINS; k++) {
            *st_plains[k].real = plain[k];
        }
        atomic_store_explicit(&st_driver_map, handle, memory_order_relaxed);
        atomic_store_explicit(&st_is_resolved, true, memory_order_release);
    }
    pthread_mutex_unlock(&st_publishing);
    return true;
}

void st_resolve_forked(void) {
    pthread_mutex_init(&st_publishing, NULL);
    st_num_inside = 0;
}

/* --- dlsym and dlvsym --------------------------------------------------------------------------------------------- */

ST_EARLY static const struct st_hook *st_hook_named(const char *symbol) {
    for (size_t k = 0; k < ST_NUM_HOOKS; k++) {
        if (st_is_same(st_hooks[k].symbol, symbol)) {
            return &st_hooks[k];
        }
    }
    return NULL;
}

static struct link_map *st_map_of(const void *address) {
    Dl_info info;
    struct link_map *map = NULL;
    return dladdr1(address, &info, (void **)&map, RTLD_DL_LINKMAP) != 0 ? map : NULL;
}

/* Whether this object was loaded before us, so that looking "next" from there finds us anyway, or what else stands
 * between. What comes before us was there when the program began and is never unloaded. */
static bool st_is_before_us(const struct link_map *map) {
    for (const struct link_map *other = st_map_of(st_hooks); other != NULL; other = other->l_prev) {
        if (other == map) {
            return true;
        }
    }
    return false;
}

static void *st_look(void *handle, const char *name, const char *version) {
    return version != NULL ? st_true_dlvsym(handle, name, version) : st_true_dlsym(handle, name);
}

/* A function of the driver is asked for. Ours, or NULL: then the question goes on, with what now is *handle. */
static void *st_find_hook(void **handle, const struct st_hook *hook, const char *version, const void *caller) {
    bool is_pseudo = *handle == RTLD_DEFAULT || *handle == RTLD_NEXT;
    if (!is_pseudo) {
        void *found = st_look(*handle, hook->symbol, version);
        if (found == NULL || found == hook->ours) {
            return found;
        }
        return st_resolve() && found == *hook->real ? hook->ours : NULL;
    }
    if (!atomic_load_explicit(&st_is_resolved, memory_order_acquire) && !st_is_driver_loaded()) {
        return NULL;
    }
    if (!st_resolve()) {
        return NULL;
    }
    struct link_map *driver = atomic_load_explicit(&st_driver_map, memory_order_relaxed);
    struct link_map *asking = st_map_of(caller);
    if (*hook->real == NULL || asking == driver) {
        *handle = driver; /* the driver means itself; and what it does not have, nobody shall believe it has */
        return NULL;
    }
    if (*handle == RTLD_NEXT) {
        return asking != NULL && st_is_before_us(asking) ? NULL : hook->ours;
    }
    /* What the program's own scope has first. (Ours is no measure: we are linked to find ourselves first.) */
    void *first = st_look(dlopen(NULL, RTLD_LAZY), hook->symbol, version);
    dlerror();
    return first == NULL || first == hook->ours || first == *hook->real ? hook->ours : NULL;
}

static void *st_find_replaced(void **handle, const char *name, const char *version, const void *caller) {
    void *ours = NULL;
    const struct st_hook *hook = st_hook_named(name);
    st_num_inside++;
    if (hook != NULL) {
        st_num_inside--; /* to look for the driver is allowed in here, and guards itself */
        ours = st_find_hook(handle, hook, version, caller);
        st_num_inside++;
    } else if (name[0] != 'c' && *handle != RTLD_DEFAULT && *handle != RTLD_NEXT) {
        void *found = st_look(*handle, name, version);
        if (found != NULL && found == (void *)st_true_dlsym) {
            ours = (void *)&dlsym;
        } else if (found != NULL && found == (void *)st_true_dlvsym) {
            ours = (void *)&dlvsym;
        } else if (found != NULL) {
            ours = st_nvml_ours(name, found);
        }
    }
    st_num_inside--;
    return ours;
}

/* Before dlsym and dlvsym go on to the true ones. Returns what is to be answered instead, NULL if nothing is. */
ST_HIDDEN void *st_find_ours(void **handle, const char *name, const char *version, const void *caller);
ST_EARLY void *st_find_ours(void **handle, const char *name, const char *version, const void *caller) {
    if (st_true_dlsym == NULL) {
        st_find_true();
    }
    if (st_num_inside > 0 || name == NULL) {
        return NULL;
    }
    bool is_cuda = name[0] == 'c' && name[1] == 'u';
    bool is_nvml = name[0] == 'n' && name[1] == 'v' && name[2] == 'm' && name[3] == 'l';
    if (!is_cuda && !is_nvml && !st_is_same(name, "dlsym") && !st_is_same(name, "dlvsym")) {
        return NULL;
    }
    return st_find_replaced(handle, name, version, caller);
}

#if defined(__x86_64__)
/* Both: keep the arguments, ask with the place of the handle (so that it can be changed), the version or NULL, and the
 * caller; return what was answered, or jump to the true one with the arguments and the stack as they were. */
#define ST_ASK(function, version, true_function)                                                                       \
    __asm__(".text\n.globl " #function "\n.type " #function ", @function\n.p2align 4\n" #function ":\n"                \
            ".cfi_startproc\nendbr64\n"                                                                                \
            "pushq %rdx\n.cfi_adjust_cfa_offset 8\npushq %rsi\n.cfi_adjust_cfa_offset 8\n"                             \
            "pushq %rdi\n.cfi_adjust_cfa_offset 8\n"                                                                   \
            "movq 24(%rsp), %rcx\n" version "\nmovq %rsp, %rdi\ncall st_find_ours\n"                                   \
            "popq %rdi\n.cfi_adjust_cfa_offset -8\npopq %rsi\n.cfi_adjust_cfa_offset -8\n"                             \
            "popq %rdx\n.cfi_adjust_cfa_offset -8\n"                                                                   \
            "testq %rax, %rax\nje 1f\nret\n1: jmp *" #true_function "(%rip)\n.cfi_endproc\n"                           \
            ".size " #function ", .-" #function "\n")
ST_ASK(dlsym, "xorl %edx, %edx", st_true_dlsym);
ST_ASK(dlvsym, "", st_true_dlvsym);
#elif defined(__aarch64__)
#define ST_ASK(function, version, true_function)                                                                       \
    __asm__(".text\n.globl " #function "\n.type " #function ", %function\n.p2align 4\n" #function ":\n"                \
            ".cfi_startproc\nstp x29, x30, [sp, #-48]!\n.cfi_def_cfa_offset 48\n.cfi_offset 29, -48\n"                 \
            ".cfi_offset 30, -40\nmov x29, sp\n"                                                                       \
            "stp x0, x1, [sp, #16]\nstr x2, [sp, #32]\nmov x3, x30\n" version "\nadd x0, sp, #16\n"                    \
            "bl st_find_ours\nmov x9, x0\nldp x0, x1, [sp, #16]\nldr x2, [sp, #32]\nldp x29, x30, [sp], #48\n"         \
            ".cfi_restore 29\n.cfi_restore 30\n.cfi_def_cfa_offset 0\n"                                                \
            "cbnz x9, 1f\nadrp x16, " #true_function "\nldr x16, [x16, :lo12:" #true_function "]\nbr x16\n"            \
            "1: mov x0, x9\nret\n.cfi_endproc\n.size " #function ", .-" #function "\n")
ST_ASK(dlsym, "mov x2, xzr", st_true_dlsym);
ST_ASK(dlvsym, "", st_true_dlvsym);
#else
#error "the interposition library knows the calling convention of x86-64 and of aarch64"
#endif

/* --- cuGetProcAddress --------------------------------------------------------------------------------------------- */

/* Which of our functions this version of a name means: the newest that the driver has. */
static const struct st_hook *st_hook_for(const char *api, int version, bool is_per_thread) {
    const struct st_hook *best = NULL;
    for (size_t k = 0; k < ST_NUM_HOOKS; k++) {
        const struct st_hook *hook = &st_hooks[k];
        if (hook->since <= version && *hook->real != NULL && hook->is_per_thread == is_per_thread &&
            strcmp(hook->api, api) == 0 && (best == NULL || best->since < hook->since)) {
            best = hook;
        }
    }
    return best;
}

/* Which of our functions takes the place of this very function of the driver. Where the driver has one function for a
 * name and its twin, either of ours will do. */
static const struct st_hook *st_hook_at(const void *address, const char *api, bool is_per_thread) {
    const struct st_hook *found = NULL;
    for (size_t k = 0; k < ST_NUM_HOOKS; k++) {
        const struct st_hook *hook = &st_hooks[k];
        if (hook->ours == address) {
            return hook;
        }
        if (*hook->real == address && (strcmp(hook->api, api) == 0 || strcmp(hook->symbol, api) == 0) &&
            (found == NULL || hook->is_per_thread == is_per_thread)) {
            found = hook;
        }
    }
    return found;
}

/* What the driver answered, or ours in its place. By name, version and flags alone this cannot be told: a driver newer
 * than our table may mean a function with other parameters. So its answer must be the function that we call, or else
 * what it also answers for the version that we know. */
static void *st_replace(void *answered, const char *api, int version, cuuint64_t flags) {
    bool is_per_thread = (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0;
    const struct st_hook *hook = st_hook_at(answered, api, is_per_thread);
    if (hook != NULL) {
        return hook->ours;
    }
    hook = st_hook_for(api, version, is_per_thread);
    if (hook == NULL || answered != st_ask_driver((void *)st_real_cuGetProcAddress_v2,
                                                  (void *)st_real_cuGetProcAddress, api, hook->since, flags)) {
        return answered;
    }
    return hook->ours;
}

ST_EXPORT CUresult CUDAAPI cuGetProcAddress_v2(const char *api, void **address, int version, cuuint64_t flags,
                                               CUdriverProcAddressQueryResult *status) {
    if (!st_resolve() || st_real_cuGetProcAddress_v2 == NULL) {
        return ST_MISSING;
    }
    st_num_inside++;
    CUresult result = st_real_cuGetProcAddress_v2(api, address, version, flags, status);
    if (result == CUDA_SUCCESS && api != NULL && address != NULL && *address != NULL) {
        *address = st_replace(*address, api, version, flags);
    }
    st_num_inside--;
    return result;
}

ST_EXPORT CUresult CUDAAPI cuGetProcAddress(const char *api, void **address, int version, cuuint64_t flags) {
    if (!st_resolve() || st_real_cuGetProcAddress == NULL) {
        return ST_MISSING;
    }
    st_num_inside++;
    CUresult result = st_real_cuGetProcAddress(api, address, version, flags);
    if (result == CUDA_SUCCESS && api != NULL && address != NULL && *address != NULL) {
        *address = st_replace(*address, api, version, flags);
    }
    st_num_inside--;
    return result;
}
