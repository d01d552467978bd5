"""Lines of a step log on their way: what may be added, what says that some are lacking, how a container says them."""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

# A step and its line.
Line = tuple[int, str]
_NUM_LOST = "num_lost"
# Prefix of the lines that a container prints at its end because the store lacks them; readers of its output strip them.
WORD = "springtide-steps: "
# So many lines are said in one: a container's log cuts what is longer than 16 KiB.
_LINES_SAID_AT_ONCE = 64
_MAX_SAID_BYTES = 1 << 20


def gap_line(generation: int, first_step: int, last_step: int) -> Line:
    """The line that stands for steps whose lines are lost."""
    told = {"generation": generation, "step": last_step, _NUM_LOST: last_step - first_step + 1}
    return last_step, json.dumps(told)


def is_gap(record: Mapping[str, Any]) -> bool:
    """Whether a record of the log is of no step, but says that some are lacking."""
    return _NUM_LOST in record


def lost_steps(record: Mapping[str, Any]) -> tuple[int, int]:
    """The first and the last step that a gap stands for."""
    return record["step"] - record[_NUM_LOST] + 1, record["step"]


def lines_above(lines: Iterable[Line], step: int) -> list[Line]:
    """The ascending lines above `step`, the last one in the log, after a line for the gap in between, if any.

    A line that already says that steps were lost stays one, as far as the log lacks them.
    """
    lacking = [line for line in lines if line[0] > step]
    if not lacking:
        return []
    first = json.loads(lacking[0][1])
    if is_gap(first):
        return [gap_line(first["generation"], step + 1, lacking[0][0]), *lacking[1:]]
    gap = [gap_line(first["generation"], step + 1, lacking[0][0] - 1)] if lacking[0][0] > step + 1 else []
    return [*gap, *lacking]


def say_lines(lines: Sequence[Line]) -> list[str]:
    """The lines as a container says them, many in one."""
    return [_pack(lines[first : first + _LINES_SAID_AT_ONCE]) for first in range(0, len(lines), _LINES_SAID_AT_ONCE)]


def hear_lines(said: Iterable[str]) -> list[Line]:
    """The lines that were said, ascending; what is none, or of a step that came before, is left out."""
    lines: list[Line] = []
    for text in said:
        for line in _unpack(text):
            if not lines or line[0] > lines[-1][0]:
                lines.append(line)
    return lines


def whole_lines(data: bytes) -> Iterator[Line]:
    """The lines in a file of them that are whole; the last one may have been cut by a death."""
    for raw in data.split(b"\n")[:-1]:
        try:
            record = json.loads(raw)
            step, _ = int(record["step"]), int(record["generation"])
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        yield step, raw.decode()


def _pack(lines: Sequence[Line]) -> str:
    text = "".join(f"{line}\n" for _, line in lines)
    return WORD + base64.b64encode(zlib.compress(text.encode(), 6)).decode()


def _unpack(text: str) -> Iterator[Line]:
    # It comes out of a container in which anything may be printed.
    try:
        packed = base64.b64decode(text.removeprefix(WORD).strip(), validate=True)
        data = zlib.decompressobj().decompress(packed, _MAX_SAID_BYTES)
    except (binascii.Error, ValueError, zlib.error):
        return
    yield from whole_lines(data)
