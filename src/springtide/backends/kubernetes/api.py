"""The API server, as coroutines on plain objects: every call of the platform to Kubernetes is one of these.

lightkube finds out where the cluster is and how to trust it; the calls themselves are made here, because a reconciler
needs what its client does not do: bookmarks, deletion under preconditions, listings of metadata alone, and objects that
stay the dicts they came as.
"""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import httpx2
import msgspec
from lightkube.config import client_adapter
from lightkube.config.kubeconfig import KubeConfig, SingleConfig
from lightkube.config.models import User
from lightkube.core.exceptions import ConfigError

from springtide.backends.kubernetes.api_auth import ClientCertificate, FixedToken, TokenCommand, TokenFile
from springtide.backends.kubernetes.api_errors import ApiError, Expired, ServerFault, error_of
from springtide.backends.kubernetes.api_wire import (
    METADATA_ONLY,
    PATCH_TYPES,
    SOCKET_OPTIONS,
    Listing,
    PatchType,
    WatchEvent,
    decode_object,
    encode,
    event_decoder,
    list_decoder,
    proxy_for,
    selectors,
    unreachable,
)
from springtide.backends.kubernetes.kinds import ACCESS_REVIEW, POD, Key, Kind, Object, key_of
from springtide.backends.kubernetes.kubeconfig import (
    HOME_KUBECONFIG,
    chosen_cluster,
    named_kubeconfigs,
    read_kubeconfigs,
)
from springtide.backends.kubernetes.settings import FIELD_MANAGER
from springtide.core.errors import BackendError

T = TypeVar("T")
SERVICE_ACCOUNT_DIR = Path("/var/run/secrets/kubernetes.io/serviceaccount")
CALL_TIMEOUT_S = 15.0
CONNECT_TIMEOUT_S = 5.0
# A watch says something, a bookmark at least, about once a minute; one that is silent for longer is begun anew.
WATCH_SILENCE_S = 130.0
PAGE_SIZE = 1000
# No object is as long; a container may write without ever ending a line.
_MOST_LINE_BYTES = 8 << 20


