"""Broken builds of the memory limit and of launch cycles, and the tests that must see it."""

_PLAIN, _ACCOUNT = "native/src/memory.c", "native/src/memory_account.c"
_MAPPED, _POOLS = "native/src/memory_mapped.c", "native/src/memory_pools.c"
_TABLE, _REPORT, _NVML = "native/src/memory_table.c", "native/src/memory_report.c", "native/src/memory_nvml.c"
_CYCLE = "native/src/cycle.c"
_ON_MEMORY = "tests/native/test_native_memory.py::"
_ON_SHARED = "tests/native/test_native_memory_shared.py::"
_ON_CYCLES = "tests/native/test_native_cycles.py::"

BROKEN = (
    (
        "memory is counted and nobody refused",
        _ACCOUNT,
        "bool has_room = !st_memory_of_tenant(bucket, &limit, &used) || used <= limit;",
        "bool has_room = !st_memory_of_tenant(bucket, &limit, &used) || used <= limit || true;",
        _ON_MEMORY + "test_nobody_gets_more_than_the_limit",
    ),
    (
        "processes of a tenant have a limit each",
        _ACCOUNT,
        "sum = st_plus(sum, atomic_load(&usage->processes[i].memory_bytes));",
        "sum = atomic_load(&usage->processes[i].memory_bytes);",
        _ON_SHARED + "test_two_processes_share_one_limit",
    ),
    (
        "memory is added up without taking turns",
        _ACCOUNT,
        "if (is_nobody(bucket, whose) && atomic_compare_exchange_strong(turn, &whose, mine)) {",
        "if (is_nobody(bucket, whose) || atomic_compare_exchange_strong(turn, &whose, mine)) {",
        _ON_SHARED + "test_nobody_is_refused_because_of_one_who_is_refused",
    ),
    (
        "whoever died while adding up is waited for",
        _ACCOUNT,
        "    return atomic_load(&bucket->usage->processes[slot - 1].pid) == 0;\n",
        "    return bucket == NULL;\n",
        _ON_SHARED + "test_one_who_died_while_adding_up_holds_nobody_up",
    ),
    (
        "a forked child keeps its parent's account",
        _ACCOUNT,
        "    num_accounts = 0;\n",
        "",
        _ON_SHARED + "test_a_child_begins_with_nothing",
    ),
    (
        "what was allocated before the daemon came never counts",
        _ACCOUNT,
        "        account->bucket = bucket;\n        tell(account);\n    }\n    st_memory_unlock();\n}\n\nbool",
        "        account->bucket = bucket;\n    }\n    st_memory_unlock();\n}\n\nbool",
        _ON_SHARED + "test_what_was_allocated_before_the_daemon_came_counts_then",
    ),
    (
        "what the driver refused is counted",
        _PLAIN,
        "    if (!is_held || !st_table_put(&held)) {\n",
        "    if (is_held && !st_table_put(&held)) {\n",
        _ON_MEMORY + "test_what_the_driver_refuses_is_not_counted",
    ),
    (
        "products wrap around",
        _PLAIN,
        "return __builtin_mul_overflow(a, b, &product) ? UINT64_MAX : product;",
        "return __builtin_mul_overflow(a, b, &product) ? product : product;",
        _ON_MEMORY + "test_sizes_beyond_all_bounds_do_not_wrap_around",
    ),
    (
        "a context that goes leaves its memory in the account",
        _PLAIN,
        "held->owner == (uint64_t)(uintptr_t)context;",
        "held->owner == (uint64_t)(uintptr_t)context + 1;",
        _ON_MEMORY + "test_a_context_takes_its_memory_with_it",
    ),
    (
        "entries get lost when one is taken out",
        _TABLE,
        ">= ((place - gap) & (num_places - 1))) {",
        "== num_places) {",
        _ON_MEMORY + "test_thousands_of_pieces_are_each_found_again",
    ),
    (
        "physical memory is free when its handle is released",
        _MAPPED,
        "        if (keep(number) && !st_table_put(&mapping)) {\n",
        "        if (number != 0 && !st_table_put(&mapping)) {\n",
        _ON_MEMORY + "test_physical_memory_counts_until_handle_and_mappings_are_gone",
    ),
    (
        "what a pool keeps does not count",
        _POOLS,
        "    return pool->used > pool->reserved ? pool->used : pool->reserved;\n",
        "    return pool->used;\n",
        _ON_MEMORY + "test_what_a_pool_keeps_counts_until_it_is_given_back",
    ),
    (
        "memory of graphs does not count",
        _POOLS,
        "    if (account->has_graph_memory && st_real_cuDeviceGetGraphMemAttribute != NULL &&",
        "    if (account == NULL && st_real_cuDeviceGetGraphMemAttribute != NULL &&",
        _ON_MEMORY + "test_what_is_allocated_while_capturing_counts_when_the_graph_runs",
    ),
    (
        "a program is told of the whole device",
        _REPORT,
        "*total_bytes = least(*total_bytes, limit);",
        "*total_bytes = least(*total_bytes, UINT64_MAX);",
        _ON_SHARED + "test_the_limit_is_all_the_memory_there_is",
    ),
    (
        "NVML tells of the whole device",
        _NVML,
        "    return bucket != NULL && st_memory_of_tenant(bucket, limit_bytes, used_bytes);\n",
        "    return bucket == NULL && st_memory_of_tenant(bucket, limit_bytes, used_bytes);\n",
        _ON_SHARED + "test_nvml_is_limited_before_the_driver_is_initialised",
    ),
    (
        "a copy inside the device ends a cycle",
        _CYCLE,
        "    return result != CUDA_SUCCESS || kind == CU_MEMORYTYPE_HOST;\n",
        "    return result != CUDA_SUCCESS || kind != CU_MEMORYTYPE_HOST;\n",
        _ON_CYCLES + "test_what_does_not_wait_for_results_ends_none",
    ),
    (
        "a failed wait ends a cycle",
        _CYCLE,
        "    if (result == CUDA_SUCCESS) {\n        struct st_bucket *bucket = running();",
        "    {\n        struct st_bucket *bucket = running();",
        _ON_CYCLES + "test_a_failed_wait_ends_no_cycle",
    ),
)
