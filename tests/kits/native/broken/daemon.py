"""Broken builds of the daemon and of what it decides by, and the tests that must see it."""

_CONTROL = "src/springtide/serving/share_control.py"
_DAEMON = "src/springtide/backends/sharing/gpu"
_TENANTS, _CLIENTS, _TICKS = (f"{_DAEMON}/{name}.py" for name in ("tenants", "clients", "ticks"))
_ON_CONTROL = "tests/serving/test_share_control.py::"
_ON_DAEMON = "tests/native/test_gpu_daemon.py::"
_ON_TICKS = "tests/backends/sharing/gpu/test_ticks.py::"

BROKEN = (
    (
        "an iteration is judged when it ends",
        _CONTROL,
        "    if observed.iteration_s > 0.0:\n",
        "    if observed.iteration_s < 0.0:\n",
        _ON_CONTROL + "test_an_iteration_that_takes_too_long_is_an_emergency_within_two_ticks_while_it_runs",
    ),
    (
        "what takes more than four times as long is left out",
        _CONTROL,
        "    row.stretched = min(row.stretched, _MAX_STRETCH)\n",
        "    row.stretched = row.stretched if row.stretched < 4.0 else 1.0\n",
        _ON_CONTROL + "test_two_seconds_of_overload_without_an_idle_tick_are_an_emergency_while_they_last",
    ),
    (
        "training is raised when an iteration stretches",
        _CONTROL,
        "            withheld = max(0.0, min(row.request, row.credit_s / tick_s))\n",
        "            withheld = -0.2 if any(other.stretched > 1.0 for other in wanting) else 0.0\n",
        _ON_CONTROL + "test_a_small_stretch_never_raises_the_training",
    ),
    (
        "training has no request while a service works",
        _CONTROL,
        "        row.due = row.request - withheld\n",
        "        row.due = 0.0 if is_slo_wanting and not row.is_slo else row.request\n",
        _ON_CONTROL + "test_a_training_with_work_is_granted_its_request_in_every_second",
    ),
    (
        "all devices are taken for one",
        _TICKS,
        "by_uuid.setdefault(tenant.uuid, [])",
        "by_uuid.setdefault(bytes(16), [])",
        _ON_TICKS + "test_one_devices_trouble_is_no_other_ones",
    ),
    (
        "one idle service lifts the training",
        _CONTROL,
        "        row.due = row.request - withheld\n",
        "        is_lifted = not row.is_slo and any(other.is_slo and not other.is_wanting for other in rows)\n"
        "        row.due = row.limit if is_lifted else row.request - withheld\n",
        _ON_CONTROL + "test_an_idle_slo_tenant_does_not_lift_the_training_beside_a_busy_one",
    ),
    (
        "a client that has gone ends the daemon",
        _CLIENTS,
        "        except OSError:\n            # The client is gone",
        "        except ValueError:\n            # The client is gone",
        _ON_DAEMON + "test_a_client_that_closes_before_the_answer_hurts_nobody",
    ),
    (
        "anything is taken for a question",
        _CLIENTS,
        "        if magic != MAGIC:\n",
        "        if magic == 1:\n",
        _ON_DAEMON + "test_a_question_that_is_none_is_answered_by_closing",
    ),
    (
        "the dead keep what they had",
        _TENANTS,
        "                self.drop(tenant)\n                is_gone = True\n",
        "                is_gone = True\n",
        _ON_DAEMON + "test_what_a_killed_client_held_is_free_at_once",
    ),
    (
        "everybody is granted the whole device",
        _TICKS,
        "granted_ns = tokens(before_ns, used_ns, rate, ",
        "granted_ns = tokens(before_ns, used_ns, 1.0, ",
        _ON_DAEMON + "test_launches_are_held_to_the_limit_and_the_limit_can_change",
    ),
    (
        "anybody may have anybody's share",
        _TENANTS,
        "            replica_id = self._leaders.get(candidate)\n",
        "            replica_id = next(iter(self._leaders.values()), None)\n",
        _ON_DAEMON + "test_whoever_is_in_nobodys_family_is_unknown_and_that_is_said",
    ),
    (
        "a number is enough to be a leader",
        _TENANTS,
        "                if tenant is not None and is_held(tenant.entry):\n",
        "                if tenant is not None:\n",
        _ON_TICKS + "test_a_leader_whose_number_is_another_ones_now_leads_nobody",
    ),
    (
        "sessions are not looked at",
        _TENANTS,
        "    yield group\n    yield session\n",
        "",
        _ON_DAEMON + "test_children_and_orphans_of_a_replica_belong_to_it",
    ),
    (
        "the next daemon begins anew",
        _TENANTS,
        "        segments = adopt_segments(self._place, tenant.name)\n        if segments is not None:\n",
        "        segments = None\n        if segments is not None:\n",
        _ON_DAEMON + "test_nobody_stops_when_the_daemon_is_killed_and_the_next_one_goes_on_where_it_stopped",
    ),
    (
        "what ran while nobody was held is to be paid for",
        _TICKS,
        "            if was_away or device.was_away:\n",
        "            if False:\n",
        _ON_TICKS + "test_a_late_turn_counts_whole_and_a_daemon_that_stood_still_forgives",
    ),
    (
        "who sleeps is saved up for",
        _TICKS,
        "min(granted_ns + int(rate * elapsed_s * 1e9), used_ns + stock_ns)",
        "granted_ns + int(rate * elapsed_s * 1e9)",
        _ON_TICKS + "test_tokens_grow_by_the_rate_and_stop_at_the_stock",
    ),
    (
        "a mapping of a file that its tenant can cut off",
        "src/springtide/backends/sharing/gpu/segments.py",
        "        data = os.pread(self.usage_descriptor, USAGE.size, 0)\n"
        "        if len(data) < USAGE.size:\n            return None\n",
        "        data = mmap.mmap(self.usage_descriptor, SEGMENT_BYTES)[: USAGE.size]\n",
        _ON_DAEMON + "test_a_tenant_can_hurt_nobody_but_itself",
    ),
)
