"""An operator's overlay on a pod's spec: mappings merge, lists merge by their members' names."""

from __future__ import annotations

from typing import Any

# What the members of a list are told apart by, as the API server does it; lists not named here go by `name`.
_KEYS = {"volumeMounts": "mountPath", "ports": "containerPort", "tolerations": "key", "hostAliases": "ip"}


def merge(base: Any, over: Any, field: str = "") -> Any:
    """Return `base` with `over` laid on top. None takes away what was there; neither argument is changed."""
    if isinstance(base, dict) and isinstance(over, dict):
        merged = dict(base)
        for name, value in over.items():
            if value is None:
                merged.pop(name, None)
            else:
                merged[name] = merge(merged[name], value, name) if name in merged else value
        return merged
    if isinstance(base, list) and isinstance(over, list):
        return _merge_lists(base, over, _KEYS.get(field, "name"))
    return over


def _merge_lists(base: list[Any], over: list[Any], key: str) -> list[Any]:
    if not all(isinstance(member, dict) and key in member for member in [*base, *over]):
        # Members that bear no name, such as a command's words, stand for the whole.
        return over
    merged = {member[key]: member for member in base}
    for member in over:
        merged[member[key]] = merge(merged[member[key]], member) if member[key] in merged else member
    return list(merged.values())
