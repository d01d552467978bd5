"""`run --on k8s` and `deploy --on k8s`: the same files as objects of a cluster, watched by their status."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from springtide.backends.kubernetes.kinds import Key, Object, key_of
from springtide.cli.asked import Asked
from springtide.cli.session import Session
from springtide.client.functions import ServeFunction
from springtide.client.serving_goals import ServeOptions
from springtide.core.errors import InvalidRequest
from springtide.core.workload import JobState

if TYPE_CHECKING:
    from springtide.client.kubernetes import Cluster

K8S = "k8s"
# A control plane that runs takes an object in within a second.
UNHEARD_S = 15.0
# What a service is given to have its first replica ready, or to sleep.
READY_TIMEOUT_S = 120.0


def cluster_options(command: Any) -> Any:
    """Add what only a run in a cluster needs."""
    options = (
        click.option("--namespace", metavar="NAME", help="With --on k8s: where. [default: the kubeconfig's]"),
        click.option("--image", metavar="IMAGE", help="With --on k8s: what its pods run. [default: the platform's]"),
    )
    for option in reversed(options):
        command = option(command)
    return command


def check_cluster_options(options: Mapping[str, Any], place: str | None) -> None:
    """Raise InvalidRequest for what only a run in a cluster knows."""
    for name in ("namespace", "image"):
        if options.get(name) is not None and place != K8S:
            raise InvalidRequest(f"--{name} is for a run in a cluster; add --on k8s")


def run_in_cluster(session: Session, asked: Asked, *, namespace: str, image: str, is_detached: bool) -> None:
    """Make the job's object and watch it until it has ended. Exit code 1 unless it succeeded."""
    from springtide.client.kubernetes import Cluster, training_object

    obj = training_object(asked.source, asked.options, asked.name, namespace=namespace, container=_container(image))
    with Cluster() as cluster:
        obj["metadata"].setdefault("namespace", cluster.namespace)
        made = cluster.create(obj)
        key = key_of(made)
        name = f"trainingfunction/{key.name}"
        if is_detached:
            session.answer(made, f"{name} created in {key.namespace}", _later("trainingfunction", key))
            return
        session.note(f"{name} created in {key.namespace}")
        try:
            ended = _watch_job(session, cluster, made["kind"], key)
        except KeyboardInterrupt:
            session.note(f"\ndetached; {name} goes on\n{_later('trainingfunction', key)}")
            raise click.exceptions.Exit(0) from None
    status = ended.get("status", {})
    told = status.get("reason", "")
    offers = "".join(f"\n  it would be accepted with: {offer}" for offer in status.get("alternatives", ()))
    end = f"{key.name} {status.get('state')}{f': {told}' if told else ''}{offers}"
    session.answer(ended, end, f"look back: kubectl describe trainingfunction {key.name} -n {key.namespace}")
    if status.get("state") != JobState.SUCCEEDED:
        raise click.exceptions.Exit(1)


def deploy_in_cluster(
    session: Session, served: ServeFunction[Any], options: ServeOptions, *, namespace: str, image: str
) -> None:
    """Make or change the service's object and wait until it answers or sleeps. Exit code 1 if it does neither."""
    from springtide.client.kubernetes import Cluster, inference_object

    obj = inference_object(served.source(), options, served.name, namespace=namespace, container=_container(image))
    with Cluster() as cluster:
        obj["metadata"].setdefault("namespace", cluster.namespace)
        applied = cluster.apply(obj)
        key = key_of(applied.object)
        session.note(f"inferencefunction/{key.name} {applied.verb} in {key.namespace}")
        now = _watch_service(session, cluster, applied.object, key)
    status = now.get("status", {})
    reason = f": {status['reason']}" if status.get("reason") else ""
    text = f"{key.name} {status.get('state', 'UNHEARD')}{reason}\n  {status.get('url', '')}".rstrip()
    session.answer(now, text, _later("inferencefunction", key))
    if status.get("state") in (None, "FAILED", "REFUSED"):
        raise click.exceptions.Exit(1)


def _watch_job(session: Session, cluster: Cluster, kind: str, key: Key) -> Object:
    began_s, shown, is_unheard = time.monotonic(), "", False
    for obj in cluster.follow(kind, key):
        status = obj.get("status", {})
        state = status.get("state")
        if state is None:
            if not is_unheard and time.monotonic() - began_s > UNHEARD_S:
                is_unheard = True
                session.note("no platform has taken it in yet; does its control plane run? springtide k8s check")
            continue
        line = _line(status)
        if line != shown:
            shown = line
            session.note(line)
        if state == "REFUSED" or (state in JobState.__members__ and JobState(state).is_terminal):
            return obj
    raise AssertionError("an object is followed for ever")


def _watch_service(session: Session, cluster: Cluster, applied: Object, key: Key) -> Object:
    """The object once it answers, sleeps or is refused as it is now, or after the time for that."""
    began_s, obj = time.monotonic(), applied
    generation = applied["metadata"].get("generation", 1)
    for obj in cluster.follow(applied["kind"], key):
        status = obj.get("status", {})
        is_current = status.get("observedGeneration", 0) >= generation
        ready: Object = next((each for each in status.get("conditions", ()) if each["type"] == "Ready"), {})
        settled = (
            status.get("state") in ("READY", "FAILED", "REFUSED", "SUSPENDED") or ready.get("reason") == "Sleeping"
        )
        if is_current and settled:
            break
        waited_s = time.monotonic() - began_s
        if waited_s > READY_TIMEOUT_S or (not status and waited_s > UNHEARD_S):
            break
    if not obj.get("status"):
        session.note("no platform has taken it in yet; does its control plane run? springtide k8s check")
    return obj


def _line(status: Mapping[str, Any]) -> str:
    parts = [str(status.get("state"))]
    if status.get("workers"):
        parts.append(f"{status['workers']} workers")
    words = (("progress", "{}"), ("loss", "loss {}"), ("eta", "{} left"), ("slack", "slack {}"), ("cost", "{}"))
    parts += [word.format(status[name]) for name, word in words if status.get(name)]
    waiting = status.get("pods", ())
    reason = f"pod {waiting[0]['name']}: {waiting[0]['reason']}" if waiting else status.get("reason", "")
    return "  ".join(parts) + (f"  ({reason})" if reason and status.get("state") != "RUNNING" else "")


def _container(image: str) -> dict[str, Any]:
    return {"image": image} if image else {}


def _later(kind: str, key: Key) -> str:
    return f"watch it: kubectl get {kind} {key.name} -n {key.namespace} -w"
