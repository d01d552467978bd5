"""Which library runs the loop of a script, or makes it elastic, as its text tells, without running it."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from types import MappingProxyType

from springtide.core.workload import Library

# What a program calls whose own loop goes through what Accelerate has prepared.
_ACCELERATED = {"Accelerator", "prepare", "backward"}
# The same for Fabric.
_FABRICATED = {"Fabric", "setup", "backward"}
# Packages whose Trainer runs a loop, and the method that starts it.
_PACKAGES: Mapping[str, tuple[Library, str]] = MappingProxyType(
    {
        "lightning": ("lightning", "fit"),
        "pytorch_lightning": ("lightning", "fit"),
        "transformers": ("transformers", "train"),
    }
)


def library_of(text: str) -> Library:
    """The library whose Trainer, Fabric or Accelerator the script makes and uses.

    "springtide" if it calls `springtide.adopt`. Empty if there is none, or if the text is not Python. What another
    file does is not seen.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return ""
    if _adopts(tree):
        return "springtide"
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
    if packages & {"lightning", "lightning_fabric"} and called >= _FABRICATED:
        return "lightning"
    return "accelerate" if "accelerate" in packages and called >= _ACCELERATED else ""


def _adopts(tree: ast.AST) -> bool:
    """Whether the script calls `springtide.adopt`, by whatever name it has imported it."""
    modules, functions = set(), set()
    called: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name for alias in node.names if alias.name == "springtide"}
        elif isinstance(node, ast.ImportFrom) and node.module == "springtide" and not node.level:
            functions |= {alias.asname or alias.name for alias in node.names if alias.name == "adopt"}
        elif isinstance(node, ast.Call):
            called.append(node.func)
    return any(
        (isinstance(name, ast.Name) and name.id in functions)
        or (
            isinstance(name, ast.Attribute)
            and name.attr == "adopt"
            and isinstance(name.value, ast.Name)
            and name.value.id in modules
        )
        for name in called
    )
