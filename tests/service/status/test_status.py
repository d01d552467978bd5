"""Records as users are told them: what is not known is None, never a guess."""

from __future__ import annotations

import dataclasses

import pytest
from msgspec.structs import replace

from kits.job_parts import with_fields
from kits.scheduling.menu_jobs import MENU
from kits.service.platform_double import View
from springtide.backends.kubernetes.resources.status import job_conditions
from springtide.backends.kubernetes.resources.status_schema import ConditionType
from springtide.cli.tables.statuses import job_details
from springtide.control.records import (
    JobRecord,
    Lifecycle,
    ReplicaRecord,
    ReplicaState,
    ServiceRecord,
    ServiceState,
    StateReason,
)
from springtide.core.decision import PlannedRun, PromiseCondition
from springtide.core.function_search import BatchPhase
from springtide.core.functions import Bill
from springtide.core.job_parts import GradientNoise, JobBounds
from springtide.core.reasons import GroupChange
from springtide.core.resources import make_node
from springtide.core.shares import make_share
from springtide.core.status.platform import HistoryEntry, JobStatus
from springtide.core.status.search import SearchStatus
from springtide.core.workload import (
    AdaptiveBatch,
    Checkpoint,
    Entrypoint,
    Goal,
    InferenceService,
    JobFolder,
    JobState,
    Packages,
    SecretSet,
    TrainingJob,
)
from springtide.service.status.explain import explain
from springtide.service.status.outlook import JobForecast
from springtide.service.status.status import job_status, platform_status, service_status

CODE = Entrypoint(source_path="/fit.py", object_name="fit")


def record(state=JobState.RUNNING, deadline_s=None, **known):
    job = TrainingJob(
        job_id="fit-1", name="fit", entrypoint=CODE, global_batch_size=10, goal=Goal(deadline_s=deadline_s)
    )
    plain = JobRecord(
        job=job,
        bounds=JobBounds(min_workers=1, max_workers=2),
        lifecycle=Lifecycle(state=state, reason=StateReason(""), submitted_at_s=1.0),
    )
    return with_fields(plain, **known)


def service(**known):
    given = {"state": ServiceState.IDLE, "reason": "nobody has asked yet", "min_replicas": 0, "max_replicas": 2}
    inference = InferenceService(service_id="s", name="s", entrypoint=CODE, slo_s=0.1)
    return ServiceRecord(service=inference, deployed_at_s=1.0, **{**given, **known})


def replica(number=0, state=ReplicaState.READY):
    return ReplicaRecord(replica_id=f"fit-1.{number}", device_id=f"local/{number}", state=state, started_at_s=2.0)


@pytest.mark.parametrize(
    ("known", "eta_s", "slack_s"),
    [
        ({"samples_per_s": 20.0, "step": 60, "total_steps": 100}, 20.0, 30.0),
        ({"samples_per_s": None, "step": 60, "total_steps": 100}, None, None),
        ({"samples_per_s": 20.0, "step": 60, "total_steps": None}, None, None),
        ({"throughput_samples_per_s": {1: 40.0}, "members": ("fit-1.0",), "step": 60, "total_steps": 100}, 10.0, 40.0),
        ({"throughput_samples_per_s": {2: 40.0}, "members": ("fit-1.0",), "step": 60, "total_steps": 100}, None, None),
        ({"samples_per_s": 20.0, "step": 120, "total_steps": 100}, 0.0, 50.0),
        ({"state": JobState.PENDING, "samples_per_s": 20.0, "step": 60, "total_steps": 100}, None, None),
        ({"state": JobState.SUCCEEDED, "ended_at_s": 90.0, "step": 100, "total_steps": 100}, None, 60.0),
        ({"state": JobState.FAILED, "ended_at_s": 90.0, "step": 60, "total_steps": 100}, None, None),
    ],
)
def test_eta_and_slack_rest_on_what_was_measured(known, eta_s, slack_s):
    status = job_status(record(deadline_s=150.0, **known), now_s=100.0)
    assert (status.eta_s, status.slack_s) == (eta_s, slack_s)


