"""Bugs planted in the Python source, each with the test that must find it."""

from __future__ import annotations

from typing import NamedTuple


class PlantedBug(NamedTuple):
    """One text of the source that stands there once, what is put in its place, and the test that must then fail."""

    what: str
    file: str
    old: str
    new: str
    test: str


_SRC = "src/springtide/"
PLANTED_BUGS = (
    PlantedBug(
        "a boundary of the capacity is off by one",
        _SRC + "solvers/reservations/profile.py",
        "if free[index] >= num_devices:",
        "if free[index] >= num_devices - 1:",
        "tests/solvers/reservations/test_free_profile.py::test_earliest_is_the_first_second_from_which_all_are_free",
    ),
    PlantedBug(
        "a fence lets the generation before through",
        _SRC + "storage/fence.py",
        "            if generation < current:\n",
        "            if generation < current - 1:\n",
        "tests/storage/test_fence.py::test_a_lower_generation_is_refused_and_an_equal_or_higher_one_writes",
    ),
    PlantedBug(
        "a durable file is renamed before its content is on disk",
        _SRC + "storage/files.py",
        "            file.flush()\n            os.fsync(file.fileno())\n",
        "            file.flush()\n",
        "tests/storage/test_files.py::test_a_failed_write_leaves_the_old_content_and_no_litter",
    ),
    PlantedBug(
        "a durable directory is renamed before its files are on disk",
        _SRC + "storage/files.py",
        "        for file in temporary.iterdir():\n            fsync_file(file)\n",
        "",
        "tests/storage/test_files.py::test_every_file_of_a_directory_and_itself_are_on_disk_before_it_appears",
    ),
    PlantedBug(
        "the journal does not wait for the disk",
        _SRC + "control/journal/sqlite.py",
        "PRAGMA synchronous=FULL",
        "PRAGMA synchronous=OFF",
        "tests/control/journal/test_sqlite.py::test_the_file_is_private_and_synced_on_every_commit",
    ),
    PlantedBug(
        "a reclaim under way is forgotten",
        _SRC + "scheduling/loans/reclaim.py",
        "    chosen = _under_way(pools, missing)\n",
        "    chosen = _under_way(pools, 0)\n",
        "tests/scheduling/loans/test_reclaim.py::test_what_is_under_way_goes_on_and_counts",
    ),
    PlantedBug(
        "an invocation that is over is charged again",
        _SRC + "backends/functions/coordinator/ledger.py",
        "            self._open.remove(invocation)\n",
        "",
        "tests/backends/functions/coordinator/test_budget.py",
    ),
    PlantedBug(
        "the quota of a share's limit is never written",
        _SRC + "backends/sharing/cpu/control_groups.py",
        "        self._write_quota(self._tenants[tenant], cpus, CALM_PERIOD_S if is_calm else PERIOD_S)\n",
        "        del cpus, is_calm\n",
        "tests/backends/sharing/cpu/test_enforcers.py::test_version_1_writes_quota_period_and_weight",
    ),
    PlantedBug(
        "the sample cursor is off by one",
        _SRC + "runtime/elastic/training_cursor.py",
        "num_seen=self.num_seen + len(batch.ids),",
        "num_seen=self.num_seen + len(batch.ids) - 1,",
        "tests/runtime/elastic/test_training_cursor.py::test_every_sample_of_every_epoch_is_used_once_whatever_the_batches",
    ),
    PlantedBug(
        "a replica is routed to before it is ready",
        _SRC + "service/gateway/routes.py",
        "is_ready=replica.state is ReplicaState.READY,",
        "is_ready=True,",
        "tests/service/gateway/test_routes.py::test_a_replica_that_is_asked_to_stop_is_out_at_once",
    ),
    PlantedBug(
        "the devices of a promise are never released",
        _SRC + "solvers/reservations/reservation_table.py",
        "        entry = self.entries.pop(key)\n        _take(self.profile, entry.runs, -1)\n",
        "        self.entries.pop(key)\n",
        "tests/solvers/reservations/test_reservation_table.py::test_a_job_that_is_taken_out_leaves_its_devices_to_the_next",
    ),
    PlantedBug(
        "a key of idempotency is answered whatever the body",
        _SRC + "service/submission/submission.py",
        "                if known.job.submit_key != submit_key:\n",
        "                if known.job.submit_key.partition('.')[0] != submit_key.partition('.')[0]:\n",
        "tests/service/api/test_application.py::test_a_key_makes_submitting_idempotent",
    ),
    PlantedBug(
        "a checkpoint is loaded without its hash",
        _SRC + "runtime/elastic/checkpoint.py",
        ' or _sha256(path) != entry["sha256"]:',
        ":",
        "tests/runtime/elastic/test_checkpoint.py::test_a_damaged_checkpoint_is_never_loaded_and_the_older_one_is",
    ),
    PlantedBug(
        "a worker's report of an earlier group counts for the one that forms",
        _SRC + "backends/control_channel/reports.py",
        " or report.generation != group.order.generation or group.is_confirmed:\n",
        " or group.is_confirmed:\n",
        "tests/backends/local/test_reports.py::test_a_switch_to_an_earlier_group_says_nothing_of_the_one_that_forms",
    ),
    PlantedBug(
        "a settled workload is not checked again when a drain begins",
        _SRC + "control/incremental.py",
        "        if drains is not self._drains:\n            if drains != self._drains:\n",
        "        if drains is not self._drains:\n            if False:\n",
        "tests/control/test_incremental.py::test_other_drains_have_it_checked_again",
    ),
    PlantedBug(
        "a snapshot is used whatever its checksum says",
        _SRC + "control/journal/archive.py",
        " or _checksum(snapshot, genesis) != checksum:",
        ":",
        "tests/control/journal/test_archive.py::test_a_snapshot_with_a_flipped_bit_is_not_used",
    ),
    PlantedBug(
        "a snapshot forgets in which order services came back",
        _SRC + "control/state_data.py",
        "    state.services.live = {workload_id: state.services[workload_id] for workload_id in data.live_services}\n",
        "",
        "tests/control/test_state_data.py::test_it_comes_back_equal_with_its_indexes",
    ),
    PlantedBug(
        "the policy's memory at a snapshot is looked for in the steps before it",
        _SRC + "control/journal/archive.py",
        "            if snapshot.seq == seq:\n",
        "            if False:\n",
        "tests/control/journal/test_archive.py::test_a_journal_without_its_segments_says_from_where_it_can_be_read",
    ),
    PlantedBug(
        "retention keeps steps however old they are",
        _SRC + "control/journal/archive.py",
        "num_bytes <= keep.steps_bytes and segment.last_s >= now_s - keep.steps_s",
        "num_bytes <= keep.steps_bytes",
        "tests/control/journal/test_archive.py::test_retention_bounds_the_steps_by_time_and_by_size",
    ),
    PlantedBug(
        "a job leaves the state before it is kept apart",
        _SRC + "control/upkeep.py",
        "            self._journal.ended.put(",
        "            list(",
        "tests/control/journal/test_archive.py::test_after_every_interrupted_cut_it_opens_and_has_lost_nothing",
    ),
)
