"""The API client beside a server that says what a test wants: errors, credentials that change, proxies, odd answers."""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import sys
import threading
from pathlib import Path

import pytest

from kits.kubernetes.scripted_server import Answer, Asked, scripted
from springtide.backends.kubernetes.client import api as api_module
from springtide.backends.kubernetes.client import auth as api_auth
from springtide.backends.kubernetes.client.api import KubeApi
from springtide.backends.kubernetes.client.errors import (
    AlreadyExists,
    Expired,
    Invalid,
    KubeApiError,
    KubeForbidden,
    NoSuchObject,
    NotAuthenticated,
    QuotaExceeded,
    ServerFault,
    TooManyRequests,
    Unreachable,
    VersionConflict,
    error_of,
)
from springtide.backends.kubernetes.client.kinds import CONFIG_MAP, DEPLOYMENT, NODE, POD, Key
from springtide.core.errors import BackendError


def status(code: int, reason: str = "", message: str = "", **details) -> bytes:
    return json.dumps(
        {"kind": "Status", "code": code, "reason": reason, "message": message, "details": details}
    ).encode()


@pytest.mark.parametrize(
    ("code", "reason", "message", "kind", "is_passing"),
    [
        (400, "BadRequest", "", Invalid, False),
        (401, "Unauthorized", "", NotAuthenticated, True),
        (403, "Forbidden", "no", KubeForbidden, False),
        (403, "Forbidden", 'pods "p" is forbidden: exceeded quota: q', QuotaExceeded, False),
        (404, "NotFound", "", NoSuchObject, False),
        (409, "AlreadyExists", "", AlreadyExists, False),
        (409, "Conflict", "", VersionConflict, False),
        (410, "Expired", "", Expired, False),
        (422, "Invalid", "", Invalid, False),
        (429, "TooManyRequests", "", TooManyRequests, True),
        (500, "InternalError", "", ServerFault, True),
        (504, "Timeout", "", ServerFault, True),
        (418, "", "", KubeApiError, False),
    ],
)
def test_errors_by_status(code: int, reason: str, message: str, kind: type[KubeApiError], is_passing: bool) -> None:
    error = error_of(code, status(code, reason, message))
    assert type(error) is kind
    assert error.status == code
    assert error.is_passing == is_passing
    assert str(error)


def test_what_is_wanting_and_when_to_ask_again() -> None:
    causes = [{"field": "spec.workers.max", "message": "too small"}, {"message": "no field"}]
    assert error_of(422, status(422, "Invalid", "bad", causes=causes)).fields == ("spec.workers.max",)
    assert error_of(429, status(429), "7").retry_after_s == 7.0
    assert error_of(429, status(429, retryAfterSeconds=3)).retry_after_s == 3.0
    assert error_of(429, status(429), "Wed, 21 Oct 2026 07:28:00 GMT").retry_after_s == 0.0
    assert "bad gateway" in str(error_of(502, b"<html>bad gateway</html>"))


def test_paths() -> None:
    assert POD.path("ml", "p", "binding") == "/api/v1/namespaces/ml/pods/p/binding"
    assert POD.path() == "/api/v1/pods"
    assert NODE.path("ignored", "n1") == "/api/v1/nodes/n1"
    assert DEPLOYMENT.path("ml") == "/apis/apps/v1/namespaces/ml/deployments"


def kubeconfig(folder: Path, server: str, user: dict, **cluster) -> Path:
    path = folder / "config"
    config = {
        "clusters": [{"name": "c", "cluster": {"server": server, **cluster}}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "ml"}}],
        "current-context": "x",
    }
    path.write_text(json.dumps(config))
    return path


def ask(path: Path, times: int = 1, before=lambda number: None, **options) -> list[str]:
    """Ask for the version so many times, in one life of a client."""

    async def run() -> list[str]:
        api = KubeApi.connect(path, **options)
        try:
            answers = []
            for number in range(times):
                before(number)
                answers.append(await api.version())
            return answers
        finally:
            await api.close()

    return asyncio.run(run())


def bearers(server) -> list[str]:
    return [asked.headers.get("authorization", "") for asked in server.asked]


