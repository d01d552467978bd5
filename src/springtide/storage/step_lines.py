"""Lines of a step log in transit: lines that the log lacks, lines that mark gaps, and lines in a container's output."""

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
# A container prints the lines that the store lacks at its end with this prefix; readers of its output strip them.
WORD = "springtide-steps: "
# How many lines are packed into one line of output: logs of containers cut lines at 16 KiB.
_LINES_PER_OUTPUT = 64
_MAX_UNPACKED_BYTES = 1 << 20


def gap_line(generation: int, first_step: int, last_step: int) -> Line:
    """The line that marks steps whose lines are lost."""
    record = {"generation": generation, "step": last_step, _NUM_LOST: last_step - first_step + 1}
    return last_step, json.dumps(record)


def is_gap(record: Mapping[str, Any]) -> bool:
    """Whether a record of the log marks a gap instead of a step."""
    return _NUM_LOST in record


def lost_steps(record: Mapping[str, Any]) -> tuple[int, int]:
    """The first and the last step of a gap."""
    return record["step"] - record[_NUM_LOST] + 1, record["step"]


def lines_above(lines: Iterable[Line], step: int) -> list[Line]:
    """The lines (ascending) above `step`, which is the last in the log, after a gap line for steps in between, if any.

    If the first of them is a gap line itself, it is cut to the steps that the log lacks.
    """
    lacking = [line for line in lines if line[0] > step]
    if not lacking:
        return []
    first = json.loads(lacking[0][1])
    if is_gap(first):
        return [gap_line(first["generation"], step + 1, lacking[0][0]), *lacking[1:]]
    gap = [gap_line(first["generation"], step + 1, lacking[0][0] - 1)] if lacking[0][0] > step + 1 else []
    return [*gap, *lacking]


def pack_lines(lines: Sequence[Line]) -> list[str]:
    """Pack lines for a container's output, many into one."""
    return [_pack(lines[first : first + _LINES_PER_OUTPUT]) for first in range(0, len(lines), _LINES_PER_OUTPUT)]


def unpack_lines(output: Iterable[str]) -> list[Line]:
    """Unpack lines from a container's output, ascending; anything else, and repeated steps, are left out."""
    lines: list[Line] = []
    for text in output:
        for line in _unpack(text):
            if not lines or line[0] > lines[-1][0]:
                lines.append(line)
    return lines


def whole_lines(data: bytes) -> Iterator[Line]:
    """The complete lines of a file; the last one may be cut off if its writer was killed."""
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
    # User code may print anything to the container's output, so the text is checked.
    try:
        packed = base64.b64decode(text.removeprefix(WORD).strip(), validate=True)
        data = zlib.decompressobj().decompress(packed, _MAX_UNPACKED_BYTES)
    except (binascii.Error, ValueError, zlib.error):
        return
    yield from whole_lines(data)
