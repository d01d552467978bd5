"""The pods that the platform has created: at most one for each replica, from its order to the removal of its object.

Decisions compare what is wanted of a pod with what the cache shows; a notification only says which pod to compare. A
pod is over when its containers have ended, when the API server itself says that there is no such pod, or when its
node is gone; until then it holds its devices. Its object is deleted only once its end is in the journal, so that a new
control plane still finds out how it ended.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable
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
from springtide.backends.kubernetes.pods.reading import NO_MORE_KNOWN, Reading, read_pod
from springtide.backends.kubernetes.pods.secrets import PodSecrets
from springtide.backends.kubernetes.pods.state import Acknowledgement, PodLifecycle, PodState
from springtide.core.errors import BackendError
from springtide.core.resources import DeviceId, NodeId
from springtide.core.workload import ReplicaId, WorkloadId

_log = logging.getLogger(__name__)

# The grace of a pod that the journal does not name: its worker is fenced at its Hello anyway.
UNNAMED_GRACE_S = 5
# How often all pods are compared without a notification.
RESYNC_S = 10.0
# How long reading the rest of its output may take once a pod has ended.
_LOG_LIMIT_S = 10.0


class PodTable:
    """Runs on the executor's I/O thread; its writes go through the API thread.

    `on_made` is called for each pod that the API server accepted, `on_refused` for one that it finally refused,
    `on_change` for one that may have changed, `on_over` once for one that has ended, and `on_left` for one that left
    the table. `on_higher_term` is called when a pod shows that another control plane has taken over; nothing is written
    from then on. `is_expected` says whether a pod that is not in the table will be entered later.
    """

    def __init__(self, api_thread: ApiThread, cache: Cache, reactor: Reactor, platform: str, term: int) -> None:
        self._thread = api_thread
        self._cache = cache
        self._reactor = reactor
        self._platform = platform
        self._term = term
        self.pods: dict[ReplicaId, PodState] = {}
        self._by_key: dict[Key, PodState] = {}
        self._of_device: dict[DeviceId, list[PodState]] = defaultdict(list)
        self.secrets = PodSecrets(api_thread, self.may_write)
        self._is_open = False
        self.is_superseded = False
        self._is_closed = False
        self.num_unnamed = 0
        self.on_made: Callable[[PodState], None] = lambda pod: None
        self.on_left: Callable[[PodState], None] = lambda pod: None
        self.on_change: Callable[[PodState, Reading], None] = lambda pod, reading: None
        self.on_over: Callable[[PodState], None] = lambda pod: None
        self.on_refused: Callable[[PodState, BackendError], None] = lambda pod, error: None
        self.is_expected: Callable[[Key], bool] = lambda key: False
        self.on_higher_term: Callable[[int], None] = lambda term: None

    def open(self) -> None:
        """All wanted pods are known: from now on compare every pod, and delete those without a replica."""
        self._is_open = True
        self._cache.listen(self._on_change)
        self._resync()

    def close(self) -> None:
        """Write nothing from now on: the pods belong to the next executor."""
        self._is_closed = True

    def may_write(self) -> bool:
        """Whether this control plane may still write."""
        return not self.is_superseded and not self._is_closed

    # --- pods --------------------------------------------------------------------------------------------------------

    def enter(self, pod: PodState) -> PodState:
        """Add a pod to the table."""
        pod.since_s = time.monotonic()
        self.pods[pod.replica_id] = pod
        self._by_key[pod.key] = pod
        for device_id in pod.device_ids:
            self._of_device[device_id].append(pod)
        return pod

    def find(self, replica_id: ReplicaId, key: Key) -> Object | None:
        """The pod of a replica, from the cache."""
        obj = self._cache.get(key.name, key.namespace)
        return obj if obj is not None and self._is_of(obj, replica_id) else None

    def holder(self, device_id: DeviceId, *, is_sharer: bool) -> PodState | None:
        """The pod that holds a device. A sharer's pod does not hold it against another sharer."""
        for pod in self._of_device.get(device_id, ()):
            if not pod.is_over and not (is_sharer and pod.is_sharer):
                return pod
        return None

    def refresh(self, pod: PodState) -> None:
        """Update a pod from the cache."""
        obj = self._cache.get(pod.key.name, pod.key.namespace)
        if obj is not None and (uid_of(obj) == pod.uid or not pod.uid) and self._is_of(obj, pod.replica_id):
            self._update(pod, obj)
        elif pod.uid and not pod.is_gone and not pod.is_being_confirmed:
            # The pod is missing or another has its name; as the cache may be outdated, ask the API server.
            self.confirm(pod)

    def confirm(self, pod: PodState) -> None:
        """Ask the API server itself whether a pod exists."""
        pod.is_being_confirmed = True
        self._thread.confirm(
            self._cache, pod.key.name, pod.key.namespace, lambda found: self._soon(lambda: self._on_answer(pod, found))
        )

    def note_journaled(self, replica_id: ReplicaId) -> None:
        """The end of a replica is in the journal: its pod is no longer needed."""
        pod = self.pods.get(replica_id)
        if pod is not None:
            pod.awaiting -= {Acknowledgement.JOURNAL}
            self._remove_if_done(pod)

    def note_node_gone(self, node_id: NodeId) -> None:
        """A node was removed from the cluster: its pods are over."""
        for pod in list(self.pods.values()):
            if pod.node_id == node_id and not pod.is_over:
                self._finish(pod, None, f"node {node_id} is gone")

    def note_logged(self, pod: PodState) -> None:
        """A pod's output was read completely, or the time limit for that has passed."""
        pod.awaiting -= {Acknowledgement.LOGS}
        self._remove_if_done(pod)

    # --- effects -----------------------------------------------------------------------------------------------------

    def make(self, pod: PodState, obj: Object, secret: Object) -> None:
        """Create a pod and bind it to its node; retried until done or no longer wanted."""
        # Thousands may be queued. Encoded they are two objects each for the garbage collector, which stops every
        # thread, instead of two hundred.
        pod_text, secret_text = encode(obj), encode(secret)

        async def effect(api: KubeApi) -> Object:
            await self.secrets.ensure(api, pod.workload_id, decode_object(secret_text))
            made = await self._ensure_pod(api, pod, decode_object(pod_text))
            if not (made.get("spec") or {}).get("nodeName"):
                await ensure_bound(api, pod.key, pod.node_id, uid=uid_of(made))
            return made

        self._thread.write(
            ("pod", *pod.key),
            effect,
            done=lambda made: self._soon(lambda: self._note_made(pod, made)),
            failed=lambda error: self._soon(lambda: self._refused(pod, error)),
            waiting=lambda reason: self._soon(lambda: self._note_waiting(pod, reason)),
            is_still_wanted=lambda: pod.is_wanted and self.may_write(),
        )

    def delete(self, pod: PodState, grace_s: float) -> None:
        """Delete a pod with this grace (at least 1 s: with 0 its object goes while its containers may still run)."""
        grace = max(1, round(grace_s))
        if pod.is_over or (pod.requested_grace_s is not None and pod.requested_grace_s <= grace):
            return
        pod.requested_grace_s = grace
        pod.move(PodLifecycle.ENDING, pod.reason)
        self._remove(pod, grace)

    def annotate(self, pod: PodState, annotations: dict[str, str | None]) -> None:
        """Write annotations of a pod; None removes one."""
        patch = {"metadata": {"annotations": annotations}}
        self._write(pod, lambda api: api.patch(POD, pod.key.name, patch, pod.key.namespace))

    def forget_secret(self, workload_id: WorkloadId, key: Key) -> None:
        """Delete the Secret of an ended workload that has no owner whose deletion would remove it."""
        self.secrets.forget(workload_id, key)

    # --- changes -----------------------------------------------------------------------------------------------------

    def _update(self, pod: PodState, obj: Object) -> None:
        reading = read_pod(obj)
        if self._is_higher(reading.term):
            return
        if reading.waiting.startswith("ImagePullBackOff") and pod.reason.startswith("ErrImagePull"):
            # Kubelets alternate between the two, and only the latter says for sure what the registry answered.
            reading = reading._replace(waiting=pod.reason)
        pod.uid, pod.seen = reading.uid, reading
        if pod.is_over:
            self._remove_if_done(pod)
            return
        if reading.is_over:
            pod.was_refused = pod.was_refused or reading.was_refused
            self._finish(pod, reading.exit_code, reading.end)
            return
        if 0 < reading.term < self._term and pod.written_term != self._term:
            self._label(pod)
        if reading.is_ending or pod.requested_grace_s is not None:
            pod.move(PodLifecycle.ENDING, "waiting for its containers to end")
        elif pod.state is not PodLifecycle.ENDING:
            pod.making = pod.making if reading.is_making else NO_MORE_KNOWN
            pod.move(_state_shown(reading), pod.making.sentence if reading.is_making else reading.waiting)
        self.on_change(pod, reading)

    def _label(self, pod: PodState) -> None:
        """Write the present term on an adopted pod, so that the previous leader cannot delete it."""
        pod.written_term = self._term
        patch = {"metadata": {"uid": pod.uid, "labels": {names.TERM_LABEL: str(self._term)}}}
        self._write(pod, lambda api: api.patch(POD, pod.key.name, patch, pod.key.namespace))

    def _on_answer(self, pod: PodState, found: Object | None) -> None:
        """Process the API server's answer about a pod's name."""
        pod.is_being_confirmed = False
        if found is not None and self._is_of(found, pod.replica_id) and pod.uid in ("", uid_of(found)):
            self._update(pod, found)
            return
        if not pod.is_over:
            self._finish(pod, None, pod.absent, PodLifecycle.GONE)
        elif not pod.is_gone:
            pod.move(PodLifecycle.GONE, pod.reason)
            self._remove_if_done(pod)

    def _note_made(self, pod: PodState, made: Object) -> None:
        pod.uid = uid_of(made)
        self.on_made(pod)
        self.refresh(pod)

    def _note_waiting(self, pod: PodState, reason: str) -> None:
        if pod.state in (PodLifecycle.CREATING, PodLifecycle.BINDING):
            pod.reason = f"the API server does not take it yet: {reason}"

    def _refused(self, pod: PodState, error: BackendError) -> None:
        if pod.uid or pod.is_over:
            # It was created, but its binding was refused: delete it, and wait for its end as for any other.
            pod.end, pod.was_refused = f"its pod could not be bound to node {pod.node_id}: {error}", True
            self.delete(pod, 1)
            return
        self._drop(pod)
        self.on_refused(pod, error)

    def _finish(self, pod: PodState, exit_code: int | None, end: str, state: PodLifecycle = PodLifecycle.OVER) -> None:
        pod.exit_code, pod.end = exit_code, pod.end or end
        pod.move(state, "its containers have ended")
        self.on_over(pod)
        if Acknowledgement.LOGS in pod.awaiting:
            self._reactor.after(_LOG_LIMIT_S, lambda: self.note_logged(pod))
        self._remove_if_done(pod)

    def _remove_if_done(self, pod: PodState) -> None:
        """Remove a pod that is over: first its object, then its entry in the table."""
        if pod.state is PodLifecycle.GONE and Acknowledgement.JOURNAL not in pod.awaiting:
            self._drop(pod)
        elif pod.state is PodLifecycle.OVER and not pod.awaiting:
            if pod.uid:
                pod.move(PodLifecycle.REMOVING, pod.reason)
                self._remove(pod, 0)
            else:
                self._drop(pod)

    def _drop(self, pod: PodState) -> None:
        pod.move(PodLifecycle.FORGOTTEN, pod.reason)
        if self.pods.get(pod.replica_id) is pod:
            del self.pods[pod.replica_id]
        if self._by_key.get(pod.key) is pod:
            del self._by_key[pod.key]
        for device_id in pod.device_ids:
            others = [other for other in self._of_device.pop(device_id, ()) if other is not pod]
            if others:
                self._of_device[device_id] = others
        self.on_left(pod)

    def _remove(self, pod: PodState, grace: int) -> None:
        self._thread.write(
            ("pod", *pod.key),
            lambda api: self._delete_exactly(api, pod, grace),
            done=lambda is_there: None if is_there else self._soon(lambda: self._on_answer(pod, None)),
            failed=lambda error: self._soon(lambda: self._note_kept(pod, grace, error)),
            is_still_wanted=self.may_write,
        )

    def _note_kept(self, pod: PodState, grace: int, error: BackendError) -> None:
        """A deletion was refused: repeat it after a while, since there is no other way to end a pod."""
        _log.error("pod %s could not be deleted: %s", pod.key.name, error)
        pod.reason = f"its deletion is refused: {error}"
        self._reactor.after(RESYNC_S, lambda: None if pod.is_gone else self._remove(pod, grace))

    async def _delete_exactly(self, api: KubeApi, pod: PodState, grace: int) -> bool:
        """Delete this very pod, at the version in the cache; False if it is gone.

        The version is a precondition, so that a control plane that does not know yet that it has lost the lease cannot
        delete a pod on which its successor has written its own term.
        """
        obj = self._cache.get(pod.key.name, pod.key.namespace)
        if obj is None or (pod.uid and uid_of(obj) != pod.uid):
            obj = await self._cache.confirm(api, pod.key.name, pod.key.namespace)
        if obj is None or not self._is_of(obj, pod.replica_id) or (pod.uid and uid_of(obj) != pod.uid):
            return False
        term = read_pod(obj).term
        if term > self._term:
            self._soon(lambda: self._note_term(term))
            return True
        try:
            return await api.delete(
                POD,
                pod.key.name,
                pod.key.namespace,
                uid=uid_of(obj),
                resource_version=str(version_of(obj)),
                grace_s=grace,
            )
        except VersionConflict:
            await self._cache.confirm(api, pod.key.name, pod.key.namespace)
            raise

    async def _ensure_pod(self, api: KubeApi, pod: PodState, obj: Object) -> Object:
        known = self._cache.get(pod.key.name, pod.key.namespace)
        if known is not None and self._is_of(known, pod.replica_id):
            return known
        try:
            made = await ensure_created(
                api, POD, obj, pod.key.namespace, is_ours=lambda found: self._is_of(found, pod.replica_id)
            )
        except QuotaExceeded:
            # The server checks quota before the name: an earlier attempt whose answer was lost may have created it.
            found = await api.find(POD, pod.key.name, pod.key.namespace)
            if found is None or not self._is_of(found, pod.replica_id):
                raise
            made = found
        pod.uid = uid_of(made)
        return self._cache.put(made)

    def _write(self, pod: PodState, effect: Callable[[KubeApi], Any]) -> None:
        self._thread.write(
            ("pod", *pod.key),
            effect,
            done=self._keep,
            failed=lambda error: _log.warning("pod %s could not be changed: %s", pod.key.name, error),
            is_still_wanted=lambda: not pod.is_over and self.may_write(),
        )

    def _keep(self, obj: Object) -> None:
        self._cache.put(obj)

    # --- pods without a replica --------------------------------------------------------------------------------------

    def _on_change(self, change: ObjectChange) -> None:
        self._soon(lambda: self._refresh_key(change.key))

    def _refresh_key(self, key: Key) -> None:
        pod = self._by_key.get(key)
        if pod is not None:
            self.refresh(pod)
        obj = self._cache.get(key.name, key.namespace)
        if obj is not None:
            self._end_unnamed(obj)

    def _resync(self) -> None:
        for pod in list(self.pods.values()):
            self.refresh(pod)
        for obj in self._cache.objects():
            self._end_unnamed(obj)
        self._reactor.after(RESYNC_S, self._resync)

    def _end_unnamed(self, obj: Object) -> None:
        """Delete a pod of this platform that belongs to no replica: a leftover, or a copy made by hand."""
        labels = obj["metadata"].get("labels") or {}
        if not self._is_open or self.is_superseded or labels.get(names.PLATFORM_LABEL) != self._platform:
            return
        if names.REPLICA_LABEL not in labels:
            # Not the pod of a replica: the control plane's own pod has the platform's label as well.
            return
        reading = read_pod(obj)
        pod = self._by_key.get(key_of(obj))
        if pod is not None and pod.replica_id == reading.replica_id and pod.uid in ("", reading.uid):
            return
        if self._is_higher(reading.term) or (reading.is_ending and not reading.is_over):
            return
        if self.is_expected(key_of(obj)):
            # It belongs to a queued replica and was created by an earlier control plane.
            return
        self.num_unnamed += 1
        _log.warning("pod %s belongs to no replica; it is deleted", key_of(obj).name)
        stray = PodState(
            replica_id=ReplicaId(reading.replica_id),
            workload_id=WorkloadId(reading.workload_id),
            key=key_of(obj),
            device_ids=reading.device_ids,
            node_id=NodeId(reading.node),
            uid=reading.uid,
            awaiting=frozenset(),
        )
        if stray.replica_id not in self.pods and stray.key not in self._by_key:
            # It holds its devices until it is gone, like any other pod.
            self.enter(stray)
        if reading.is_over:
            self._finish(stray, reading.exit_code, reading.end)
        else:
            self.delete(stray, UNNAMED_GRACE_S)

    def _is_higher(self, term: int) -> bool:
        """Whether a later leader has written this term; then nothing is written any more."""
        if term > self._term and not self.is_superseded:
            self.is_superseded = True
            _log.error("pods bear term %d, and this control plane leads in term %d: it stops", term, self._term)
            self.on_higher_term(term)
        return self.is_superseded

    def _note_term(self, term: int) -> None:
        self._is_higher(term)

    def _is_of(self, obj: Object, replica_id: ReplicaId) -> bool:
        metadata = obj["metadata"]
        labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
        return (
            labels.get(names.PLATFORM_LABEL) == self._platform
            and annotations.get(names.REPLICA_ANNOTATION) == replica_id
        )

    def _soon(self, function: Callable[[], None]) -> None:
        self._reactor.call(function)


def _state_shown(reading: Reading) -> PodLifecycle:
    if reading.is_running:
        return PodLifecycle.RUNNING
    return PodLifecycle.STARTING if reading.node else PodLifecycle.BINDING
