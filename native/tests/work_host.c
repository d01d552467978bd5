/* Measurements by themselves: work.c and sample.c on a device and a processor that are modelled here.
 *
 * The processor needs time for every call, and what it hands over reaches the device at the end of the call. The device
 * does one thing after another. So the true duration of every kernel is known, and so is what a measurement makes of it.
 */
#include "sample.c"
#include "work.c"

#include <stdio.h>
#include <stdlib.h>

#define ST_HOOK(api, symbol, since, per_thread) __typeof__(symbol) *st_real_##symbol;
#define ST_PLAIN(symbol) __typeof__(symbol) *st_real_##symbol;
#include "functions.def"

struct CUevent_st {
    uint64_t ns;
};

_Atomic bool st_is_resolved = true;
_Atomic uint32_t st_num_captures;
_Atomic uint32_t st_context_epoch = 1;
static struct st_grant grant = {.granted_ns = UINT64_MAX / 4};
static struct st_usage usage;
static struct st_bucket bucket = {.grant = &grant, .usage = &usage, .process = &usage.processes[0]};
static struct st_device device = {.bucket = &bucket};
static uint64_t now_ns = 1000000, ready_ns, call_ns = 4000;
static int num_events;

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

uint64_t st_now_ns(void) {
    return now_ns;
}

static CUresult CUDAAPI get_current(CUcontext *context) {
    *context = (CUcontext)&device;
    return CUDA_SUCCESS;
}

static CUresult CUDAAPI create(CUevent *event, unsigned int flags) {
    static struct CUevent_st events[2 * NUM_SAMPLES * NUM_POOLS];
    *event = &events[num_events++];
    return flags == CU_EVENT_DEFAULT ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult CUDAAPI put(CUevent event, CUstream stream) {
    now_ns += 300;
    event->ns = ready_ns > now_ns ? ready_ns : now_ns;
    return stream == NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

static CUresult CUDAAPI ask(CUstream stream) {
    now_ns += 100;
    return stream != NULL ? CUDA_ERROR_INVALID_HANDLE : now_ns < ready_ns ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

static CUresult CUDAAPI between(float *milliseconds, CUevent begin, CUevent end) {
    *milliseconds = (float)((double)(end->ns - begin->ns) / 1e6);
    return now_ns < end->ns ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

/* One launch of a kernel that takes so long; afterwards the thread does not run for a while. */
static void launch(struct st_work *work, uint64_t kernel_ns, uint64_t away_ns) {
    struct st_ticket ticket;
    st_launch_begin(&ticket, work, NULL, false);
    now_ns += call_ns;
    ready_ns = (ready_ns > now_ns ? ready_ns : now_ns) + kernel_ns;
    now_ns += away_ns;
    st_launch_end(&ticket, NULL, false, CUDA_SUCCESS);
}

static void wait(void) {
    now_ns = (ready_ns > now_ns ? ready_ns : now_ns) + 20000;
}

static unsigned long long scene(uintptr_t number, uint64_t kernel_ns, bool is_idle, uint64_t away_ns) {
    struct st_work *work = st_work_of_kernel((const void *)(number << 12), 64, 128);
    for (int i = 0; i < 20000; i++) {
        launch(work, kernel_ns, i % 5 == 2 ? away_ns : 0);
        if (is_idle || i % 1000 == 999) {
            wait();
        }
    }
    return st_work_cost_ns(work);
}

/* Other processes have the device in between: one launch of twenty takes two milliseconds more, at random. What is
 * counted on average. */
static unsigned long long sliced(uint64_t kernel_ns) {
    struct st_work *work = st_work_of_kernel((const void *)0x9000, 64, 128);
    uint64_t sum_ns = 0;
    uint64_t state = 1;
    for (int i = 0; i < 200000; i++) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        launch(work, kernel_ns + ((state >> 33) % 20 == 0 ? 2000000 : 0), 0);
        if (i % 1000 == 999) {
            wait();
        }
        sum_ns += i < 1000 ? 0 : st_work_cost_ns(work);
    }
    return sum_ns / 199000;
}

/* One stream never gets done; measurements that wait for it must not keep others from being read. */
static unsigned long long stuck(void) {
    struct st_work *endless = st_work_of_kernel((const void *)0x1000, 64, 128);
    struct st_work *work = st_work_of_kernel((const void *)0x2000, 64, 128);
    CUevent later[5];
    for (int i = 0; i < 5; i++) {
        for (int k = 0; k < 2000 && pools[0].samples[i].state != PENDING; k++) {
            launch(endless, 1000, 0);
        }
        later[i] = pools[0].samples[i].end;
        later[i]->ns = UINT64_MAX / 2;
    }
    for (int i = 0; i < 5000; i++) {
        launch(work, 7000, 0);
        wait();
    }
    return st_work_cost_ns(work);
}

int main(void) {
    st_real_cuCtxGetCurrent = get_current;
    st_real_cuEventCreate = create;
    st_real_cuEventRecord = put;
    st_real_cuEventElapsedTime = between;
    st_real_cuStreamQuery = ask;
    printf("{\"idle_brief_ns\": %llu, ", scene(1, 6000, true, 0));
    printf("\"idle_lengthy_ns\": %llu, ", scene(2, 100000, true, 0));
    printf("\"busy_brief_ns\": %llu, ", scene(3, 6000, false, 0));
    printf("\"interrupted_ns\": %llu, ", scene(4, 100000, true, 10000000));
    printf("\"sliced_ns\": %llu, ", sliced(100000));
    call_ns = 900000; /* The queue is full: the call returns when there is room again. */
    printf("\"full_ns\": %llu, ", scene(5, 1000000, false, 0));
    call_ns = 4000;
    st_sample_forked();
    printf("\"stuck_ns\": %llu}\n", stuck());
    return 0;
}
