"""Objects against a real API server: refusals that say what would do, three doors to one room, and no job twice."""

from __future__ import annotations

import http.client
import json
import os
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest

from kits.kubernetes.kube_http import GROUP, Kube, Refused, wait_for
from kits.kubernetes.lab.lab import Cluster
from kits.kubernetes.object_platform import SERVE, TRAIN, ObjectPlatform, inference, install_definitions, training
from kits.service.sent_folders import sent_tree
from springtide.client.kubernetes import ClusterClient as Client
from springtide.client.kubernetes import PackedFolder, check_object
from springtide.client.sources.source import SentFolder
from springtide.core.errors import Conflict, InvalidRequest
from springtide.service.reconciler import controller as resource_controller
from springtide.service.submission.schemas import JobIn, ScaleIn, ServiceIn, parse_body
from springtide.storage.folders.contents import ContentDirectory, write_archive
from springtide.storage.folders.tree import encode_tree

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def kube(cluster: Cluster) -> Kube:
    install_definitions(cluster.api)
    return cluster.api


@pytest.fixture
def up(tmp_path: Path, kube: Kube, namespace: str):
    with ObjectPlatform(tmp_path / "state", kube, namespace) as platform:
        yield platform


def job_in(name: str = "digits", **options: object) -> JobIn:
    source = {"filename": "train.py", "text": TRAIN, "object_name": "fit"}
    return parse_body(msgspec.json.encode({"name": name, "source": source, "options": options}), JobIn)


def service_in(**options: object) -> ServiceIn:
    source = {"filename": "serve.py", "text": SERVE, "object_name": "Echo"}
    return parse_body(msgspec.json.encode({"source": source, "options": options}), ServiceIn)


# --- what the server itself refuses ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ({"deadline": "soon"}, "a time like 90m, 18:00 or 2030-01-31T18:00:00Z"),
        ({"budget": "four"}, "money like $4"),
        ({"workers": "1-4"}, "a number like 4, a range like 1..8, or auto"),
        ({"workers": 0}, "spec.workers in body should be greater than or equal to 1"),
        ({"epochs": 0}, "spec.epochs in body should be greater than or equal to 1"),
        ({"learningRate": "cubic"}, 'supported values: "linear", "sqrt", "adascale", "none"'),
        ({"share": "half"}, "a share in quotes like 0.3, 30% or 0.3..0.6"),
        ({"deviceMemory": "much"}, "a size like 24GB or 512MiB"),
        ({"source": {"function": "fit"}}, "spec.source.files: Required value"),
        ({"source": {"function": "a-b", "configMap": "c"}}, "the name of a function like fit"),
        ({"container": {"resources": {"cpu": "many"}}}, "cores like 2 or 500m"),
        ({"container": {"env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]}}, "Duplicate value"),
        ({"suspend": "yes"}, "spec.suspend in body must be of type boolean"),
    ],
)
def test_a_bad_spec_is_a_422_with_the_mend(kube: Kube, namespace: str, spec, told):
    body = training("bad", namespace, **spec)
    with pytest.raises(Refused) as refusal:
        kube.post(f"apis/springtide.dev/v1alpha1/namespaces/{namespace}/trainingfunctions", body)
    assert refusal.value.status == 422
    assert told in refusal.value.body["message"].replace('\\"', '"')


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ({"slo": "fast"}, "a latency like p99 < 200ms"),
        ({"scale": "0-4"}, "a number like 4, a range like 1..8"),
        ({"source": {"files": {"a.py": "x"}}}, "spec.source.class: Required value"),
        ({"maxBatch": 0}, "spec.maxBatch in body should be greater than or equal to 1"),
    ],
)
def test_a_bad_service_is_a_422_with_the_mend(kube: Kube, namespace: str, spec, told):
    body = inference("bad", namespace, **spec)
    with pytest.raises(Refused) as refusal:
        kube.post(f"apis/springtide.dev/v1alpha1/namespaces/{namespace}/inferencefunctions", body)
    assert refusal.value.status == 422
    assert told in refusal.value.body["message"]


def test_a_name_that_no_job_could_bear_is_refused(kube: Kube, namespace: str):
    with pytest.raises(Refused, match="at most 56 chars"):
        kube.post(
            f"apis/springtide.dev/v1alpha1/namespaces/{namespace}/trainingfunctions", training("a" * 57, namespace)
        )


# --- kubectl apply ---------------------------------------------------------------------------------------------------


