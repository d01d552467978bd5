"""Submissions on a platform whose workloads are objects of a cluster: each request creates or changes an object.

An object is created before its pods, so that every pod has an owner. A pause, a scale or a removal is also written into
the object, right before or after it takes effect, so that the object keeps describing the wanted state.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from springtide.backends.kubernetes.client.kinds import (
    INFERENCE_FUNCTION,
    TRAINING_FUNCTION,
    Key,
    Object,
    key_of,
    uid_of,
)
from springtide.backends.kubernetes.resources.client import Objects
from springtide.backends.kubernetes.resources.from_object import (
    MAX_OBJECT_SOURCE_BYTES,
    NAME_ANNOTATION,
    REQUEST_ANNOTATION,
    check_kept,
)
from springtide.backends.kubernetes.resources.option_fields import plain
from springtide.backends.kubernetes.resources.to_object import inference_function, training_function
from springtide.backends.kubernetes.settings import MANAGED_BY_LABEL, PLATFORM_LABEL, KubernetesSettings
from springtide.control.records import JobRecord, ServiceRecord
from springtide.core.containers import ContainerSettings
from springtide.core.errors import Conflict, InvalidRequest, SpringtideError
from springtide.core.options.rules import AUTO_IS_NO_OBJECT
from springtide.core.quantities import validate_name
from springtide.core.workload import WorkloadId
from springtide.service.lookup import find_job, find_service, find_workload
from springtide.service.ports import PlatformLike, Submissions
from springtide.service.reconciler.admission import ResourceAdmission
from springtide.service.submission import sources
from springtide.service.submission.folders import folder_of
from springtide.service.submission.function_checks import check_for_pods, check_functions
from springtide.service.submission.option_models import RequestModel
from springtide.service.submission.request_digest import digest, is_of_request, request_digest
from springtide.service.submission.schemas import (
    ContainerIn,
    JobIn,
    JobSourceIn,
    RollbackIn,
    ScaleIn,
    ServiceIn,
    ServiceSourceIn,
    check_job,
    check_service,
)
from springtide.service.submission.submission import MAX_KEY_CHARS


class ResourceSubmission:
    """Implements Submissions for the REST API: turns requests into objects; `direct` submits to the platform."""

    def __init__(
        self,
        platform: PlatformLike,
        direct: Submissions,
        admission: ResourceAdmission,
        objects: Objects,
        settings: KubernetesSettings,
    ) -> None:
        self._platform = platform
        self._direct = direct
        self._admission = admission
        self._objects = objects
        self._settings = settings

    def submit_job(
        self, request: JobIn, key: str | None, container: ContainerSettings | None = None
    ) -> tuple[JobRecord, bool]:
        """Create the job's object and submit the job. Raises InvalidRequest, Conflict, BackendError, StorageError."""
        check_job(request)
        check_functions(request)
        check_for_pods(request.options)
        self._check_source(request.source)
        if request.options.on == "auto":
            raise InvalidRequest(AUTO_IS_NO_OBJECT)
        suffix, told = _name_suffix(key), request_digest(request)
        obj = training_function(
            f"{request.name}-{suffix}",
            self._namespace(request.container),
            request.source.model_dump(),
            request.options.model_dump(),
            _plain_container(request.container),
        )
        annotations = {NAME_ANNOTATION: request.name, REQUEST_ANNOTATION: told}
        if request.source.folder is not None:
            folder_of(request, self._platform.source_store.contents)
        self._label(obj, annotations)
        created = self._objects.create(TRAINING_FUNCTION.name, obj)
        if created is None:
            if key is None:
                # The random name is taken: draw another one.
                return self.submit_job(request, None)
            return self._job_of_key(obj, request), False
        try:
            check_kept(obj, created)
            return self._admission.submit_job(created), True
        except InvalidRequest:
            # The answer says that the request is refused: the object is not needed.
            self._objects.delete(TRAINING_FUNCTION.name, key_of(created), uid=uid_of(created))
            raise

    def deploy_service(
        self, name: str, request: ServiceIn, container: ContainerSettings | None = None
    ) -> ServiceRecord:
        """Create or change the service's object and deploy it. Raises InvalidRequest, Conflict, BackendError."""
        validate_name(name, "the service's name")
        check_service(request)
        if request.release.canary or request.release.when_full == "stop-first":
            raise InvalidRequest(
                f"{name} is an object of the cluster: its new revision starts beside the present one, waits for a "
                "device where none is free, and gets all requests once it is ready; leave release.canary and "
                "stop-first out"
            )
        check_for_pods(request.options)
        self._check_source(request.source)
        if request.source.folder is not None:
            folder_of(request, self._platform.source_store.contents)
        old = self._platform.view().services.get(WorkloadId(name))
        where = old.service.container if old is not None and not old.is_removed else None
        namespace = self._namespace(request.container, where)
        if where is not None and where.namespace != namespace:
            raise Conflict(
                f"{name} is a service of the namespace {where.namespace!r}; leave container.namespace out, take that "
                "one away first, or choose another name"
            )
        obj = inference_function(
            name,
            namespace,
            request.source.model_dump(),
            request.options.model_dump(),
            _plain_container(request.container),
        )
        self._label(obj, {})
        created = self._objects.create(INFERENCE_FUNCTION.name, obj)
        if created is not None:
            try:
                check_kept(obj, created)
                return self._admission.deploy_service(created)
            except InvalidRequest:
                self._objects.delete(INFERENCE_FUNCTION.name, key_of(created), uid=uid_of(created))
                raise
        before = self._objects.read(INFERENCE_FUNCTION.name, key_of(obj))
        changed = self._objects.replace_spec(INFERENCE_FUNCTION.name, key_of(obj), obj)
        if before is None or changed is None:
            raise Conflict(f"the object of {name} went away meanwhile; deploy it once more")
        try:
            check_kept(obj, changed)
            return self._admission.deploy_service(changed)
        except InvalidRequest:
            self._objects.replace_spec(INFERENCE_FUNCTION.name, key_of(before), before)
            raise

    def roll_back(self, name: str, request: RollbackIn) -> ServiceRecord:
        """Give up what is being released. Raises NotFound, Conflict: the object says which revision is wanted."""
        record = find_service(self._platform.view(), name)
        if record.service.container is not None and (record.release is None or request.revision is not None):
            raise Conflict(f"{name} is an object of the cluster, which says what it is: change it back there")
        return self._direct.roll_back(name, request)

    def remove_service(self, name: str) -> ServiceRecord:
        """Remove a service and its object. Raises NotFound."""
        record = find_service(self._platform.view(), name)
        container = record.service.container
        if container is not None:
            key = Key(container.namespace, container.owner_name)
            self._objects.delete(INFERENCE_FUNCTION.name, key, uid=container.owner_uid)
        try:
            return self._direct.remove_service(name)
        except SpringtideError:
            # The reconciler has seen that the object is gone and removed the service.
            now = self._platform.view().services[record.workload_id]
            if not now.is_removed:
                raise
            return now

    def cancel_job(self, id_or_name: str) -> JobRecord:
        """End a job; its object stays, and its status shows the end. Raises NotFound, Conflict."""
        return self._direct.cancel_job(id_or_name)

    def pause_job(self, id_or_name: str) -> JobRecord:
        """Have a job checkpoint and release its devices; suspend its object. Raises NotFound, Conflict."""
        record = find_job(self._platform.view(), id_or_name)
        if not record.lifecycle.state.is_terminal and record.lifecycle.outcome is None:
            self._patch(record, {"suspend": True})
        return self._direct.pause_job(id_or_name)

    def resume_job(self, id_or_name: str, budget_usd: float | None = None) -> JobRecord:
        """Let a paused job go on. Raises NotFound, Conflict, InvalidRequest."""
        record = find_job(self._platform.view(), id_or_name)
        if record.bounds.is_paused and (budget_usd is None or budget_usd > record.spent.bill.total_usd):
            raised = {} if budget_usd is None else {"budget": f"${plain(budget_usd)}"}
            self._patch(record, {"suspend": False, **raised})
            now = find_job(self._platform.view(), record.workload_id)
            if not now.bounds.is_paused:
                # The reconciler has seen the change and resumed the job.
                return now
        return self._direct.resume_job(id_or_name, budget_usd)

    def change_job(self, id_or_name: str, changes: RequestModel) -> JobRecord:
        """Change a job that has not ended; its object stays. Raises NotFound, Conflict, InvalidRequest."""
        return self._direct.change_job(id_or_name, changes)

    def scale(self, id_or_name: str, bounds: ScaleIn) -> JobRecord | ServiceRecord:
        """Set new bounds, in the object too. Raises NotFound, Conflict, InvalidRequest."""
        record = self._direct.scale(id_or_name, bounds)
        low, high = bounds.minimum, bounds.maximum
        span: int | str = low if low == high and low else f"{low}..{high}"
        word = "workers" if isinstance(record, JobRecord) else "scale"
        self._patch(find_workload(self._platform.view(), id_or_name), {word: span, "replicas": None})
        return record

    def _patch(self, record: JobRecord | ServiceRecord, change: Mapping[str, Any]) -> None:
        container = record.job.container if isinstance(record, JobRecord) else record.service.container
        if container is not None:
            key = Key(container.namespace, container.owner_name)
            self._objects.patch(container.owner_kind, key, change, uid=container.owner_uid)

    def _job_of_key(self, obj: Object, request: JobIn) -> JobRecord:
        """The job of the object that an earlier request with this key created. Raises Conflict."""
        found = self._objects.read(TRAINING_FUNCTION.name, key_of(obj))
        if found is None:
            raise Conflict("the object of this Idempotency-Key is just going away; use a new key")
        job = self._admission.job_of(uid_of(found))
        if not is_of_request(found["metadata"].get("annotations", {}).get(REQUEST_ANNOTATION, ""), request):
            name = found["metadata"]["name"] if job is None else job.workload_id
            raise Conflict(f"this Idempotency-Key was used for {name} with another body; use a new key")
        return job or self._admission.submit_job(found)

    def _check_source(self, source: JobSourceIn | ServiceSourceIn) -> None:
        sources.check_source(source)
        size = len(source.text.encode()) + sum(len(text.encode()) for text in source.files.values())
        if size > MAX_OBJECT_SOURCE_BYTES:
            raise InvalidRequest(
                f"the source has {size:,} bytes, and an object of the cluster takes {MAX_OBJECT_SOURCE_BYTES:,}; put "
                "it into a ConfigMap that an object names, or into the image"
            )

    def _namespace(self, container: ContainerIn | None, known: ContainerSettings | None = None) -> str:
        named = "" if container is None else container.namespace or ""
        usual = self._settings.namespaces[0] if self._settings.namespaces else self._settings.namespace
        namespace = named or (known.namespace if known is not None else "") or usual
        if not self._objects.watches(namespace):
            raise InvalidRequest(
                f"container.namespace {namespace!r} is not this platform's; use one of "
                f"{', '.join(self._objects.namespaces)}"
            )
        return namespace

    def _label(self, obj: Object, annotations: Mapping[str, str]) -> None:
        metadata = obj["metadata"]
        metadata["labels"] = {MANAGED_BY_LABEL: "springtide", PLATFORM_LABEL: self._settings.name}
        if annotations:
            metadata["annotations"] = dict(annotations)


def _plain_container(container: ContainerIn | None) -> dict[str, Any]:
    return {} if container is None else container.model_dump(exclude={"namespace"}, exclude_none=True)


def _name_suffix(key: str | None) -> str:
    """The suffix of an object's name, the same for the same key. Raises InvalidRequest for an unusable key."""
    if key is None:
        return secrets.token_hex(3)
    if not 1 <= len(key) <= MAX_KEY_CHARS or not key.isascii() or not key.isprintable():
        raise InvalidRequest(f"the Idempotency-Key must be 1 to {MAX_KEY_CHARS} printable characters; a UUID is good")
    return digest(key)[:6]
