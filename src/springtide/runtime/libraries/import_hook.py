"""Patching a library's module when the program imports it, or before, where it was imported ahead of the program."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class ModulePatch(MetaPathFinder):
    """Has one module patched as soon as it is loaded. Put it first in `sys.meta_path`."""

    def __init__(self, module: str, patch: Callable[[Any], None]) -> None:
        """`patch` is called with the module, before the program that imports it goes on."""
        self._module = module
        self._patch = patch

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """The module's own spec, with a loader that patches what it has loaded; None for all other modules."""
        if name != self._module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = PatchingLoader(spec.loader, self._patch)
        return spec


class PatchingLoader(Loader):
    """Loads one module by the loader that finds it, which may load others too, and patches it then."""

    def __init__(self, loader: Loader, patch: Callable[[Any], None]) -> None:
        """`loader` is the module's own, which the module has again before it runs; `patch` as in `ModulePatch`."""
        self._loader = loader
        self._patch = patch

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """The module as its own loader creates it, or None for the usual one."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code, then the patch."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._patch(module)


def patch_module(module: str, patch: Callable[[Any], None]) -> None:
    """Have a module patched: now if this process has it already, else as soon as it is imported."""
    if module in sys.modules:
        patch(sys.modules[module])
    else:
        sys.meta_path.insert(0, ModulePatch(module, patch))


def around(before: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    """A method in the place of `before`: calls `method` with `before` bound to the object, the object, the rest."""

    @functools.wraps(before)
    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        return method(functools.partial(before, self), self, *arguments, **keywords)

    return call