def test_an_object_that_no_platform_has_seen_says_so(kube: Kube, namespace: str):
    for obj in (training("alone", namespace), inference("alone", namespace)):
        kube.apply(obj)
        plural = f"{obj['kind'].lower()}s"
        (told,) = kube.get(f"{GROUP}/namespaces/{namespace}/{plural}/alone")["status"]["conditions"]
        assert (told["type"], told["status"], told["reason"]) == ("Accepted", "Unknown", "NotSeen")
        assert "no platform has taken it in" in told["message"]


def test_an_applied_object_is_a_job_and_says_how_it_stands(up: ObjectPlatform):
    up.kube.apply(training("digits", up.namespace, deadline="90m", budget="$4", params={"lr": 0.1}))
    status = up.wait_state("digits", "RUNNING")
    (job,) = up.jobs()
    assert status["workloadId"] == job.job_id
    assert job.job_id.startswith("digits-")
    assert (job.min_workers, job.max_workers, job.budget_usd) == (1, 2, 4.0)
    status = wait_for("both workers", lambda: (s := up.status("digits")).get("workers") == "2/1..2" and s)
    assert status["plan"]["workers"] == 2
    assert status["plan"]["devices"] == ["n1/0", "n1/1"]
    assert status["plan"]["nodes"] == ["n1"]
    assert status["cost"].startswith("$")
    assert status["deadline"].endswith("UTC")
    assert status["selector"] == f"springtide.dev/workload={job.job_id}"
    conditions = {each["type"]: (each["status"], each["reason"]) for each in status["conditions"]}
    assert conditions["Accepted"] == ("True", "Submitted")
    assert conditions["Applied"] == ("True", "InForce")
    assert conditions["Running"] == ("True", "Training")
    assert conditions["Complete"] == ("False", "Unfinished")
    owner = up.executor.started[0].workload.container
    uid = up.kube.get(up.path("trainingfunctions", "digits"))["metadata"]["uid"]
    assert (owner.owner_uid, owner.owner_name, owner.namespace) == (uid, "digits", up.namespace)


def test_kubectl_prints_the_columns(up: ObjectPlatform):
    up.kube.apply(training("digits", up.namespace, deadline="90m"))
    up.wait_state("digits", "RUNNING")
    server = urlsplit(up.kube.server)
    connection = http.client.HTTPSConnection(server.hostname, server.port, context=up.kube._tls)
    headers = {"Accept": "application/json;as=Table;v=v1;g=meta.k8s.io"}
    connection.request("GET", "/" + up.path("trainingfunctions"), headers=headers)
    table = json.loads(connection.getresponse().read())
    connection.close()
    shown = {
        column["name"]: cell for column, cell in zip(table["columnDefinitions"], table["rows"][0]["cells"], strict=True)
    }
    assert list(shown)[1:8] == ["STATE", "WORKERS", "PROGRESS", "ETA", "DEADLINE", "SLACK", "COST"]
    assert shown["STATE"] == "RUNNING"
    assert shown["DEADLINE"].endswith("UTC")


def test_every_decision_is_an_event_with_its_reason(up: ObjectPlatform):
    up.kube.apply(training("digits", up.namespace))
    up.wait_state("digits", "RUNNING")

    def told() -> dict[str, str] | None:
        items = up.kube.items(f"api/v1/namespaces/{up.namespace}/events")
        found = {item["reason"]: item["message"] for item in items if item["involvedObject"]["name"] == "digits"}
        return found if {"Submitted", "StartingReplica", "Started"} <= found.keys() else None

    events = wait_for("events", told, within_s=20.0)
    assert "1..2 workers" in events["Submitted"]
    assert "on n1/" in events["StartingReplica"]
    nodes = up.kube.items("api/v1/namespaces/default/events", fieldSelector="involvedObject.kind=Node")
    assert any(item["message"] == "offers 4 devices to the platform, for shared" for item in nodes)


