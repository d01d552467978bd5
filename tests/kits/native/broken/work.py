"""Broken builds of how work is weighed and measured, and the tests that must see it."""

WORK, SAMPLE, GRAPH, CAPTURE = (f"native/src/{name}.c" for name in ("work", "sample", "graph", "capture"))
WORK_TESTS = "tests/native/test_native_work.py"
GRAPH_TESTS = "tests/native/test_native_graphs.py"

BROKEN = (
    (
        "a count that went back ends the measuring",
        WORK,
        "    if (ST_UNLIKELY(next_sample - num_launches - 1 >= FURTHEST_DUE)) {",
        "    if (ST_UNLIKELY((int32_t)(num_launches - next_sample) >= 0)) {",
        f"{WORK_TESTS}::test_a_thread_interrupted_while_it_counts_does_not_end_the_measuring",
    ),
    (
        "every launch is measured",
        WORK,
        "    atomic_store_explicit(&work->next_sample, num_launches + (uint32_t)interval, memory_order_relaxed);",
        "    atomic_store_explicit(&work->next_sample, num_launches + interval % 2, memory_order_relaxed);",
        f"{WORK_TESTS}::test_few_launches_are_measured_and_nobody_waits_for_it",
    ),
    (
        "block size and duration are ignored and a launch is a launch",
        WORK,
        "    uint64_t key = key_of(function, num_blocks, num_threads);",
        "    (void)num_threads, num_blocks = 1;\n    uint64_t key = key_of(function, num_blocks, num_threads);",
        f"{WORK_TESTS}::test_every_shape_has_its_own_cost",
    ),
    (
        "the processor's time counts as the device's",
        SAMPLE,
        "st_work_measured(sample, measured_ns > sample->gap_ns ? measured_ns - sample->gap_ns : 0);",
        "st_work_measured(sample, measured_ns);",
        f"{WORK_TESTS}::test_what_the_processor_needs_for_a_launch_is_not_the_devices_time",
    ),
    (
        "what the first launches were counted as stands",
        WORK,
        "        settle(sample->bucket, measured_ns, sample->charged_ns, num_launches);",
        "        (void)num_launches, (void)settle;",
        f"{WORK_TESTS}::test_the_first_measurement_settles_what_was_guessed",
    ),
    (
        "a launch that fails keeps its tokens",
        WORK,
        "        st_gate_refund(ticket->bucket, ticket->cost_ns);",
        "",
        f"{WORK_TESTS}::test_a_launch_that_fails_costs_nothing",
    ),
    (
        "graphs are not weighed",
        GRAPH,
        "    st_work_begin_graph(*handle, sum_of(&nodes));",
        "    st_work_begin_graph(*handle, ST_UNKNOWN_GRAPH_NS);",
        f"{GRAPH_TESTS}::test_a_graph_weighs_what_its_kernels_do_however_it_is_made",
    ),
    (
        "a graph that is updated keeps its weight",
        GRAPH,
        "        set_all(&graph->nodes, &nodes);",
        "        (void)set_all;",
        f"{GRAPH_TESTS}::test_a_changed_graph_weighs_otherwise",
    ),
    (
        "events are recorded while others capture",
        SAMPLE,
        "    if (st_real_cuEventCreate == NULL || atomic_load_explicit(&st_num_captures, memory_order_acquire) != 0 ||",
        "    if (st_real_cuEventCreate == NULL ||",
        f"{GRAPH_TESTS}::test_a_capturing_stream_counts_nothing_and_is_never_measured",
    ),
    (
        "a stream destroyed while it captures captures for ever",
        CAPTURE,
        "    if (was_origin && result == CUDA_SUCCESS) {\n        count_end();",
        "    if (was_origin && result == CUDA_SUCCESS) {",
        f"{GRAPH_TESTS}::test_a_stream_destroyed_while_it_captures_leaves_nothing_behind",
    ),
)
