"""`run --on k8s` and `deploy --on k8s`: create Kubernetes objects for the user's file, and watch their status."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from springtide.backends.kubernetes.client.kinds import Key, Object, key_of
from springtide.backends.kubernetes.resources.from_object import FOLDER_PART_BYTES, MAX_FOLDER_PARTS
from springtide.cli.jobs.job_options import JobRequest
from springtide.cli.session import Session
from springtide.cli.tables.columns import count
from springtide.cli.tables.story import workers_text
from springtide.client.folders.choice import FolderWish, with_code
from springtide.client.folders.send import pack_folder
from springtide.client.functions import ServeFunction
from springtide.client.requirements import pod_requirements
from springtide.client.secret_values import secret_values
from springtide.client.serving_goals import ServeOptions
from springtide.client.sources.source import SourceFile
from springtide.core.errors import InvalidRequest
from springtide.core.quantities import format_duration
from springtide.core.workload import JobState

if TYPE_CHECKING:
    from springtide.client.kubernetes import ClusterClient, PackedFolder

K8S = "k8s"
# A running control plane sets an object's status within a second.
NO_STATUS_S = 6.0
# Print a progress line after so many percent.
PROGRESS_PERCENT = 5
TELL_EVERY_S = 10.0
# How long a deployed service may wait for a device. What it may take to load is its start timeout's to say.
DEVICE_TIMEOUT_S = 120.0


def cluster_options(command: Any) -> Any:
    """A decorator that adds the options for runs in a cluster."""
    options = (
        click.option("--namespace", metavar="NAME", help="With --on k8s: where. [default: the kubeconfig's]"),
        click.option("--image", metavar="IMAGE", help="With --on k8s: what its pods run. [default: the platform's]"),
    )
    for option in reversed(options):
        command = option(command)
    return command


def check_cluster_options(options: Mapping[str, Any], place: str | None) -> None:
    """Raise InvalidRequest if options for runs in a cluster are given without --on k8s."""
    for name in ("namespace", "image"):
        if options.get(name) is not None and place != K8S:
            raise InvalidRequest(f"--{name} is for a run in a cluster; add --on k8s")


def run_in_cluster(
    session: Session, asked: JobRequest, *, namespace: str, image: str, is_detached: bool, folder: FolderWish = None
) -> None:
    """Create the job's object and watch it until the job has ended. Exit code 1 unless it succeeded."""
    from springtide.client.kubernetes import ClusterClient, training_object

    options = asked.options
    if packages := pod_requirements(options.values["requirements"], asked.source, folder):
        options = options.override({"requirements": packages})
    packed, source = _packed(session, asked.source, folder)
    has_folder = packed is not None
    obj = training_object(
        source, options, asked.name, namespace=namespace, container=_container(image), has_folder=has_folder
    )
    with ClusterClient() as cluster:
        obj["metadata"].setdefault("namespace", cluster.namespace)
        made = cluster.create(obj, secret_values(asked.options.values["secrets"]), packed)
        key = key_of(made)
        name = f"trainingfunction/{key.name}"
        if is_detached:
            session.answer(made, f"{name} created in {key.namespace}", _later("trainingfunction", key))
            return
        session.note(f"{name} created in {key.namespace}")
        watcher = Watcher(session.note, key.namespace)
        try:
            ended = watcher.watch(cluster.follow(made["kind"], key))
        except KeyboardInterrupt:
            session.note(f"\ndetached; {name} goes on\n{_later('trainingfunction', key)}")
            raise click.exceptions.Exit(0) from None
    session.answer(
        ended,
        final_text(key.name, ended.get("status", {}), watcher.workers),
        f"look back: kubectl describe trainingfunction {key.name} -n {key.namespace}",
    )
    if ended.get("status", {}).get("state") != JobState.SUCCEEDED:
        raise click.exceptions.Exit(1)


