/* The table of what work costs, by itself: work.c with stand-ins for the rooms around it. */
#include "work.c"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

_Atomic bool st_is_resolved = true;
_Atomic uint32_t st_num_captures;
static struct st_grant grant = {.granted_ns = UINT64_MAX / 4};
static struct st_usage usage;
static struct st_bucket bucket = {.grant = &grant, .usage = &usage, .process = &usage.processes[0]};
static struct st_device device = {.bucket = &bucket};

bool st_resolve_slowly(void) {
    return true;
}

bool st_is_capturing(CUstream stream, bool per_thread) {
    return stream != NULL && per_thread;
}

struct st_device *st_current_device(void) {
    return &device;
}

struct st_bucket *st_gate_slowly(struct st_device *whose, struct st_bucket *its, uint64_t used_ns) {
    return whose == &device && used_ns != UINT64_MAX ? its : NULL;
}

void st_gate_refund(struct st_bucket *its, uint64_t cost_ns) {
    atomic_fetch_sub(&its->usage->used_ns, cost_ns);
}

void st_cycle_begin_slowly(struct st_bucket *its) {
    atomic_store(&its->cycle_started_ns, 1);
}

static uint64_t num_considered;

struct st_sample *st_sample_begin(const struct st_ticket *ticket, CUstream stream, bool per_thread, bool only_read) {
    num_considered++;
    return ticket->bucket != &bucket && stream == NULL && !per_thread && only_read ? abort(), NULL : NULL;
}

void st_sample_end(struct st_sample *sample, CUstream stream, bool per_thread, bool was_launched) {
    if (sample != NULL || (stream != NULL && per_thread && was_launched)) {
        abort();
    }
}

void st_sample_forked(void) {
}

static const void *function(uint64_t number) {
    return (const void *)(uintptr_t)(0x7f0000000000u + 64 * number);
}

static void launch(struct st_work *work) {
    struct st_ticket ticket;
    st_launch_begin(&ticket, work, NULL, false);
    st_launch_end(&ticket, NULL, false, CUDA_SUCCESS);
}

static void measure(struct st_work *work, uint64_t ns) {
    struct st_sample sample = {.work = work,
                               .generation = work->generation,
                               .size = work->size,
                               .charged_ns = st_work_cost_ns(work),
                               .bucket = &bucket};
    st_work_measured(&sample, ns);
}

/* A guess that belongs to these blocks alone. */
static uint64_t guess_of(uint64_t num_blocks) {
    return FIRST_GUESS_NS + num_blocks * 1024 * WAVE_NS / WAVE_THREADS;
}

/* Ever new shapes: each has its own guess, those in steady use keep what was learnt, graphs keep their weight. */
static void flood(void) {
    enum { HOT = 500, GRAPHS = 300, COLD = 400000 };
    long num_wrong = 0;
    long num_lost = 0;
    long num_graphs_lost = 0;
    for (long i = 0; i < HOT; i++) {
        struct st_work *work = st_work_of_kernel(function(i), 77, 128);
        launch(work);
        measure(work, 1000000 + i);
    }
    for (long i = 0; i < GRAPHS; i++) {
        st_work_begin_graph((CUgraphExec)(uintptr_t)(4096 + 16 * i), 5000000 + i);
    }
    for (long i = 0; i < COLD; i++) {
        uint64_t num_blocks = 1 + i % 10000;
        struct st_work *work = st_work_of_kernel(function(100000 + i), num_blocks, 1024);
        num_wrong += work == NULL || st_work_cost_ns(work) != guess_of(num_blocks);
        launch(work);
        launch(st_work_of_kernel(function(i % HOT), 77, 128));
    }
    for (long i = 0; i < HOT; i++) {
        num_lost += st_work_cost_ns(st_work_of_kernel(function(i), 77, 128)) != (uint64_t)(1000000 + i);
    }
    for (long i = 0; i < GRAPHS; i++) {
        struct st_work *work = st_work_of_graph((CUgraphExec)(uintptr_t)(4096 + 16 * i), ST_UNKNOWN_GRAPH_NS);
        num_graphs_lost += st_work_cost_ns(work) != (uint64_t)(5000000 + i);
    }
    printf("{\"wrong\": %ld, \"lost\": %ld, \"graphs_lost\": %ld}\n", num_wrong, num_lost, num_graphs_lost);
}

