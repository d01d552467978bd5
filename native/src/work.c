/* How much device time a piece of work costs.
 *
 * A fixed table, set-associative like a cache: a kernel in a shape (function, blocks, threads of a block) or an
 * instantiated graph has a 64-bit key, the key a set of eight entries. Finding an entry takes no lock and no memory; a
 * shape that finds its set full drives out the least used one, so that programs with ever new shapes go on for ever.
 *
 * A new shape costs what other shapes of the same function lead one to expect, or else a guess by its blocks. Of its
 * launches a few are measured (sample.c), the second one first: the very first may load the module. The estimate then
 * follows lower times quickly and higher ones slowly, since another process's time slices only ever add to what the
 * events say; and no single measurement raises it by more than an eighth. The first measurement also settles what the launches before it had been counted as.
 */
#include "hooks.h"
#include "work.h"

#define NUM_SETS 2048u /* a power of two */
#define NUM_WAYS 8u
#define AGE_EVERY 16u /* of so many entries driven out, one makes the others older */
/* The guess for a kernel nobody has measured: so much at least, and so much for each wave of threads of a large
 * device. */
#define FIRST_GUESS_NS 3000u
#define WAVE_NS 2000u
#define WAVE_THREADS (1u << 18)
/* A device holds only so many blocks at once, however small they are: each counts as this many threads at least. */
#define LEAST_BLOCK_THREADS 64u
/* A guess never holds anybody for long, and neither does what the first measurement settles. */
#define HIGHEST_GUESS_NS 100000000u
#define HIGHEST_SETTLEMENT_NS 500000000u
/* Shapes of one function with fewer blocks than this are taken to cost the same: they fill less than the device. */
#define SMALL_BLOCKS 1024u
/* Measuring a launch costs some microseconds of the processor: of cheap work every 1,024th launch is measured, of dear
 * work more, so that it stays below half a percent of the device time. */
#define LONGEST_INTERVAL 1024u
#define SHORTEST_INTERVAL 16u
/* The furthest that a due launch is ahead. Threads count launches without a lock: one that was interrupted while it
 * counted puts the number back to where it was then, and what is due would be out of reach. */
#define FURTHEST_DUE (LONGEST_INTERVAL + LONGEST_INTERVAL / 4u)
#define INTERVAL_NS 2000000u
/* And no two measured launches of a process are closer together than this many launches. */
#define GAP 32u
#define GAP_UNMEASURED 4u
#define NUM_DEVICES 16u

static struct st_work table[NUM_SETS * NUM_WAYS];
/* The number of the last measured launch on each device; devices beyond share. */
static _Atomic uint64_t last_samples[NUM_DEVICES];

static inline uint64_t key_of(const void *handle, uint64_t num_blocks, uint32_t num_threads) {
    uint64_t blocks = num_blocks * 0xC2B2AE3D27D4EB4Full;
    uint64_t hash = (uint64_t)(uintptr_t)handle * 0x9E3779B97F4A7C15ull;
    hash ^= (blocks << 31) | (blocks >> 33);
    hash += num_threads * 0x165667B19E3779F9ull;
    hash ^= hash >> 32;
    hash *= 0xD6E8FEB86659FD93ull;
    hash ^= hash >> 32;
    return hash | 1;
}

static inline struct st_work *set_of(uint64_t key) {
    return &table[(key >> 1 & (NUM_SETS - 1)) * NUM_WAYS];
}

static inline struct st_work *find(uint64_t key) {
    struct st_work *set = set_of(key);
    unsigned first = (unsigned)(key >> 60);
    for (unsigned way = 0; way < NUM_WAYS; way++) {
        struct st_work *work = &set[(first + way) % NUM_WAYS];
        if (ST_LIKELY(atomic_load_explicit(&work->key, memory_order_relaxed) == key)) {
            return work;
        }
    }
    return NULL;
}

/* The entry of this set that a new key may have: a free one, else the least launched that is no graph. Now and then the
 * others' counts are halved, so that what was busy long ago does not stay for ever. */
