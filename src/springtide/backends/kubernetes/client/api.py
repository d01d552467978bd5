"""The API server, as coroutines on plain objects: every call of the platform to Kubernetes is one of these.

lightkube 1.0 reads the configuration and makes the TLS context; calls, files of several kubeconfigs and credentials are
handled here, because it does not do what a control plane needs:
- calls: no bookmarks, no deletion under preconditions, no listings of metadata alone, no objects that stay dicts; a GET
  of a pod costs its client 650 us of CPU, this one 110 us (40 at once; an event of a watch 22 us and 11 us);
- kubeconfig: one file only ($KUBECONFIG may name several), `proxy-url` and `tls-server-name` are dropped;
- credentials: commands of API version v1 are refused, KUBERNETES_EXEC_INFO and the time of expiry are not known, a
  command has no time limit, and renewed client certificates are never loaded.
"""

from __future__ import annotations

import base64
import os
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from lightkube.config import client_adapter
from lightkube.config.kubeconfig import KubeConfig, SingleConfig
from lightkube.config.models import User
from lightkube.core.exceptions import ConfigError

from springtide.backends.kubernetes.client.auth import Authorization, ClientCertificate, Fixed, TokenCommand, TokenFile
from springtide.backends.kubernetes.client.errors import Expired, KubeApiError, ServerFault, error_of
from springtide.backends.kubernetes.client.kinds import ACCESS_REVIEW, POD, Key, Kind, Object, key_of
from springtide.backends.kubernetes.client.kubeconfig import (
    HOME_KUBECONFIG,
    chosen_cluster,
    named_kubeconfigs,
    read_kubeconfigs,
)
from springtide.backends.kubernetes.client.messages import (
    METADATA_ONLY,
    PATCH_TYPES,
    Heads,
    ItemT,
    Listed,
    Listing,
    Page,
    PatchType,
    WatchEvent,
    access_review,
    decode_heads,
    decode_object,
    decode_objects,
    encode,
    event_decoder,
    kind_of_write,
    selectors,
    target_of,
)
from springtide.backends.kubernetes.client.wire import Stream, Wire, proxy_for
from springtide.backends.kubernetes.settings import FIELD_MANAGER
from springtide.core.errors import BackendError

T = TypeVar("T")
SERVICE_ACCOUNT_DIR = Path("/var/run/secrets/kubernetes.io/serviceaccount")
CALL_TIMEOUT_S = 15.0
# A watch sends something, at least a bookmark, about once a minute; one that is silent longer is restarted.
WATCH_SILENCE_S = 130.0
PAGE_SIZE = 1000
_JSON = "application/json"
# Longer than any object; a container may write without ever ending a line.
_MOST_LINE_BYTES = 8 << 20