def test_progress_is_bounded_and_unknown_without_a_length():
    assert job_status(record(step=5), 2.0).progress_fraction is None
    assert job_status(record(step=12, total_steps=10), 2.0).progress_fraction == 1.0


FOLDER = JobFolder(sha256="0" * 64, path="fit.py", directory="sub", origin="/projects/mine", num_files=3, num_bytes=9)


def test_a_job_says_where_it_works_in_which_copy():
    job = record().job
    local = replace(job.entrypoint, source_path="/state/workloads/fit-1/folder/fit.py", folder=FOLDER)
    status = job_status(replace(record(), job=replace(job, entrypoint=local)), 9.0)
    assert (status.directory, status.folder) == ("/state/workloads/fit-1/folder/sub", "/projects/mine")
    assert "folder        /state/workloads/fit-1/folder/sub, a copy of /projects/mine" in job_details(status, 9.0)
    in_pods = replace(job.entrypoint, source_path="workloads/fit-1/source/fit.py", folder=FOLDER)
    status = job_status(replace(record(), job=replace(job, entrypoint=in_pods)), 9.0)
    assert (status.directory, status.folder) == ("", "/projects/mine")
    assert "in each worker, a copy of /projects/mine" in job_details(status, 9.0)


def test_every_field_of_a_status_is_filled_from_the_record():
    """A field that no part fills would keep its default, whatever the record says; pods are added on Kubernetes."""
    known = adaptive(
        state=JobState.RUNNING,
        deadline_s=150.0,
        started_at_s=2.0,
        step=4,
        total_steps=8,
        equivalent_steps=4.0,
        total_equivalent_steps=8.0,
        global_batch_size=40,
        samples_per_s=20.0,
        throughput_samples_per_s={1: 20.0},
        members=("fit-1.0",),
        replicas=(replica(),),
        noise=GradientNoise(grad_sqr=1.0, grad_var=3.0),
        epoch=1,
        loss=0.5,
        metrics={"a": 1.0},
        checkpoint=Checkpoint(generation=1, step=3, path="c"),
        artifact_path="a",
        generation=2,
        num_resizes=1,
        num_restarts=1,
        num_preemptions=1,
        last_pause_s=0.1,
        pauses_s={"grow": 0.1},
        admitted_at_s=1.0,
        bill=Bill(function_usd=0.5),
    )
    change = GroupChange(code="resize", before=1, after=2, why="a free device")
    lifecycle = replace(
        known.lifecycle,
        reason=StateReason("resized", change),
        alternatives=("--soft",),
        ended_at_s=9.0,
        given_up_at_s=8.0,
    )
    job = replace(
        known.job,
        share=make_share(0.5),
        devices_each=2,
        entrypoint=replace(known.job.entrypoint, source_path="/state/folder/fit.py", folder=FOLDER),
        study="s",
        env={"HF_HOME": "/data"},
        packages=Packages(requirements=("tqdm",), python="/opt/python"),
        secrets=SecretSet(names=("TOKEN",), reference="0" * 32),
        place_reason="on machines",
        stream="clicks",
        menu=MENU,
        batch_schedule=(BatchPhase(from_epoch=0, global_batch_size=8),),
        goal=Goal(deadline_s=150.0, budget_usd=4.0, is_fastest=True),
    )
    known = replace(known, job=job, lifecycle=lifecycle)
    search = SearchStatus(
        goal="", phase="searching", reason="", num_workers=1, memory_mb=512, max_workers=2, sizes_mb=(512,)
    )
    planned = (PlannedRun(start_s=3.0, end_s=20.0, num_devices=1),)
    status = job_status(known, 9.0, planned=planned, usd_per_device_hour=1.0, search=search, enforced="by tests")
    plain = job_status(record(), 9.0)
    same = {name for name in JobStatus.__struct_fields__ if getattr(status, name) == getattr(plain, name)}
    # It has started, so no start is planned, its promise waits for nothing, and it is neither diverged
    # nor stalled; on functions it works in no copy of this machine, no library runs either loop; the rest both have in
    # common.
    assert same == {"job_id", "name", "kind", "state", "submitted_at_s", "min_workers", "max_workers", "num_epochs"} | {
        *("planned_start_at_s", "promised_if", "pods", "is_diverged", "stalled_since_s", "directory", "library"),
        "exact_passes",
    }


