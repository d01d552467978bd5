"""Every dotted name that the program loads or starts by text exists: no other test sees a wrong one after a move."""

from __future__ import annotations

import ast
import importlib.util
import re
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOTTED = re.compile(r"springtide(?:_studies)?(?:\.[A-Za-z_]\w*)+(?::[A-Za-z_]\w*)?")
# Names in the same form that are not Python's: of objects in a cluster and in object stores, of entry point groups.
NOT_MODULES = re.compile(
    r"springtide\.dev\b|springtide\.(?:checks|policies|strategies|packers|benches|studies|traces|profiles|chaos)$"
)
# Where commands name modules to start: the tables of the program, its images and its charts.
DEPLOYED = sorted(
    path
    for path in [*(ROOT / "deploy").rglob("*"), ROOT / "Makefile", ROOT / "pyproject.toml"]
    if path.is_file() and path.suffix != ".lock"
)
SOURCES = sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "studies").glob("src/**/*.py")])


def names_in(path: Path) -> set[str]:
    """Whole string constants that are dotted names of the packages; names of loggers are none."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    loggers = {
        id(argument)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "getLogger"
        for argument in node.args
    }
    texts = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in loggers
    }
    return {text for text in texts if DOTTED.fullmatch(text) and not NOT_MODULES.match(text)}


def leads_somewhere(name: str) -> bool:
    module, _, attribute = name.partition(":")
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        try:
            spec = importlib.util.find_spec(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        if spec is None or spec.origin is None:
            continue
        rest = [*parts[length:], *([attribute] if attribute else [])]
        if not rest:
            return True
        # The source is read and not imported: some modules only load where a cloud's library or a GPU is.
        top = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
        defined = {getattr(node, "name", "") for node in top.body}
        for node in top.body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            defined |= {target.id for target in targets if isinstance(target, ast.Name)}
            if isinstance(node, ast.Import | ast.ImportFrom):
                defined |= {alias.asname or alias.name for alias in node.names}
        return rest[0] in defined
    return False


@pytest.mark.slow
def test_dotted_names_in_the_source_lead_somewhere() -> None:
    lost = {(path.relative_to(ROOT), name) for path in SOURCES for name in names_in(path) if not leads_somewhere(name)}
    assert not lost, lost


def test_modules_named_in_images_charts_and_targets_exist() -> None:
    lost = set()
    for path in DEPLOYED:
        text = path.read_text(encoding="utf-8", errors="replace")
        started = re.findall(r"-m[\"', ]+(springtide[\w.]*)", text)
        started += re.findall(r"springtide\.(?:runtime|service|backends|testing)(?:\.\w+)+", text)
        lost |= {(path.relative_to(ROOT), name) for name in started if not leads_somewhere(name)}
    assert not lost, lost


def test_what_scripts_beside_the_packages_import_exists() -> None:
    """Nothing else runs all of them: some take an hour, or a GPU."""
    lost = {
        (path.name, f"{node.module}.{alias.name}")
        for path in [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "examples").rglob("*.py")]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0].startswith("springtide")
        for alias in node.names
        if not leads_somewhere(f"{node.module}.{alias.name}")
    }
    assert not lost, lost


OFFERED = tomllib.loads((ROOT / "studies" / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]


@pytest.mark.parametrize("group", OFFERED)
def test_what_the_studies_offer_is_there_and_installed(group: str) -> None:
    lost = sorted(target for target in OFFERED[group].values() if not leads_somewhere(target))
    assert not lost, lost
    installed = {
        point.name: point.value for point in distribution("springtide-studies").entry_points if point.group == group
    }
    assert installed == OFFERED[group], "install again: .venv/bin/python -m pip install --no-deps -e ./studies"
