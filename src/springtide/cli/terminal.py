"""The one way of text to a terminal: text of users, workers and platforms cannot steer the terminal that shows it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

if TYPE_CHECKING:
    from rich.text import Text

# Control characters but newline and tab, invisible and bidirectional marks, line separators, tags, lone surrogates.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f\ud800-\udfff]"
)


def visible(text: str) -> str:
    """The text with everything that a terminal might obey, or that hides or reorders text, written as an escape.

    Newlines and tabs stay. The escape character is shown as the four characters `\\x1b`.
    """
    return _UNSAFE.sub(lambda found: _escaped(found.group()), text)


def _escaped(character: str) -> str:
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def write(text: str, *, err: bool = False, **style: Any) -> None:
    """Print a line of text, in the style that click.style takes."""
    shown = visible(text)
    click.echo(click.style(shown, **style) if style else shown, err=err)


def write_json(document: str, *, newline: bool = True) -> None:
    """Print a JSON document. What a terminal might obey stands in its strings alone, where an escape means the same."""
    click.echo(_UNSAFE.sub(lambda found: _json_escaped(found.group()), document), nl=newline)


def write_answer(answer: object, text: str, output: str | None, hint: Callable[[str], None], told: str = "") -> None:
    """Print an answer as text and `told` after it, and write all of it to the file `output`; "-" prints it as JSON."""
    encoded = msgspec.json.format(msgspec.json.encode(answer), indent=2) + b"\n"
    if output == "-":
        write_json(encoded.decode(), newline=False)
        return
    if output is not None:
        Path(output).write_bytes(encoded)
    write(text)
    hint(told or (f"all numbers: {output}" if output else "all numbers: --json OUT (or --json -)"))


def _json_escaped(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))


def write_raw(line: str) -> None:
    """Print a line as it is, which the user has asked for."""
    click.echo(line)


def write_status(text: str) -> None:
    """Show the text in place of the last one, on standard error's present line; empty: clear the line."""
    click.echo(f"\r{visible(text)}\x1b[K" if text else "\r\x1b[K", err=True, nl=False)


def rich_text(text: str, **options: Any) -> Text:
    """The text for a live display, without any markup."""
    from rich.text import Text

    return Text(visible(text), **options)
