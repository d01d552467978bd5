"""Kubeconfig files as one configuration: several merged as kubectl merges them, paths made absolute."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from springtide.backends.kubernetes.client.yaml_text import read_yaml
from springtide.core.errors import BackendError, InvalidRequest

HOME_KUBECONFIG = Path("~/.kube/config")
_LISTS = {"clusters": "cluster", "users": "user", "contexts": "context"}
_PATHS = ("certificate-authority", "client-certificate", "client-key", "tokenFile")


def named_kubeconfigs(kubeconfig: Path | str | None) -> list[Path]:
    """The files named by the argument, else by $KUBECONFIG; none if neither names any."""
    if kubeconfig:
        return [Path(kubeconfig).expanduser()]
    return [Path(part).expanduser() for part in os.environ.get("KUBECONFIG", "").split(os.pathsep) if part]


def read_kubeconfigs(paths: Sequence[Path]) -> dict[str, Any]:
    """Merge several files: of entries with one name, the first counts. Raises BackendError."""
    merged: dict[str, Any] = {"current-context": "", **{name: [] for name in _LISTS}}
    there = [path for path in paths if path.is_file()]
    if not there:
        named = ", ".join(str(path) for path in paths)
        raise BackendError(
            f"no way to a Kubernetes cluster is known: there is no kubeconfig at {named}; name one with KUBECONFIG, or "
            "run in a pod with a service account"
        )
    for path in there:
        config = _read(path)
        merged["current-context"] = merged["current-context"] or config.get("current-context") or ""
        for name, inner in _LISTS.items():
            known = {entry["name"] for entry in merged[name]}
            for entry in config.get(name) or ():
                if entry["name"] not in known:
                    merged[name].append({"name": entry["name"], inner: _absolute(entry.get(inner) or {}, path.parent)})
    return merged


def chosen_cluster(config: dict[str, Any], context: str) -> dict[str, Any]:
    """The cluster of a context, or of the current one. Raises BackendError if there is none of that name."""
    name = context or config["current-context"]
    contexts = {entry["name"]: entry["context"] for entry in config["contexts"]}
    if name not in contexts:
        known = ", ".join(sorted(contexts)) or "none at all"
        asked = f"no context {name!r}" if name else "no current context"
        raise BackendError(f"the kubeconfig has {asked}; it has {known}: choose one with `kubectl config use-context`")
    clusters = {entry["name"]: entry["cluster"] for entry in config["clusters"]}
    cluster = clusters.get(contexts[name].get("cluster"))
    if cluster is None:
        raise BackendError(f"context {name!r} of the kubeconfig names a cluster that it does not have")
    return dict(cluster)


def _read(path: Path) -> dict[str, Any]:
    try:
        documents = read_yaml(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError, InvalidRequest) as error:
        raise BackendError(f"the kubeconfig {path} cannot be read: {error}") from error
    config = documents[0] if documents else {}
    if not isinstance(config, dict) or not all(
        isinstance(entry, dict) and "name" in entry for name in _LISTS for entry in config.get(name) or ()
    ):
        raise BackendError(f"{path} is no kubeconfig")
    return config


def _absolute(entry: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The entry with absolute paths and without empty values."""
    kept = {name: value for name, value in entry.items() if value is not None and value != ""}
    return {name: str(folder / value) if name in _PATHS else value for name, value in kept.items()}
