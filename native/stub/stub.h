/* The inside of the stub driver: it stands for libcuda.so.1 where there is no device. It counts what it is asked, keeps
 * time on a clock of its own, and refuses what a real driver refuses; it computes nothing.
 */
#ifndef STUB_H
#define STUB_H

#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "stub_api.h"

#define STUB_MAX_DEVICES 8
#define STUB_MAX_PROCESSES 64

/* Every symbol has a number, for counting and for faults. */
enum stub_symbol {
#define STUB(api, symbol, since, per_thread) STUB_N_##symbol,
#include "stub_functions.def"
#undef STUB
    STUB_NUM_SYMBOLS
};

struct stub_fault {
    uint64_t first;
    uint64_t last;
    CUresult code;
};

extern _Atomic uint64_t stub_counts[STUB_NUM_SYMBOLS];
extern struct stub_fault stub_faults[STUB_NUM_SYMBOLS];
extern _Atomic bool stub_is_orphan; /* forked from a process that had used the driver */
CUresult stub_refuse(enum stub_symbol symbol, uint64_t call);
static inline CUresult stub_enter(enum stub_symbol symbol) {
    uint64_t call = atomic_fetch_add_explicit(&stub_counts[symbol], 1, memory_order_relaxed);
    if (__builtin_expect(stub_faults[symbol].code != CUDA_SUCCESS || stub_is_orphan, 0)) {
        return stub_refuse(symbol, call);
    }
    return CUDA_SUCCESS;
}
#define ENTER(symbol)                                                                                                  \
    do {                                                                                                               \
        CUresult refused = stub_enter(STUB_N_##symbol);                                                                \
        if (refused != CUDA_SUCCESS) {                                                                                 \
            return refused;                                                                                            \
        }                                                                                                              \
    } while (0)
/* A function and its twin for per-thread default streams (suffix _ptsz or _ptds). */
#define PAIR(symbol, suffix, parameters, ...)                                                                          \
    CUresult symbol parameters {                                                                                       \
        ENTER(symbol);                                                                                                 \
        const bool per_thread = false;                                                                                 \
        (void)per_thread;                                                                                              \
        __VA_ARGS__                                                                                                    \
    }                                                                                                                  \
    CUresult symbol##suffix parameters {                                                                               \
        ENTER(symbol##suffix);                                                                                         \
        const bool per_thread = true;                                                                                  \
        (void)per_thread;                                                                                              \
        __VA_ARGS__                                                                                                    \
    }

/* --- the machine ------------------------------------------------------------------------------------------------- */

/* What several processes see of one machine; in STUB_SHARED, or in this process alone. */
struct stub_process {
    _Atomic uint32_t pid;
    uint32_t unused;
    _Atomic uint64_t memory_bytes[STUB_MAX_DEVICES];
};
struct stub_machine {
    _Atomic uint64_t virtual_ns;
    _Atomic uint64_t busy_until_ns[STUB_MAX_DEVICES];
    struct stub_process processes[STUB_MAX_PROCESSES];
};
struct stub_device {
    int physical;
    CUuuid uuid;
    size_t total_bytes;
    _Atomic uint64_t num_kernels;
    _Atomic uint64_t num_blocks;
    _Atomic uint64_t busy_ns;
    _Atomic uint64_t memory_bytes;
    _Atomic uint64_t peak_bytes;
};
enum stub_clock { STUB_VIRTUAL, STUB_REAL, STUB_OFF };

extern struct stub_machine *stub_machine;
extern struct stub_device stub_devices[STUB_MAX_DEVICES]; /* the visible ones, by ordinal */
extern int stub_num_devices;
extern enum stub_clock stub_clock;
extern uint64_t stub_kernel_ns, stub_block_ns, stub_copy_ns, stub_queue_ns;
extern int stub_version;
extern _Atomic bool stub_is_initialised;
extern pthread_mutex_t stub_lock; /* everything that is not a launch */

uint64_t stub_tick(void); /* now, after one more call */
void stub_wait_until(uint64_t ns);
uint64_t stub_number(const char *name, uint64_t otherwise);
bool stub_take_memory(int device, size_t bytes);
void stub_give_memory(int device, size_t bytes);
uint64_t stub_free_bytes(int device);

/* --- contexts, functions, streams, events ------------------------------------------------------------------------- */

struct CUctx_st {
    int device;
    unsigned int flags;
    unsigned int version;
    uint64_t id;
    bool is_primary;
    bool is_dead;
    unsigned int num_retained;
    struct CUstream_st *legacy;
    struct CUctx_st *next;
};
struct CUmod_st {
    struct CUfunc_st *functions;
    struct CUmod_st *next;
};
struct CUfunc_st {
    char name[128];
    struct CUmod_st *module;
    _Atomic uint64_t ns;
    _Atomic uint64_t ns_a_block;
    struct CUfunc_st *next;
};
struct stub_capture {
    CUstreamCaptureMode mode;
    CUstreamCaptureStatus status;
    pthread_t thread;
    uint64_t id;
    struct CUgraph_st *graph;
    bool owns_graph;
    struct CUstream_st *origin;
    struct stub_capture *next;
};
struct CUstream_st {
    struct CUctx_st *context;
    _Atomic uint64_t ready_ns;
    struct stub_capture *_Atomic capture;
    unsigned int flags;
    int priority;
    pthread_t thread; /* the owner of a per-thread default stream */
    bool is_per_thread;
    struct CUstream_st *next;
};
struct CUevent_st {
    struct CUctx_st *context;
    unsigned int flags;
    bool is_recorded;
    _Atomic uint64_t ns;
    struct stub_capture *capture;
    struct CUevent_st *next;
};

extern _Atomic uint64_t stub_num_events, stub_num_streams, stub_num_graphs, stub_num_execs, stub_num_contexts;
extern _Atomic uint64_t stub_num_allocations, stub_num_violations;
extern _Atomic uint32_t stub_num_captures;

struct CUctx_st *stub_current(void); /* NULL: none */
CUresult stub_check_context(void);
/* The stream behind a handle; NULL if it is none, or there is no context. */
struct CUstream_st *stub_stream(CUstream handle, bool per_thread);
struct CUfunc_st *stub_function(CUfunction handle);
void stub_drop_memory_of(struct CUctx_st *context);
void stub_drop_streams_of(struct CUctx_st *context);
void stub_drop_events_of(struct CUctx_st *context);
struct CUstream_st *stub_new_stream(struct CUctx_st *context, unsigned int flags, int priority);
uint64_t stub_context_ready_ns(struct CUctx_st *context);
/* What a real driver forbids while anybody captures in a mode that concerns this thread: ends those captures. */
CUresult stub_forbid_in_capture(void);
/* Work on a stream: when it ends. */
uint64_t stub_run(struct CUstream_st *stream, uint64_t ns);
uint64_t stub_kernel_time(const struct CUfunc_st *function, uint64_t num_blocks);

/* --- graphs -------------------------------------------------------------------------------------------------------- */

struct CUgraphNode_st {
    CUgraphNodeType type;
    struct CUgraph_st *graph;
    struct CUgraphNode_st *original; /* in a clone or an executable graph: the node it was made from */
    bool is_enabled;
    CUDA_KERNEL_NODE_PARAMS_v2 kernel;
    struct CUgraph_st *child;
    size_t alloc_bytes; /* of a node that allocates */
    CUdeviceptr address;
    size_t num_dependencies;
    struct CUgraphNode_st **dependencies;
};
struct CUgraph_st {
    struct CUgraphNode_st **nodes;
    size_t num_nodes;
    struct CUgraphNode_st *owner; /* the child-graph node that holds it */
};
struct CUgraphExec_st {
    struct CUgraph_st *graph; /* a copy */
    int device;
    unsigned long long flags;
    uint64_t taken_bytes; /* memory of its own, since its first launch */
};
/* stub_pools.c */
bool stub_graph_takes(int device, uint64_t bytes);
void stub_graph_gives(int device, uint64_t bytes);
void stub_pools_synchronised(int device);
struct CUgraph_st *stub_new_graph(void);
void stub_free_graph(struct CUgraph_st *graph);
struct CUgraphNode_st *stub_add_node(struct CUgraph_st *graph, CUgraphNodeType type, const CUgraphNode *dependencies,
                                     size_t num_dependencies);
/* One kernel launched directly or captured: the only way of every launch function. */
CUresult stub_launch(struct CUfunc_st *function, uint64_t num_blocks, const CUDA_KERNEL_NODE_PARAMS_v2 *kernel,
                     struct CUstream_st *stream);

#endif
