/* The stub driver's beginning, devices, contexts, modules and functions. */
#include "stub.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>

static _Thread_local struct CUctx_st *stack[64];
static _Thread_local int stack_depth;
static struct CUctx_st *contexts;
static struct CUctx_st *newest_dead;
static struct CUctx_st *primaries[STUB_MAX_DEVICES];
static struct CUmod_st *modules;

#define NEED_DEVICE(device)                                                                                            \
    do {                                                                                                               \
        if (!stub_is_initialised) {                                                                                    \
            return CUDA_ERROR_NOT_INITIALIZED;                                                                         \
        }                                                                                                              \
        if ((device) < 0 || (device) >= stub_num_devices) {                                                            \
            return CUDA_ERROR_INVALID_DEVICE;                                                                          \
        }                                                                                                              \
    } while (0)

CUresult cuInit(unsigned int flags) {
    ENTER(cuInit);
    if (flags != 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (stub_num_devices == 0) {
        return CUDA_ERROR_NO_DEVICE;
    }
    stub_is_initialised = true;
    return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version) {
    ENTER(cuDriverGetVersion);
    *version = stub_version;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
    ENTER(cuDeviceGetCount);
    if (!stub_is_initialised) {
        return CUDA_ERROR_NOT_INITIALIZED;
    }
    *count = stub_num_devices;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    ENTER(cuDeviceGet);
    NEED_DEVICE(ordinal);
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    ENTER(cuDeviceGetName);
    NEED_DEVICE(device);
    snprintf(name, (size_t)length, "Stub device %d", stub_devices[device].physical);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    ENTER(cuDeviceGetUuid);
    NEED_DEVICE(device);
    *uuid = stub_devices[device].uuid;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    ENTER(cuDeviceGetUuid_v2);
    NEED_DEVICE(device);
    *uuid = stub_devices[device].uuid;
    return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem(unsigned int *bytes, CUdevice device) {
    ENTER(cuDeviceTotalMem);
    NEED_DEVICE(device);
    size_t total = stub_devices[device].total_bytes;
    *bytes = total > UINT32_MAX ? UINT32_MAX : (unsigned int)total;
    return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    ENTER(cuDeviceTotalMem_v2);
    NEED_DEVICE(device);
    *bytes = stub_devices[device].total_bytes;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    ENTER(cuDeviceGetAttribute);
    NEED_DEVICE(device);
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
        *value = 108;
        break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR:
        *value = 2048;
        break;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR:
        *value = 32;
        break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
        *value = 1024;
        break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
        *value = 32;
        break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
        *value = 9;
        break;
    default:
        *value = 1;
    }
    return CUDA_SUCCESS;
}

/* --- contexts --- */

struct CUctx_st *stub_current(void) {
    return stack_depth > 0 ? stack[stack_depth - 1] : NULL;
}

CUresult stub_check_context(void) {
    struct CUctx_st *current = stub_current();
    if (current == NULL) {
        return stub_is_initialised ? CUDA_ERROR_INVALID_CONTEXT : CUDA_ERROR_NOT_INITIALIZED;
    }
    return current->is_dead ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_SUCCESS;
}

static struct CUctx_st *new_context(int device, unsigned int flags, unsigned int version) {
    static uint64_t last_id;
    pthread_mutex_lock(&stub_lock);
    struct CUctx_st *context = newest_dead;
    newest_dead = NULL;
    if (context == NULL) {
        context = calloc(1, sizeof(*context));
        context->next = contexts;
        contexts = context;
        context->legacy = stub_new_stream(context, 0, 0);
    }
    context->is_dead = context->is_primary = false;
    context->num_retained = 0;
    context->device = device;
    context->flags = flags;
    context->version = version;
    context->id = ++last_id;
    atomic_fetch_add(&stub_num_contexts, 1);
    pthread_mutex_unlock(&stub_lock);
    return context;
}

/* The struct itself stays: a program may still ask about it, and is told that it is destroyed. The next context that is
 * made takes its address, as may happen with a real driver. */
static void end_context(struct CUctx_st *context) {
    pthread_mutex_lock(&stub_lock);
    if (!context->is_dead) {
        stub_drop_memory_of(context);
        stub_drop_streams_of(context);
        stub_drop_events_of(context);
        context->is_dead = true;
        newest_dead = context;
        atomic_fetch_sub(&stub_num_contexts, 1);
    }
    pthread_mutex_unlock(&stub_lock);
}

static CUresult create_context(CUcontext *context, unsigned int flags, CUdevice device, unsigned int version) {
    NEED_DEVICE(device);
    *context = new_context(device, flags, version);
    if (stack_depth < 64) {
        stack[stack_depth++] = *context;
    }
    return CUDA_SUCCESS;
}

CUresult cuCtxCreate(CUcontext *context, unsigned int flags, CUdevice device) {
    ENTER(cuCtxCreate);
    return create_context(context, flags, device, 2000);
}

CUresult cuCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device) {
    ENTER(cuCtxCreate_v2);
    return create_context(context, flags, device, 3020);
}

