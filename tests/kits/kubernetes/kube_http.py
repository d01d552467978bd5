"""A few words of the API for tests, over plain HTTPS: tests look at a cluster by another way than the product does."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import ssl
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import yaml

# So much longer than anything should take it is waited for, since other things may keep the machine busy.
PATIENCE_S = 45.0
GROUP = "apis/springtide.dev/v1alpha1"
PATCHES = {
    "merge": "application/merge-patch+json",
    "json": "application/json-patch+json",
    "strategic": "application/strategic-merge-patch+json",
    "apply": "application/apply-patch+yaml",
}


def _close_all(connections: list[http.client.HTTPSConnection]) -> None:
    for connection in connections:
        connection.close()


class Refused(Exception):
    """The API server answered with something else than success."""

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        super().__init__(f"{status}: {body.get('message', body)}")
        self.status = status
        self.body = body


def _file(entry: dict[str, Any], name: str) -> str:
    """The path of a key or certificate that a kubeconfig names or holds."""
    if f"{name}-data" not in entry:
        return str(entry.get(name, ""))
    with tempfile.NamedTemporaryFile(delete=False, suffix=".pem") as file:
        file.write(base64.b64decode(entry[f"{name}-data"]))
        return file.name


class Kube:
    """One cluster, as the current context of a kubeconfig names it. Connections are kept and used again."""

    def __init__(self, kubeconfig: Path, *, token: str = "") -> None:
        self.kubeconfig = kubeconfig
        config = yaml.safe_load(kubeconfig.read_text())
        named = {kind: {entry["name"]: entry for entry in config[kind]} for kind in ("contexts", "clusters", "users")}
        context = named["contexts"][config["current-context"]]["context"]
        cluster = named["clusters"][context["cluster"]]["cluster"]
        user = named["users"][context["user"]]["user"]
        self.server: str = cluster["server"]
        self._tls = ssl.create_default_context(cafile=_file(cluster, "certificate-authority") or None)
        if not token and (certificate := _file(user, "client-certificate")):
            self._tls.load_cert_chain(certificate, _file(user, "client-key"))
        self._token = token or user.get("token", "")
        # Of nobody at the moment: a thread takes one out for as long as its call lasts.
        self._idle: list[http.client.HTTPSConnection] = []
        weakref.finalize(self, _close_all, self._idle)

    def ask(self, verb: str, path: str, body: object = None, *, kind: str = "application/json") -> dict[str, Any]:
        """One request; the decoded answer. Raises Refused."""
        headers = {"Content-Type": kind, "Accept": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        status, data = self._exchange(verb, f"/{path}", json.dumps(body) if body is not None else None, headers)
        decoded = json.loads(data) if data[:1] == b"{" else {"message": data.decode(errors="replace")}
        if status >= 300:
            raise Refused(status, decoded)
        return decoded

    def _exchange(self, verb: str, path: str, body: str | None, headers: dict[str, str]) -> tuple[int, bytes]:
        # A server that was restarted has forgotten old connections: only what may be said twice is said on one.
        while verb == "GET" and self._idle:
            with contextlib.suppress(OSError, http.client.HTTPException, IndexError):
                return self._exchange_on(self._idle.pop(), verb, path, body, headers)
        parts = urlsplit(self.server)
        connection = http.client.HTTPSConnection(parts.hostname or "", parts.port, timeout=15.0, context=self._tls)
        return self._exchange_on(connection, verb, path, body, headers)

    def _exchange_on(
        self, connection: http.client.HTTPSConnection, verb: str, path: str, body: str | None, headers: dict[str, str]
    ) -> tuple[int, bytes]:
        try:
            connection.request(verb, path, body, headers)
            answer = connection.getresponse()
            data = answer.read()
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        return answer.status, data

    def get(self, path: str, **query: str) -> dict[str, Any]:
        return self.ask("GET", f"{path}?{urlencode(query)}" if query else path)

    def find(self, path: str) -> dict[str, Any] | None:
        """What stands there, or nothing."""
        try:
            return self.get(path)
        except Refused as refusal:
            if refusal.status == 404:
                return None
            raise

    def items(self, path: str, **query: str) -> list[dict[str, Any]]:
        return list(self.get(path, **query)["items"])

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self.ask("POST", path, body)

    def patch(self, path: str, body: object, kind: str = "merge") -> dict[str, Any]:
        return self.ask("PATCH", path, body, kind=PATCHES[kind])

    def delete(self, path: str, **options: Any) -> None:
        """Ask for an object to go; that it has gone already is as good."""
        try:
            self.ask("DELETE", path, options or None)
        except Refused as refusal:
            if refusal.status != 404:
                raise

    def pods(self, namespace: str, selector: str = "") -> list[dict[str, Any]]:
        return self.items(f"api/v1/namespaces/{namespace}/pods", labelSelector=selector)

    def logs(self, namespace: str, pod: str) -> str:
        return str(self.get(f"api/v1/namespaces/{namespace}/pods/{pod}/log").get("message", ""))

    def apply(self, *objects: dict[str, Any]) -> None:
        """What `kubectl apply` does for objects of the kinds that tests use."""
        for item in objects:
            path = f"{collection(item)}/{item['metadata']['name']}?fieldManager=test&force=true"
            self.patch(path, item, "apply")


def collection(item: dict[str, Any]) -> str:
    """The path of the collection that an object belongs to."""
    group = item["apiVersion"]
    plural = item["kind"].lower() + ("es" if item["kind"].endswith("s") else "s")
    namespace = item["metadata"].get("namespace")
    middle = f"/namespaces/{namespace}" if namespace else ""
    return f"{'apis' if '/' in group else 'api'}/{group}{middle}/{plural}"


def wait_for(what: str, condition: Callable[[], Any], within_s: float = 60.0, every_s: float = 0.2) -> Any:
    """What the condition gives as soon as it gives something. An API server that does not answer is waited for.

    It is waited for `PATIENCE_S` longer than it should take.
    """
    until = time.monotonic() + PATIENCE_S + within_s
    last: object = None
    while time.monotonic() < until:
        try:
            if value := condition():
                return value
            last = value
        except (OSError, Refused, http.client.HTTPException) as error:
            last = error
        time.sleep(every_s)
    raise AssertionError(f"{what} did not come within {PATIENCE_S + within_s:g} s (last: {last!r})")
