"""The pods that the platform has made: one for each replica at most, from the first word to the last look.

Everything is decided by comparing what is wanted of a pod with what the cache shows; that a notification arrived says
only where to look. A pod is over when its containers have ended, when the API server itself says that there is no such
pod, or when its node is no more; until then it holds its device. Its object goes once the journal knows of its end, so
that a control plane that was killed in between still finds out how it ended.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from springtide.backends.control_channel.reactor import Reactor
from springtide.backends.kubernetes import settings as names
from springtide.backends.kubernetes.client.api import KubeApi
from springtide.backends.kubernetes.client.cache import Cache, ObjectChange
from springtide.backends.kubernetes.client.errors import QuotaExceeded, VersionConflict
from springtide.backends.kubernetes.client.kinds import POD, Key, Object, key_of, uid_of, version_of
from springtide.backends.kubernetes.client.messages import decode_object, encode
from springtide.backends.kubernetes.client.thread import ApiThread
from springtide.backends.kubernetes.client.writes import ensure_bound, ensure_created
from springtide.backends.kubernetes.pods.reading import Reading, read_pod
from springtide.backends.kubernetes.pods.secrets import PodSecrets
from springtide.core.errors import BackendError
from springtide.core.resources import DeviceId, NodeId
from springtide.core.status.pods import PodPhase
from springtide.core.workload import ReplicaId, WorkloadId

_log = logging.getLogger(__name__)

# What a pod is given that nothing in the journal names: its worker is fenced as soon as it says Hello anyway.
UNNAMED_GRACE_S = 5
# How often everything is compared, whether anything was heard of it or not.
RESYNC_S = 10.0
# How long the rest of its output may take once a pod has ended.
_LOG_LIMIT_S = 10.0


@dataclass(eq=False)
class PodState:
    """One pod, wanted or found. `uid` is empty until the API server has shown it.

    `is_wanted`: its creation still stands. `is_over`: nothing of it runs. `is_told`: the journal knows of its end, or
    nobody waits for it. `is_logged`: nothing more of its output is to be read. `asked_grace_s` is what it was given
    when it was asked to go; `absent` says what it means if there is no such pod.
    """

    replica_id: ReplicaId
    workload_id: WorkloadId
    key: Key
    device_id: DeviceId
    node_id: NodeId
    is_sharer: bool = False
    uid: str = ""
    address: str = ""
    phase: PodPhase = "creating"
    reason: str = ""
    is_stuck: bool = False
    since_s: float = 0.0
    is_wanted: bool = True
    is_running: bool = False
    is_ending: bool = False
    is_over: bool = False
    is_told: bool = False
    is_gone: bool = False
    is_removed: bool = False
    is_logged: bool = True
    is_labelled: bool = False
    is_asked_about: bool = False
    asked_grace_s: int | None = None
    exit_code: int | None = None
    end: str = ""
    absent: str = "its pod is gone: somebody deleted it"

    def enter(self, phase: PodPhase, reason: str = "") -> None:
        """It is in another phase from now on, or in the same one for another reason."""
        if phase != self.phase:
            self.phase, self.since_s = phase, time.monotonic()
        self.reason = reason


class PodTable:
    """Runs on the executor's I/O thread; what it writes goes through the API thread.

    `on_made` is told of each pod that the API server took, `on_refused` of one that will not be made, `on_change` of
    one that may not be as it was, `on_over` of one that has ended, once, and `on_left` of one that is forgotten.
    `on_higher_term` is told when a pod shows that another control plane has taken over: nothing is written from then
    on. `is_expected` says whether a pod that is not in the table will be.
    """

    def __init__(self, api_thread: ApiThread, cache: Cache, reactor: Reactor, platform: str, term: int) -> None:
        self._thread = api_thread
        self._cache = cache
        self._reactor = reactor
        self._platform = platform
        self._term = term
        self.bodies: dict[ReplicaId, PodState] = {}
        self._by_key: dict[Key, PodState] = {}
        self._of_device: dict[DeviceId, list[PodState]] = defaultdict(list)
        self.secrets = PodSecrets(api_thread, self.may_write)
        self._is_open = False
        self.is_superseded = False
        self._is_closed = False
        self.num_unnamed = 0
        self.on_made: Callable[[PodState], None] = lambda body: None
        self.on_left: Callable[[PodState], None] = lambda body: None
        self.on_change: Callable[[PodState, Reading], None] = lambda body, reading: None
        self.on_over: Callable[[PodState], None] = lambda body: None
        self.on_refused: Callable[[PodState, BackendError], None] = lambda body, error: None
        self.is_expected: Callable[[Key], bool] = lambda key: False
        self.on_higher_term: Callable[[int], None] = lambda term: None

    def open(self) -> None:
        """From now on what is wanted is known: look at every pod, end those that nobody wants, and go on looking."""
        self._is_open = True
        self._cache.listen(self._on_change)
        self._resync()

    def close(self) -> None:
        """Write nothing from now on: the pods are the next executor's."""
        self._is_closed = True

    def may_write(self) -> bool:
        """Whether this control plane's writes still stand."""
        return not self.is_superseded and not self._is_closed

    # --- what is there -----------------------------------------------------------------------------------------------

    def enter(self, body: PodState) -> PodState:
        """Take a pod into the table."""
        body.since_s = time.monotonic()
        self.bodies[body.replica_id] = body
        self._by_key[body.key] = body
        self._of_device[body.device_id].append(body)
        return body

    def find(self, replica_id: ReplicaId, key: Key) -> Object | None:
        """The pod of a replica, as it was last seen."""
        pod = self._cache.get(key.name, key.namespace)
        return pod if pod is not None and self._is_of(pod, replica_id) else None

    def holder(self, device_id: DeviceId, *, is_sharer: bool) -> PodState | None:
        """Who keeps a device from being taken: a pod that is not over, unless both only want a share of it."""
        for body in self._of_device.get(device_id, ()):
            if not body.is_over and not (is_sharer and body.is_sharer):
                return body
        return None

    def look(self, body: PodState) -> None:
        """Compare what is known of a pod with what the cache shows."""
        pod = self._cache.get(body.key.name, body.key.namespace)
        if pod is not None and (uid_of(pod) == body.uid or not body.uid) and self._is_of(pod, body.replica_id):
            self._see(body, pod)
        elif body.uid and not body.is_gone and not body.is_asked_about:
            # Its absence, or a namesake, may be an answer from the past: the API server itself is asked.
            self.ask_about(body)

    def ask_about(self, body: PodState) -> None:
        """Find out from the API server itself whether there is a pod that should be there."""
        body.is_asked_about = True
        self._thread.confirm(
            self._cache, body.key.name, body.key.namespace, lambda found: self._soon(lambda: self._told(body, found))
        )

    def note_told(self, replica_id: ReplicaId) -> None:
        """The journal knows that a replica has ended: nobody needs its pod any more."""
        body = self.bodies.get(replica_id)
        if body is not None:
            body.is_told = True
            self._tidy(body)

    def note_node_gone(self, node_id: NodeId) -> None:
        """A node is no more, and what ran there is not either."""
        for body in list(self.bodies.values()):
            if body.node_id == node_id and not body.is_over:
                self._finish(body, None, f"node {node_id} is gone")

    def note_logged(self, body: PodState) -> None:
        """A pod's output is here, or has been waited for long enough."""
        body.is_logged = True
        self._tidy(body)

    # --- effects -----------------------------------------------------------------------------------------------------

    def make(self, body: PodState, pod: Object, secret: Object) -> None:
        """Have a pod made and bound to its node, until that is so or it is no longer wanted."""
        # Thousands may wait for their turn. As bytes they are two things each to look at for the collector of garbage,
        # which stops every thread meanwhile; as objects they would be two hundred.
        pod_text, secret_text = encode(pod), encode(secret)

        async def effect(api: KubeApi) -> Object:
            await self.secrets.ensure(api, body.workload_id, decode_object(secret_text))
            made = await self._ensure_pod(api, body, decode_object(pod_text))
            if not (made.get("spec") or {}).get("nodeName"):
                await ensure_bound(api, body.key, body.node_id, uid=uid_of(made))
            return made

        self._thread.write(
            ("pod", *body.key),
            effect,
            done=lambda made: self._soon(lambda: self._note_made(body, made)),
            failed=lambda error: self._soon(lambda: self._refused(body, error)),
            waiting=lambda reason: self._soon(lambda: self._note_waiting(body, reason)),
            stands=lambda: body.is_wanted and self.may_write(),
        )

    def delete(self, body: PodState, grace_s: float) -> None:
        """Ask a pod to go within so many seconds (at least one: what is forgotten at once may run on)."""
        grace = max(1, round(grace_s))
        body.is_wanted = False
        if body.is_over or (body.asked_grace_s is not None and body.asked_grace_s <= grace):
            return
        body.asked_grace_s = grace
        body.enter("ending", body.reason)
        self._remove(body, grace)

    def annotate(self, body: PodState, annotations: dict[str, str | None]) -> None:
        """Write annotations onto a pod; None takes one away."""
        patch = {"metadata": {"annotations": annotations}}
        self._write(body, lambda api: api.patch(POD, body.key.name, patch, body.key.namespace))

    def forget_secret(self, workload_id: WorkloadId, key: Key) -> None:
        """Remove the Secret of a workload that has ended, where no owner's end does it."""
        self.secrets.forget(workload_id, key)

    # --- what becomes of it ------------------------------------------------------------------------------------------

    def _see(self, body: PodState, pod: Object) -> None:
        reading = read_pod(pod)
        if self._is_higher(reading.term):
            return
        body.uid, body.address = reading.uid, reading.address
        body.is_running, body.is_stuck = reading.is_running, reading.is_stuck
        body.is_ending = reading.is_ending
        if body.is_over:
            self._tidy(body)
            return
        if reading.is_over:
            self._finish(body, reading.exit_code, reading.end)
            return
        if 0 < reading.term < self._term and not body.is_labelled:
            self._label(body)
        if reading.is_ending or body.asked_grace_s is not None:
            body.enter("ending", "waiting for its containers to end")
        elif reading.is_running:
            body.enter("running")
        else:
            body.enter("starting" if reading.node else "binding", reading.waiting)
        self.on_change(body, reading)

    def _label(self, body: PodState) -> None:
        """Write the present term onto a pod that was taken over, so that who led before cannot delete it."""
        body.is_labelled = True
        patch = {"metadata": {"uid": body.uid, "labels": {names.TERM_LABEL: str(self._term)}}}
        self._write(body, lambda api: api.patch(POD, body.key.name, patch, body.key.namespace))

    def _told(self, body: PodState, found: Object | None) -> None:
        """The API server itself has said what there is under a pod's name."""
        body.is_asked_about = False
        if found is not None and self._is_of(found, body.replica_id) and body.uid in ("", uid_of(found)):
            self._see(body, found)
            return
        body.is_gone = True
        if not body.is_over:
            self._finish(body, None, body.absent)
        self._tidy(body)

    def _note_made(self, body: PodState, made: Object) -> None:
        body.uid = uid_of(made)
        self.on_made(body)
        self.look(body)

    def _note_waiting(self, body: PodState, reason: str) -> None:
        if body.phase in ("creating", "binding"):
            body.reason = f"the API server does not take it yet: {reason}"

    def _refused(self, body: PodState, error: BackendError) -> None:
        if body.uid or body.is_over:
            # It was made; what was refused is its binding. It must not stay, and its end is noticed like any other.
            body.end = f"its pod could not be bound to node {body.node_id}: {error}"
            self.delete(body, 1)
            return
        body.is_gone = body.is_over = body.is_told = True
        self._leave(body)
        self.on_refused(body, error)

    def _finish(self, body: PodState, exit_code: int | None, end: str) -> None:
        body.is_over, body.is_wanted = True, False
        body.exit_code, body.end = exit_code, body.end or end
        body.enter("ending", "its containers have ended")
        self.on_over(body)
        if not body.is_logged:
            self._reactor.after(_LOG_LIMIT_S, lambda: self.note_logged(body))
        self._tidy(body)

    def _tidy(self, body: PodState) -> None:
        """Let a pod that is over go: first its object, then its place in the table."""
        if not body.is_over or not body.is_told or not (body.is_logged or body.is_gone):
            return
        if body.is_gone or not body.uid:
            self._leave(body)
        elif not body.is_removed:
            body.is_removed = True
            self._remove(body, 0)

    def _leave(self, body: PodState) -> None:
        if self.bodies.get(body.replica_id) is body:
            del self.bodies[body.replica_id]
        if self._by_key.get(body.key) is body:
            del self._by_key[body.key]
        others = [other for other in self._of_device.pop(body.device_id, ()) if other is not body]
        if others:
            self._of_device[body.device_id] = others
        self.on_left(body)

    def _remove(self, body: PodState, grace: int) -> None:
        self._thread.write(
            ("pod", *body.key),
            lambda api: self._delete_exactly(api, body, grace),
            done=lambda is_there: None if is_there else self._soon(lambda: self._told(body, None)),
            failed=lambda error: self._soon(lambda: self._note_kept(body, grace, error)),
            stands=self.may_write,
        )

    def _note_kept(self, body: PodState, grace: int, error: BackendError) -> None:
        """A deletion was refused: it is asked for again after a while, since there is no other way to end a pod."""
        _log.error("pod %s could not be deleted: %s", body.key.name, error)
        body.reason = f"its deletion is refused: {error}"
        self._reactor.after(RESYNC_S, lambda: None if body.is_gone else self._remove(body, grace))

    async def _delete_exactly(self, api: KubeApi, body: PodState, grace: int) -> bool:
        """Ask this pod to go, in the state in which it was seen; False where it is gone.

        The version is named, so that a control plane that does not know yet that it leads no longer cannot end a pod
        that its successor has put its own term on.
        """
        pod = self._cache.get(body.key.name, body.key.namespace)
        if pod is None or (body.uid and uid_of(pod) != body.uid):
            pod = await self._cache.confirm(api, body.key.name, body.key.namespace)
        if pod is None or not self._is_of(pod, body.replica_id) or (body.uid and uid_of(pod) != body.uid):
            return False
        term = read_pod(pod).term
        if term > self._term:
            self._soon(lambda: self._note_term(term))
            return True
        try:
            return await api.delete(
                POD,
                body.key.name,
                body.key.namespace,
                uid=uid_of(pod),
                resource_version=str(version_of(pod)),
                grace_s=grace,
            )
        except VersionConflict:
            await self._cache.confirm(api, body.key.name, body.key.namespace)
            raise

    async def _ensure_pod(self, api: KubeApi, body: PodState, pod: Object) -> Object:
        known = self._cache.get(body.key.name, body.key.namespace)
        if known is not None and self._is_of(known, body.replica_id):
            return known
        try:
            made = await ensure_created(
                api, POD, pod, body.key.namespace, is_ours=lambda found: self._is_of(found, body.replica_id)
            )
        except QuotaExceeded:
            # Quota is asked before the name: an attempt whose answer was lost may have made it.
            found = await api.find(POD, body.key.name, body.key.namespace)
            if found is None or not self._is_of(found, body.replica_id):
                raise
            made = found
        body.uid = uid_of(made)
        return self._cache.put(made)

    def _write(self, body: PodState, effect: Callable[[KubeApi], Any]) -> None:
        self._thread.write(
            ("pod", *body.key),
            effect,
            done=self._keep,
            failed=lambda error: _log.warning("pod %s could not be changed: %s", body.key.name, error),
            stands=lambda: not body.is_over and self.may_write(),
        )

    def _keep(self, pod: Object) -> None:
        self._cache.put(pod)

    # --- what nobody wants -------------------------------------------------------------------------------------------

    def _on_change(self, change: ObjectChange) -> None:
        self._soon(lambda: self._look_at(change.key))

    def _look_at(self, key: Key) -> None:
        body = self._by_key.get(key)
        if body is not None:
            self.look(body)
        pod = self._cache.get(key.name, key.namespace)
        if pod is not None:
            self._end_unnamed(pod)

    def _resync(self) -> None:
        for body in list(self.bodies.values()):
            self.look(body)
        for pod in self._cache.objects():
            self._end_unnamed(pod)
        self._reactor.after(RESYNC_S, self._resync)

    def _end_unnamed(self, pod: Object) -> None:
        """Delete a pod of this platform that no replica stands for: one of the past, or somebody's copy."""
        labels = pod["metadata"].get("labels") or {}
        if not self._is_open or self.is_superseded or labels.get(names.PLATFORM_LABEL) != self._platform:
            return
        if names.REPLICA_LABEL not in labels:
            # Not the pod of a replica: the control plane's own bears the platform's name, too.
            return
        reading = read_pod(pod)
        body = self._by_key.get(key_of(pod))
        if body is not None and body.replica_id == reading.replica_id and body.uid in ("", reading.uid):
            return
        if self._is_higher(reading.term) or (reading.is_ending and not reading.is_over):
            return
        if self.is_expected(key_of(pod)):
            # A replica that waits to be started has it already, made by an earlier control plane.
            return
        self.num_unnamed += 1
        _log.warning("pod %s belongs to no replica; it is deleted", key_of(pod).name)
        stray = PodState(
            replica_id=ReplicaId(reading.replica_id),
            workload_id=WorkloadId(reading.workload_id),
            key=key_of(pod),
            device_id=DeviceId(reading.device_id),
            node_id=NodeId(reading.node),
            uid=reading.uid,
            is_wanted=False,
            is_told=True,
        )
        if stray.replica_id not in self.bodies and stray.key not in self._by_key:
            # It holds its device until it is gone, like any other.
            self.enter(stray)
        if reading.is_over:
            self._finish(stray, reading.exit_code, reading.end)
        else:
            self.delete(stray, UNNAMED_GRACE_S)

    def _is_higher(self, term: int) -> bool:
        """Whether a later leader has been here; then nothing is written any more."""
        if term > self._term and not self.is_superseded:
            self.is_superseded = True
            _log.error("pods bear term %d, and this control plane leads in term %d: it stops", term, self._term)
            self.on_higher_term(term)
        return self.is_superseded

    def _note_term(self, term: int) -> None:
        self._is_higher(term)

    def _is_of(self, pod: Object, replica_id: ReplicaId) -> bool:
        metadata = pod["metadata"]
        labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
        return (
            labels.get(names.PLATFORM_LABEL) == self._platform
            and annotations.get(names.REPLICA_ANNOTATION) == replica_id
        )

    def _soon(self, function: Callable[[], None]) -> None:
        self._reactor.call(function)