CUresult cuCtxCreate_v3(CUcontext *context, CUexecAffinityParam *affinity, int count, unsigned int flags, CUdevice device) {
    ENTER(cuCtxCreate_v3);
    return create_context(context, flags, device, 3020);
}

CUresult cuCtxCreate_v4(CUcontext *context, CUctxCreateParams *parameters, unsigned int flags, CUdevice device) {
    ENTER(cuCtxCreate_v4);
    return create_context(context, flags, device, 3020);
}

static CUresult destroy_context(CUcontext context) {
    if (context == NULL || context->is_primary) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    end_context(context);
    if (stub_current() == context) {
        stack_depth--;
    }
    return CUDA_SUCCESS;
}

CUresult cuCtxDestroy(CUcontext context) {
    ENTER(cuCtxDestroy);
    return destroy_context(context);
}

CUresult cuCtxDestroy_v2(CUcontext context) {
    ENTER(cuCtxDestroy_v2);
    return destroy_context(context);
}

static CUresult push_context(CUcontext context) {
    if (context == NULL || context->is_dead || stack_depth == 64) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    stack[stack_depth++] = context;
    return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext context) {
    ENTER(cuCtxPushCurrent);
    return push_context(context);
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
    ENTER(cuCtxPushCurrent_v2);
    return push_context(context);
}

static CUresult pop_context(CUcontext *context) {
    if (stack_depth == 0) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    stack_depth--;
    if (context != NULL) {
        *context = stack[stack_depth];
    }
    return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent(CUcontext *context) {
    ENTER(cuCtxPopCurrent);
    return pop_context(context);
}

CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    ENTER(cuCtxPopCurrent_v2);
    return pop_context(context);
}

CUresult cuCtxSetCurrent(CUcontext context) {
    ENTER(cuCtxSetCurrent);
    if (context != NULL && context->is_dead) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    if (context == NULL) {
        stack_depth -= stack_depth > 0 ? 1 : 0;
    } else {
        stack_depth += stack_depth == 0 ? 1 : 0;
        stack[stack_depth - 1] = context;
    }
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    ENTER(cuCtxGetCurrent);
    if (!stub_is_initialised) {
        return CUDA_ERROR_NOT_INITIALIZED;
    }
    *context = stub_current();
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
    ENTER(cuCtxGetDevice);
    CUresult result = stub_check_context();
    if (result == CUDA_SUCCESS) {
        *device = stub_current()->device;
    }
    return result;
}

CUresult cuCtxGetDevice_v2(CUdevice *device, CUcontext context) {
    ENTER(cuCtxGetDevice_v2);
    if (context == NULL) {
        CUresult result = stub_check_context();
        if (result != CUDA_SUCCESS) {
            return result;
        }
        context = stub_current();
    }
    *device = context->device;
    return context->is_dead ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_SUCCESS;
}

