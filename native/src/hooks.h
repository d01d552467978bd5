/* Inside the interposition library: the driver's own functions, and who in here offers what to whom.
 *
 * resolve.c   makes programs find us, and us the driver, however they look for it
 * launch.c    every way to launch a kernel
 * graph.c     graphs: weighed when they are instantiated, launched as one piece of work; streams that capture
 * work.c      how much device time a piece of work costs, measured by events now and then
 * gate.c      the token bucket in shared memory: who may launch now, who waits, and for how long at most
 * client.c    asking the daemon for the bucket
 * device.c    the state of each device of this process, by UUID; what survives a fork
 * memory.c    the memory limit, on every way to allocate; what a program is told of the device's memory
 * cycle.c     synchronisations: where one launch cycle ends
 *
 * The law on the launch path: no system call, no lock, no allocation, no look at the environment, unless the launch has
 * to wait or is one of the few that are measured.
 */
#ifndef SPRINGTIDE_HOOKS_H
#define SPRINGTIDE_HOOKS_H

/* All versions of every function by their own names, instead of macros for the newest. */
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "springtide_share.h"

#define ST_EXPORT __attribute__((visibility("default")))
#define ST_LIKELY(x) __builtin_expect(!!(x), 1)
#define ST_UNLIKELY(x) __builtin_expect(!!(x), 0)

/* --- the driver's functions --------------------------------------------------------------------------------------
 * Each room lists its own in NAME.def; functions.def includes them all, with different meanings of the two macros:
 *   ST_HOOK(api, symbol, since, per_thread)   we take its place. `api` is what cuGetProcAddress is asked for, `symbol`
 *       the name that the driver exports and the name of our function, `since` the CUDA version (as in 11060) from which
 *       asking for `api` means this symbol, `per_thread` whether it is the twin for per-thread default streams.
 *   ST_PLAIN(symbol)                           we only call it.
 * For each there is `st_real_<symbol>`, NULL until it is resolved or where the driver has no such function.
 */
#define ST_HOOK(api, symbol, since, per_thread) extern __typeof__(symbol) *st_real_##symbol;
#define ST_PLAIN(symbol) extern __typeof__(symbol) *st_real_##symbol;
#include "functions.def"
#undef ST_HOOK
#undef ST_PLAIN

/* resolve.c. Finds the driver and fills every st_real_*; once, whoever comes first, never from within itself. Returns
 * whether there is a driver. Every function of ours calls it before it uses a st_real_* (a load and a branch). */
extern _Atomic bool st_is_resolved;
bool st_resolve_slowly(void);
static inline bool st_resolve(void) {
    return ST_LIKELY(atomic_load_explicit(&st_is_resolved, memory_order_acquire)) || st_resolve_slowly();
}
/* What a hooked function answers where the driver has no such function. */
#define ST_MISSING CUDA_ERROR_NOT_SUPPORTED

/* --- device.c ------------------------------------------------------------------------------------------------------ */

struct st_bucket; /* gate.c: both mapped files of a tenant */

/* One device of this process. Never freed, and its address never changes. */
struct st_device {
    CUdevice ordinal;
    uint8_t uuid[ST_UUID_BYTES];
    size_t total_bytes;
    /* NULL while the daemon has not been reached, or holds nobody here. */
    _Atomic(struct st_bucket *) bucket;
    _Atomic uint64_t ask_again_ns; /* not before this is the daemon asked (again) */
};

/* The device of the calling thread's current context; NULL where there is none. A few nanoseconds. */
struct st_device *st_current_device(void);
/* The device of this ordinal of this process; NULL if the driver knows none. */
struct st_device *st_device_of(CUdevice ordinal);
/* The device with this UUID, as far as it was ever used; NULL. */
struct st_device *st_device_with(const uint8_t uuid[ST_UUID_BYTES]);
/* Contexts come and go: whoever remembers one compares this first. */
extern _Atomic uint32_t st_context_epoch;
/* Rises in every child of a fork: whatever a thread remembers from before is the parent's. */
extern _Atomic uint32_t st_fork_epoch;

/* --- gate.c, client.c ---------------------------------------------------------------------------------------------- */

struct st_bucket {
    const struct st_grant *grant;
    struct st_usage *usage;
    struct st_process *process; /* this process's slot in the usage */
    _Atomic uint64_t cycle_started_ns; /* cycle.c: 0 if no launch cycle of this process runs */
};

/* Take `cost_ns` of the device's tokens, waiting for them if it must, and count one launch. Without a daemon it returns
 * at once. Returns the bucket that was charged, NULL if none; give it to st_gate_refund if the launch fails. */
