"""An operator's overlay on a pod's spec: mappings merge, lists merge by their members' names."""

from __future__ import annotations

from typing import Any

# The key of the members of a list, as in the API server; lists not named here use `name`.
_KEYS = {"volumeMounts": "mountPath", "ports": "containerPort", "tolerations": "key", "hostAliases": "ip"}


def merge(base: Any, over: Any, field: str = "") -> Any:
    """Return `base` with `over` merged into it. None removes a value; neither argument is changed."""
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
        # Lists whose members have no key, such as a command's words, are replaced as a whole.
        return over
    merged = {member[key]: member for member in base}
    for member in over:
        merged[member[key]] = merge(merged[member[key]], member) if member[key] in merged else member
    return list(merged.values())
