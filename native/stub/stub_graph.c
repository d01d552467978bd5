/* The stub driver's graphs: built, captured, copied, instantiated, changed, launched. */
#include "stub_memory.h"

#include <stdlib.h>

struct CUgraph_st *stub_new_graph(void) {
    atomic_fetch_add(&stub_num_graphs, 1);
    return calloc(1, sizeof(struct CUgraph_st));
}

static void free_node(struct CUgraphNode_st *node) {
    if (node->child != NULL) {
        stub_free_graph(node->child);
    }
    free(node->dependencies);
    free(node);
}

void stub_free_graph(struct CUgraph_st *graph) {
    for (size_t i = 0; i < graph->num_nodes; i++) {
        free_node(graph->nodes[i]);
    }
    free(graph->nodes);
    free(graph);
    atomic_fetch_sub(&stub_num_graphs, 1);
}

struct CUgraphNode_st *stub_add_node(struct CUgraph_st *graph, CUgraphNodeType type, const CUgraphNode *dependencies,
                                     size_t num_dependencies) {
    struct CUgraphNode_st *node = calloc(1, sizeof(*node));
    node->type = type;
    node->graph = graph;
    node->is_enabled = true;
    if (dependencies != NULL && num_dependencies != 0) {
        node->dependencies = malloc(num_dependencies * sizeof(*dependencies));
        memcpy(node->dependencies, dependencies, num_dependencies * sizeof(*dependencies));
        node->num_dependencies = num_dependencies;
    }
    pthread_mutex_lock(&stub_lock);
    graph->nodes = realloc(graph->nodes, (graph->num_nodes + 1) * sizeof(struct CUgraphNode_st *));
    graph->nodes[graph->num_nodes++] = node;
    pthread_mutex_unlock(&stub_lock);
    return node;
}

/* Dependencies are not copied: nothing the stub tells of a copy depends on them. */
static struct CUgraph_st *copy_graph(const struct CUgraph_st *graph) {
    struct CUgraph_st *copy = stub_new_graph();
    for (size_t i = 0; i < graph->num_nodes; i++) {
        struct CUgraphNode_st *node = stub_add_node(copy, graph->nodes[i]->type, NULL, 0);
        node->original = graph->nodes[i];
        node->kernel = graph->nodes[i]->kernel;
        node->is_enabled = graph->nodes[i]->is_enabled;
        node->alloc_bytes = graph->nodes[i]->alloc_bytes;
        node->address = graph->nodes[i]->address;
        if (graph->nodes[i]->child != NULL) {
            node->child = copy_graph(graph->nodes[i]->child);
            node->child->owner = node;
        }
    }
    return copy;
}

static struct CUgraphNode_st *copy_of(struct CUgraph_st *copy, struct CUgraphNode_st *original) {
    for (size_t i = 0; i < copy->num_nodes; i++) {
        struct CUgraphNode_st *node = copy->nodes[i];
        if (node->original == original) {
            return node;
        }
        struct CUgraphNode_st *inside = node->child == NULL ? NULL : copy_of(node->child, original);
        if (inside != NULL) {
            return inside;
        }
    }
    return NULL;
}

static CUDA_KERNEL_NODE_PARAMS_v2 newer(const CUDA_KERNEL_NODE_PARAMS_v1 *old) {
    return (CUDA_KERNEL_NODE_PARAMS_v2){.func = old->func,
                                        .gridDimX = old->gridDimX,
                                        .gridDimY = old->gridDimY,
                                        .gridDimZ = old->gridDimZ,
                                        .blockDimX = old->blockDimX,
                                        .blockDimY = old->blockDimY,
                                        .blockDimZ = old->blockDimZ,
                                        .sharedMemBytes = old->sharedMemBytes,
                                        .kernelParams = old->kernelParams,
                                        .extra = old->extra};
}

static CUDA_KERNEL_NODE_PARAMS_v2 same(const CUDA_KERNEL_NODE_PARAMS_v2 *parameters) {
    return *parameters;
}

static struct CUfunc_st *function_of(const CUDA_KERNEL_NODE_PARAMS_v2 *kernel) {
    return kernel->func != NULL ? kernel->func : (struct CUfunc_st *)kernel->kern;
}

/* --- building --- */

CUresult cuGraphCreate(CUgraph *graph, unsigned int flags) {
    ENTER(cuGraphCreate);
    *graph = stub_new_graph();
    return CUDA_SUCCESS;
}