CUresult cuCtxGetId(CUcontext context, unsigned long long *id) {
    ENTER(cuCtxGetId);
    context = context == NULL ? stub_current() : context;
    if (context == NULL || context->is_dead) {
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    }
    *id = context->id;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetApiVersion(CUcontext context, unsigned int *version) {
    ENTER(cuCtxGetApiVersion);
    context = context == NULL ? stub_current() : context;
    if (context == NULL || context->is_dead) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    *version = context->version;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetFlags(unsigned int *flags) {
    ENTER(cuCtxGetFlags);
    CUresult result = stub_check_context();
    if (result == CUDA_SUCCESS) {
        *flags = stub_current()->flags;
    }
    return result;
}

CUresult cuCtxSetLimit(CUlimit limit, size_t value) {
    ENTER(cuCtxSetLimit);
    return stub_check_context();
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    ENTER(cuDevicePrimaryCtxRetain);
    NEED_DEVICE(device);
    pthread_mutex_lock(&stub_lock);
    if (primaries[device] == NULL) {
        primaries[device] = new_context(device, 0, 3020);
        primaries[device]->is_primary = true;
    }
    primaries[device]->num_retained++;
    *context = primaries[device];
    pthread_mutex_unlock(&stub_lock);
    return CUDA_SUCCESS;
}

static CUresult release_primary(CUdevice device, bool at_once) {
    NEED_DEVICE(device);
    CUresult result = CUDA_ERROR_INVALID_CONTEXT;
    pthread_mutex_lock(&stub_lock);
    struct CUctx_st *primary = primaries[device];
    if (primary != NULL) {
        result = CUDA_SUCCESS;
        primary->num_retained -= at_once ? primary->num_retained : 1;
        if (primary->num_retained == 0) {
            end_context(primary);
            primaries[device] = NULL;
        }
    } else if (at_once) {
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&stub_lock);
    return result;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
    ENTER(cuDevicePrimaryCtxRelease);
    return release_primary(device, false);
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    ENTER(cuDevicePrimaryCtxRelease_v2);
    return release_primary(device, false);
}

CUresult cuDevicePrimaryCtxReset(CUdevice device) {
    ENTER(cuDevicePrimaryCtxReset);
    return release_primary(device, true);
}

CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
    ENTER(cuDevicePrimaryCtxReset_v2);
    return release_primary(device, true);
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *is_active) {
    ENTER(cuDevicePrimaryCtxGetState);
    NEED_DEVICE(device);
    *flags = 0;
    *is_active = primaries[device] != NULL;
    return CUDA_SUCCESS;
}

CUresult cuCtxDetach(CUcontext context) {
    ENTER(cuCtxDetach);
    return destroy_context(context);
}

/* --- green contexts: each has a context of its own, the whole device behind it --- */

CUresult cuDeviceGetDevResource(CUdevice device, CUdevResource *resource, CUdevResourceType type) {
    ENTER(cuDeviceGetDevResource);
    NEED_DEVICE(device);
    memset(resource, 0, sizeof(*resource));
    resource->type = type;
    resource->sm.smCount = 108;
    return CUDA_SUCCESS;
}

CUresult cuDevResourceGenerateDesc(CUdevResourceDesc *description, CUdevResource *resources, unsigned int count) {
    ENTER(cuDevResourceGenerateDesc);
    *description = (CUdevResourceDesc)&primaries;
    return CUDA_SUCCESS;
}

CUresult cuGreenCtxCreate(CUgreenCtx *green, CUdevResourceDesc description, CUdevice device, unsigned int flags) {
    ENTER(cuGreenCtxCreate);
    NEED_DEVICE(device);
    *green = (CUgreenCtx)new_context(device, flags, 3020);
    return CUDA_SUCCESS;
}

CUresult cuGreenCtxDestroy(CUgreenCtx green) {
    ENTER(cuGreenCtxDestroy);
    return destroy_context((CUcontext)green);
}

CUresult cuCtxFromGreenCtx(CUcontext *context, CUgreenCtx green) {
    ENTER(cuCtxFromGreenCtx);
    *context = (CUcontext)green;
    return CUDA_SUCCESS;
}

CUresult cuGreenCtxStreamCreate(CUstream *stream, CUgreenCtx green, unsigned int flags, int priority) {
    ENTER(cuGreenCtxStreamCreate);
    *stream = stub_new_stream((struct CUctx_st *)green, flags, priority);
    atomic_fetch_add(&stub_num_streams, 1);
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned int flags) {
    ENTER(cuDevicePrimaryCtxSetFlags_v2);
    NEED_DEVICE(device);
    return CUDA_SUCCESS;
}

/* --- modules and functions --- */

static CUresult load_module(CUmodule *module) {
    CUresult result = stub_check_context();
    if (result == CUDA_SUCCESS) {
        *module = calloc(1, sizeof(**module));
        pthread_mutex_lock(&stub_lock);
        (*module)->next = modules;
        modules = *module;
        pthread_mutex_unlock(&stub_lock);
    }
    return result;
}

CUresult cuModuleLoad(CUmodule *module, const char *path) {
    ENTER(cuModuleLoad);
    return load_module(module);
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    ENTER(cuModuleLoadData);
    return load_module(module);
}

CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int count, CUjit_option *options, void **values) {
    ENTER(cuModuleLoadDataEx);
    return load_module(module);
}

