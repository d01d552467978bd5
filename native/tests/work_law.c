/* The law on the launch path: no system call, no lock, no allocation, no look at the environment, once it is warm.
 *
 * Allocations, locks and getenv are counted by definitions of this program's own, which come before the C library's. A
 * system call ends the program by a filter of the kernel's; but for the clock, which is none where the machine lets it
 * be read directly.
 */
#include "work_probe.h"

#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

extern void *__libc_malloc(size_t bytes);
extern void *__libc_calloc(size_t count, size_t bytes);
extern void *__libc_realloc(void *address, size_t bytes);

static _Thread_local bool is_watched;
static uint64_t num_allocations, num_locks, num_looks;
void *malloc(size_t bytes) {
    num_allocations += is_watched;
    return __libc_malloc(bytes);
}

void *calloc(size_t count, size_t bytes) {
    num_allocations += is_watched;
    return __libc_calloc(count, bytes);
}

void *realloc(void *address, size_t bytes) {
    num_allocations += is_watched;
    return __libc_realloc(address, bytes);
}

int pthread_mutex_lock(pthread_mutex_t *mutex) {
    num_locks += is_watched;
    int result;
    while ((result = pthread_mutex_trylock(mutex)) == EBUSY) {
        sched_yield();
    }
    return result;
}

char *getenv(const char *name) {
    num_looks += is_watched;
    size_t length = strlen(name);
    for (char **each = environ; each != NULL && *each != NULL; each++) {
        if (strncmp(*each, name, length) == 0 && (*each)[length] == '=') {
            return *each + length + 1;
        }
    }
    return NULL;
}

static CUfunction kernels[32];
static CUgraphExec exec;

/* Every way to launch, several kernels in several shapes. */
static void launch_all(int count) {
    for (int i = 0; i < count; i++) {
        CUfunction kernel = kernels[i % 32];
        unsigned blocks = 1 + i % 7;
        CUlaunchConfig config = {blocks, 1, 1, 64, 1, 1, .sharedMemBytes = 0, .hStream = NULL};
        MUST(cuLaunchKernel(kernel, blocks, 1, 1, 64, 1, 1, 0, NULL, NULL, NULL));
        MUST(cuLaunchKernel_ptsz(kernel, blocks, 1, 1, 64, 1, 1, 0, NULL, NULL, NULL));
        MUST(cuLaunchKernelEx(&config, kernel, NULL, NULL));
        MUST(cuLaunchKernelEx_ptsz(&config, kernel, NULL, NULL));
        MUST(cuLaunchCooperativeKernel(kernel, blocks, 1, 1, 64, 1, 1, 0, NULL, NULL));
        MUST(cuLaunchCooperativeKernel_ptsz(kernel, blocks, 1, 1, 64, 1, 1, 0, NULL, NULL));
        MUST(cuGraphLaunch(exec, NULL));
        MUST(cuGraphLaunch_ptsz(exec, NULL));
    }
}

/* From here on the calling thread ends the program with its first system call. */
static bool forbid_system_calls(void) {
    struct sock_filter rules[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clock_gettime, 2, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_exit, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof(rules) / sizeof(rules[0]), rules};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

static bool is_forbidden;

static void *launch_strictly(void *context) {
    MUST(cuCtxSetCurrent(context));
    launch_all(2000);
    is_forbidden = forbid_system_calls();
    is_watched = true;
    launch_all(20000);
    is_watched = false;
    syscall(SYS_exit, 0);
    return NULL;
}

int main(void) {
    CUcontext context = probe_begin(UINT64_MAX / 4);
    CUgraph graph;
    CUgraphNode node;
    char name[32];
    for (int i = 0; i < 32; i++) {
        snprintf(name, sizeof(name), "layer%d", i);
        kernels[i] = probe_kernel(name);
    }
    CUDA_KERNEL_NODE_PARAMS_v2 params = {kernels[0], 1, 1, 1, 1, 1, 1, .sharedMemBytes = 0};
    MUST(cuGraphCreate(&graph, 0));
    MUST(cuGraphAddKernelNode_v2(&node, graph, NULL, 0, &params));
    MUST(cuGraphInstantiateWithFlags(&exec, graph, 0));
    uint64_t num_before = own_launches();
    pthread_t strict;
    pthread_create(&strict, NULL, launch_strictly, context);
    pthread_join(strict, NULL);
    say("is_forbidden", is_forbidden);
    say("counted", own_launches() - num_before);
    say("allocations", num_allocations);
    say("locks", num_locks);
    say("looks", num_looks);
    said();
    return 0;
}