class KubeApi:
    """One cluster. Used from one event loop; raises ApiError (api_errors.py), BackendError where no call came about.

    `server` is its address, `namespace` the one that the configuration names. `heard_at_s` is when the server last said
    anything (monotonic, -inf: never), `num_calls` how many calls were made.
    """

    def __init__(
        self,
        server: str,
        *,
        verify: ssl.SSLContext | bool = True,
        auth: httpx2.Auth | None = None,
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
        self._certificate = certificate
        self._extensions = {"sni_hostname": server_name} if server_name else None
        self._make_client: Callable[[], httpx2.AsyncClient] = lambda: httpx2.AsyncClient(
            auth=auth,
            timeout=httpx2.Timeout(CALL_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            headers={"Accept": "application/json", "User-Agent": "springtide", **(headers or {})},
            follow_redirects=False,
            trust_env=False,
            transport=httpx2.AsyncHTTPTransport(
                verify=verify,
                proxy=proxy,
                limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=30.0),
                socket_options=SOCKET_OPTIONS,
                trust_env=False,
            ),
        )
        self._client = self._make_client()
        self._retired: httpx2.AsyncClient | None = None

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
        instead of the configured user; `impersonate` is the user to act as, for whoever may. Raises BackendError, with
        what would do.
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
            verify=verify,
            auth=auth,
            namespace=config.namespace,
            proxy=cluster.get("proxy-url") or proxy_for(address),
            server_name=cluster.get("tls-server-name", ""),
            certificate=certificate,
            headers={"Impersonate-User": impersonate} if impersonate else None,
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._client.aclose()
        if self._retired is not None:
            await self._retired.aclose()

    # --- objects -----------------------------------------------------------------------------------------------------

    async def get(self, kind: Kind, name: str, namespace: str = "", *, subresource: str = "") -> Object:
        """Read an object, as it is now. Raises NoSuchObject."""
        return await self._call("GET", kind.path(namespace, name, subresource))

    async def find(self, kind: Kind, name: str, namespace: str = "") -> Object | None:
        """Read an object, as it is now; None where there is none."""
        try:
            return await self.get(kind, name, namespace)
        except ApiError as error:
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
        path = kind.path(namespace)
        params = selectors(labels, fields)
        headers = {"Accept": METADATA_ONLY} if metadata_only else None
        if not_older_than:
            params |= {"resourceVersion": not_older_than, "resourceVersionMatch": "NotOlderThan"}
        else:
            params["limit"] = str(PAGE_SIZE)
        items: list[Object] = []
        while True:
            try:
                page = _decoded(list_decoder.decode, await self._call_raw("GET", path, params=params, headers=headers))
            except Expired:
                if "continue" not in params:
                    raise
                # The pages took longer than the server remembers: once more, in one piece.
                params.pop("continue")
                params.pop("limit")
                items.clear()
                continue
            items += page.items or ()
            if not page.metadata.next_page:
                return Listing(items, page.metadata.resource_version)
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
        timeout = httpx2.Timeout(CALL_TIMEOUT_S, connect=CONNECT_TIMEOUT_S, read=silence_s)
        async for line in self._lines(kind.path(namespace), params, timeout, on_open):
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
        """Write an object whole. Raises VersionConflict where it is no longer the version that `obj` says."""
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
        """Change parts of an object. "apply" makes it where there is none, and takes fields over from others."""
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
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        return True

    async def bind(self, pod: Key, node: str, *, uid: str = "") -> None:
        """Put a pod on a node; `uid` says which pod of that name. Raises VersionConflict: it is bound already."""
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
        """What a container wrote, line by line without the ends; with `follow` until it has ended."""
        params = {"container": container, "sinceTime": since_time}
        params = {name: value for name, value in params.items() if value}
        numbers = {"tailLines": tail_lines, "limitBytes": limit_bytes}
        params |= {name: str(value) for name, value in numbers.items() if value is not None}
        params |= {name: "true" for name, value in (("follow", follow), ("timestamps", timestamps)) if value}
        timeout = httpx2.Timeout(CALL_TIMEOUT_S, connect=CONNECT_TIMEOUT_S, read=None if follow else CALL_TIMEOUT_S)
        async for line in self._lines(POD.path(*pod, "log"), params, timeout):
            yield line

    async def review(
        self, verb: str, kind: Kind, namespace: str = "", *, name: str = "", subresource: str = ""
    ) -> bool:
        """Whether whoever asks may do that to objects of that kind."""
        attributes = {
            "verb": verb,
            "group": kind.group,
            "version": kind.version,
            "resource": kind.plural,
            "subresource": subresource,
            "namespace": namespace,
            "name": name,
        }
        review = {"spec": {"resourceAttributes": {key: value for key, value in attributes.items() if value}}}
        body = {"apiVersion": ACCESS_REVIEW.api_version, "kind": ACCESS_REVIEW.name, **review}
        answer = await self._call("POST", ACCESS_REVIEW.path(), body)
        return bool(answer.get("status", {}).get("allowed"))

    async def version(self) -> str:
        """What the server is, such as `v1.30.2`; the cheapest way to ask whether it is there."""
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
        sent = {"Content-Type": "application/json", **(headers or {})} if content is not None else headers
        client = await self._current_client()
        request = client.build_request(
            method, self.server + path, params=params, content=content, headers=sent, extensions=self._extensions
        )
        try:
            response = await client.send(request)
        except httpx2.HTTPError as error:
            raise unreachable(self.server, error) from error
        self.heard_at_s = time.monotonic()
        if response.status_code >= 300:
            raise error_of(response.status_code, response.content, response.headers.get("Retry-After", ""))
        return response.content

    async def _lines(
        self,
        path: str,
        params: Mapping[str, str],
        timeout: httpx2.Timeout,
        on_open: Callable[[], None] | None = None,
    ) -> AsyncIterator[bytes]:
        """The lines of an answer as they come."""
        client = await self._current_client()
        request = client.build_request(
            "GET", self.server + path, params=params, timeout=timeout, extensions=self._extensions
        )
        try:
            response = await client.send(request, stream=True)
            try:
                self.heard_at_s = time.monotonic()
                if response.status_code >= 300:
                    body = await response.aread()
                    raise error_of(response.status_code, body, response.headers.get("Retry-After", ""))
                if on_open is not None:
                    on_open()
                rest = b""
                async for chunk in response.aiter_bytes():
                    self.heard_at_s = time.monotonic()
                    *lines, rest = (rest + chunk).split(b"\n") if rest else chunk.split(b"\n")
                    if len(rest) > _MOST_LINE_BYTES:
                        lines, rest = [*lines, rest], b""
                    for line in lines:
                        if line:
                            yield line
                if rest:
                    yield rest
            finally:
                await response.aclose()
        except httpx2.HTTPError as error:
            raise unreachable(self.server, error) from error

    async def _current_client(self) -> httpx2.AsyncClient:
        """The client to make the next call with: another one once the client certificate is another one."""
        self.num_calls += 1
        if self._certificate is not None and self._certificate.refresh():
            # Connections prove who they are when they are made. Watches of before go on until they end by themselves.
            if self._retired is not None:
                await self._retired.aclose()
            self._retired, self._client = self._client, self._make_client()
        return self._client


def _decoded(decode: Callable[[bytes], T], data: bytes) -> T:
    """What an answer says. Raises ServerFault: it is no answer of an API server, or half of one."""
    try:
        return decode(data)
    except msgspec.MsgspecError as error:
        raise ServerFault(502, "BadAnswer", f"the API server's answer cannot be read: {error}") from error


def _configuration(kubeconfig: Path | str | None, context: str) -> tuple[SingleConfig, dict[str, Any]]:
    """The configuration that counts, and what its cluster says that lightkube does not read. Raises ConfigError."""
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


def _auth_of(config: SingleConfig, user: User) -> httpx2.Auth | None:
    if user.token_file:
        return TokenFile(Path(config.abs_file(user.token_file)))
    if user.token:
        return FixedToken(user.token)
    if user.exec is not None:
        environment = {each.name: each.value for each in user.exec.env or ()}
        command = (user.exec.command, *(user.exec.args or ()))
        return TokenCommand(command, environment, user.exec.apiVersion)
    if user.username and user.password:
        return httpx2.BasicAuth(user.username, user.password)
    if user.auth_provider:
        raise ConfigError("auth-provider in a kubeconfig is of the past: use `exec`")
    return None
