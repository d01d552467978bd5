"""The command starts fast because it imports nothing that it does not need."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "fastapi", "starlette", "uvicorn", "numpy", "httpx2", "rich.live", "jinja2")

PROGRAM = """
import sys
sys.argv = ['springtide', *{arguments!r}]
from springtide.cli.main import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print([name for name in {heavy!r} if name in sys.modules])
"""


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["ps", "--help"], ["run", "--help"]])
def test_commands_import_little(arguments: list[str]) -> None:
    program = PROGRAM.format(arguments=arguments, heavy=HEAVY)
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    imported = ran.stdout.strip().splitlines()[-1]
    assert imported == "[]"
