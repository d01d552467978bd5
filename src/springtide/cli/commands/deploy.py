"""`springtide deploy`: deploy an inference class and show how to call it."""

from __future__ import annotations

import json
import os
import shlex
import time
from functools import partial
from pathlib import Path
from typing import Any

import click

from springtide.cli.jobs.flags import given_keywords, option_flags
from springtide.cli.jobs.in_cluster import K8S, check_cluster_options, cluster_options, deploy_in_cluster
from springtide.cli.jobs.job_options import folder_options, folder_wish, imported
from springtide.cli.jobs.releases import (
    refuse_release,
    release_asked,
    release_options,
    released_problem,
    wait_released,
    with_room_asked,
)
from springtide.cli.jobs.variables import ask_secrets
from springtide.cli.loading import find_service, split_target
from springtide.cli.session import Session, common_options
from springtide.cli.tables.shares import held_line
from springtide.client.applications import typed_command
from springtide.client.folders.choice import FolderWish
from springtide.client.functions import ServeFunction, deploy_service
from springtide.client.llm.declaration import is_language_model, llm
from springtide.client.shares import devices_asked
from springtide.client.sources.source import name_from
from springtide.core.errors import InvalidRequest
from springtide.core.options.services import SERVICE_OPTIONS
from springtide.core.quantities import format_duration
from springtide.core.status.admission import AdmissionStatus
from springtide.core.status.platform import ServiceStatus
from springtide.core.workload import DEFAULT_GRACE_S
from springtide.serving.applications import WebService
from springtide.serving.llm_settings import ENGINES, is_gguf

_POLL_S = 0.1
# A device that is taken from a job is free after the job's grace, so waiting much longer would not help.
_FREE_TIMEOUT_S = 2 * DEFAULT_GRACE_S
_NONE_YET = " (none is ready yet: its devices are not free; `springtide why` says what holds them)"
_EXAMPLES: dict[str, Any] = {"string": "good", "number": 0.5, "integer": 1, "boolean": True}


@click.command()
@click.argument("target", metavar="[FILE[:CLASS]]", default="")
@click.option(
    "--command",
    "typed",
    metavar="TEXT",
    help='Instead of a file: a command that listens on a port, "server --port {port}", in this folder.',
)
@click.option("--ready", metavar="PATH", help="With --command: the path that answers 2xx when it can take requests.")
@click.option("--llm", "model", metavar="PATH|ID", help="Serve a language model by OpenAI's API instead of a file.")
@click.option(
    "--engine",
    type=click.Choice(ENGINES),
    help="With --llm: what runs it; without it llama.cpp for a file in .gguf, else transformers.",
)
@click.option("--context", type=click.IntRange(min=1), help="With --llm: tokens of a prompt and its answer together.")
@option_flags(SERVICE_OPTIONS, "deploy")
@release_options
@folder_options
@click.option("--on", "place", type=click.Choice([K8S]), help="As an object of a Kubernetes cluster.")
@cluster_options
@common_options
@click.pass_obj
def deploy(session: Session, /, target: str, **options: Any) -> None:
    """Serve FILE's class, a command, or a language model. Of a service that answers it is a new revision.

    That starts beside the present one and gets requests once it is ready; then the present one answers what it has and
    stops. If the new one crashes three times or is not ready in time it is given up, and the present one goes on: exit
    code 1. See `springtide versions` and `springtide rollback`.

    With an SLO, a request that would miss it is answered 429 with Retry-After at once, and not let in. A request says
    what it can wait for in X-Springtide-Timeout (300ms), and in X-Springtide-Priority (high, normal, low) how
    early it is refused.
    """
    folder = folder_wish(options)
    served = _served(target, options, folder)
    check_cluster_options(options, options["place"])
    release = release_asked(options)
    given = given_keywords(SERVICE_OPTIONS, "deploy", options)
    if "share" in given and "gpu" not in given and devices_asked(served.options.values["gpu"]) == 1:
        # The flag replaces the file's share, also if that is written as `gpu`.
        given["gpu"] = 1.0
    asked = served.options.override(given)
    if secrets := ask_secrets(asked.values["secrets"], os.environ, may_ask=session.may_ask):
        asked = asked.override({"secrets": secrets})
    if options["place"] == K8S:
        refuse_release(options)
        where, image = options["namespace"] or "", options["image"] or ""
        deploy_in_cluster(session, served, asked, namespace=where, image=image, folder=folder)
        return
    send = partial(deploy_service, served.source(), asked, served.name, session.client, on_progress=session.note)
    handle = with_room_asked(session, release, lambda how: send(folder=folder, release=how))
    assert handle.revision is not None
    calls_so_far = session.client.service(handle.name).admission
    service = wait_released(session, handle.name, handle.revision)
    service = _wait_deployed(session, handle.name) if service is None else service
    problem = released_problem(service, handle.revision)
    if service.state == "FAILED":
        problem = f"{service.name} FAILED: {service.reason}"
    if problem:
        session.answer(service, problem, f"what it wrote: springtide logs {service.name}")
        raise click.exceptions.Exit(1)
    if out_of_reach := slo_problem(service, calls_so_far):
        session.note(out_of_reach)
    session.answer(
        service,
        _deployed_text(service, served, session.state_dir / "token"),
        f"watch it: springtide status {service.name}",
    )


