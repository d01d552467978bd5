/* What a test program can ask and tell the stub driver, beside the driver's own functions.
 *
 * The environment sets the rest, read once when the stub is loaded:
 *   STUB_DEVICES=2         devices of the machine; CUDA_VISIBLE_DEVICES chooses among them (numbers or UUIDs)
 *   STUB_MEMORY_MB=16384   memory of each, or a list "16384,8192"
 *   STUB_VERSION=13050     what cuDriverGetVersion says
 *   STUB_CLOCK=virtual     virtual: time passes by STUB_CALL_NS (1000) a call and leaps at a synchronisation
 *                          real: time of the machine; a synchronisation sleeps
 *                          off: launches are counted and take no time
 *   STUB_KERNEL_NS=100000, STUB_BLOCK_NS=0, STUB_COPY_NS=10000   what one kernel, one block of it, one copy takes
 *   STUB_SHARED=path       a file through which several processes see the same devices: their time and their memory
 *   STUB_QUEUE_NS=0        more than this much work in a stream's queue holds a launch back (real clock only); 0: never
 *   STUB_FAIL=name[:first[-last]][=code],...   these calls of `name` fail (from 0; default all) with `code` (default 719)
 *   STUB_WITHOUT=name,...  cuGetProcAddress does not know these symbols
 *   STUB_ALL_NAMES=1       cuGetProcAddress knows every name that begins with cu; what the stub lacks says not supported
 *   STUB_LOOKUPS=path      every question to cuGetProcAddress, a line each: name version flags symbol
 *   STUB_FORK=allow        a forked child may use the driver, beginning anew; otherwise it gets error 3 like the real one
 *   STUB_REPORT=path       the counts as JSON at exit (a forked child's at path.PID; %p in the path is the pid)
 * A kernel's name can carry its duration: "layer@2500" takes 2500 ns, "layer@100*" takes 100 ns for each block.
 */
#ifndef STUB_API_H
#define STUB_API_H

#include <cuda.h>
#include <stdint.h>

uint64_t stub_calls(const char *symbol); /* how often this symbol of the driver was called */
uint64_t stub_kernels(CUdevice device);  /* kernels that ran on it, those inside graphs included */
uint64_t stub_blocks(CUdevice device);
uint64_t stub_busy_ns(CUdevice device);
uint64_t stub_memory_bytes(CUdevice device); /* what this process holds of it */
uint64_t stub_peak_bytes(CUdevice device);
uint64_t stub_alive(const char *kind); /* "events", "streams", "graphs", "execs", "contexts", "allocations" */
uint64_t stub_violations(void);        /* calls that a real driver forbids while a stream captures */
uint64_t stub_now_ns(void);
void stub_advance_ns(uint64_t ns);
void stub_set_kernel_ns(CUfunction function, uint64_t ns, uint64_t ns_a_block);

#endif
