/* The stub driver's memory that is made and mapped apart, arrays, and memory of other programs' making. */
#include "stub_memory.h"

#include <stdlib.h>

/* --- physical pieces and their mappings --- */

struct piece {
    size_t bytes;
    int device; /* -1: host memory, nobody's */
    unsigned int num_held;
    unsigned int num_mapped;
    CUmemAllocationProp properties;
};
struct mapping {
    CUdeviceptr address;
    size_t bytes;
    struct piece *piece;
    struct mapping *next;
};
static struct mapping *mappings;

/* The caller holds the lock. */
static void drop_if_unused(struct piece *piece) {
    if (piece->num_held == 0 && piece->num_mapped == 0) {
        if (piece->device >= 0) {
            stub_give_memory(piece->device, piece->bytes);
        }
        free(piece);
    }
}

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr wish, unsigned long long flags) {
    ENTER(cuMemAddressReserve);
    *address = stub_new_address(bytes);
    return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
    ENTER(cuMemAddressFree);
    return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *properties,
                                       CUmemAllocationGranularity_flags which) {
    ENTER(cuMemGetAllocationGranularity);
    *granularity = 2u << 20;
    return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties,
                     unsigned long long flags) {
    ENTER(cuMemCreate);
    CUresult result = stub_forbid_in_capture();
    if (result != CUDA_SUCCESS) {
        return result;
    }
    if (bytes == 0 || bytes % (2u << 20) != 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    bool is_device = properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
    if (is_device && (properties->location.id < 0 || properties->location.id >= stub_num_devices)) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    if (is_device && !stub_take_memory(properties->location.id, bytes)) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    struct piece *piece = calloc(1, sizeof(*piece));
    piece->bytes = bytes;
    piece->device = is_device ? properties->location.id : -1;
    piece->num_held = 1;
    piece->properties = *properties;
    *handle = (CUmemGenericAllocationHandle)(uintptr_t)piece;
    return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    ENTER(cuMemRelease);
    struct piece *piece = (struct piece *)(uintptr_t)handle;
    if (piece == NULL || piece->num_held == 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    pthread_mutex_lock(&stub_lock);
    piece->num_held--;
    drop_if_unused(piece);
    pthread_mutex_unlock(&stub_lock);
    return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
    ENTER(cuMemMap);
    struct piece *piece = (struct piece *)(uintptr_t)handle;
    if (piece == NULL || offset != 0 || bytes != piece->bytes) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    struct mapping *mapping = calloc(1, sizeof(*mapping));
    mapping->address = address;
    mapping->bytes = bytes;
    mapping->piece = piece;
    pthread_mutex_lock(&stub_lock);
    piece->num_mapped++;
    mapping->next = mappings;
    mappings = mapping;
    pthread_mutex_unlock(&stub_lock);
    return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
    ENTER(cuMemUnmap);
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&stub_lock);
    for (struct mapping **at = &mappings; *at != NULL;) {
        struct mapping *mapping = *at;
        if (mapping->address < address || mapping->address + mapping->bytes > address + bytes) {
            at = &mapping->next;
            continue;
        }
        *at = mapping->next;
        mapping->piece->num_mapped--;
        drop_if_unused(mapping->piece);
        free(mapping);
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&stub_lock);
    return result;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t count) {
    ENTER(cuMemSetAccess);
    return CUDA_SUCCESS;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    ENTER(cuMemRetainAllocationHandle);
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    CUdeviceptr wanted = (CUdeviceptr)(uintptr_t)address;
    pthread_mutex_lock(&stub_lock);
    for (struct mapping *mapping = mappings; mapping != NULL; mapping = mapping->next) {
        if (wanted >= mapping->address && wanted < mapping->address + mapping->bytes) {
            mapping->piece->num_held++;
            *handle = (CUmemGenericAllocationHandle)(uintptr_t)mapping->piece;
            result = CUDA_SUCCESS;
            break;
        }
    }
    pthread_mutex_unlock(&stub_lock);
    return result;
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *properties, CUmemGenericAllocationHandle handle) {
    ENTER(cuMemGetAllocationPropertiesFromHandle);
    *properties = ((struct piece *)(uintptr_t)handle)->properties;
    return CUDA_SUCCESS;
}

/* --- arrays --- */

struct CUarray_st {
    size_t bytes;
    struct CUctx_st *context;
    struct CUarray_st *next;
};
struct CUmipmappedArray_st {
    struct CUarray_st array;
};
static struct CUarray_st *arrays;

static size_t element_bytes(CUarray_format format, unsigned int channels) {
    size_t one = format == CU_AD_FORMAT_FLOAT || format == CU_AD_FORMAT_UNSIGNED_INT32 ||
                         format == CU_AD_FORMAT_SIGNED_INT32
                     ? 4
                 : format == CU_AD_FORMAT_UNSIGNED_INT8 || format == CU_AD_FORMAT_SIGNED_INT8 ? 1
                                                                                              : 2;
    return one * channels;
}

static CUresult make_array(struct CUarray_st **array, size_t bytes) {
    CUresult result = stub_may_allocate();
    if (result != CUDA_SUCCESS || bytes == 0) {
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_INVALID_VALUE;
    }
    if (!stub_take_memory(stub_current()->device, bytes)) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *array = calloc(1, sizeof(**array));
    (*array)->bytes = bytes;
    (*array)->context = stub_current();
    pthread_mutex_lock(&stub_lock);
    (*array)->next = arrays;
    arrays = *array;
    pthread_mutex_unlock(&stub_lock);
    return CUDA_SUCCESS;
}

static CUresult drop_array(struct CUarray_st *array) {
    CUresult result = CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&stub_lock);
    for (struct CUarray_st **at = &arrays; *at != NULL; at = &(*at)->next) {
        if (*at == array) {
            *at = array->next;
            stub_give_memory(array->context->device, array->bytes);
            free(array);
            result = CUDA_SUCCESS;
            break;
        }
    }
    pthread_mutex_unlock(&stub_lock);
    return result;
}

