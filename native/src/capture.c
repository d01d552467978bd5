/* Streams that capture: what is launched on them runs later, as a graph, or never.
 *
 * Nothing is counted, held back or measured on such a stream. Which streams these are only the driver knows (others
 * join a capture by waiting for its events), so it is asked; but only while somebody captures at all, and that is
 * counted here: from before a capture begins until the driver says that it is over.
 */
#include <pthread.h>

#include "hooks.h"
#include "work.h"

#define NUM_ORIGINS 64u

_Atomic uint32_t st_num_captures;

/* The streams in which the captures began, for when one is destroyed while it captures. Where there are more, a
 * destroyed one stays counted, and launches go on asking the driver. */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static CUstream origins[NUM_ORIGINS];

static CUresult status_of(CUstream stream, bool per_thread, CUstreamCaptureStatus *status) {
    __typeof__(cuStreamIsCapturing) *real = per_thread ? st_real_cuStreamIsCapturing_ptsz : st_real_cuStreamIsCapturing;
    *status = CU_STREAM_CAPTURE_STATUS_NONE;
    return real == NULL ? ST_MISSING : real(stream, status);
}

bool st_is_capturing(CUstream stream, bool per_thread) {
    CUstreamCaptureStatus status;
    CUresult result = status_of(stream, per_thread, &status);
    if (result == CUDA_SUCCESS) {
        return status != CU_STREAM_CAPTURE_STATUS_NONE;
    }
    /* The legacy stream while others capture: what is launched there breaks their capture by itself. And where nobody
     * can be asked, a launch too many that is not counted is better than a capture that is broken. */
    return result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT || result == ST_MISSING;
}

static bool is_handle_of_one(CUstream stream) {
    return stream != NULL && stream != CU_STREAM_LEGACY && stream != CU_STREAM_PER_THREAD;
}

static void add_origin(CUstream stream) {
    if (!is_handle_of_one(stream)) {
        return;
    }
    pthread_mutex_lock(&mutex);
    for (unsigned i = 0; i < NUM_ORIGINS; i++) {
        if (origins[i] == NULL) {
            origins[i] = stream;
            break;
        }
    }
    pthread_mutex_unlock(&mutex);
}

static bool remove_origin(CUstream stream) {
    bool was_there = false;
    if (!is_handle_of_one(stream)) {
        return false;
    }
    pthread_mutex_lock(&mutex);
    for (unsigned i = 0; i < NUM_ORIGINS && !was_there; i++) {
        if (origins[i] == stream) {
            origins[i] = NULL;
            was_there = true;
        }
    }
    pthread_mutex_unlock(&mutex);
    return was_there;
}

static void count_end(void) {
    uint32_t num_captures = atomic_load(&st_num_captures);
    while (num_captures != 0 && !atomic_compare_exchange_weak(&st_num_captures, &num_captures, num_captures - 1)) {
    }
}

static CUresult began(CUstream stream, CUresult result) {
    if (result == CUDA_SUCCESS) {
        add_origin(stream);
    } else {
        count_end();
    }
    return result;
}

/* Counted before the driver begins, so that no launch of another thread meets a capture that is not counted yet. */
#define BEGIN(symbol, stream, ...)                                                                                     \
    do {                                                                                                               \
        if (!st_resolve() || st_real_##symbol == NULL) {                                                               \
            return ST_MISSING;                                                                                         \
        }                                                                                                              \
        atomic_fetch_add(&st_num_captures, 1);                                                                         \
        return began(stream, st_real_##symbol(stream, ##__VA_ARGS__));                                                 \
    } while (0)

ST_EXPORT CUresult CUDAAPI cuStreamBeginCapture(CUstream stream) {
    BEGIN(cuStreamBeginCapture, stream);
}

ST_EXPORT CUresult CUDAAPI cuStreamBeginCapture_ptsz(CUstream stream) {
    BEGIN(cuStreamBeginCapture_ptsz, stream);
}

ST_EXPORT CUresult CUDAAPI cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) {
    BEGIN(cuStreamBeginCapture_v2, stream, mode);
}

ST_EXPORT CUresult CUDAAPI cuStreamBeginCapture_v2_ptsz(CUstream stream, CUstreamCaptureMode mode) {
    BEGIN(cuStreamBeginCapture_v2_ptsz, stream, mode);
}

