/* Graphs: weighed when they are instantiated, launched as one piece of work.
 *
 * An instantiated graph counts as the sum of its kernels, those of child graphs with them, until launches of the whole
 * are measured. When nodes of it change, the sum changes and what was measured changes in the same proportion. So for
 * each instantiated graph its nodes are remembered; on the launch path nobody looks at them. Copies and memsets count
 * nothing, as outside of graphs; a conditional node counts as unknown work, since only the device knows what it does.
 */
#include <pthread.h>
#include <stdlib.h>

#include "hooks.h"
#include "work.h"

#define NUM_LISTS 1024u
/* A child graph within a child graph and so on; deeper ones count as unknown. */
#define DEEPEST 32

struct node {
    CUgraphNode handle;
    uint64_t cost_ns; /* a child graph's own entry: 0, its nodes follow */
    int32_t parent;   /* the entry of the child graph it is in; -1 */
    bool is_off;
};

struct nodes {
    struct node *all;
    size_t num;
    size_t space;
};

struct graph {
    struct graph *next;
    CUgraphExec handle;
    struct nodes nodes;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct graph *lists[NUM_LISTS];

/* --- what nodes weigh ---------------------------------------------------------------------------------------------- */

static uint64_t kernel_cost_ns(const void *function, const unsigned grid[3], const unsigned block[3]) {
    uint64_t num_blocks = (uint64_t)grid[0] * grid[1];
    num_blocks = grid[2] != 0 && num_blocks > UINT64_MAX / grid[2] ? UINT64_MAX : num_blocks * grid[2];
    uint64_t num_threads = (uint64_t)block[0] * block[1] * block[2];
    return st_work_cost_ns(st_work_of_kernel(function, num_blocks, (uint32_t)num_threads));
}

static uint64_t cost_of_v1(const CUDA_KERNEL_NODE_PARAMS_v1 *params) {
    unsigned grid[3] = {params->gridDimX, params->gridDimY, params->gridDimZ};
    unsigned block[3] = {params->blockDimX, params->blockDimY, params->blockDimZ};
    return kernel_cost_ns(params->func, grid, block);
}

static uint64_t cost_of_v2(const CUDA_KERNEL_NODE_PARAMS_v2 *params) {
    unsigned grid[3] = {params->gridDimX, params->gridDimY, params->gridDimZ};
    unsigned block[3] = {params->blockDimX, params->blockDimY, params->blockDimZ};
    return kernel_cost_ns(params->func != NULL ? (const void *)params->func : (const void *)params->kern, grid, block);
}

static uint64_t cost_of_v3(const CUDA_KERNEL_NODE_PARAMS_v3 *params) {
    unsigned grid[3] = {params->gridDimX, params->gridDimY, params->gridDimZ};
    unsigned block[3] = {params->blockDimX, params->blockDimY, params->blockDimZ};
    return kernel_cost_ns(params->func != NULL ? (const void *)params->func : (const void *)params->kern, grid, block);
}

static uint64_t cost_of_kernel_node(CUgraphNode handle) {
    CUDA_KERNEL_NODE_PARAMS_v2 params = {0};
    if (st_real_cuGraphKernelNodeGetParams_v2 != NULL) {
        return st_real_cuGraphKernelNodeGetParams_v2(handle, &params) == CUDA_SUCCESS ? cost_of_v2(&params)
                                                                                      : ST_UNKNOWN_GRAPH_NS;
    }
    CUDA_KERNEL_NODE_PARAMS_v1 old_params = {0};
    if (st_real_cuGraphKernelNodeGetParams != NULL &&
        st_real_cuGraphKernelNodeGetParams(handle, &old_params) == CUDA_SUCCESS) {
        return cost_of_v1(&old_params);
    }
    return ST_UNKNOWN_GRAPH_NS;
}

/* --- nodes of a graph ---------------------------------------------------------------------------------------------- */

static bool add_node(struct nodes *nodes, CUgraphNode handle, uint64_t cost_ns, int32_t parent) {
    if (nodes->num == nodes->space) {
        size_t space = nodes->space == 0 ? 64 : 2 * nodes->space;
        struct node *all = space > INT32_MAX ? NULL : realloc(nodes->all, space * sizeof *all);
        if (all == NULL) {
            return false;
        }
        nodes->all = all;
        nodes->space = space;
    }
    nodes->all[nodes->num++] = (struct node){handle, cost_ns, parent, false};
    return true;
}

static bool add_graph(struct nodes *nodes, CUgraph graph, int32_t parent, int depth);

static bool add_any(struct nodes *nodes, CUgraphNode handle, int32_t parent, int depth) {
    CUgraphNodeType type;
    if (st_real_cuGraphNodeGetType == NULL || st_real_cuGraphNodeGetType(handle, &type) != CUDA_SUCCESS) {
        return add_node(nodes, handle, 0, parent);
    }
    if (type == CU_GRAPH_NODE_TYPE_KERNEL) {
        return add_node(nodes, handle, cost_of_kernel_node(handle), parent);
    }
    if (type == CU_GRAPH_NODE_TYPE_CONDITIONAL) {
        return add_node(nodes, handle, ST_UNKNOWN_GRAPH_NS, parent);
    }
    if (type != CU_GRAPH_NODE_TYPE_GRAPH) {
        return add_node(nodes, handle, 0, parent);
    }
    CUgraph child;
    bool is_known = depth < DEEPEST && st_real_cuGraphChildGraphNodeGetGraph != NULL &&
                    st_real_cuGraphChildGraphNodeGetGraph(handle, &child) == CUDA_SUCCESS;
    if (!is_known) {
        return add_node(nodes, handle, ST_UNKNOWN_GRAPH_NS, parent);
    }
    return add_node(nodes, handle, 0, parent) && add_graph(nodes, child, (int32_t)nodes->num - 1, depth + 1);
}

static bool add_graph(struct nodes *nodes, CUgraph graph, int32_t parent, int depth) {
    size_t num = 0;
    if (st_real_cuGraphGetNodes == NULL || st_real_cuGraphGetNodes(graph, NULL, &num) != CUDA_SUCCESS) {
        return false;
    }
    if (num == 0) {
        return true;
    }
    CUgraphNode *handles = calloc(num, sizeof *handles);
    bool is_whole = handles != NULL && st_real_cuGraphGetNodes(graph, handles, &num) == CUDA_SUCCESS;
    for (size_t i = 0; i < num && is_whole; i++) {
        is_whole = add_any(nodes, handles[i], parent, depth);
    }
    free(handles);
    return is_whole;
}

static uint64_t sum_of(const struct nodes *nodes) {
    uint64_t sum_ns = 0;
    for (size_t i = 0; i < nodes->num; i++) {
        sum_ns += nodes->all[i].is_off ? 0 : nodes->all[i].cost_ns;
    }
    return sum_ns;
}

/* All nodes of a graph; one of unknown work with them where they could not be walked to the end. */
static void walk(struct nodes *nodes, CUgraph graph) {
    *nodes = (struct nodes){NULL, 0, 0};
    if (!add_graph(nodes, graph, -1, 0)) {
        (void)add_node(nodes, NULL, ST_UNKNOWN_GRAPH_NS, -1);
    }
}

/* Whether the nodes have the same order, `left` lying `offset` entries deep in its list. */
static bool are_alike(const struct node *left, const struct node *right, size_t num, int32_t offset) {
    for (size_t i = 0; i < num; i++) {
        if (left[i].parent != right[i].parent + offset) {
            return false;
        }
    }
    return true;
}

/* --- graphs that are instantiated ---------------------------------------------------------------------------------- */

static struct graph **list_of(CUgraphExec handle) {
    uint64_t hash = (uint64_t)(uintptr_t)handle * 0x9E3779B97F4A7C15ull;
    return &lists[hash >> 54];
}

static struct graph *graph_of(CUgraphExec handle) {
    struct graph *graph = *list_of(handle);
    while (graph != NULL && graph->handle != handle) {
        graph = graph->next;
    }
    return graph;
}

static void remove_graph(CUgraphExec handle) {
    struct graph **place = list_of(handle);
    while (*place != NULL && (*place)->handle != handle) {
        place = &(*place)->next;
    }
    struct graph *graph = *place;
    if (graph != NULL) {
        *place = graph->next;
        free(graph->nodes.all);
        free(graph);
    }
}

static void forget(CUgraphExec handle) {
    pthread_mutex_lock(&mutex);
    remove_graph(handle);
    pthread_mutex_unlock(&mutex);
    st_work_forget_graph(handle);
}

static CUresult instantiated(CUresult result, const CUgraphExec *handle, CUgraph source) {
    if (result != CUDA_SUCCESS || handle == NULL) {
        return result;
    }
    struct nodes nodes;
    walk(&nodes, source);
    st_work_begin_graph(*handle, sum_of(&nodes));
    struct graph *graph = malloc(sizeof *graph);
    pthread_mutex_lock(&mutex);
    remove_graph(*handle);
    if (graph != NULL) {
        struct graph **list = list_of(*handle);
        *graph = (struct graph){*list, *handle, nodes};
        *list = graph;
    } else {
        free(nodes.all);
    }
    pthread_mutex_unlock(&mutex);
    return result;
}

/* Weigh the graph again after `change` did something to its entry of this node. */
static void change_node(CUgraphExec handle, CUgraphNode node, void (*change)(struct nodes *, size_t, const void *),
                        const void *data) {
    pthread_mutex_lock(&mutex);
    struct graph *graph = graph_of(handle);
    for (size_t i = 0; graph != NULL && i < graph->nodes.num; i++) {
        if (graph->nodes.all[i].handle == node) {
            change(&graph->nodes, i, data);
            st_work_change_graph(handle, sum_of(&graph->nodes));
            break;
        }
    }
    pthread_mutex_unlock(&mutex);
}

static void set_cost(struct nodes *nodes, size_t i, const void *cost_ns) {
    nodes->all[i].cost_ns = *(const uint64_t *)cost_ns;
}

static void set_off(struct nodes *nodes, size_t i, const void *is_off) {
    nodes->all[i].is_off = *(const bool *)is_off;
}

/* A child graph's nodes lie behind its own entry, all of them. Those of the new one have the same order, as the driver
 * demands; where they have not, what it weighs is written to its own entry. */
static void set_child(struct nodes *nodes, size_t i, const void *data) {
    const struct nodes *child = data;
    size_t end = i + 1;
    while (end < nodes->num && nodes->all[end].parent >= (int32_t)i) {
        end++;
    }
    size_t num = end - i - 1;
    bool is_alike = num == child->num && are_alike(&nodes->all[i + 1], child->all, num, (int32_t)i + 1);
    for (size_t k = 0; k < num; k++) {
        nodes->all[i + 1 + k].cost_ns = is_alike ? child->all[k].cost_ns : 0;
    }
    nodes->all[i].cost_ns = is_alike ? 0 : sum_of(child);
}

/* The other graph's nodes have the same order, as the driver demands; where they have not, all of what it weighs is
 * written to an entry of no node, the last one. */
static void set_all(struct nodes *nodes, const struct nodes *other) {
    size_t num = nodes->num;
    num -= num != 0 && nodes->all[num - 1].handle == NULL;
    bool is_alike = num == other->num && are_alike(nodes->all, other->all, num, 0);
    for (size_t i = 0; i < nodes->num; i++) {
        nodes->all[i].cost_ns = is_alike && i < num ? other->all[i].cost_ns : 0;
    }
    if (!is_alike && (num != nodes->num || add_node(nodes, NULL, 0, -1))) {
        nodes->all[num].cost_ns = sum_of(other);
    }
}

static CUresult updated(CUresult result, CUgraphExec handle, CUgraph source) {
    if (result != CUDA_SUCCESS) {
        return result;
    }
    struct nodes nodes;
    walk(&nodes, source);
    pthread_mutex_lock(&mutex);
    struct graph *graph = graph_of(handle);
    if (graph != NULL) {
        set_all(&graph->nodes, &nodes);
        st_work_change_graph(handle, sum_of(&graph->nodes));
    }
    pthread_mutex_unlock(&mutex);
    free(nodes.all);
    return result;
}

/* --- hooks --------------------------------------------------------------------------------------------------------- */

static inline CUresult launch(__typeof__(cuGraphLaunch) *real, CUgraphExec graph, CUstream stream, bool per_thread) {
    if (ST_UNLIKELY(real == NULL)) {
        return ST_MISSING;
    }
    struct st_ticket ticket;
    st_launch_begin(&ticket, st_work_of_graph(graph, ST_UNKNOWN_GRAPH_NS), stream, per_thread);
    CUresult result = real(graph, stream);
    st_launch_end(&ticket, stream, per_thread, result);
    return result;
}

ST_EXPORT CUresult CUDAAPI cuGraphLaunch(CUgraphExec graph, CUstream stream) {
    return st_resolve() ? launch(st_real_cuGraphLaunch, graph, stream, false) : ST_MISSING;
}

ST_EXPORT CUresult CUDAAPI cuGraphLaunch_ptsz(CUgraphExec graph, CUstream stream) {
    return st_resolve() ? launch(st_real_cuGraphLaunch_ptsz, graph, stream, true) : ST_MISSING;
}

#define CALL(symbol, ...) (st_resolve() && st_real_##symbol != NULL ? st_real_##symbol(__VA_ARGS__) : ST_MISSING)

ST_EXPORT CUresult CUDAAPI cuGraphInstantiate(CUgraphExec *exec, CUgraph graph, CUgraphNode *error_node, char *log,
                                              size_t log_bytes) {
    return instantiated(CALL(cuGraphInstantiate, exec, graph, error_node, log, log_bytes), exec, graph);
}

ST_EXPORT CUresult CUDAAPI cuGraphInstantiate_v2(CUgraphExec *exec, CUgraph graph, CUgraphNode *error_node, char *log,
                                                 size_t log_bytes) {
    return instantiated(CALL(cuGraphInstantiate_v2, exec, graph, error_node, log, log_bytes), exec, graph);
}

ST_EXPORT CUresult CUDAAPI cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags) {
    return instantiated(CALL(cuGraphInstantiateWithFlags, exec, graph, flags), exec, graph);
}

