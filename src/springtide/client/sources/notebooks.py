"""The source of what was defined in a notebook or an interactive session: its cell, with all that it uses."""

from __future__ import annotations

import ast
import builtins
import dis
import linecache
import math
import sys
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

from springtide.core.errors import InvalidRequest

# What the text is called that is made of cells.
NOTEBOOK_FILE = "notebook.py"
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None))
_MAX_CONSTANT_CHARS = 10_000
# What classes read of the module that they are in.
_OF_MODULES = ("__name__", "__annotations__")
# Magics of IPython that run the rest of a cell; its text is then known from its history alone.
_RUNNING_MAGICS = ("%%time", "%%capture", "%%prun")
_LOADS = frozenset({"LOAD_NAME", "LOAD_GLOBAL"})


def cell_text(target: Any) -> str:
    """A module's text that defines a function or class of a notebook as its cells do, with the names that it uses.

    These are modules and what comes from them, which are imported, functions and classes of the notebook, and constants
    (numbers, texts, tuples and lists of them). Raises InvalidRequest, naming them, for others, and for a definition
    whose text is not known.
    """
    written = _Written(target.__module__)
    written.add(target.__name__, target)
    if written.missing:
        names = ", ".join(repr(name) for name in written.missing)
        raise InvalidRequest(
            f"{target.__name__} uses {names} of the notebook, which cannot be sent: only modules, functions, classes "
            "and plain constants can; make it inside the function, or write the code into a .py file and import it"
        )
    return "\n".join([*written.imports, *written.constants, "", *written.definitions])


class _Written:
    """The parts of the text. `missing` are names whose values cannot be written."""

    def __init__(self, module: str) -> None:
        self.imports: list[str] = []
        self.constants: list[str] = []
        self.definitions: list[str] = []
        self.missing: list[str] = []
        self._module = module
        self._seen: set[str] = set()
        self._names: Mapping[str, Any] = vars(sys.modules.get(module, builtins))

    def add(self, name: str, value: Any) -> None:
        """Write what defines the name as the value, after all that this uses."""
        if name in self._seen:
            return
        self._seen.add(name)
        inner = getattr(value, "function", getattr(value, "cls", value))
        if isinstance(value, ModuleType):
            self.imports.append(f"import {value.__name__} as {name}")
        elif (origin := _origin(value)) and origin[0] != self._module:
            self.imports.append(f"from {origin[0]} import {origin[1]} as {name}")
        elif _is_constant(value):
            self.constants.append(f"{name} = {value!r}")
        elif isinstance(inner, FunctionType | type) and inner.__module__ == self._module and inner.__name__ == name:
            self._define(name, inner)
        else:
            self.missing.append(name)

    def _define(self, name: str, inner: Any) -> None:
        text, namespace = _definition(name, inner, self._names)
        self._names = namespace
        if text is None:
            self.missing.append(name)
            return
        for used in _used(compile(text, NOTEBOOK_FILE, "exec", dont_inherit=True)):
            if used in _OF_MODULES:
                continue
            if used in namespace:
                self.add(used, namespace[used])
            elif not hasattr(builtins, used):
                self.missing.append(used)
        self.definitions.append(text)


def _origin(value: Any) -> tuple[str, str] | None:
    """The module and the name from which a value can be imported, if there are any."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", getattr(value, "__name__", None))
    if not isinstance(module, str) or not isinstance(name, str) or "." in name or module == "__main__":
        return None
    return (module, name) if getattr(sys.modules.get(module), name, None) is value else None


def _is_constant(value: Any) -> bool:
    """Whether the value's repr is the value again, and short."""
    if isinstance(value, tuple | list) and type(value) in (tuple, list):
        return all(_is_constant(item) for item in value) and len(repr(value)) <= _MAX_CONSTANT_CHARS
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return type(value) in _CONSTANTS and len(repr(value)) <= _MAX_CONSTANT_CHARS


def _definition(name: str, inner: Any, names: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
    """The text that defines a function or class in its cell, None where that is not known; and the notebook's names.

    `names` are those of what uses it.
    """
    for function in _functions_of(inner):
        if text := _defining(name, "".join(linecache.getlines(function.__code__.co_filename))):
            return text, function.__globals__
    for cell in _cells():
        text = _defining(name, cell)
        # Of a class whose methods are made for it, as a dataclass has them, the newest cell with its name is its own.
        if text and (isinstance(inner, type) or _computing(inner.__code__) in _functions_in(text)):
            return text, inner.__globals__ if isinstance(inner, FunctionType) else names
    return None, {}


def _functions_in(text: str) -> list[tuple[Any, ...]]:
    code = compile(text, NOTEBOOK_FILE, "exec", dont_inherit=True)
    return [_computing(one) for one in code.co_consts if isinstance(one, CodeType)]


def _defining(name: str, cell: str) -> str | None:
    """The statement of a cell that defines the name; if there are two, the last one is what it is now."""
    try:
        statements = ast.parse(cell).body
    except SyntaxError:
        return None
    for statement in reversed(statements):
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and statement.name == name:
            first = min([statement.lineno, *(each.lineno for each in statement.decorator_list)])
            return "\n".join(cell.splitlines()[first - 1 : statement.end_lineno]) + "\n"
    return None


def _cells() -> Iterator[str]:
    """The texts of cells that were run, the newest first; of one below a magic that runs it, the rest."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is None:
        # What is no file has no time of change.
        interactive = [entry for entry in linecache.cache.values() if len(entry) > 1 and entry[1] is None]
        yield from ("".join(entry[2]) for entry in reversed(interactive))
        return
    for raw in reversed(shell.history_manager.input_hist_raw):
        lines = raw.lstrip().splitlines()
        while lines and lines[0].split(" ")[0] in _RUNNING_MAGICS:
            del lines[0]
        yield shell.transform_cell("\n".join(lines))


def _computing(code: CodeType) -> tuple[Any, ...]:
    """What a code computes, wherever it stands."""
    constants = [_computing(one) if isinstance(one, CodeType) else one for one in code.co_consts]
    return code.co_name, code.co_code, code.co_names, repr(constants)


def _functions_of(inner: Any) -> Iterator[FunctionType]:
    if isinstance(inner, FunctionType):
        yield inner
    else:
        yield from (value for value in vars(inner).values() if isinstance(value, FunctionType))


def _used(code: CodeType) -> Iterator[str]:
    """The names that code reads from its module, those of the functions in it too, but not what a class in it binds."""
    bound = {each.argval for each in dis.get_instructions(code) if each.opname == "STORE_NAME"}
    yield from dict.fromkeys(
        each.argval
        for each in dis.get_instructions(code)
        if each.opname in _LOADS and not (each.opname == "LOAD_NAME" and each.argval in bound)
    )
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _used(constant)
