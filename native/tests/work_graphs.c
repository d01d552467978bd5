/* Graphs: what a launch of one is counted as. The first argument chooses the scene.
 *
 * Kernels are learnt first, so that the sum of a graph's nodes says something.
 */
#include "work_probe.h"

#define MOST_NODES 16
#define MOST_MADE 64

static CUfunction brief, lengthy;
static CUgraphNode nodes[MOST_NODES];
static CUgraphNode child_node;
static CUgraph made[MOST_MADE];
static CUgraphExec made_execs[MOST_MADE];
static int num_made, num_made_execs;

/* What a scene made is destroyed at its end, so that the leak checker finds only what the library leaves. */
static void destroy_all(void) {
    for (int i = 0; i < num_made; i++) {
        MUST(cuGraphDestroy(made[i]));
    }
    for (int i = 0; i < num_made_execs; i++) {
        MUST(cuGraphExecDestroy(made_execs[i]));
    }
}

static CUgraph keep(CUgraph graph) {
    made[num_made++] = graph;
    return graph;
}

static CUgraphExec keep_exec(CUgraphExec exec) {
    made_execs[num_made_execs++] = exec;
    return exec;
}

static CUDA_KERNEL_NODE_PARAMS_v2 params_of(CUfunction function) {
    return (CUDA_KERNEL_NODE_PARAMS_v2){
        function, 64, 1, 1, 128, 1, 1, .sharedMemBytes = 0, .kernelParams = NULL, .extra = NULL};
}

static CUgraph graph_of(int num_brief, int num_lengthy) {
    CUgraph graph;
    MUST(cuGraphCreate(&graph, 0));
    for (int i = 0; i < num_brief + num_lengthy; i++) {
        CUDA_KERNEL_NODE_PARAMS_v2 params = params_of(i < num_brief ? brief : lengthy);
        MUST(cuGraphAddKernelNode_v2(&nodes[i], graph, i == 0 ? NULL : &nodes[i - 1], i != 0, &params));
    }
    return keep(graph);
}

/* `num_outer` brief kernels around a child graph of these. */
static CUgraph nested(int num_outer, int num_brief, int num_lengthy) {
    CUgraph inner = graph_of(num_brief, num_lengthy);
    CUgraph middle = graph_of(0, 0);
    MUST(cuGraphAddChildGraphNode(&nodes[0], middle, NULL, 0, inner));
    CUgraph outer = graph_of(num_outer, 0);
    MUST(cuGraphAddChildGraphNode(&child_node, outer, NULL, 0, middle));
    return outer;
}

static CUgraphExec instance_of(CUgraph graph) {
    CUgraphExec exec;
    MUST(cuGraphInstantiateWithFlags(&exec, graph, 0));
    return exec;
}

static uint64_t counted(CUgraphExec exec) {
    uint64_t before_ns = own_used_ns();
    MUST(cuGraphLaunch(exec, NULL));
    return own_used_ns() - before_ns;
}

static void learn_kernels(void) {
    brief = probe_kernel("brief@100000");
    lengthy = probe_kernel("lengthy@1000000");
    probe_loop(brief, 64, 40);
    probe_loop(lengthy, 64, 40);
}

static void learn_graph(CUgraphExec exec, int count) {
    for (int i = 0; i < count; i++) {
        MUST(cuGraphLaunch(exec, NULL));
        MUST(cuCtxSynchronize());
    }
}

