"""Broken builds of how launches are found, counted and weighed, and the tests that must see it."""

_LAUNCH, _RESOLVE, _HOOKS = "native/src/launch.c", "native/src/resolve.c", "native/src/hooks.h"
_GRAPH, _WORK, _GATE, _CLIENT = (f"native/src/{name}.c" for name in ("graph", "work", "gate", "client"))
_FAULTS = "tests/native/test_native_faults.py::"
_PATHS = _FAULTS + "test_every_launch_counts_and_goes_to_its_own_twin"
_GRAPHS = "tests/native/test_native_graphs.py::"

BROKEN = (
    (
        "the driver is looked for by nobody who launches first",
        _HOOKS,
        " || st_resolve_slowly();",
        ";",
        _FAULTS + "test_whatever_is_called_first",
    ),
    (
        "launches of graphs are not counted",
        _GRAPH,
        "    st_launch_begin(&ticket, st_work_of_graph(graph, ST_UNKNOWN_GRAPH_NS), stream, per_thread);\n",
        "    ticket.bucket = NULL;\n    ticket.sample = NULL;\n",
        _PATHS,
    ),
    (
        "graphs of per-thread streams are launched on the legacy one",
        _GRAPH,
        "launch(st_real_cuGraphLaunch_ptsz, graph, stream, true)",
        "launch(st_real_cuGraphLaunch, graph, stream, true)",
        _PATHS,
    ),
    (
        "launches by configuration are not counted",
        _LAUNCH,
        "ST_LAUNCH_EX(cuLaunchKernelEx, false)",
        "ST_EXPORT CUresult CUDAAPI cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function,"
        " void **parameters, void **extra) {"
        " return st_resolve() ? st_real_cuLaunchKernelEx(config, function, parameters, extra) : 3; }",
        _PATHS,
    ),
    (
        "launches on several devices are not counted",
        _LAUNCH,
        "if (parts == NULL || num_parts > ST_MAX_PARTS) {",
        "if (parts == NULL || num_parts > 0) {",
        _PATHS,
    ),
    (
        "flags choose nothing",
        _RESOLVE,
        "const struct st_hook *hook = st_hook_at(answered, api, is_per_thread);",
        "const struct st_hook *hook =\n"
        "        st_hook_at(answered, api, is_per_thread) == NULL ? NULL : st_hook_for(api, version, false);",
        _PATHS,
    ),
    (
        "whoever asks for cuGetProcAddress gets the driver's",
        _RESOLVE,
        "    bool is_per_thread = (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0;\n",
        "    bool is_per_thread = (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0;\n"
        '    if (strcmp(api, "cuGetProcAddress") == 0) {\n        return answered;\n    }\n',
        _FAULTS + "test_both_forms_of_cu_get_proc_address_are_ours",
    ),
    (
        "what the driver says of a symbol is not passed on",
        _RESOLVE,
        "CUresult result = st_real_cuGetProcAddress_v2(api, address, version, flags, status);",
        "CUdriverProcAddressQueryResult unused;\n    (void)status;\n"
        "    CUresult result = st_real_cuGetProcAddress_v2(api, address, version, flags, &unused);",
        _FAULTS + "test_what_the_driver_says_of_an_address_stands",
    ),
    (
        "dlsym finds the driver's functions",
        _RESOLVE,
        "return st_resolve() && found == *hook->real ? hook->ours : NULL;",
        "return st_resolve() && found == NULL ? hook->ours : NULL;",
        _FAULTS + "test_an_old_driver_is_held_by_its_names",
    ),
    (
        "a driver that asks for itself gets us",
        _RESOLVE,
        "if (*hook->real == NULL || asking == driver) {",
        "if (*hook->real == NULL) {",
        "tests/native/test_native_resolve.py::test_a_driver_may_look_itself_up",
    ),
    (
        "kernels that were never functions are not counted",
        _LAUNCH,
        "ST_LAUNCH_KERNEL(cuLaunchKernel, false)",
        "ST_EXPORT CUresult CUDAAPI cuLaunchKernel(CUfunction function, ST_SHAPE, CUstream stream, void **parameters,"
        " void **extra) { return st_resolve() ? "
        "st_real_cuLaunchKernel(function, gx, gy, gz, bx, by, bz, shared_bytes, stream, parameters, extra) : 3; }",
        _FAULTS + "test_a_kernel_of_a_library_counts",
    ),
    (
        "products of grids have 32 bits",
        _LAUNCH,
        "return (uint64_t)x * y * z;",
        "return x * y * z;",
        _FAULTS + "test_a_grid_of_two_to_the_32_blocks_is_the_largest_not_the_smallest",
    ),
    (
        "nothing is learnt from what is measured",
        _WORK,
        "measured_ns = measured_ns < ST_LEAST_COST_NS ? ST_LEAST_COST_NS : measured_ns;",
        "measured_ns = st_work_cost_ns(work);",
        _FAULTS + "test_time_is_charged_not_blocks",
    ),
    (
        "estimates follow every time slice of others",
        _WORK,
        "cost_ns += (more_ns < cost_ns ? more_ns : cost_ns) / 8;",
        "cost_ns += more_ns;",
        "tests/native/test_native_work.py::test_time_slices_of_others_are_hardly_counted",
    ),
    (
        "whoever finds no daemon waits for one",
        _GATE,
        "        return bucket_now(device, st_now_ns(), AGAIN_PATIENCE_NS);\n",
        "        while ((bucket = bucket_now(device, st_now_ns(), AGAIN_PATIENCE_NS)) == NULL) {\n        }\n"
        "        return bucket;\n",
        _FAULTS + "test_without_a_daemon_nobody_is_held",
    ),
    (
        "the environment says who is held",
        _CLIENT,
        "const char *path = getenv(ST_SOCKET_VARIABLE);",
        'const char *path = getenv("priority") != NULL ? NULL : getenv(ST_SOCKET_VARIABLE);',
        _FAULTS + "test_the_environment_sets_no_quota",
    ),
    (
        "launches of several threads are counted one over the other",
        _HOOKS,
        "atomic_fetch_add_explicit(&bucket->process->num_launches, 1, memory_order_relaxed);",
        "atomic_load(&bucket->process->num_launches);\n    for (volatile int k = 0; k < 300; k++) {\n    }\n"
        "    bucket->process->num_launches = number + 1;",
        "tests/native/test_native_gate.py::test_threads_are_counted_exactly",
    ),
    (
        "every launch looks at the environment",
        _WORK,
        "    ticket->sample = NULL;\n    ticket->work = work;\n",
        "    ticket->sample = NULL;\n    ticket->work = work;\n"
        '    extern char *getenv(const char *name);\n    (void)getenv("PATH");\n',
        "tests/native/test_native_law.py::test_launches_ask_nobody_for_anything",
    ),
    (
        "a changed graph keeps its weight",
        _GRAPH,
        "        change_node(exec, node, set_cost, &cost_ns);\n",
        "        change_node(NULL, node, set_cost, &cost_ns);\n        (void)exec;\n",
        _GRAPHS + "test_a_changed_graph_weighs_otherwise",
    ),
    (
        "launches that are captured are counted",
        _WORK,
        "        st_is_capturing(stream, per_thread)) {\n",
        "        st_is_capturing(stream, per_thread) && stream == NULL) {\n",
        _GRAPHS + "test_a_capturing_stream_counts_nothing_and_is_never_measured",
    ),
    (
        "launches that are captured are held",
        _WORK,
        "        st_is_capturing(stream, per_thread)) {\n",
        "        !st_is_capturing(stream, per_thread)) {\n",
        _GRAPHS + "test_nobody_waits_for_tokens_on_a_capturing_stream",
    ),
)
