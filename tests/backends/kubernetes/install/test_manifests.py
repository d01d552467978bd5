"""The manifests: what fits together, PodSecurity as its standard is written, and nothing that is given for nothing."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest

from kits.kubernetes.chart_cases import CASES
from kits.kubernetes.pod_security import violations
from springtide.backends.kubernetes import settings as names
from springtide.backends.kubernetes.client.yaml_text import write_yaml
from springtide.backends.kubernetes.install import rbac
from springtide.backends.kubernetes.install.manifests import ACTIVE_LABEL, render
from springtide.backends.kubernetes.install.objects import settings_digest
from springtide.backends.kubernetes.install.settings_file import parse_settings, platform_settings, settings_from

POSTGRES = {"journal_url": "postgresql://u@db/x", "install": {"replicas": 2}}


def objects(values: dict[str, Any] | None = None, kubernetes: tuple[int, int] = (1, 30)) -> list[dict[str, Any]]:
    return list(render(settings_from(values or {}, "the test's settings"), kubernetes))


def of_kind(kind: str, values: dict[str, Any] | None = None, component: str = "control-plane") -> list[dict[str, Any]]:
    return [
        each
        for each in objects(values)
        if each["kind"] == kind
        and each["metadata"].get("labels", {}).get("app.kubernetes.io/component", component) == component
    ]


def only(kind: str, values: dict[str, Any] | None = None, component: str = "control-plane") -> dict[str, Any]:
    (found,) = of_kind(kind, values, component)
    return found


def fits(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


# --- PodSecurity -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in CASES if name != "overlays"])
def test_the_control_plane_keeps_to_the_restricted_profile(name: str) -> None:
    pod = only("Deployment", CASES[name])["spec"]["template"]["spec"]
    assert violations(pod) == []


def test_the_platforms_namespace_enforces_the_restricted_profile() -> None:
    labels = only("Namespace")["metadata"]["labels"]
    assert {labels[f"pod-security.kubernetes.io/{mode}"] for mode in ("enforce", "audit", "warn")} == {"restricted"}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda pod: pod.pop("securityContext"), ["runAsNonRoot", "seccompProfile"]),
        (lambda pod: pod["containers"][0].pop("securityContext"), ["allowPrivilegeEscalation", "capabilities"]),
        (lambda pod: pod["securityContext"].update(runAsUser=0), ["runAsUser"]),
        (lambda pod: pod.update(hostNetwork=True), ["hostNetwork"]),
        (lambda pod: pod["volumes"].append({"name": "x", "hostPath": {"path": "/"}}), ["hostPath", "volume types"]),
        (lambda pod: pod["containers"][0]["securityContext"].update(privileged=True), ["privileged"]),
        (lambda pod: pod["containers"][0]["ports"].append({"containerPort": 1, "hostPort": 1}), ["hostPort"]),
        (
            lambda pod: pod["containers"][0]["securityContext"]["capabilities"].update(add=["NET_ADMIN"]),
            ["capabilities"],
        ),
    ],
    ids=["no context", "no container's", "root", "host network", "host path", "privileged", "host port", "capability"],
)
def test_what_breaks_the_profile_is_found_out(change: Any, told: list[str]) -> None:
    pod = copy.deepcopy(only("Deployment")["spec"]["template"]["spec"])
    change(pod)
    found = violations(pod)
    assert all(any(word in sentence for sentence in found) for word in told), found


def test_the_share_daemon_is_kept_apart_from_what_is_restricted() -> None:
    values = {"install": {"share_daemon": True}}
    daemon = only("DaemonSet", values, "shares")
    assert daemon["metadata"]["namespace"] == "springtide-shares" != "springtide"
    assert any("hostPath" in sentence for sentence in violations(daemon["spec"]["template"]["spec"]))
    security = daemon["spec"]["template"]["spec"]["containers"][0]["securityContext"]
    assert security["allowPrivilegeEscalation"] is False
    assert security.get("privileged") is None
    namespaces = {
        each["metadata"]["name"]: each["metadata"]["labels"] for each in objects(values) if each["kind"] == "Namespace"
    }
    assert namespaces["springtide-shares"]["pod-security.kubernetes.io/enforce"] == "privileged"
    assert namespaces["springtide"]["pod-security.kubernetes.io/enforce"] == "restricted"


# --- what leads where ------------------------------------------------------------------------------------------------


def test_the_service_leads_only_to_the_leading_control_plane() -> None:
    service, template = only("Service"), only("Deployment")["spec"]["template"]
    labels = template["metadata"]["labels"]
    assert not fits(service["spec"]["selector"], labels)
    assert fits(service["spec"]["selector"], {**labels, ACTIVE_LABEL: "true"})
    ports = {port["name"]: port["containerPort"] for port in template["spec"]["containers"][0]["ports"]}
    assert {port["targetPort"]: port["port"] for port in service["spec"]["ports"]} == ports


def test_the_platform_never_takes_its_own_pods_for_a_workloads() -> None:
    for each in (only("Deployment"), only("DaemonSet", {"install": {"share_daemon": True}}, "shares")):
        labels = each["spec"]["template"]["metadata"]["labels"]
        assert not {names.PLATFORM_LABEL, names.WORKLOAD_LABEL, names.REPLICA_LABEL} & labels.keys()


@pytest.mark.parametrize("kind", ["PodDisruptionBudget", "ServiceMonitor", "NetworkPolicy"])
def test_what_is_around_the_control_plane_finds_it(kind: str) -> None:
    values = {**POSTGRES, "install": {"replicas": 2, "monitoring": True}}
    labels = only("Deployment", values)["spec"]["template"]["metadata"]["labels"]
    spec = only(kind, values)["spec"]
    selector = spec.get("selector") or spec["podSelector"]
    if kind == "ServiceMonitor":
        labels = only("Service", values)["metadata"]["labels"]
        assert {each["port"] for each in spec["endpoints"]} <= {"http", "control"}
    assert fits(selector["matchLabels"], labels)


def test_the_pod_is_given_what_it_is_told_of() -> None:
    pod = only("Deployment", {"store_secret": "store"})["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    paths = [argument for argument in container["args"] if argument.startswith("/")]
    assert len(paths) == 2
    assert all(any(path.startswith(mount) for mount in mounts) for path in paths)
    assert container["envFrom"] == [{"secretRef": {"name": "store"}}]
    ports = {port["name"] for port in container["ports"]}
    assert {
        container[probe]["httpGet"]["port"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")
    } <= ports


def test_workers_keys_come_under_names_of_their_own() -> None:
    def given(**values: Any) -> Any:
        pod = only("Deployment", {"store_url": "s3://bucket", **values})["spec"]["template"]["spec"]
        return pod["containers"][0].get("envFrom")

    workers = {"secretRef": {"name": "workers"}, "prefix": "WORKERS_"}
    assert given(store_secret="store", worker_store_secret="workers") == [{"secretRef": {"name": "store"}}, workers]
    assert given(worker_store_secret="workers") == [workers]
    assert given() is None


def test_a_journal_in_a_file_has_one_writer_on_a_volume_that_stays() -> None:
    deployment = only("Deployment")
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    claim = only("PersistentVolumeClaim")["metadata"]["name"]
    volumes = deployment["spec"]["template"]["spec"]["volumes"]
    assert {"name": "state", "persistentVolumeClaim": {"claimName": claim}} in volumes


def test_with_a_journal_of_its_own_the_control_plane_has_a_successor_at_hand() -> None:
    deployment = only("Deployment", POSTGRES)
    assert deployment["spec"]["replicas"] == 2
    assert deployment["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    assert of_kind("PersistentVolumeClaim", POSTGRES) == []
    assert only("PodDisruptionBudget", POSTGRES)["spec"]["maxUnavailable"] == 1


def test_a_single_control_plane_does_not_keep_its_node_from_being_drained() -> None:
    assert of_kind("PodDisruptionBudget") == []


@pytest.mark.parametrize(
    ("version", "api"), [((1, 20), "policy/v1beta1"), ((1, 21), "policy/v1"), ((1, 30), "policy/v1")]
)
def test_a_cluster_is_given_the_version_that_it_knows(version: tuple[int, int], api: str) -> None:
    budgets = [each for each in objects(POSTGRES, version) if each["kind"] == "PodDisruptionBudget"]
    assert [each["apiVersion"] for each in budgets] == [api]


# --- who may reach whom ----------------------------------------------------------------------------------------------


def test_workers_are_reached_by_their_like_and_by_the_control_plane_alone() -> None:
    values = {"namespaces": ["ml", "web"]}
    policies = of_kind("NetworkPolicy", values, "worker")
    assert [each["metadata"]["namespace"] for each in policies] == ["ml", "web"]
    (entry,) = policies[0]["spec"]["ingress"]
    like, control = entry["from"]
    assert like == {"podSelector": {"matchLabels": {names.PLATFORM_LABEL: "springtide"}}}
    labels = only("Deployment", values)["spec"]["template"]["metadata"]["labels"]
    assert fits(control["podSelector"]["matchLabels"], labels)
    assert fits(control["namespaceSelector"]["matchLabels"], only("Namespace", values)["metadata"]["labels"])


def test_workers_are_kept_from_the_keys_of_their_machine() -> None:
    (policy,) = of_kind("NetworkPolicy", {"namespaces": ["ml"]}, "worker")
    blocks = [each["ipBlock"] for rule in policy["spec"]["egress"] for each in rule["to"]]
    assert {address for block in blocks for address in block["except"]} == {"169.254.169.254/32", "fd00:ec2::254/128"}


def test_only_workers_reach_the_port_of_workers() -> None:
    rules = only("NetworkPolicy")["spec"]["ingress"]
    by_port = {rule["ports"][0]["port"]: rule.get("from") for rule in rules}
    assert by_port[8787] is None
    assert by_port[8788] == [
        {"namespaceSelector": {}, "podSelector": {"matchLabels": {names.PLATFORM_LABEL: "springtide"}}}
    ]


# --- rights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_the_roles_are_the_rights_that_are_needed(name: str) -> None:
    settings = settings_from(CASES[name], name)
    made = objects(CASES[name])
    account = {"kind": "ServiceAccount", "name": settings.name, "namespace": settings.namespace}
    given = set()
    for binding in made:
        if binding["kind"] not in ("RoleBinding", "ClusterRoleBinding") or account not in binding["subjects"]:
            continue
        namespace = binding["metadata"].get("namespace", "")
        role_kind, role_name = binding["roleRef"]["kind"], binding["roleRef"]["name"]
        (role,) = [
            each
            for each in made
            if (each["kind"], each["metadata"]["name"]) == (role_kind, role_name)
            and each["metadata"].get("namespace", "") == namespace
        ]
        given |= _single_rights(role["rules"], namespace)
    needed = {
        (
            right.verb,
            right.group,
            right.resource + (f"/{right.subresource}" if right.subresource else ""),
            right.namespace,
            right.name,
        )
        for right in rbac.needed_rights(settings)
    }
    if not settings.namespaces:
        # Who may write events everywhere may write those of nodes.
        needed -= {each for each in needed if each[3] == rbac.NODE_EVENTS_NAMESPACE}
    assert given == needed


def _single_rights(rules: list[dict[str, Any]], namespace: str) -> set[tuple[str, str, str, str, str]]:
    return {
        (verb, group, resource, namespace, name)
        for rule in rules
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for name in rule.get("resourceNames", [""])
    }


def test_no_rule_has_a_wildcard_and_each_says_why() -> None:
    settings = platform_settings(parse_settings("", "it"))
    rules = [*rbac.NODE_RULES, *rbac.WORKLOAD_RULES, *rbac.NODE_EVENT_RULES, *rbac.SHARE_DAEMON_RULES]
    rules += [*rbac.VIEW_RULES, *rbac.EDIT_RULES, *rbac.platform_rules(settings)]
    assert all("*" not in (rule.group, *rule.resources, *rule.verbs) for rule in rules)
    assert all(len(rule.reason.split()) >= 3 or rule.reason for rule in rules)
    assert all(rule.reason for rule in rules)


def test_secrets_are_read_by_name_only() -> None:
    settings = platform_settings(parse_settings("", "it"))
    readers = [right for right in rbac.needed_rights(settings) if right.resource == "secrets" and right.verb == "get"]
    assert {right.name for right in readers} == {"springtide-master-key", "springtide-token"}
    assert not [right for right in rbac.needed_rights(settings) if right.resource == "secrets" and right.verb == "list"]


# --- changes of settings ---------------------------------------------------------------------------------------------


def test_a_changed_setting_starts_the_control_plane_anew() -> None:
    before = only("Deployment")["spec"]["template"]["metadata"]["annotations"]
    assert only("Deployment", {"policy": "edf"})["spec"]["template"]["metadata"]["annotations"] != before
    assert (
        only("Deployment", {"install": {"user_roles": False}})["spec"]["template"]["metadata"]["annotations"] == before
    )


def test_the_digest_does_not_depend_on_how_numbers_are_written() -> None:
    assert settings_digest(parse_settings("grace_s: 15", "it")) == settings_digest(
        parse_settings("grace_s: 15.0", "it")
    )


def test_the_control_plane_reads_the_settings_that_it_was_rendered_from() -> None:
    for name, values in CASES.items():
        given = settings_from(values, name)
        text = only("ConfigMap", values)["data"]["settings.yaml"]
        read = parse_settings(text, name)
        filled = {"pod", "controller", "advertise", "install", "share_directory"}
        for field in read.__struct_fields__:
            if field not in filled:
                assert getattr(read, field) == getattr(given, field), (name, field)
        assert read.pod.image
        assert read.controller.image
        assert read.advertise


def test_rendering_is_the_same_every_time() -> None:
    texts = {write_yaml(objects(CASES["overlays"])) for _ in range(3)}
    assert len(texts) == 1
    assert msgspec.json.encode(objects()) == msgspec.json.encode(objects())


def test_names_are_there_once() -> None:
    for values in CASES.values():
        keys = [(each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]) for each in objects(values)]
        assert len(keys) == len(set(keys))