def test_what_can_change_changes_and_the_rest_is_refused_by_a_condition(up: ObjectPlatform):
    up.kube.apply(training("digits", up.namespace))
    up.wait_state("digits", "RUNNING")
    path = up.path("trainingfunctions", "digits")
    up.kube.patch(path, {"spec": {"workers": "1..4"}})
    wait_for("four workers", lambda: up.status("digits").get("workers") == "4/1..4")
    scale = up.kube.get(f"{path}/scale")
    assert scale["status"]["selector"] == up.status("digits")["selector"]
    assert scale["status"]["replicas"] == 4
    up.kube.patch(f"{path}/scale", {"spec": {"replicas": 2}})
    wait_for("two workers", lambda: up.status("digits").get("workers") == "2/1..2")
    up.kube.patch(path, {"spec": {"epochs": 7}})
    refused = wait_for(
        "a refusal", lambda: (c := up.condition("digits", "Applied")).get("status") == "False" and c, within_s=20.0
    )
    assert refused["reason"] == "ChangeRefused"
    assert "spec.epochs cannot change any more" in refused["message"]
    assert "delete the object and apply it again" in refused["message"]
    assert up.jobs()[0].num_epochs == 1
    up.kube.patch(path, {"spec": {"epochs": 1}})
    wait_for("all in force", lambda: up.condition("digits", "Applied").get("status") == "True")


def test_suspend_pauses_and_lets_go_again(up: ObjectPlatform):
    up.kube.apply(training("digits", up.namespace, suspend=True))
    status = up.wait_state("digits", "SUSPENDED")
    assert "workloadId" not in status
    path = up.path("trainingfunctions", "digits")
    up.kube.patch(path, {"spec": {"suspend": False}})
    up.wait_state("digits", "RUNNING")
    up.kube.patch(path, {"spec": {"suspend": True}})
    up.wait_state("digits", "PAUSED")
    assert up.condition("digits", "Running")["reason"] == "Paused"
    up.kube.patch(path, {"spec": {"suspend": False}})
    up.wait_state("digits", "RUNNING")
    assert len(up.jobs()) == 1


def test_a_deleted_object_ends_its_job(up: ObjectPlatform):
    up.kube.apply(training("digits", up.namespace))
    up.wait_state("digits", "RUNNING")
    up.kube.delete(up.path("trainingfunctions", "digits"))
    wait_for("the end", lambda: up.jobs()[0].state == "CANCELLED")
    up.kube.apply(training("digits", up.namespace))
    up.wait_state("digits", "RUNNING")
    assert [job.state for job in up.jobs()] == ["CANCELLED", "RUNNING"]


def test_what_only_the_platform_can_refuse_is_a_condition(up: ObjectPlatform):
    up.kube.apply(training("torn", up.namespace, source={"function": "fit", "files": {"train.py": "def fit(:\n"}}))
    up.kube.apply(training("upside", up.namespace, workers="4..2"))
    up.wait_state("torn", "REFUSED")
    up.wait_state("upside", "REFUSED")
    accepted = up.condition("torn", "Accepted")
    assert (accepted["status"], accepted["reason"]) == ("False", "InvalidSpec")
    assert "train.py line 1 is not valid Python" in accepted["message"]
    assert "spec.workers '4..2'" in up.condition("upside", "Accepted")["message"]
    up.kube.patch(up.path("trainingfunctions", "upside"), {"spec": {"workers": "2..4"}})
    up.wait_state("upside", "RUNNING")
    assert [job.name for job in up.jobs()] == ["upside"]


def test_a_source_may_come_later_in_a_config_map_and_services_follow_it(
    up: ObjectPlatform, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(resource_controller, "RESYNC_S", 1.0)
    up.kube.apply(inference("echo", up.namespace, source={"class": "Echo", "configMap": "code"}))
    up.wait_state("echo", "REFUSED", "inferencefunctions")
    accepted = up.condition("echo", "Accepted", "inferencefunctions")
    assert accepted["reason"] == "SourceMissing"
    assert "kubectl create configmap code" in accepted["message"]
    source = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "code", "namespace": up.namespace}}
    up.kube.apply({**source, "data": {"serve.py": SERVE}})
    status = up.wait_state("echo", "READY", "inferencefunctions")
    assert status["revision"] == 1
    up.kube.apply({**source, "data": {"serve.py": SERVE + "# changed\n"}})
    wait_for("a new revision", lambda: up.status("echo", "inferencefunctions").get("revision") == 2)