def test_a_job_that_has_diverged_shows_no_loss_and_says_so():
    known = record(state=JobState.RUNNING, step=5, total_steps=10, loss=0.5, is_diverged=True)
    status = job_status(known, 2.0)
    assert (status.loss, status.is_diverged) == (None, True)
    assert any("not a finite number" in line for line in explain(known, view_of(known), (), 2.0).evidence)


def test_a_job_that_has_stalled_says_for_how_long_and_what_is_done():
    speeds = {"samples_per_s": 20.0, "throughput_samples_per_s": {1: 20.0}, "members": ("fit-1.0",)}
    known = record(state=JobState.RUNNING, step=5, total_steps=10, progress_at_s=10.0, **speeds)
    assert job_status(known, 100.0).eta_s is not None
    known = replace(known, progress=replace(known.progress, stalled_since_s=10.0))
    assert job_status(known, 100.0).eta_s is None
    known = replace(known, job=replace(known.job, stall_timeout_s=60.0))
    assert job_status(known, 100.0).stalled_since_s == 10.0
    told = explain(known, view_of(known), (), 100.0)
    assert any("no step for 1m30; 1m00 is what it may go without one" in line for line in told.evidence)
    assert "springtide cancel fit-1" in told.next_steps


def test_why_tells_what_exact_results_cost():
    known = record(state=JobState.RUNNING, step=50, metrics={"exact_cost": 1.31})
    known = replace(known, job=replace(known.job, num_virtual_shards=4))
    told = explain(known, view_of(known), (), 2.0).evidence
    assert "exact=4 costs 1.31 of a plain step's processor time" in told


@pytest.mark.parametrize(
    ("obstacle", "metrics", "told"),
    [
        ("batch_norm", {}, "BatchNorm mixes samples: exact=4 runs 4 passes a step"),
        (
            "batch_norm",
            {"exact_cost": 1.31},
            "BatchNorm mixes samples: exact=4 runs 4 passes a step, at 1.31 of a plain step's processor time",
        ),
        # A code of a later version, or of code that takes a worker's place.
        ("of_tomorrow", {}, ""),
        ("", {}, ""),
    ],
)
def test_why_the_parts_of_an_exact_batch_share_no_pass_is_told(obstacle, metrics, told):
    known = record(state=JobState.RUNNING, step=50, metrics=metrics)
    known = replace(
        known,
        job=replace(known.job, num_virtual_shards=4, exact=True),
        progress=replace(known.progress, exact_obstacle=obstacle),
    )
    assert job_status(known, 2.0).exact_passes == told
    assert (told in explain(known, view_of(known), (), 2.0).evidence) is bool(told)
    # One that is not exact has one pass whatever its worker says.
    assert job_status(replace(known, job=replace(known.job, exact=False)), 2.0).exact_passes == ""