CUresult cuGraphDestroy(CUgraph graph) {
    ENTER(cuGraphDestroy);
    if (graph == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    stub_free_graph(graph);
    return CUDA_SUCCESS;
}

CUresult cuGraphClone(CUgraph *copy, CUgraph graph) {
    ENTER(cuGraphClone);
    *copy = copy_graph(graph);
    return CUDA_SUCCESS;
}

CUresult cuGraphNodeFindInClone(CUgraphNode *node, CUgraphNode original, CUgraph copy) {
    ENTER(cuGraphNodeFindInClone);
    *node = copy_of(copy, original);
    return *node == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuGraphDestroyNode(CUgraphNode node) {
    ENTER(cuGraphDestroyNode);
    struct CUgraph_st *graph = node->graph;
    for (size_t i = 0; i < graph->num_nodes; i++) {
        if (graph->nodes[i] == node) {
            graph->nodes[i] = graph->nodes[--graph->num_nodes];
            free_node(node);
            return CUDA_SUCCESS;
        }
    }
    return CUDA_ERROR_INVALID_VALUE;
}

#define ADD_NODE(symbol, type, parameters, ...)                                                                        \
    CUresult symbol parameters {                                                                                       \
        ENTER(symbol);                                                                                                 \
        if (graph == NULL) {                                                                                           \
            return CUDA_ERROR_INVALID_VALUE;                                                                           \
        }                                                                                                              \
        *node = stub_add_node(graph, type, dependencies, count);                                                       \
        __VA_ARGS__                                                                                                    \
        return CUDA_SUCCESS;                                                                                           \
    }
#define PLACE CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count

ADD_NODE(cuGraphAddKernelNode, CU_GRAPH_NODE_TYPE_KERNEL, (PLACE, const CUDA_KERNEL_NODE_PARAMS_v1 *parameters),
         (*node)->kernel = newer(parameters);)
ADD_NODE(cuGraphAddKernelNode_v2, CU_GRAPH_NODE_TYPE_KERNEL, (PLACE, const CUDA_KERNEL_NODE_PARAMS_v2 *parameters),
         (*node)->kernel = *parameters;)
ADD_NODE(cuGraphAddMemcpyNode, CU_GRAPH_NODE_TYPE_MEMCPY, (PLACE, const CUDA_MEMCPY3D *copy, CUcontext context))
ADD_NODE(cuGraphAddMemsetNode, CU_GRAPH_NODE_TYPE_MEMSET,
         (PLACE, const CUDA_MEMSET_NODE_PARAMS_v1 *parameters, CUcontext context))
ADD_NODE(cuGraphAddHostNode, CU_GRAPH_NODE_TYPE_HOST, (PLACE, const CUDA_HOST_NODE_PARAMS_v1 *parameters))
ADD_NODE(cuGraphAddEmptyNode, CU_GRAPH_NODE_TYPE_EMPTY, (PLACE))
ADD_NODE(cuGraphAddChildGraphNode, CU_GRAPH_NODE_TYPE_GRAPH, (PLACE, CUgraph child),
         (*node)->child = copy_graph(child);
         (*node)->child->owner = *node;)

static void give_address(CUgraphNode node, size_t bytes, CUdeviceptr *address) {
    node->alloc_bytes = bytes;
    node->address = *address = stub_new_address(bytes);
}

ADD_NODE(cuGraphAddMemAllocNode, CU_GRAPH_NODE_TYPE_MEM_ALLOC, (PLACE, CUDA_MEM_ALLOC_NODE_PARAMS *parameters),
         give_address(*node, parameters->bytesize, &parameters->dptr);)
ADD_NODE(cuGraphAddMemFreeNode, CU_GRAPH_NODE_TYPE_MEM_FREE, (PLACE, CUdeviceptr address), (*node)->address = address;)

static CUresult add_any(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                        CUgraphNodeParams *parameters) {
    *node = stub_add_node(graph, parameters->type, dependencies, count);
    if (parameters->type == CU_GRAPH_NODE_TYPE_KERNEL) {
        const CUDA_KERNEL_NODE_PARAMS_v3 *kernel = &parameters->kernel;
        (*node)->kernel = (CUDA_KERNEL_NODE_PARAMS_v2){.func = kernel->func,
                                                       .gridDimX = kernel->gridDimX,
                                                       .gridDimY = kernel->gridDimY,
                                                       .gridDimZ = kernel->gridDimZ,
                                                       .blockDimX = kernel->blockDimX,
                                                       .blockDimY = kernel->blockDimY,
                                                       .blockDimZ = kernel->blockDimZ,
                                                       .kern = kernel->kern,
                                                       .ctx = kernel->ctx};
    } else if (parameters->type == CU_GRAPH_NODE_TYPE_GRAPH) {
        (*node)->child = copy_graph(parameters->graph.graph);
        (*node)->child->owner = *node;
    } else if (parameters->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC) {
        give_address(*node, parameters->alloc.bytesize, &parameters->alloc.dptr);
    } else if (parameters->type == CU_GRAPH_NODE_TYPE_MEM_FREE) {
        (*node)->address = parameters->free.dptr;
    }
    return CUDA_SUCCESS;
}

CUresult cuGraphAddNode(PLACE, CUgraphNodeParams *parameters) {
    ENTER(cuGraphAddNode);
    return add_any(node, graph, dependencies, count, parameters);
}

CUresult cuGraphAddNode_v2(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, const CUgraphEdgeData *data,
                           size_t count, CUgraphNodeParams *parameters) {
    ENTER(cuGraphAddNode_v2);
    return add_any(node, graph, dependencies, count, parameters);
}

#if CUDA_VERSION >= 13040
CUresult cuGraphAddNode_v3(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, const CUgraphEdgeData *data,
                           size_t count, CUgraphNodeParams *parameters) {
    ENTER(cuGraphAddNode_v3);
    return add_any(node, graph, dependencies, count, parameters);
}
#endif

/* --- asking --- */

CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count) {
    ENTER(cuGraphGetNodes);
    if (nodes != NULL) {
        size_t room = *count;
        for (size_t i = 0; i < room; i++) {
            nodes[i] = i < graph->num_nodes ? graph->nodes[i] : NULL;
        }
        *count = room < graph->num_nodes ? room : graph->num_nodes;
        return CUDA_SUCCESS;
    }
    *count = graph->num_nodes;
    return CUDA_SUCCESS;
}

CUresult cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType *type) {
    ENTER(cuGraphNodeGetType);
    *type = node->type;
    return CUDA_SUCCESS;
}