def test_one_address_is_one_services(up: ObjectPlatform, cluster: Cluster, tmp_path: Path):
    with cluster.namespace("other") as other:
        folder = tmp_path / "both"
        with ObjectPlatform(folder, up.kube, up.namespace, name="both", namespaces=(up.namespace, other)) as both:
            up.reconciler.stop()
            both.kube.apply(inference("echo", up.namespace))
            wait_for("the first", lambda: both.status("echo", "inferencefunctions").get("state") == "READY")
            both.kube.apply(inference("echo", other))
            taken = wait_for(
                "a refusal",
                lambda: (
                    (c := both.condition("echo", "Accepted", "inferencefunctions", other))["reason"] != "NotSeen" and c
                ),
            )
            assert taken["reason"] == "NameTaken"
            assert f"{up.namespace}/echo" in taken["message"]
            both.kube.delete(both.path("inferencefunctions", "echo"))
            wait_for(
                "the second",
                lambda: both.status("echo", "inferencefunctions", other).get("state") == "READY",
                within_s=20.0,
            )


def test_an_object_of_another_platform_is_left_alone(up: ObjectPlatform):
    theirs = training("theirs", up.namespace)
    theirs["metadata"]["labels"] = {"springtide.dev/platform": "another"}
    up.kube.apply(theirs, training("mine", up.namespace))
    up.wait_state("mine", "RUNNING")
    (told,) = up.status("theirs")["conditions"]
    assert told["reason"] == "NotSeen"
    assert [job.name for job in up.jobs()] == ["mine"]


# --- REST and the command line ---------------------------------------------------------------------------------------


def test_a_job_over_rest_has_its_object_before_it_has_a_pod(up: ObjectPlatform):
    record, is_new = up.submissions.submit_job(job_in(num_epochs=3, max_workers=2, deadline_s=600.0), "key 1")
    assert is_new
    owner = record.job.container
    assert owner.owner_kind == "TrainingFunction"
    obj = up.kube.get(up.path("trainingfunctions", owner.owner_name))
    assert obj["metadata"]["uid"] == owner.owner_uid
    assert (obj["spec"]["epochs"], obj["spec"]["workers"], obj["spec"]["deadline"]) == (3, "1..2", "600s")
    up.wait_state(owner.owner_name, "RUNNING")
    again, is_new = up.submissions.submit_job(job_in(num_epochs=3, max_workers=2, deadline_s=600.0), "key 1")
    assert not is_new
    assert again.workload_id == record.workload_id
    with pytest.raises(Conflict, match="with another body"):
        up.submissions.submit_job(job_in(num_epochs=4), "key 1")
    assert len(up.jobs()) == 1
    assert up.condition(owner.owner_name, "Applied")["status"] == "True"


def test_a_job_over_rest_brings_its_folder_and_its_object_names_that(up: ObjectPlatform):
    contents = up.platform.source_store.contents
    tree = sent_tree(contents, {"train.py": TRAIN.encode(), "helper.py": b"x = 1\n"})
    asked = {"sha256": encode_tree(tree)[0], "path": "train.py", "directory": "", "origin": "/projects/mine"}
    source = {"filename": "train.py", "text": TRAIN, "object_name": "fit", "folder": asked}
    request = parse_body(msgspec.json.encode({"name": "digits", "source": source, "options": {}}), JobIn)
    record, _ = up.submissions.submit_job(request, None)
    obj = up.kube.get(up.path("trainingfunctions", record.job.container.owner_name))
    assert obj["spec"]["source"]["folder"] == {name: value for name, value in asked.items() if value}
    folder = record.job.entrypoint.folder
    assert (folder.sha256, folder.num_files) == (asked["sha256"], 2)
    assert (up.platform.workload_dir(record.workload_id) / "folder" / "helper.py").read_bytes() == b"x = 1\n"
    contents.discard(tree.files[0].sha256)
    with pytest.raises(Conflict, match="were not sent"):
        up.submissions.submit_job(request, None)
    assert len(up.jobs()) == 1
    assert len(up.kube.get(up.path("trainingfunctions"))["items"]) == 1, "no object of a refused request"


def test_what_is_done_over_rest_is_said_by_the_object(up: ObjectPlatform):
    record, _ = up.submissions.submit_job(job_in(max_workers=2), None)
    name, job_id = record.job.container.owner_name, record.workload_id
    path = up.path("trainingfunctions", name)
    up.wait_state(name, "RUNNING")
    up.submissions.pause_job(job_id)
    up.wait_state(name, "PAUSED")
    assert up.kube.get(path)["spec"]["suspend"] is True
    up.submissions.resume_job(job_id, 9.0)
    up.wait_state(name, "RUNNING")
    spec = up.kube.get(path)["spec"]
    assert (spec["suspend"], spec["budget"]) == (False, "$9")
    up.submissions.scale(job_id, ScaleIn(minimum=1, maximum=1))
    wait_for("one worker", lambda: up.status(name).get("workers") == "1/1")
    assert up.kube.get(path)["spec"]["workers"] == 1
    up.submissions.cancel_job(job_id)
    up.wait_state(name, "CANCELLED")
    assert up.kube.find(path) is not None