static _Atomic long num_thread_wrong;

static void *look_up(void *seed) {
    uint64_t state = (uintptr_t)seed;
    for (int i = 0; i < 200000; i++) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        uint64_t number = (state >> 33) % 3000;
        struct st_work *work = st_work_of_kernel(function(number), number + 1, 1024);
        launch(work);
        /* Another thread may be filling the entry at this moment: then it costs the least guess, for this once. */
        uint64_t cost_ns = st_work_cost_ns(work);
        if (cost_ns != guess_of(number + 1) && cost_ns != FIRST_GUESS_NS) {
            atomic_fetch_add(&num_thread_wrong, 1);
        }
    }
    return NULL;
}

/* Several threads bring the same new shapes at once: one entry each. */
static void threads(void) {
    pthread_t all[4];
    long num_entries = 0;
    for (uintptr_t i = 0; i < 4; i++) {
        pthread_create(&all[i], NULL, look_up, (void *)(i + 1));
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(all[i], NULL);
    }
    for (size_t i = 0; i < NUM_SETS * NUM_WAYS; i++) {
        num_entries += table[i].key != 0;
    }
    printf("{\"wrong\": %ld, \"entries\": %ld, \"launches\": %llu}\n", num_thread_wrong, num_entries,
           (unsigned long long)usage.processes[0].num_launches);
}

/* The first measurement settles what was counted before, in both directions, and never takes more than was used. */
static void settlement(void) {
    struct st_work *cheap = st_work_of_kernel(function(1), 1, 128);
    for (int i = 0; i < 10; i++) {
        launch(cheap);
    }
    measure(cheap, 50000);
    unsigned long long up_ns = usage.used_ns;
    atomic_store(&usage.used_ns, 0);
    struct st_work *dear = st_work_of_kernel(function(2), 10000000, 1024);
    for (int i = 0; i < 3; i++) {
        launch(dear);
    }
    measure(dear, 50000);
    unsigned long long down_ns = usage.used_ns;
    struct st_work *other = st_work_of_kernel(function(3), 10000000, 1024);
    launch(other);
    atomic_store(&usage.used_ns, 5); /* new files of another daemon */
    measure(other, 50000);
    unsigned long long floor_ns = usage.used_ns;
    struct st_work *slow = st_work_of_kernel(function(4), 1, 128);
    for (int i = 0; i < 1000; i++) {
        launch(slow);
    }
    atomic_store(&usage.used_ns, 0);
    measure(slow, 3600000000000u);
    printf("{\"up_ns\": %llu, \"down_ns\": %llu, \"floor_ns\": %llu, \"most_ns\": %llu}\n", up_ns, down_ns, floor_ns,
           (unsigned long long)usage.used_ns);
}

/* How often a launch out of as many as may lie between two measured ones is looked at, once a thread that was
 * interrupted while it counted has put the number back. */
static void interrupted(void) {
    struct st_work *work = st_work_of_kernel(function(1), 1, 128);
    measure(work, 30000);
    for (int i = 0; i < 100000; i++) {
        launch(work);
    }
    atomic_store(&work->num_launches, 1000);
    num_considered = 0;
    for (unsigned i = 0; i < FURTHEST_DUE; i++) {
        launch(work);
    }
    printf("{\"considered\": %llu}\n", (unsigned long long)num_considered);
}

int main(int count, char **values) {
    switch (count == 2 ? values[1][0] : 0) {
    case 'f':
        flood();
        return 0;
    case 't':
        threads();
        return 0;
    case 's':
        settlement();
        return 0;
    case 'i':
        interrupted();
        return 0;
    }
    return 2;
}