def _served(target: str, options: dict[str, Any], folder: FolderWish) -> ServeFunction[Any]:
    """What is to be served: the service of a file, a command, or a language model. Raises InvalidRequest."""
    command, ready, model = options["typed"], options["ready"], options["model"]
    engine, context = options["engine"], options["context"]
    if sum((bool(target), command is not None, model is not None)) != 1:
        raise InvalidRequest("name one of three: a Python file, a command with --command, a language model with --llm")
    if ready is not None and command is None:
        raise InvalidRequest('--ready is for --command; in a file write st.asgi(ready="/path") or st.process(...)')
    if (engine is not None or context is not None) and model is None:
        raise InvalidRequest("--engine and --context go with --llm; a file says them in st.llm(...)")
    if command is not None:
        return typed_command(command, ready=ready or "")
    if model is not None:
        path = Path(model).resolve() if Path(model).exists() else Path(model)
        name = options["name"] or name_from(path.stem if is_gguf(model) else path.name)
        return llm(name, model=model, engine=engine, context=context)
    path, object_name = split_target(target)
    return find_service(imported(path, folder), path, object_name)


def _wait_deployed(session: Session, name: str) -> ServiceStatus:
    """Wait until a replica of the newest revision is ready, the service sleeps, or no device is free for it."""
    end_s = time.monotonic() + _FREE_TIMEOUT_S
    while True:
        service = session.client.service(name)
        is_due = service.state == "IDLE" and service.min_replicas > 0 and time.monotonic() < end_s
        if service.state != "STARTING" and service.old_revision is None and not is_due:
            return service
        time.sleep(_POLL_S)


def slo_problem(service: ServiceStatus, calls_so_far: AdmissionStatus | None) -> str:
    """What its owner is told where the SLO lies below the p99 of its calls so far; empty where it does not."""
    own_s = None if calls_so_far is None else calls_so_far.call_p99_s
    if service.slo_s is None or own_s is None or own_s <= service.slo_s:
        return ""
    return (
        f"the SLO of {format_duration(service.slo_s)} lies below {format_duration(own_s)}, the p99 of its calls so "
        "far: if that stays so it cannot be kept, and no request is refused for it"
    )


def _deployed_text(service: ServiceStatus, served: ServeFunction[Any], token_path: Path) -> str:
    token = shlex.quote(str(token_path))
    sleeping = ""
    if service.num_ready == 0:
        sleeps = f" ({service.next_request or 'sleeps until the first request'})"
        sleeping = sleeps if service.min_replicas == 0 else _NONE_YET
    scale = f"{service.min_replicas}..{service.max_replicas}"
    authorized = f'-H "Authorization: Bearer $(cat {token})"'
    if is_language_model(served.cls):
        example = {"model": service.name, "messages": [{"role": "user", "content": "Hello"}]}
        call = (
            f"  curl -s {service.url}/v1/chat/completions {authorized} -d {shlex.quote(json.dumps(example))}\n"
            f"  (OpenAI's clients: base_url {service.url}/v1, and the token as api_key)"
        )
    elif issubclass(served.cls, WebService):
        call = f"  curl -s {service.url}/ {authorized}\n  (what is below that address is its own)"
    else:
        call = (
            f"  curl -s {service.url} {authorized} -d {shlex.quote(json.dumps(example_call(served.cls)))}\n"
            "  (its values are made up from the type hints of predict: put yours in)"
        )
    return (
        f"{service.name}  {service.url}  revision {service.revision}  scale {scale}{sleeping}\n"
        f"{held_line(service.share, service.enforced, service.devices_each)}{call}"
    )


def example_call(cls: type) -> dict[str, Any]:
    """A body that `predict` would take, made from its type hints."""
    from springtide.serving.schema import derive_schema

    properties = derive_schema(cls).body_schema()["properties"]
    return {name: _example(schema) for name, schema in properties.items()}


def _example(schema: dict[str, Any]) -> Any:
    kind = schema.get("type")
    if kind == "array":
        return [_example(schema.get("items") or {})]
    if kind == "object":
        return {name: _example(inner) for name, inner in schema.get("properties", {}).items()}
    return _EXAMPLES.get(str(kind))
