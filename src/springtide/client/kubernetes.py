"""Training and inference functions as Kubernetes objects: creating, changing and watching them through a kubeconfig."""

from __future__ import annotations

import asyncio
import base64
import difflib
import secrets as secret_digits
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from springtide.backends.kubernetes.client.kinds import (
    CONFIG_MAP,
    INFERENCE_FUNCTION,
    SECRET,
    TRAINING_FUNCTION,
    Key,
    Kind,
    Object,
)
from springtide.backends.kubernetes.resources.definitions import (
    API_VERSION,
    INFERENCE_KIND,
    TRAINING_KIND,
    spec_schema,
)
from springtide.backends.kubernetes.resources.from_object import (
    FOLDER_PART_BYTES,
    MAX_OBJECT_SOURCE_BYTES,
    NAME_ANNOTATION,
    PART_KEY,
    check_kept,
)
from springtide.backends.kubernetes.resources.to_object import inference_function, training_function
from springtide.client.goals import TrainOptions, workers_range
from springtide.client.serving_goals import ServeOptions
from springtide.client.sources.source import SentFolder, SourceFile, for_pods
from springtide.core.containers import SECRETS_VARIABLE
from springtide.core.errors import InvalidRequest, NotFound
from springtide.core.options.rules import NO_FUNCTIONS, NO_PYTHON_IN_PODS
from springtide.core.quantities import validate_name

ResultT = TypeVar("ResultT")
CLIENT_MANAGER = "springtide-client"
POLL_S = 1.0
KINDS: Mapping[str, Kind] = MappingProxyType(
    {TRAINING_KIND: TRAINING_FUNCTION, INFERENCE_KIND: INFERENCE_FUNCTION, CONFIG_MAP.name: CONFIG_MAP}
)


class Applied(NamedTuple):
    """An applied object as the cluster has it now; `verb` is "created", "configured" or "unchanged"."""

    object: Object
    verb: str


class PackedFolder(NamedTuple):
    """A folder that is to travel with an object, and its archive."""

    sent: SentFolder
    archive: bytes


