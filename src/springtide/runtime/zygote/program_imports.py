"""Which libraries a program imports, and whether they may be imported before it: by its syntax, without running it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from springtide.core.workload import Entrypoint
from springtide.storage.folders.tree import import_roots

# What is imported ahead: libraries of which tests show that workers forked afterwards train as before.
LIBRARIES: Final = frozenset({"accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "transformers"})
# Packages that change neither the environment nor other packages when a program imports them before its library.
_QUIET = frozenset(
    {
        "click",
        "cv2",
        "datasets",
        "einops",
        "evaluate",
        "huggingface_hub",
        "hydra",
        "jsonargparse",
        "matplotlib",
        "mlflow",
        "nltk",
        "numpy",
        "omegaconf",
        "packaging",
        "pandas",
        "peft",
        "PIL",
        "pydantic",
        "regex",
        "requests",
        "rich",
        "safetensors",
        "scipy",
        "seaborn",
        "sentencepiece",
        "sklearn",
        "springtide",
        "tensorboard",
        "timm",
        "tokenizers",
        "torch",
        "torchaudio",
        "torchmetrics",
        "torchvision",
        "tqdm",
        "trl",
        "typing_extensions",
        "wandb",
        "yaml",
    }
)
# What an Accelerator imports itself as soon as it prepares a model.
_OF_ACCELERATOR = ("torch._dynamo", "")
_MAX_FILES = 64
_MAX_CHARS = 512_000
# Of the folders that a program imports from. More are not looked through.
_MAX_ENTRIES = 2_000
# What tells a library when it is imported where it is and what it is to do.
_ENVIRONMENTS = frozenset({"environ", "environb"})
_READERS = frozenset({"get", "copy", "items", "keys", "values"})
_PATHS = frozenset({"sys.path", "sys.modules", "sys.meta_path", "sys.path_hooks"})
_CHANGES = frozenset({"putenv", "unsetenv", "load_dotenv", "addsitedir"})


class ProgramImports(msgspec.Struct, frozen=True, kw_only=True):
    """What is imported ahead of a program of LIBRARIES: module, and the name in it or "". Empty: nothing.

    `modules` are the modules in the folders that it imports from before the installed packages, `folders` the other
    folders there, which are modules only where no installed one has the name.
    """

    names: tuple[tuple[str, str], ...] = ()
    modules: frozenset[str] = frozenset()
    folders: frozenset[str] = frozenset()


def imports_of(entrypoint: Entrypoint, working_directory: str) -> ProgramImports:
    """What may be imported ahead of a program, by its file and those of its own that it imports.

    Nothing where a library could notice: the program changes its environment or where modules are found, has a file of
    a library's name, or imports a package that might do so. It imports from `working_directory`, where its process
    began, too.
    """
    roots = _roots(entrypoint, working_directory)
    try:
        modules, folders = _listed(roots)
        names: set[tuple[str, str]] = set()
        for tree in _trees(Path(entrypoint.source_path), roots):
            imported = set(_imported(tree))
            packages = {_top(module) for module, _ in imported} - modules - folders
            if packages - LIBRARIES - _QUIET - sys.stdlib_module_names or _is_changing(tree):
                return ProgramImports()
            names |= {name for name in imported if _top(name[0]) in LIBRARIES}
    except Exception:
        # It starts as any other, and says itself what is wrong with it.
        return ProgramImports()
    if any(_top(module) in modules for module, _ in names):
        return ProgramImports()
    if ("accelerate", "Accelerator") in names:
        names.add(_OF_ACCELERATOR)
    return ProgramImports(names=tuple(sorted(names)), modules=frozenset(modules), folders=frozenset(folders))


def _top(module: str) -> str:
    return module.partition(".")[0]


def _roots(entrypoint: Entrypoint, working_directory: str) -> list[Path]:
    file = Path(entrypoint.source_path)
    if entrypoint.folder is not None:
        return import_roots(file, file.parents[entrypoint.folder.path.count("/")])
    others = [Path(each) for each in (entrypoint.import_root, working_directory) if each]
    return [root for root in dict.fromkeys([file.parent, *others]) if root.is_dir()]


def _listed(roots: list[Path]) -> tuple[set[str], set[str]]:
    """The modules in these folders, and the folders that are none. Raises OSError, and ValueError for too many."""
    modules, folders = set[str](), set[str]()
    entries = [entry for root in roots for entry in root.iterdir()]
    if len(entries) > _MAX_ENTRIES:
        raise ValueError("the program's folders have too many files to look through")
    for entry in entries:
        name, _, suffix = entry.name.partition(".")
        if suffix.endswith("-info"):
            # By its metadata a library is told to be installed, or of which version it is.
            modules.add(name.partition("-")[0].lower())
        elif suffix.endswith(("py", "pyc", "so")):
            modules.add(name)
        elif entry.is_dir():
            is_package = any((entry / f"__init__.{end}").exists() for end in ("py", "pyc"))
            (modules if is_package else folders).add(name)
    return modules, folders


def _trees(file: Path, roots: list[Path]) -> Iterator[ast.AST]:
    """The trees of a file and of those in `roots` that it imports, directly or indirectly.

    Raises ValueError if these are too many, and what reading and parsing them raises.
    """
    waiting, seen, num_chars = [file], {file}, 0
    while waiting:
        path = waiting.pop()
        text = path.read_text(encoding="utf-8")
        num_chars += len(text)
        if len(seen) > _MAX_FILES or num_chars > _MAX_CHARS:
            raise ValueError(f"{file} imports too much to look through")
        tree = ast.parse(text)
        yield tree
        found = {each for node in ast.walk(tree) for each in _local_files(node, path, roots)}
        waiting += sorted(found - seen)
        seen |= found


def _imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """The modules that are imported by their full names, each with the name that is taken from it or ""."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.module, "" if alias.name == "*" else alias.name) for alias in node.names)


def _local_files(node: ast.AST, path: Path, roots: list[Path]) -> Iterator[Path]:
    """The files in `roots` that one import in the file `path` reads."""
    if isinstance(node, ast.Import):
        wanted = [alias.name.split(".") for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        wanted = [[*(node.module or "").split("."), alias.name] for alias in node.names]
        if node.level:
            roots = [path.parents[node.level - 1]]
    else:
        return
    for parts in wanted:
        for root in roots:
            place = root
            for part in filter(None, parts):
                place = place / part
                yield from (each for each in (place / "__init__.py", place.with_suffix(".py")) if each.is_file())


def _is_changing(tree: ast.AST) -> bool:
    """Whether a file may change the environment or where modules are found; reading the environment is none of it."""
    read: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript):
            read |= {id(node.value)} if isinstance(node.ctx, ast.Load) else set()
        elif isinstance(node, ast.Attribute):
            read |= {id(node.value)} if node.attr in _READERS else set()
        elif isinstance(node, ast.Compare):
            read |= {id(each) for each in node.comparators}
        elif isinstance(node, ast.Dict):
            read |= {id(value) for key, value in zip(node.keys, node.values, strict=True) if key is None}
    return any(_changes(node, id(node) in read) for node in ast.walk(tree))


def _changes(node: ast.AST, is_read: bool) -> bool:
    if isinstance(node, ast.ImportFrom):
        renamed = {alias.name for alias in node.names if alias.asname}
        return bool(_PATHS & {f"{node.module}.{alias.name}" for alias in node.names} or _ENVIRONMENTS & renamed)
    if (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and f"{node.value.id}.{node.attr}" in _PATHS
    ):
        return True
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name in _CHANGES or (name in _ENVIRONMENTS and not is_read)