ST_EXPORT CUresult CUDAAPI cuGraphInstantiateWithParams(CUgraphExec *exec, CUgraph graph,
                                                        CUDA_GRAPH_INSTANTIATE_PARAMS *params) {
    return instantiated(CALL(cuGraphInstantiateWithParams, exec, graph, params), exec, graph);
}

ST_EXPORT CUresult CUDAAPI cuGraphInstantiateWithParams_ptsz(CUgraphExec *exec, CUgraph graph,
                                                             CUDA_GRAPH_INSTANTIATE_PARAMS *params) {
    return instantiated(CALL(cuGraphInstantiateWithParams_ptsz, exec, graph, params), exec, graph);
}

ST_EXPORT CUresult CUDAAPI cuGraphExecUpdate(CUgraphExec exec, CUgraph graph, CUgraphNode *error_node,
                                             CUgraphExecUpdateResult *update) {
    return updated(CALL(cuGraphExecUpdate, exec, graph, error_node, update), exec, graph);
}

ST_EXPORT CUresult CUDAAPI cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo *info) {
    return updated(CALL(cuGraphExecUpdate_v2, exec, graph, info), exec, graph);
}

static CUresult kernel_set(CUresult result, CUgraphExec exec, CUgraphNode node, uint64_t cost_ns) {
    if (result == CUDA_SUCCESS) {
        change_node(exec, node, set_cost, &cost_ns);
    }
    return result;
}