class ClusterClient:
    """A client of one Kubernetes cluster. Close it, or use a `with` block; not thread-safe.

    Methods raise InvalidRequest with the cluster's message if it rejects an object, BackendError if it cannot be
    reached.
    """

    def __init__(self, kubeconfig: str | Path | None = None, *, context: str = "") -> None:
        # Imported here, because only cluster commands need this library.
        from springtide.backends.kubernetes.client.api import KubeApi

        self._runner = asyncio.Runner()
        self._api = KubeApi.connect(kubeconfig, context=context)
        self.namespace = self._api.namespace

    def __enter__(self) -> ClusterClient:
        """Return the client."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close every connection."""
        self.close()

    def close(self) -> None:
        """Close every connection. The client cannot be used afterwards."""
        self._runner.run(self._api.close())
        self._runner.close()

    def create(
        self, obj: Object, secrets: Mapping[str, str] | None = None, folder: PackedFolder | None = None
    ) -> Object:
        """Create an object. Raises InvalidRequest if it exists already.

        The environment of its pods gets the values of `secrets`, by name, from a Secret that goes with the object; the
        workload gets the `folder` from ConfigMaps that do.
        """
        if folder is not None:
            with self._parts(obj, folder) as (told, _):
                made = self.create(told, secrets)
                self._keep_parts(made, told)
            return made
        kind, namespace = _kind_of(obj), self._namespace_of(obj)
        if not secrets:
            made = self._request(obj, lambda: self._api.create(kind, obj, namespace))
            try:
                check_kept(obj, made)
            except InvalidRequest:
                self._run(self._api.delete(kind, made["metadata"]["name"], namespace, uid=made["metadata"]["uid"]))
                raise
            return made
        with self._secret(obj, secrets) as name:
            told = _with_secret(obj, name, secrets)
            made = self._request(obj, lambda: self._api.create(kind, told, namespace))
            self._give_owner(SECRET, name, made)
        return made

    def apply(
        self, obj: Object, secrets: Mapping[str, str] | None = None, folder: PackedFolder | None = None
    ) -> Applied:
        """Create or change an object by server-side apply, which leaves fields set by other managers unchanged.

        `secrets` and `folder` are as for `create`; the same ones as before leave the object unchanged.
        """
        if folder is not None:
            with self._parts(obj, folder) as (told, older):
                applied = self.apply(told, secrets)
                self._keep_parts(applied.object, told)
            for part in older.difference(_parts_of(told)):
                self._run(self._api.delete(CONFIG_MAP, part, self._namespace_of(obj)))
            return applied
        kind, name, namespace = _kind_of(obj), obj["metadata"]["name"], self._namespace_of(obj)
        before = self._run(self._api.find(kind, name, namespace))
        if secrets:
            known = self._known_secret(obj, before, secrets)
            if known:
                return self.apply(_with_secret(obj, known, secrets))
            with self._secret(obj, secrets) as made:
                applied = self.apply(_with_secret(obj, made, secrets))
                self._give_owner(SECRET, made, applied.object)
            return applied
        # Server-side apply also removes fields that this client set before and now leaves out.
        now = self._request(
            obj, lambda: self._api.patch(kind, name, obj, namespace, how="apply", manager=CLIENT_MANAGER)
        )
        if kind is not CONFIG_MAP:
            check_kept(obj, now)
        if before is None:
            return Applied(now, "created")
        is_same = before["metadata"].get("generation") == now["metadata"].get("generation")
        if kind is CONFIG_MAP:
            is_same = before.get("data") == now.get("data")
        return Applied(now, "unchanged" if is_same else "configured")

    def find(self, kind: str, key: Key) -> Object | None:
        """The object as it is now, None if it does not exist."""
        return self._run(self._api.find(KINDS[kind], key.name, key.namespace))

    def follow(self, kind: str, key: Key, poll_s: float = POLL_S) -> Iterator[Object]:
        """Yield the object every `poll_s` seconds, without end. Raises NotFound once it is deleted."""
        while True:
            obj = self.find(kind, key)
            if obj is None:
                raise NotFound(f"{kind} {key.namespace}/{key.name} is gone: it was deleted")
            yield obj
            time.sleep(poll_s)

    @contextmanager
    def _secret(self, obj: Object, values: Mapping[str, str]) -> Iterator[str]:
        """Create a Secret and yield its name; it is deleted again if what follows fails."""
        name, namespace = f"{_secret_prefix(obj)}{secret_digits.token_hex(4)}", self._namespace_of(obj)
        data = {key: base64.b64encode(value.encode()).decode() for key, value in values.items()}
        labels = {"app.kubernetes.io/managed-by": CLIENT_MANAGER}
        secret = {"kind": SECRET.name, "metadata": {"name": name, "labels": labels}, "type": "Opaque", "data": data}
        self._request(secret, lambda: self._api.create(SECRET, secret, namespace))
        try:
            yield name
        except BaseException:
            self._run(self._api.delete(SECRET, name, namespace))
            raise

    @contextmanager
    def _parts(self, obj: Object, folder: PackedFolder) -> Iterator[tuple[Object, set[str]]]:
        """Write ConfigMaps with the parts of a folder, and yield the object with that folder.

        Beside it are the names of those that the object has now; others are deleted again if what follows fails.
        """
        namespace, prefix = self._namespace_of(obj), f"{_parts_prefix(obj)}{folder.sent.sha256[:16]}-"
        names = [f"{prefix}{number}" for number in range(-(-len(folder.archive) // FOLDER_PART_BYTES))]
        labels = {"app.kubernetes.io/managed-by": CLIENT_MANAGER}
        older = set(_parts_of(self._run(self._api.find(_kind_of(obj), obj["metadata"]["name"], namespace))))
        try:
            for number, name in enumerate(names):
                part = folder.archive[number * FOLDER_PART_BYTES : (number + 1) * FOLDER_PART_BYTES]
                kept = {
                    "apiVersion": CONFIG_MAP.api_version,
                    "kind": CONFIG_MAP.name,
                    "metadata": {"name": name, "namespace": namespace, "labels": labels},
                    "binaryData": {PART_KEY: base64.b64encode(part).decode()},
                }
                write = partial(self._api.patch, CONFIG_MAP, name, kept, namespace, how="apply", manager=CLIENT_MANAGER)
                self._request(kept, write)
            sent = {field: value for field, value in asdict(folder.sent).items() if value}
            source = {**obj["spec"]["source"], "folder": {**sent, "configMaps": names}}
            yield {**obj, "spec": {**obj["spec"], "source": source}}, older
        except BaseException:
            for name in set(names).difference(older):
                self._run(self._api.delete(CONFIG_MAP, name, namespace))
            raise

    def _keep_parts(self, made: Object, told: Object) -> None:
        """Have the cluster delete the parts together with the object."""
        for name in _parts_of(told):
            self._give_owner(CONFIG_MAP, name, made)

    def _give_owner(self, kind: Kind, name: str, obj: Object) -> None:
        """Have the cluster delete a Secret or a ConfigMap together with the object."""
        metadata = obj["metadata"]
        owner = {"apiVersion": obj["apiVersion"], "kind": obj["kind"], "name": metadata["name"], "uid": metadata["uid"]}
        patch = {"metadata": {"ownerReferences": [owner]}}
        self._run(self._api.patch(kind, name, patch, metadata["namespace"]))

    def _known_secret(self, obj: Object, before: Object | None, values: Mapping[str, str]) -> str:
        """The name of the Secret with these values that the object has already; empty if it has none."""
        names = (before or {}).get("spec", {}).get("container", {}).get("secrets", ())
        for name in names:
            if name.startswith(_secret_prefix(obj)):
                secret = self._run(self._api.find(SECRET, name, self._namespace_of(obj))) or {}
                known = {key: base64.b64decode(data).decode() for key, data in secret.get("data", {}).items()}
                if known == values:
                    return str(name)
        return ""

    def _namespace_of(self, obj: Object) -> str:
        return obj["metadata"].get("namespace") or self.namespace

    def _request(self, obj: Object, call: Callable[[], Coroutine[Any, Any, ResultT]]) -> ResultT:
        from springtide.backends.kubernetes.client.errors import AlreadyExists, Invalid, KubeForbidden, NoSuchObject

        what = f"{obj['kind']} {self._namespace_of(obj)}/{obj['metadata']['name']}"
        try:
            return self._run(call())
        except NoSuchObject as error:
            if "namespaces" in error.message:
                raise InvalidRequest(
                    f"there is no namespace {self._namespace_of(obj)!r}; create it, or name another"
                ) from None
            raise InvalidRequest(
                f"this cluster does not know {obj['kind']}; teach it: springtide k8s crds | kubectl apply -f -"
            ) from None
        except AlreadyExists:
            raise InvalidRequest(f"{what} is there already; apply changes it") from None
        except (Invalid, KubeForbidden) as error:
            raise InvalidRequest(f"{what} is refused: {error.message}") from None

    def _run(self, call: Coroutine[Any, Any, ResultT]) -> ResultT:
        return self._runner.run(call)


def training_object(
    source: SourceFile,
    options: TrainOptions,
    name: str,
    *,
    namespace: str = "",
    container: Mapping[str, Any] | None = None,
    now: datetime | None = None,
    has_folder: bool = False,
) -> Object:
    """A TrainingFunction object, with random digits after its name so that it is unique. Raises InvalidRequest.

    With `has_folder` the files that the source imports come with its folder.
    """
    if options.values["on"] == "functions":
        raise InvalidRequest(NO_FUNCTIONS)
    _refuse_interpreter(options.values)
    called = validate_name(options.values["name"] or name)
    request = options.as_request(1, now or datetime.now())
    digits = secret_digits.token_hex(3)
    obj = training_function(f"{called}-{digits}", namespace, _source(source, has_folder), request, container or {})
    if workers_range(options.values["workers"]) is None:
        obj["spec"]["workers"] = "auto"
    obj["metadata"]["annotations"] = {NAME_ANNOTATION: called}
    return obj


def inference_object(
    source: SourceFile,
    options: ServeOptions,
    name: str,
    *,
    namespace: str = "",
    container: Mapping[str, Any] | None = None,
    has_folder: bool = False,
) -> Object:
    """An InferenceFunction object; `has_folder` as for a TrainingFunction. Raises InvalidRequest."""
    _refuse_interpreter(options.values)
    called = validate_name(options.values["name"] or name)
    return inference_function(called, namespace, _source(source, has_folder), options.as_request(), container or {})


def _refuse_interpreter(values: Mapping[str, Any]) -> None:
    if values["python"]:
        raise InvalidRequest(NO_PYTHON_IN_PODS)


def check_object(obj: Any, place: str) -> Object:
    """Return the object if its kind can be applied and it has no unknown fields. Raises InvalidRequest.

    `place` names the object's source in messages. Fields are checked here because servers before Kubernetes 1.25
    silently drop unknown ones.
    """
    if not isinstance(obj, dict) or not isinstance(obj.get("metadata"), dict):
        raise InvalidRequest(f"{place} is no object: it needs apiVersion, kind, metadata and spec")
    kind, name = obj.get("kind"), obj["metadata"].get("name")
    if not isinstance(kind, str) or kind not in KINDS:
        known = ", ".join(KINDS)
        raise InvalidRequest(f"{place} is a {kind!r:.60}; this applies {known}, kubectl apply the rest")
    wanted = KINDS[kind].api_version
    if obj.get("apiVersion") != wanted:
        raise InvalidRequest(f"{place} says apiVersion {obj.get('apiVersion')!r:.60}; a {kind} has {wanted}")
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"{place} has no metadata.name; give it one")
    if wanted == API_VERSION:
        spec = obj.get("spec")
        if not isinstance(spec, dict):
            raise InvalidRequest(f"{place} ({kind} {name}) has no spec")
        _check_fields(spec, spec_schema(kind), f"{kind} {name}: spec")
    return obj


def _check_fields(value: Any, schema: Mapping[str, Any], where: str) -> None:
    if isinstance(value, list):
        for place, item in enumerate(value):
            _check_fields(item, schema.get("items", {}), f"{where}[{place}]")
    if not isinstance(value, dict) or schema.get("x-kubernetes-preserve-unknown-fields"):
        return
    properties = schema.get("properties")
    if properties is None:
        return
    for name, inner in value.items():
        if name not in properties:
            near = difflib.get_close_matches(str(name), properties, n=1)
            advice = f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(properties))}"
            raise InvalidRequest(f"{where} has no field {name!r:.60}; {advice}")
        _check_fields(inner, properties[name], f"{where}.{name}")