def test_a_service_over_rest_is_an_object_and_goes_with_it(up: ObjectPlatform):
    up.submissions.deploy_service("echo", service_in(min_replicas=1, max_replicas=2))
    up.wait_state("echo", "READY", "inferencefunctions")
    up.submissions.deploy_service("echo", service_in(min_replicas=1, max_replicas=3))
    path = up.path("inferencefunctions", "echo")
    assert up.kube.get(path)["spec"]["scale"] == "1..3"
    wait_for("the bounds", lambda: up.status("echo", "inferencefunctions").get("workers", "").endswith("1..3"))
    up.submissions.remove_service("echo")
    assert up.kube.find(path) is None
    wait_for("the end", lambda: up.platform.view().services["echo"].is_removed)


def test_a_submission_that_is_refused_leaves_no_object(up: ObjectPlatform):
    # Of a platform that knows no device yet nothing is refused for their number.
    wait_for("its node", lambda: up.platform.view().nodes)
    with pytest.raises(InvalidRequest, match="9 workers at once"):
        up.submissions.submit_job(job_in(min_workers=9, max_workers=9, share={"request": 0.5}), None)
    body = {**job_in().model_dump(mode="json"), "container": {"namespace": "elsewhere"}}
    elsewhere = parse_body(msgspec.json.encode(body), JobIn)
    with pytest.raises(InvalidRequest, match="is not this platform's"):
        up.submissions.submit_job(elsewhere, None)
    assert up.kube.items(up.path("trainingfunctions")) == []
    assert up.jobs() == []


def test_the_client_applies_as_kubectl_does_and_names_unknown_fields(up: ObjectPlatform):
    with Client(up.kube.kubeconfig) as client:
        obj = training("digits", up.namespace)
        assert [client.apply(obj).verb for _ in range(2)] == ["created", "unchanged"]
        obj["spec"]["replicas"] = 1
        assert client.apply(obj).verb == "configured"
        del obj["spec"]["replicas"]
        assert client.apply(obj).object["spec"]["replicas"] == 0
        with pytest.raises(InvalidRequest, match="a time like 90m"):
            client.apply(training("digits", up.namespace, deadline="soon"))
        with pytest.raises(InvalidRequest, match="did you mean deadline"):
            check_object(training("digits", up.namespace, deadlin="1m"), "a.yaml")
    up.wait_state("digits", "RUNNING")


def test_a_folder_of_the_client_is_in_config_maps_that_go_with_the_object(up: ObjectPlatform, tmp_path: Path):
    def parts(name: str):
        found = up.kube.items(f"api/v1/namespaces/{up.namespace}/configmaps")
        mine = [item["metadata"] for item in found if item["metadata"]["name"].startswith(f"{name}-folder-")]
        return {item["name"]: item["ownerReferences"][0]["name"] for item in mine}

    def packed(files: dict[str, bytes], path: str) -> PackedFolder:
        sender = ContentDirectory(tmp_path / "sender")
        tree = sent_tree(sender, files)
        write_archive(sender.open, tree, tmp_path / "folder.zip")
        sent = SentFolder(sha256=encode_tree(tree)[0], path=path, directory="", origin="/projects/mine")
        return PackedFolder(sent, (tmp_path / "folder.zip").read_bytes())

    train = packed({"train.py": TRAIN.encode(), "data.bin": os.urandom(1_000_000)}, "train.py")
    with Client(up.kube.kubeconfig) as client:
        client.create(training("digits", up.namespace), None, train)
        assert parts("digits") == {f"digits-folder-{train.sent.sha256[:16]}-{number}": "digits" for number in range(2)}
        with pytest.raises(InvalidRequest, match="is there already"):
            client.create(training("digits", up.namespace), None, train)
        assert len(parts("digits")) == 2, "those of the object that is there stay"
        up.wait_state("digits", "RUNNING")
        (job,) = up.jobs()
        assert (up.platform.workload_dir(job.job_id) / "folder/data.bin").stat().st_size == 1_000_000
        first, second = (packed({"serve.py": SERVE.encode(), "x.txt": text}, "serve.py") for text in (b"1", b"2"))
        verbs = [client.apply(inference("echo", up.namespace), None, folder).verb for folder in (first, first, second)]
        assert verbs == ["created", "unchanged", "configured"]
        assert parts("echo") == {f"echo-folder-{second.sent.sha256[:16]}-0": "echo"}
        with pytest.raises(InvalidRequest, match="a time like 90m"):
            client.create(training("late", up.namespace, deadline="soon"), None, train)
        assert parts("late") == {}


