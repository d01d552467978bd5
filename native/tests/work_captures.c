/* Streams that capture: nothing on them is counted, held back or measured. The first argument chooses the scene. */
#include "work_probe.h"

static CUfunction kernel;
static CUstream stream, other;

static uint64_t event_calls(void) {
    return stub_calls("cuEventRecord") + stub_calls("cuEventRecord_ptsz") + stub_calls("cuEventElapsedTime") +
           stub_calls("cuEventElapsedTime_v2") + stub_calls("cuEventCreate") + stub_calls("cuEventQuery");
}

static uint64_t asked(void) {
    return stub_calls("cuStreamIsCapturing") + stub_calls("cuStreamIsCapturing_ptsz");
}

static void launch(int count, CUstream where) {
    for (int i = 0; i < count; i++) {
        MUST(probe_try(kernel, 64, where));
    }
}

/* Whether everything is as it was before anybody captured: counted, the driver is not asked, and a launch is measured
 * within as many as may lie between two measured ones. */
static void say_normal(const char *name) {
    uint64_t was_asked = asked();
    uint64_t num_before = own_launches();
    uint64_t num_events = event_calls();
    uint64_t num_launches = 0;
    while (num_launches < 200 || (num_launches < 2000 && event_calls() == num_events)) {
        MUST(probe_try(kernel, 64, other));
        MUST(cuStreamSynchronize(other));
        num_launches++;
    }
    say(name, own_launches() == num_before + num_launches && asked() == was_asked && event_calls() > num_events);
}

static void captured(CUgraph *graph) {
    uint64_t used_ns = own_used_ns();
    uint64_t num_launches = own_launches();
    uint64_t num_events = event_calls();
    launch(100, stream);
    say("counted_ns", own_used_ns() - used_ns);
    say("counted_launches", own_launches() - num_launches);
    launch(100, other);
    say("beside_launches", own_launches() - num_launches);
    say("event_calls", event_calls() - num_events);
    say("kernels", stub_kernels(0));
    MUST(cuStreamEndCapture(stream, graph));
    say_normal("normal");
}

static void run_captured(CUgraph graph) {
    CUgraphExec exec;
    MUST(cuGraphInstantiateWithFlags(&exec, graph, 0));
    uint64_t used_ns = own_used_ns();
    uint64_t num_launches = own_launches();
    MUST(cuGraphLaunch(exec, stream));
    say("graph_ns", own_used_ns() - used_ns);
    say("graph_launches", own_launches() - num_launches);
}