ST_EXPORT CUresult CUDAAPI cuStreamBeginCaptureToGraph(CUstream stream, CUgraph graph, const CUgraphNode *dependencies,
                                                       const CUgraphEdgeData *data, size_t num_dependencies,
                                                       CUstreamCaptureMode mode) {
    BEGIN(cuStreamBeginCaptureToGraph, stream, graph, dependencies, data, num_dependencies, mode);
}

ST_EXPORT CUresult CUDAAPI cuStreamBeginCaptureToGraph_ptsz(CUstream stream, CUgraph graph,
                                                            const CUgraphNode *dependencies,
                                                            const CUgraphEdgeData *data, size_t num_dependencies,
                                                            CUstreamCaptureMode mode) {
    BEGIN(cuStreamBeginCaptureToGraph_ptsz, stream, graph, dependencies, data, num_dependencies, mode);
}

#if CUDA_VERSION >= 13030
ST_EXPORT CUresult CUDAAPI cuStreamBeginRecaptureToGraph(CUstream stream, CUstreamCaptureMode mode, CUgraph graph,
                                                         CUgraphRecaptureCallback callback, void *data) {
    BEGIN(cuStreamBeginRecaptureToGraph, stream, mode, graph, callback, data);
}

ST_EXPORT CUresult CUDAAPI cuStreamBeginRecaptureToGraph_ptsz(CUstream stream, CUstreamCaptureMode mode, CUgraph graph,
                                                              CUgraphRecaptureCallback callback, void *data) {
    BEGIN(cuStreamBeginRecaptureToGraph_ptsz, stream, mode, graph, callback, data);
}
#endif

/* A capture can end with an error (it had become invalid), and an error can mean that it goes on (it began in another
 * stream): the driver's word before and after tells. */
static CUresult end(__typeof__(cuStreamEndCapture) *real, CUstream stream, CUgraph *graph, bool per_thread) {
    if (real == NULL) {
        return ST_MISSING;
    }
    CUstreamCaptureStatus before;
    CUstreamCaptureStatus after;
    bool is_known = status_of(stream, per_thread, &before) == CUDA_SUCCESS;
    bool was_capturing = is_known && before != CU_STREAM_CAPTURE_STATUS_NONE;
    CUresult result = real(stream, graph);
    bool is_over = result == CUDA_SUCCESS;
    if (!is_over && was_capturing) {
        is_over = status_of(stream, per_thread, &after) == CUDA_SUCCESS && after == CU_STREAM_CAPTURE_STATUS_NONE;
    }
    if (is_over) {
        remove_origin(stream);
        count_end();
    }
    return result;
}

ST_EXPORT CUresult CUDAAPI cuStreamEndCapture(CUstream stream, CUgraph *graph) {
    return st_resolve() ? end(st_real_cuStreamEndCapture, stream, graph, false) : ST_MISSING;
}

ST_EXPORT CUresult CUDAAPI cuStreamEndCapture_ptsz(CUstream stream, CUgraph *graph) {
    return st_resolve() ? end(st_real_cuStreamEndCapture_ptsz, stream, graph, true) : ST_MISSING;
}

/* Out of the list before the driver destroys it: another thread may get the same handle at once. */
static CUresult destroy(__typeof__(cuStreamDestroy_v2) *real, CUstream stream) {
    if (real == NULL) {
        return ST_MISSING;
    }
    bool was_origin = atomic_load(&st_num_captures) != 0 && remove_origin(stream);
    CUresult result = real(stream);
    if (was_origin && result == CUDA_SUCCESS) {
        count_end();
    } else if (was_origin) {
        add_origin(stream);
    }
    return result;
}

ST_EXPORT CUresult CUDAAPI cuStreamDestroy(CUstream stream) {
    return st_resolve() ? destroy(st_real_cuStreamDestroy, stream) : ST_MISSING;
}

ST_EXPORT CUresult CUDAAPI cuStreamDestroy_v2(CUstream stream) {
    return st_resolve() ? destroy(st_real_cuStreamDestroy_v2, stream) : ST_MISSING;
}

void st_capture_forked(void) {
    pthread_mutex_init(&mutex, NULL);
    for (unsigned i = 0; i < NUM_ORIGINS; i++) {
        origins[i] = NULL;
    }
    atomic_store(&st_num_captures, 0);
}