static struct st_work *victim_of(struct st_work *set, uint64_t key) {
    struct st_work *victim = NULL;
    uint32_t fewest = UINT32_MAX;
    unsigned first = (unsigned)(key >> 60);
    for (unsigned way = 0; way < NUM_WAYS; way++) {
        struct st_work *work = &set[(first + way) % NUM_WAYS];
        if (atomic_load_explicit(&work->key, memory_order_relaxed) == 0) {
            return work;
        }
        uint32_t num_launches = atomic_load_explicit(&work->num_launches, memory_order_relaxed);
        bool is_graph = atomic_load_explicit(&work->is_graph, memory_order_relaxed);
        if (!is_graph && (victim == NULL || num_launches < fewest)) {
            victim = work;
            fewest = num_launches;
        }
    }
    if (victim == NULL) {
        return &set[first % NUM_WAYS];
    }
    if ((key >> 20) % AGE_EVERY != 0) {
        return victim;
    }
    for (unsigned way = 0; way < NUM_WAYS; way++) {
        uint32_t num_launches = atomic_load_explicit(&set[way].num_launches, memory_order_relaxed);
        uint32_t next_sample = atomic_load_explicit(&set[way].next_sample, memory_order_relaxed);
        uint32_t off = num_launches / 2;
        atomic_store_explicit(&set[way].num_launches, num_launches - off, memory_order_relaxed);
        atomic_store_explicit(&set[way].next_sample, next_sample - off, memory_order_relaxed);
    }
    return victim;
}

/* The entry of this key, taken if it had none. `cost_ns` is used only for a new one. Where two threads take entries for
 * the same key at once, the one that is found first stays in use and the other is driven out in time. */
static struct st_work *insert(uint64_t key, const void *function, uint64_t size, uint64_t cost_ns, bool is_graph) {
    struct st_work *set = set_of(key);
    for (;;) {
        struct st_work *work = find(key);
        if (work != NULL) {
            return work;
        }
        work = victim_of(set, key);
        uint64_t old = atomic_load_explicit(&work->key, memory_order_relaxed);
        if (old == key || !atomic_compare_exchange_strong(&work->key, &old, key)) {
            continue;
        }
        atomic_fetch_add_explicit(&work->generation, 1, memory_order_relaxed);
        atomic_store_explicit(&work->num_launches, 0, memory_order_relaxed);
        atomic_store_explicit(&work->next_sample, 1, memory_order_relaxed);
        atomic_store_explicit(&work->num_samples, 0, memory_order_relaxed);
        atomic_store_explicit(&work->call_ns, 0, memory_order_relaxed);
        atomic_store_explicit(&work->function, function, memory_order_relaxed);
        atomic_store_explicit(&work->size, size, memory_order_relaxed);
        atomic_store_explicit(&work->is_graph, is_graph, memory_order_relaxed);
        atomic_store_explicit(&work->cost_ns, cost_ns, memory_order_release);
        return work;
    }
}

/* a * b / c without the overflow, at most `most`. */
static uint64_t scaled(uint64_t a, uint64_t b, uint64_t c, uint64_t most) {
    unsigned __int128 result = (unsigned __int128)a * b / (c == 0 ? 1 : c);
    return result > most ? most : (uint64_t)result;
}

/* What a function's own entry is found under; it holds what SMALL_BLOCKS blocks of the last measured shape cost. */
static inline uint64_t function_key(const void *function) {
    return key_of(function, 0, 0);
}

static uint64_t guess_of_kernel(const void *function, uint64_t num_blocks, uint32_t num_threads) {
    struct st_work *known = find(function_key(function));
    uint64_t cost_ns = known == NULL ? 0 : atomic_load_explicit(&known->cost_ns, memory_order_acquire);
    if (cost_ns != 0) {
        uint64_t blocks = num_blocks < SMALL_BLOCKS ? SMALL_BLOCKS : num_blocks;
        return scaled(cost_ns, blocks, SMALL_BLOCKS, HIGHEST_GUESS_NS);
    }
    uint64_t threads = num_threads < LEAST_BLOCK_THREADS ? LEAST_BLOCK_THREADS : num_threads;
    uint64_t guess_ns = FIRST_GUESS_NS + scaled(num_blocks, threads * WAVE_NS, WAVE_THREADS, HIGHEST_GUESS_NS);
    return guess_ns > HIGHEST_GUESS_NS ? HIGHEST_GUESS_NS : guess_ns;
}