static void variants(void) {
    CUgraphExec exec;
    CUDA_GRAPH_INSTANTIATE_PARAMS params = {0};
    CUgraph graph = graph_of(3, 2); /* 2,300,000 */
    MUST(cuGraphInstantiate(&exec, graph, NULL, NULL, 0));
    say("v1", counted(keep_exec(exec)));
    MUST(cuGraphInstantiate_v2(&exec, graph, NULL, NULL, 0));
    say("v2", counted(keep_exec(exec)));
    MUST(cuGraphInstantiateWithFlags(&exec, graph, 0));
    say("flags", counted(keep_exec(exec)));
    MUST(cuGraphInstantiateWithParams(&exec, graph, &params));
    say("params", counted(keep_exec(exec)));
    MUST(cuGraphInstantiateWithParams_ptsz(&exec, graph, &params));
    say("params_ptsz", counted(keep_exec(exec)));
    uint64_t before_ns = own_used_ns();
    MUST(cuGraphLaunch_ptsz(exec, NULL));
    say("twin", own_used_ns() - before_ns);
    say("nested", counted(keep_exec(instance_of(nested(1, 3, 2))))); /* 2,400,000 */
    say("empty", counted(keep_exec(instance_of(graph_of(0, 0)))));
    say("kernels", stub_kernels(0));
}

/* Kernels that were never launched by themselves: the graph is measured as a whole. */
static void measured(void) {
    CUfunction before = brief;
    brief = probe_kernel("unheard@700000");
    CUgraphExec exec = keep_exec(instance_of(graph_of(10, 0)));
    uint64_t used_ns = own_used_ns();
    uint64_t busy_ns = stub_busy_ns(0);
    say("guess", counted(exec));
    MUST(cuCtxSynchronize());
    learn_graph(exec, 40);
    say("learned", counted(exec));
    say("used_ns", own_used_ns() - used_ns);
    say("busy_ns", stub_busy_ns(0) - busy_ns);
    brief = before;
}

static void changes(bool is_learned) {
    CUgraphNode wrong;
    CUgraphExecUpdateResult what;
    CUgraphExecUpdateResultInfo info;
    CUDA_KERNEL_NODE_PARAMS_v2 params = params_of(lengthy);
    CUDA_KERNEL_NODE_PARAMS_v1 old_params;
    CUgraphNodeParams any = {.type = CU_GRAPH_NODE_TYPE_KERNEL};
    CUgraphExec exec = keep_exec(instance_of(graph_of(4, 0)));
    if (is_learned) {
        learn_graph(exec, 60);
    }
    say("four_brief", counted(exec));
    MUST(cuGraphExecKernelNodeSetParams_v2(exec, nodes[0], &params));
    say("one_lengthy", counted(exec));
    memcpy(&old_params, &params, sizeof(old_params));
    MUST(cuGraphExecKernelNodeSetParams(exec, nodes[1], &old_params));
    say("two_lengthy", counted(exec));
    any.kernel.func = lengthy;
    any.kernel.gridDimX = 64;
    any.kernel.blockDimX = 128;
    any.kernel.gridDimY = any.kernel.gridDimZ = any.kernel.blockDimY = any.kernel.blockDimZ = 1;
    MUST(cuGraphExecNodeSetParams(exec, nodes[2], &any));
    say("three_lengthy", counted(exec));
    MUST(cuGraphNodeSetEnabled(exec, nodes[0], 0));
    say("one_off", counted(exec));
    MUST(cuGraphNodeSetEnabled(exec, nodes[0], 1));
    say("on_again", counted(exec));
    CUgraph other = graph_of(1, 3);
    MUST(cuGraphExecUpdate_v2(exec, other, &info));
    say("updated_same", counted(exec));
    other = graph_of(4, 0);
    MUST(cuGraphExecUpdate(exec, other, &wrong, &what));
    say("updated_back", counted(exec));
    /* A change that the driver refuses changes nothing. */
    if (cuGraphExecUpdate_v2(exec, graph_of(0, 9), &info) == CUDA_SUCCESS) {
        exit(4);
    }
    say("refused", counted(exec));
}

static void changes_unmeasured(void) {
    changes(false);
}

static void changes_measured(void) {
    changes(true);
}