CUresult cuModuleUnload(CUmodule module) {
    ENTER(cuModuleUnload);
    return CUDA_SUCCESS;
}

static struct CUfunc_st *function_called(struct CUmod_st *module, const char *name) {
    pthread_mutex_lock(&stub_lock);
    struct CUfunc_st *function = module->functions;
    while (function != NULL && strcmp(function->name, name) != 0) {
        function = function->next;
    }
    if (function == NULL) {
        function = calloc(1, sizeof(*function));
        snprintf(function->name, sizeof(function->name), "%s", name);
        function->module = module;
        function->ns = stub_kernel_ns;
        function->ns_a_block = stub_block_ns;
        const char *duration = strchr(name, '@');
        if (duration != NULL) {
            char *end;
            uint64_t ns = strtoull(duration + 1, &end, 10);
            function->ns = *end == '*' ? 0 : ns;
            function->ns_a_block = *end == '*' ? ns : 0;
        }
        function->next = module->functions;
        module->functions = function;
    }
    pthread_mutex_unlock(&stub_lock);
    return function;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    ENTER(cuModuleGetFunction);
    if (module == NULL || name == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *function = function_called(module, name);
    return CUDA_SUCCESS;
}

CUresult cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *options, void **values, unsigned int count,
                           CUlibraryOption *library_options, void **library_values, unsigned int library_count) {
    ENTER(cuLibraryLoadData);
    return load_module((CUmodule *)library);
}

CUresult cuLibraryUnload(CUlibrary library) {
    ENTER(cuLibraryUnload);
    return CUDA_SUCCESS;
}

/* As with the real one, a CUkernel can be launched as if it were a CUfunction. */
CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name) {
    ENTER(cuLibraryGetKernel);
    *kernel = (CUkernel)function_called((struct CUmod_st *)library, name);
    return CUDA_SUCCESS;
}

CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel) {
    ENTER(cuKernelGetFunction);
    *function = (CUfunction)kernel;
    return CUDA_SUCCESS;
}

CUresult cuFuncGetName(const char **name, CUfunction function) {
    ENTER(cuFuncGetName);
    *name = function->name;
    return CUDA_SUCCESS;
}

CUresult cuFuncGetModule(CUmodule *module, CUfunction function) {
    ENTER(cuFuncGetModule);
    *module = function->module;
    return CUDA_SUCCESS;
}

void stub_set_kernel_ns(CUfunction function, uint64_t ns, uint64_t ns_a_block) {
    function->ns = ns;
    function->ns_a_block = ns_a_block;
}