def test_a_job_that_is_held_to_one_worker_says_so_while_it_runs():
    told = "lightning 2.7.0 is not tested for resizing in place; tested: 2.6.*"
    known = record(state=JobState.RUNNING, step=5)
    known = replace(known, bounds=replace(known.bounds, fixed_reason=told))
    assert job_status(known, 2.0).reason == f"it runs with one worker: {told}"
    assert explain(known, view_of(known), (), 2.0).reason == job_status(known, 2.0).reason
    limited = replace(known, bounds=replace(known.bounds, fixed_reason="", max_workers=1, limit_reason="no quota"))
    assert job_status(limited, 2.0).reason == "at most 1 of its workers for now: no quota"
    assert not any("springtide scale" in step for step in explain(limited, view_of(limited), (), 2.0).next_steps)
    over = replace(known, lifecycle=replace(known.lifecycle, state=JobState.SUCCEEDED))
    assert told not in job_status(over, 2.0).reason
    assert f"submitted for a range of workers, held to one: {told}" in explain(over, view_of(over), (), 2.0).evidence


def adaptive(**known):
    base = record(**known)
    bounds = AdaptiveBatch(min_size=10, max_size=80, learning_rate="sqrt")
    return replace(base, job=replace(base.job, batch=bounds))


def test_a_job_whose_batch_never_changes_says_nothing_of_noise():
    status = job_status(record(step=5, total_steps=10, noise=GradientNoise(grad_sqr=1.0, grad_var=3.0)), 2.0)
    assert (status.global_batch_size, status.batch_bounds, status.noise_scale) == (10, None, None)


def test_a_batch_that_changes_is_told_with_its_noise_and_its_goodput():
    known = adaptive(
        step=40,
        total_steps=70,
        equivalent_steps=50.0,
        total_equivalent_steps=100.0,
        global_batch_size=40,
        noise=GradientNoise(grad_sqr=1.0, grad_var=3.0),
        samples_per_s=100.0,
        members=("fit-1.0",),
    )
    status = job_status(known, 2.0)
    assert (status.global_batch_size, status.initial_batch_size, status.batch_bounds) == (40, 10, (10, 80))
    assert (status.progress, status.total_progress, status.progress_fraction) == (50.0, 100.0, 0.5)
    # Four times the batch: gain (3 + 1) / (3 / 4 + 1) of a step, so 4 / 7 of four times the samples.
    assert status.noise_scale == 30.0
    assert status.efficiency_fraction == pytest.approx(4 / 7)
    assert status.goodput_samples_per_s == pytest.approx(400 / 7)
    assert status.learning_rate_factor == 2.0
    # 50 steps of 10 samples are left, whatever the steps are made of now.
    assert status.eta_s == 5.0
    told = explain(known, view_of(known), (), 2.0).evidence
    assert "batch 40 of 10..80, 10 at first, learning rate x2" in told
    assert any("noise scale 30 samples" in line and "57 %" in line for line in told)


def test_where_progress_is_the_length_a_large_batch_has_more_samples_left():
    known = adaptive(
        total_steps=70,
        equivalent_steps=50.0,
        total_equivalent_steps=100.0,
        global_batch_size=40,
        noise=GradientNoise(grad_sqr=1.0, grad_var=3.0),
        samples_per_s=100.0,
        members=("fit-1.0",),
    )
    known = replace(known, job=replace(known.job, length_unit="progress"))
    assert job_status(known, 2.0).eta_s == pytest.approx(5.0 * 7 / 4)


def test_a_service_counts_its_replicas_and_names_its_address():
    known = service(replicas=(replica(0), replica(1, ReplicaState.STARTING), replica(2, ReplicaState.STOPPING)))
    status = service_status(known, 4.0, "http://127.0.0.1:1")
    assert (status.num_ready, status.num_starting) == (1, 1)
    assert status.url == "http://127.0.0.1:1/f/s"
    assert status.device_seconds == 6.0


def view_of(*records):
    jobs = {r.workload_id: r for r in records if isinstance(r, JobRecord)}
    services = {r.workload_id: r for r in records if isinstance(r, ServiceRecord)}
    return View(3, 5.0, jobs, services, (make_node("local", 2),), "p")