static void global(void) {
    CUgraph graph;
    MUST(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    captured(&graph);
    run_captured(graph);
}

static void oldest(void) {
    CUgraph graph;
    MUST(cuStreamBeginCapture(stream));
    captured(&graph);
    run_captured(graph);
}

static void to_graph(void) {
    CUgraph graph, same;
    MUST(cuGraphCreate(&graph, 0));
    MUST(cuStreamBeginCaptureToGraph(stream, graph, NULL, NULL, 0, CU_STREAM_CAPTURE_MODE_GLOBAL));
    captured(&same);
    run_captured(graph);
}

static void twins(void) {
    CUgraph graph;
    uint64_t num_launches = own_launches();
    MUST(cuStreamBeginCapture_v2_ptsz(NULL, CU_STREAM_CAPTURE_MODE_RELAXED));
    for (int i = 0; i < 50; i++) {
        MUST(cuLaunchKernel_ptsz(kernel, 64, 1, 1, 128, 1, 1, 0, NULL, NULL, NULL));
    }
    say("counted_launches", own_launches() - num_launches);
    MUST(cuStreamEndCapture_ptsz(NULL, &graph));
    MUST(cuStreamBeginCapture_ptsz(NULL));
    MUST(cuLaunchKernel_ptsz(kernel, 64, 1, 1, 128, 1, 1, 0, CU_STREAM_PER_THREAD, NULL, NULL));
    MUST(cuStreamEndCapture_ptsz(CU_STREAM_PER_THREAD, &graph));
    CUgraph mine;
    MUST(cuGraphCreate(&mine, 0));
    MUST(cuStreamBeginCaptureToGraph_ptsz(NULL, mine, NULL, NULL, 0, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    MUST(cuLaunchKernel_ptsz(kernel, 64, 1, 1, 128, 1, 1, 0, NULL, NULL, NULL));
    MUST(cuStreamEndCapture_ptsz(NULL, &graph));
    say("counted_in_all", own_launches() - num_launches);
    say_normal("normal");
}

/* Another stream joins the capture by waiting for its event, and leaves it by one of its own. */
static void joined(void) {
    CUevent event;
    CUgraph graph = NULL;
    MUST(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    uint64_t num_launches = own_launches();
    MUST(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    MUST(cuEventRecord(event, stream));
    MUST(cuStreamWaitEvent(other, event, 0));
    launch(20, other);
    say("counted_launches", own_launches() - num_launches);
    say("ended_by_other", cuStreamEndCapture(other, &graph));
    launch(1, stream);
    say("still_uncounted", own_launches() - num_launches);
    MUST(cuStreamEndCapture(stream, &graph));
    say_normal("normal");
}

static void failures(void) {
    CUgraph graph;
    MUST(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    say("begun_twice", cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    (void)cuStreamSynchronize(stream); /* which makes the capture invalid */
    say("invalid", cuStreamEndCapture(stream, &graph));
    say("ended_twice", cuStreamEndCapture(stream, &graph));
    say("on_legacy", cuStreamBeginCapture_v2(NULL, CU_STREAM_CAPTURE_MODE_RELAXED));
    say_normal("normal");
}

static void destroyed(void) {
    MUST(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    launch(3, stream);
    MUST(cuStreamDestroy_v2(stream));
    say_normal("normal");
}

/* No token is left, and nobody waits: the daemon of this program would let nobody through for two seconds. */
static void without_tokens(void) {
    CUgraph graph;
    launch(1, stream);
    atomic_store(&own_files[0].grant->granted_ns, 0);
    MUST(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    launch(1000, stream);
    MUST(cuStreamEndCapture(stream, &graph));
    say("throttled_ns", atomic_load(&own_files[0].usage->throttled_ns));
    say("num_open", atomic_load(&own_files[0].usage->num_open));
}

static void graph_in_capture(void) {
    CUgraph graph, outer;
    CUgraphExec exec;
    MUST(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    launch(10, stream);
    MUST(cuStreamEndCapture(stream, &graph));
    MUST(cuGraphInstantiateWithFlags(&exec, graph, 0));
    uint64_t num_launches = own_launches();
    MUST(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    MUST(cuGraphLaunch(exec, stream));
    MUST(cuGraphLaunch(exec, stream));
    say("counted_launches", own_launches() - num_launches);
    MUST(cuStreamEndCapture(stream, &outer));
    run_captured(outer);
}

static _Atomic bool is_over;

static void *launch_beside(void *context) {
    MUST(cuCtxSetCurrent(context));
    CUstream mine;
    MUST(cuStreamCreate(&mine, CU_STREAM_NON_BLOCKING));
    while (!atomic_load(&is_over)) {
        MUST(probe_try(kernel, 64, mine));
    }
    return NULL;
}

/* One thread captures in the strictest mode again and again while others launch and are measured. */
static void threads(void) {
    pthread_t beside[2];
    CUcontext context;
    CUgraph graph;
    MUST(cuCtxGetCurrent(&context));
    for (int i = 0; i < 2; i++) {
        pthread_create(&beside[i], NULL, launch_beside, context);
    }
    for (int i = 0; i < 3000; i++) {
        MUST(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
        launch(3, stream);
        MUST(cuStreamEndCapture(stream, &graph));
        MUST(cuGraphDestroy(graph));
        launch(3, stream);
    }
    atomic_store(&is_over, true);
    for (int i = 0; i < 2; i++) {
        pthread_join(beside[i], NULL);
    }
    say_normal("normal");
}

int main(int count, char **values) {
    const struct {
        const char *name;
        void (*play)(void);
    } scenes[] = {{"global", global},       {"oldest", oldest},       {"to_graph", to_graph},
                  {"twins", twins},         {"joined", joined},       {"failures", failures},
                  {"destroyed", destroyed}, {"threads", threads},     {"graph_in_capture", graph_in_capture},
                  {"without_tokens", without_tokens}};
    probe_begin(UINT64_MAX / 4);
    kernel = probe_kernel("layer@30000");
    MUST(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    MUST(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
    launch(1, stream);
    for (size_t i = 0; count == 2 && i < sizeof(scenes) / sizeof(scenes[0]); i++) {
        if (strcmp(scenes[i].name, values[1]) == 0) {
            scenes[i].play();
            said();
            return 0;
        }
    }
    return 2;
}
