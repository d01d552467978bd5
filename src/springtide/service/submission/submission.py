"""From a request to an event: checks, ids, idempotency, and the source that is stored before the journal names it."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from msgspec.structs import replace

from springtide.control.quotes.budget import money
from springtide.control.quotes.confidence import SpeedRisk
from springtide.control.records import JobRecord, ServiceRecord
from springtide.control.releases.steps import last_revision, newest_of
from springtide.core.containers import ContainerSettings
from springtide.core.decoding import convert
from springtide.core.errors import Conflict, InvalidRequest
from springtide.core.events import (
    CancelRequested,
    Event,
    JobEdited,
    JobSubmitted,
    PauseRequested,
    ResumeRequested,
    RevisionJudged,
    ScaleRequested,
    ServiceDeployed,
)
from springtide.core.function_search import FunctionSearch, batch_at
from springtide.core.functions import FunctionMenu
from springtide.core.options.jobs import JOB_OPTIONS
from springtide.core.options.option import copied_fields
from springtide.core.options.rules import AUTO_IS_NO_OBJECT, SUBMISSION_RULES, check_rules
from springtide.core.options.services import SERVICE_OPTIONS
from springtide.core.options.words import JOB_WORDS
from springtide.core.quantities import validate_name
from springtide.core.status.quote import Quote
from springtide.core.workload import (
    Entrypoint,
    Goal,
    InferenceService,
    JobState,
    StepProfile,
    TrainingJob,
    WorkloadId,
    shards_for,
)
from springtide.service.lookup import find_job, find_service, find_workload, job_of_id, service_of_id
from springtide.service.ports import PlatformLike, ViewLike
from springtide.service.submission import sources
from springtide.service.submission.experience import Experience, experience_of, phases_of
from springtide.service.submission.folders import FolderSweep, drop_folders, folder_of, shared_folder
from springtide.service.submission.function_checks import check_container, check_functions, check_no_container
from springtide.service.submission.function_menus import keep_layers, menus_of
from springtide.service.submission.guarantees import (
    ask_promises,
    check_guarantee,
    check_promises,
    check_room_beside,
    revision_to_restore,
    terms_of,
)
from springtide.service.submission.job_edits import check_goal
from springtide.service.submission.option_models import (
    JobOptionsIn,
    RequestModel,
    checked_values,
    copied,
    goal_of,
    packages_of,
)
from springtide.service.submission.request_digest import digest, is_of_request, request_digest
from springtide.service.submission.schemas import (
    JobIn,
    RollbackIn,
    ScaleIn,
    ServiceIn,
    adaptive_batch,
    check_job,
    check_service,
    placed,
)
from springtide.service.submission.shares import check_devices, check_parts, check_share, share_of
from springtide.service.submission.unfinished import check_unfinished
from springtide.storage.secrets import are_kept, keep_secrets

MAX_KEY_CHARS = 255
_SETTLE_S = 2.0


class SubmissionService:
    """Takes users' requests: checks them against the platform's state, submits events, returns once these are durable.

    Submissions under one idempotency key are done one after another, so that only one of them can be the first. Others
    run in parallel, so that one turn of the control loop takes in many.
    """

    def __init__(self, platform: PlatformLike, ask_quote: Callable[[JobIn], Quote] | None = None) -> None:
        """`ask_quote` finds the place of a job whose request leaves it open; without it such requests are refused."""
        self._platform = platform
        self._ask_quote = ask_quote
        self._condition = threading.Condition()
        # Keys in use, and ids that are drawn and not journaled yet: no other request may use them meanwhile.
        self._reserved: set[str] = set()
        self._coming: dict[WorkloadId, ContainerSettings | None] = {}
        self._sweep = FolderSweep(platform)

    def submit_job(
        self, request: JobIn, key: str | None, container: ContainerSettings | None = None
    ) -> tuple[JobRecord, bool]:
        """Submit a job. Returns its record and whether it is new; False: the key was used for it before.

        `container` describes its pods, where the platform has any.

        Raises InvalidRequest, Conflict (the key belongs to another request), BackendError, StorageError.
        """
        check_job(request)
        check_functions(request)
        check_no_container(request, container)
        check_container(request.container, has_pods=container is not None)
        check_rules(SUBMISSION_RULES, checked_values(request.options), JOB_WORDS["rest"])
        sources.check_source(request.source)
        source_store = self._platform.source_store
        import_root = source_store.import_root(request.source.import_root)
        sent = folder_of(request, source_store.contents)
        submit_key = _submit_key(key, request)
        with (
            self._exclusive(f"key {submit_key.partition('.')[0]}" if submit_key else ""),
            self._job_id_drawing(container) as draw_job_id,
        ):
            view = self._platform.view()
            known = _find_key(view, submit_key) if submit_key else None
            if known is not None:
                if not is_of_request(known.job.submit_key.partition(".")[2], request):
                    raise Conflict(
                        f"this Idempotency-Key was used for {known.workload_id} with another body; use a new key"
                    )
                return known, False
            layers = request.options.layer_profile
            request, place_reason = self._placed(request)
            # Planned before anything is written: a model with a layer that fits no function is refused here.
            menu = search = None
            experience = experience_of(view, request, source_store.holds)
            check_devices(view, request, has_pods=container is not None)
            if request.options.on == "functions":
                menus = menus_of(
                    view,
                    request,
                    experience.family,
                    self._platform.now_s(),
                    has_parameter_store=self._platform.has_parameter_store,
                )
                menu, search = menus.menu, menus.search
            job_id = draw_job_id(request.name, submit_key)
            place = sources.job_place(job_id, request.source)
            if not source_store.may_write(place, request.source):
                # An earlier submission whose client gave up may still be running: its source must not change.
                raise Conflict(f"this Idempotency-Key was used for {job_id} with another source; use a new key")
            source_store.write(place, request.source)
            address, folder = source_store.address(place), None
            if sent is not None:
                self._sweep.begin()
                folder = sent[0]
                address = source_store.write_folder(job_id, *sent, address)
            entrypoint = sources.entrypoint_of(request.source, address, import_root, folder)
            job = make_job(request, job_id, entrypoint, self._platform.now_s(), experience, submit_key, menu, search)
            secrets_kept = keep_secrets(self._platform.workload_dir(job_id), request.options.secrets)
            job = replace(job, container=container, place_reason=place_reason, secrets=secrets_kept)
            job = replace(job, packages=packages_of(request.options))
            if layers is not None and place_reason and menu is None:
                keep_layers(self._platform.workload_dir(job_id), layers)
            record = self._apply(JobSubmitted(job=job)).jobs[job_id]
        if record.job.submit_key != submit_key:
            raise Conflict(f"this Idempotency-Key was used for {job_id} with another body; use a new key")
        return record, True

    def _placed(self, request: JobIn) -> tuple[JobIn, str]:
        """The request with a place, and why it is that one if the platform chose it. Raises InvalidRequest."""
        if request.options.on != "auto":
            return request, ""
        if self._ask_quote is None:
            raise InvalidRequest(AUTO_IS_NO_OBJECT)
        quote = self._ask_quote(request)
        return placed(request, "functions" if quote.on else "cluster"), quote.place_reason

    def deploy_service(
        self, name: str, request: ServiceIn, container: ContainerSettings | None = None
    ) -> ServiceRecord:
        """Deploy a service, or a new revision of it. The same request again changes nothing.

        `container` describes its pods, where the platform has any.

        Raises InvalidRequest, Conflict (a job has that id), BackendError, StorageError.
        """
        validate_name(name, "the service's name")
        check_service(request)
        terms = terms_of(request.release)
        check_container(request.container, has_pods=container is not None)
        sources.check_source(request.source)
        import_root = self._platform.source_store.import_root(request.source.import_root)
        service_id = WorkloadId(name)
        # Guarantees are counted over all services, so deployments are done one after another.
        with self._exclusive("services"):
            view = self._platform.view()
            if job_of_id(view, service_id) is not None:
                raise Conflict(f"{name!r} is the id of a job; choose another name for the service")
            old = service_of_id(view, service_id)
            if old is None or old.is_removed:
                check_unfinished(view, container, self._platform.max_unfinished)
            share = share_of(request.options.share)
            check_share(view, share, 1, name)
            check_parts(view, name, request.options.devices_each, old, has_pods=container is not None)
            draft = InferenceService(
                service_id=service_id,
                name=name,
                entrypoint=Entrypoint(source_path=""),
                share=share,
                devices_each=request.options.devices_each,
            )
            self._check_guarantee(draft, request.options.min_replicas)
            source_store, place = self._platform.source_store, sources.service_place(service_id, request.source)
            options, address = request.options, source_store.address(place)
            self._sweep.begin()
            folder = shared_folder(request, service_id, old, source_store, address)
            service = InferenceService(
                service_id=service_id,
                name=name,
                entrypoint=sources.entrypoint_of(request.source, address, import_root, folder),
                # The controller raises the revision if anything else has changed, of one that is in its state.
                revision=1 if old is None else last_revision(old) + (1 if old.is_removed else 0),
                share=share,
                container=container,
                secrets=keep_secrets(
                    self._platform.workload_dir(service_id),
                    options.secrets,
                    None if old is None else newest_of(old).secrets,
                ),
                packages=packages_of(options),
                **copied(options, SERVICE_OPTIONS, "workload"),
            )
            check_promises(self._platform, service, service.min_replicas)
            if request.release.when_full == "refuse":
                check_room_beside(self._platform, view.services.get(service_id), service)
            source_store.write(place, request.source)
            first_replica = 0 if old is None else old.next_replica
            deployed = ServiceDeployed(service=service, first_replica=first_replica, terms=terms)
            record = self._apply(deployed).services[service_id]
            drop_folders(record, source_store)
        return record

    def roll_back(self, name: str, request: RollbackIn) -> ServiceRecord:
        """Release an earlier revision of a service again, as a new one is. Raises NotFound, Conflict, InvalidRequest.

        Rolled back to the present one, a newer one that is being released is given up.
        """
        terms = terms_of(request.release)
        with self._exclusive("services"):
            record = find_service(self._platform.view(), name)
            wanted = revision_to_restore(record, request.revision)
            if wanted.revision == record.service.revision:
                if record.release is None:
                    return record
                event: Event = RevisionJudged(
                    service_id=record.workload_id,
                    revision=record.release.revision,
                    is_good=False,
                    reason="its owner rolled it back",
                )
                return self._apply(event).services[record.workload_id]
            held = wanted.secrets
            if held is not None and not are_kept(self._platform.workload_dir(record.workload_id), held):
                raise Conflict(
                    f"the values of the secrets of revision {wanted.revision} were removed when it was replaced; "
                    "deploy it again with them"
                )
            self._check_guarantee(wanted, wanted.min_replicas)
            if request.release.when_full == "refuse":
                check_room_beside(self._platform, record, wanted)
            event = ServiceDeployed(service=wanted, terms=terms, is_rollback=True)
            return self._apply(event).services[record.workload_id]

    def remove_service(self, name: str) -> ServiceRecord:
        """Drain a service and remove it. Raises NotFound."""
        service_id = find_service(self._platform.view(), name).workload_id
        record = self._apply(CancelRequested(workload_id=service_id)).services[service_id]
        drop_folders(record, self._platform.source_store)
        return record

    def cancel_job(self, id_or_name: str) -> JobRecord:
        """End a job; cancelling a cancelled one changes nothing. Raises NotFound, Conflict."""
        record = find_job(self._platform.view(), id_or_name)
        if JobState.CANCELLED in (record.lifecycle.state, record.lifecycle.outcome):
            return record
        _refuse_ended(record, "cancelled")
        return self._apply(CancelRequested(workload_id=record.workload_id)).jobs[record.workload_id]

    def pause_job(self, id_or_name: str) -> JobRecord:
        """Checkpoint a job and release its devices; a paused one stays as it is. Raises NotFound, Conflict."""
        record = find_job(self._platform.view(), id_or_name)
        _refuse_ended(record, "paused")
        if record.bounds.is_paused:
            return record
        return self._apply(PauseRequested(job_id=record.workload_id)).jobs[record.workload_id]

    def resume_job(self, id_or_name: str, budget_usd: float | None = None) -> JobRecord:
        """Resume a paused job, with a new budget where one is given. Raises NotFound, Conflict, InvalidRequest."""
        record = find_job(self._platform.view(), id_or_name)
        _refuse_ended(record, "resumed")
        if not record.bounds.is_paused:
            raise Conflict(
                f"{record.workload_id} is not paused (it is {record.lifecycle.state}); there is nothing to resume"
            )
        spent_usd = record.spent.bill.total_usd
        if budget_usd is not None and budget_usd <= spent_usd:
            raise InvalidRequest(
                f"{record.workload_id} has cost {money(spent_usd)} already, and a budget counts from its submission; "
                f"name more, like --budget {max(0.01, 2 * spent_usd):.2g}"
            )
        event = ResumeRequested(job_id=record.workload_id, budget_usd=budget_usd)
        return self._apply(event).jobs[record.workload_id]

    def edit_job(
        self,
        id_or_name: str,
        *,
        goal: Goal | None = None,
        max_restarts: int | None = None,
        accepted: Mapping[str, str] | None = None,
    ) -> JobRecord:
        """Give a job that has not ended another goal, or another budget of restarts; what is left out stays.

        `accepted` are the digests of those parts of its Kubernetes object that are in force after the change.

        Raises NotFound, Conflict, InvalidRequest (with the reason and what would be accepted).
        """
        record = find_job(self._platform.view(), id_or_name)
        _refuse_ended(record, "changed")
        wanted = None if goal == record.job.goal else goal
        retries = None if max_restarts == record.job.max_restarts else max_restarts
        promised_s = None if wanted is None else check_goal(self._platform, record, wanted)
        known = {} if record.job.container is None else record.job.container.accepted
        if wanted is None and retries is None and (accepted is None or dict(accepted) == known):
            return record
        event = JobEdited(
            job_id=record.workload_id,
            goal=wanted,
            max_restarts=retries,
            promised_finish_s=promised_s,
            accepted=dict(accepted or {}),
        )
        return self._apply(event).jobs[record.workload_id]

    def change_job(self, id_or_name: str, wish: RequestModel) -> JobRecord:
        """Change what `wish`, a JobChangeIn, names of a job that has not ended.

        Raises NotFound, Conflict, InvalidRequest.
        """
        named = wish.model_dump(include=wish.model_fields_set)
        goal = find_job(self._platform.view(), id_or_name).job.goal
        if "deadline_s" in named:
            after_s = named["deadline_s"]
            goal = replace(goal, deadline_s=None if after_s is None else self._platform.now_s() + after_s)
        changes = {name: named[name] for name in copied_fields(JOB_OPTIONS, "goal") if name in named}
        return self.edit_job(id_or_name, goal=replace(goal, **changes), max_restarts=named.get("max_restarts"))

    def scale(self, id_or_name: str, bounds: ScaleIn) -> JobRecord | ServiceRecord:
        """Set new bounds on workers or replicas. Raises NotFound, Conflict, InvalidRequest."""
        record = find_workload(self._platform.view(), id_or_name)
        if bounds.minimum > bounds.maximum:
            raise InvalidRequest(
                f"minimum {bounds.minimum} is above maximum {bounds.maximum}; send minimum <= maximum, like 1 and 4"
            )
        if isinstance(record, JobRecord):
            _refuse_ended(record, "scaled")
            if bounds.minimum < 1:
                raise Conflict(
                    f"a job needs at least 1 worker; `springtide pause {record.workload_id}` gives all of them back"
                )
            if bounds.maximum > record.job.num_virtual_shards:
                raise Conflict(
                    f"{record.workload_id} was submitted for at most {record.job.num_virtual_shards} workers; use "
                    f"maximum <= {record.job.num_virtual_shards}"
                )
            if record.job.is_on_functions:
                raise Conflict(
                    f"{record.workload_id} runs on functions: how many follows from its plan; give it a deadline or a "
                    "budget to have another one chosen"
                )
            if record.bounds.fixed_reason:
                raise Conflict(f"{record.workload_id} has one worker until it ends: {record.bounds.fixed_reason}")
            if not record.job.elastic:
                raise Conflict(f"{record.workload_id} is a script, whose number of workers is fixed; submit it anew")
        else:
            if record.is_removed:
                find_service(self._platform.view(), id_or_name)
            self._check_guarantee(record.service, bounds.minimum)
            check_promises(self._platform, record.service, bounds.minimum)
        workload_id = record.workload_id
        view = self._apply(ScaleRequested(workload_id=workload_id, minimum=bounds.minimum, maximum=bounds.maximum))
        return view.services[workload_id] if isinstance(record, ServiceRecord) else view.jobs[workload_id]

    def _check_guarantee(self, service: InferenceService, minimum: int) -> None:
        check_guarantee(
            self._platform.view(),
            service.service_id,
            minimum,
            service.share,
            service.devices_each,
            lambda most: ask_promises(self._platform, service, most).most,
        )

    def _apply(self, event: Event) -> ViewLike:
        """Submit the event, wait until it is durable, and return the platform's state with it."""
        seq = self._platform.submit(event)
        if self._platform.view().seq < seq:
            self._platform.wait_change(seq - 1, _SETTLE_S)
        return self._platform.view()

    @contextmanager
    def _exclusive(self, what: str) -> Iterator[None]:
        """Wait until no other request holds `what`, and hold it; an empty name is not held."""
        if not what:
            yield
            return
        with self._condition:
            self._condition.wait_for(lambda: what not in self._reserved)
            self._reserved.add(what)
        try:
            yield
        finally:
            self._release(what)

    @contextmanager
    def _job_id_drawing(self, container: ContainerSettings | None) -> Iterator[Callable[[str, str], WorkloadId]]:
        """A function that draws a job's id and reserves it until the job is journaled.

        The function raises TooManyUnfinished if the job's owner may have no further one now.
        """
        drawn: list[WorkloadId] = []

        def draw(name: str, submit_key: str) -> WorkloadId:
            with self._condition:
                # Ids that were released meanwhile are in the newest view.
                view = self._platform.view()
                coming = [held for job_id, held in self._coming.items() if job_id not in view.jobs]
                check_unfinished(view, container, self._platform.max_unfinished, coming)
                drawn.append(self._draw_job_id(view, name, submit_key))
                self._reserved.add(drawn[0])
                self._coming[drawn[0]] = container
            return drawn[0]

        try:
            yield draw
        finally:
            for job_id in drawn:
                self._coming.pop(job_id, None)
                self._release(job_id)

    def _release(self, what: str) -> None:
        with self._condition:
            self._reserved.discard(what)
            self._condition.notify_all()

    def _draw_job_id(self, view: ViewLike, name: str, submit_key: str) -> WorkloadId:
        """Draw `<name>-<4 to 6 hex digits>`, from the key where there is one; again, and longer, while it is taken."""
        key = submit_key.partition(".")[0]
        draw = 0
        while True:
            digits = digest(f"{key} {draw}") if key else secrets.token_hex(16)
            job_id = WorkloadId(f"{name}-{digits[: min(6, 4 + draw)]}")
            is_taken = job_id in self._reserved or service_of_id(view, job_id) is not None
            is_taken = is_taken or job_of_id(view, job_id) is not None
            # Without a key, a source that is stored under that id belongs to another client's attempt.
            if not is_taken and (key or not self._platform.source_store.has(job_id)):
                return job_id
            draw += 1


