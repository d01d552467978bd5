"""The Python packages that a workload's workers have beside the platform's: lines of a requirements file."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any, Final

from springtide.core.errors import InvalidRequest

MAX_REQUIREMENTS: Final = 256
MAX_REQUIREMENT_CHARS: Final = 1024
# Those of pip's options that say where packages come from and which of them may be taken.
_OPTIONS: Final = (
    *("-i", "--index-url", "--extra-index-url", "-f", "--find-links", "--no-index"),
    *("--pre", "--prefer-binary", "--only-binary", "--no-binary"),
)
_PASSWORD = re.compile(r"://[^/\s@]+@")


def check_requirements(lines: Any, where: str) -> tuple[str, ...]:
    """The requirements if pip can be given them on the platform's machine. Raises InvalidRequest.

    `where` is what the option is called.
    """
    if isinstance(lines, str) or not isinstance(lines, Sequence):
        raise InvalidRequest(f"{where} must list requirements, like ['einops==0.8.1', 'tqdm']")
    for line in lines:
        if not isinstance(line, str) or not line.strip() or not line.isprintable() or len(line) > MAX_REQUIREMENT_CHARS:
            raise InvalidRequest(f"{where} has {line!r:.80}, which is no requirement; write one like 'einops==0.8.1'")
        if _PASSWORD.search(line):
            raise InvalidRequest(
                f"{where} has an address with a password in it, which records would show: put it into pip's "
                "configuration or ~/.netrc on the platform's machine"
            )
        option = re.split(r"[\s=]", line.strip(), maxsplit=1)[0]
        if option.startswith("-") and option not in _OPTIONS:
            raise InvalidRequest(
                f"{where} has the option {option!r:.40}, which a workload's requirements cannot have; possible are "
                f"packages and {', '.join(_OPTIONS)}"
            )
    if len(lines) > MAX_REQUIREMENTS:
        raise InvalidRequest(f"{where} has {len(lines)} lines; at most {MAX_REQUIREMENTS} are possible")
    return tuple(line.strip() for line in lines)


def check_interpreter(path: Any, where: str) -> str:
    """The path of a Python interpreter on the platform's machine, or an empty text. Raises InvalidRequest."""
    is_path = isinstance(path, str) and (not path or (os.path.isabs(path) and path.isprintable()))
    if not is_path or len(path) > MAX_REQUIREMENT_CHARS:
        raise InvalidRequest(f"{where} {path!r:.80} must be the absolute path of Python, like /opt/py/bin/python")
    return str(path)


def num_packages(requirements: Sequence[str]) -> int:
    """How many of the lines name a package."""
    return sum(not line.startswith("-") for line in requirements)
