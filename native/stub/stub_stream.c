/* The stub driver's streams and their capture. */
#include "stub.h"

#include <stdlib.h>

static struct CUstream_st *streams;
static struct stub_capture *captures;
static uint64_t last_capture_id;
static _Thread_local CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
_Atomic uint32_t stub_num_captures;

struct CUstream_st *stub_new_stream(struct CUctx_st *context, unsigned int flags, int priority) {
    struct CUstream_st *stream = calloc(1, sizeof(*stream));
    stream->context = context;
    stream->flags = flags;
    stream->priority = priority;
    pthread_mutex_lock(&stub_lock);
    stream->next = streams;
    streams = stream;
    pthread_mutex_unlock(&stub_lock);
    return stream;
}

/* The caller holds the lock. */
static bool unlink_stream(struct CUstream_st *stream) {
    for (struct CUstream_st **at = &streams; *at != NULL; at = &(*at)->next) {
        if (*at == stream) {
            *at = stream->next;
            return true;
        }
    }
    return false;
}

void stub_drop_streams_of(struct CUctx_st *context) {
    for (struct CUstream_st **at = &streams; *at != NULL;) {
        struct CUstream_st *stream = *at;
        if (stream->context == context && stream != context->legacy && !stream->is_per_thread) {
            *at = stream->next;
            free(stream);
            atomic_fetch_sub(&stub_num_streams, 1);
        } else {
            at = &stream->next;
        }
    }
}

static struct CUstream_st *per_thread_stream(struct CUctx_st *context) {
    static _Thread_local struct CUstream_st *newest;
    if (newest != NULL && newest->context == context) {
        return newest;
    }
    pthread_mutex_lock(&stub_lock);
    struct CUstream_st *stream = streams;
    while (stream != NULL && !(stream->is_per_thread && stream->context == context &&
                               pthread_equal(stream->thread, pthread_self()))) {
        stream = stream->next;
    }
    if (stream == NULL) {
        stream = stub_new_stream(context, 0, 0);
        stream->is_per_thread = true;
        stream->thread = pthread_self();
    }
    pthread_mutex_unlock(&stub_lock);
    newest = stream;
    return stream;
}

struct CUstream_st *stub_stream(CUstream handle, bool per_thread) {
    struct CUctx_st *context = stub_current();
    if (context == NULL || context->is_dead) {
        return NULL;
    }
    if (handle == CU_STREAM_PER_THREAD || (handle == NULL && per_thread)) {
        return per_thread_stream(context);
    }
    return handle == NULL || handle == CU_STREAM_LEGACY ? context->legacy : handle;
}

uint64_t stub_context_ready_ns(struct CUctx_st *context) {
    uint64_t ready = 0;
    pthread_mutex_lock(&stub_lock);
    for (struct CUstream_st *stream = streams; stream != NULL; stream = stream->next) {
        if (stream->context == context && stream->ready_ns > ready) {
            ready = stream->ready_ns;
        }
    }
    pthread_mutex_unlock(&stub_lock);
    return ready;
}

CUresult stub_forbid_in_capture(void) {
    if (atomic_load_explicit(&stub_num_captures, memory_order_relaxed) == 0 ||
        thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED) {
        return CUDA_SUCCESS;
    }
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&stub_lock);
    for (struct stub_capture *capture = captures; capture != NULL; capture = capture->next) {
        bool is_mine = pthread_equal(capture->thread, pthread_self());
        bool concerns = capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL
                            ? is_mine || thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL
                            : capture->mode == CU_STREAM_CAPTURE_MODE_THREAD_LOCAL && is_mine;
        if (concerns) {
            capture->status = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
            result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    }
    pthread_mutex_unlock(&stub_lock);
    if (result != CUDA_SUCCESS) {
        atomic_fetch_add(&stub_num_violations, 1);
    }
    return result;
}

#define NEED_STREAM(handle)                                                                                            \
    struct CUstream_st *stream = stub_stream(handle, per_thread);                                                      \
    if (stream == NULL) {                                                                                              \
        return stub_check_context();                                                                                   \
    }

static CUresult create_stream(CUstream *stream, unsigned int flags, int priority) {
    CUresult result = stub_check_context();
    if (result == CUDA_SUCCESS) {
        *stream = stub_new_stream(stub_current(), flags, priority);
        atomic_fetch_add(&stub_num_streams, 1);
    }
    return result;
}

CUresult cuStreamCreate(CUstream *stream, unsigned int flags) {
    ENTER(cuStreamCreate);
    return create_stream(stream, flags, 0);
}

CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority) {
    ENTER(cuStreamCreateWithPriority);
    return create_stream(stream, flags, priority);
}

static CUresult destroy_stream(CUstream stream) {
    pthread_mutex_lock(&stub_lock);
    bool is_known = stream != NULL && unlink_stream(stream);
    pthread_mutex_unlock(&stub_lock);
    if (!is_known) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    free(stream);
    atomic_fetch_sub(&stub_num_streams, 1);
    return CUDA_SUCCESS;
}

CUresult cuStreamDestroy(CUstream stream) {
    ENTER(cuStreamDestroy);
    return destroy_stream(stream);
}

CUresult cuStreamDestroy_v2(CUstream stream) {
    ENTER(cuStreamDestroy_v2);
    return destroy_stream(stream);
}

PAIR(cuStreamSynchronize, _ptsz, (CUstream handle), {
    NEED_STREAM(handle);
    if (stream->capture != NULL) {
        stream->capture->status = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
        atomic_fetch_add(&stub_num_violations, 1);
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    stub_wait_until(stream->ready_ns);
    stub_pools_synchronised(stream->context->device);
    return CUDA_SUCCESS;
})

PAIR(cuStreamQuery, _ptsz, (CUstream handle), {
    NEED_STREAM(handle);
    CUresult result = stub_forbid_in_capture();
    if (result != CUDA_SUCCESS) {
        return result;
    }
    return stub_tick() >= stream->ready_ns ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
})

PAIR(cuStreamGetFlags, _ptsz, (CUstream handle, unsigned int *flags), {
    NEED_STREAM(handle);
    *flags = stream->flags;
    return CUDA_SUCCESS;
})

PAIR(cuStreamGetPriority, _ptsz, (CUstream handle, int *priority), {
    NEED_STREAM(handle);
    *priority = stream->priority;
    return CUDA_SUCCESS;
})

PAIR(cuStreamGetCtx, _ptsz, (CUstream handle, CUcontext *context), {
    NEED_STREAM(handle);
    *context = stream->context;
    return CUDA_SUCCESS;
})

PAIR(cuStreamGetId, _ptsz, (CUstream handle, unsigned long long *id), {
    NEED_STREAM(handle);
    *id = (unsigned long long)(uintptr_t)stream;
    return CUDA_SUCCESS;
})

PAIR(cuStreamGetDevice, _ptsz, (CUstream handle, CUdevice *device), {
    NEED_STREAM(handle);
    *device = stream->context->device;
    return CUDA_SUCCESS;
})

CUresult cuCtxSynchronize(void) {
    ENTER(cuCtxSynchronize);
    CUresult result = stub_check_context();
    result = result == CUDA_SUCCESS ? stub_forbid_in_capture() : result;
    if (result == CUDA_SUCCESS) {
        stub_wait_until(stub_context_ready_ns(stub_current()));
        stub_pools_synchronised(stub_current()->device);
    }
    return result;
}

CUresult cuCtxSynchronize_v2(CUcontext context) {
    ENTER(cuCtxSynchronize_v2);
    context = context == NULL ? stub_current() : context;
    if (context == NULL || context->is_dead) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    CUresult result = stub_forbid_in_capture();
    if (result == CUDA_SUCCESS) {
        stub_wait_until(stub_context_ready_ns(context));
        stub_pools_synchronised(context->device);
    }
    return result;
}

/* --- capture --- */

static CUresult begin_capture(CUstream handle, bool per_thread, CUstreamCaptureMode mode, CUgraph graph) {
    NEED_STREAM(handle);
    if (stream == stub_current()->legacy) {
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    if (stream->capture != NULL) {
        return CUDA_ERROR_ILLEGAL_STATE;
    }
    struct stub_capture *capture = calloc(1, sizeof(*capture));
    capture->mode = mode;
    capture->status = CU_STREAM_CAPTURE_STATUS_ACTIVE;
    capture->thread = pthread_self();
    capture->graph = graph == NULL ? stub_new_graph() : graph;
    capture->owns_graph = graph == NULL;
    capture->origin = stream;
    pthread_mutex_lock(&stub_lock);
    capture->id = ++last_capture_id;
    capture->next = captures;
    captures = capture;
    stream->capture = capture;
    atomic_fetch_add(&stub_num_captures, 1);
    pthread_mutex_unlock(&stub_lock);
    return CUDA_SUCCESS;
}

PAIR(cuStreamBeginCapture, _ptsz, (CUstream handle), {
    return begin_capture(handle, per_thread, CU_STREAM_CAPTURE_MODE_GLOBAL, NULL);
})

PAIR(cuStreamBeginCapture_v2, _ptsz, (CUstream handle, CUstreamCaptureMode mode), {
    return begin_capture(handle, per_thread, mode, NULL);
})

PAIR(cuStreamBeginCaptureToGraph, _ptsz,
     (CUstream handle, CUgraph graph, const CUgraphNode *dependencies, const CUgraphEdgeData *data, size_t count,
      CUstreamCaptureMode mode),
     {
         if (graph == NULL) {
             return CUDA_ERROR_INVALID_VALUE;
         }
         return begin_capture(handle, per_thread, mode, graph);
     })

#if CUDA_VERSION >= 13030
/* What a recapture changes in the graph's own nodes is not modelled: it captures into the graph. */
PAIR(cuStreamBeginRecaptureToGraph, _ptsz,
     (CUstream handle, CUstreamCaptureMode mode, CUgraph graph, CUgraphRecaptureCallback callback, void *data),
     { return begin_capture(handle, per_thread, mode, graph); })
#endif

static CUresult end_capture(CUstream handle, bool per_thread, CUgraph *graph) {
    NEED_STREAM(handle);
    struct stub_capture *capture = stream->capture;
    *graph = NULL;
    if (capture == NULL) {
        return CUDA_ERROR_ILLEGAL_STATE;
    }
    if (capture->origin != stream) {
        return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    }
    if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && !pthread_equal(capture->thread, pthread_self())) {
        return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    }
    pthread_mutex_lock(&stub_lock);
    for (struct CUstream_st *joined = streams; joined != NULL; joined = joined->next) {
        if (joined->capture == capture) {
            joined->capture = NULL;
        }
    }
    for (struct stub_capture **at = &captures; *at != NULL; at = &(*at)->next) {
        if (*at == capture) {
            *at = capture->next;
            break;
        }
    }
    atomic_fetch_sub(&stub_num_captures, 1);
    pthread_mutex_unlock(&stub_lock);
    CUresult result = CUDA_SUCCESS;
    if (capture->status == CU_STREAM_CAPTURE_STATUS_ACTIVE) {
        *graph = capture->graph;
    } else {
        result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        if (capture->owns_graph) {
            stub_free_graph(capture->graph);
        }
    }
    /* Events recorded in it may still point to it: it stays, kept in reach for the leak checker. */
    static struct stub_capture *ended;
    pthread_mutex_lock(&stub_lock);
    capture->next = ended;
    ended = capture;
    pthread_mutex_unlock(&stub_lock);
    return result;
}

PAIR(cuStreamEndCapture, _ptsz, (CUstream handle, CUgraph *graph), { return end_capture(handle, per_thread, graph); })

PAIR(cuStreamIsCapturing, _ptsz, (CUstream handle, CUstreamCaptureStatus *status), {
    NEED_STREAM(handle);
    *status = stream->capture == NULL ? CU_STREAM_CAPTURE_STATUS_NONE : stream->capture->status;
    return CUDA_SUCCESS;
})

static CUresult capture_info(CUstream handle, bool per_thread, CUstreamCaptureStatus *status, cuuint64_t *id,
                             CUgraph *graph) {
    NEED_STREAM(handle);
    struct stub_capture *capture = stream->capture;
    *status = capture == NULL ? CU_STREAM_CAPTURE_STATUS_NONE : capture->status;
    if (capture != NULL && id != NULL) {
        *id = capture->id;
    }
    if (capture != NULL && graph != NULL) {
        *graph = capture->graph;
    }
    return CUDA_SUCCESS;
}

PAIR(cuStreamGetCaptureInfo, _ptsz, (CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id), {
    return capture_info(handle, per_thread, status, id, NULL);
})

PAIR(cuStreamGetCaptureInfo_v2, _ptsz,
     (CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph, const CUgraphNode **dependencies,
      size_t *count),
     {
         if (count != NULL) {
             *count = 0;
         }
         return capture_info(handle, per_thread, status, id, graph);
     })

PAIR(cuStreamGetCaptureInfo_v3, _ptsz,
     (CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph, const CUgraphNode **dependencies,
      const CUgraphEdgeData **data, size_t *count),
     {
         if (count != NULL) {
             *count = 0;
         }
         return capture_info(handle, per_thread, status, id, graph);
     })

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    ENTER(cuThreadExchangeStreamCaptureMode);
    CUstreamCaptureMode before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}
