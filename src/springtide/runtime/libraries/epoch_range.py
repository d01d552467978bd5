"""How often a program's own loop over epochs goes round, as far as its text tells."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Sequence
from types import FrameType

# What an argument of `range` may be made of, so that computing it changes nothing.
_HARMLESS = (
    ast.Name,
    ast.Attribute,
    ast.Constant,
    ast.BinOp,
    ast.UnaryOp,
    ast.operator,
    ast.unaryop,
    ast.Load,
)


def num_rounds(frames: Sequence[FrameType]) -> int | None:
    """The number of rounds of the `for ... in range(...)` around the loop that runs in the innermost frame.

    `frames` are the program's, innermost first; `tqdm(range(...))` and `trange(...)` count too. None if there is no
    such loop, if there are several, or if their text is not to be had.
    """
    for depth, frame in enumerate(frames):
        loops = _loops_at(frame)
        if depth == 0 and loops and isinstance(loops[-1], ast.For):
            # The one over the batches.
            loops.pop()
        if loops:
            return _length(loops[-1], frame) if len(loops) == 1 else None
    return None


def is_repeated(frames: Sequence[FrameType]) -> bool:
    """Whether a `for` runs around the call in the innermost of these frames, unless it is known to go round once."""
    loops = [(loop, frame) for frame in frames for loop in _loops_at(frame) if isinstance(loop, ast.For)]
    return any(_length(loop, frame) != 1 for loop, frame in loops)


def _loops_at(frame: FrameType) -> list[ast.For | ast.While]:
    """The loops around the line that runs in this frame, outermost first."""
    text = "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    line, name = frame.f_lineno, frame.f_code.co_name
    found: list[ast.For | ast.While] = []
    is_inside = name == "<module>"
    node: ast.AST | None = tree
    while node is not None:
        around = None
        for child in ast.iter_child_nodes(node):
            if getattr(child, "lineno", line + 1) <= line <= (getattr(child, "end_lineno", None) or 0):
                around = child
        node = around
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            # Loops around a function's definition are no loops around its call.
            found, is_inside = [], is_inside or getattr(node, "name", "") == name
        elif isinstance(node, ast.For | ast.While):
            found.append(node)
    return found if is_inside else []


def _length(loop: ast.For | ast.While, frame: FrameType) -> int | None:
    counted = loop.iter if isinstance(loop, ast.For) else None
    while isinstance(counted, ast.Call):
        name = counted.func.attr if isinstance(counted.func, ast.Attribute) else getattr(counted.func, "id", "")
        if name in ("range", "trange"):
            return _range_length(counted.args, frame)
        counted = counted.args[0] if name == "tqdm" and counted.args else None
    return None


def _range_length(arguments: Sequence[ast.expr], frame: FrameType) -> int | None:
    values = []
    for argument in arguments:
        if not all(isinstance(node, _HARMLESS) for node in ast.walk(argument)):
            return None
        try:
            code = compile(ast.Expression(argument), "<range>", "eval")
            values.append(int(eval(code, frame.f_globals, frame.f_locals)))  # noqa: S307
        except Exception:
            return None
    try:
        return len(range(*values))
    except (TypeError, ValueError, OverflowError):
        return None