struct st_bucket *st_gate_slowly(struct st_device *device, struct st_bucket *bucket, uint64_t used_before_ns);
static inline struct st_bucket *st_gate(struct st_device *device, uint64_t cost_ns) {
    struct st_bucket *bucket = atomic_load_explicit(&device->bucket, memory_order_acquire);
    if (ST_UNLIKELY(bucket == NULL)) {
        bucket = st_gate_slowly(device, NULL, 0);
        if (bucket == NULL) {
            return NULL;
        }
    }
    uint64_t used_ns = atomic_fetch_add_explicit(&bucket->usage->used_ns, cost_ns, memory_order_relaxed);
    uint64_t number = atomic_fetch_add_explicit(&bucket->process->num_launches, 1, memory_order_relaxed);
    /* Every 64th launch goes the slow way, so that whoever never has to wait finds out as well that the daemon has gone
     * or has given these files up. */
    if (ST_LIKELY(used_ns < atomic_load_explicit(&bucket->grant->granted_ns, memory_order_relaxed)) &&
        ST_LIKELY((number & 63) != 63)) {
        return bucket;
    }
    return st_gate_slowly(device, bucket, used_ns);
}
void st_gate_refund(struct st_bucket *bucket, uint64_t cost_ns);
/* The bucket of the device now, asking the daemon if it is time to; NULL if nobody is held here. Not on the launch path. */
struct st_bucket *st_bucket_of(struct st_device *device);
/* client.c: one question to the daemon, answered within 50 ms or given up. A new bucket, or NULL and in *retry_ms when
 * to ask again. Buckets are unmapped by nobody: a thread may still be using one. */
struct st_bucket *st_ask_daemon(const uint8_t uuid[ST_UUID_BYTES], uint32_t *retry_ms);
uint64_t st_now_ns(void);

/* --- work.c -------------------------------------------------------------------------------------------------------- */

/* A kernel in one shape, or an instantiated graph; never freed while anybody may hold it. */
struct st_work;
/* What is known of this function in this shape; never NULL (where memory is short, an entry shared by all). */
struct st_work *st_work_of_kernel(const void *function, uint64_t num_blocks, uint32_t num_threads);
struct st_work *st_work_of_graph(CUgraphExec graph, uint64_t first_guess_ns);
/* The device time that one launch of it counts as. */
uint64_t st_work_cost_ns(const struct st_work *work);

/* One launch from its beginning to its end; on the stack of the hook. */
struct st_ticket {
    struct st_device *device;
    struct st_bucket *bucket;
    struct st_work *work;
    uint64_t cost_ns;
    void *sample; /* work.c: the events around it, if it is one of those measured */
};
/* Before and after every launch. `st_launch_begin` waits for tokens; on a stream that captures it does nothing at all,
 * and neither does `st_launch_end` then. */
void st_launch_begin(struct st_ticket *ticket, struct st_work *work, CUstream stream, bool per_thread);
void st_launch_end(struct st_ticket *ticket, CUstream stream, bool per_thread, CUresult result);

/* --- graph.c ------------------------------------------------------------------------------------------------------- */

/* How many streams of this process capture at this moment: while it is 0 nobody has to be asked. */
extern _Atomic uint32_t st_num_captures;
/* Whether this very stream captures; asks the driver. */
bool st_is_capturing(CUstream stream, bool per_thread);

/* --- cycle.c ------------------------------------------------------------------------------------------------------- */

/* A launch is about to be made: begins a cycle of this process on this device if none runs. A load and a branch where one
 * does. Called before the gate, so that waiting there is part of the cycle; `bucket` may be NULL. */
void st_cycle_begin_slowly(struct st_bucket *bucket);
static inline void st_cycle_begin(struct st_bucket *bucket) {
    if (bucket != NULL && ST_UNLIKELY(atomic_load_explicit(&bucket->cycle_started_ns, memory_order_relaxed) == 0)) {
        st_cycle_begin_slowly(bucket);
    }
}

/* --- memory.c ------------------------------------------------------------------------------------------------------ */

/* A context of the device was destroyed, and all its memory with it; NULL: the device's primary context. */
void st_memory_context_gone(struct st_device *device, CUcontext context);
/* device->bucket has just become this one: whatever this process holds on the device is counted there from now on. */
void st_memory_attached(struct st_device *device, struct st_bucket *bucket);
/* Our function in place of this one of NVML, whose true address is remembered; NULL to leave it as it is. */
void *st_nvml_ours(const char *name, void *true_address);
/* resolve.c: the C library's own dlsym. In this library `dlsym` is ours. */
extern void *(*st_true_dlsym)(void *handle, const char *name);

/* --- after a fork -------------------------------------------------------------------------------------------------- *
 * Each room puts its own state right in the child; device.c calls them in this order, before anything else runs there. */
void st_resolve_forked(void);
void st_client_forked(void);
void st_work_forked(void);
void st_graph_forked(void);
void st_memory_forked(void);
void st_cycle_forked(void);

#endif