def test_places_for_jobs_on_functions_are_no_devices_that_workloads_wait_for():
    waiting, held = service(), record(replicas=(replica(0), replica(1)))
    known = view_of(waiting, held)
    known = dataclasses.replace(known, nodes=(*known.nodes, make_node("emulator", 4, kind="function")))
    assert "0 of 2 devices free; held: fit-1 2" in explain(waiting, known, (), 5.0).evidence
    narrow = record(
        job=replace(held.job, num_virtual_shards=8, max_workers=8), bounds=JobBounds(min_workers=1, max_workers=1)
    )
    assert "springtide scale fit-1 1..2" in explain(narrow, known, (), 5.0).next_steps


def test_a_removed_service_is_listed_until_its_last_replica_is_gone():
    draining = service(is_removed=True, state=ServiceState.REMOVED, replicas=(replica(0),))
    assert len(platform_status(view_of(draining), 5.0, 0.0).services) == 1
    assert len(platform_status(view_of(service(is_removed=True)), 5.0, 0.0).services) == 0


def test_devices_name_their_holder():
    first, second = platform_status(view_of(record(replicas=(replica(0),))), 5.0, 0.0).devices
    assert (first.workload_name, first.replica_id) == ("fit", "fit-1.0")
    assert (second.workload_id, second.replica_id) == (None, None)


@pytest.mark.parametrize("state", list(JobState))
def test_why_always_has_a_reason_and_a_next_step(state):
    known = record(state, deadline_s=3.0, step=4, total_steps=8, checkpoint=Checkpoint(generation=1, step=4, path="p"))
    why = explain(known, view_of(known), (), 5.0)
    assert why.reason
    assert why.evidence
    assert why.next_steps
    if not state.is_terminal:
        assert any("passed 2.0 s ago" in sentence for sentence in why.evidence)


def test_why_suggests_only_bounds_that_change_something():
    wide = replace(replica(0), more_devices=("local/1",))
    known = record(replicas=(wide,))
    known = replace(known, job=replace(known.job, devices_each=2))
    two = explain(known, view_of(known), (), 5.0)
    assert not [step for step in two.next_steps if "scale" in step]
    job = replace(record().job, max_workers=4)
    narrow = record(job=job, bounds=JobBounds(min_workers=1, max_workers=1))
    assert "springtide scale fit-1 1..2" in explain(narrow, view_of(narrow), (), 5.0).next_steps
    # No more than its owner asked for.
    asked = record(job=replace(job, max_workers=1), bounds=JobBounds(min_workers=1, max_workers=1))
    assert not any("scale" in step for step in explain(asked, view_of(asked), (), 5.0).next_steps)
    waiting = record(JobState.PENDING)
    lasting = record(JobState.PENDING, job=job, bounds=JobBounds(min_workers=2, max_workers=3))
    assert explain(waiting, view_of(waiting), (), 5.0).next_steps == ("springtide ps", "springtide cancel fit-1")
    assert "springtide scale fit-1 1..2" in explain(lasting, view_of(lasting), (), 5.0).next_steps


def test_why_tells_the_last_resize_and_preemption_and_what_they_were_for():
    history = (
        HistoryEntry(seq=1, at_s=1.0, kind="preempt", text="checkpoints and gives its devices back: 'b' needs them"),
        HistoryEntry(seq=2, at_s=2.0, kind="shrink", text="resized 4 -> 2 workers ('c' needs the devices)"),
        HistoryEntry(seq=3, at_s=3.0, kind="checkpoint", text="checkpoint of step 4 is durable"),
    )
    known = record(JobState.RUNNING, admitted_at_s=0.0, promised_finish_s=9.0)
    evidence = explain(known, view_of(known), history, 5.0).evidence
    assert "last change, 3.0 s ago: resized 4 -> 2 workers ('c' needs the devices)" in evidence
    assert "last time it gave way, 4.0 s ago: checkpoints and gives its devices back: 'b' needs them" in evidence
    assert "its deadline was promised 5.0 s ago" in evidence
    late = replace(known, lifecycle=replace(known.lifecycle, given_up_at_s=2.0))
    told = "its deadline was promised 5.0 s ago; its plan misses it for 3.0 s"
    assert told in explain(late, view_of(late), history, 5.0).evidence
    assert (job_status(late, 5.0).is_promised, job_status(late, 5.0).given_up_at_s) == (True, 2.0)


