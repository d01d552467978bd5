"""Publishes every decision as an Event of the cluster: the history of each workload, and changes of nodes."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from springtide.backends.kubernetes.client.kinds import Object
from springtide.backends.kubernetes.resources.definitions import API_VERSION
from springtide.backends.kubernetes.resources.events import MAX_MESSAGE_CHARS, node_event, object_event
from springtide.control.records import JobRecord, ServiceRecord
from springtide.core import actions, events
from springtide.core.containers import ContainerSettings
from springtide.core.ports import Step
from springtide.core.workload import WorkloadId
from springtide.service.history.history import MAX_WORKLOADS, HistoryIndex, pools_part
from springtide.service.history.pools import PoolHistory
from springtide.service.ports import ViewLike

# After a restart the decisions of this last time are published again, in case their Events were not created.
REPUBLISHED_S = 60.0
MAX_REMEMBERED_STEPS = 512
_SEPARATOR = "; "
_PROGRESS_EVENTS = (events.ProgressReported, events.LoadObserved, events.UsageReported)


class EventPublisher:
    """Turns journaled steps into Events. `add` is quick and called on the loop's thread; `publish` posts the new ones.

    An Event's name is derived from the platform, the step and the line, so that publishing a step twice creates no
    second Event. A line equal to the workload's previous line is left out.
    """

    def __init__(self, platform: str, wall_clock_offset_s: float, post: Callable[[Object], None]) -> None:
        self._platform = platform
        self._offset_s = wall_clock_offset_s
        self._post = post
        self._history = HistoryIndex()
        self._pools = PoolHistory()
        self._lock = threading.Lock()
        self._steps: deque[tuple[int, Step]] = deque()
        self._is_live = False
        self._last: dict[str, str] = {}

    def take(self, kept: bytes) -> None:
        """Go on from what a HistoryIndex kept of the steps before. Raises JournalError."""
        self._history.take(kept)
        self._pools.take(pools_part(kept))

    def add(self, seq: int, step: Step) -> None:
        """Add a journaled step; call it in order."""
        with self._lock:
            self._steps.append((seq, step))
            if not self._is_live:
                # Steps from before this process: older ones are only added to the history, not published.
                while len(self._steps) > MAX_REMEMBERED_STEPS:
                    self._remember(*self._steps.popleft())

    def begin(self, now_s: float) -> None:
        """Publish from now on. Of the steps added before, only those of the last REPUBLISHED_S are published."""
        with self._lock:
            self._is_live = True
            while self._steps and self._steps[0][1].now_s < now_s - REPUBLISHED_S:
                self._remember(*self._steps.popleft())

    def publish(self, view: ViewLike) -> int:
        """Post an Event for every new line. Returns their number. Not to be called on the loop's thread."""
        num_posted = 0
        while True:
            with self._lock:
                if not self._is_live or not self._steps:
                    return num_posted
                seq, step = self._steps.popleft()
            for event in self._events_of(seq, step, view):
                self._post(event)
                num_posted += 1

    def _remember(self, seq: int, step: Step) -> None:
        self._history.add(seq, step)
        self._pools.add(step)

    def _events_of(self, seq: int, step: Step, view: ViewLike) -> Iterator[Object]:
        self._history.add(seq, step)
        at_unix_s = step.now_s + self._offset_s
        ended = {action.job_id: action.state for action in step.actions if isinstance(action, actions.EndJob)}
        for workload_id in _workloads_of(step, view):
            owner = owner_of(view, workload_id)
            if owner is None:
                continue
            for kind, text in _joined(self._new_lines(seq, workload_id)):
                yield object_event(
                    owner,
                    kind,
                    text,
                    api_version=API_VERSION,
                    platform=self._platform,
                    at_unix_s=at_unix_s,
                    identity=f"{seq} {kind} {text}",
                    state=ended.get(workload_id),
                )
        for node_id, kind, text in self._node_lines(step):
            yield node_event(
                node_id, kind, text, platform=self._platform, at_unix_s=at_unix_s, identity=f"{seq} {kind} {text}"
            )

    def _new_lines(self, seq: int, workload_id: WorkloadId) -> Iterator[tuple[str, str]]:
        """The lines that a step adds to a workload's history, without those equal to the line before."""
        for entry in self._history.entries(workload_id):
            if entry.seq != seq or self._last.get(workload_id) == entry.text:
                continue
            self._last.pop(workload_id, None)
            self._last[workload_id] = entry.text
            if len(self._last) > MAX_WORKLOADS:
                del self._last[next(iter(self._last))]
            yield entry.kind, entry.text

    def _node_lines(self, step: Step) -> Iterator[tuple[str, str, str]]:
        for event in step.events:
            if isinstance(event, events.NodeJoined):
                num = len(event.node.devices)
                devices = "1 device" if num == 1 else f"{num} devices"
                yield event.node.node_id, "node-offered", f"offers {devices} to the platform, for {event.node.pool}"
            elif isinstance(event, events.NodeLost):
                yield event.node_id, "node-lost", "is lost to the platform: nothing runs there any more"
        for note in self._pools.add(step):
            if note.node_id and not note.workload_id:
                yield note.node_id, note.kind, note.text


def _joined(lines: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Join successive lines of one kind, as far as they fit into an Event, so that one decision is one Event.

    Else the start of a job on 64 devices would be 64 calls to the API server, which would delay the start itself.
    """
    for kind, group in itertools.groupby(lines, key=lambda line: line[0]):
        joined = ""
        for _, text in group:
            if joined and len(joined) + len(text) + len(_SEPARATOR) > MAX_MESSAGE_CHARS:
                yield kind, joined
                joined = ""
            joined = f"{joined}{_SEPARATOR}{text}" if joined else text
        yield kind, joined


def owner_of(view: ViewLike, workload_id: WorkloadId) -> ContainerSettings | None:
    """The settings with the object that owns a workload; None if it has no object."""
    record: JobRecord | ServiceRecord | None = view.jobs.get(workload_id)
    if record is None:
        record = view.services.get(workload_id)
    if record is None:
        return None
    container = record.job.container if isinstance(record, JobRecord) else record.service.container
    return container if container is not None and container.owner_uid else None


def progressed_workloads(step: Step) -> set[WorkloadId]:
    """The workloads whose progress, load or usage a step reports."""
    return {name for event in step.events if isinstance(event, _PROGRESS_EVENTS) for name in _named_by(event)}


def changed_workloads(step: Step) -> set[WorkloadId]:
    """The workloads of which a step says more than progress, load and usage."""
    found = {name for event in step.events if not isinstance(event, _PROGRESS_EVENTS) for name in _named_by(event)}
    found |= {name for action in step.actions for name in _named_by(action)}
    return found | {WorkloadId(workload_id) for workload_id in step.reasons}


def _workloads_of(step: Step, view: ViewLike) -> list[WorkloadId]:
    """The workloads whose histories may get a line from this step."""
    if any(isinstance(event, events.NodeLost) for event in step.events):
        # NodeLost does not name the workloads on the node, so all are checked.
        return [*view.jobs, *view.services]
    return sorted(changed_workloads(step))


def _named_by(news: events.Event | actions.Action) -> tuple[WorkloadId, ...]:
    if isinstance(news, events.JobSubmitted):
        return (news.job.job_id,)
    if isinstance(news, events.ServiceDeployed):
        return (news.service.service_id,)
    for field in ("workload_id", "job_id", "service_id"):
        named = getattr(news, field, None)
        if named:
            return (WorkloadId(named),)
    return ()
