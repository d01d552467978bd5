"""HiGHS through SciPy, imported only when a program is solved, and kept from printing."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

STDOUT, STDERR = 1, 2


def is_available() -> bool:
    return importlib.util.find_spec("scipy") is not None


def solve(costs: Any, integrality: Any, bounds: tuple[Any, Any], rows: tuple[Any, Any, Any], **options: Any) -> Any:
    """Minimise `costs @ x` within `bounds` (low, high) and `rows` (matrix, low, high); SciPy's result, `x` or None.

    `options` are those of `scipy.optimize.milp`. Limits should be counts, not times: a plan must not depend on how fast
    the machine is. Raises ImportError without SciPy.
    """
    optimize: Any = importlib.import_module("scipy.optimize")
    with _prints_elsewhere():
        return optimize.milp(
            c=costs,
            integrality=integrality,
            bounds=optimize.Bounds(*bounds),
            constraints=optimize.LinearConstraint(*rows),
            options=options,
        )


@contextlib.contextmanager
def _prints_elsewhere() -> Iterator[None]:
    """While a program is solved, send standard output to standard error.

    The HiGHS in SciPy 1.17 prints a line of its own when it repairs a solution, which would break the JSON that a
    command prints. Without a standard output, there is nothing to do.
    """
    try:
        kept = os.dup(STDOUT)
    except OSError:
        yield
        return
    try:
        _flush()
        os.dup2(STDERR, STDOUT)
        yield
    finally:
        _flush()
        os.dup2(kept, STDOUT)
        os.close(kept)


def _flush() -> None:
    """Flush the buffers of the C library."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).fflush(None)
