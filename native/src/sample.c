/* Launches that are measured: an event before and an event behind, read when they are over.
 *
 * Nobody ever waits for a measurement: it is read when a later launch is measured, as far as it is done by then, and
 * where every pair of events is still out, nothing is measured. Events belong to a context, so each context has its own
 * pool of them, which is touched only while that context is the current one and therefore alive.
 *
 * Where the stream had nothing to do, the event before the launch happens at once, and the device then waits for the
 * launch itself: some microseconds that are the processor's and not the device's. They are taken off: from when the
 * event was recorded until the launch was handed over. For the second part counts what that takes as a rule, not what
 * it took this time, since the thread may have been interrupted right after it.
 */
#include "hooks.h"
#include "work.h"

#define NUM_POOLS 16u
#define NUM_SAMPLES 16u
/* At most so many measurements are read at one launch. */
#define NUM_READ 4u
/* A call that takes so much longer than four times what it takes as a rule was interrupted. */
#define LATE_NS 20000u

enum state { FREE, RECORDING, PENDING };

struct pool {
    CUcontext context;
    unsigned long long context_id; /* the driver uses a context's address again, but never its number */
    uint32_t epoch;
    uint64_t last_used;
    unsigned next_read;
    struct st_sample samples[NUM_SAMPLES];
};

/* Whoever does not get it measures nothing: it is never waited for. It guards the pools; a sample that is RECORDING
 * belongs to the thread that launches. */
static atomic_flag is_busy = ATOMIC_FLAG_INIT;
static struct pool pools[NUM_POOLS];
static uint64_t num_uses;

/* Another thread may begin to capture in the global mode between our look and our calls, and then they would break its
 * capture; a thread in the relaxed mode is left out of that. */
static bool relax(CUstreamCaptureMode *mode) {
    *mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    return st_real_cuThreadExchangeStreamCaptureMode != NULL &&
           st_real_cuThreadExchangeStreamCaptureMode(mode) == CUDA_SUCCESS;
}

static void unrelax(bool was_relaxed, CUstreamCaptureMode mode) {
    if (was_relaxed) {
        (void)st_real_cuThreadExchangeStreamCaptureMode(&mode);
    }
}

static CUresult record(CUevent event, CUstream stream, bool per_thread) {
    __typeof__(cuEventRecord) *real = per_thread ? st_real_cuEventRecord_ptsz : st_real_cuEventRecord;
    return real == NULL ? ST_MISSING : real(event, stream);
}

static CUresult elapsed(float *milliseconds, CUevent begin, CUevent end) {
    if (st_real_cuEventElapsedTime_v2 != NULL) {
        return st_real_cuEventElapsedTime_v2(milliseconds, begin, end);
    }
    return st_real_cuEventElapsedTime == NULL ? ST_MISSING : st_real_cuEventElapsedTime(milliseconds, begin, end);
}

/* CUDA_SUCCESS where nothing is under way in the stream, CUDA_ERROR_NOT_READY where something is. */
static CUresult query(CUstream stream, bool per_thread) {
    __typeof__(cuStreamQuery) *real = per_thread ? st_real_cuStreamQuery_ptsz : st_real_cuStreamQuery;
    return real == NULL ? CUDA_ERROR_NOT_READY : real(stream);
}

static bool is_recording(const struct pool *pool) {
    for (unsigned i = 0; i < NUM_SAMPLES; i++) {
        if (atomic_load_explicit(&pool->samples[i].state, memory_order_acquire) == RECORDING) {
            return true;
        }
    }
    return false;
}

/* Forget events without a call: their context is gone, or nobody knows. */
static void clear_pool(struct pool *pool) {
    for (unsigned i = 0; i < NUM_SAMPLES; i++) {
        struct st_sample *sample = &pool->samples[i];
        sample->begin = NULL;
        sample->end = NULL;
        atomic_store_explicit(&sample->state, FREE, memory_order_relaxed);
    }
}