VERSION = b'{"gitVersion": "v1.30.2"}'


def only(token: str):
    def answer(asked: Asked) -> Answer:
        is_known = asked.headers.get("authorization") == f"Bearer {token}"
        return Answer(200, VERSION) if is_known else Answer(401, status(401, "Unauthorized", "who are you"))

    return answer


def test_a_token_file_that_is_replaced(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("old\n")
    wanted = "old"
    with scripted(lambda asked: only(wanted)(asked)) as server:
        path = kubeconfig(tmp_path, server.url, {"tokenFile": "token"})

        def rotate(number: int) -> None:
            nonlocal wanted
            if number == 1:
                wanted = "new"
                token.write_text("new\n")

        assert ask(path, 3, rotate) == ["v1.30.2"] * 3
        # Refused once with what it remembered, then with what is there.
        assert bearers(server) == ["Bearer old", "Bearer old", "Bearer new", "Bearer new"]


def test_a_token_file_is_read_again_before_it_is_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(api_auth, "FILE_BELIEVED_S", 0.0)
    token = tmp_path / "token"
    with scripted(lambda asked: Answer(200, VERSION)) as server:
        path = kubeconfig(tmp_path, server.url, {"tokenFile": str(token)})
        ask(path, 2, lambda number: token.write_text(f"t{number}"))
        assert bearers(server) == ["Bearer t0", "Bearer t1"]


def test_a_token_that_is_wrong_is_an_error_not_a_loop(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("wrong")
    with scripted(only("right")) as server:
        path = kubeconfig(tmp_path, server.url, {"tokenFile": "token"})
        with pytest.raises(NotAuthenticated, match="who are you"):
            ask(path)
        assert len(server.asked) == 1


def test_a_missing_token_file_is_told(tmp_path: Path) -> None:
    with scripted(only("right")) as server:
        path = kubeconfig(tmp_path, server.url, {"tokenFile": "nowhere"})
        with pytest.raises(BackendError, match="nowhere"):
            ask(path)


def credential_command(tmp_path: Path, expires_in_s: float) -> dict:
    """A command that gives another token each time."""
    expires = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=expires_in_s)
    counter = tmp_path / "count"
    script = tmp_path / "login.py"
    script.write_text(
        "import json, os, pathlib\n"
        f"path = pathlib.Path({str(counter)!r})\n"
        "count = int(path.read_text()) + 1 if path.exists() else 1\n"
        "path.write_text(str(count))\n"
        "assert json.loads(os.environ['KUBERNETES_EXEC_INFO'])['kind'] == 'ExecCredential'\n"
        "status = {'token': os.environ['NAME'] + str(count), "
        f"'expirationTimestamp': {expires.strftime('%Y-%m-%dT%H:%M:%SZ')!r}}}\n"
        "print(json.dumps({'kind': 'ExecCredential', 'status': status}))\n"
    )
    return {
        "exec": {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": sys.executable,
            "args": [str(script)],
            "env": [{"name": "NAME", "value": "t"}],
        }
    }


def test_a_command_gives_the_token_and_is_asked_again_only_when_it_expires_or_is_refused(tmp_path: Path) -> None:
    wanted = "t1"
    with scripted(lambda asked: only(wanted)(asked)) as server:
        path = kubeconfig(tmp_path, server.url, credential_command(tmp_path, 3600))

        def refuse(number: int) -> None:
            nonlocal wanted
            wanted = "t1" if number < 2 else "t2"

        ask(path, 4, refuse)
        assert bearers(server) == ["Bearer t1", "Bearer t1", "Bearer t1", "Bearer t2", "Bearer t2"]


def test_a_token_that_expires_soon_is_replaced_before_it_does(tmp_path: Path) -> None:
    with scripted(lambda asked: Answer(200, VERSION)) as server:
        ask(kubeconfig(tmp_path, server.url, credential_command(tmp_path, 5)), 2)
        assert bearers(server) == ["Bearer t1", "Bearer t2"]


@pytest.mark.parametrize("script", ["import sys; sys.exit('no login')", "print('{}')", "print('nonsense')"])
def test_a_command_that_gives_none_is_told(tmp_path: Path, script: str) -> None:
    user = {
        "exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": sys.executable, "args": ["-c", script]}
    }
    with scripted(lambda asked: Answer(200, VERSION)) as server, pytest.raises(BackendError, match="no credentials"):
        ask(kubeconfig(tmp_path, server.url, user))