def deploy_in_cluster(
    session: Session,
    served: ServeFunction[Any],
    options: ServeOptions,
    *,
    namespace: str,
    image: str,
    folder: FolderWish = None,
) -> None:
    """Apply the service's object and wait until its newest revision answers, it sleeps, or no device is free for it.

    Exit code 1 if no control plane takes it in, it is refused, it fails, or it is rolled back.
    """
    from springtide.client.kubernetes import ClusterClient, inference_object

    source = served.source()
    if packages := pod_requirements(options.values["requirements"], source, folder):
        options = options.override({"requirements": packages})
    packed, source = _packed(session, source, folder)
    has_folder = packed is not None
    obj = inference_object(
        source, options, served.name, namespace=namespace, container=_container(image), has_folder=has_folder
    )
    with ClusterClient() as cluster:
        obj["metadata"].setdefault("namespace", cluster.namespace)
        applied = cluster.apply(obj, secret_values(options.values["secrets"]), packed)
        key = key_of(applied.object)
        session.note(f"inferencefunction/{key.name} {applied.verb} in {key.namespace}")
        now = _watch_service(session, cluster, applied.object, key)
    status, in_force = now.get("status", {}), _condition(now, "Applied")
    is_refused = in_force.get("reason") == "ChangeRefused"
    reason = in_force.get("message") if is_refused else status.get("reason")
    text = f"{key.name} {status.get('state', 'UNHEARD')}{f': {reason}' if reason else ''}\n  {status.get('url', '')}"
    session.answer(now, text.rstrip(), _later("inferencefunction", key))
    if is_refused or status.get("state") in (None, "FAILED", "REFUSED"):
        raise click.exceptions.Exit(1)


def _packed(session: Session, source: SourceFile, wish: FolderWish) -> tuple[PackedFolder | None, SourceFile]:
    """The folder that travels with a source, and the source with the texts of what it imports from there."""
    from springtide.client.kubernetes import PackedFolder

    with tempfile.TemporaryDirectory(prefix="springtide-folder-") as made:
        path = Path(made, "folder.zip")
        most = MAX_FOLDER_PARTS * FOLDER_PART_BYTES
        sent = pack_folder(source, wish, path, max_bytes=most, on_progress=session.note)
        packed = None if sent is None else PackedFolder(sent, path.read_bytes())
    return packed, source if packed is None else with_code(source, wish, has_pods=True)


