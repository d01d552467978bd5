"""What is defined in a notebook is sent as its cells have it, or refused with the names that cannot be."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from springtide.client.functions import TrainFunction
from springtide.client.sources.notebooks import cell_text
from springtide.client.sources.source import source_of
from springtide.core.errors import InvalidRequest

Cell = Callable[[str], dict[str, Any]]
FIRST = """
import math
import os.path as paths
from collections import OrderedDict, deque as queue
import springtide as st

WIDTH = 3
RATES = [0.1, (2, None, "x")]
values = object()
data = {"a": 1}

class Net:
    width = WIDTH
    half = width // 2
    def forward(self, x):
        return math.floor(x) * self.width

def helper(data):
    return queue(data), paths.join("a", str(data))
"""
SECOND = """
@st.train(epochs=WIDTH, params={"rate": RATES[0]})
def fit(ctx, table=OrderedDict()):
    values = ctx
    return helper([values.data]), Net().forward(2.5), len(RATES)
"""


@pytest.fixture
def cell() -> Iterator[Cell]:
    """Runs a cell as a notebook does: its lines are known under a name that is no file."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    names: list[str] = []

    def run(text: str) -> dict[str, Any]:
        names.append(f"<cell {len(names)}>")
        linecache.cache[names[-1]] = (len(text), None, text.splitlines(keepends=True), names[-1])
        exec(compile(text, names[-1], "exec", dont_inherit=True), namespace)
        return namespace

    yield run
    for name in names:
        linecache.cache.pop(name, None)


def test_a_cell_travels_with_what_it_uses_and_nothing_else(cell: Cell, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    cell(FIRST)
    fit = cell(SECOND)["fit"]
    source = fit.source()
    assert (source.filename, source.object_name, source.import_root) == ("notebook.py", "fit", str(tmp_path))
    assert "values = object" not in source.text
    assert "data = {" not in source.text
    loaded: dict[str, Any] = {"__name__": "notebook"}
    exec(compile(source.text, "notebook.py", "exec", dont_inherit=True), loaded)
    assert isinstance(loaded["fit"], TrainFunction)
    assert loaded["fit"].options.values["epochs"] == 3
    found = loaded["fit"](type("Context", (), {"data": "b"})())
    assert (list(found[0][0]), found[1], found[2]) == (["b"], 6, 2)


def test_the_newest_definition_counts(cell: Cell) -> None:
    cell("def helper():\n    return 1\n")
    cell("def fit():\n    return helper()\n")
    namespace = cell("def helper():\n    return 2\n")
    assert "return 2" in cell_text(namespace["fit"])
    assert "return 1" not in cell_text(namespace["fit"])


def test_names_that_cannot_be_sent_are_named(cell: Cell) -> None:
    cell("import threading\nlock = threading.Lock()\ntable = {'a': 1}\nalias = print\n")
    namespace = cell("def fit():\n    def inner():\n        return table, nowhere\n    return lock, inner, alias\n")
    with pytest.raises(InvalidRequest, match="uses 'lock', 'table', 'nowhere' of the notebook, which cannot be sent"):
        cell_text(namespace["fit"])


@pytest.mark.parametrize("value", ["float('nan')", "'x' * 20_000", "[[1], {}]", "type('X', (int,), {})(3)"])
def test_constants_that_are_not_plain_are_none(cell: Cell, value: str) -> None:
    cell(f"constant = {value}\n")
    with pytest.raises(InvalidRequest, match="'constant'"):
        cell_text(cell("def fit():\n    return constant\n")["fit"])


def test_two_functions_may_call_each_other(cell: Cell) -> None:
    cell("def even(n):\n    return n == 0 or odd(n - 1)\n")
    text = cell_text(cell("def odd(n):\n    return n != 0 and even(n - 1)\n")["odd"])
    loaded: dict[str, Any] = {}
    exec(compile(text, "notebook.py", "exec"), loaded)
    assert loaded["odd"](3)


def test_a_class_without_functions_of_its_own_is_found_in_its_cell(cell: Cell) -> None:
    cell("from dataclasses import dataclass\n@dataclass\nclass Config:\n    rate: float = 1.0\n")
    cell("class Names:\n    first = 'a'\n")
    cell("@dataclass\nclass Config:\n    rate: float = 2.0\n")
    text = cell_text(cell("def fit():\n    return Config(), Names.first\n")["fit"])
    loaded: dict[str, Any] = {"__name__": "notebook"}
    exec(compile(text, "notebook.py", "exec", dont_inherit=True), loaded)
    config, name = loaded["fit"]()
    assert (config.rate, name) == (2.0, "a")


class ShellDouble:
    """What IPython's shell keeps of its cells, as they were typed; a magic with one sign is a call."""

    def __init__(self, cells: list[str]) -> None:
        self.history_manager = SimpleNamespace(input_hist_raw=cells)

    def transform_cell(self, text: str) -> str:
        return text.replace("%matplotlib", "matplotlib")


def test_a_cell_below_a_magic_is_found_in_the_history(monkeypatch: pytest.MonkeyPatch) -> None:
    written = "%%writefile other.py\ndef fit():\n    return 3\n"
    cells = ["", "%%time\n%matplotlib\ndef fit():\n    return 1\n", "def fit():\n    return (0, 2)\n", written]
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: ShellDouble(cells)))
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("def fit():\n    return 1\n", "<timed exec>", "exec", dont_inherit=True), namespace)
    assert "return 1" in cell_text(namespace["fit"])


def test_without_its_text_a_function_is_refused() -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("def fit(ctx): ...\n", "<stdin>", "exec"), namespace)
    with pytest.raises(InvalidRequest, match=r"uses 'fit' of the notebook|'fit'"):
        source_of(namespace["fit"], "function")
