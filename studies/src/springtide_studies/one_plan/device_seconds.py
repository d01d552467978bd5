"""What a run holds of the cluster: device-seconds of each model of device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from springtide.core.actions import StartReplica
from springtide.core.events import ReplicaLost, ReplicaStopped
from springtide.core.ports import Step
from springtide.core.resources import DeviceId
from springtide.core.workload import ReplicaId, TrainingJob


@dataclass(slots=True)
class _Tenants:
    jobs: int = 0
    services: int = 0
    since_s: float = 0.0


class DeviceSeconds:
    """Counts a device, once, while a job or, up to `until_s`, a service holds a part of it.

    `models` are those of the devices. Nodes do not fail.
    """

    def __init__(self, models: Mapping[DeviceId, str], until_s: float) -> None:
        self._models, self._until_s = models, until_s
        self._tenants = defaultdict[DeviceId, _Tenants](_Tenants)
        self._held: dict[ReplicaId, tuple[DeviceId, bool]] = {}
        self._total_s = defaultdict[str, float](float)

    def note(self, step: Step) -> None:
        """Take in what has stopped and what starts."""
        for event in step.events:
            if isinstance(event, ReplicaStopped | ReplicaLost) and event.replica_id in self._held:
                self._change(*self._held.pop(event.replica_id), -1, step.now_s)
        for action in step.actions:
            if isinstance(action, StartReplica) and action.replica_id not in self._held:
                place = self._held[action.replica_id] = action.device_id, isinstance(action.workload, TrainingJob)
                self._change(*place, 1, step.now_s)

    def device_s(self, now_s: float) -> dict[str, float]:
        """Device-seconds by model up to `now_s`, at which the run ends."""
        for device_id in list(self._tenants):
            self._change(device_id, True, 0, now_s)
        return dict(self._total_s)

    def _change(self, device_id: DeviceId, is_job: bool, number: int, now_s: float) -> None:
        tenants = self._tenants[device_id]
        if tenants.jobs or tenants.services:
            end_s = now_s if tenants.jobs else min(now_s, self._until_s)
            self._total_s[self._models[device_id]] += max(0.0, end_s - tenants.since_s)
        tenants.since_s = now_s
        if is_job:
            tenants.jobs += number
        else:
            tenants.services += number