class Watcher:
    """Prints a line for each significant change of an object's status, and records the numbers of workers.

    `write` gets the lines; `monotonic` is a clock in seconds.
    """

    def __init__(
        self, write: Callable[[str], None], namespace: str, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._write = write
        self._namespace = namespace
        self._monotonic = monotonic
        self._began_s = monotonic()
        self._last_line_s = float("-inf")
        self._last_line: tuple[str, ...] = ()
        self._progress = 0
        self._is_unheard = False
        self.workers: list[int] = []

    def watch(self, states: Iterable[Object]) -> Object:
        """Follow an object's states until its job has ended or was refused; returns the last state."""
        for obj in states:
            status = obj.get("status", {})
            state = status.get("state")
            if state is None:
                self._write_no_status()
                continue
            self._observe(status)
            if state == "REFUSED" or (state in JobState.__members__ and JobState(state).is_terminal):
                return obj
        raise AssertionError("an object is followed for ever")

    def _observe(self, status: Mapping[str, Any]) -> None:
        num = str(status.get("workers", "0")).partition("/")[0]
        is_running = status.get("state") == JobState.RUNNING
        if is_running and num.isdigit() and self.workers[-1:] != [int(num)]:
            self.workers.append(int(num))
        now = (str(status.get("state")), num, _why(status))
        progress = str(status.get("progress", "")).removesuffix("%")
        percent = int(progress) if progress.isdigit() else self._progress
        is_late = is_running and self._monotonic() - self._last_line_s >= TELL_EVERY_S
        if now != self._last_line or percent >= self._progress + PROGRESS_PERCENT or is_late:
            self._last_line, self._progress, self._last_line_s = now, percent, self._monotonic()
            self._write(_line(status))

    def _write_no_status(self) -> None:
        if not self._is_unheard and self._monotonic() - self._began_s > NO_STATUS_S:
            self._is_unheard = True
            self._write(no_status_text(self._namespace))


def no_status_text(namespace: str) -> str:
    """The message if no platform sets an object's status."""
    return (
        f"no control plane has taken it in yet: is there one that serves the namespace {namespace!r}? "
        "(springtide k8s check; its setting `namespaces`)"
    )


def final_text(name: str, status: Mapping[str, Any], workers: Sequence[int] = ()) -> str:
    """How a job ended: steps, deadline, workers over time, cost, and artifact."""
    state = str(status.get("state"))
    first = [f"{name} {state}"]
    if status.get("step"):
        first.append(f"step {status['step']}" + (f"/{status['totalSteps']}" if status.get("totalSteps") else ""))
    if status.get("loss"):
        first.append(f"loss {status['loss']}")
    lines = ["  ".join(first)]
    if state != JobState.SUCCEEDED and status.get("reason"):
        lines.append(f"  {status['reason']}")
    lines += [f"  it would be accepted with: {offer}" for offer in status.get("alternatives", ())]
    slack_s = status.get("slackSeconds")
    if state == JobState.SUCCEEDED and slack_s is not None:
        met = "met by" if slack_s >= 0 else "missed by"
        lines.append(f"  deadline {status.get('deadline')} {met} {format_duration(abs(slack_s))}")
    changes = [
        f"workers {workers_text(workers)}" if workers else "",
        count(status.get("resizes", 0), "resize"),
        count(status.get("restarts", 0), "restart"),
        str(status.get("cost", "")),
    ]
    if status.get("startedAt"):
        lines.append("  " + ", ".join(change for change in changes if change))
    if status.get("artifact"):
        lines.append(f"  model {status['artifact']}")
    return "\n".join(lines)


def _watch_service(session: Session, cluster: ClusterClient, applied: Object, key: Key) -> Object:
    """Follow a service's object until that is settled or waits for a device for too long; returns it."""
    began_s, told, obj = time.monotonic(), "", applied
    generation = applied["metadata"].get("generation", 1)
    for obj in cluster.follow(applied["kind"], key):
        status, ready, waited_s = obj.get("status", {}), _condition(obj, "Ready"), time.monotonic() - began_s
        is_current = status.get("observedGeneration", 0) >= generation
        if is_current and _is_settled(obj):
            break
        if "state" not in status and waited_s > NO_STATUS_S:
            session.note(no_status_text(key.namespace))
            break
        if ready.get("reason") == "Waiting" and waited_s > DEVICE_TIMEOUT_S:
            break
        text = _condition(obj, "Applied" if ready.get("status") == "True" else "Ready").get("message", "")
        if is_current and text != told:
            told = text
            session.note(text)
    return obj


def _is_settled(obj: Object) -> bool:
    """Whether the object's newest revision answers or sleeps, or the platform has given it up."""
    state, applied = obj["status"].get("state"), _condition(obj, "Applied")
    if state in ("FAILED", "REFUSED", "SUSPENDED") or applied.get("reason") == "ChangeRefused":
        return True
    # READY is also a service whose older revision answers while the newest one loads.
    is_up = state == "READY" or _condition(obj, "Ready").get("reason") == "Sleeping"
    return is_up and applied.get("status") != "False"


def _condition(obj: Object, kind: str) -> Object:
    """The object's condition of that kind; empty if none has been written."""
    conditions: Sequence[Object] = obj.get("status", {}).get("conditions", ())
    return next((each for each in conditions if each["type"] == kind), {})


def _line(status: Mapping[str, Any]) -> str:
    parts = [str(status.get("state"))]
    if status.get("workers"):
        parts.append(f"{status['workers']} workers")
    words = (("progress", "{}"), ("loss", "loss {}"), ("eta", "{} left"), ("slack", "slack {}"), ("cost", "{}"))
    parts += [word.format(status[name]) for name, word in words if status.get(name)]
    reason = _why(status)
    return "  ".join(parts) + (f"  ({reason})" if reason else "")


def _why(status: Mapping[str, Any]) -> str:
    """The reason if the job does not train."""
    if status.get("state") == JobState.RUNNING:
        return ""
    waiting = status.get("pods", ())
    if waiting:
        return f"pod {waiting[0].get('name')}: {waiting[0].get('reason')}"
    return str(status.get("reason", ""))


def _container(image: str) -> dict[str, Any]:
    return {"image": image} if image else {}


def _later(kind: str, key: Key) -> str:
    return f"watch it: kubectl get {kind} {key.name} -n {key.namespace} -w"
