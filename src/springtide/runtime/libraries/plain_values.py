"""What a program keeps beside weights and optimizers: plain values in variables and objects of its own, and states.

A value is named by its path from a root: "best", "meter/total", "seen/0/score". Objects of the program's own classes,
dicts with string keys and short lists are looked into; an object that has a `state_dict` is taken by that, a list or a
dict of tensors as a whole.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import sys
import sysconfig
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

import springtide

# Larger values stay where they are.
_MAX_ITEMS = 10_000
_MAX_PARTS = 1_000
_MAX_DEPTH = 4
_PLAIN = (bool, int, float, str, type(None))
_NOT_OF_USERS = tuple(
    str(Path(folder))
    for folder in {
        str(Path(springtide.__file__).parent),
        # The packages of the platform, which an environment of a job's own lies upon.
        str(Path(torch.__file__).parents[1]),
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    }
)
# What moves in other ways.
_MOVED = (torch.optim.Optimizer, LRScheduler, DataLoader)
NONE = object()


def is_of_program(path: str) -> bool:
    """Whether the file at `path` is the program's own, and none of a package."""
    return not path.startswith((*_NOT_OF_USERS, "<"))


@dataclass(frozen=True)
class Values:
    """Copies of the plain values, and the objects with a state and larger tensors themselves, each by its path."""

    plain: Mapping[str, Any]
    stateful: Mapping[str, Any]


def values_in(roots: Mapping[str, Any], known: Collection[int] = ()) -> Values:
    """All values below the roots. Of objects whose id is `known` the states move in another way."""
    plain: dict[str, Any] = {}
    stateful: dict[str, Any] = {}
    seen: set[int] = set()

    def look(path: str, value: Any, depth: int, is_known: bool) -> None:
        copied = copied_value(value)
        if copied is not NONE:
            plain[path] = copied
            return
        if id(value) in seen or depth > _MAX_DEPTH or issubclass(type(value), _MOVED):
            return
        seen.add(id(value))
        is_known = is_known or id(value) in known
        if not is_known and _has_state(value):
            # What a variable itself holds of larger tensors is of the present batch.
            if depth or not _is_of_tensors(value):
                stateful[path] = value
            return
        for name, part, is_part in _parts(value):
            look(f"{path}/{name}", part, depth + 1, is_known and is_part)

    for name, value in list(roots.items()):
        if not name.startswith("__"):
            look(name, value, 0, False)
    return Values(plain, stateful)


def set_value(roots: Mapping[str, Any], path: str, value: Any) -> bool:
    """Set the value at a path of several names, in place where it is a list or dict; False if there is none."""
    *names, last = path.split("/")
    holder: Any = roots
    try:
        for name in names:
            holder = _part(holder, name)
        present = _part(holder, last)
    except (KeyError, IndexError, AttributeError, ValueError):
        return False
    merged = merged_value(present, value)
    if isinstance(holder, Mapping) or type(holder) is list:
        holder[int(last) if type(holder) is list else last] = merged  # type: ignore[index]
    elif type(holder) is not tuple:
        vars(holder)[last] = merged
    return True


def object_at(roots: Mapping[str, Any], path: str) -> Any:
    """The object at a path; None if there is none."""
    found: Any = roots
    with contextlib.suppress(KeyError, IndexError, AttributeError, ValueError):
        for name in path.split("/"):
            found = _part(found, name)
        return found
    return None


def _is_of_tensors(thing: Any) -> bool:
    """Whether it is a tensor, or a list or dict of nothing else, that autograd does not look at."""
    if type(thing) is torch.Tensor:
        return not thing.requires_grad
    if type(thing) not in (dict, list) or not 0 < len(thing) <= _MAX_PARTS:
        return False
    parts = thing.values() if type(thing) is dict else thing
    is_named = type(thing) is list or all(type(key) is str for key in thing)
    return is_named and all(type(part) is torch.Tensor and not part.requires_grad for part in parts)


