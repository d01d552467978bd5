"""Every fault that was found in the published interposition libraries, and the tests that show it is not in this one.

The faults are those of Dilu's artifact (measured and read), of HAMi-core, and of a first attempt of our own.
"""

from __future__ import annotations

from typing import NamedTuple

_FAULTS = "tests/native/test_native_faults.py::"
_GATE = "tests/native/test_native_gate.py::"
_CLIENT = "tests/native/test_native_client.py::"
_FORK = "tests/native/test_native_fork.py::"
_DEVICES = "tests/native/test_native_devices.py::"
_MEMORY = "tests/native/test_native_memory.py::"
_SHARED = "tests/native/test_native_memory_shared.py::"
_GRAPHS = "tests/native/test_native_graphs.py::"
_WORK = "tests/native/test_native_work.py::"
_RESOLVE = "tests/native/test_native_resolve.py::"
_LAW = "tests/native/test_native_law.py::"
_DAEMON = "tests/native/test_gpu_daemon.py::"
_SOAK = "tests/native/test_gpu_daemon_soak.py::"
_TURNS = "tests/backends/sharing/gpu/test_ticks.py::"
_CONTROL = "tests/serving/test_share_control.py::"


class Row(NamedTuple):
    """One fault in the words of whoever found it, and the tests that guard against it."""

    fault: str
    tests: tuple[str, ...]


def _row(fault: str, *tests: str) -> Row:
    return Row(fault, tests)


# The server, run with scripted clients.
MEASURED_ON_THE_SERVER = (
    _row(
        "iterations that double, 10 to 20 ms or 25 to 50 ms, see no reaction, or training's tokens rise",
        _CONTROL + "test_an_iteration_that_takes_too_long_is_an_emergency_within_two_ticks_while_it_runs",
        _CONTROL + "test_a_small_stretch_never_raises_the_training",
    ),
    _row(
        "training is throttled to a floor after several slowed iterations and starves",
        _CONTROL + "test_a_training_with_work_is_granted_its_request_in_every_second",
    ),
    _row(
        "an iteration more than four times as long sees no reaction",
        _CONTROL + "test_an_iteration_that_takes_too_long_is_an_emergency_within_two_ticks_while_it_runs",
    ),
    _row(
        "two seconds of overload without an idle tick see no reaction",
        _CONTROL + "test_two_seconds_of_overload_without_an_idle_tick_are_an_emergency_while_they_last",
    ),
    _row(
        "trouble on one GPU starves the training on another",
        _CONTROL + "test_trouble_on_one_device_changes_nothing_on_another",
        _TURNS + "test_one_devices_trouble_is_no_other_ones",
    ),
    _row(
        "training flips tick by tick because one SLO task is idle while another is busy",
        _CONTROL + "test_an_idle_slo_tenant_does_not_lift_the_training_beside_a_busy_one",
    ),
    _row(
        "slots and descriptors leak: ten clients that come and go, then nobody is served",
        _DAEMON + "test_what_a_killed_client_held_is_free_at_once",
        _SOAK + "test_a_thousand_processes_come_and_go",
    ),
    _row(
        "a client that closes with messages queued ends the server by SIGPIPE",
        _DAEMON + "test_a_client_that_closes_before_the_answer_hurts_nobody",
    ),
)

# The library, built from its source and run against a stub driver.
MEASURED_ON_THE_LIBRARY = (
    _row("cuInit before cuDriverGetVersion crashes", _FAULTS + "test_whatever_is_called_first"),
    _row("without a server every launch after the first hangs", _FAULTS + "test_without_a_daemon_nobody_is_held"),
    _row(
        "a client blocks or is ended by SIGPIPE when the server dies",
        _GATE + "test_a_frozen_daemon_holds_a_launch_no_longer_than_stated",
        _GATE + "test_a_dead_daemon_holds_nobody_and_is_followed_when_it_returns",
        _DAEMON + "test_nobody_stops_when_the_daemon_is_killed_and_the_next_one_goes_on_where_it_stopped",
    ),
    _row(
        "the CUDA runtime calls through NULL: names it asks for are missing",
        _FAULTS + "test_what_the_driver_says_of_an_address_stands",
        _FAULTS + "test_both_forms_of_cu_get_proc_address_are_ours",
    ),
    _row(
        "every launch costs a look at the clock, the environment or a socket",
        _LAW + "test_launches_ask_nobody_for_anything",
    ),
)

