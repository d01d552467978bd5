/* Every way to launch a kernel: each hook asks for tokens, calls its own twin in the driver, and says how that went.
 *
 * Numbers of blocks are products of three 32-bit numbers, as 64 bits: the largest grid of any device fits. What does
 * not fit is no grid, the driver refuses it, and whatever it was counted as is given back.
 */
#include "hooks.h"

static inline uint64_t st_product(uint32_t x, uint32_t y, uint32_t z) {
    return (uint64_t)x * y * z;
}

static inline uint32_t st_threads(uint32_t x, uint32_t y, uint32_t z) {
    return x * y * z;
}

/* Of most launches there is nothing to be said afterwards. */
static inline void st_launched(struct st_ticket *ticket, CUstream stream, bool per_thread, CUresult result) {
    if (ST_UNLIKELY(ticket->sample != NULL || result != CUDA_SUCCESS)) {
        st_launch_end(ticket, stream, per_thread, result);
    }
}

#define ST_SHAPE uint32_t gx, uint32_t gy, uint32_t gz, uint32_t bx, uint32_t by, uint32_t bz, uint32_t shared_bytes

#define ST_LAUNCH_KERNEL(symbol, per_thread)                                                                           \
    ST_EXPORT CUresult CUDAAPI symbol(CUfunction function, ST_SHAPE, CUstream stream, void **parameters,               \
                                      void **extra) {                                                                  \
        if (ST_UNLIKELY(!st_resolve() || st_real_##symbol == NULL)) {                                                  \
            return ST_MISSING;                                                                                         \
        }                                                                                                              \
        struct st_ticket ticket;                                                                                       \
        st_launch_begin(&ticket, st_work_of_kernel(function, st_product(gx, gy, gz), st_threads(bx, by, bz)), stream,  \
                        per_thread);                                                                                   \
        CUresult result =                                                                                              \
            st_real_##symbol(function, gx, gy, gz, bx, by, bz, shared_bytes, stream, parameters, extra);               \
        st_launched(&ticket, stream, per_thread, result);                                                              \
        return result;                                                                                                 \
    }

ST_LAUNCH_KERNEL(cuLaunchKernel, false)
ST_LAUNCH_KERNEL(cuLaunchKernel_ptsz, true)

#define ST_LAUNCH_COOPERATIVE(symbol, per_thread)                                                                      \
    ST_EXPORT CUresult CUDAAPI symbol(CUfunction function, ST_SHAPE, CUstream stream, void **parameters) {             \
        if (ST_UNLIKELY(!st_resolve() || st_real_##symbol == NULL)) {                                                  \
            return ST_MISSING;                                                                                         \
        }                                                                                                              \
        struct st_ticket ticket;                                                                                       \
        st_launch_begin(&ticket, st_work_of_kernel(function, st_product(gx, gy, gz), st_threads(bx, by, bz)), stream,  \
                        per_thread);                                                                                   \
        CUresult result = st_real_##symbol(function, gx, gy, gz, bx, by, bz, shared_bytes, stream, parameters);        \
        st_launched(&ticket, stream, per_thread, result);                                                              \
        return result;                                                                                                 \
    }

ST_LAUNCH_COOPERATIVE(cuLaunchCooperativeKernel, false)
ST_LAUNCH_COOPERATIVE(cuLaunchCooperativeKernel_ptsz, true)

#define ST_LAUNCH_EX(symbol, per_thread)                                                                               \
    ST_EXPORT CUresult CUDAAPI symbol(const CUlaunchConfig *config, CUfunction function, void **parameters,            \
                                      void **extra) {                                                                  \
        if (ST_UNLIKELY(!st_resolve() || st_real_##symbol == NULL)) {                                                  \
            return ST_MISSING;                                                                                         \
        }                                                                                                              \
        if (ST_UNLIKELY(config == NULL)) {                                                                             \
            return st_real_##symbol(config, function, parameters, extra);                                              \
        }                                                                                                              \
        struct st_ticket ticket;                                                                                       \
        CUstream stream = config->hStream;                                                                             \
        st_launch_begin(&ticket,                                                                                       \
                        st_work_of_kernel(function, st_product(config->gridDimX, config->gridDimY, config->gridDimZ),  \
                                          st_threads(config->blockDimX, config->blockDimY, config->blockDimZ)),        \
                        stream, per_thread);                                                                           \
        CUresult result = st_real_##symbol(config, function, parameters, extra);                                       \
        st_launched(&ticket, stream, per_thread, result);                                                              \
        return result;                                                                                                 \
    }

ST_LAUNCH_EX(cuLaunchKernelEx, false)
ST_LAUNCH_EX(cuLaunchKernelEx_ptsz, true)

/* --- the launches of CUDA 2 and 3 ----------------------------------------------------------------------------------
 * The shape of a block was said before, by cuFuncSetBlockShape; it is the same function in a shape of its own.
 */

ST_EXPORT CUresult CUDAAPI cuLaunch(CUfunction function) {
    if (!st_resolve() || st_real_cuLaunch == NULL) {
        return ST_MISSING;
    }
    struct st_ticket ticket;
    st_launch_begin(&ticket, st_work_of_kernel(function, 1, 0), NULL, false);
    CUresult result = st_real_cuLaunch(function);
    st_launched(&ticket, NULL, false, result);
    return result;
}

static uint64_t st_blocks(int width, int height) {
    return width < 0 || height < 0 ? 0 : (uint64_t)width * (uint64_t)height;
}

ST_EXPORT CUresult CUDAAPI cuLaunchGrid(CUfunction function, int width, int height) {
    if (!st_resolve() || st_real_cuLaunchGrid == NULL) {
        return ST_MISSING;
    }
    struct st_ticket ticket;
    st_launch_begin(&ticket, st_work_of_kernel(function, st_blocks(width, height), 0), NULL, false);
    CUresult result = st_real_cuLaunchGrid(function, width, height);
    st_launched(&ticket, NULL, false, result);
    return result;
}

ST_EXPORT CUresult CUDAAPI cuLaunchGridAsync(CUfunction function, int width, int height, CUstream stream) {
    if (!st_resolve() || st_real_cuLaunchGridAsync == NULL) {
        return ST_MISSING;
    }
    struct st_ticket ticket;
    st_launch_begin(&ticket, st_work_of_kernel(function, st_blocks(width, height), 0), stream, false);
    CUresult result = st_real_cuLaunchGridAsync(function, width, height, stream);
    st_launched(&ticket, stream, false, result);
    return result;
}

/* --- one kernel on several devices at once -------------------------------------------------------------------------
 * Each device's part waits for that device's tokens, in the order of the list, with the context of its stream current:
 * that is how the other rooms know the device.
 */

#define ST_MAX_PARTS 64

static bool st_enter_context(CUstream stream) {
    CUcontext context = NULL;
    if (st_real_cuStreamGetCtx == NULL || st_real_cuCtxPushCurrent_v2 == NULL || st_real_cuCtxPopCurrent_v2 == NULL) {
        return false;
    }
    return st_real_cuStreamGetCtx(stream, &context) == CUDA_SUCCESS && context != NULL &&
           st_real_cuCtxPushCurrent_v2(context) == CUDA_SUCCESS;
}

static void st_leave_context(void) {
    CUcontext context;
    (void)st_real_cuCtxPopCurrent_v2(&context);
}

ST_EXPORT CUresult CUDAAPI cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *parts, unsigned int num_parts,
                                                                unsigned int flags) {
    if (!st_resolve() || st_real_cuLaunchCooperativeKernelMultiDevice == NULL) {
        return ST_MISSING;
    }
    if (parts == NULL || num_parts > ST_MAX_PARTS) {
        return st_real_cuLaunchCooperativeKernelMultiDevice(parts, num_parts, flags);
    }
    struct st_ticket tickets[ST_MAX_PARTS];
    bool is_entered[ST_MAX_PARTS];
    for (unsigned int k = 0; k < num_parts; k++) {
        const CUDA_LAUNCH_PARAMS *part = &parts[k];
        is_entered[k] = st_enter_context(part->hStream);
        st_launch_begin(&tickets[k],
                        st_work_of_kernel(part->function, st_product(part->gridDimX, part->gridDimY, part->gridDimZ),
                                          st_threads(part->blockDimX, part->blockDimY, part->blockDimZ)),
                        part->hStream, false);
        if (is_entered[k]) {
            st_leave_context();
        }
    }
    CUresult result = st_real_cuLaunchCooperativeKernelMultiDevice(parts, num_parts, flags);
    for (unsigned int k = 0; k < num_parts; k++) {
        is_entered[k] = st_enter_context(parts[k].hStream);
        st_launched(&tickets[k], parts[k].hStream, false, result);
        if (is_entered[k]) {
            st_leave_context();
        }
    }
    return result;
}