static void children(void) {
    CUgraph outer = nested(1, 4, 0); /* 500,000 */
    CUgraphNode child = child_node;
    CUgraphExec exec = keep_exec(instance_of(outer));
    say("before", counted(exec));
    CUgraph inner = graph_of(0, 4);
    CUgraph middle = graph_of(0, 0);
    CUgraphNode node;
    MUST(cuGraphAddChildGraphNode(&node, middle, NULL, 0, inner));
    MUST(cuGraphExecChildGraphNodeSetParams(exec, child, middle));
    say("after", counted(exec));
    CUgraphNodeParams any = {.type = CU_GRAPH_NODE_TYPE_GRAPH};
    any.graph.graph = middle;
    MUST(cuGraphExecNodeSetParams(exec, child, &any));
    say("again", counted(exec));
}

/* The driver uses the address of a graph that is gone for the next one. */
static void handles(void) {
    int num_same = 0;
    uint64_t wrong = 0;
    CUgraph small = graph_of(1, 0);
    CUgraph large = graph_of(0, 5);
    CUgraphExec last = NULL;
    for (int i = 0; i < 2000; i++) {
        CUgraphExec exec = instance_of(i % 2 == 0 ? small : large);
        num_same += exec == last;
        uint64_t ns = counted(exec);
        wrong += i % 2 == 0 ? ns > 200000 : ns < 5000000;
        MUST(cuCtxSynchronize());
        last = exec;
        MUST(cuGraphExecDestroy(exec));
    }
    say("num_same", num_same);
    say("wrong", wrong);
    say("execs", stub_alive("execs"));
}

#define THREADS 4
#define ROUNDS 300

struct task {
    CUcontext context;
    CUgraph small, large;
};

/* Makes, launches, changes, launches and destroys: 1 and 5 kernels in each round. */
static void *make_and_launch(void *data) {
    struct task *task = data;
    CUgraphExecUpdateResultInfo info;
    CUstream stream;
    MUST(cuCtxSetCurrent(task->context));
    MUST(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    for (int i = 0; i < ROUNDS; i++) {
        CUgraphExec exec = instance_of(task->small);
        MUST(cuGraphLaunch(exec, stream));
        (void)cuGraphExecUpdate_v2(exec, task->large, &info); /* refused: it has other nodes */
        MUST(cuGraphExecDestroy(exec));
        exec = instance_of(task->large);
        MUST(cuGraphNodeSetEnabled(exec, nodes[0], 0));
        MUST(cuGraphNodeSetEnabled(exec, nodes[0], 1));
        MUST(cuGraphLaunch(exec, stream));
        MUST(cuGraphExecDestroy(exec));
        MUST(cuStreamSynchronize(stream));
    }
    MUST(cuStreamDestroy_v2(stream));
    return NULL;
}

static void threads(void) {
    struct task task;
    pthread_t all[THREADS];
    MUST(cuCtxGetCurrent(&task.context));
    task.small = graph_of(1, 0);
    task.large = graph_of(5, 0);
    uint64_t used_ns = own_used_ns();
    uint64_t num_launches = own_launches();
    for (int i = 0; i < THREADS; i++) {
        pthread_create(&all[i], NULL, make_and_launch, &task);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(all[i], NULL);
    }
    say("graphs_launched", own_launches() - num_launches);
    say("used_ns", own_used_ns() - used_ns);
    say("execs", stub_alive("execs"));
}

int main(int count, char **values) {
    const struct {
        const char *name;
        void (*play)(void);
    } scenes[] = {{"variants", variants},
                  {"measured", measured},
                  {"changes_unmeasured", changes_unmeasured},
                  {"changes_measured", changes_measured},
                  {"children", children},
                  {"handles", handles},
                  {"threads", threads}};
    probe_begin(UINT64_MAX / 4);
    learn_kernels();
    for (size_t i = 0; count == 2 && i < sizeof(scenes) / sizeof(scenes[0]); i++) {
        if (strcmp(scenes[i].name, values[1]) == 0) {
            scenes[i].play();
            destroy_all();
            said();
            return 0;
        }
    }
    return 2;
}
