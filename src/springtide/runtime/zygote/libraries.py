"""Importing libraries before a program does, and what that has looked at: it must be the same for a later program."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

_GPU_DEVICES = ("/dev/nvidia", "/dev/kfd")


def import_libraries(names: Sequence[tuple[str, str]]) -> None:
    """Import these: module, and the name in it or "". Raises what that raises."""
    for module, name in names:
        found = importlib.import_module(module)
        if name and not hasattr(found, name):
            importlib.import_module(f"{module}.{name}")


class ImportRecord:
    """What was looked for while it was open, as a context manager: packages, and variables of the environment."""

    def __init__(self) -> None:
        self.variables: set[str] = set()
        self._asked: set[str] = set()
        self._before = frozenset(sys.modules)

    @property
    def found(self) -> frozenset[str]:
        """The topmost packages that were imported meanwhile."""
        return frozenset(name.partition(".")[0] for name in sys.modules.keys() - self._before) - self._before

    @property
    def missing(self) -> frozenset[str]:
        """Those that were looked for in vain, or whose folder may be joined by another one of the same name."""
        joined = {name for name in self.found if getattr(sys.modules.get(name), "__file__", None) is None}
        return frozenset((self._asked - sys.modules.keys()) | joined)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """As a finder of `sys.meta_path` that finds nothing: note the package's name."""
        if "." not in name:
            self._asked.add(name)

    def __enter__(self) -> ImportRecord:
        environment, record = os.environ, self
        self._kind, self._encode = type(environment), environment.encodekey
        passing: deque[str] = deque()

        class Watched(self._kind):  # type: ignore[misc, name-defined]
            def __iter__(self) -> Iterator[str]:
                # Who goes through all of them, or copies them, looks for names of its own: see PREFIXES.
                passing.clear()
                for name in super().__iter__():
                    passing.append(name)
                    yield name

        def encode(name: str) -> str:
            if passing and passing[0] == name:
                passing.popleft()
            else:
                passing.clear()
                record.variables.add(name)
            return self._encode(name)

        environment.__class__ = Watched
        environment.encodekey = encode
        sys.meta_path.insert(0, self)
        return self

    def __exit__(self, *raised: object) -> None:
        os.environ.__class__ = self._kind
        os.environ.encodekey = self._encode
        sys.meta_path.remove(self)


def obstacle_to_forking() -> str:
    """Why workers must not be forked from this process: it has threads or children, or uses a GPU. "" if they may."""
    tasks = Path("/proc/self/task")
    num_tasks = max(len(list(tasks.iterdir())), threading.active_count())
    if num_tasks > 1:
        return f"it has {num_tasks} threads after the import, and a worker that is forked from it might hang"
    if any((task / "children").read_text().strip() for task in tasks.iterdir()):
        return "it has started another process in the import"
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except OSError:
            continue
        if target.startswith(_GPU_DEVICES):
            return f"the import has opened {target}, and a GPU that is in use is lost to a worker that is forked"
    return ""