static __attribute__((noinline)) struct st_work *add_kernel(uint64_t key, const void *function, uint64_t num_blocks,
                                                            uint32_t num_threads) {
    return insert(key, function, num_blocks, guess_of_kernel(function, num_blocks, num_threads), false);
}

struct st_work *st_work_of_kernel(const void *function, uint64_t num_blocks, uint32_t num_threads) {
    uint64_t key = key_of(function, num_blocks, num_threads);
    struct st_work *work = find(key);
    return ST_LIKELY(work != NULL) ? work : add_kernel(key, function, num_blocks, num_threads);
}

static inline uint64_t graph_key(CUgraphExec graph) {
    return key_of(graph, UINT64_MAX, UINT32_MAX);
}

struct st_work *st_work_of_graph(CUgraphExec graph, uint64_t first_guess_ns) {
    uint64_t key = graph_key(graph);
    struct st_work *work = find(key);
    if (ST_LIKELY(work != NULL)) {
        return work;
    }
    first_guess_ns = first_guess_ns < ST_LEAST_COST_NS ? ST_LEAST_COST_NS : first_guess_ns;
    return insert(key, NULL, first_guess_ns, first_guess_ns, true);
}

void st_work_forget_graph(CUgraphExec graph) {
    uint64_t key = graph_key(graph);
    struct st_work *work;
    while ((work = find(key)) != NULL) {
        atomic_compare_exchange_strong(&work->key, &key, 0);
        key = graph_key(graph);
    }
}

void st_work_begin_graph(CUgraphExec graph, uint64_t first_guess_ns) {
    st_work_forget_graph(graph);
    (void)st_work_of_graph(graph, first_guess_ns);
}

void st_work_change_graph(CUgraphExec graph, uint64_t after_ns) {
    after_ns = after_ns < ST_LEAST_COST_NS ? ST_LEAST_COST_NS : after_ns;
    struct st_work *work = st_work_of_graph(graph, after_ns);
    uint64_t before_ns = atomic_load_explicit(&work->size, memory_order_relaxed);
    uint64_t cost_ns = scaled(st_work_cost_ns(work), after_ns, before_ns, UINT64_MAX / 4);
    cost_ns = cost_ns < ST_LEAST_COST_NS ? ST_LEAST_COST_NS : cost_ns;
    atomic_store_explicit(&work->size, after_ns, memory_order_relaxed);
    atomic_store_explicit(&work->cost_ns, cost_ns, memory_order_relaxed);
    if (before_ns != after_ns) {
        uint32_t num_launches = atomic_load_explicit(&work->num_launches, memory_order_relaxed);
        atomic_store_explicit(&work->next_sample, num_launches == 0 ? 1 : num_launches, memory_order_relaxed);
    }
}

uint64_t st_work_cost_ns(const struct st_work *work) {
    uint64_t cost_ns = atomic_load_explicit(&work->cost_ns, memory_order_relaxed);
    return ST_LIKELY(cost_ns != 0) ? cost_ns : FIRST_GUESS_NS;
}

/* --- measured ------------------------------------------------------------------------------------------------------ */

/* What was taken too little is taken, what was taken too much is given back; never below 0, since the daemon may have
 * put new files in the place of those that were charged. */
static void settle(struct st_bucket *bucket, uint64_t measured_ns, uint64_t charged_ns, uint32_t num_launches) {
    if (measured_ns >= charged_ns) {
        uint64_t more_ns = scaled(measured_ns - charged_ns, num_launches, 1, HIGHEST_SETTLEMENT_NS);
        atomic_fetch_add_explicit(&bucket->usage->used_ns, more_ns, memory_order_relaxed);
        return;
    }
    uint64_t less_ns = scaled(charged_ns - measured_ns, num_launches, 1, HIGHEST_SETTLEMENT_NS);
    uint64_t used_ns = atomic_load_explicit(&bucket->usage->used_ns, memory_order_relaxed);
    uint64_t new_ns;
    do {
        new_ns = used_ns > less_ns ? used_ns - less_ns : 0;
    } while (!atomic_compare_exchange_weak_explicit(&bucket->usage->used_ns, &used_ns, new_ns, memory_order_relaxed,
                                                    memory_order_relaxed));
}

