"""Broken builds of the token bucket, of the question to the daemon and of devices, and the tests that must see it."""

_GATE, _CLIENT, _DEVICE = "native/src/gate.c", "native/src/client.c", "native/src/device.c"
_ON_GATE = "tests/native/test_native_gate.py::"
_ON_CLIENT = "tests/native/test_native_client.py::"
_ON_FORK = "tests/native/test_native_fork.py::"
_ON_DEVICES = "tests/native/test_native_devices.py::"
_WRONG_ANSWER = _ON_CLIENT + "test_a_wrong_answer_holds_nobody_and_costs_no_descriptor"

BROKEN = (
    (
        "a frozen daemon is waited for",
        _GATE,
        "has_flag(grant, ST_CLOSED) || is_stale(grant, *now_ns);",
        "has_flag(grant, ST_CLOSED);",
        _ON_GATE + "test_a_frozen_daemon_holds_a_launch_no_longer_than_stated",
    ),
    (
        "a daemon that grants nothing is waited for",
        _GATE,
        "is_over = *now_ns - began_ns >= max_wait_ns(grant) || ",
        "is_over = ",
        _ON_GATE + "test_a_living_daemon_that_grants_nothing_holds_a_launch_for_max_wait",
    ),
    (
        "who waits behind a launch that failed waits for nothing",
        _GATE,
        "used_before_ns < granted_ns ||\n           atomic_load_explicit(&bucket->usage->used_ns, memory_order_relaxed)"
        " < granted_ns",
        "used_before_ns < granted_ns",
        _ON_GATE + "test_a_launch_that_fails_is_given_back_and_holds_nobody",
    ),
    (
        "a launch goes without tokens",
        _GATE,
        "used_before_ns < granted_ns ||",
        "used_before_ns <= granted_ns ||",
        _ON_GATE + "test_a_launch_without_tokens_waits_for_them",
    ),
    (
        "a heartbeat of the future is trusted",
        _GATE,
        "now_ns - heartbeat_ns : heartbeat_ns - now_ns",
        "now_ns - heartbeat_ns : 0",
        _ON_GATE + "test_a_heartbeat_of_another_clock_holds_nobody",
    ),
    (
        "a launch changes errno",
        _GATE,
        "    errno = error;\n    return bucket;",
        "    errno = 5;\n    return bucket;",
        _ON_GATE + "test_signals_do_not_end_waiting",
    ),
    (
        "a failed launch keeps its tokens",
        _GATE,
        "atomic_fetch_sub_explicit(&bucket->usage->used_ns, cost_ns, memory_order_relaxed);",
        "(void)cost_ns;",
        _ON_GATE + "test_a_launch_that_fails_is_given_back_and_holds_nobody",
    ),
    (
        "first launches are made beside the bucket",
        _GATE,
        "is_first ? st_lock_within(&asking, FIRST_PATIENCE_NS) : st_lock_try(&asking)",
        "st_lock_try(&asking)",
        _ON_CLIENT + "test_the_first_launches_of_all_threads_wait_for_the_first_answer",
    ),
    (
        "a daemon that is starting loses its tenants",
        _GATE,
        "fresh != NULL || (is_no && old != NULL && has_flag(old->grant, ST_CLOSED))",
        "fresh != NULL || is_no",
        _ON_CLIENT + "test_a_daemon_that_does_not_know_us_yet_leaves_us_our_files",
    ),
    (
        "closed files are used on",
        _GATE,
        "!has_flag(bucket->grant, ST_CLOSED) && !is_stale(bucket->grant, now_ns)",
        "!is_stale(bucket->grant, now_ns)",
        _ON_CLIENT + "test_closed_files_are_left_for_new_ones",
    ),
    (
        "a signal ends a question",
        _CLIENT,
        "if (num_ready < 0 && errno != EINTR) {",
        "if (num_ready < 0) {",
        _ON_GATE + "test_signals_do_not_end_a_question",
    ),
    (
        "an answer with too many files is taken",
        _CLIENT,
        "answer.status == ST_OK && num_descriptors == 2",
        "answer.status == ST_OK && num_descriptors >= 2",
        _WRONG_ANSWER,
    ),
    (
        "files stay open",
        _CLIENT,
        "    close_both(descriptors, num_descriptors);\n",
        "    (void)close_both;\n",
        _ON_CLIENT + "test_a_thousand_answers_about_the_same_files_map_them_once",
    ),
    (
        "files that are too short are mapped",
        _CLIENT,
        "!is_long_enough(descriptors[0]) || !is_long_enough(descriptors[1])",
        "!is_long_enough",
        _WRONG_ANSWER,
    ),
    (
        "another device's grant is taken",
        _CLIENT,
        "memcmp(grant->device_uuid, uuid, ST_UUID_BYTES) == 0 && usage->magic",
        "uuid != NULL && usage->magic",
        _WRONG_ANSWER,
    ),
    (
        "a silent daemon is asked all the time",
        _CLIENT,
        "RETRY_MS << (num_before < MAX_UNANSWERED ? num_before : MAX_UNANSWERED)",
        "RETRY_MS << (num_before < MAX_UNANSWERED ? 0 : 0)",
        _ON_CLIENT + "test_a_daemon_that_never_answers_is_asked_less_and_less",
    ),
    (
        "a child is born while others ask",
        _GATE,
        "    atomic_store(&asking.word, 0);",
        "    atomic_store(&asking.word, 1);",
        _ON_FORK + "test_a_child_asks_for_itself",
    ),
    (
        "a fork is not noticed",
        _DEVICE,
        "    pthread_atfork(NULL, NULL, in_child);",
        "    (void)in_child;",
        _ON_FORK + "test_a_child_asks_for_itself",
    ),
    (
        "memory of a dead context stays counted",
        _DEVICE,
        "        st_memory_context_gone(device, context);",
        "        (void)context;",
        _ON_DEVICES + "test_what_a_context_held_is_free_when_it_ends",
    ),
    (
        "a thread stays on its first device",
        _DEVICE,
        "here.context == context && here.epoch == epoch",
        "here.context != NULL && here.epoch == epoch",
        _ON_DEVICES + "test_a_thread_that_changes_its_device_with_every_launch",
    ),
    (
        "a dead contexts device is remembered",
        _DEVICE,
        "here.context == context && here.epoch == epoch",
        "here.context == context && epoch != 0",
        _ON_DEVICES + "test_a_dead_contexts_address_may_be_another_devices",
    ),
    (
        "every process has one device only",
        _DEVICE,
        "                   num_devices == 1;",
        "                   num_devices >= 1;",
        _ON_DEVICES + "test_each_device_has_a_bucket_of_its_own",
    ),
    (
        "devices are known by their number in the process",
        _DEVICE,
        "    memcpy(uuid, found.bytes, ST_UUID_BYTES);",
        '    memcpy(uuid, "\\x53\\x54\\x55\\x42\\0\\0\\x40\\0\\x80\\0\\0\\0\\0\\0\\0", 15);\n'
        "    uuid[15] = (uint8_t)(ordinal + 1);",
        _ON_DEVICES + "test_a_visible_device_keeps_its_uuid",
    ),
)
