"""Submits the workload of a cluster's object, with the same checks and events as for a REST request."""

from __future__ import annotations

import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from springtide.backends.kubernetes.client.kinds import Object, uid_of
from springtide.backends.kubernetes.install.rbac import master_key_name, token_name
from springtide.backends.kubernetes.resources.client import Objects
from springtide.backends.kubernetes.resources.from_object import (
    FOLDER_ANNOTATION,
    check_job_spec,
    check_service_spec,
    container_settings,
    job_request,
    service_request,
    workload_name,
)
from springtide.backends.kubernetes.settings import KubernetesSettings
from springtide.control.records import JobRecord, ServiceRecord
from springtide.core.containers import ContainerSettings
from springtide.core.decoding import decode_json
from springtide.core.errors import Conflict, InvalidRequest
from springtide.core.quantities import validate_name
from springtide.core.workload import WorkloadId
from springtide.service.ports import PlatformLike
from springtide.service.submission.quarantine import object_key
from springtide.service.submission.schemas import JobIn, ScaleIn, ServiceIn, check_service, parse_body
from springtide.service.submission.shares import num_devices_of
from springtide.service.submission.submission import SubmissionService
from springtide.storage.folders.contents import take_archive

# The prefix of the Secrets that belong to single workloads (backends/kubernetes/pods/spec.py).
OWN_SECRETS = "springtide-"


class SourceMissing(InvalidRequest):
    """The object names a source that does not exist (yet)."""


class ResourceAdmission:
    """Submits the workloads of objects, each once: the object's uid is the idempotency key.

    Do not call it on the thread of the control loop, because it waits for the cluster and for the journal.
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

    def submit_job(self, obj: Object) -> JobRecord:
        """Submit the job of a complete TrainingFunction unless that was done before. Returns its record.

        Raises InvalidRequest (SourceMissing, SetAside), BackendError, StorageError.
        """
        with self._platform.quarantine.taking_in(_intake_key(obj)):
            return self._submit_job(obj)

    def _submit_job(self, obj: Object) -> JobRecord:
        uid, metadata = uid_of(obj), obj["metadata"]
        now = datetime.fromtimestamp(time.time(), UTC)
        created = datetime.fromisoformat(metadata["creationTimestamp"])
        if metadata.get("generation", 1) > 1:
            # The object was corrected or resumed after its creation: durations count from now.
            created = now
        devices = num_devices_of(self._platform.view())
        name = validate_name(workload_name(obj), "the object's name")
        check_job_spec(obj["spec"], devices)
        body = job_request(name, obj["spec"], self.files_of(obj), created=created, now=now, devices=devices)
        folder = metadata.get("annotations", {}).get(FOLDER_ANNOTATION)
        if folder is not None and "folder" not in body["source"]:
            try:
                body["source"]["folder"] = decode_json(folder, dict[str, str])
            except (msgspec.MsgspecError, ValueError) as error:
                raise InvalidRequest(f"the annotation {FOLDER_ANNOTATION} is no folder: {error}") from None
        self._take_folder(obj)
        request = parse_body(msgspec.json.encode(body), JobIn)
        try:
            record, _ = self._submissions.submit_job(request, f"object {uid}", self._container(obj))
        except Conflict:
            # Another request for the same object came first: return its job.
            found = self.job_of(uid)
            if found is None:
                raise
            return found
        return record

    def deploy_service(self, obj: Object) -> ServiceRecord:
        """Deploy the service of a complete InferenceFunction. Repeating it changes nothing.

        Raises InvalidRequest (SourceMissing, SetAside, Conflict), BackendError, StorageError.
        """
        with self._platform.quarantine.taking_in(_intake_key(obj)):
            return self._deploy_service(obj)

    def _deploy_service(self, obj: Object) -> ServiceRecord:
        name = workload_name(obj)
        check_service_spec(obj["spec"])
        body = service_request(obj["spec"], self.files_of(obj))
        # Check the request with the wanted bounds, even if it is deployed with others below.
        request = parse_body(msgspec.json.encode(body), ServiceIn)
        check_service(request)
        self._take_folder(obj)
        wanted = (request.options.min_replicas, request.options.max_replicas)
        known = self._platform.view().services.get(WorkloadId(name))
        if known is not None and known.is_served:
            # New bounds alone must not make a new revision: deploy with the old ones, then scale.
            body["options"] |= {
                "min_replicas": known.service.min_replicas,
                "max_replicas": known.service.max_replicas,
            }
            request = parse_body(msgspec.json.encode(body), ServiceIn)
        record = self._submissions.deploy_service(name, request, self._container(obj))
        if (record.min_replicas, record.max_replicas) == wanted:
            return record
        scaled = self._submissions.scale(name, ScaleIn(minimum=wanted[0], maximum=wanted[1]))
        assert isinstance(scaled, ServiceRecord)
        return scaled

    def job_of(self, uid: str) -> JobRecord | None:
        """The job of the object of that uid, also one that ended long ago. Raises JournalError."""
        view = self._platform.view()
        found = (job for job in view.jobs.values() if job.job.container and job.job.container.owner_uid == uid)
        return next(found, None) or view.ended.of_owner(uid)

    def _container(self, obj: Object) -> ContainerSettings:
        """The settings of the object's pods. Raises InvalidRequest for a Secret that belongs to the platform.

        A user who may create objects in a namespace may not be allowed to read its Secrets. Their code would see the
        values, and the platform's Secrets hold the keys of all workloads.
        """
        container = container_settings(obj)
        for name in container.secrets:
            if name in self._own_secrets or name.startswith(OWN_SECRETS):
                raise InvalidRequest(
                    f"spec.container.secrets names {name!r}, which is the platform's own; name a Secret of yours"
                )
        return container

    def _take_folder(self, obj: Object) -> None:
        """Keep the contents of an object's folder that are in ConfigMaps, unless they are here.

        Raises InvalidRequest (SourceMissing), BackendError, StorageError.
        """
        asked, namespace = obj["spec"]["source"].get("folder", {}), obj["metadata"].get("namespace", "")
        names = asked.get("configMaps", ())
        contents = self._platform.source_store.contents
        if not names or contents.has_folder(asked["sha256"]):
            return
        with tempfile.NamedTemporaryFile(prefix="springtide-folder-") as archive:
            for name in names:
                part = self._objects.config_map_part(namespace, name)
                if part is None:
                    raise SourceMissing(f"spec.source.folder names the ConfigMap {name!r}, which holds no part of one")
                archive.write(part)
            archive.flush()
            take_archive(contents, Path(archive.name), asked["sha256"])

    def files_of(self, obj: Object) -> dict[str, str]:
        """The files of an object's source, also from a ConfigMap. Raises SourceMissing, BackendError."""
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
        unknown = sorted(paths.keys() - found.keys())
        if unknown:
            raise SourceMissing(
                f"spec.source.paths names {unknown[0]!r}, which the ConfigMap {name!r} does not hold: it has "
                f"{', '.join(sorted(found)) or 'nothing'}"
            )
        return {**{paths.get(key, key): text for key, text in found.items()}, **files}


def _intake_key(obj: Object) -> str:
    return object_key(uid_of(obj), obj["metadata"].get("generation", 1))
