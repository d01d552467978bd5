"""Which library runs the loop of a script, or makes it elastic, as its text tells, without running it."""

from __future__ import annotations

import ast
import sys
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


# What a script may import without getting a group of processes by it.
_WITHOUT_GROUP = {
    "torch",
    "torchvision",
    "torchaudio",
    "numpy",
    "scipy",
    "pandas",
    "sklearn",
    "matplotlib",
    "PIL",
    "tqdm",
}
# Modules and variables by which a script finds others, or starts them.
_GROUP = {"distributed", "subprocess", "multiprocessing", "RANK", "LOCAL_RANK", "WORLD_SIZE"}


def trains_alone(text: str) -> bool:
    """Whether a script's text shows that it asks for no other processes: each of several would train by itself."""
    tree = _parsed(text)
    if tree is None:
        return False
    packages, words = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            words |= {word for alias in node.names for word in alias.name.split(".")}
            packages |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            words |= {*(node.module or "").split("."), *(alias.name for alias in node.names)}
            packages.add("." if node.level else (node.module or "").partition(".")[0])
        elif isinstance(node, ast.Attribute):
            words.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words.add(node.value)
    is_plain = "torch" in packages and packages <= _WITHOUT_GROUP | sys.stdlib_module_names
    return is_plain and not words & _GROUP


def library_of(*texts: str) -> Library:
    """The library whose Trainer, Fabric or Accelerator a script makes and uses.

    `texts` are the script's and those of the files that it imports. "springtide" if one of them calls
    `springtide.adopt`. Empty if there is none; a text that is not Python counts for nothing.
    """
    trees = [tree for text in texts if (tree := _parsed(text)) is not None]
    if any(_adopts(tree) for tree in trees):
        return "springtide"
    packages, used, called = set(), set(), set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Import):
            packages |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            packages.add((node.module or "").partition(".")[0])
            used |= {alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.Name | ast.Attribute):
            used.add(_name(node))
        elif isinstance(node, ast.Call):
            called.add(_name(node.func))
    has_trainer = any(name.endswith("Trainer") for name in used)
    for package, (library, method) in _PACKAGES.items():
        if has_trainer and package in packages and method in called:
            return library
    if packages & {"lightning", "lightning_fabric"} and used >= _FABRICATED:
        return "lightning"
    return "accelerate" if "accelerate" in packages and used >= _ACCELERATED else ""


def _parsed(text: str) -> ast.AST | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return None


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


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
