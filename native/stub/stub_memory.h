/* What the rooms of the stub driver's memory say to each other. */
#ifndef STUB_MEMORY_H
#define STUB_MEMORY_H

#include "stub.h"

#define STUB_FIRST_ADDRESS 0x500000000000u

struct stub_allocation {
    CUdeviceptr address;
    size_t bytes;
    struct CUctx_st *context;
    int device;
    bool counts; /* false: another process's memory, opened here */
    void *host;  /* managed memory can be read by the program */
    struct CUmemPoolHandle_st *pool;
    struct stub_allocation *next;
};

CUdeviceptr stub_new_address(size_t bytes);
void stub_keep(struct stub_allocation *allocation);
CUresult stub_release(CUdeviceptr address);
CUresult stub_may_allocate(void);
void stub_pool_shrink(struct CUmemPoolHandle_st *pool, size_t bytes);
void stub_drop_arrays_of(struct CUctx_st *context);

#endif