ST_EXPORT CUresult CUDAAPI cuGraphExecKernelNodeSetParams(CUgraphExec exec, CUgraphNode node,
                                                          const CUDA_KERNEL_NODE_PARAMS_v1 *params) {
    CUresult result = CALL(cuGraphExecKernelNodeSetParams, exec, node, params);
    return result == CUDA_SUCCESS ? kernel_set(result, exec, node, cost_of_v1(params)) : result;
}

ST_EXPORT CUresult CUDAAPI cuGraphExecKernelNodeSetParams_v2(CUgraphExec exec, CUgraphNode node,
                                                             const CUDA_KERNEL_NODE_PARAMS_v2 *params) {
    CUresult result = CALL(cuGraphExecKernelNodeSetParams_v2, exec, node, params);
    return result == CUDA_SUCCESS ? kernel_set(result, exec, node, cost_of_v2(params)) : result;
}

static CUresult child_set(CUresult result, CUgraphExec exec, CUgraphNode node, CUgraph child) {
    if (result == CUDA_SUCCESS) {
        struct nodes nodes;
        walk(&nodes, child);
        change_node(exec, node, set_child, &nodes);
        free(nodes.all);
    }
    return result;
}

ST_EXPORT CUresult CUDAAPI cuGraphExecChildGraphNodeSetParams(CUgraphExec exec, CUgraphNode node, CUgraph child) {
    return child_set(CALL(cuGraphExecChildGraphNodeSetParams, exec, node, child), exec, node, child);
}

