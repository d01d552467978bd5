/* The stub driver's copies and fills: they take STUB_COPY_NS of the device and move nothing, because there is nothing
 * behind its addresses; what a program reads back is zeros.
 */
#include "stub_memory.h"

/* A whole copy: on the stream, or into its graph; `waits` for copies that end before they return. */
static CUresult copy(CUstream handle, bool per_thread, bool waits) {
    struct CUstream_st *stream = stub_stream(handle, per_thread);
    if (stream == NULL) {
        return stub_check_context();
    }
    if (stream->capture != NULL) {
        stub_add_node(stream->capture->graph, CU_GRAPH_NODE_TYPE_MEMCPY, NULL, 0);
        return CUDA_SUCCESS;
    }
    CUresult result = waits ? stub_forbid_in_capture() : CUDA_SUCCESS;
    if (result != CUDA_SUCCESS) {
        return result;
    }
    uint64_t end = stub_run(stream, stub_copy_ns);
    if (waits) {
        stub_wait_until(end);
    }
    return CUDA_SUCCESS;
}

static void read_zeros(void *to, CUdeviceptr from, size_t bytes) {
    if (from >= STUB_FIRST_ADDRESS && from < 2 * STUB_FIRST_ADDRESS) {
        memset(to, 0, bytes);
    }
}

PAIR(cuMemcpy, _ptds, (CUdeviceptr to, CUdeviceptr from, size_t bytes), { return copy(NULL, per_thread, true); })
PAIR(cuMemcpyHtoD_v2, _ptds, (CUdeviceptr to, const void *from, size_t bytes), { return copy(NULL, per_thread, true); })
PAIR(cuMemcpyDtoH_v2, _ptds, (void *to, CUdeviceptr from, size_t bytes), {
    read_zeros(to, from, bytes);
    return copy(NULL, per_thread, true);
})
PAIR(cuMemcpyDtoD_v2, _ptds, (CUdeviceptr to, CUdeviceptr from, size_t bytes), { return copy(NULL, per_thread, false); })
PAIR(cuMemcpyAtoH_v2, _ptds, (void *to, CUarray from, size_t offset, size_t bytes), {
    memset(to, 0, bytes);
    return copy(NULL, per_thread, true);
})
PAIR(cuMemcpyHtoA_v2, _ptds, (CUarray to, size_t offset, const void *from, size_t bytes), {
    return copy(NULL, per_thread, true);
})
PAIR(cuMemcpy2D_v2, _ptds, (const CUDA_MEMCPY2D *what), { return copy(NULL, per_thread, true); })
PAIR(cuMemcpy2DUnaligned_v2, _ptds, (const CUDA_MEMCPY2D *what), { return copy(NULL, per_thread, true); })
PAIR(cuMemcpy3D_v2, _ptds, (const CUDA_MEMCPY3D *what), { return copy(NULL, per_thread, true); })

PAIR(cuMemcpyAsync, _ptsz, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream), {
    return copy(stream, per_thread, false);
})
PAIR(cuMemcpyHtoDAsync_v2, _ptsz, (CUdeviceptr to, const void *from, size_t bytes, CUstream stream), {
    return copy(stream, per_thread, false);
})
PAIR(cuMemcpyDtoHAsync_v2, _ptsz, (void *to, CUdeviceptr from, size_t bytes, CUstream stream), {
    read_zeros(to, from, bytes);
    return copy(stream, per_thread, false);
})
PAIR(cuMemcpyDtoDAsync_v2, _ptsz, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream), {
    return copy(stream, per_thread, false);
})
PAIR(cuMemcpy2DAsync_v2, _ptsz, (const CUDA_MEMCPY2D *what, CUstream stream), { return copy(stream, per_thread, false); })
PAIR(cuMemcpy3DAsync_v2, _ptsz, (const CUDA_MEMCPY3D *what, CUstream stream), { return copy(stream, per_thread, false); })

PAIR(cuMemsetD8_v2, _ptds, (CUdeviceptr to, unsigned char value, size_t count), { return copy(NULL, per_thread, false); })
PAIR(cuMemsetD32_v2, _ptds, (CUdeviceptr to, unsigned int value, size_t count), { return copy(NULL, per_thread, false); })
PAIR(cuMemsetD8Async, _ptsz, (CUdeviceptr to, unsigned char value, size_t count, CUstream stream), {
    return copy(stream, per_thread, false);
})
PAIR(cuMemsetD32Async, _ptsz, (CUdeviceptr to, unsigned int value, size_t count, CUstream stream), {
    return copy(stream, per_thread, false);
})
