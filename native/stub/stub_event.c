/* The stub driver's events: they take the time of their stream. */
#include "stub.h"

#include <stdlib.h>

static struct CUevent_st *events;

#define NEED_STREAM(handle)                                                                                            \
    struct CUstream_st *stream = stub_stream(handle, per_thread);                                                      \
    if (stream == NULL) {                                                                                              \
        return stub_check_context();                                                                                   \
    }


CUresult cuEventCreate(CUevent *event, unsigned int flags) {
    ENTER(cuEventCreate);
    CUresult result = stub_check_context();
    if (result == CUDA_SUCCESS) {
        *event = calloc(1, sizeof(**event));
        (*event)->context = stub_current();
        (*event)->flags = flags;
        pthread_mutex_lock(&stub_lock);
        (*event)->next = events;
        events = *event;
        pthread_mutex_unlock(&stub_lock);
        atomic_fetch_add(&stub_num_events, 1);
    }
    return result;
}

static CUresult destroy_event(CUevent event) {
    CUresult result = CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&stub_lock);
    for (struct CUevent_st **at = &events; *at != NULL; at = &(*at)->next) {
        if (*at == event) {
            *at = event->next;
            free(event);
            atomic_fetch_sub(&stub_num_events, 1);
            result = CUDA_SUCCESS;
            break;
        }
    }
    pthread_mutex_unlock(&stub_lock);
    return result;
}

/* Whoever uses one of them afterwards uses freed memory, as with the real driver; a sanitizer sees it. */
void stub_drop_events_of(struct CUctx_st *context) {
    for (struct CUevent_st **at = &events; *at != NULL;) {
        struct CUevent_st *event = *at;
        if (event->context == context) {
            *at = event->next;
            free(event);
            atomic_fetch_sub(&stub_num_events, 1);
        } else {
            at = &event->next;
        }
    }
}

CUresult cuEventDestroy(CUevent event) {
    ENTER(cuEventDestroy);
    return destroy_event(event);
}

CUresult cuEventDestroy_v2(CUevent event) {
    ENTER(cuEventDestroy_v2);
    return destroy_event(event);
}

static CUresult record_event(CUevent event, CUstream handle, bool per_thread) {
    NEED_STREAM(handle);
    if (event == NULL || event->context != stream->context) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    event->capture = stream->capture;
    if (event->capture != NULL) {
        return CUDA_SUCCESS;
    }
    uint64_t now = stub_tick();
    uint64_t ready = stream->ready_ns;
    event->ns = ready > now ? ready : now;
    event->is_recorded = true;
    return CUDA_SUCCESS;
}

PAIR(cuEventRecord, _ptsz, (CUevent event, CUstream handle), { return record_event(event, handle, per_thread); })

PAIR(cuEventRecordWithFlags, _ptsz, (CUevent event, CUstream handle, unsigned int flags), {
    return record_event(event, handle, per_thread);
})

static CUresult use_event(CUevent event) {
    if (event == NULL) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (event->capture != NULL) {
        event->capture->status = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
        atomic_fetch_add(&stub_num_violations, 1);
        return CUDA_ERROR_CAPTURED_EVENT;
    }
    return stub_forbid_in_capture();
}

CUresult cuEventQuery(CUevent event) {
    ENTER(cuEventQuery);
    CUresult result = use_event(event);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    return !event->is_recorded || stub_tick() >= event->ns ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuEventSynchronize(CUevent event) {
    ENTER(cuEventSynchronize);
    CUresult result = use_event(event);
    if (result == CUDA_SUCCESS && event->is_recorded) {
        stub_wait_until(event->ns);
        stub_pools_synchronised(event->context->device);
    }
    return result;
}

static CUresult elapsed(float *milliseconds, CUevent first, CUevent last) {
    if (first == NULL || last == NULL || !first->is_recorded || !last->is_recorded ||
        ((first->flags | last->flags) & CU_EVENT_DISABLE_TIMING) != 0) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    uint64_t now = stub_tick();
    if (now < last->ns || now < first->ns) {
        return CUDA_ERROR_NOT_READY;
    }
    *milliseconds = (float)((double)(int64_t)(last->ns - first->ns) / 1e6);
    return CUDA_SUCCESS;
}

CUresult cuEventElapsedTime(float *milliseconds, CUevent first, CUevent last) {
    ENTER(cuEventElapsedTime);
    return elapsed(milliseconds, first, last);
}

CUresult cuEventElapsedTime_v2(float *milliseconds, CUevent first, CUevent last) {
    ENTER(cuEventElapsedTime_v2);
    return elapsed(milliseconds, first, last);
}

PAIR(cuStreamWaitEvent, _ptsz, (CUstream handle, CUevent event, unsigned int flags), {
    NEED_STREAM(handle);
    if (event == NULL) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (event->capture != NULL) { /* the other stream joins the capture */
        stream->capture = event->capture;
        return CUDA_SUCCESS;
    }
    if (stream->capture != NULL) {
        return CUDA_SUCCESS;
    }
    uint64_t ready = stream->ready_ns;
    uint64_t until = event->ns;
    while (ready < until && !atomic_compare_exchange_weak(&stream->ready_ns, &ready, until)) {
    }
    return CUDA_SUCCESS;
})