CUresult cuGraphKernelNodeGetParams(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS_v1 *parameters) {
    ENTER(cuGraphKernelNodeGetParams);
    if (node->type != CU_GRAPH_NODE_TYPE_KERNEL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    memcpy(parameters, &node->kernel, sizeof(*parameters)); /* the newer one only adds at the end */
    return CUDA_SUCCESS;
}

CUresult cuGraphKernelNodeGetParams_v2(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS_v2 *parameters) {
    ENTER(cuGraphKernelNodeGetParams_v2);
    if (node->type != CU_GRAPH_NODE_TYPE_KERNEL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *parameters = node->kernel;
    return CUDA_SUCCESS;
}

CUresult cuGraphKernelNodeSetParams(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v1 *parameters) {
    ENTER(cuGraphKernelNodeSetParams);
    node->kernel = newer(parameters);
    return CUDA_SUCCESS;
}

CUresult cuGraphKernelNodeSetParams_v2(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v2 *parameters) {
    ENTER(cuGraphKernelNodeSetParams_v2);
    node->kernel = same(parameters);
    return CUDA_SUCCESS;
}

CUresult cuGraphChildGraphNodeGetGraph(CUgraphNode node, CUgraph *graph) {
    ENTER(cuGraphChildGraphNodeGetGraph);
    *graph = node->child;
    return node->child == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

/* --- executable graphs --- */

static CUresult instantiate(CUgraphExec *exec, CUgraph graph, unsigned long long flags) {
    CUresult result = stub_check_context();
    if (result != CUDA_SUCCESS) {
        return result;
    }
    if (graph == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *exec = calloc(1, sizeof(**exec));
    (*exec)->graph = copy_graph(graph);
    (*exec)->device = stub_current()->device;
    (*exec)->flags = flags;
    atomic_fetch_sub(&stub_num_graphs, 1); /* the copy inside is not one of the program's graphs */
    atomic_fetch_add(&stub_num_execs, 1);
    return CUDA_SUCCESS;
}

CUresult cuGraphInstantiate(CUgraphExec *exec, CUgraph graph, CUgraphNode *wrong, char *log, size_t size) {
    ENTER(cuGraphInstantiate);
    return instantiate(exec, graph, 0);
}

CUresult cuGraphInstantiate_v2(CUgraphExec *exec, CUgraph graph, CUgraphNode *wrong, char *log, size_t size) {
    ENTER(cuGraphInstantiate_v2);
    return instantiate(exec, graph, 0);
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags) {
    ENTER(cuGraphInstantiateWithFlags);
    return instantiate(exec, graph, flags);
}

PAIR(cuGraphInstantiateWithParams, _ptsz, (CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *parameters), {
    CUresult result = instantiate(exec, graph, parameters->flags);
    parameters->result_out = result == CUDA_SUCCESS ? CUDA_GRAPH_INSTANTIATE_SUCCESS : CUDA_GRAPH_INSTANTIATE_ERROR;
    return result;
})

CUresult cuGraphExecDestroy(CUgraphExec exec) {
    ENTER(cuGraphExecDestroy);
    if (exec == NULL) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    atomic_fetch_add(&stub_num_graphs, 1);
    stub_free_graph(exec->graph);
    stub_graph_gives(exec->device, exec->taken_bytes);
    free(exec);
    atomic_fetch_sub(&stub_num_execs, 1);
    return CUDA_SUCCESS;
}

CUresult cuGraphExecGetFlags(CUgraphExec exec, cuuint64_t *flags) {
    ENTER(cuGraphExecGetFlags);
    *flags = exec->flags;
    return CUDA_SUCCESS;
}

static bool has_same_shape(const struct CUgraph_st *one, const struct CUgraph_st *other) {
    if (one->num_nodes != other->num_nodes) {
        return false;
    }
    for (size_t i = 0; i < one->num_nodes; i++) {
        const struct CUgraphNode_st *a = one->nodes[i];
        const struct CUgraphNode_st *b = other->nodes[i];
        if (a->type != b->type || (a->child != NULL && !has_same_shape(a->child, b->child))) {
            return false;
        }
    }
    return true;
}

static CUgraphExecUpdateResult update(CUgraphExec exec, CUgraph graph) {
    if (!has_same_shape(exec->graph, graph)) {
        return CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
    }
    struct CUgraph_st *copy = copy_graph(graph);
    /* Which node is meant by a node of the first graph stays as it was. */
    for (size_t i = 0; i < copy->num_nodes; i++) {
        copy->nodes[i]->original = exec->graph->nodes[i]->original;
    }
    stub_free_graph(exec->graph);
    exec->graph = copy;
    return CU_GRAPH_EXEC_UPDATE_SUCCESS;
}

CUresult cuGraphExecUpdate(CUgraphExec exec, CUgraph graph, CUgraphNode *wrong, CUgraphExecUpdateResult *what) {
    ENTER(cuGraphExecUpdate);
    *what = update(exec, graph);
    return *what == CU_GRAPH_EXEC_UPDATE_SUCCESS ? CUDA_SUCCESS : CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
}

CUresult cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo *what) {
    ENTER(cuGraphExecUpdate_v2);
    what->result = update(exec, graph);
    return what->result == CU_GRAPH_EXEC_UPDATE_SUCCESS ? CUDA_SUCCESS : CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
}

static CUresult set_kernel(CUgraphExec exec, CUgraphNode node, CUDA_KERNEL_NODE_PARAMS_v2 kernel) {
    struct CUgraphNode_st *mine = copy_of(exec->graph, node);
    if (mine == NULL || mine->type != CU_GRAPH_NODE_TYPE_KERNEL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    mine->kernel = kernel;
    return CUDA_SUCCESS;
}

CUresult cuGraphExecKernelNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v1 *parameters) {
    ENTER(cuGraphExecKernelNodeSetParams);
    return set_kernel(exec, node, newer(parameters));
}

CUresult cuGraphExecKernelNodeSetParams_v2(CUgraphExec exec, CUgraphNode node,
                                           const CUDA_KERNEL_NODE_PARAMS_v2 *parameters) {
    ENTER(cuGraphExecKernelNodeSetParams_v2);
    return set_kernel(exec, node, same(parameters));
}

CUresult cuGraphExecChildGraphNodeSetParams(CUgraphExec exec, CUgraphNode node, CUgraph child) {
    ENTER(cuGraphExecChildGraphNodeSetParams);
    struct CUgraphNode_st *mine = copy_of(exec->graph, node);
    if (mine == NULL || mine->child == NULL || !has_same_shape(mine->child, child)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    stub_free_graph(mine->child);
    mine->child = copy_graph(child);
    mine->child->owner = mine;
    return CUDA_SUCCESS;
}

CUresult cuGraphExecNodeSetParams(CUgraphExec exec, CUgraphNode node, CUgraphNodeParams *parameters) {
    ENTER(cuGraphExecNodeSetParams);
    struct CUgraphNode_st *mine = copy_of(exec->graph, node);
    if (mine == NULL || mine->type != parameters->type) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (mine->type == CU_GRAPH_NODE_TYPE_KERNEL) {
        const CUDA_KERNEL_NODE_PARAMS_v3 *kernel = &parameters->kernel;
        mine->kernel.func = kernel->func;
        mine->kernel.kern = kernel->kern;
        mine->kernel.gridDimX = kernel->gridDimX;
        mine->kernel.gridDimY = kernel->gridDimY;
        mine->kernel.gridDimZ = kernel->gridDimZ;
        mine->kernel.blockDimX = kernel->blockDimX;
        mine->kernel.blockDimY = kernel->blockDimY;
        mine->kernel.blockDimZ = kernel->blockDimZ;
    }
    return CUDA_SUCCESS;
}

CUresult cuGraphNodeSetEnabled(CUgraphExec exec, CUgraphNode node, unsigned int is_enabled) {
    ENTER(cuGraphNodeSetEnabled);
    struct CUgraphNode_st *mine = copy_of(exec->graph, node);
    if (mine == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    mine->is_enabled = is_enabled != 0;
    return CUDA_SUCCESS;
}

CUresult cuGraphNodeGetEnabled(CUgraphExec exec, CUgraphNode node, unsigned int *is_enabled) {
    ENTER(cuGraphNodeGetEnabled);
    struct CUgraphNode_st *mine = copy_of(exec->graph, node);
    if (mine == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *is_enabled = mine->is_enabled;
    return CUDA_SUCCESS;
}

PAIR(cuGraphUpload, _ptsz, (CUgraphExec exec, CUstream stream), { return stub_check_context(); })

static uint64_t run_graph(const struct CUgraph_st *graph, struct stub_device *device) {
    uint64_t ns = 0;
    for (size_t i = 0; i < graph->num_nodes; i++) {
        const struct CUgraphNode_st *node = graph->nodes[i];
        if (!node->is_enabled) {
            continue;
        }
        if (node->type == CU_GRAPH_NODE_TYPE_KERNEL) {
            uint64_t num_blocks = (uint64_t)node->kernel.gridDimX * node->kernel.gridDimY * node->kernel.gridDimZ;
            atomic_fetch_add_explicit(&device->num_kernels, 1, memory_order_relaxed);
            atomic_fetch_add_explicit(&device->num_blocks, num_blocks, memory_order_relaxed);
            ns += stub_kernel_time(function_of(&node->kernel), num_blocks);
        } else if (node->type == CU_GRAPH_NODE_TYPE_GRAPH) {
            ns += run_graph(node->child, device);
        } else if (node->type == CU_GRAPH_NODE_TYPE_MEMCPY) {
            ns += stub_copy_ns;
        }
    }
    return ns;
}

static uint64_t wanted_bytes(const struct CUgraph_st *graph) {
    uint64_t bytes = 0;
    for (size_t i = 0; i < graph->num_nodes; i++) {
        bytes += graph->nodes[i]->alloc_bytes;
        bytes += graph->nodes[i]->child == NULL ? 0 : wanted_bytes(graph->nodes[i]->child);
    }
    return bytes;
}

PAIR(cuGraphLaunch, _ptsz, (CUgraphExec exec, CUstream handle), {
    struct CUstream_st *stream = stub_stream(handle, per_thread);
    if (stream == NULL) {
        return stub_check_context();
    }
    if (exec == NULL) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (stream->capture != NULL) { /* a graph launched into a capture becomes a child of the new one */
        struct CUgraphNode_st *node = stub_add_node(stream->capture->graph, CU_GRAPH_NODE_TYPE_GRAPH, NULL, 0);
        node->child = copy_graph(exec->graph);
        node->child->owner = node;
        return CUDA_SUCCESS;
    }
    uint64_t wanted = exec->taken_bytes == 0 ? wanted_bytes(exec->graph) : 0;
    if (wanted != 0 && !stub_graph_takes(exec->device, wanted)) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    exec->taken_bytes += wanted;
    stub_run(stream, run_graph(exec->graph, &stub_devices[stream->context->device]));
    return CUDA_SUCCESS;
})
