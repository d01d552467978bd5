"""Patching a library's module when the program imports it, or before, where it was imported ahead of the program."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
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
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                self._patch(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


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
