"""From an object of the cluster to a workload of the platform: the same checks and events as of a REST request."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import msgspec

from springtide.backends.kubernetes.client.kinds import Object, uid_of
from springtide.backends.kubernetes.install.rbac import master_key_name, token_name
from springtide.backends.kubernetes.resources.client import Objects
from springtide.backends.kubernetes.resources.from_object import (
    container_settings,
    job_request,
    service_request,
    workload_name,
)
from springtide.backends.kubernetes.settings import KubernetesSettings
from springtide.control.records import JobRecord, ServiceRecord
from springtide.core.containers import ContainerSettings
from springtide.core.errors import Conflict, InvalidRequest
from springtide.core.quantities import validate_name
from springtide.core.workload import WorkloadId
from springtide.service.ports import PlatformLike
from springtide.service.submission.schemas import JobIn, ScaleIn, ServiceIn, check_service, parse_body
from springtide.service.submission.shares import num_devices_of
from springtide.service.submission.submission import SubmissionService

# Secrets of single workloads begin like this (backends/kubernetes/pod_spec.py).
OWN_SECRETS = "springtide-"


class SourceMissing(InvalidRequest):
    """The object names a source that is not there (yet)."""


class ResourceAdmission:
    """Takes objects in, each once: the key of a submission is the object's uid.

    `submissions` is where every request ends, whichever way it came. Not for the decision loop: it waits
    for the cluster and for the journal.
    """

    def __init__(
        self, submissions: SubmissionService, platform: PlatformLike, objects: Objects, settings: KubernetesSettings
    ) -> None:
        self._submissions = submissions
        self._platform = platform
        self._objects = objects
        self._own_secrets = {
            master_key_name(settings),
            token_name(settings),
            settings.store_secret,
            settings.worker_store_secret,
        }

    def take_job(self, obj: Object) -> JobRecord:
        """Submit the job that a whole TrainingFunction stands for, unless that was done. Returns its record.

        Raises InvalidRequest (SourceMissing), BackendError, StorageError.
        """
        uid, metadata = uid_of(obj), obj["metadata"]
        now = datetime.fromtimestamp(time.time(), UTC)
        created = datetime.fromisoformat(metadata["creationTimestamp"])
        if metadata.get("generation", 1) > 1:
            # It was corrected or resumed since it was created: its time begins now.
            created = now
        devices = num_devices_of(self._platform.view())
        name = validate_name(workload_name(obj), "the object's name")
        asked = job_request(name, obj["spec"], self.files_of(obj), created=created, now=now, devices=devices)
        request = parse_body(msgspec.json.encode(asked), JobIn)
        try:
            record, _ = self._submissions.submit_job(request, f"object {uid}", self._container(obj))
        except Conflict:
            # Another request for the same object came first: its job counts.
            found = self.job_of(uid)
            if found is None:
                raise
            return found
        return record

    def take_service(self, obj: Object) -> ServiceRecord:
        """Deploy the service that a whole InferenceFunction stands for; the same one again changes nothing.

        Raises InvalidRequest (SourceMissing, Conflict), BackendError, StorageError.
        """
        name = workload_name(obj)
        asked = service_request(obj["spec"], self.files_of(obj))
        # Checked with the bounds that are wanted, whatever is sent below.
        request = parse_body(msgspec.json.encode(asked), ServiceIn)
        check_service(request)
        wanted = (request.options.min_replicas, request.options.max_replicas)
        known = self._platform.view().services.get(WorkloadId(name))
        if known is not None and known.is_served:
            # Other bounds are no other service: its replicas go on, and their number changes after.
            asked["options"] |= {
                "min_replicas": known.service.min_replicas,
                "max_replicas": known.service.max_replicas,
            }
            request = parse_body(msgspec.json.encode(asked), ServiceIn)
        record = self._submissions.deploy_service(name, request, self._container(obj))
        if (record.min_replicas, record.max_replicas) == wanted:
            return record
        scaled = self._submissions.scale(name, ScaleIn(minimum=wanted[0], maximum=wanted[1]))
        assert isinstance(scaled, ServiceRecord)
        return scaled

    def job_of(self, uid: str) -> JobRecord | None:
        records = self._platform.view().jobs.values()
        return next((job for job in records if job.job.container and job.job.container.owner_uid == uid), None)

    def _container(self, obj: Object) -> ContainerSettings:
        """What its pods are made of. Raises InvalidRequest for a Secret that is no user's.

        A user who may make objects in a namespace need not be allowed to read its Secrets: the code would see their
        values, and those of the platform are the keys of all workloads.
        """
        container = container_settings(obj)
        for name in container.secrets:
            if name in self._own_secrets or name.startswith(OWN_SECRETS):
                raise InvalidRequest(
                    f"spec.container.secrets names {name!r}, which is the platform's own; name a Secret of yours"
                )
        return container

    def files_of(self, obj: Object) -> dict[str, str]:
        """The files of a whole object's source, wherever they are. Raises SourceMissing, BackendError."""
        source, namespace = obj["spec"]["source"], obj["metadata"].get("namespace", "")
        files = {name: text or "" for name, text in (source.get("files") or {}).items()}
        paths = source.get("paths") or {}
        name = source.get("configMap")
        if not name:
            return files
        found = self._objects.config_map(namespace, name)
        if found is None:
            raise SourceMissing(
                f"spec.source.configMap {name!r} is not there; make it: "
                f"kubectl create configmap {name} -n {namespace} --from-file=train.py"
            )
        strange = sorted(paths.keys() - found.keys())
        if strange:
            raise SourceMissing(
                f"spec.source.paths names {strange[0]!r}, which the ConfigMap {name!r} does not hold: it has "
                f"{', '.join(sorted(found)) or 'nothing'}"
            )
        return {**{paths.get(key, key): text for key, text in found.items()}, **files}
