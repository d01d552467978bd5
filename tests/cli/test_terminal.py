"""What users, workers and platforms write cannot steer the terminal that shows it."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from springtide.cli import terminal
from springtide.cli.tables.columns import align

ATTACKS = {
    "clipboard": "\x1b]52;c;cm0gLXJmIH4=\x07",
    "clear": "\x1b[2J\x1b[1;1H",
    "reset": "\x1bc",
    "one-byte CSI": "\x9b2J",
    "carriage return": "FAILED\rSUCCEEDED",
    "backspace": "no\x08\x08yes",
    "bidirectional": "\u202egnp.exe\u202c",
    "isolates": "\u2066a\u2069",
    "line separator": "a\u2028b",
    "zero width": "sprin\u200bgtide",
    "tag": "\U000e0041",
    "null": "a\0b",
    "surrogate": "\ud800",
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=list(ATTACKS))
def test_nothing_that_a_terminal_obeys_is_printed(attack: str, capsys: pytest.CaptureFixture[str]) -> None:
    terminal.write(f"loss {attack} 0.1")
    terminal.write(attack, err=True, fg="red")
    terminal.write_status(attack)
    terminal.write_json(json.dumps({"reason": attack}, ensure_ascii=False))
    Console(force_terminal=True, width=200).print(terminal.rich_text(attack))
    printed = capsys.readouterr()
    # What stays of control characters is the style of our own and the line that is written in place.
    own = ("\x1b[31m", "\x1b[0m", "\x1b[K", "\r", "\n")
    shown = printed.out + printed.err
    for sequence in own:
        shown = shown.replace(sequence, "")
    assert shown.isprintable(), repr(shown)


def test_what_is_harmless_stays() -> None:
    text = "épreuve\t42 %\n→ 模型 [bold]x[/bold] “quoted” …"
    assert terminal.visible(text) == text
    assert terminal.rich_text("[bold]x[/bold]").plain == "[bold]x[/bold]"


def test_escapes_can_be_read() -> None:
    assert terminal.visible("\x1b[2J\u202e\U000e0041") == "\\x1b[2J\\u202e\\U000e0041"


def test_json_means_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    value = {name: attack for name, attack in ATTACKS.items() if name != "surrogate"}
    terminal.write_json(json.dumps(value, ensure_ascii=False, indent=2))
    assert json.loads(capsys.readouterr().out) == value


def test_raw_lines_are_as_they_were_written(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.write_raw("\x1b[31mred\x1b[0m")
    assert "red" in capsys.readouterr().out


def test_a_cell_of_a_table_stays_in_its_row() -> None:
    table = align(("NAME", "REASON"), [("a", "boom\nb     SUCCEEDED\t\r\nx"), ("c", "")])
    assert len(table.splitlines()) == 3
