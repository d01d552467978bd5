"""Flags that are made of the tables: a row that a command has a text for is a flag of that command."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from springtide.cli.jobs.flags import given_keywords, option_flags
from springtide.core.options.kinds import Choice, Count, Money, Number, Params, Toggle
from springtide.core.options.option import FlagText, Option


def row(name, kind, flag, **text):
    return Option(name=name, kind=kind, flags={"try": FlagText(flag, f"About {name}.", **text)})


MADE_UP = (
    row("effort", Count(1, 9, 3), "--effort"),
    row("mood", Choice(("calm", "bold")), "--temper", choices=("wild",)),
    row("price", Money(), "--price MONEY"),
    row("ratio", Number("a ratio", 0.5), "--ratio N"),
    row("quick", Toggle(), "--quick"),
    row("tidy", Toggle(may_be_open=True), "--tidy/--no-tidy"),
    row("params", Params(), "--param K=V"),
    Option(name="elsewhere", kind=Count(1, 9, 3), flags={"other": FlagText("--elsewhere", "Not here.")}),
)


def run(*words):
    found = {}

    @click.command()
    @option_flags(MADE_UP, "try")
    def command(**given):
        found.update(given_keywords(MADE_UP, "try", given))

    return CliRunner().invoke(command, words), found


@pytest.mark.parametrize(
    ("words", "keywords"),
    [
        ((), {}),
        (("--effort", "3", "--temper", "wild"), {"effort": 3, "mood": "wild"}),
        (("--price", "$4", "--ratio", "0.5"), {"price": "$4", "ratio": 0.5}),
        (("--quick", "--no-tidy"), {"quick": True, "tidy": False}),
        (("--param", "lr=0.1", "--param", "b=c=d"), {"params": {"lr": "0.1", "b": "c=d"}}),
    ],
)
def test_what_is_typed_is_a_keyword_and_nothing_else(words, keywords):
    result, found = run(*words)
    assert result.exit_code == 0, result.output
    assert found == keywords


def test_flags_are_listed_in_the_order_of_the_table():
    result, _ = run("--help")
    flags = ["--effort", "--temper", "--price MONEY", "--ratio N", "--quick", "--tidy / --no-tidy", "--param K=V"]
    places = [result.output.index(flag) for flag in flags]
    assert places == sorted(places)
    assert "About effort.  [x>=1]" in result.output
    assert "--elsewhere" not in result.output


@pytest.mark.parametrize("words", [("--effort", "0"), ("--temper", "sad"), ("--elsewhere", "1")])
def test_what_is_not_of_its_kind_is_refused(words):
    result, _ = run(*words)
    assert result.exit_code == 2
