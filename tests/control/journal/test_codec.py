"""A step as bytes: small, complete when it is read again, and of a form that changes only with its number."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path

import msgspec
import pytest

from springtide.control.journal import codec
from springtide.control.journal.codec import SCHEMA_VERSION, encode_step
from springtide.control.journal.sqlite import SqliteJournal
from springtide.core.ports import Step

# What a step can hold, by the number of the schema. If this test fails, the next version would read the journals of
# this one with less in them, or not at all: raise SCHEMA_VERSION, add a change of old steps to the codec where the new
# fields' defaults do not do, and the new digest here. Within an unreleased version the digest alone is replaced.
FORMS = {2: "f147cb929ff40d2a"}


def test_a_memory_is_written_when_it_changes_and_read_with_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec, "LONGEST_SAME", 3)
    first, second = {"book": ["a" * 200]}, {"book": ["b" * 200]}
    memories = [None, first, first, first, first, first, second, second, None, None, first]
    with contextlib.closing(SqliteJournal(tmp_path / "journal.db")) as journal:
        for at, memory in enumerate(memories):
            journal.append(Step(now_s=float(at), memory=memory))
        rows = [len(row.step) for row in journal.rows()]
        assert [size > 200 for size in rows] == [
            False,
            True,
            False,
            False,
            False,
            True,
            True,
            False,
            False,
            False,
            True,
        ]
        assert [step.memory for _, step in journal.read()] == memories
        for after in range(len(memories)):
            assert [step.memory for _, step in journal.read(after)] == memories[after:]
    with contextlib.closing(SqliteJournal(tmp_path / "journal.db")) as journal:
        journal.append(Step(now_s=20.0, memory=first))
        assert [step.memory for _, step in journal.read()] == [*memories, first]


def test_a_memory_that_could_not_be_written_is_written_again(tmp_path: Path) -> None:
    encoder, memory = codec.StepEncoder(), {"a": 1}
    assert encoder.encode(Step(now_s=1.0, memory=memory)) == encode_step(Step(now_s=1.0, memory=memory))
    assert encoder.encode(Step(now_s=2.0, memory=memory)) == encode_step(Step(now_s=2.0, memory=memory))
    encoder.note(Step(now_s=2.0, memory=memory))
    assert json.loads(encoder.encode(Step(now_s=3.0, memory=memory)))["memory"] == "="


def test_what_a_step_can_hold_changes_only_with_its_number() -> None:
    form = json.dumps(msgspec.json.schema(Step), sort_keys=True)
    without_prose = json.dumps(_without_descriptions(json.loads(form)), sort_keys=True)
    assert hashlib.sha256(without_prose.encode()).hexdigest()[:16] == FORMS[SCHEMA_VERSION]


def _without_descriptions(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_descriptions(part) for key, part in value.items() if key not in {"description", "title"}}
    if isinstance(value, list):
        return [_without_descriptions(part) for part in value]
    return value