def make_job(
    request: JobIn,
    job_id: WorkloadId,
    entrypoint: Entrypoint,
    now_s: float,
    experience: Experience,
    submit_key: str = "",
    menu: FunctionMenu | None = None,
    search: FunctionSearch | None = None,
) -> TrainingJob:
    """The job that a request describes, with what is known of its length and speed.

    `menu` is set for a job on functions, `search` where its workers and memory are searched for there.
    """
    options = request.options
    # The control plane sees one replica of a job on functions, its coordinator.
    least, most = (options.min_workers, options.max_workers) if menu is None else (1, 1)
    batch, phases = adaptive_batch(options), phases_of(options)
    job = TrainingJob(
        job_id=job_id,
        name=request.name,
        entrypoint=entrypoint,
        global_batch_size=batch_at(phases, 0, options.global_batch_size),
        min_workers=least,
        max_workers=most,
        num_virtual_shards=options.num_virtual_shards or shards_for(options.max_workers, batch),
        exact=options.num_virtual_shards is not None,
        # A script learns its world size at the start and cannot change it.
        elastic=not entrypoint.is_plain_script,
        goal=goal_of(options, now_s),
        submit_key=submit_key,
        total_steps=experience.total_steps,
        profile_steps_per_s=dict(experience.steps_per_s) if menu is None else {},
        belief=experience.belief if menu is None else None,
        batch=batch,
        family=experience.family,
        step_profile=_step_profile(options),
        menu=menu,
        search=search,
        batch_schedule=phases,
        num_samples=options.num_samples if menu is not None else None,
        share=share_of(options.share) if menu is None else None,
        **copied(options, JOB_OPTIONS, "workload"),
    )
    level = job.confidence
    return job if level is None or menu is not None else SpeedRisk(experience.outcomes).at_level(job, level)


def _step_profile(options: JobOptionsIn) -> StepProfile | None:
    if options.step_profile is None:
        return None
    return convert(options.step_profile.model_dump(), StepProfile)


def _refuse_ended(record: JobRecord, verb: str) -> None:
    state = record.lifecycle.state if record.lifecycle.state.is_terminal else record.lifecycle.outcome
    if state is not None:
        raise Conflict(
            f"{record.workload_id} has ended ({state}) and cannot be {verb} any more; to run it again, submit it anew"
        )


def _submit_key(key: str | None, request: JobIn) -> str:
    """The digests of the key and the request; empty without a key. Raises InvalidRequest for a key of another form."""
    if key is None:
        return ""
    if not 1 <= len(key) <= MAX_KEY_CHARS or not key.isascii() or not key.isprintable():
        raise InvalidRequest(f"the Idempotency-Key must be 1 to {MAX_KEY_CHARS} printable characters; a UUID is good")
    return f"{digest(key)}.{request_digest(request)}"


def _find_key(view: ViewLike, submit_key: str) -> JobRecord | None:
    key = submit_key.partition(".")[0]
    found = (record for record in view.jobs.values() if record.job.submit_key.startswith(f"{key}."))
    return next(found, None) or view.ended.with_key(key)