def _has_state(thing: Any) -> bool:
    kind = type(thing)
    return _is_of_tensors(thing) or (hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict"))


def _state_of(thing: Any) -> Any:
    """What `_has_state` has found, with its tensors themselves; None if the object does not say its state."""
    if _is_of_tensors(thing):
        return thing if type(thing) is torch.Tensor else thing.copy()
    with contextlib.suppress(Exception):
        return dict(thing.state_dict())
    return None


def _part(holder: Any, name: str) -> Any:
    if isinstance(holder, Mapping):
        return holder[name]
    return holder[int(name)] if type(holder) in (list, tuple) else getattr(holder, name)


def _parts(holder: Any) -> Iterator[tuple[str, Any, bool]]:
    """What an object consists of: name, value, and whether the state of the whole has that of the part in it."""
    kind = type(holder)
    if kind in (dict, list, tuple):
        items = holder.items() if kind is dict else ((str(index), part) for index, part in enumerate(holder))
        if len(holder) <= _MAX_PARTS:
            yield from ((key, part, False) for key, part in list(items) if type(key) is str and "/" not in key)
        return
    if _is_own(kind) and hasattr(holder, "__dict__"):
        # What begins with an underscore may be of a library's class that it is made of.
        is_all = all(_is_own(base) for base in kind.__mro__[:-1])
        for name, part in list(vars(holder).items()):
            if (is_all or not name.startswith("_")) and not (name == "training" and isinstance(part, bool)):
                yield name, part, False
    if issubclass(kind, torch.nn.Module):
        yield from ((name, part, True) for name, part in list(holder._modules.items()))


def _is_own(kind: type) -> bool:
    """Whether it is a class of the program's, or one that holds nothing but names of the program's."""
    path = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return kind in (SimpleNamespace, argparse.Namespace) or (path is not None and is_of_program(path))


def copied_value(value: Any) -> Any:
    """A copy of a plain value; `NONE` for what is not plain or too large."""
    return _copied(value, [_MAX_ITEMS])


def _copied(value: Any, room: list[int]) -> Any:
    room[0] -= 1
    if type(value) in _PLAIN:
        return value
    if type(value) is torch.Tensor and value.numel() == 1:
        return value.detach().clone()
    if type(value) not in (list, tuple, dict) or len(value) > room[0]:
        return NONE
    items = []
    for item in value.values() if isinstance(value, dict) else value:
        copied = _copied(item, room)
        if copied is NONE:
            return NONE
        items.append(copied)
    if not isinstance(value, dict):
        return type(value)(items)
    return dict(zip(value, items, strict=True)) if all(type(key) in _PLAIN for key in value) else NONE


def merged_value(present: Any, value: Any) -> Any:
    """A copy of `value` to stand for `present`: that itself where it is a list or dict, since others may hold it."""
    copied = copied_value(value)
    if isinstance(copied, torch.Tensor) and isinstance(present, torch.Tensor):
        return copied.to(present.device)
    if isinstance(copied, list) and type(present) is list:
        present[:] = copied
        return present
    if isinstance(copied, dict) and type(present) is dict:
        present.clear()
        present.update(copied)
        return present
    return copied


def is_same(value: Any, other: Any) -> bool:
    """Whether two plain values are equal, and of the same types."""
    if isinstance(value, torch.Tensor) or isinstance(other, torch.Tensor):
        return (
            isinstance(value, torch.Tensor)
            and isinstance(other, torch.Tensor)
            and value.shape == other.shape
            and torch.equal(value, other)
        )
    if type(value) is not type(other):
        return False
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(is_same(item, other[key]) for key, item in value.items())
    if isinstance(value, list | tuple):
        return len(value) == len(other) and all(map(is_same, value, other))
    return bool(value == other)


class ChangedValues:
    """The values below some roots, as far as they have changed since this was made."""

    def __init__(self, roots: Mapping[str, Any], known: Collection[int] = ()) -> None:
        self._known = frozenset(known)
        before = values_in(roots, self._known)
        self._plain = before.plain
        self._states = {path: _fingerprint(_state_of(thing)) for path, thing in before.stateful.items()}

    def read(self, roots: Mapping[str, Any]) -> dict[str, Any]:
        """What has changed: copies of plain values, and of states the tensors themselves."""
        now = values_in(roots, self._known)
        states: dict[str, Any] = {}
        tensors: dict[str, Any] = {}
        for path, thing in now.stateful.items():
            # A tensor that came later is of the present batch, too.
            state = None if type(thing) is torch.Tensor and path not in self._states else _state_of(thing)
            if state is not None and _fingerprint(state) != self._states.get(path):
                (tensors if _is_of_tensors(thing) else states)[path] = state
        return {"values": self._changed(now), "states": states, "tensors": tensors}

    def _changed(self, now: Values) -> dict[str, Any]:
        return {path: value for path, value in now.plain.items() if not is_same(value, self._plain.get(path, NONE))}

    def write(self, roots: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        """Set what `read` has found; what has changed here only goes back to what it was."""
        again = {
            path: self._plain[path] for path in self._changed(values_in(roots, self._known)) if path in self._plain
        }
        for path, value in {**again, **found["values"]}.items():
            if "/" in path:
                set_value(roots, path, value)
            else:
                roots[path] = merged_value(roots.get(path), value)  # type: ignore[index]
        for path, state in [*found["states"].items(), *found["tensors"].items()]:
            thing = object_at(roots, path)
            try:
                if path in found["tensors"]:
                    _take_tensors(roots, path, thing, state)
                else:
                    thing.load_state_dict(copy.deepcopy(state))
            except Exception as error:
                sys.stderr.write(
                    f"springtide: what {path.replace('/', '.')} has gathered did not move to this worker, which goes "
                    f"on without it: {type(error).__name__}: {error}\n"
                )


def _take_tensors(roots: Mapping[str, Any], path: str, thing: Any, state: Any) -> None:
    """Set a tensor, or a list or dict of tensors, to what it is elsewhere; in place where it can be."""
    if type(state) is torch.Tensor:
        thing.copy_(state)
    elif type(thing) is type(state) and _names(thing) == _names(state):
        for name in _names(state):
            thing[name].copy_(state[name])
    elif type(thing) is dict:
        thing.clear()
        thing.update(copy.deepcopy(state))
    elif type(thing) is list:
        thing[:] = copy.deepcopy(state)
    else:
        above, _, last = path.rpartition("/")
        vars(object_at(roots, above))[last] = copy.deepcopy(state)


def _names(tensors: Any) -> list[Any]:
    return list(tensors) if type(tensors) is dict else list(range(len(tensors)))


def _fingerprint(state: Any) -> Any:
    """What differs once a state has changed; tensors are not looked at."""
    if isinstance(state, torch.Tensor):
        return (state.data_ptr(), state._version)
    if isinstance(state, Mapping):
        return {key: _fingerprint(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [_fingerprint(value) for value in state]
    return state if type(state) in _PLAIN else id(state)