def test_why_tells_what_is_planned():
    known = record(JobState.PENDING)
    planned = JobForecast(start_at_s=65.0, finish_at_s=125.0, is_planned=True)
    why = explain(known, view_of(known), (), 5.0, planned)
    assert "expected start in 1m00, as planned" in why.evidence
    assert "expected end in 2m00, as planned" in why.evidence
    assert (why.expected_start_at_s, why.expected_finish_at_s) == (65.0, 125.0)
    unknown = explain(known, view_of(known), (), 5.0, JobForecast(unknown=("other",)))
    assert "expected start: not known, because it is not known how long 'other' will take" in unknown.evidence


@pytest.mark.parametrize(
    ("price_s", "told"),
    [
        (1.2345, "a device-second is worth 1.2 s now: so much the last device given saves all jobs together"),
        (0.0, "a device-second is worth nothing more now: by all that is known no job gains by another device"),
    ],
)
def test_why_says_what_a_device_second_is_worth(price_s, told):
    known = record(JobState.RUNNING)
    answer = explain(known, dataclasses.replace(view_of(known), price_s=price_s), (), 5.0)
    assert (answer.device_second_worth_s, told in answer.evidence) == (price_s, True)
    over = record(JobState.SUCCEEDED)
    assert explain(over, dataclasses.replace(view_of(over), price_s=price_s), (), 5.0).device_second_worth_s is None


def test_why_says_what_a_device_second_is_worth_on_each_model():
    known = record(JobState.RUNNING)
    answer = explain(known, dataclasses.replace(view_of(known), prices_s={"A100": 1.2345, "": 0.0}), (), 5.0)
    assert answer.device_second_worth_s is None
    assert (
        "a device-second is worth 1.2 s on A100, 0 s on other devices now: so much the last device given of a model "
        "saves all jobs together"
    ) in answer.evidence


def test_what_a_promise_waits_for_is_told_until_the_deadline_or_the_end_of_the_job():
    known = record(JobState.RUNNING, deadline_s=60.0)
    condition = PromiseCondition(step_s=0.4567, num_workers=2)
    view = dataclasses.replace(view_of(known), conditions={known.workload_id: condition})
    (told,) = platform_status(view, 5.0, 0.0).jobs
    assert told.promised_if == condition
    words = "its deadline is promised once its speed is measured, if a step takes <= 0.456 s on 2 workers"
    assert words in explain(known, view, (), 5.0).evidence
    assert words in job_details(told, now_s=5.0)
    (promised,) = [known for known in job_conditions(told, []) if known.type is ConditionType.PROMISED]
    assert (promised.is_true, promised.message) == (False, words)
    assert job_status(record(JobState.SUCCEEDED), 5.0, condition=condition).promised_if is None
    assert platform_status(view, 61.0, 0.0).jobs[0].promised_if is None
    assert words not in explain(known, view, (), 61.0).evidence
    slow = PromiseCondition(step_s=0.4567, num_workers=2, measured_s=0.4568)
    assert "a step takes 0.457 s on 2 workers, more than 0.456 s" in slow.text()
    assert "no room for 1 worker is free" in PromiseCondition(step_s=0.0, num_workers=1).text()


def test_what_is_promised_and_planned_is_in_the_status():
    known = record(JobState.PENDING, admitted_at_s=1.0, total_steps=8, throughput_samples_per_s={1: 2.0})
    runs = (PlannedRun(start_s=10.0, end_s=20.0, num_devices=1),)
    status = job_status(known, 5.0, planned=runs)
    assert (status.is_promised, status.planned_start_at_s, status.planned_finish_at_s) == (True, 10.0, 20.0)
    guess = record(JobState.PENDING)
    assert job_status(guess, 5.0, planned=runs).planned_finish_at_s is None
    dear = record(JobState.SUCCEEDED, finished_service_s=1800.0)
    assert job_status(dear, 5.0, usd_per_device_hour=2.0).cost_usd == 1.0


