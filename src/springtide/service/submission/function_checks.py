"""Checks of requests for jobs on functions: the layer profile, and what only functions or only machines have."""

from __future__ import annotations

from springtide.core.containers import ContainerSettings
from springtide.core.errors import InvalidRequest
from springtide.core.options.kinds import check_ascending
from springtide.core.options.rules import FILLED_RULES, NO_PYTHON_IN_PODS, ONLY_DECLARED, PLACE_RULES, check_rules
from springtide.core.options.words import JOB_WORDS
from springtide.core.quantities import validate_name
from springtide.service.submission.option_models import JobOptionsIn, ServiceOptionsIn, checked_values
from springtide.service.submission.schemas import ContainerIn, JobIn


def check_functions(job: JobIn) -> None:
    """Raise InvalidRequest for a job on functions without what it needs, or a job with options of another place.

    The request has passed `check_job`.
    """
    _check_layers(job)
    options = job.options
    if options.study:
        validate_name(options.study, "options.study")
    if options.stream:
        validate_name(options.stream, "options.stream")
    if options.function_workers is not None and options.function_workers[0] > options.function_workers[1]:
        low, high = options.function_workers
        raise InvalidRequest(f"options.function_workers [{low}, {high}] are no bounds; swap them")
    check_ascending(options.batch_schedule, JOB_WORDS["rest"].name("batch_schedule"))
    check_rules((*PLACE_RULES, *FILLED_RULES), checked_values(options), JOB_WORDS["rest"])


def check_no_container(job: JobIn, container: ContainerSettings | None) -> None:
    """Raise InvalidRequest for a job on functions whose request describes pods: it has none."""
    if job.options.on != "functions" or container is None:
        return
    for name in ("image", "cpu", "memory", "service_account", "environment", "secrets"):
        if getattr(container, name):
            raise InvalidRequest(
                f"container.{name} is for pods, and a job on functions has none: its functions are made of the "
                "platform's image for functions, with as much memory as the plan says; leave it out"
            )


def check_container(requested: ContainerIn | None, *, has_pods: bool) -> None:
    """Raise InvalidRequest for a request that describes pods where the platform has none."""
    if requested is not None and not has_pods:
        raise InvalidRequest(
            "this platform runs workers as processes of one machine, not as pods: leave out container, or send it to a "
            "platform on Kubernetes"
        )


def check_for_pods(options: JobOptionsIn | ServiceOptionsIn) -> None:
    """Raise InvalidRequest for options that workers in pods cannot have: values of secrets are in the cluster's own."""
    if options.secrets:
        raise InvalidRequest(
            "options.secrets are for a platform of one machine; on Kubernetes make a Secret (kubectl create secret "
            "generic NAME --from-literal=KEY=...) in the workload's namespace and name it in container.secrets; "
            "`springtide run FILE --on k8s --secret KEY` does both"
        )
    if options.python:
        raise InvalidRequest(NO_PYTHON_IN_PODS)


def check_machines(job: JobIn) -> None:
    """Raise InvalidRequest for a job that machines cannot run: a quote for functions is compared with machines, too."""
    if job.options.batch_schedule:
        raise InvalidRequest("machines follow no batch schedule yet; there the batch has bounds (--batch 64..256)")
    if job.options.stream:
        raise InvalidRequest("machines train on no stream yet")


def _check_layers(job: JobIn) -> None:
    """Raise InvalidRequest for an inconsistent layer profile, and for a script on functions."""
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
    if options.on == "functions" and job.source.kind == "script":
        raise InvalidRequest(f"{job.source.filename} is a plain script, and {ONLY_DECLARED}")
