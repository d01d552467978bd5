"""Broken builds of how programs are made to find us, and the tests that must see it."""

_RESOLVE = "tests/native/test_native_resolve.py::"
_CUDART = "tests/native/test_native_cudart.py::"

BROKEN = (
    (
        "the flag for per-thread streams is not looked at",
        "native/src/resolve.c",
        "        if (*hook->real == address &&",
        "        if (!hook->is_per_thread && *hook->real != NULL && address != NULL &&",
        _RESOLVE + "test_version_and_flags_choose_ours",
    ),
    (
        "a function of a newer driver is taken for the one of that name",
        "native/src/resolve.c",
        "    if (hook == NULL || answered != st_ask_driver(",
        "    if (hook == NULL || NULL == st_ask_driver(",
        _RESOLVE + "test_a_function_of_a_newer_driver_is_left_alone",
    ),
    (
        "cuGetProcAddress gives the driver's own functions away",
        "native/src/resolve.c",
        "    const struct st_hook *hook = st_hook_at(answered, api, is_per_thread);\n    if (hook != NULL) {\n"
        "        return hook->ours;",
        "    const struct st_hook *hook = st_hook_at(answered, api, is_per_thread);\n"
        "    if (hook != NULL || version > 0) {\n        return answered;",
        _CUDART + "test_the_real_runtime_launches_through_us",
    ),
    (
        "dlsym is a function that calls the true one",
        "native/src/resolve.c",
        "    if (st_num_inside > 0 || name == NULL) {\n        return NULL;\n    }\n    bool is_cuda",
        "    if (st_num_inside > 0 || name == NULL) {\n        return NULL;\n    }\n"
        "    if (*handle == RTLD_NEXT && version == NULL && name[0] == 'w') {\n"
        "        return st_true_dlsym(RTLD_NEXT, name);\n    }\n    bool is_cuda",
        _RESOLVE + "test_next_is_next_after_the_caller",
    ),
    (
        "next from behind us leads past us",
        "native/src/resolve.c",
        "        return asking != NULL && st_is_before_us(asking) ? NULL : hook->ours;",
        "        return asking != NULL && (asking != driver || st_is_before_us(asking)) ? NULL : hook->ours;",
        _RESOLVE + "test_next_from_behind_us_does_not_lead_past_us",
    ),
    (
        "the C library's dlsym is given away",
        "native/src/resolve.c",
        "        if (found != NULL && found == (void *)st_true_dlsym) {",
        "        if (found == NULL) {",
        _RESOLVE + "test_nobody_gets_past_us_through_the_c_library",
    ),
    (
        "a driver that looks itself up finds us",
        "native/src/resolve.c",
        "    if (*hook->real == NULL || asking == driver) {",
        "    if (*hook->real == NULL) {",
        _RESOLVE + "test_a_driver_may_look_itself_up",
    ),
    (
        "names are found that the driver does not have",
        "native/src/resolve.c",
        "    if (*hook->real == NULL || asking == driver) {",
        "    if (asking == driver) {",
        _RESOLVE + "test_an_older_driver_is_asked_in_its_own_way",
    ),
    (
        "what is found leaves an error behind",
        "native/src/resolve.c",
        "    dlerror(); /* a name that was not found is no error of the program's */\n",
        '    (void)dlsym(handle, "nothing at all");\n',
        _RESOLVE + "test_dlsym_finds_ours_from_everywhere",
    ),
    (
        "other preloads' launches are passed by",
        "native/src/resolve.c",
        "    return first == NULL || first == hook->ours || first == *hook->real ? hook->ours : NULL;",
        "    return first == NULL || first != NULL ? hook->ours : NULL;",
        _RESOLVE + "test_others_that_wrap_launches_still_do",
    ),
    (
        "a part on another device is charged to the current one",
        "native/src/launch.c",
        "           st_real_cuCtxPushCurrent_v2(context) == CUDA_SUCCESS;",
        "           false;",
        "tests/native/test_native_launch.py::test_a_launch_on_two_devices_is_one_on_each",
    ),
)
