"""Every decision as an Event of the cluster: the lines of a workload's story, and what is done with nodes."""

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
from springtide.service.history.history import MAX_WORKLOADS, HistoryIndex
from springtide.service.history.pools import PoolHistory
from springtide.service.ports import ViewLike

# After a restart what was decided so shortly before is told once more: it may have been left unsaid.
TOLD_AGAIN_S = 60.0
MAX_REMEMBERED_STEPS = 512
_BETWEEN = "; "
_QUIET = (events.ProgressReported, events.LoadObserved, events.UsageReported)


class EventTeller:
    """Turns journaled steps into Events. `take` is quick and called on the loop's thread; `tell` posts what is new.

    An Event's name follows from the platform, the step and the line, so that a step that is told twice makes no second
    one. A sentence that says what the one before said is not told again.
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

    def take(self, seq: int, step: Step) -> None:
        """Take a journaled step in, in order."""
        with self._lock:
            self._steps.append((seq, step))
            if not self._is_live:
                # Told of before this process began: what was said then need not be said now.
                while len(self._steps) > MAX_REMEMBERED_STEPS:
                    self._remember(*self._steps.popleft())

    def begin(self, now_s: float) -> None:
        """From now on what is taken in is told; of what came before only what is young."""
        with self._lock:
            self._is_live = True
            while self._steps and self._steps[0][1].now_s < now_s - TOLD_AGAIN_S:
                self._remember(*self._steps.popleft())

    def tell(self, view: ViewLike) -> int:
        """Post an Event for every new line; returns for how many. Not on the loop's thread."""
        num_told = 0
        while True:
            with self._lock:
                if not self._is_live or not self._steps:
                    return num_told
                seq, step = self._steps.popleft()
            for event in self._events_of(seq, step, view):
                self._post(event)
                num_told += 1

    def _remember(self, seq: int, step: Step) -> None:
        self._history.add(seq, step)
        self._pools.add(step)

    def _events_of(self, seq: int, step: Step, view: ViewLike) -> Iterator[Object]:
        self._history.add(seq, step)
        at_unix_s = step.now_s + self._offset_s
        ended = {action.job_id: action.state for action in step.actions if isinstance(action, actions.EndJob)}
        for workload_id in _told_of(step, view):
            owner = owner_of(view, workload_id)
            if owner is None:
                continue
            for kind, text in _told_together(self._new_lines(seq, workload_id)):
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
        for node_id, kind, text in self._node_news(step):
            yield node_event(
                node_id, kind, text, platform=self._platform, at_unix_s=at_unix_s, identity=f"{seq} {kind} {text}"
            )

    def _new_lines(self, seq: int, workload_id: WorkloadId) -> Iterator[tuple[str, str]]:
        """The lines of a step in the story of a workload, but for those that say what the one before said."""
        for entry in self._history.entries(workload_id):
            if entry.seq != seq or self._last.get(workload_id) == entry.text:
                continue
            self._last.pop(workload_id, None)
            self._last[workload_id] = entry.text
            if len(self._last) > MAX_WORKLOADS:
                del self._last[next(iter(self._last))]
            yield entry.kind, entry.text

    def _node_news(self, step: Step) -> Iterator[tuple[str, str, str]]:
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


def _told_together(lines: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Lines of one kind that follow each other as one, as far as an Event has room: one decision is one Event.

    A job that starts on sixty-four devices would else be sixty-four calls, which the start itself waits behind.
    """
    for kind, group in itertools.groupby(lines, key=lambda line: line[0]):
        told = ""
        for _, text in group:
            if told and len(told) + len(text) + len(_BETWEEN) > MAX_MESSAGE_CHARS:
                yield kind, told
                told = ""
            told = f"{told}{_BETWEEN}{text}" if told else text
        yield kind, told


def owner_of(view: ViewLike, workload_id: WorkloadId) -> ContainerSettings | None:
    """Whose a workload is, where it has an object."""
    record: JobRecord | ServiceRecord | None = view.jobs.get(workload_id)
    if record is None:
        record = view.services.get(workload_id)
    if record is None:
        return None
    container = record.job.container if isinstance(record, JobRecord) else record.service.container
    return container if container is not None and container.owner_uid else None


def quiet_news(step: Step) -> set[WorkloadId]:
    """The workloads of which a step tells how far they have come."""
    return {name for event in step.events if isinstance(event, _QUIET) for name in _named_by(event)}


def loud_news(step: Step) -> set[WorkloadId]:
    """The workloads of which a step tells more than how far they have come."""
    found = {name for event in step.events if not isinstance(event, _QUIET) for name in _named_by(event)}
    found |= {name for action in step.actions for name in _named_by(action)}
    return found | {WorkloadId(workload_id) for workload_id in step.reasons}


def _told_of(step: Step, view: ViewLike) -> list[WorkloadId]:
    """The workloads whose stories may get a line from this step."""
    if any(isinstance(event, events.NodeLost) for event in step.events):
        # The workloads on the node are affected, and the event does not name them.
        return [*view.jobs, *view.services]
    return sorted(loud_news(step))


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
