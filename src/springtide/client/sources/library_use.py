"""Which library runs the loop of a script, as its text tells, without running it."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from types import MappingProxyType

from springtide.core.workload import Library

# What a program calls whose own loop goes through what Accelerate has prepared.
_ACCELERATED = {"Accelerator", "prepare", "backward"}
# Packages whose Trainer runs a loop, and the method that starts it.
_PACKAGES: Mapping[str, tuple[Library, str]] = MappingProxyType(
    {
        "lightning": ("lightning", "fit"),
        "pytorch_lightning": ("lightning", "fit"),
        "transformers": ("transformers", "train"),
    }
)


def library_of(text: str) -> Library:
    """The library whose Trainer or Accelerator the script makes and uses; empty if there is none, or it is not Python.

    What another file makes is not seen.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return ""
    packages, called = set(), set()
    makes_trainer = False
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            packages |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            packages.add((node.module or "").partition(".")[0])
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            makes_trainer = makes_trainer or name.endswith("Trainer")
            called.add(name)
    for package, (library, method) in _PACKAGES.items():
        if makes_trainer and package in packages and method in called:
            return library
    return "accelerate" if "accelerate" in packages and called >= _ACCELERATED else ""
