"""Moves of jobs from machines to functions: what the rest takes there, and the request that the loop carries out.

The decision is made here and not by the policy: it would have to hold a menu and a price for every job on machines, for
a choice that is made once. It reaches the loop as an event, so that the journal knows it and its reason.
"""

from __future__ import annotations

import math

import msgspec
from msgspec.structs import replace

from springtide.control.quotes.budget import money
from springtide.control.records import JobRecord
from springtide.core.decoding import convert
from springtide.core.errors import Conflict, InvalidRequest
from springtide.core.events import MoveRequested
from springtide.core.functions import FunctionMenu, ModelProfile
from springtide.core.options.rules import NO_FUNCTIONS, ONLY_DECLARED
from springtide.core.status.quote import Quote
from springtide.core.workload import TrainingJob, WorkloadId
from springtide.scheduling.functions.plan_text import above
from springtide.service.lookup import find_job
from springtide.service.ports import PlatformLike
from springtide.service.quotes.function_quote import quote_on_functions
from springtide.service.quotes.quote import MAX_WAIT_S, LiveQuotes
from springtide.service.submission.function_menus import Menus, kept_layers, pipeline_menus, service_of
from springtide.service.submission.option_models import LayerProfileIn

# From the last step on machines to the first function's start: a checkpoint, and a process that converts it.
MOVE_S = 10.0
BY_ITS_OWNER = "its owner asked for it"


class RestQuote(msgspec.Struct, frozen=True, kw_only=True):
    """What the rest of a job would take on functions, and the menu by which it would run there."""

    quote: Quote
    menu: FunctionMenu


class JobMoves:
    """Quotes for the rest of jobs on functions, and requests to move them there. Thread-safe."""

    def __init__(self, platform: PlatformLike, quotes: LiveQuotes) -> None:
        self._platform = platform
        self._quotes = quotes

    def quote(self, id_or_name: str, profile: LayerProfileIn | None = None) -> Quote:
        """When the rest of a job on machines would end on functions, from now on, and what it would cost.

        `profile` is of its layers, if none came with it. Raises NotFound, Conflict, InvalidRequest (it cannot run on
        functions), CapacityError.
        """
        return self.rest_of(find_job(self._platform.view(), id_or_name), profile).quote

    def move(self, id_or_name: str, profile: LayerProfileIn | None = None) -> JobRecord:
        """Move a job to functions, as its owner asks for.

        Raises as `quote`, and InvalidRequest if it would not make its goal there.
        """
        record = find_job(self._platform.view(), id_or_name)
        rest = self.rest_of(record, profile)
        if rest.quote.verdict == "refused":
            raise InvalidRequest(
                f"{record.workload_id} stays on machines, for the rest of it {rest.quote.reason}; give it another goal "
                f"first (springtide change {record.workload_id} --deadline ... --budget ...), or leave it where it is"
            )
        return self.request(record, rest.menu, BY_ITS_OWNER)

    def request(self, record: JobRecord, menu: FunctionMenu, reason: str, *, is_automatic: bool = False) -> JobRecord:
        """Have the loop move a job, and return its record when that is durable. Raises BackendError."""
        event = MoveRequested(
            job_id=record.workload_id,
            menu=menu,
            reason=reason,
            usd_per_device_hour=self._platform.usd_per_device_hour,
            is_automatic=is_automatic,
        )
        seq = self._platform.submit(event)
        if self._platform.view().seq < seq:
            self._platform.wait_change(seq - 1, MAX_WAIT_S)
        return find_job(self._platform.view(), record.workload_id)

    def rest_of(self, record: JobRecord, profile: LayerProfileIn | None = None) -> RestQuote:
        """The quote of what is left of a job. Raises as `quote`."""
        platform = self._platform
        _check_place(record, has_pods=platform.cluster() is not None)
        service = service_of(platform.view())
        if service is None:
            raise InvalidRequest(NO_FUNCTIONS)
        _check_kind(record.job)
        directory = platform.workload_dir(record.workload_id)
        layers = kept_layers(directory) if profile is None else convert(profile.model_dump(), ModelProfile)
        if layers is None:
            raise InvalidRequest(
                f"no profile of its layers came with {record.workload_id}, from which its functions are planned: take "
                f"one with `springtide profile FILE --layers` and name it: springtide move {record.workload_id} --to "
                "functions --profile FILE.layers.json"
            )
        spent_usd = record.attained_service_s(platform.now_s()) / 3600.0 * platform.usd_per_device_hour
        left = _steps_left(record)
        batch, has_store = record.job.global_batch_size, platform.has_parameter_store
        menus = pipeline_menus(layers, service, batch, left, has_parameter_store=has_store)
        with self._quotes.turn(MAX_WAIT_S):
            rest = _rest(record, menus, left, spent_usd)
            found = quote_on_functions(
                platform.snapshot(), platform.make_policy(), rest, menus, policy_name=platform.view().policy
            )
        budget_usd = record.job.goal.budget_usd
        evidence = f"{money(spent_usd)} were spent on machines" + (
            "" if budget_usd is None else f", so {money(budget_usd - spent_usd)} of its budget are left"
        )
        begun = f"it goes on from step {record.progress.step}, {MOVE_S:.0f} s after it has left its machines"
        told = replace(found, evidence=(*found.evidence, begun, evidence), bill=None)
        return RestQuote(quote=told, menu=menus.menu)