void stub_drop_arrays_of(struct CUctx_st *context) {
    for (struct CUarray_st **at = &arrays; *at != NULL;) {
        struct CUarray_st *array = *at;
        if (array->context == context) {
            *at = array->next;
            stub_give_memory(context->device, array->bytes);
            free(array);
        } else {
            at = &array->next;
        }
    }
}

static size_t or_one(size_t extent) {
    return extent == 0 ? 1 : extent;
}

CUresult cuArrayCreate(CUarray *array, const CUDA_ARRAY_DESCRIPTOR_v1 *shape) {
    ENTER(cuArrayCreate);
    return make_array(array, shape->Width * or_one(shape->Height) * element_bytes(shape->Format, shape->NumChannels));
}

CUresult cuArrayCreate_v2(CUarray *array, const CUDA_ARRAY_DESCRIPTOR *shape) {
    ENTER(cuArrayCreate_v2);
    return make_array(array, shape->Width * or_one(shape->Height) * element_bytes(shape->Format, shape->NumChannels));
}

CUresult cuArray3DCreate(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR_v1 *shape) {
    ENTER(cuArray3DCreate);
    return make_array(array, shape->Width * or_one(shape->Height) * or_one(shape->Depth) *
                                 element_bytes(shape->Format, shape->NumChannels));
}

static size_t bytes_of_3d(const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned int level) {
    return or_one(shape->Width >> level) * or_one(shape->Height >> level) * or_one(shape->Depth >> level) *
           element_bytes(shape->Format, shape->NumChannels);
}

CUresult cuArray3DCreate_v2(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *shape) {
    ENTER(cuArray3DCreate_v2);
    return make_array(array, bytes_of_3d(shape, 0));
}

CUresult cuArrayDestroy(CUarray array) {
    ENTER(cuArrayDestroy);
    return drop_array(array);
}

CUresult cuMipmappedArrayCreate(CUmipmappedArray *array, const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned int levels) {
    ENTER(cuMipmappedArrayCreate);
    size_t bytes = 0;
    for (unsigned int level = 0; level < levels; level++) {
        bytes += bytes_of_3d(shape, level);
    }
    return make_array((struct CUarray_st **)array, bytes);
}

CUresult cuMipmappedArrayDestroy(CUmipmappedArray array) {
    ENTER(cuMipmappedArrayDestroy);
    return drop_array((struct CUarray_st *)array);
}

static CUresult array_needs(CUDA_ARRAY_MEMORY_REQUIREMENTS *requirements, const struct CUarray_st *array) {
    memset(requirements, 0, sizeof(*requirements));
    requirements->size = array->bytes;
    requirements->alignment = 512;
    return CUDA_SUCCESS;
}

CUresult cuArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *requirements, CUarray array, CUdevice device) {
    ENTER(cuArrayGetMemoryRequirements);
    return array_needs(requirements, array);
}

CUresult cuMipmappedArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *requirements, CUmipmappedArray array,
                                               CUdevice device) {
    ENTER(cuMipmappedArrayGetMemoryRequirements);
    return array_needs(requirements, (struct CUarray_st *)array);
}

/* --- memory that another program made: its own driver counted it --- */

struct CUextMemory_st {
    unsigned long long bytes;
};

CUresult cuImportExternalMemory(CUexternalMemory *memory, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *what) {
    ENTER(cuImportExternalMemory);
    CUresult result = stub_check_context();
    if (result == CUDA_SUCCESS) {
        *memory = calloc(1, sizeof(**memory));
        (*memory)->bytes = what->size;
    }
    return result;
}

CUresult cuExternalMemoryGetMappedBuffer(CUdeviceptr *address, CUexternalMemory memory,
                                         const CUDA_EXTERNAL_MEMORY_BUFFER_DESC *part) {
    ENTER(cuExternalMemoryGetMappedBuffer);
    *address = stub_new_address(part->size);
    return CUDA_SUCCESS;
}

CUresult cuDestroyExternalMemory(CUexternalMemory memory) {
    ENTER(cuDestroyExternalMemory);
    if (memory == NULL) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    free(memory);
    return CUDA_SUCCESS;
}