/* The pool of the current context; NULL where there is none to be had. */
static struct pool *current_pool(void) {
    CUcontext context = NULL;
    unsigned long long context_id = 0;
    if (st_real_cuCtxGetCurrent == NULL || st_real_cuCtxGetCurrent(&context) != CUDA_SUCCESS || context == NULL) {
        return NULL;
    }
    if (st_real_cuCtxGetId != NULL && st_real_cuCtxGetId(context, &context_id) != CUDA_SUCCESS) {
        context_id = 0;
    }
    uint32_t epoch = atomic_load_explicit(&st_context_epoch, memory_order_acquire);
    struct pool *pool = NULL;
    for (unsigned i = 0; i < NUM_POOLS && (pool == NULL || pool->context != context); i++) {
        if (pools[i].context == context || pool == NULL || pools[i].last_used < pool->last_used) {
            pool = &pools[i];
        }
    }
    /* A primary context that was reset has lost its events and kept its address, perhaps even its number. So whenever
     * contexts went, even others, everyone's events are given up; at worst a few stay unused in a living context. */
    bool is_same = pool->context == context && pool->context_id == context_id && pool->epoch == epoch;
    if (!is_same) {
        if (is_recording(pool)) {
            return NULL;
        }
        clear_pool(pool);
        pool->context = context;
        pool->context_id = context_id;
    }
    pool->epoch = epoch;
    pool->last_used = ++num_uses;
    return pool;
}

static void read_samples(struct pool *pool) {
    unsigned num_read = 0;
    unsigned first = pool->next_read;
    for (unsigned i = 0; i < NUM_SAMPLES && num_read < NUM_READ; i++) {
        /* Where one stops, the next goes on: some kernels are never over. */
        pool->next_read = (first + i + 1) % NUM_SAMPLES;
        struct st_sample *sample = &pool->samples[(first + i) % NUM_SAMPLES];
        if (atomic_load_explicit(&sample->state, memory_order_acquire) != PENDING) {
            continue;
        }
        num_read++;
        float milliseconds = 0.0f;
        CUresult result = elapsed(&milliseconds, sample->begin, sample->end);
        if (result == CUDA_ERROR_NOT_READY) {
            continue;
        }
        atomic_store_explicit(&sample->state, FREE, memory_order_relaxed);
        /* The comparison is false for a NaN, too. A day is no time that a kernel takes. */
        if (result == CUDA_SUCCESS && milliseconds >= 0.0f && milliseconds < 86400000.0f) {
            uint64_t measured_ns = (uint64_t)((double)milliseconds * 1e6);
            st_work_measured(sample, measured_ns > sample->gap_ns ? measured_ns - sample->gap_ns : 0);
        }
    }
}

/* A free sample whose two events exist. */
static struct st_sample *free_sample(struct pool *pool) {
    for (unsigned i = 0; i < NUM_SAMPLES; i++) {
        struct st_sample *sample = &pool->samples[i];
        if (atomic_load_explicit(&sample->state, memory_order_acquire) != FREE) {
            continue;
        }
        if (sample->begin == NULL && st_real_cuEventCreate(&sample->begin, CU_EVENT_DEFAULT) != CUDA_SUCCESS) {
            sample->begin = NULL;
            return NULL;
        }
        if (sample->end == NULL && st_real_cuEventCreate(&sample->end, CU_EVENT_DEFAULT) != CUDA_SUCCESS) {
            sample->end = NULL;
            return NULL;
        }
        return sample;
    }
    return NULL;
}

