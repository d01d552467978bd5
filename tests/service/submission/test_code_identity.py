"""Which edits of a file make another program of a function, and which do not."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from springtide.service.submission.code_identity import identity_of
from springtide.service.submission.source_check import SourceCheck

TRAIN = '''
"""Digits."""
import os
import springtide as st
from torch import nn
from layers import block, unused
import extra.tools as tools

RATE = 0.1
CONFIG = {"width": RATE * 2}
other = 3

def build(width, depth=2):
    """A model."""
    sizes = [width for _ in range(depth)]
    return nn.Sequential(*[block(size) for size in sizes])

@st.job(epochs=3, deadline="10m")
def fit(ctx):
    model = build(CONFIG["width"])
    total = 0
    for batch in ctx.batches(tools.read("digits")):
        loss = model(batch.x).sum()
        total += loss
        ctx.step(loss)

def unreached():
    return other

if __name__ == "__main__":
    fit(None)
'''
LAYERS = (
    "def block(size):\n    return helper(size)\n\ndef helper(size):\n    return size + 1\n\ndef unused():\n    pass\n"
)
TOOLS = "NAME = 'x'\n\ndef read(name):\n    return name + NAME\n"
FILES = {"train.py": TRAIN, "layers.py": LAYERS, "extra/tools.py": TOOLS, "notes.txt": "a"}


def of(files=FILES, name="fit"):
    return identity_of(dict(files), "train.py", name)


def edited(before, after, path="train.py"):
    assert before in FILES[path]
    return {**FILES, path: FILES[path].replace(before, after)}


@pytest.mark.parametrize(
    "files",
    [
        edited("    model = build", "    # A comment.\n\n    model = build"),
        {**FILES, "train.py": ast.unparse(ast.parse(TRAIN))},
        edited("import os\n", "import os\nimport sys\n"),
        edited("def unreached", "def more():\n    return 1\n\ndef unreached"),
        edited("    return other", "    return other + 1"),
        edited('    total = 0\n', '    total = 0\n    print("begun", total)\n'),
        edited('    """A model."""\n', '    """Another sentence."""\n'),
        edited('epochs=3, deadline="10m"', "epochs=30, global_batch=(32, 64)"),
        edited("def build(width, depth=2)", "def build(width: int, depth: int = 2) -> object"),
        {**FILES, "train.py": TRAIN.replace("total", "summed").replace("loss", "cost").replace("batch.", "one.")
            .replace("for batch in", "for one in")},
        edited("def unused():\n    pass", "def unused():\n    return 5", path="layers.py"),
        edited("fit(None)", "fit(1)"),
    ],
)  # fmt: skip
def test_what_is_written_around_a_program_makes_it_no_other(files):
    assert of(files) == of()


@pytest.mark.parametrize(
    "files",
    [
        edited("RATE = 0.1", "RATE = 0.2"),
        edited("depth=2", "depth=3"),
        edited("total += loss", "total -= loss"),
        edited("ctx.step(loss)", "ctx.step(total)"),
        edited("@st.job(", "@st.other("),
        edited("from torch import nn", "from torch import fx as nn"),
        edited("size + 1", "size + 2", path="layers.py"),
        edited("NAME = 'x'", "NAME = 'y'", path="extra/tools.py"),
        edited("import os\n", "import os\nos.environ.setdefault('A', '1')\n"),
        {**FILES, "notes.txt": "b"},
    ],
)
def test_what_changes_the_program_makes_it_another(files):
    assert of(files) != of()


def test_a_local_name_is_no_name_of_the_module():
    local = "x = 1\n\ndef fit(ctx):\n    x = 2\n    return x\n"
    assert identity_of({"a.py": local}, "a.py", "fit") == identity_of(
        {"a.py": local.replace("x = 1", "x = 7")}, "a.py", "fit"
    )
    module = "x = 1\n\ndef fit(ctx):\n    global x\n    x = 2\n    return x\n"
    assert identity_of({"a.py": module}, "a.py", "fit") != identity_of(
        {"a.py": module.replace("x = 1", "x = 7")}, "a.py", "fit"
    )
    assert identity_of({"a.py": local}, "a.py", "fit") != identity_of(
        {"a.py": local.replace("    x = 2\n", "")}, "a.py", "fit"
    )


SCRIPT = (
    "import layers\nrate = 1\ndef f():\n    return rate\ndef g():\n    return 2\nif __name__ == '__main__':\n    f()\n"
)


@pytest.mark.parametrize(
    ("before", "after", "is_alike"),
    [
        ("import layers\n", "import layers\n# A comment.\nprint('begun')\n", True),
        ("return 2", "return 3", True),
        ("    f()", "    g()", False),
        ("return rate", "return -rate", False),
        ("rate = 1", "rate = 2", False),
    ],
)
def test_a_script_is_what_it_runs_and_reaches(before, after, is_alike):
    assert before in SCRIPT
    edited_script = SCRIPT.replace(before, after)
    found = identity_of({"a.py": SCRIPT}, "a.py", "")
    assert found
    assert (found == identity_of({"a.py": edited_script}, "a.py", "")) is is_alike


def test_what_cannot_be_found_by_reading_has_no_identity():
    assert of(name="missing") == ""
    assert identity_of({"a.py": "globals()['fit'] = 1\n"}, "a.py", "fit") == ""


@pytest.mark.parametrize("path", sorted(Path(__file__).parents[3].glob("examples/*.py")), ids=lambda path: path.name)
def test_examples_have_one(path):
    text = path.read_text()
    names = [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    found = {name: identity_of({path.name: text}, path.name, name) for name in names}
    assert all(found.values())
    assert found == {name: identity_of({path.name: f"# More.\n{text}"}, path.name, name) for name in names}


def test_the_process_tells_it_and_keeps_the_last():
    check = SourceCheck()
    try:
        assert check.check(FILES, "train.py", "fit") == of()
        process = check._server
        assert process is not None
        process.kill()
        process.wait()
        assert check.check(FILES, "train.py", "fit") == of()
        assert check._server is process, "it was not asked again"
        deep = "def fit(ctx):\n    return " + "-" * 80 + "1\n" + "\n".join(f"x{n} = {n}" for n in range(200))
        assert len(check.check({"a.py": deep}, "a.py", "fit")) == 64
    finally:
        check.close()
