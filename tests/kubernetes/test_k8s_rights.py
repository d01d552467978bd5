"""The platform with exactly the rights that its manifests give: every call it makes is allowed, others are refused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kits.kubernetes.kube_http import GROUP, PATCHES, Kube, Refused, wait_for
from kits.kubernetes.lab.lab import Cluster
from kits.kubernetes.service_account import RIGHTS, install_definitions, installed, is_refused, kubeconfig_of, token_of
from springtide.backends.kubernetes.client import kinds
from springtide.backends.kubernetes.client.api import KubeApi
from springtide.backends.kubernetes.client.errors import KubeApiError
from springtide.backends.kubernetes.client.kinds import Key, Kind
from springtide.backends.kubernetes.install import rbac
from springtide.backends.kubernetes.install.cluster_check import may
from springtide.backends.kubernetes.install.manifests import ACTIVE_LABEL
from springtide.backends.kubernetes.install.settings_file import SettingsFile
from springtide.backends.kubernetes.settings import POOL_LABEL
from springtide.service.assembly.cluster_secrets import master_key

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(180)]


class Platform:
    """A platform's own namespace, one for workloads, one that is nobody's business, and whoever acts for it."""

    def __init__(
        self, cluster: Cluster, settings: SettingsFile, home: str, work: str, foreign: str, folder: Path
    ) -> None:
        self.cluster, self.settings = cluster, settings
        self.home, self.work, self.foreign = home, work, foreign
        self.kubeconfig = kubeconfig_of(cluster, home, settings.name, folder)
        self.api = Kube(self.kubeconfig)
        self.admin = cluster.api

    def run(self, calls: Callable[[KubeApi], Awaitable[Any]]) -> Any:
        async def connected() -> Any:
            api = KubeApi.connect(self.kubeconfig)
            try:
                return await calls(api)
            finally:
                await api.close()

        return asyncio.run(connected())


@pytest.fixture(scope="module")
def platform(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    install_definitions(cluster.api)
    with (
        cluster.namespace("rights") as home,
        cluster.namespace("work") as work,
        cluster.namespace("foreign") as foreign,
        installed(cluster, name=home, namespace=home, namespaces=[work]) as settings,
    ):
        made = Platform(cluster, settings, home, work, foreign, tmp_path_factory.mktemp("account"))
        wait_for("the rights", lambda: made.api.get(f"api/v1/namespaces/{work}/pods"))
        yield made


@pytest.fixture
def node(cluster: Cluster) -> Iterator[str]:
    """A node that no kubelet stands for."""
    name = "rights-node"
    body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {"springtide.dev/node": "false"}}}
    cluster.api.delete(f"api/v1/nodes/{name}")
    cluster.api.post("api/v1/nodes", body)
    yield name
    cluster.api.delete(f"api/v1/nodes/{name}")


class Driver:
    """Makes calls as the platform makes them, and writes down which rights they took."""

    def __init__(self, api: KubeApi) -> None:
        self.api = api
        self.used: set[tuple[str, str, str, str]] = set()

    async def do(self, verb: str, kind: Kind, call: Awaitable[Any], subresource: str = "") -> Any:
        """The answer; that there is nothing behind a call is one, too: it was allowed."""
        self.used.add((verb, kind.group, kind.plural, subresource))
        try:
            return await call
        except KubeApiError as error:
            # No kubelet stands behind a pod of this test: its log cannot be had, and asking for it is allowed.
            if error.status == 403 or subresource != "log":
                raise
            return None

    async def watch(self, kind: Kind, namespace: str) -> None:
        self.used |= {("list", kind.group, kind.plural, ""), ("watch", kind.group, kind.plural, "")}
        listing = await self.api.list(kind, namespace)
        async for _ in self.api.watch(kind, namespace, resource_version=listing.resource_version, timeout_s=1.0):
            pass


POD_SPEC = {"containers": [{"name": "worker", "image": "localhost/busybox:1"}], "schedulerName": "springtide"}
SPECS: dict[Kind, dict[str, Any]] = {
    kinds.TRAINING_FUNCTION: {"source": {"function": "train", "file": "train.py", "files": {"train.py": "x = 1"}}},
    kinds.INFERENCE_FUNCTION: {"source": {"class": "Model", "file": "serve.py", "files": {"serve.py": "x = 1"}}},
}


async def drive_pods(driver: Driver, work: str, node: str) -> None:
    api, pod = driver.api, Key(work, "digits-0")
    secret = {"metadata": {"name": "springtide-digits", "namespace": work}, "stringData": {"key": "1"}}
    await driver.do("create", kinds.SECRET, api.create(kinds.SECRET, secret))
    await driver.do("patch", kinds.SECRET, api.patch(kinds.SECRET, "springtide-digits", secret, work, how="apply"))
    made = await driver.do(
        "create",
        kinds.POD,
        api.create(kinds.POD, {"metadata": {"name": pod.name, "namespace": work}, "spec": POD_SPEC}),
    )
    await driver.watch(kinds.POD, work)
    await driver.do("get", kinds.POD, api.get(kinds.POD, pod.name, work))
    labels = {"metadata": {"labels": {"springtide.dev/generation": "2"}}}
    await driver.do("patch", kinds.POD, api.patch(kinds.POD, pod.name, labels, work))
    await driver.do("create", kinds.POD, api.bind(pod, node, uid=made["metadata"]["uid"]), "binding")
    await driver.do("get", kinds.POD, _first_line(api, pod), "log")
    await driver.do("delete", kinds.POD, api.delete(kinds.POD, pod.name, work, uid=made["metadata"]["uid"], grace_s=0))
    await driver.do("delete", kinds.SECRET, api.delete(kinds.SECRET, "springtide-digits", work))


async def _first_line(api: KubeApi, pod: Key) -> bytes | None:
    async for line in api.logs(pod):
        return line
    return None


async def drive_objects(driver: Driver, platform: Platform) -> None:
    api, work = driver.api, platform.work
    for kind, spec in SPECS.items():
        made = {"metadata": {"name": "digits", "namespace": work}, "spec": spec}
        await driver.do("create", kind, api.create(kind, made))
        await driver.watch(kind, work)
        await driver.do("get", kind, api.get(kind, "digits", work))
        labels = {"metadata": {"labels": {"springtide.dev/platform": "x"}}}
        await driver.do("patch", kind, api.patch(kind, "digits", labels, work))
        status = [{"op": "add", "path": "/status", "value": {"state": "RUNNING"}}]
        call = api.patch(kind, "digits", status, work, how="json", subresource="status")
        await driver.do("patch", kind, call, "status")
        await driver.do("delete", kind, api.delete(kind, "digits", work))
    await driver.do("get", kinds.CONFIG_MAP, api.find(kinds.CONFIG_MAP, "source", work))
    for namespace, about in (
        (work, {"kind": "Pod", "namespace": work}),
        ("default", {"kind": "Node"}),
        (platform.home, {"kind": "Lease", "namespace": platform.home}),
    ):
        event = {
            "metadata": {"generateName": "rights-", "namespace": namespace},
            "involvedObject": {"apiVersion": "v1", "name": "x", **about},
            "reason": "Tested",
            "message": "a test",
            "type": "Normal",
        }
        await driver.do("create", kinds.EVENT, api.create(kinds.EVENT, event))
    await driver.do("list", kinds.EVENT, api.list(kinds.EVENT, work, fields="involvedObject.uid=u"))


async def drive_home(driver: Driver, platform: Platform, node: str) -> None:
    api, home, name = driver.api, platform.home, platform.settings.name
    await driver.watch(kinds.NODE, "")
    await driver.do("get", kinds.NODE, api.get(kinds.NODE, node))
    await driver.do(
        "patch", kinds.NODE, api.patch(kinds.NODE, node, {"metadata": {"labels": {POOL_LABEL: "training"}}})
    )
    lease = {"metadata": {"name": name, "namespace": home}, "spec": {"holderIdentity": "a"}}
    made = await driver.do("create", kinds.LEASE, api.create(kinds.LEASE, lease))
    await driver.do("get", kinds.LEASE, api.get(kinds.LEASE, name, home))
    await driver.do("update", kinds.LEASE, api.replace(kinds.LEASE, {**made, "spec": {"holderIdentity": "b"}}))
    # The product's own way to its key: made once, found from then on.
    first = await master_key(api, platform.settings)
    assert await master_key(api, platform.settings) == first
    driver.used |= {("get", "", "secrets", ""), ("create", "", "secrets", "")}
    found = await driver.do("list", kinds.POD, api.list(kinds.POD, home, labels=f"{ACTIVE_LABEL}=true"))
    assert not found.items
    own = {"metadata": {"labels": {ACTIVE_LABEL: "true"}}}
    await driver.do("patch", kinds.POD, api.patch(kinds.POD, "control-plane", own, home))


def test_everything_that_the_platform_does_is_allowed_and_nothing_is_given_for_nothing(
    platform: Platform, node: str
) -> None:
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "control-plane"}, "spec": POD_SPEC}
    platform.admin.post(f"api/v1/namespaces/{platform.home}/pods", body)

    async def calls(api: KubeApi) -> set[tuple[str, str, str, str]]:
        driver = Driver(api)
        await drive_pods(driver, platform.work, node)
        await drive_objects(driver, platform)
        await drive_home(driver, platform, node)
        return driver.used

    used = platform.run(calls)
    needed = {
        (each.verb, each.group, each.resource, each.subresource) for each in rbac.needed_rights(platform.settings)
    }
    assert used == needed, "what is driven here and what the manifests give"


def test_the_server_confirms_every_right_and_only_these(platform: Platform) -> None:
    account = f"{platform.home}:{platform.settings.name}"

    async def ask(api: KubeApi) -> list[str]:
        rights = rbac.needed_rights(platform.settings)
        return [right.words for right in rights if not await may(api, account, right)]

    async def as_admin() -> list[str]:
        api = KubeApi.connect(platform.cluster.kubeconfig)
        try:
            return await ask(api)
        finally:
            await api.close()

    assert asyncio.run(as_admin()) == []
    # The server's own list of what this account may do there is the manifests' rules, and nothing besides.
    for namespace, expected in (
        (platform.work, rbac.WORKLOAD_RULES),
        (platform.home, rbac.platform_rules(platform.settings)),
        (platform.foreign, ()),
    ):
        assert _rules_in(platform.api, namespace) == _plain([*expected, *rbac.NODE_RULES]), namespace


def _plain(rules: list[rbac.Rule]) -> set[tuple[str, str, str, str]]:
    return {
        (verb, rule.group, resource, name)
        for rule in rules
        for verb in rule.verbs
        for resource in rule.resources
        for name in rule.names or ("",)
    }


def _rules_in(api: Kube, namespace: str) -> set[tuple[str, str, str, str]]:
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectRulesReview",
        "spec": {"namespace": namespace},
    }
    rules = api.post("apis/authorization.k8s.io/v1/selfsubjectrulesreviews", review)["status"]["resourceRules"]
    found = {
        (verb, group, resource, name)
        for rule in rules
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for name in rule.get("resourceNames") or ("",)
    }
    # Everybody may ask what everybody may ask.
    return {each for each in found if each[1] != "authorization.k8s.io"}


FORBIDDEN: list[tuple[str, str, Any]] = [
    # Other people's Secrets, in its own namespaces or elsewhere.
    ("GET", "api/v1/namespaces/{work}/secrets", None),
    ("GET", "api/v1/namespaces/{work}/secrets/theirs", None),
    ("GET", "api/v1/namespaces/{home}/secrets", None),
    ("GET", "api/v1/namespaces/{home}/secrets/springtide-store", None),
    ("GET", "api/v1/secrets", None),
    ("POST", "api/v1/namespaces/{foreign}/secrets", {"metadata": {"name": "x"}}),
    # Pods where it has none, which it may read alone, since they take room on its nodes; and what it does to no pod.
    ("PATCH", "api/v1/namespaces/{foreign}/pods/x", {"metadata": {"labels": {"a": "b"}}}),
    ("GET", "api/v1/namespaces/{foreign}/pods/x/log", None),
    ("POST", "api/v1/namespaces/{foreign}/pods", {"metadata": {"name": "x"}, "spec": POD_SPEC}),
    ("POST", "api/v1/namespaces/{home}/pods", {"metadata": {"name": "x"}, "spec": POD_SPEC}),
    ("POST", "api/v1/namespaces/kube-system/pods", {"metadata": {"name": "x"}, "spec": POD_SPEC}),
    ("DELETE", "api/v1/namespaces/{home}/pods/control-plane", None),
    ("DELETE", "api/v1/namespaces/{foreign}/pods/x", None),
    ("DELETE", "api/v1/namespaces/{work}/pods", None),
    ("POST", "api/v1/namespaces/{work}/pods/x/exec?command=id", None),
    ("POST", "api/v1/namespaces/{work}/pods/x/portforward", None),
    ("POST", "api/v1/namespaces/{work}/pods/x/eviction", {"metadata": {"name": "x"}}),
    ("PATCH", "api/v1/namespaces/{work}/pods/x/status", {"status": {"phase": "Running"}}),
    # Machines are not its own.
    ("POST", "api/v1/nodes", {"metadata": {"name": "x"}}),
    ("DELETE", "api/v1/nodes/x", None),
    ("PATCH", "api/v1/nodes/x/status", {"status": {"capacity": {"nvidia.com/gpu": "8"}}}),
    ("GET", "api/v1/nodes/x/proxy/", None),
    # Rights, identities, and what others run.
    ("POST", "apis/rbac.authorization.k8s.io/v1/clusterrolebindings", {"metadata": {"name": "x"}}),
    ("POST", "apis/rbac.authorization.k8s.io/v1/namespaces/{work}/rolebindings", {"metadata": {"name": "x"}}),
    ("PATCH", "apis/rbac.authorization.k8s.io/v1/namespaces/{home}/roles/{home}", {"rules": []}),
    ("POST", "api/v1/namespaces/{work}/serviceaccounts/default/token", {"spec": {}}),
    ("POST", "apis/apps/v1/namespaces/{work}/deployments", {"metadata": {"name": "x"}}),
    ("POST", "apis/batch/v1/namespaces/{work}/jobs", {"metadata": {"name": "x"}}),
    ("POST", "api/v1/namespaces", {"metadata": {"name": "x"}}),
    ("DELETE", "api/v1/namespaces/{work}", None),
    ("GET", "api/v1/namespaces", None),
    ("PATCH", "apis/apiextensions.k8s.io/v1/customresourcedefinitions/trainingfunctions.springtide.dev", {}),
    ("GET", "api/v1/namespaces/{work}/configmaps", None),
    ("POST", "api/v1/namespaces/{work}/configmaps", {"metadata": {"name": "x"}}),
    # Its own kinds where it does not reconcile, and another one's lease.
    ("GET", GROUP + "/trainingfunctions", None),
    ("GET", GROUP + "/namespaces/{foreign}/trainingfunctions", None),
    ("PATCH", GROUP + "/namespaces/{foreign}/inferencefunctions/x/status", {"status": {}}),
    ("GET", "apis/coordination.k8s.io/v1/namespaces/kube-system/leases", None),
    ("PATCH", "apis/coordination.k8s.io/v1/namespaces/{home}/leases/another", {"spec": {"holderIdentity": "x"}}),
    ("POST", "api/v1/namespaces/{foreign}/events", {"metadata": {"name": "x"}}),
    ("POST", "api/v1/namespaces/{work}/users/x/impersonate", None),
]


@pytest.mark.parametrize("call", FORBIDDEN, ids=lambda call: f"{call[0]} {call[1]}")
def test_what_it_does_not_need_is_refused(platform: Platform, call: tuple[str, str, Any]) -> None:
    verb, template, body = call
    path = template.format(home=platform.home, work=platform.work, foreign=platform.foreign)
    kind = PATCHES["merge"] if verb == "PATCH" else "application/json"
    assert is_refused(platform.api, verb, path, body, kind), f"{verb} {path} was not refused"


def test_it_cannot_act_for_somebody_else(platform: Platform) -> None:
    import http.client
    from urllib.parse import urlsplit

    parts = urlsplit(platform.api.server)
    connection = http.client.HTTPSConnection(parts.hostname or "", parts.port, timeout=15.0, context=platform.api._tls)
    headers = {"Authorization": f"Bearer {platform.api._token}", "Impersonate-User": "system:admin"}
    connection.request("GET", "/api/v1/namespaces", headers=headers)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    assert answer.status == 403


def test_a_worker_has_no_rights_at_all(platform: Platform) -> None:
    api = Kube(platform.cluster.kubeconfig, token=token_of(platform.cluster, platform.work, "default"))
    for path in ("pods", "secrets", "configmaps", "events"):
        assert is_refused(api, "GET", f"api/v1/namespaces/{platform.work}/{path}")
    assert is_refused(api, "GET", "api/v1/nodes")
    assert is_refused(api, "GET", f"{GROUP}/namespaces/{platform.work}/trainingfunctions")


def test_the_share_daemon_reads_pods_where_workloads_are_and_nothing_else(platform: Platform) -> None:
    cluster, home, work = platform.cluster, platform.home, platform.work
    asked = {"share_daemon": True, "namespace_object": False, "user_roles": False}
    kinds_of_it = (*RIGHTS, "Namespace")
    name = f"{home[:30]}-d"
    with installed(cluster, kinds_of_it, name=name, namespace=home, namespaces=[work], install=asked):
        api = Kube(cluster.kubeconfig, token=token_of(cluster, f"{home}-shares", f"{name}-shares"))
        wait_for("its rights", lambda: api.get(f"api/v1/namespaces/{work}/pods")["kind"])
        found = {(verb, resource) for verb, _, resource, _ in _rules_in(api, work)}
        assert found == {("get", "pods"), ("list", "pods"), ("watch", "pods")}
        assert _rules_in(api, home) == _rules_in(api, platform.foreign) == set()
        assert is_refused(api, "GET", "api/v1/pods")
        assert is_refused(api, "GET", "api/v1/nodes")


def test_who_may_edit_a_namespace_trains_there_and_who_may_view_it_watches(platform: Platform) -> None:
    if (
        platform.cluster.lab is None
        and platform.admin.find("api/v1/namespaces/kube-system/serviceaccounts/default") is None
    ):
        pytest.skip("nobody adds up roles here: the cluster has no controller-manager")
    work = platform.work
    apis = {}
    for level in ("edit", "view"):
        account = {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {"name": f"people-{level}", "namespace": work},
        }
        binding = {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": {"name": f"people-{level}", "namespace": work},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": level},
            "subjects": [{"kind": "ServiceAccount", "name": f"people-{level}", "namespace": work}],
        }
        platform.admin.apply(account, binding)
        apis[level] = Kube(platform.cluster.kubeconfig, token=token_of(platform.cluster, work, f"people-{level}"))
    place = f"{GROUP}/namespaces/{work}/trainingfunctions"
    body = {
        "apiVersion": "springtide.dev/v1alpha1",
        "kind": "TrainingFunction",
        "metadata": {"name": "theirs"},
        "spec": SPECS[kinds.TRAINING_FUNCTION],
    }
    wait_for("the added right", lambda: apis["view"].get(place))
    wait_for("the added right", lambda: not is_refused(apis["edit"], "GET", place))
    assert is_refused(apis["view"], "POST", place, body)
    apis["edit"].post(place, body)
    assert apis["view"].get(f"{place}/theirs")["metadata"]["name"] == "theirs"
    assert is_refused(apis["view"], "DELETE", f"{place}/theirs")
    assert is_refused(apis["edit"], "GET", f"{GROUP}/namespaces/{platform.foreign}/trainingfunctions")
    apis["edit"].delete(f"{place}/theirs")
    with pytest.raises(Refused, match="404"):
        apis["view"].get(f"{place}/theirs")