ST_EXPORT CUresult CUDAAPI cuGraphExecNodeSetParams(CUgraphExec exec, CUgraphNode node, CUgraphNodeParams *params) {
    CUresult result = CALL(cuGraphExecNodeSetParams, exec, node, params);
    if (result == CUDA_SUCCESS && params->type == CU_GRAPH_NODE_TYPE_KERNEL) {
        return kernel_set(result, exec, node, cost_of_v3(&params->kernel));
    }
    if (result == CUDA_SUCCESS && params->type == CU_GRAPH_NODE_TYPE_GRAPH) {
        return child_set(result, exec, node, params->graph.graph);
    }
    return result;
}

ST_EXPORT CUresult CUDAAPI cuGraphNodeSetEnabled(CUgraphExec exec, CUgraphNode node, unsigned int is_enabled) {
    CUresult result = CALL(cuGraphNodeSetEnabled, exec, node, is_enabled);
    bool is_off = is_enabled == 0;
    if (result == CUDA_SUCCESS) {
        change_node(exec, node, set_off, &is_off);
    }
    return result;
}

/* Forgotten before the driver destroys it: another thread may get the same handle at once. */
ST_EXPORT CUresult CUDAAPI cuGraphExecDestroy(CUgraphExec exec) {
    if (!st_resolve() || st_real_cuGraphExecDestroy == NULL) {
        return ST_MISSING;
    }
    forget(exec);
    return st_real_cuGraphExecDestroy(exec);
}

void st_graph_forked(void) {
    /* The parent's graphs are no use here; their memory stays as it is, another thread may have been at work on it. */
    pthread_mutex_init(&mutex, NULL);
    for (unsigned i = 0; i < NUM_LISTS; i++) {
        lists[i] = NULL;
    }
    st_capture_forked();
}