/* The next launch to measure: soon after the first ones, then by what the work costs, and never in step with a loop
 * that launches the same few kernels again and again. Until the first measurement is read, it is looked for at the very
 * next launch, and then ever more seldom. */
static void schedule(struct st_work *work) {
    uint32_t num_launches = atomic_load_explicit(&work->num_launches, memory_order_relaxed);
    uint32_t num_samples = atomic_load_explicit(&work->num_samples, memory_order_relaxed);
    uint64_t interval = INTERVAL_NS / st_work_cost_ns(work);
    interval = interval < SHORTEST_INTERVAL ? SHORTEST_INTERVAL : interval;
    interval = interval > LONGEST_INTERVAL ? LONGEST_INTERVAL : interval;
    uint64_t soon = num_samples == 0 ? num_launches / 4 : num_samples < 5 ? 4ull << num_samples : LONGEST_INTERVAL;
    interval = soon < interval ? soon : interval;
    uint64_t key = atomic_load_explicit(&work->key, memory_order_relaxed);
    uint64_t drawn = (key ^ (num_samples + 1ull) * 0x9E3779B97F4A7C15ull) >> 33;
    interval += interval < 4 ? 0 : drawn % (interval / 4 + 1);
    atomic_store_explicit(&work->next_sample, num_launches + (uint32_t)interval, memory_order_relaxed);
}

/* Where the function's other shapes get their first guess from. */
static void remember_function(const struct st_work *work, uint64_t measured_ns) {
    const void *function = atomic_load_explicit(&work->function, memory_order_relaxed);
    if (function == NULL) {
        return;
    }
    uint64_t num_blocks = atomic_load_explicit(&work->size, memory_order_relaxed);
    uint64_t blocks = num_blocks < SMALL_BLOCKS ? SMALL_BLOCKS : num_blocks;
    uint64_t cost_ns = scaled(measured_ns, SMALL_BLOCKS, blocks, HIGHEST_GUESS_NS);
    cost_ns = cost_ns < ST_LEAST_COST_NS ? ST_LEAST_COST_NS : cost_ns;
    struct st_work *known = insert(function_key(function), NULL, 0, cost_ns, false);
    atomic_store_explicit(&known->cost_ns, cost_ns, memory_order_relaxed);
    /* Never launched itself, it is kept as long as its shapes are measured. */
    uint32_t num_launches = atomic_load_explicit(&work->num_launches, memory_order_relaxed);
    atomic_store_explicit(&known->num_launches, num_launches, memory_order_relaxed);
}

void st_work_measured(const struct st_sample *sample, uint64_t measured_ns) {
    struct st_work *work = sample->work;
    atomic_fetch_add_explicit(&sample->bucket->usage->measured_ns, measured_ns, memory_order_relaxed);
    atomic_fetch_add_explicit(&sample->bucket->usage->estimated_ns, sample->charged_ns, memory_order_relaxed);
    if (atomic_load_explicit(&work->generation, memory_order_relaxed) != sample->generation) {
        return; /* The entry belongs to other work by now. */
    }
    uint32_t num_samples = atomic_load_explicit(&work->num_samples, memory_order_relaxed);
    if (num_samples == 0) {
        uint32_t num_launches = atomic_load_explicit(&work->num_launches, memory_order_relaxed);
        settle(sample->bucket, measured_ns, sample->charged_ns, num_launches);
    }
    uint64_t size = atomic_load_explicit(&work->size, memory_order_relaxed);
    if (size != sample->size) {
        measured_ns = scaled(measured_ns, size, sample->size, UINT64_MAX / 4); /* A graph that was changed meanwhile. */
    }
    measured_ns = measured_ns < ST_LEAST_COST_NS ? ST_LEAST_COST_NS : measured_ns;
    uint64_t cost_ns = st_work_cost_ns(work);
    if (num_samples == 0) {
        cost_ns = measured_ns;
    } else if (measured_ns < cost_ns) {
        cost_ns -= (cost_ns - measured_ns + 1) / 2;
    } else {
        uint64_t more_ns = measured_ns - cost_ns;
        cost_ns += (more_ns < cost_ns ? more_ns : cost_ns) / 8;
    }
    atomic_store_explicit(&work->cost_ns, cost_ns, memory_order_relaxed);
    atomic_store_explicit(&work->num_samples, num_samples + 1, memory_order_relaxed);
    remember_function(work, measured_ns);
}