class KubeApi:
    """One cluster. Used from one event loop; raises KubeApiError (errors.py), BackendError where no call came about.

    `server` is its address, `namespace` the one that the configuration names. `heard_at_s` is when the server last said
    anything (monotonic, -inf: never), `num_calls` how many calls were made; `on_write` is told of every write that was
    taken: its kind, and how many seconds it took.
    """

    def __init__(
        self,
        server: str,
        *,
        context: ssl.SSLContext | None = None,
        auth: Authorization | None = None,
        namespace: str = "default",
        proxy: str | None = None,
        server_name: str = "",
        certificate: ClientCertificate | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.server = server.rstrip("/")
        self.namespace = namespace
        self.heard_at_s = float("-inf")
        self.num_calls = 0
        self.on_write: Callable[[str, float], None] = lambda kind, took_s: None
        self._certificate = certificate
        self._auth = auth
        self.wire = Wire(
            self.server,
            context,
            proxy=proxy,
            server_name=server_name,
            headers={"User-Agent": "springtide", **(headers or {})},
        )

    @classmethod
    def connect(
        cls,
        kubeconfig: Path | str | None = None,
        *,
        context: str = "",
        server: str = "",
        token: str = "",
        impersonate: str = "",
    ) -> KubeApi:
        """Where the cluster is: a kubeconfig, else $KUBECONFIG, else the pod's service account, else ~/.kube/config.

        Reads files and makes no call. `server` is used instead of the configured address (a proxy in between), `token`
        instead of the configured user; `impersonate` is the user to act as, where that is allowed. Raises BackendError,
        with what would do.
        """
        try:
            config, cluster = _configuration(kubeconfig, context)
            user = User(token=token) if token else config.user or User()
            verify = client_adapter.verify_cluster(config.cluster, user, config.abs_file)
            auth = _auth_of(config, user)
        except (ConfigError, OSError, KeyError, ValueError, ssl.SSLError, msgspec.ValidationError) as error:
            raise BackendError(f"no way to the Kubernetes cluster: {error}") from error
        certificate = None
        if user.client_cert and user.client_key:
            paths = (Path(config.abs_file(user.client_cert)), Path(config.abs_file(user.client_key)))
            certificate = ClientCertificate(verify, *paths)
        address = server or config.cluster.server
        return cls(
            address,
            context=verify,
            auth=auth,
            namespace=config.namespace,
            proxy=cluster.get("proxy-url") or proxy_for(address),
            server_name=cluster.get("tls-server-name", ""),
            certificate=certificate,
            headers={"Impersonate-User": impersonate} if impersonate else None,
        )

    async def close(self) -> None:
        await self.wire.close()

    # --- objects -----------------------------------------------------------------------------------------------------

    async def get(self, kind: Kind, name: str, namespace: str = "", *, subresource: str = "") -> Object:
        """Read an object from the server. Raises NoSuchObject."""
        return await self._call("GET", kind.path(namespace, name, subresource))

    async def find(self, kind: Kind, name: str, namespace: str = "") -> Object | None:
        """Read an object from the server; None if there is none."""
        try:
            return await self.get(kind, name, namespace)
        except KubeApiError as error:
            if error.status == 404:
                return None
            raise

    async def list(
        self,
        kind: Kind,
        namespace: str = "",
        *,
        labels: str = "",
        fields: str = "",
        not_older_than: str = "",
        metadata_only: bool = False,
    ) -> Listing:
        """Every object of a kind, in a namespace or in all (empty).

        Consistent: no older than any write that was answered before. With `not_older_than` a version, the server may
        answer from memory as of that version or later (cheap). `metadata_only` leaves out spec and status.
        """
        accept = METADATA_ONLY if metadata_only else _JSON
        return Listing(*await self._listed(decode_objects, accept, kind, namespace, labels, fields, not_older_than))

    async def heads(
        self, kind: Kind, namespace: str = "", *, labels: str = "", fields: str = "", not_older_than: str = ""
    ) -> Heads:
        """As `list`, of each object only which one it is and its version: soon read, also of many thousands."""
        return Heads(*await self._listed(decode_heads, METADATA_ONLY, kind, namespace, labels, fields, not_older_than))

    async def _listed(
        self,
        decode: Callable[[bytes], Page[ItemT]],
        accept: str,
        kind: Kind,
        namespace: str,
        labels: str,
        fields: str,
        not_older_than: str,
    ) -> Listed[ItemT]:
        path, headers = kind.path(namespace), {"Accept": accept}
        params = selectors(labels, fields)
        if not_older_than:
            params |= {"resourceVersion": not_older_than, "resourceVersionMatch": "NotOlderThan"}
        else:
            params["limit"] = str(PAGE_SIZE)
        items: list[ItemT] = []
        while True:
            try:
                page = _decoded(decode, await self._call_raw("GET", path, params=params, headers=headers))
            except Expired:
                if "continue" not in params:
                    raise
                # The listing's version expired between pages: list again, in one page.
                params.pop("continue")
                params.pop("limit")
                items.clear()
                continue
            items += page.items or ()
            if not page.metadata.next_page:
                return items, page.metadata.resource_version
            params["continue"] = page.metadata.next_page

    async def watch(
        self,
        kind: Kind,
        namespace: str = "",
        *,
        resource_version: str,
        labels: str = "",
        fields: str = "",
        timeout_s: float = 300.0,
        silence_s: float = WATCH_SILENCE_S,
        on_open: Callable[[], None] | None = None,
    ) -> AsyncIterator[WatchEvent]:
        """What happens after `resource_version`, bookmarks included; ends when the server ends it (`timeout_s`).

        `on_open` is called once the server has taken the watch, which may be long before it has anything to say.
        Raises Expired where the version is too old, Unreachable where the connection breaks or nothing at all comes
        for `silence_s`.
        """
        params = selectors(labels, fields) | {
            "watch": "true",
            "resourceVersion": resource_version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(max(1, int(timeout_s))),
        }
        async for line in self._lines(kind.path(namespace), params, silence_s, on_open):
            event = _decoded(event_decoder.decode, line)
            if event.type == "ERROR":
                raise error_of(int(event.object.get("code", 0)), msgspec.json.encode(event.object))
            yield WatchEvent(event.type, event.object)

    async def create(self, kind: Kind, obj: Object, namespace: str = "", *, dry_run: bool = False) -> Object:
        """Make an object, or with `dry_run` find out whether it could be made now.

        Raises AlreadyExists, Invalid, Forbidden, QuotaExceeded.
        """
        where = namespace or obj["metadata"].get("namespace", "")
        body = {"apiVersion": kind.api_version, "kind": kind.name, **obj}
        params = {"fieldManager": FIELD_MANAGER} | ({"dryRun": "All"} if dry_run else {})
        return await self._call("POST", kind.path(where), body, params=params)

    async def replace(self, kind: Kind, obj: Object, *, subresource: str = "") -> Object:
        """Replace an object. Raises VersionConflict if its version is no longer that of `obj`."""
        key = key_of(obj)
        body = {"apiVersion": kind.api_version, "kind": kind.name, **obj}
        return await self._call("PUT", kind.path(*key, subresource), body, params={"fieldManager": FIELD_MANAGER})

    async def patch(
        self,
        kind: Kind,
        name: str,
        patch: Any,
        namespace: str = "",
        *,
        how: PatchType = "merge",
        subresource: str = "",
        manager: str = FIELD_MANAGER,
    ) -> Object:
        """Patch an object. "apply" creates it if there is none, and takes over fields of other managers."""
        params = {"fieldManager": manager}
        if how == "apply":
            params["force"] = "true"
            patch = {"apiVersion": kind.api_version, "kind": kind.name, **patch}
        headers = {"Content-Type": PATCH_TYPES[how]}
        path = kind.path(namespace, name, subresource)
        return await self._call("PATCH", path, patch, params=params, headers=headers)

    async def delete(
        self,
        kind: Kind,
        name: str,
        namespace: str = "",
        *,
        grace_s: float | None = None,
        uid: str = "",
        resource_version: str = "",
        propagation: Literal["", "Background", "Foreground", "Orphan"] = "",
    ) -> bool:
        """Ask an object to go; False where there is none. Raises VersionConflict: it has another uid or version.

        `grace_s` of a pod is in whole seconds; 0 forgets the object at once, whatever its containers do.
        """
        options: Object = {"kind": "DeleteOptions", "apiVersion": "v1"}
        if grace_s is not None:
            options["gracePeriodSeconds"] = int(grace_s)
        preconditions = {"uid": uid, "resourceVersion": resource_version}
        if any(preconditions.values()):
            options["preconditions"] = {name: value for name, value in preconditions.items() if value}
        if propagation:
            options["propagationPolicy"] = propagation
        try:
            await self._call_raw("DELETE", kind.path(namespace, name), options)
        except KubeApiError as error:
            if error.status == 404:
                return False
            raise
        return True

    async def bind(self, pod: Key, node: str, *, uid: str = "") -> None:
        """Bind a pod to a node; `uid` identifies the pod. Raises VersionConflict if it is bound already."""
        metadata: Object = {"name": pod.name, "namespace": pod.namespace}
        if uid:
            metadata["uid"] = uid
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": metadata,
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        }
        await self._call_raw("POST", POD.path(*pod, "binding"), binding)

    async def logs(
        self,
        pod: Key,
        *,
        container: str = "",
        follow: bool = False,
        tail_lines: int | None = None,
        limit_bytes: int | None = None,
        since_time: str = "",
        timestamps: bool = False,
    ) -> AsyncIterator[bytes]:
        """A container's output, line by line without line ends; with `follow` until it has ended."""
        params = {"container": container, "sinceTime": since_time}
        params = {name: value for name, value in params.items() if value}
        numbers = {"tailLines": tail_lines, "limitBytes": limit_bytes}
        params |= {name: str(value) for name, value in numbers.items() if value is not None}
        params |= {name: "true" for name, value in (("follow", follow), ("timestamps", timestamps)) if value}
        silence_s = None if follow else CALL_TIMEOUT_S
        async for line in self._lines(POD.path(*pod, "log"), params, silence_s):
            yield line

    async def review(
        self, verb: str, kind: Kind, namespace: str = "", *, name: str = "", subresource: str = ""
    ) -> bool:
        """Whether this user has that right on objects of that kind."""
        body = access_review(verb, kind, namespace, name, subresource)
        answer = await self._call("POST", ACCESS_REVIEW.path(), body)
        return bool(answer.get("status", {}).get("allowed"))

    async def version(self) -> str:
        """The server's version, such as `v1.30.2`; the cheapest call to find out whether it answers."""
        return str((await self._call("GET", "/version")).get("gitVersion", ""))

    # --- the wire ----------------------------------------------------------------------------------------------------

    async def _call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Object:
        return _decoded(decode_object, await self._call_raw(method, path, body, params=params, headers=headers))

    async def _call_raw(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        content = None if body is None else encode(body)
        sent = {"Accept": _JSON}
        if content is not None:
            sent["Content-Type"] = _JSON
        if headers:
            sent.update(headers)
        await self._prove(sent)
        target, began_s = target_of(path, params), time.monotonic()
        reply = await self.wire.send(method, target, sent, content, CALL_TIMEOUT_S)
        if reply.status == 401 and await self._prove_anew(sent):
            reply = await self.wire.send(method, target, sent, content, CALL_TIMEOUT_S)
        self.heard_at_s = now_s = time.monotonic()
        if method != "GET" and reply.status < 300:
            self.on_write(kind_of_write(method, path), now_s - began_s)
        if reply.status >= 300:
            raise error_of(reply.status, reply.body, reply.headers.get("retry-after", ""))
        return reply.body

    async def _lines(
        self,
        path: str,
        params: Mapping[str, str],
        silence_s: float | None,
        on_open: Callable[[], None] | None = None,
    ) -> AsyncIterator[bytes]:
        sent = {"Accept": _JSON}
        await self._prove(sent)
        target, is_proven_anew = target_of(path, params), False
        while True:
            async with self.wire.open("GET", target, sent, None, silence_s) as stream:
                self.heard_at_s = time.monotonic()
                if stream.status == 401 and not is_proven_anew:
                    is_proven_anew = True
                    if await self._prove_anew(sent):
                        continue
                if stream.status >= 300:
                    body = b"".join([chunk async for chunk in stream.chunks()])
                    raise error_of(stream.status, body, stream.headers.get("retry-after", ""))
                if on_open is not None:
                    on_open()
                async for line in self._lines_of(stream):
                    yield line
                return

    async def _lines_of(self, stream: Stream) -> AsyncIterator[bytes]:
        rest = b""
        async for chunk in stream.chunks():
            self.heard_at_s = time.monotonic()
            *lines, rest = (rest + chunk).split(b"\n") if rest else chunk.split(b"\n")
            if len(rest) > _MOST_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                if line:
                    yield line
        if rest:
            yield rest

    async def _prove(self, headers: dict[str, str]) -> None:
        """Add the credentials to the headers of the next call."""
        self.num_calls += 1
        if self._certificate is not None and self._certificate.refresh():
            # Connections authenticate when they are made. Earlier watches continue until they end by themselves.
            await self.wire.renew()
        if self._auth is not None:
            headers["Authorization"] = await self._auth.said()

    async def _prove_anew(self, headers: dict[str, str]) -> bool:
        """The server refused the credentials; returns whether there are others to try."""
        if self._auth is None:
            return False
        refused = headers["Authorization"]
        headers["Authorization"] = await self._auth.said(refused)
        return headers["Authorization"] != refused


def _decoded(decode: Callable[[bytes], T], data: bytes) -> T:
    """Decode the body of an answer. Raises ServerFault if it is not an API server's, or truncated."""
    try:
        return decode(data)
    except msgspec.MsgspecError as error:
        raise ServerFault(502, "BadAnswer", f"the API server's answer cannot be read: {error}") from error


def _configuration(kubeconfig: Path | str | None, context: str) -> tuple[SingleConfig, dict[str, Any]]:
    """The configuration in force, and its cluster's fields that lightkube does not read. Raises ConfigError."""
    paths = named_kubeconfigs(kubeconfig)
    if not paths and os.environ.get("KUBERNETES_SERVICE_HOST") and (SERVICE_ACCOUNT_DIR / "token").exists():
        config, cluster = KubeConfig.from_service_account(SERVICE_ACCOUNT_DIR), {}
    else:
        told = read_kubeconfigs(paths or [HOME_KUBECONFIG.expanduser()])
        cluster = chosen_cluster(told, context)
        config = KubeConfig.from_dict(told, fname="kubeconfig")
    chosen = config.get(context or None)
    assert chosen is not None, "chosen_cluster looked"
    return chosen, cluster


def _auth_of(config: SingleConfig, user: User) -> Authorization | None:
    if user.token_file:
        return TokenFile(Path(config.abs_file(user.token_file)))
    if user.token:
        return Fixed(f"Bearer {user.token}")
    if user.exec is not None:
        environment = {each.name: each.value for each in user.exec.env or ()}
        command = (user.exec.command, *(user.exec.args or ()))
        return TokenCommand(command, environment, user.exec.apiVersion)
    if user.username and user.password:
        return Fixed(f"Basic {base64.b64encode(f'{user.username}:{user.password}'.encode()).decode()}")
    if user.auth_provider:
        raise ConfigError("auth-provider in a kubeconfig is of the past: use `exec`")
    return None