def test_secrets_of_the_client_are_a_secret_that_goes_with_the_object(up: ObjectPlatform):
    secrets = f"api/v1/namespaces/{up.namespace}/secrets"

    def of(name: str):
        found = [item for item in up.kube.items(secrets) if item["metadata"]["name"].startswith(f"{name}-secrets-")]
        return [(item["metadata"].get("ownerReferences", [{}])[0].get("name"), item["data"]) for item in found]

    with Client(up.kube.kubeconfig) as client:
        made = client.create(training("digits", up.namespace), {"TOKEN": "value"})
        assert of("digits") == [("digits", {"TOKEN": "dmFsdWU="})]
        container = made["spec"]["container"]
        assert container["env"] == [{"name": "SPRINGTIDE_SECRETS", "value": "TOKEN"}]
        assert container["secrets"][0].startswith("digits-secrets-")
        with pytest.raises(InvalidRequest, match="is there already"):
            client.create(training("digits", up.namespace), {"TOKEN": "other"})
        assert len(of("digits")) == 1
        served = inference("echo", up.namespace)
        assert client.apply(served, {"TOKEN": "value"}).verb == "created"
        assert client.apply(served, {"TOKEN": "value"}).verb == "unchanged"
        assert client.apply(served, {"TOKEN": "other"}).verb == "configured"
    assert sorted(of("echo"), key=str) == [("echo", {"TOKEN": "b3RoZXI="}), ("echo", {"TOKEN": "dmFsdWU="})]
    with pytest.raises(InvalidRequest, match=r"on Kubernetes make a Secret .* name it in container\.secrets"):
        up.submissions.submit_job(job_in(secrets={"TOKEN": "value"}), None)
    with pytest.raises(InvalidRequest, match="on Kubernetes make a Secret"):
        up.submissions.deploy_service("other", service_in(secrets={"TOKEN": "value"}))


# --- restarts --------------------------------------------------------------------------------------------------------


def test_a_control_plane_that_comes_back_takes_nothing_in_twice(tmp_path: Path, kube: Kube, namespace: str):
    folder = tmp_path / "state"
    with ObjectPlatform(folder, kube, namespace) as first:
        kube.apply(training("stays", namespace), training("goes", namespace))
        first.wait_state("stays", "RUNNING")
        first.wait_state("goes", "RUNNING")
        before = {job.name: job.job_id for job in first.jobs()}
    # While nobody listens: one is deleted, one is new, one wants something else, and one has lost its status.
    kube.delete(first.path("trainingfunctions", "goes"))
    kube.apply(training("comes", namespace))
    kube.patch(first.path("trainingfunctions", "stays"), {"spec": {"workers": 1}})
    kube.patch(first.path("trainingfunctions", "stays/status"), {"status": None})
    with ObjectPlatform(folder, kube, namespace) as second:
        second.wait_state("comes", "RUNNING")
        wait_for("one worker", lambda: second.status("stays").get("workers") == "1/1")
        wait_for("the end", lambda: {job.name: job.state for job in second.jobs()}["goes"] == "CANCELLED")
        after = {job.name: job.job_id for job in second.jobs()}
    assert {name: after[name] for name in before} == before
    assert sorted(after) == ["comes", "goes", "stays"]
    assert second.status("stays")["workloadId"] == before["stays"]


def test_a_quota_holds_a_job_down_until_it_has_room(tmp_path: Path, kube: Kube, namespace: str, monkeypatch):
    monkeypatch.setattr(resource_controller, "RESYNC_S", 1.0)
    caps: dict[str, int] = {}
    with ObjectPlatform(tmp_path / "state", kube, namespace, quota_caps=lambda: dict(caps)) as up:
        kube.apply(training("digits", namespace, workers="1..4"))
        wait_for("four", lambda: up.status("digits").get("workers") == "4/1..4")
        caps[up.jobs()[0].job_id] = 2
        wait_for("two", lambda: up.status("digits").get("workers") == "2/1..2")
        caps.clear()
        wait_for("four again", lambda: up.status("digits").get("workers") == "4/1..4")
