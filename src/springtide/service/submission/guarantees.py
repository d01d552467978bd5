"""What a service is promised: a minimum of replicas beside those of others, and room for a new revision."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec.structs import replace

from springtide.control.quotes.minimum import MinimumAnswer, ask_minimum
from springtide.control.records import ServiceRecord
from springtide.control.releases.parts import Release
from springtide.control.releases.steps import can_release, newest_of
from springtide.control.snapshot_views import present_replicas, view_service
from springtide.core.errors import Conflict, InvalidRequest, NoRoomBeside, NotFound
from springtide.core.quantities import format_duration
from springtide.core.shares import TOLERANCE, Share
from springtide.core.workload import InferenceService, ReleaseTerms, WorkloadId
from springtide.service.ports import PlatformLike, ViewLike
from springtide.service.submission.schemas import ReleaseIn
from springtide.serving.canary import parse_watch

# A refusal names at most so many jobs.
NUM_NAMED = 3


def check_guarantee(
    view: ViewLike,
    service_id: WorkloadId,
    minimum: int,
    share: Share | None = None,
    devices_each: int = 1,
    kept_of: Callable[[int], int] = lambda most: most,
) -> None:
    """Raise Conflict if the devices can never hold `minimum` replicas beside the minimums of other services.

    A minimum is a promise to the service's callers: like a deadline that cannot be kept it is refused at once. A
    minimum that was accepted stays, also after devices are lost. Each replica takes a device, or the request of its
    `share` of `devices_each` devices of one node, none of which holds another replica of the service. `kept_of` says
    how many of so many replicas promised deadlines leave now, so that none is offered that is then refused.
    """
    # A place at a function service holds a job's coordinator, never a replica.
    sizes = [len(node.devices) for node in view.nodes if node.functions is None]
    num_devices, most_whole = sum(sizes), sum(size // devices_each for size in sizes)
    known = view.services.get(service_id)
    promised = known.min_replicas if known is not None and not known.is_removed else 0
    is_more = known is not None and _weight(share) > _weight(known.service.share)
    if (minimum <= promised and not is_more) or num_devices == 0:
        return
    others = {
        record.service.name: (record.min_replicas * record.service.devices_each, record.service.share)
        for record in view.services.values()
        if record.workload_id != service_id and not record.is_removed and record.min_replicas > 0
    }
    most = min(minimum, most_whole)
    while most and not _fits([*others.values(), (most * devices_each, share)], num_devices):
        most -= 1
    if minimum <= most:
        return
    offered = min(most, kept_of(most))
    beside = ", as promised deadlines need devices, too" if offered < most else ""
    has = "1 device" if num_devices == 1 else f"{num_devices} devices"
    due = {name: count * _weight(held) for name, (count, held) in others.items()}
    taken = ", ".join(f"{name} {amount:g}" for name, amount in due.items())
    besides = f", of which others are guaranteed {sum(due.values()):g} ({taken})" if due else ""
    of = "a device" if devices_each == 1 else f"each of {devices_each} devices of one node"
    size = "" if share is None else f" of {share.request:g} of {of} each"
    raise Conflict(
        f"{service_id} cannot be guaranteed {minimum} replicas{size}: the platform has {has}{besides}; ask for a "
        f"minimum of at most {offered}{beside}, like a scale of {offered}..{max(1, minimum)}, or start it with more "
        "slots"
    )


def ask_promises(platform: PlatformLike, service: InferenceService, minimum: int) -> MinimumAnswer:
    """How many of `minimum` replicas promised deadlines leave now, and which of these need the devices of the others.

    What the service is guaranteed already counts as left.
    """
    known = platform.view().services.get(service.service_id)
    promised = known.min_replicas if known is not None and not known.is_removed else 0
    if known is None or _weight(service.share) > _weight(known.service.share):
        promised = 0
    if minimum <= promised:
        return MinimumAnswer(most=minimum)
    return ask_minimum(platform.snapshot(), platform.make_policy(), service, minimum, promised)


def check_promises(platform: PlatformLike, service: InferenceService, minimum: int) -> None:
    """Raise Conflict if promised deadlines need the devices of `minimum` replicas.

    Both are promises: the later one is refused. What the policy does not promise gives way to a minimum.
    """
    answer = ask_promises(platform, service, minimum)
    if answer.most >= minimum:
        return
    replicas = "1 replica" if minimum == 1 else f"{minimum} replicas"
    named = ", ".join(f"'{name}'" for name in answer.jobs[:NUM_NAMED])
    named += f" and {len(answer.jobs) - NUM_NAMED} more" if len(answer.jobs) > NUM_NAMED else ""
    later = "" if answer.free_in_s is None else f", ask again in {format_duration(answer.free_in_s)}"
    raise Conflict(
        f"{service.service_id} cannot be guaranteed {replicas}: the deadline promised to {named} needs the devices; "
        f"ask for a minimum of at most {answer.most}, like a scale of {answer.most}..{max(1, minimum)}{later}, or "
        "start the platform with more devices"
    )


def terms_of(release: ReleaseIn) -> ReleaseTerms:
    """The terms that a request asks for. Raises InvalidRequest."""
    rules = parse_watch(release.watch) if release.watch else ()
    if rules and not release.canary:
        raise InvalidRequest(
            f"watch {release.watch!r} judges a canary; say what part of the requests that gets, like --canary 10%"
        )
    return ReleaseTerms(
        canary=release.canary,
        watch=rules,
        watch_for_s=release.watch_for_s,
        stop_first=release.when_full == "stop-first",
    )


def check_room_beside(platform: PlatformLike, known: ServiceRecord | None, service: InferenceService) -> None:
    """Raise NoRoomBeside if the policy has no device for a new revision beside the present one.

    What the policy takes from others for it, by its own rules, counts as had.
    """
    if known is None or not known.is_served or not can_release(known, service):
        return
    if newest_of(known) == replace(service, revision=newest_of(known).revision):
        return
    snapshot = platform.snapshot()
    asked = replace(known, release=Release(service=service, began_at_s=snapshot.now_s))
    view = view_service(asked, snapshot.now_s)
    others = tuple(each for each in snapshot.services if each.service.service_id != known.workload_id)
    plan = platform.make_policy().decide(replace(snapshot, services=(*others, view)))
    planned = plan.allocations.get(known.workload_id)
    num_planned = 0 if planned is None else planned.num_devices // service.devices_each
    if num_planned > present_replicas(asked, snapshot.now_s):
        return
    took_s = sum(known.start_phases_s.values())
    took = f"its last start took {format_duration(took_s)}" if took_s else "how long its start takes is not known"
    raise NoRoomBeside(
        f"no device can be had beside revision {known.service.revision} of {known.service.name!r}: the new one "
        f"could start only in its place. {took}; meanwhile requests wait, at most {known.service.max_queue} of them, "
        "and further ones are answered 429; if it fails, the present one starts again. --when-full stop-first does "
        "that, --when-full borrow waits for a device"
    )


def revision_to_restore(record: ServiceRecord, revision: int | None) -> InferenceService:
    """The revision to roll back to: that number, or else the one that was replaced last. Raises Conflict, NotFound."""
    name, present = record.service.name, record.service.revision
    if revision == present or (revision is None and record.release is not None):
        return record.service
    retired = {each.service.revision: each.service for each in record.past if each.state == "retired"}
    listed = ", ".join(str(number) for number in retired)
    if revision is None:
        if not retired:
            raise Conflict(f"{name!r} has no revision before {present} to roll back to")
        return list(retired.values())[-1]
    if revision in retired:
        return retired[revision]
    known = next((each for each in record.past if each.service.revision == revision), None)
    offer = f"; it can go back to {listed}" if listed else "; it has none to go back to"
    if known is not None:
        raise Conflict(f"revision {revision} of {name!r} never answered: {known.reason}{offer}")
    raise NotFound(f"{name!r} has no revision {revision}{offer}")


def _weight(share: Share | None) -> float:
    """The fraction of a device that a replica is guaranteed."""
    return 1.0 if share is None else share.request


def _fits(minimums: Iterable[tuple[int, Share | None]], num_devices: int) -> bool:
    """Whether so many devices, or parts of them, could be held at once, those of one service on different devices."""
    wanted = list(minimums)
    num_left = num_devices - sum(count for count, share in wanted if share is None)
    shared = [(count, share.request) for count, share in wanted if share is not None]
    if num_left < 0 or any(count > num_left for count, _ in shared):
        return False
    return sum(count * request for count, request in shared) <= num_left + TOLERANCE