# By reading.
READ = (
    _row(
        "sockets named by ordinal: every container with one GPU uses the first one's",
        _DEVICES + "test_a_visible_device_keeps_its_uuid",
        _DEVICES + "test_two_processes_that_both_call_their_device_the_first",
    ),
    _row("counters race: launches get lost", _GATE + "test_threads_are_counted_exactly"),
    _row(
        "forks are not handled",
        _FORK + "test_a_child_asks_for_itself",
        _FORK + "test_children_at_any_moment_never_hang",
    ),
    _row(
        "a tenant sets its own quota and priority by its environment",
        _FAULTS + "test_the_environment_sets_no_quota",
        _DAEMON + "test_a_process_cannot_name_itself_somebody_else",
    ),
    _row("launches of graphs are not counted", _FAULTS + "test_every_launch_counts_and_goes_to_its_own_twin"),
    _row(
        "cooperative launches on several devices are not counted",
        _FAULTS + "test_every_launch_counts_and_goes_to_its_own_twin",
    ),
    _row("cuLaunchKernelEx is not hooked", _FAULTS + "test_every_launch_counts_and_goes_to_its_own_twin"),
    _row(
        "cuGetProcAddress and its second version are not hooked",
        _FAULTS + "test_both_forms_of_cu_get_proc_address_are_ours",
    ),
    _row("kernels of cuLibraryLoadData cannot be launched", _FAULTS + "test_a_kernel_of_a_library_counts"),
    _row("cuMemAllocAsync is not hooked", _MEMORY + "test_what_a_pool_keeps_counts_until_it_is_given_back"),
    _row("there is no memory limit", _MEMORY + "test_nobody_gets_more_than_the_limit"),
    _row(
        "products of grids have 32 bits",
        _FAULTS + "test_a_grid_of_two_to_the_32_blocks_is_the_largest_not_the_smallest",
    ),
    _row("a token is a block, whatever it does", _FAULTS + "test_time_is_charged_not_blocks"),
    _row("blocked launches poll, and any of them may be first", _GATE + "test_a_launch_without_tokens_waits_for_them"),
    _row(
        "a message of a wrong length is taken for one",
        _DAEMON + "test_a_question_that_is_none_is_answered_by_closing",
        _CLIENT + "test_a_wrong_answer_holds_nobody_and_costs_no_descriptor",
    ),
    _row(
        "the server makes its turns only when a client asks",
        _DAEMON + "test_launches_are_held_to_the_limit_and_the_limit_can_change",
    ),
)

# What any library has to do that is found as CUDA 12 and 13 look for functions.
OF_TODAYS_DRIVERS = (
    _row(
        "whoever asks for per-thread default streams gets the function for the legacy one",
        _FAULTS + "test_every_launch_counts_and_goes_to_its_own_twin",
        _RESOLVE + "test_version_and_flags_choose_ours",
    ),
    _row("an old driver without cuGetProcAddress_v2 is not held", _FAULTS + "test_an_old_driver_is_held_by_its_names"),
    _row(
        "a driver that looks itself up finds the library, and neither ends",
        _RESOLVE + "test_a_driver_may_look_itself_up",
    ),
    _row(
        "a graph that is changed keeps the weight it had",
        _GRAPHS + "test_a_changed_graph_weighs_otherwise",
    ),
    _row(
        "launches that are captured are counted or held",
        _GRAPHS + "test_a_capturing_stream_counts_nothing_and_is_never_measured",
        _GRAPHS + "test_nobody_waits_for_tokens_on_a_capturing_stream",
    ),
    _row(
        "measuring breaks a capture",
        _GRAPHS + "test_measurements_of_other_threads_break_no_capture",
        _GRAPHS + "test_a_capturing_stream_counts_nothing_and_is_never_measured",
    ),
    _row("a program is told of memory it cannot have", _SHARED + "test_the_limit_is_all_the_memory_there_is"),
    _row("NVML tells of memory it cannot have", _SHARED + "test_nvml_is_limited_before_the_driver_is_initialised"),
    _row(
        "time slices of others make work dearer for good",
        _WORK + "test_time_slices_of_others_are_hardly_counted",
        _WORK + "test_estimates_follow_lower_times_quickly_and_higher_ones_slowly",
    ),
    _row(
        "a killed client leaves its memory taken",
        _SHARED + "test_what_a_killed_process_held_is_free_again",
        _DAEMON + "test_what_a_killed_client_held_is_free_at_once",
    ),
)

TABLE = MEASURED_ON_THE_SERVER + MEASURED_ON_THE_LIBRARY + READ + OF_TODAYS_DRIVERS
