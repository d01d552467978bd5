"""A cluster whose objects are kept in memory, and a reconciler on it."""

from __future__ import annotations

import copy

from springtide.backends.kubernetes.client.kinds import Key, key_of, uid_of
from springtide.backends.kubernetes.resources.from_object import trimmed
from springtide.backends.kubernetes.settings import KubernetesSettings
from springtide.core.errors import BackendError
from springtide.service.reconciler.admission import ResourceAdmission
from springtide.service.reconciler.jobs import JobReconciler
from springtide.service.reconciler.services import ServiceObjects
from springtide.service.submission.submission import SubmissionService


class ClusterDouble:
    """What the server has, and what a cache holds of it: apart, until `see` is called."""

    namespaces = ("ml",)

    def __init__(self):
        self.server = {}
        self.cached = {}
        self.told = []
        self.reads = 0
        self.is_away = False
        self.config_maps = {}
        self.next_uid = 0

    def put(self, kind="TrainingFunction", name="digits", **spec):
        self.next_uid += 1
        source = {"function": "fit", "files": {"train.py": "def fit(ctx):\n    pass\n"}}
        if kind == "InferenceFunction":
            source = {"class": "Echo", "files": {"serve.py": "class Echo: ...\n"}}
        obj = {
            "kind": kind,
            "metadata": {
                "name": name,
                "namespace": "ml",
                "uid": f"u{self.next_uid}",
                "generation": 1,
                "creationTimestamp": "2030-01-31T12:00:00Z",
            },
            "spec": {"source": source, **spec},
        }
        self.server[kind, Key("ml", name)] = obj
        return self.see(obj)

    def change(self, obj, **spec):
        found = self.server[obj["kind"], key_of(obj)]
        found["spec"] |= spec
        found["metadata"]["generation"] += 1
        return found

    def see(self, obj):
        seen = trimmed(copy.deepcopy(self.server[obj["kind"], key_of(obj)]))
        self.cached[obj["kind"], key_of(obj)] = seen
        return seen

    def get(self, kind, key):
        return self.cached.get((kind, key))

    def all(self, kind):
        return [obj for (found, _), obj in self.cached.items() if found == kind]

    def watches(self, namespace):
        return namespace in self.namespaces

    def vanish(self, obj):
        """It is deleted by its owner, and that is seen."""
        del self.server[obj["kind"], key_of(obj)], self.cached[obj["kind"], key_of(obj)]

    def read(self, kind, key):
        self.reads += 1
        if self.is_away:
            raise BackendError("the API server does not answer")
        return copy.deepcopy(self.server.get((kind, key)))

    def config_map(self, namespace, name):
        return self.config_maps.get(name)

    def config_map_part(self, namespace, name):
        return self.config_maps.get(name)

    def tell_status(self, obj, status):
        self.told.append((uid_of(obj), status))


class House:
    def __init__(self, platform):
        self.platform = platform
        self.cluster = ClusterDouble()
        self.submissions = SubmissionService(platform)
        settings = KubernetesSettings(name="ml-platform", store_secret="store")
        self.admission = ResourceAdmission(self.submissions, platform, self.cluster, settings)
        self.caps = {}
        self.jobs = JobReconciler(platform, self.cluster, self.admission, self.submissions, lambda: self.caps)
        self.services = ServiceObjects(platform, self.cluster, self.admission, self.submissions)

    def job(self, obj):
        return self.admission.job_of(uid_of(obj))

    def compare(self, obj):
        return self.jobs.compare(self.cluster.see(obj), self.job(obj))


class Moments:
    def __init__(self):
        self.at_s = 1000.0

    def __call__(self):
        return self.at_s