static struct st_sample *begin_in_pool(const struct st_ticket *ticket, CUstream stream, bool per_thread,
                                       bool only_read) {
    struct pool *pool = current_pool();
    if (pool == NULL) {
        return NULL;
    }
    read_samples(pool);
    struct st_sample *sample = only_read ? NULL : free_sample(pool);
    CUresult state = sample == NULL ? ST_MISSING : query(stream, per_thread);
    bool is_usable = state == CUDA_SUCCESS || state == CUDA_ERROR_NOT_READY;
    if (!is_usable || record(sample->begin, stream, per_thread) != CUDA_SUCCESS) {
        return NULL;
    }
    sample->was_idle = state == CUDA_SUCCESS;
    sample->recorded_ns = st_now_ns();
    sample->work = ticket->work;
    sample->generation = atomic_load_explicit(&ticket->work->generation, memory_order_relaxed);
    sample->size = atomic_load_explicit(&ticket->work->size, memory_order_relaxed);
    sample->charged_ns = ticket->cost_ns;
    sample->bucket = ticket->bucket;
    atomic_store_explicit(&sample->state, RECORDING, memory_order_release);
    return sample;
}

struct st_sample *st_sample_begin(const struct st_ticket *ticket, CUstream stream, bool per_thread, bool only_read) {
    if (st_real_cuEventCreate == NULL || atomic_load_explicit(&st_num_captures, memory_order_acquire) != 0 ||
        atomic_flag_test_and_set_explicit(&is_busy, memory_order_acquire)) {
        return NULL;
    }
    CUstreamCaptureMode mode;
    bool was_relaxed = relax(&mode);
    struct st_sample *sample = begin_in_pool(ticket, stream, per_thread, only_read);
    unrelax(was_relaxed, mode);
    atomic_flag_clear_explicit(&is_busy, memory_order_release);
    if (sample != NULL) {
        sample->ready_ns = st_now_ns();
    }
    return sample;
}

/* How long the device waited for the launch after the event before it; false where the thread was interrupted so long
 * that nothing can be said. What the call takes as a rule follows shorter times at once and longer ones slowly, at most
 * doubling. */
static bool find_gap(struct st_sample *sample, uint64_t launched_ns) {
    uint64_t call_ns = launched_ns - sample->ready_ns;
    uint64_t rule_ns = atomic_load_explicit(&sample->work->call_ns, memory_order_relaxed);
    uint64_t next_ns = call_ns;
    if (rule_ns != 0 && call_ns > rule_ns) {
        next_ns = rule_ns + (call_ns - rule_ns) / 8;
        next_ns = next_ns > 2 * rule_ns ? 2 * rule_ns : next_ns;
    }
    next_ns = next_ns == 0 ? 1 : next_ns > UINT32_MAX ? UINT32_MAX : next_ns;
    atomic_store_explicit(&sample->work->call_ns, (uint32_t)next_ns, memory_order_relaxed);
    sample->gap_ns = 0;
    if (!sample->was_idle) {
        return true;
    }
    uint64_t certain_ns = rule_ns == 0 ? 0 : rule_ns < call_ns ? rule_ns : call_ns;
    sample->gap_ns = sample->ready_ns - sample->recorded_ns + certain_ns;
    return rule_ns == 0 || call_ns < 4 * rule_ns + LATE_NS;
}

void st_sample_end(struct st_sample *sample, CUstream stream, bool per_thread, bool was_launched) {
    bool is_recorded = false;
    bool is_usable = find_gap(sample, st_now_ns());
    if (was_launched && is_usable && atomic_load_explicit(&st_num_captures, memory_order_acquire) == 0) {
        CUstreamCaptureMode mode;
        bool was_relaxed = relax(&mode);
        is_recorded = record(sample->end, stream, per_thread) == CUDA_SUCCESS;
        unrelax(was_relaxed, mode);
    }
    atomic_store_explicit(&sample->state, is_recorded ? PENDING : FREE, memory_order_release);
}

void st_sample_forked(void) {
    for (unsigned i = 0; i < NUM_POOLS; i++) {
        clear_pool(&pools[i]);
        pools[i].context = NULL;
        pools[i].context_id = 0;
        pools[i].last_used = 0;
    }
    atomic_flag_clear_explicit(&is_busy, memory_order_release);
}