def test_a_refused_job_is_told_what_would_be_accepted():
    known = record(JobState.REJECTED, alternatives=("--deadline 8m30",), reason="cannot finish in time")
    assert explain(known, view_of(known), (), 5.0).next_steps == ("--deadline 8m30",)


@pytest.mark.parametrize("state", list(ServiceState))
def test_why_of_a_service(state):
    known = service(state=state, load_at_s=4.0, arrivals_per_s=3.0, latency_p99_s=0.25, idle_s=2.0, crashes_at_s=(1.0,))
    why = explain(known, view_of(known), (), 5.0)
    assert why.next_steps
    assert any("250 ms, the objective is 100 ms" in sentence for sentence in why.evidence)
    assert any("1 crash lately" in sentence for sentence in why.evidence)


def test_why_counts_all_devices_of_the_workers():
    first, second = replace(replica(), more_devices=("local/2",)), replace(replica(1), more_devices=("local/3",))
    known = record(replicas=(first, second))
    known = replace(known, job=replace(known.job, devices_each=2))
    told = explain(known, view_of(known), (), 2.0).evidence
    assert "asks for 1..2 workers of 2 devices each, holds 4 devices" in told
    assert (
        "asks for 1..2 workers, holds 1 device"
        in explain(record(replicas=(replica(),)), view_of(known), (), 2.0).evidence
    )


def test_the_gpu_that_a_worker_found_is_told_wherever_its_device_is():
    place = ReplicaRecord(replica_id="fit-1.0", device_id="n1/0", state=ReplicaState.READY, started_at_s=1.0)
    found = replace(place, device_seen="MIG-7a (NVIDIA H100)")
    others = tuple(replace(found, replica_id=f"fit-1.{number}", device_id=f"n1/{number}") for number in range(1, 10))
    one, many = record(replicas=(found,)), record(replicas=(found, *others))
    assert job_status(one, 2.0).replicas[0].device_seen == "MIG-7a (NVIDIA H100)"

    def lines(of):
        view = View(1, 2.0, {"fit-1": of}, {}, (), "p")
        return [line for line in explain(of, view, (), 2.0).evidence if "GPU" in line]

    assert lines(one) == ["what its workers see as their GPU: fit-1.0 on n1/0: MIG-7a (NVIDIA H100)"]
    assert lines(many)[0].endswith("fit-1.7 on n1/7: MIG-7a (NVIDIA H100); and 2 more")
    assert lines(record(replicas=(place,))) == []


@pytest.mark.parametrize(
    ("timeout_s", "limit"),
    [
        (0.0, "nothing limits how long it waits for that (start_timeout=none)"),
        (90.0, "it has 1m30 for that (start_timeout=1m30)"),
    ],
)
def test_why_names_the_image_that_cannot_be_had_and_what_limits_the_wait(timeout_s, limit):
    held = ReplicaRecord(
        replica_id="w.0",
        device_id="n/0",
        state=ReplicaState.STARTING,
        generation=1,
        started_at_s=1.0,
        held_up_by="ErrImagePull: image registry/x:1: no such host",
        is_stuck=True,
    )
    job, served = record(JobState.STARTING, replicas=(held,)), service(replicas=(held, held))
    known = [
        (replace(job, job=replace(job.job, start_timeout_s=timeout_s)), "w.0 cannot"),
        (replace(served, service=replace(served.service, start_timeout_s=timeout_s)), "w.0 (and 1 more) cannot"),
    ]
    for each, who in known:
        told = f"{who} start: {held.held_up_by}; only a person can mend that, and {limit}"
        assert told in explain(each, view_of(each), (), 5.0).evidence
