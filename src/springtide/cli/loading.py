"""Loading the user's file: finding what it declares, without running its main program."""

from __future__ import annotations

import ast
import importlib.util
import os
import shlex
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from springtide.client.folders.choice import package_root
from springtide.client.functions import ServeFunction, Task, TrainFunction
from springtide.client.sources.source import IMPORTING_VARIABLE
from springtide.core.errors import InvalidRequest

# What a plain script uses of springtide: it declares nothing.
_OF_SCRIPTS = frozenset({"adopt", "report"})


def split_target(target: str) -> tuple[Path, str]:
    """`FILE[:object]` as a path and a name. Raises InvalidRequest if there is no such file."""
    name = ""
    path = Path(target)
    if not path.is_file():
        head, separator, tail = target.rpartition(":")
        if separator and head:
            path, name = Path(head), tail
    if not path.is_file():
        raise InvalidRequest(f"there is no file {str(path)!r}; give the path of a Python file, for example train.py")
    if path.suffix != ".py":
        raise InvalidRequest(f"{path.name} is not a Python file (.py)")
    return path.resolve(), name


def as_typed(path: Path) -> str:
    """The path relative to the working directory if possible, quoted for a shell."""
    here = Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))


def uses_springtide(path: Path) -> bool:
    """Whether the file imports springtide, for more than what scripts use of it.

    Any other file is a plain script, which importing would run.
    """
    try:
        tree = ast.parse(path.read_bytes(), filename=path.name)
    except (SyntaxError, ValueError) as error:
        line = f" in line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise InvalidRequest(f"{path.name} is not valid Python{line}: {getattr(error, 'msg', error)}") from None
    bound: set[str] = set()
    used: set[str] = set()
    reporting: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "springtide":
                    bound.add(alias.asname or alias.name)
                elif alias.name.startswith("springtide."):
                    return True
        elif isinstance(node, ast.ImportFrom) and not node.level:
            package, _, module = (node.module or "").partition(".")
            if package == "springtide" and (module or any(alias.name not in _OF_SCRIPTS for alias in node.names)):
                return True
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            (reporting if node.attr in _OF_SCRIPTS else used).add(node.value.id)
    return bool(bound & used) or bool(bound - reporting)


def declares(path: Path, name: str) -> bool:
    """Whether the text of the file, which is valid Python, has a decorated function or an assignment of this name."""
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.FunctionDef) and node.name == name and node.decorator_list:
            return True
        if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == name for target in node.targets):
            return True
    return False


@contextmanager
def _importing(path: Path, roots: Iterable[Path]) -> Iterator[None]:
    """Put the file's folder first on the import path, as when it is run, and make `submit()` raise meanwhile."""
    added = [str(each) for each in dict.fromkeys((path.parent, *roots))]
    sys.path[:0] = added
    os.environ[IMPORTING_VARIABLE] = "1"
    try:
        yield
    finally:
        del os.environ[IMPORTING_VARIABLE]
        for each in added:
            sys.path.remove(each)


def import_file(path: Path, roots: Iterable[Path] = ()) -> ModuleType:
    """Import the user's file; `roots` are where else it imports from than its folder.

    Raises InvalidRequest, which names the line, for whatever the file raises.
    """
    name = f"springtide_user_{path.stem}"
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    try:
        with _importing(path, roots):
            specification.loader.exec_module(module)
    except InvalidRequest as error:
        raise InvalidRequest(f"{path.name}{_line_of(error, path)}: {error}") from None
    except ModuleNotFoundError as error:
        raise InvalidRequest(
            f"{path.name}{_line_of(error, path)} needs the module {error.name!r}, which is not installed here; "
            f"install it (pip install {(error.name or '').split('.')[0]}), or import it in the function or class: the "
            "file is imported here only to see what it declares"
        ) from None
    except (Exception, SystemExit) as error:
        # User code: any exception is reported as the file's error, not as a bug of the command.
        if isinstance(error, ImportError) and _imports_relatively(path):
            package = ".".join(path.parent.relative_to(package_root(path.parent)).parts) or "PACKAGE"
            raise InvalidRequest(
                f"{path.name}{_line_of(error, path)} imports relatively, and a file that is run, as by `python "
                f"{path.name}`, is in no package; write `from {package} import ...` there"
            ) from None
        if os.environ.get("SPRINGTIDE_DEBUG"):
            raise
        raise InvalidRequest(
            f"{path.name}{_line_of(error, path)} cannot be imported: {type(error).__name__}: {error}"
        ) from None
    return module


def _imports_relatively(path: Path) -> bool:
    tree = ast.parse(path.read_bytes())
    return any(isinstance(node, ast.ImportFrom) and node.level > 0 for node in tree.body)


def _line_of(error: BaseException, path: Path) -> str:
    traceback, line = error.__traceback__, None
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == str(path):
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return "" if line is None else f" line {line}"


def find_training(module: ModuleType, path: Path, name: str) -> TrainFunction | Task | None:
    """The training function or task of the file; None if it declares none. Raises InvalidRequest to choose."""
    found = _declared(module, (TrainFunction, Task))
    chosen = _choose(found, path, name, "training function", "springtide run")
    if chosen is None and (served := _declared(module, (ServeFunction,))):
        raise InvalidRequest(
            f"{path.name} declares a service ({next(iter(served))}) and nothing to train; "
            f"`springtide deploy {as_typed(path)}` serves it"
        )
    assert chosen is None or isinstance(chosen, TrainFunction | Task)
    return chosen


def find_service(module: ModuleType, path: Path, name: str) -> ServeFunction[Any]:
    """The inference class of the file. Raises InvalidRequest if there is none, or several to choose from."""
    chosen = _choose(_declared(module, (ServeFunction,)), path, name, "service", "springtide deploy")
    if chosen is None:
        raise InvalidRequest(f"{path.name} declares no service; put @st.serve on a class with a method `predict`")
    assert isinstance(chosen, ServeFunction)
    return chosen


def _declared(module: ModuleType, kinds: tuple[type, ...]) -> dict[str, object]:
    """The objects of these kinds that the file itself declares, by name, without those that it imports."""
    found: dict[str, object] = {}
    for name, value in vars(module).items():
        is_own = isinstance(value, Task) or getattr(value, "__module__", None) == module.__name__
        if isinstance(value, kinds) and is_own and all(value is not other for other in found.values()):
            found[name] = value
    return found


def _choose(found: dict[str, object], path: Path, name: str, what: str, verb: str) -> object | None:
    if name:
        if name not in found:
            known = f"it has {', '.join(found)}" if found else f"it declares no {what}"
            raise InvalidRequest(f"{path.name} has no {what} {name!r}; {known}")
        return found[name]
    if len(found) > 1:
        choices = " or ".join(f"`{verb} {as_typed(path)}:{choice}`" for choice in found)
        raise InvalidRequest(f"{path.name} has several to choose from: {choices}")
    return next(iter(found.values()), None)