def _secret_prefix(obj: Object) -> str:
    return f"{obj['metadata']['name']}-secrets-"


def _parts_prefix(obj: Object) -> str:
    return f"{obj['metadata']['name']}-folder-"


def _parts_of(obj: Object | None) -> list[str]:
    """The ConfigMaps with parts of an object's folder that this client has made for it."""
    if obj is None:
        return []
    names = obj["spec"].get("source", {}).get("folder", {}).get("configMaps", ())
    return [name for name in names if name.startswith(_parts_prefix(obj))]


def _with_secret(obj: Object, name: str, names: Iterable[str]) -> Object:
    """The object whose pods' environment has the values of a Secret, and whose logs have none of them."""
    container = obj["spec"].get("container", {})
    told = {"name": SECRETS_VARIABLE, "value": ",".join(sorted(names))}
    added = {"secrets": [*container.get("secrets", ()), name], "env": [*container.get("env", ()), told]}
    return {**obj, "spec": {**obj["spec"], "container": {**container, **added}}}


def _kind_of(obj: Object) -> Kind:
    return KINDS[obj["kind"]]


def _source(source: SourceFile, has_folder: bool) -> dict[str, Any]:
    files = source.files if has_folder else for_pods(source).files
    size = len(source.text.encode()) + sum(len(text.encode()) for text in files.values())
    if size > MAX_OBJECT_SOURCE_BYTES and has_folder:
        # They only tell one job's code from another's.
        files, size = {}, len(source.text.encode())
    if size > MAX_OBJECT_SOURCE_BYTES:
        largest = max(files, key=lambda name: len(files[name])) if files else source.filename
        raise InvalidRequest(
            f"{source.filename} and the {len(files)} files that it imports have {size:,} bytes, and an object of the "
            f"cluster takes {MAX_OBJECT_SOURCE_BYTES:,}; put what is large ({largest}) into the image or a store"
        )
    return {
        "filename": source.filename,
        "text": source.text,
        "object_name": source.object_name,
        "args": list(source.args),
        "files": files,
    }