/* --- a launch ------------------------------------------------------------------------------------------------------ */

static __attribute__((noinline)) void consider_sample(struct st_ticket *ticket, CUstream stream, bool per_thread) {
    uint64_t now = atomic_load_explicit(&ticket->bucket->process->num_launches, memory_order_relaxed);
    _Atomic uint64_t *last_sample = &last_samples[(unsigned)ticket->device->ordinal % NUM_DEVICES];
    uint64_t last = atomic_load_explicit(last_sample, memory_order_relaxed);
    bool is_measured = atomic_load_explicit(&ticket->work->num_samples, memory_order_relaxed) != 0;
    /* Another daemon's files count from 0 again. */
    bool is_soon = now >= last && now - last < (is_measured ? GAP : GAP_UNMEASURED);
    if (is_soon && is_measured) {
        return; /* It stays due: one of its next launches is measured. */
    }
    ticket->sample = st_sample_begin(ticket, stream, per_thread, is_soon);
    if (ticket->sample != NULL) {
        atomic_store_explicit(last_sample, now, memory_order_relaxed);
    }
    schedule(ticket->work);
}

void st_launch_begin(struct st_ticket *ticket, struct st_work *work, CUstream stream, bool per_thread) {
    ticket->bucket = NULL;
    ticket->sample = NULL;
    ticket->work = work;
    if (ST_UNLIKELY(atomic_load_explicit(&st_num_captures, memory_order_relaxed) != 0) &&
        st_is_capturing(stream, per_thread)) {
        return;
    }
    struct st_device *device = st_current_device();
    ticket->device = device;
    if (ST_UNLIKELY(device == NULL)) {
        return;
    }
    uint64_t cost_ns = st_work_cost_ns(work);
    ticket->cost_ns = cost_ns;
    /* The cycle begins before the gate: what a launch waits for there is a part of it. */
    st_cycle_begin(atomic_load_explicit(&device->bucket, memory_order_acquire));
    struct st_bucket *bucket = st_gate(device, cost_ns);
    ticket->bucket = bucket;
    if (bucket == NULL) {
        return;
    }
    uint32_t num_launches = atomic_load_explicit(&work->num_launches, memory_order_relaxed);
    atomic_store_explicit(&work->num_launches, num_launches + 1, memory_order_relaxed);
    uint32_t next_sample = atomic_load_explicit(&work->next_sample, memory_order_relaxed);
    /* Whether it is 1 to FURTHEST_DUE launches ahead, in one comparison. */
    if (ST_UNLIKELY(next_sample - num_launches - 1 >= FURTHEST_DUE)) {
        consider_sample(ticket, stream, per_thread);
    }
}

void st_launch_end(struct st_ticket *ticket, CUstream stream, bool per_thread, CUresult result) {
    if (ST_UNLIKELY(ticket->sample != NULL)) {
        st_sample_end(ticket->sample, stream, per_thread, result == CUDA_SUCCESS);
    }
    if (ST_UNLIKELY(ticket->bucket == NULL)) {
        return;
    }
    if (ST_UNLIKELY(result != CUDA_SUCCESS)) {
        st_gate_refund(ticket->bucket, ticket->cost_ns);
        /* Nor is it one of those that the first measurement settles. */
        uint32_t num_launches = atomic_load_explicit(&ticket->work->num_launches, memory_order_relaxed);
        num_launches -= num_launches != 0;
        atomic_store_explicit(&ticket->work->num_launches, num_launches, memory_order_relaxed);
    }
}

void st_work_forked(void) {
    /* Handles of functions and graphs are the parent's, and what they cost here is still the best guess: the table
     * stays. Events are not: they must never be touched again. */
    for (unsigned i = 0; i < NUM_DEVICES; i++) {
        atomic_store_explicit(&last_samples[i], 0, memory_order_relaxed);
    }
    st_sample_forked();
}