def test_a_proxy_of_the_environment(tmp_path: Path, monkeypatch) -> None:
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    with scripted(lambda asked: Answer(200, VERSION)) as proxy:
        path = kubeconfig(tmp_path, "http://kubernetes.example:8080", {"token": "t"})
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        assert ask(path) == ["v1.30.2"]
        assert proxy.asked[0].target == "http://kubernetes.example:8080/version"
        monkeypatch.setenv("NO_PROXY", "kubernetes.example")
        with pytest.raises(Unreachable):
            ask(path)
        assert len(proxy.asked) == 1


def test_a_proxy_of_the_kubeconfig(tmp_path: Path) -> None:
    with scripted(lambda asked: Answer(200, VERSION)) as proxy:
        path = kubeconfig(tmp_path, "http://kubernetes.example:8080", {"token": "t"}, **{"proxy-url": proxy.url})
        assert ask(path) == ["v1.30.2"]
        assert proxy.asked[0].target == "http://kubernetes.example:8080/version"


def test_in_a_pod_with_a_broken_service_account_it_is_told(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "token").write_text("of the pod")
    (tmp_path / "namespace").write_text("springtide")
    (tmp_path / "ca.crt").write_text("no certificate at all")
    monkeypatch.setattr(api_module, "SERVICE_ACCOUNT_DIR", tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    monkeypatch.delenv("KUBECONFIG", raising=False)
    with pytest.raises(BackendError, match="no way to the Kubernetes cluster"):
        KubeApi.connect()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "cannot be read"),
        ("[1]", "no kubeconfig"),
        ("clusters: []", "no current context"),
        ("current-context: x\ncontexts: [{name: y, context: {}}]", "no context 'x'"),
        ("current-context: x\ncontexts: [{name: x, context: {cluster: c}}]", "names a cluster"),
    ],
)
def test_a_kubeconfig_that_leads_nowhere_is_told(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "config"
    path.write_text(text)
    with pytest.raises(BackendError, match=told):
        KubeApi.connect(path)
    with pytest.raises(BackendError, match="KUBECONFIG"):
        KubeApi.connect(tmp_path / "missing")


def test_several_kubeconfigs_are_one(tmp_path: Path, monkeypatch) -> None:
    """The context is of one file, the cluster of another, and a path counts from the file that it is in."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "token").write_text("of b")
    with scripted(only("of b")) as server:
        contexts = [{"name": "x", "context": {"cluster": "c", "user": "u"}}]
        (tmp_path / "a" / "config").write_text(json.dumps({"contexts": contexts, "current-context": "x"}))
        users = [{"name": "u", "user": {"tokenFile": "token"}}]
        clusters = [{"name": "c", "cluster": {"server": server.url}}]
        (tmp_path / "b" / "config").write_text(json.dumps({"users": users, "clusters": clusters}))
        monkeypatch.setenv("KUBECONFIG", f"{tmp_path}/a/config{os.pathsep}{tmp_path}/b/config")

        async def run() -> str:
            api = KubeApi.connect()
            try:
                return await api.version()
            finally:
                await api.close()

        assert asyncio.run(run()) == "v1.30.2"


def run_with(server, task):
    async def run():
        api = KubeApi(server.url)
        try:
            return await task(api)
        finally:
            await api.close()

    return asyncio.run(run())


def test_an_answer_that_is_no_answer(tmp_path: Path) -> None:
    with scripted(lambda asked: Answer(200, b"<html>log in here</html>")) as server:
        with pytest.raises(ServerFault, match="cannot be read"):
            run_with(server, lambda api: api.get(POD, "p", "ml"))
        with pytest.raises(ServerFault, match="cannot be read"):
            run_with(server, lambda api: api.list(POD, "ml"))


def test_a_watch_that_ends_within_a_line() -> None:
    whole = b'{"type": "ADDED", "object": {"metadata": {"name": "p", "resourceVersion": "5"}}}\n'
    seen = []
    with scripted(lambda asked: Answer(200, whole + whole[:30], ends=True)) as server:

        async def watch(api: KubeApi) -> None:
            async for event in api.watch(POD, "ml", resource_version="4"):
                seen.append(event.type)

        with pytest.raises(ServerFault):
            run_with(server, watch)
    assert seen == ["ADDED"]
    target = server.asked[0].target
    assert "allowWatchBookmarks=true" in target
    assert "resourceVersion=4" in target


def test_an_error_within_a_watch() -> None:
    line = b'{"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Gone", "message": "too old"}}\n'
    with scripted(lambda asked: Answer(200, line)) as server:

        async def watch(api: KubeApi) -> None:
            async for _ in api.watch(POD, resource_version="4"):
                raise AssertionError("nothing happened")

        with pytest.raises(Expired, match="too old"):
            run_with(server, watch)


@pytest.mark.slow
def test_a_watch_that_is_silent_for_too_long_is_ended() -> None:
    never = threading.Event()

    def answer(asked: Asked) -> Answer:
        never.wait(0.5)
        return Answer(200, b"")

    with scripted(answer) as server:

        async def watch(api: KubeApi) -> None:
            async for _ in api.watch(POD, resource_version="4", silence_s=0.1):
                pass

        with pytest.raises(Unreachable):
            run_with(server, watch)


def pages(asked: Asked) -> Answer:
    """Three objects on two pages; the second page is too old for the server the first time."""
    if "continue=next" in asked.target:
        return Answer(410, status(410, "Expired", "too old"))
    items = [{"metadata": {"name": "a"}}]
    if "limit=" in asked.target:
        return Answer(
            200, json.dumps({"metadata": {"resourceVersion": "7", "continue": "next"}, "items": items}).encode()
        )
    items += [{"metadata": {"name": "b"}}, {"metadata": {"name": "c"}}]
    return Answer(200, json.dumps({"metadata": {"resourceVersion": "9"}, "items": items}).encode())


def test_pages_that_took_too_long_are_listed_in_one_piece() -> None:
    with scripted(pages) as server:
        listing = run_with(server, lambda api: api.list(CONFIG_MAP, "ml"))
    assert [each["metadata"]["name"] for each in listing.items] == ["a", "b", "c"]
    assert listing.resource_version == "9"


def test_what_is_sent() -> None:
    with scripted(lambda asked: Answer(200, b"{}")) as server:

        async def calls(api: KubeApi) -> None:
            await api.create(POD, {"metadata": {"name": "p"}}, "ml", dry_run=True)
            await api.bind(Key("ml", "p"), "n1", uid="u1")
            await api.delete(POD, "p", "ml", uid="u1", grace_s=15.0, propagation="Background")
            await api.patch(NODE, "n1", {"metadata": {"labels": {"a": "b"}}})
            await api.patch(CONFIG_MAP, "c", {"metadata": {"name": "c"}}, "ml", how="apply")

        run_with(server, calls)
    create, bind, delete, merge, apply = server.asked
    assert (create.method, create.target) == ("POST", "/api/v1/namespaces/ml/pods?fieldManager=springtide&dryRun=All")
    assert json.loads(create.body) == {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}}
    assert bind.target == "/api/v1/namespaces/ml/pods/p/binding"
    assert json.loads(bind.body)["target"] == {"apiVersion": "v1", "kind": "Node", "name": "n1"}
    assert json.loads(bind.body)["metadata"]["uid"] == "u1"
    options = json.loads(delete.body)
    assert (options["gracePeriodSeconds"], options["preconditions"]) == (15, {"uid": "u1"})
    assert merge.headers["content-type"] == "application/merge-patch+json"
    assert apply.headers["content-type"] == "application/apply-patch+yaml"
    assert "force=true" in apply.target
    assert json.loads(apply.body)["kind"] == "ConfigMap"


def test_nobody_there(tmp_path: Path) -> None:
    with scripted(lambda asked: Answer()) as server:
        url = server.url
    with pytest.raises(Unreachable, match=url):
        ask(kubeconfig(tmp_path, url, {"token": "t"}))
