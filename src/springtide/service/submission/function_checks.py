"""What a request for a job on functions must say, and what it may not: the sentences for what does not go together."""

from __future__ import annotations

from springtide.core.containers import ContainerSettings
from springtide.core.errors import InvalidRequest
from springtide.core.quantities import validate_name
from springtide.service.submission.option_models import JobOptionsIn
from springtide.service.submission.schemas import JobIn

ONLY_DECLARED = (
    "and only a declared job can be cut into stages for functions: write it as st.Task(model=..., dataset=..., "
    "loss=..., optimizer=...), as examples/functions_digits.py does"
)


def check_functions(job: JobIn) -> None:
    """Raise InvalidRequest unless a job on functions has what it needs, and any other nothing that only functions know.

    The request has passed `check_job`.
    """
    _check_layers(job)
    _check_search(job)


def check_no_container(job: JobIn, container: ContainerSettings | None) -> None:
    """Raise InvalidRequest for a job on functions that says what its pods are to be made of: it has none."""
    if job.options.on != "functions" or container is None:
        return
    for name in ("image", "cpu", "memory", "service_account", "environment", "secrets"):
        if getattr(container, name):
            raise InvalidRequest(
                f"container.{name} is for pods, and a job on functions has none: its functions are made of the "
                "platform's image for functions, with as much memory as the plan says; leave it out"
            )


def check_machines(job: JobIn) -> None:
    """Raise InvalidRequest for a job that machines could not run, whatever its `on` says."""
    if job.options.batch_schedule:
        raise InvalidRequest("machines follow no batch schedule yet; there the batch has bounds (--batch 64..256)")
    if job.options.stream:
        raise InvalidRequest("machines train on no stream yet")


def _check_layers(job: JobIn) -> None:
    """What a job on functions needs, and what it cannot have; whether its profile is one."""
    options = job.options
    profile = options.layer_profile
    if profile is not None:
        counts = {len(profile.memory_mb), len(profile.bytes_per_s)}
        counts |= {len(times) for layer in profile.layers for times in (layer.forward_s, layer.backward_s)}
        if len(counts) > 1:
            raise InvalidRequest(
                "options.layer_profile has lists of different lengths: memory_mb, bytes_per_s and the times of every "
                "layer hold one entry for each memory size; take it anew with `springtide profile FILE --layers`"
            )
        if list(profile.memory_mb) != sorted(set(profile.memory_mb)):
            raise InvalidRequest("options.layer_profile.memory_mb must be in ascending order, each size once")
    if options.on != "functions":
        return
    if job.source.kind == "script":
        raise InvalidRequest(f"{job.source.filename} is a plain script, {ONLY_DECLARED}")
    if profile is None:
        raise InvalidRequest(
            "options.on 'functions' needs options.layer_profile: `springtide profile FILE --layers` takes it, and "
            "`springtide run FILE --on functions` takes and sends it"
        )
    if options.batch is not None:
        raise InvalidRequest("a job on functions has one global batch; leave out options.batch")
    if options.share is not None:
        raise InvalidRequest(
            "a job on functions shares no device: its functions are as large as their memory; leave out options.share, "
            "or send on 'cluster'"
        )
    if profile.micro_batch_size > options.global_batch_size:
        raise InvalidRequest(
            f"the profile's micro-batch of {profile.micro_batch_size} samples is more than the global batch of "
            f"{options.global_batch_size}; profile with --micro-batch {options.global_batch_size}"
        )


def _check_search(job: JobIn) -> None:
    """What only a job on functions can be asked, and what of it goes together."""
    options = job.options
    if options.study:
        validate_name(options.study, "options.study")
    if options.on != "functions":
        for field, is_given in (
            ("batch_schedule", bool(options.batch_schedule)),
            ("is_fastest", options.is_fastest),
            ("search", options.search is not None),
            ("stream", bool(options.stream)),
            ("function_workers", options.function_workers is not None),
        ):
            # A quote for machines may compare with functions, where these make sense.
            if is_given:
                raise InvalidRequest(f"options.{field} is for a job on functions; send on 'functions', or leave it out")
        return
    if options.is_fastest and options.deadline_s is not None:
        raise InvalidRequest(
            "options.is_fastest and options.deadline_s are two goals; keep one (fastest within a budget is possible)"
        )
    if options.function_workers is not None and options.function_workers[0] > options.function_workers[1]:
        low, high = options.function_workers
        raise InvalidRequest(f"options.function_workers [{low}, {high}] are no bounds; swap them")
    if options.stream:
        _check_stream(options)
    before = -1
    for phase in options.batch_schedule:
        if phase.from_epoch <= before:
            raise InvalidRequest(
                f"options.batch_schedule names epoch {phase.from_epoch} after epoch {before}; epochs ascend, each once"
            )
        before = phase.from_epoch
    if before >= options.num_epochs:
        raise InvalidRequest(
            f"options.batch_schedule names epoch {before}, and epochs are numbered 0 to {options.num_epochs - 1}; "
            "raise num_epochs or leave the phase out"
        )
    assert options.layer_profile is not None
    micro_batch = options.layer_profile.micro_batch_size
    smallest = min((phase.global_batch_size for phase in options.batch_schedule), default=micro_batch)
    if smallest < micro_batch:
        raise InvalidRequest(
            f"options.batch_schedule has a batch of {smallest} samples, and the profile's micro-batch has "
            f"{micro_batch}; profile with --micro-batch {smallest}"
        )


def _check_stream(options: JobOptionsIn) -> None:
    """A stream has no epochs, and its end is not known."""
    validate_name(options.stream, "options.stream")
    for field, is_given in (
        ("num_epochs", options.num_epochs > 1),
        ("batch_schedule", bool(options.batch_schedule)),
        ("num_samples", options.num_samples is not None),
        ("deadline_s", options.deadline_s is not None),
    ):
        if is_given:
            raise InvalidRequest(
                f"a job on the stream {options.stream!r} uses each sample once, until the stream is closed; leave out "
                f"options.{field}" + (" (a budget is possible)" if field == "deadline_s" else "")
            )