def _check_place(record: JobRecord, *, has_pods: bool) -> None:
    job_id = record.workload_id
    if record.is_over or record.lifecycle.outcome is not None:
        raise Conflict(f"{job_id} has ended and moves nowhere any more; submit it anew with --on functions")
    if record.job.is_on_functions:
        raise Conflict(f"{job_id} is on functions already; jobs do not move back to machines")
    if record.is_moving:
        raise Conflict(f"{job_id} is on its way to functions already; watch it: springtide status {job_id} -f")
    if has_pods:
        raise InvalidRequest(
            f"{job_id} runs in pods, whose checkpoints functions cannot take over yet; submit it anew with --on "
            "functions"
        )


def _check_kind(job: TrainingJob) -> None:
    """Raise InvalidRequest for a job that functions cannot run."""
    obstacles = (
        (job.entrypoint.kind != "function", ONLY_DECLARED),
        (job.exact, "it is exact: the sums of functions are equal to those of machines to rounding, not to the bit"),
        (job.batch is not None, "its batch has bounds, which are for machines: on functions a batch is fixed"),
        (job.share is not None or job.devices_each > 1, "its workers hold a share of a device, or several"),
        (
            bool(job.env or job.secrets or job.packages),
            "it has an environment of its own, and a function runs in the platform's image for functions",
        ),
    )
    for is_in_the_way, why in obstacles:
        if is_in_the_way:
            raise InvalidRequest(f"{job.job_id} cannot move to functions: {why}")


def _steps_left(record: JobRecord) -> int | None:
    total = record.progress.total_steps or record.job.total_steps
    return None if total is None else max(1, total - record.progress.step)


def _rest(record: JobRecord, menus: Menus, steps_left: int | None, spent_usd: float) -> TrainingJob:
    """The rest of a job as a job of its own, which begins after the move and has what is left of the budget."""
    job, goal = record.job, record.job.goal
    if goal.budget_usd is not None:
        if goal.budget_usd <= spent_usd:
            raise InvalidRequest(
                f"its budget of {money(goal.budget_usd)} is spent: it has cost {money(spent_usd)} on machines; name "
                f"more first: springtide change {job.job_id} --budget {above(2 * spent_usd)}"
            )
        goal = replace(goal, budget_usd=goal.budget_usd - spent_usd)
    later = tuple(replace(option, start_s=option.start_s + MOVE_S) for option in menus.menu.options)
    return replace(
        job,
        job_id=WorkloadId(f"{job.name}-rest"),
        menu=replace(menus.menu, options=later),
        goal=goal,
        total_steps=steps_left,
        # Its length is what is left; fewer epochs are no offer for a job that has begun.
        num_epochs=1,
        min_workers=1,
        max_workers=1,
        profile_steps_per_s={},
        profiles={},
        belief=None,
        confidence=None,
    )


def makes_goal(quote: Quote) -> bool:
    """Whether the slow end of the time lies before the deadline, and the upper end of the cost within the budget."""
    latest_s, most_usd = quote.finish_s.p90, quote.cost_usd.p90
    if quote.verdict != "accepted" or latest_s is None or most_usd is None:
        return False
    is_in_time = quote.deadline_s is None or latest_s <= quote.deadline_s
    return is_in_time and most_usd <= (math.inf if quote.budget_usd is None else quote.budget_usd)
