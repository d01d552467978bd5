"""A cluster with objects that expire, and the reconciler that removes them."""

from __future__ import annotations

from kits.service.cluster_double import ClusterDouble
from kits.service.platform_double import PlatformDouble
from springtide.backends.kubernetes.client.kinds import key_of, uid_of
from springtide.backends.kubernetes.settings import KubernetesSettings
from springtide.core.errors import BackendError
from springtide.core.workload import ReplicaId
from springtide.service.reconciler.admission import ResourceAdmission
from springtide.service.reconciler.expiry import Expiry
from springtide.service.submission.source_stores import ObjectSources
from springtide.service.submission.submission import SubmissionService
from springtide.storage.stores.checked import CheckedStore
from springtide.storage.stores.files import FileStore
from springtide.storage.workloads.store import WorkloadStore


class Cluster(ClusterDouble):
    def __init__(self):
        super().__init__()
        self.events = []

    def delete(self, kind, key, *, uid):
        if self.is_away:
            raise BackendError("the API server does not answer")
        assert self.server[kind, key]["metadata"]["uid"] == uid
        del self.server[kind, key]

    def tell_event(self, event):
        self.events.append(event)


class House:
    def __init__(self, platform: PlatformDouble, folder):
        self.platform = platform
        self.store = CheckedStore(FileStore(folder, is_durable=False))
        platform.source_store = ObjectSources(self.store, platform.state_dir)
        self.cluster = Cluster()
        self.submissions = SubmissionService(platform)
        settings = KubernetesSettings(name="ml-platform")
        self.admission = ResourceAdmission(self.submissions, platform, self.cluster, settings)
        self.expiry = Expiry(platform, self.cluster, "ml-platform")

    def ended(self, **spec):
        obj = self.cluster.put(**spec)
        job = self.admission.submit_job(self.cluster.read("TrainingFunction", key_of(obj)))
        kept = WorkloadStore(self.store, job.workload_id)
        kept.publish_artifact("model.pt", b"the model", 1, 5)
        kept.put_log(ReplicaId(f"{job.workload_id}.0"), b"said")
        self.submissions.cancel_job(job.workload_id)
        self.platform.stop_replicas(job.workload_id)
        return obj

    def look(self, obj):
        record = self.admission.job_of(uid_of(obj))
        return self.expiry.check(self.cluster.see(obj), record)

    def settle(self):
        """Wait until whoever was on his way has gone."""
        self.expiry._pool.submit(lambda: None).result(10.0)
        self.expiry._pool.shutdown(wait=True)
        self.expiry._pool = type(self.expiry._pool)(1)

    def kept(self, obj):
        prefix = f"workloads/{self.admission.job_of(uid_of(obj)).workload_id}/"
        return [key.removeprefix(prefix) for key in self.store.keys(prefix)]

    def is_there(self, obj):
        return ("TrainingFunction", key_of(obj)) in self.cluster.server


ARTIFACT = "artifacts/00000001-0000000005/model.pt"
