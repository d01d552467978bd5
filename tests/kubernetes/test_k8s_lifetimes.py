"""The life of objects against a real API server: they change while their jobs run, and go when their time is over."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kits.kubernetes.kube_http import Kube, Refused, wait_for
from kits.kubernetes.lab.lab import Cluster
from kits.kubernetes.object_platform import ObjectPlatform, install_definitions, training
from springtide.client.goals import TrainOptions
from springtide.client.kubernetes import ClusterClient as Client
from springtide.client.kubernetes import training_object
from springtide.client.sources.source import read_source
from springtide.core.events import JobFinished
from springtide.core.workload import ReplicaId, WorkloadId
from springtide.service.submission.source_stores import ObjectSources
from springtide.storage.stores.checked import CheckedStore
from springtide.storage.stores.files import FileStore
from springtide.storage.workloads.store import WorkloadStore

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def kube(cluster: Cluster) -> Kube:
    install_definitions(cluster.api)
    return cluster.api


class Kept(ObjectPlatform):
    """One whose sources and results are in an object store, as on a cluster."""

    def __init__(self, folder: Path, kube: Kube, namespace: str, **more: Any) -> None:
        super().__init__(folder, kube, namespace, **more)
        self.store = CheckedStore(FileStore(folder.parent / "objects", is_durable=False))
        self.platform.source_store = ObjectSources(self.store, folder)

    def id_of(self, name: str) -> WorkloadId:
        return WorkloadId(self.status(name)["workloadId"])

    def finish(self, name: str) -> None:
        """The training function returns, with a model and a log."""
        job_id = self.id_of(name)
        record = wait_for("the group", lambda: (r := self.platform.view().jobs[job_id]).group.is_confirmed and r)
        kept = WorkloadStore(self.store, job_id)
        kept.publish_artifact("model.pt", b"the model", record.group.generation, 7)
        kept.put_log(ReplicaId(f"{job_id}.0"), b"said")
        self.platform.post(JobFinished(job_id=job_id, generation=record.group.generation, step=7))

    def kept(self, job_id: WorkloadId) -> list[str]:
        prefix = f"workloads/{job_id}/"
        return [key.removeprefix(prefix).partition("/")[0] for key in self.store.keys(prefix)]


@pytest.fixture
def up(tmp_path: Path, kube: Kube, namespace: str):
    with Kept(tmp_path / "state", kube, namespace) as platform:
        yield platform


# --- what goes by itself ---------------------------------------------------------------------------------------------


def test_an_ended_job_goes_when_its_time_is_over_with_what_the_store_holds(up: Kept):
    up.kube.apply(training("goes", up.namespace, ttlSecondsAfterFinished=3600), training("stays", up.namespace))
    for name in ("goes", "stays"):
        up.wait_state(name, "RUNNING")
        up.finish(name)
    status = up.wait_state("goes", "SUCCEEDED")
    job_id = up.id_of("goes")
    status = wait_for("its time", lambda: (s := up.status("goes")).get("expiresAt") and s)
    assert status["expiresAt"] > status["endedAt"]
    expired = up.condition("goes", "Expired")
    assert (expired["status"], expired["reason"]) == ("False", "Kept")
    assert status["expiresAt"] in expired["message"]
    assert sorted(set(up.kept(job_id))) == ["artifacts", "head", "logs", "source"]
    # Its owner has seen enough.
    up.kube.patch(up.path("trainingfunctions", "goes"), {"spec": {"ttlSecondsAfterFinished": 0}})
    wait_for("its end", lambda: up.kube.find(up.path("trainingfunctions", "goes")) is None, within_s=20.0)
    assert sorted(up.kept(job_id)) == ["artifacts", "head"]
    up.wait_state("stays", "SUCCEEDED")
    assert up.condition("stays", "Expired") == {}
    assert up.kept(up.id_of("stays")).count("source") == 1

    def told() -> list[str]:
        items = up.kube.items(f"api/v1/namespaces/{up.namespace}/events")
        return [item["message"] for item in items if item["reason"] == "Expired"]

    assert "it goes, with 2 of its objects in the store" in wait_for("the event", told)[0]


def test_a_time_that_was_over_while_nobody_led_is_over(tmp_path: Path, kube: Kube, namespace: str):
    folder = tmp_path / "state"
    with Kept(folder, kube, namespace) as first:
        kube.apply(training("goes", namespace, ttlSecondsAfterFinished=3600, ttlKeeps="nothing"))
        first.wait_state("goes", "RUNNING")
        first.finish("goes")
        first.wait_state("goes", "SUCCEEDED")
        job_id = first.id_of("goes")
    kube.patch(first.path("trainingfunctions", "goes"), {"spec": {"ttlSecondsAfterFinished": 0}})
    with Kept(folder, kube, namespace) as second:
        wait_for("its end", lambda: kube.find(second.path("trainingfunctions", "goes")) is None, within_s=20.0)
        assert second.kept(job_id) == ["head"]
        # Its name is free again, and another job bears it.
        kube.apply(training("goes", namespace))
        assert second.wait_state("goes", "RUNNING")["workloadId"] != job_id


def test_a_job_that_left_the_state_stands_for_its_object_and_goes_with_it(
    tmp_path: Path, kube: Kube, namespace: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("springtide.control.upkeep.STAYS_S", 0.0)
    monkeypatch.setattr("springtide.control.upkeep.SNAPSHOT_STEPS", 1)
    folder = tmp_path / "state"
    with Kept(folder, kube, namespace) as first:
        path = first.path("trainingfunctions", "done")
        kube.apply(training("done", namespace, ttlSecondsAfterFinished=3600, ttlKeeps="nothing"))
        first.wait_state("done", "RUNNING")
        first.finish("done")
        first.wait_state("done", "SUCCEEDED")
        job_id = first.id_of("done")
        wait_for("it to leave the state", lambda: not first.platform.view().jobs)
    kube.patch(f"{path}/status", {"status": None})
    with Kept(folder, kube, namespace) as second:
        assert second.wait_state("done", "SUCCEEDED")["workloadId"] == job_id
        ended = second.platform.view().ended
        assert (dict(second.platform.view().jobs), [owned for owned, _ in ended.owned()]) == ({}, [job_id])
        kube.patch(path, {"spec": {"ttlSecondsAfterFinished": 0}})
        wait_for("its end", lambda: kube.find(path) is None, within_s=20.0)
        assert second.kept(job_id) == ["head"]
        wait_for("nothing more to be done for it", lambda: not ended.owned(), within_s=60.0)
        assert ended.get(job_id) is not None


# What nobody hears of is looked for twice a minute.
@pytest.mark.timeout(400)
def test_what_a_deleted_object_leaves_goes_in_its_time_and_nobody_elses(tmp_path: Path, kube: Kube, namespace: str):
    def labelled(name: str, platform: str, **spec: Any) -> dict[str, Any]:
        obj = training(name, namespace, **spec)
        obj["metadata"]["labels"] = {"springtide.dev/platform": platform}
        return obj

    def delete(up: Kept, name: str) -> None:
        kube.delete(up.path("trainingfunctions", name))
        # Nothing holds it, so that it goes also where nobody leads.
        assert kube.find(up.path("trainingfunctions", name)) is None

    folder = tmp_path / "state"
    # Both platforms have one store, and one of them is set to clear up: what is not its own it does not touch.
    with Kept(tmp_path / "neighbour", kube, namespace, name="neighbour") as neighbour:
        kube.apply(labelled("theirs", "neighbour"))
        neighbour.wait_state("theirs", "RUNNING")
        neighbour.finish("theirs")
        neighbour.wait_state("theirs", "SUCCEEDED")
        their_id = neighbour.id_of("theirs")
        their_keys = neighbour.kept(their_id)
        assert "source" in their_keys
        with Kept(folder, kube, namespace) as first:
            kube.apply(labelled("silent", "objects"))
            kube.apply(labelled("wished", "objects", ttlSecondsAfterFinished=0, ttlKeeps="nothing"))
            first.wait_state("silent", "RUNNING")
            first.wait_state("wished", "RUNNING")
            silent, wished = first.id_of("silent"), first.id_of("wished")
            first.finish("silent")
            first.wait_state("silent", "SUCCEEDED")
            delete(first, "silent")
            delete(first, "wished")
            wait_for("what it had to be gone", lambda: first.kept(wished) == ["head"], within_s=90.0)
            assert first.platform.view().jobs[wished].state == "CANCELLED"
            assert sorted(first.kept(silent)) == ["artifacts", "head", "logs", "source"]
        with Kept(folder, kube, namespace, finished_ttl_s=0.0) as second:
            wait_for("the rest to be gone", lambda: sorted(second.kept(silent)) == ["artifacts", "head"], within_s=90.0)
        assert neighbour.kept(their_id) == their_keys


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ({"ttlSecondsAfterFinished": -1}, "should be greater than or equal to 0"),
        ({"ttlKeeps": "logs"}, 'supported values: "artifacts", "nothing"'),
    ],
)
def test_a_time_that_cannot_be_is_a_422(kube: Kube, namespace: str, spec: dict[str, Any], told: str):
    with pytest.raises(Refused) as refusal:
        kube.post(
            f"apis/springtide.dev/v1alpha1/namespaces/{namespace}/trainingfunctions", training("bad", namespace, **spec)
        )
    assert refusal.value.status == 422
    assert told in refusal.value.body["message"].replace('\\"', '"')


# --- what changes while it runs --------------------------------------------------------------------------------------

KNOWN = {"samples": 32_000, "globalBatch": 32, "speeds": {"1": 10, "2": 18}}


def applied(up: Kept, name: str, status: str) -> dict[str, Any]:
    """The condition Applied, once it stands so for the newest spec."""

    def reached() -> dict[str, Any] | None:
        found = up.condition(name, "Applied")
        generation = up.kube.get(up.path("trainingfunctions", name))["metadata"]["generation"]
        is_new = found.get("observedGeneration") == generation
        return found if is_new and found.get("status") == status else None

    found = wait_for(f"{name} Applied={status}", reached, within_s=20.0)
    assert isinstance(found, dict)
    return found


def test_goal_and_retries_of_a_running_job_change_with_its_object(up: Kept):
    up.kube.apply(training("digits", up.namespace, **KNOWN, deadline="60m", budget="$4"))
    up.wait_state("digits", "RUNNING")
    path = up.path("trainingfunctions", "digits")
    first = up.status("digits")
    workers = list(up.executor.started)
    up.kube.patch(path, {"spec": {"deadline": "20m", "budget": "$9", "retries": 5, "workers": "1..4"}})
    applied(up, "digits", "True")
    job = up.platform.view().jobs[up.id_of("digits")]
    assert job.job.goal.deadline_s == pytest.approx(job.lifecycle.submitted_at_s + 1200.0, abs=2.0)
    assert (job.job.goal.budget_usd, job.job.max_restarts, job.bounds.max_workers) == (9.0, 5, 4)
    status = wait_for("the new deadline", lambda: (s := up.status("digits"))["deadline"] != first["deadline"] and s)
    assert up.condition("digits", "Promised")["status"] == "True"
    assert status["restarts"] == 0
    assert up.executor.started[: len(workers)] == workers

    def told() -> list[str]:
        items = up.kube.items(f"api/v1/namespaces/{up.namespace}/events")
        return [item["message"] for item in items if item["reason"] == "Edited"]

    assert any("budget $9.00" in text for text in wait_for("the event", told))


def test_what_cannot_be_promised_is_refused_with_what_could_and_nothing_changes(up: Kept):
    up.kube.apply(training("digits", up.namespace, **KNOWN, deadline="60m"))
    up.wait_state("digits", "RUNNING")
    path = up.path("trainingfunctions", "digits")
    before = up.platform.view().jobs[up.id_of("digits")].job.goal
    up.kube.patch(path, {"spec": {"deadline": "20s"}})
    refused = applied(up, "digits", "False")
    assert refused["reason"] == "ChangeRefused"
    assert "cannot be promised" in refused["message"]
    assert up.platform.view().jobs[up.id_of("digits")].job.goal == before
    offered = next(word for word in refused["message"].split() if word.endswith("Z"))
    up.kube.patch(path, {"spec": {"deadline": offered}})
    applied(up, "digits", "True")
    assert up.condition("digits", "Promised")["status"] == "True"
    up.kube.patch(path, {"spec": {"deadline": None, "epochs": 3}})
    refused = applied(up, "digits", "False")
    assert "spec.epochs cannot change any more: it says what is computed" in refused["message"]
    assert up.platform.view().jobs[up.id_of("digits")].job.goal.deadline_s is None
    up.kube.patch(path, {"spec": {"epochs": None}})
    applied(up, "digits", "True")


def test_an_edit_survives_the_control_plane_and_one_that_nobody_heard_is_made_later(
    tmp_path: Path, kube: Kube, namespace: str
):
    folder = tmp_path / "state"
    with Kept(folder, kube, namespace) as first:
        kube.apply(training("digits", namespace, budget="$1"))
        first.wait_state("digits", "RUNNING")
        kube.patch(first.path("trainingfunctions", "digits"), {"spec": {"budget": "$2"}})
        applied(first, "digits", "True")
    with Kept(folder, kube, namespace) as second:
        job = second.platform.view().jobs[second.id_of("digits")]
        assert job.job.goal.budget_usd == 2.0
        assert job.bounds.num_edits == 1
    kube.patch(first.path("trainingfunctions", "digits"), {"spec": {"budget": "$3"}})
    with Kept(folder, kube, namespace) as third:
        applied(third, "digits", "True")
        job = third.platform.view().jobs[third.id_of("digits")]
        assert (job.job.goal.budget_usd, job.bounds.num_edits) == (3.0, 2)


# --- code in several files -------------------------------------------------------------------------------------------

FILES = {
    "train.py": "from net.model import width\n\n\ndef fit(ctx):\n    return width()\n",
    "net/__init__.py": "",
    "net/model.py": "from net.deep.sizes import WIDTH\n\n\ndef width():\n    return WIDTH\n",
    "net/deep/__init__.py": "",
    "net/deep/sizes.py": "WIDTH = 17\n",
}


def answer_in_a_pod(up: Kept, name: str, folder: Path) -> str:
    """What the code says where its workers would find it: fetched as a pod fetches it, in a process of its own."""
    job_id = up.id_of(name)
    entrypoint = up.platform.view().jobs[job_id].job.entrypoint
    main = WorkloadStore(up.store, job_id).fetch_source(entrypoint.source_path, folder)
    assert main is not None
    code = (
        f"import sys; sys.path.insert(0, {str(main.parent)!r}); import train; print(train.{entrypoint.object_name}(0))"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_a_package_travels_in_the_object(up: Kept, tmp_path: Path):
    up.kube.apply(training("digits", up.namespace, source={"function": "fit", "files": FILES}))
    up.wait_state("digits", "RUNNING")
    assert answer_in_a_pod(up, "digits", tmp_path / "pod") == "17"
    applied(up, "digits", "True")
    changed = {**FILES, "net/deep/sizes.py": "WIDTH = 18\n"}
    up.kube.apply(training("digits", up.namespace, source={"function": "fit", "files": changed}))
    assert "spec.source cannot change any more" in applied(up, "digits", "False")["message"]


def test_a_config_map_says_where_its_keys_lie(up: Kept, tmp_path: Path):
    data = {name.replace("/", "."): text for name, text in FILES.items()}
    paths = {name.replace("/", "."): name for name in FILES if "/" in name}
    source = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "code", "namespace": up.namespace}}
    up.kube.apply({**source, "data": data})
    wrong = {"function": "fit", "configMap": "code", "paths": {"net.gone.py": "net/gone.py"}}
    up.kube.apply(training("digits", up.namespace, source=wrong))
    up.wait_state("digits", "REFUSED")
    assert "'net.gone.py', which the ConfigMap 'code' does not hold" in up.condition("digits", "Accepted")["message"]
    up.kube.patch(
        up.path("trainingfunctions", "digits"), {"spec": {"source": {"paths": {"net.gone.py": None, **paths}}}}
    )
    up.wait_state("digits", "RUNNING")
    assert answer_in_a_pod(up, "digits", tmp_path / "pod") == "17"


def test_run_sends_the_package_that_a_file_imports(up: Kept, tmp_path: Path):
    for name, text in FILES.items():
        (tmp_path / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mine" / name).write_text(text)
    source = read_source(tmp_path / "mine" / "train.py", "fit")
    with Client(up.kube.kubeconfig) as client:
        made = client.create(training_object(source, TrainOptions(), "digits", namespace=up.namespace))
    name = made["metadata"]["name"]
    up.wait_state(name, "RUNNING")
    assert answer_in_a_pod(up, name, tmp_path / "pod") == "17"


@pytest.mark.parametrize("path", ["../train.py", "/etc/passwd.py", "net/.hidden.py", "net//model.py"])
def test_a_path_that_leads_elsewhere_is_refused(up: Kept, path: str):
    files = {"train.py": FILES["train.py"], path: "x = 1\n"}
    up.kube.apply(training("bad", up.namespace, source={"function": "fit", "file": "train.py", "files": files}))
    up.wait_state("bad", "REFUSED")
    assert "name a file like train.py, or pkg/model.py" in up.condition("bad", "Accepted")["message"]
    assert up.store.keys("") == []


def test_what_is_empty_is_taken_as_it_is(up: Kept):
    files = {"train.py": "print(1)\n", "net/__init__.py": ""}
    container = {"env": [{"name": "EMPTY", "value": ""}]}
    source = {"file": "train.py", "files": files, "args": ["", "-v"]}
    up.kube.apply(training("script", up.namespace, source=source, workers=1, container=container))
    up.wait_state("script", "RUNNING")
    job = up.platform.view().jobs[up.id_of("script")].job
    assert job.entrypoint.args == ("", "-v")
    assert job.container.environment == {"EMPTY": ""}
    assert up.store.get(f"workloads/{job.job_id}/source/net/__init__.py") == b""
    applied(up, "script", "True")
