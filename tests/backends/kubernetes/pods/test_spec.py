"""The pods that replicas are made of, as data."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kits.kubernetes.kubelet_player import spec_of
from kits.kubernetes.pod_security import violations
from springtide.backends.kubernetes import settings as names
from springtide.backends.kubernetes.client.overlay import merge
from springtide.backends.kubernetes.pods.reading import devices_in
from springtide.backends.kubernetes.pods.spec import (
    SPEC_VARIABLE,
    label_value,
    make_pod,
    make_secret,
    namespace_of,
    pod_name,
    secret_name,
)
from springtide.backends.kubernetes.settings import KubernetesSettings, PodSettings
from springtide.core.actions import StartReplica
from springtide.core.containers import ContainerSettings
from springtide.core.errors import BackendError
from springtide.core.resources import make_node
from springtide.core.shares import Share
from springtide.core.workload import Entrypoint, InferenceService, TrainingJob

SETTINGS = KubernetesSettings(
    advertise="10.0.0.1",
    store_url="s3://bucket",
    pod=PodSettings(image="workers:1", memory="2Gi", cpu="2"),
)
NODE = make_node("node-1", 4, kind="gpu")
JOB = TrainingJob(
    job_id="digits-1a2b",
    name="digits",
    entrypoint=Entrypoint(source_path="a.py", object_name="fit"),
    container=ContainerSettings(owner_kind="TrainingFunction", owner_name="digits", owner_uid="u-1", namespace="ml"),
)
SERVICE = InferenceService(service_id="echo", name="echo", entrypoint=Entrypoint(source_path="a.py", kind="class"))


def start(workload=JOB, number=0, **changes) -> StartReplica:
    workload_id = workload.job_id if isinstance(workload, TrainingJob) else workload.service_id
    action = StartReplica(
        workload=workload, replica_id=f"{workload_id}.{number}", device_id=NODE.devices[2].device_id, generation=3
    )
    return replace(action, **changes)


def pod_of(action=None, settings=SETTINGS, **options):
    return make_pod(action or start(), settings, NODE.devices[2:3], term=7, **options)


def container_of(pod):
    (container,) = pod["spec"]["containers"]
    return container


def variables_of(pod):
    return {each["name"]: each.get("value") for each in container_of(pod)["env"]}


def test_a_pod_requests_all_devices_of_its_worker_and_says_which_they_are() -> None:
    action = start(more_devices=("node-1/3", "node-1/0"))
    devices = [NODE.devices[index] for index in (2, 3, 0)]
    pod = make_pod(action, SETTINGS, devices, term=7)
    resources = container_of(pod)["resources"]
    assert (resources["requests"]["nvidia.com/gpu"], resources["limits"]["nvidia.com/gpu"]) == ("3", "3")
    assert (resources["requests"]["cpu"], resources["requests"]["memory"]) == ("2", "2Gi"), "they are those of a pod"
    assert devices_in(pod["metadata"]["annotations"]) == ("node-1/2", "node-1/3", "node-1/0")
    spec = spec_of(pod)
    assert spec is not None
    assert (spec.num_devices, spec.device_index, spec.num_threads) == (3, 0, 2)
    assert "NVIDIA_VISIBLE_DEVICES" not in variables_of(pod), "the device plugin chooses"
    uncounted = make_pod(action, SETTINGS, devices, term=7, counts_resource=False)
    assert variables_of(uncounted)["NVIDIA_VISIBLE_DEVICES"] == "2,3,0"
    assert "nvidia.com/gpu" not in container_of(uncounted)["resources"]["limits"]
    assert names.MORE_DEVICES_ANNOTATION not in pod_of()["metadata"]["annotations"]


@given(st.lists(st.text(min_size=1, max_size=90), min_size=2, max_size=8, unique=True))
def test_every_replica_has_a_name_of_its_own_that_a_server_takes(ids) -> None:
    made = [pod_name(replica_id) for replica_id in ids]
    assert len(set(made)) == len(ids)
    for name in (*made, *(secret_name(each) for each in ids)):
        assert len(name) <= 63
        assert name.strip("-") == name
        assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    for each in ids:
        assert len(label_value(each)) <= 63


def test_ordinary_ids_stay_readable_and_close_ones_apart() -> None:
    assert pod_name("digits-1a2b.0") == "digits-1a2b-0"
    assert secret_name("digits-1a2b") == "springtide-digits-1a2b"
    close = ["a.1", "a-1", "a-1.0", "a.1.0", "A.1", "a_.1", f"{'a' * 70}.0", f"{'a' * 70}.1"]
    assert len({pod_name(each) for each in close}) == len(close)


def test_a_pod_says_whose_it_is_and_on_what() -> None:
    pod = pod_of()
    metadata = pod["metadata"]
    assert (metadata["name"], metadata["namespace"]) == ("digits-1a2b-0", "ml")
    assert metadata["labels"] == {
        names.MANAGED_BY_LABEL: "springtide",
        names.PLATFORM_LABEL: "springtide",
        names.WORKLOAD_LABEL: "digits-1a2b",
        names.REPLICA_LABEL: "digits-1a2b.0",
        names.ROLE_LABEL: "training",
        names.GENERATION_LABEL: "3",
        names.TERM_LABEL: "7",
    }
    assert metadata["annotations"][names.DEVICE_ANNOTATION] == "node-1/2"
    assert metadata["annotations"][names.DEVICE_INDEX_ANNOTATION] == "2"
    (owner,) = metadata["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("TrainingFunction", "digits", "u-1")
    assert "blockOwnerDeletion" not in owner, "setting it takes a right on finalizers that nobody grants"
    assert pod["spec"]["schedulerName"] == "springtide"
    assert pod["spec"]["restartPolicy"] == "Never"
    assert "nodeName" not in pod["spec"]


def test_a_pod_outlives_the_grace_of_its_workload() -> None:
    assert pod_of()["spec"]["terminationGracePeriodSeconds"] > SETTINGS.grace_s
    patient = replace(JOB, grace_s=90.0)
    assert pod_of(start(patient))["spec"]["terminationGracePeriodSeconds"] > 90
    hook = container_of(pod_of())["lifecycle"]["preStop"]["exec"]["command"]
    assert hook == ["python", "-m", "springtide.runtime", "prestop"]


def test_the_worker_reads_back_what_it_was_told_whatever_is_in_it() -> None:
    job = replace(JOB, params={"a": "$(POD_IP) $$ $x $$(HOME)", "b": '"\n\u00e4'})
    pod = pod_of(start(job))
    spec = spec_of(pod)
    assert spec is not None
    assert spec.workload == job
    assert spec.token == "", "who may read a pod must not learn its token"
    assert spec.control_address == "tcp://10.0.0.1:8788"
    # The kubelet replaces $(NAME) of variables that it knows, unless the dollar is doubled.
    text = variables_of(pod)[SPEC_VARIABLE]
    assert "$" not in text.replace("$$", "")


def test_a_spec_that_no_environment_holds_is_refused_with_the_mend() -> None:
    with pytest.raises(BackendError, match="shorten its params"):
        pod_of(start(replace(JOB, params={"a": "x" * 130_000})))


def test_pods_keep_to_the_restricted_profile() -> None:
    assert violations(pod_of()["spec"]) == []
    assert violations(pod_of(start(SERVICE))["spec"]) == []
    assert pod_of()["spec"]["automountServiceAccountToken"] is False


def test_a_whole_device_is_a_resource_and_a_share_is_not() -> None:
    whole = container_of(pod_of())["resources"]
    assert whole["limits"] == {"cpu": "2", "memory": "2Gi", "nvidia.com/gpu": "1"}
    assert whole["requests"] == whole["limits"]
    part = container_of(pod_of(start(share=Share(request=0.3, limit=0.6))))
    assert "nvidia.com/gpu" not in part["resources"]["limits"]
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "2"} in part["env"]
    uncounted = container_of(pod_of(counts_resource=False))
    assert "nvidia.com/gpu" not in uncounted["resources"]["limits"]
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "2"} in uncounted["env"]


def test_the_device_plugin_chooses_among_whole_devices_that_nobody_shares() -> None:
    def chosen(settings: KubernetesSettings) -> str | None:
        return variables_of(pod_of(start(), settings)).get("NVIDIA_VISIBLE_DEVICES")

    assert chosen(replace(SETTINGS, share_directory="")) is None
    assert chosen(replace(SETTINGS, share_directory="/run/springtide")) == "2"


def test_a_share_of_a_core_is_a_request_and_a_limit() -> None:
    cores = replace(SETTINGS, device_kind="cpu", device_resource="springtide.dev/device")
    resources = container_of(pod_of(start(share=Share(request=0.3, limit=0.6)), cores))["resources"]
    assert (resources["requests"]["cpu"], resources["limits"]["cpu"]) == ("300m", "600m")


def test_a_serving_pod_is_asked_how_it_is_by_the_open_inference_protocol() -> None:
    container = container_of(pod_of(start(SERVICE)))
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"replica": 8789, "health": 8790}
    assert container["readinessProbe"]["httpGet"] == {"path": "/v2/health/ready", "port": 8790}
    assert container["livenessProbe"]["httpGet"]["path"] == "/v2/health/live"
    assert "readinessProbe" not in container_of(pod_of())


def test_the_workload_s_own_container_comes_before_the_platform_s() -> None:
    own = ContainerSettings(
        image="mine:2", memory="8Gi", environment={"A": "$HOME", SPEC_VARIABLE: "forged"}, secrets=("wandb",)
    )
    pod = pod_of(start(replace(JOB, container=own)))
    container = container_of(pod)
    assert container["image"] == "mine:2"
    assert container["resources"]["limits"]["memory"] == "8Gi"
    assert container["envFrom"] == [{"secretRef": {"name": "wandb"}}]
    assert variables_of(pod)["A"] == "$$HOME"
    assert [each["name"] for each in container["env"]].count(SPEC_VARIABLE) == 1
    assert spec_of(pod) is not None
    assert "ownerReferences" not in pod["metadata"]


def test_without_an_image_there_is_no_pod() -> None:
    with pytest.raises(BackendError, match=r"pod\.image"):
        pod_of(settings=replace(SETTINGS, pod=PodSettings()))


def test_the_secret_holds_the_key_and_only_what_the_store_needs() -> None:
    credentials = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "s", "PGPASSWORD": "no", "AWS_REGION": ""}
    secret = make_secret(JOB, SETTINGS, "k" * 64, credentials)
    values = {name: base64.b64decode(value).decode() for name, value in secret["data"].items()}
    assert values == {"key": "k" * 64, "AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "s"}
    assert secret["metadata"]["namespace"] == "ml"
    assert secret["metadata"]["ownerReferences"][0]["uid"] == "u-1"
    sources = [each.get("valueFrom", {}).get("secretKeyRef", {}).get("key") for each in container_of(pod_of())["env"]]
    assert "AWS_SECRET_ACCESS_KEY" in sources
    assert "key" not in sources, "the key is a file, which no child process inherits"


def test_pods_have_keys_of_their_own_where_there_are_some() -> None:
    both = {
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "s",
        "AWS_SESSION_TOKEN": "t",
        "AWS_REGION": "here",
        "WORKERS_AWS_ACCESS_KEY_ID": "less",
        "WORKERS_AWS_SECRET_ACCESS_KEY": "l",
    }
    apart = replace(SETTINGS, worker_store_secret="workers")

    def values(settings: KubernetesSettings, found: dict[str, str]) -> dict[str, str]:
        data = make_secret(JOB, settings, "k", found)["data"]
        return {name: base64.b64decode(value).decode() for name, value in data.items() if name != "key"}

    less = {"AWS_ACCESS_KEY_ID": "less", "AWS_SECRET_ACCESS_KEY": "l", "AWS_REGION": "here"}
    assert values(apart, both) == less
    assert values(SETTINGS, both)["AWS_ACCESS_KEY_ID"] == "id"
    # An empty Secret is for pods with an identity of their own: the control plane's keys do not take its place.
    assert values(apart, {name: value for name, value in both.items() if not name.startswith("WORKERS")}) == {
        "AWS_REGION": "here"
    }
    assert values(apart, {**both, "WORKERS_AWS_REGION": "there"}) == {**less, "AWS_REGION": "there"}


def test_where_workloads_live() -> None:
    plain = replace(JOB, container=None)
    assert namespace_of(JOB, SETTINGS) == "ml"
    assert namespace_of(plain, SETTINGS) == "springtide"
    assert namespace_of(plain, replace(SETTINGS, namespaces=("ml", "web"))) == "ml"
    assert namespace_of(plain, replace(SETTINGS, namespaces=("web", "springtide"))) == "springtide"


def test_an_overlay_goes_over_pods_by_name() -> None:
    overlay = {
        "nodeSelector": {"a": "b"},
        "securityContext": {"runAsUser": 0, "fsGroup": None},
        "containers": [
            {
                "name": "worker",
                "env": [{"name": "HOME", "value": "/home"}, {"name": "X", "value": "1"}],
                "volumeMounts": [{"name": "big", "mountPath": "/tmp"}],
            }
        ],
        "volumes": [{"name": "big", "emptyDir": {"sizeLimit": "1Gi"}}],
    }
    pod = pod_of(settings=replace(SETTINGS, pod=replace(SETTINGS.pod, overlay=overlay)))
    assert pod["spec"]["nodeSelector"] == {"a": "b"}
    assert pod["spec"]["securityContext"]["runAsUser"] == 0
    assert "fsGroup" not in pod["spec"]["securityContext"]
    assert variables_of(pod)["HOME"] == "/home"
    assert variables_of(pod)["X"] == "1"
    mounts = {mount["mountPath"]: mount["name"] for mount in container_of(pod)["volumeMounts"]}
    assert mounts["/tmp"] == "big"
    assert len(mounts) == len(container_of(pod)["volumeMounts"])


def test_merging_changes_neither_side() -> None:
    base, over = {"a": {"b": [{"name": "x", "v": 1}]}}, {"a": {"b": [{"name": "x", "w": 2}], "c": None}}
    assert merge(base, over) == {"a": {"b": [{"name": "x", "v": 1, "w": 2}]}}
    assert base == {"a": {"b": [{"name": "x", "v": 1}]}}
    assert merge({"command": ["a", "b"]}, {"command": ["c"]}) == {"command": ["c"]}
