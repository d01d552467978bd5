"""Modules of libraries are patched once, whether they are imported before or after that is asked for."""

from __future__ import annotations

import importlib
import sys

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
