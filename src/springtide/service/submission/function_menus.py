"""From a layer profile in a request to a job's menu at the platform's function service."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec

from springtide.core.decoding import convert, decode_json
from springtide.core.errors import InvalidRequest
from springtide.core.function_search import FunctionSearch, batch_at
from springtide.core.functions import FunctionMenu, FunctionService, ModelProfile
from springtide.core.options.rules import NO_FUNCTIONS
from springtide.perf.functions.bill import StepHabits
from springtide.service.ports import ViewLike
from springtide.service.submission.experience import declared_steps, phases_of
from springtide.service.submission.function_searches import is_clearly_better, search_of
from springtide.service.submission.option_models import JobOptionsIn, LayerProfileIn, goal_of
from springtide.service.submission.schemas import JobIn
from springtide.storage.files import make_private, write_durable

# The profile of the layers of a job whose place was left to the platform.
_LAYERS = "layers.json"


class Menus(msgspec.Struct, frozen=True, kw_only=True):
    """A job's menu and what it was made from: the profile at the service's memory sizes, and how steps are billed.

    With `search` the menu is what the search begins with: plans whose workers hold the whole model.
    """

    menu: FunctionMenu
    profile: ModelProfile
    service: FunctionService
    habits: StepHabits
    search: FunctionSearch | None = None


def keep_layers(directory: Path, profile: LayerProfileIn) -> None:
    """Keep the layers of a job on machines, in its directory, for the time when it may move. Raises StorageError."""
    make_private(directory)
    write_durable(directory / _LAYERS, profile.model_dump_json().encode())


def kept_layers(directory: Path) -> ModelProfile | None:
    """The layers that came with a job; None if none did, or if they cannot be read."""
    try:
        return decode_json((directory / _LAYERS).read_bytes(), ModelProfile)
    except (OSError, msgspec.MsgspecError):
        return None


def service_of(view: ViewLike) -> FunctionService | None:
    """The function service that the platform is connected to."""
    return next((node.functions for node in view.nodes if node.functions is not None), None)


def menus_of(
    view: ViewLike, request: JobIn, family: str = "", now_s: float = 0.0, *, has_parameter_store: bool = False
) -> Menus:
    """Plan how the job of a checked request may run at the platform's function service.

    Where a goal asks for a search and the model fits one function, the menu is what is searched among, unless a
    pipeline of stages is predicted to be clearly better for the goal. `family` names the earlier runs that count. With
    a parameter store, data is exchanged through it, and is charged by time instead of requests. Raises InvalidRequest
    where there is no service, where a layer fits no function, or where no plan fits.
    """
    service = service_of(view)
    if service is None:
        raise InvalidRequest(NO_FUNCTIONS)
    given = request.options.layer_profile
    assert given is not None
    taken = convert(given.model_dump(), ModelProfile)
    options = request.options
    search = search_of(view, options, taken, service, family, has_parameter_store=has_parameter_store)
    if search is None:
        return _pipelines(taken, service, options, has_parameter_store)
    # The solvers are imported only where needed: a platform without functions starts without them.
    from springtide.scheduling.functions.goal_search import search_menu

    total_steps = declared_steps(options)
    first = batch_at(phases_of(options), 0, options.global_batch_size)
    menu = search_menu(search, service, first, len(taken.layers), total_steps)
    if _may_be_cut(options):
        with suppress(InvalidRequest):
            cut = _pipelines(taken, service, options, has_parameter_store)
            if is_clearly_better(cut.menu, menu, goal_of(options, now_s), now_s, total_steps):
                return cut
    habits = _habits(service, has_parameter_store)
    return Menus(menu=menu, profile=taken, service=service, habits=habits, search=search)


def _may_be_cut(options: JobOptionsIn) -> bool:
    """Whether a pipeline may replace the search: not if a search was requested, nor for a schedule or a stream."""
    layers = options.layer_profile.layers if options.layer_profile is not None else ()
    has_room = options.function_workers is None and not options.batch_schedule and not options.stream
    return options.search is None and has_room and len(layers) > 1


def _pipelines(
    taken: ModelProfile, service: FunctionService, options: JobOptionsIn, has_parameter_store: bool
) -> Menus:
    # A plan has as many micro-batches as its largest batch needs.
    largest = max((options.global_batch_size, *(phase.global_batch_size for phase in options.batch_schedule)))
    return pipeline_menus(taken, service, largest, declared_steps(options), has_parameter_store=has_parameter_store)


def pipeline_menus(
    taken: ModelProfile,
    service: FunctionService,
    largest_batch: int,
    total_steps: int | None,
    *,
    has_parameter_store: bool = False,
) -> Menus:
    """The pipelines of a profiled model for global batches of up to `largest_batch` samples. Raises InvalidRequest."""
    from springtide.perf.functions.menu import menu_of

    profile, habits = at_service(taken, service), _habits(service, has_parameter_store)
    menu = menu_of(profile, service, largest_batch, total_steps=total_steps, habits=habits)
    return Menus(menu=menu, profile=profile, service=service, habits=habits)


def _habits(service: FunctionService, has_parameter_store: bool) -> StepHabits:
    return StepHabits(
        lifetime_s=service.lifetime_s, start_s=service.cold_start_s, has_parameter_store=has_parameter_store
    )


def at_service(profile: ModelProfile, service: FunctionService) -> ModelProfile:
    """The profile at the service's memory sizes: scaled if it was taken on one core, unchanged if it has these sizes.

    Raises InvalidRequest if it was taken at other sizes, or if a layer fits none.
    """
    from springtide.perf.functions.scale import scaled_profile

    if len(profile.memory_mb) == 1:
        return scaled_profile(profile, service)
    sizes = tuple(size.memory_mb for size in service.sizes)
    if profile.memory_mb != sizes:
        raise InvalidRequest(
            f"the layer profile has times for {_megabytes(profile.memory_mb)}, and functions at {service.name} have "
            f"{_megabytes(sizes)}; take a profile on one core, which is scaled: springtide profile FILE --layers"
        )
    return profile


def _megabytes(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes)) + " MB"
