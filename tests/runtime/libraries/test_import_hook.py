"""Modules of libraries are patched once, whether they are imported before or after that is asked for."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from springtide.runtime.libraries.import_hook import patch_module


@pytest.mark.parametrize("is_imported_first", [True, False])
def test_a_module_is_patched_before_the_program_sees_it(tmp_path, monkeypatch, is_imported_first):
    (tmp_path / "patched_of_test.py").write_text("value = 1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    patched = []
    if is_imported_first:
        importlib.import_module("patched_of_test")
    patch_module("patched_of_test", lambda module: patched.append(module.value))
    importlib.import_module("patched_of_test")
    assert patched == [1]
    del sys.modules["patched_of_test"]


class LoaderOfMany(SourceFileLoader):
    """One loader for every module of a folder, as pytest's rewriting of assertions is one for all it rewrites."""

    def __init__(self, folder: Path) -> None:
        super().__init__("", "")
        self._folder = folder

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        file = self._folder / f"{name}.py"
        return spec_from_file_location(name, file, loader=self) if file.exists() else None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(Path(module.__file__).read_text(), module.__file__, "exec"), vars(module))


def test_a_loader_that_loads_other_modules_too_patches_only_the_one(tmp_path, monkeypatch):
    for name in ("patched_of_many", "other_of_many"):
        (tmp_path / f"{name}.py").write_text(f"value = {name!r}")
    loader = LoaderOfMany(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [loader, *sys.meta_path])
    patched = []
    patch_module("patched_of_many", lambda module: patched.append(module.value))
    modules = [importlib.import_module(name) for name in ("patched_of_many", "other_of_many")]
    assert patched == ["patched_of_many"]
    assert [(module.__loader__, module.__spec__.loader) for module in modules] == [(loader, loader)] * 2
    for module in modules:
        del sys.modules[module.__name__]
