"""A step as bytes: small, complete when it is read again, and of a form that changes only with its number."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from pathlib import Path

import msgspec
import pytest

from springtide.control.journal import codec
from springtide.control.journal.codec import SCHEMA_VERSION, encode_step
from springtide.control.journal.ended import EndedJob, EndedService
from springtide.control.journal.export import NEW_EVENTS, NEW_FIELDS
from springtide.control.journal.sqlite import SqliteJournal
from springtide.control.state_data import PlatformSnapshot
from springtide.core.ports import Step
from springtide.core.status.platform import HistoryEntry, ProgressPoint
from springtide.service.history import history, pools, series

# What a step can hold, by the number of the schema. If this test fails, the next version would read the journals of
# this one with less in them, or not at all: raise SCHEMA_VERSION, add a change of old steps to the codec where the new
# fields' defaults do not do, and the new digest here. Within an unreleased version the digest alone is replaced.
FORMS = {1: "ab564d61e7def4ad", 2: "a5d4932e7a931efd"}
# What a snapshot of the state can hold, beside the steps or for jobs that left the state, by the same number. If this
# fails, the next version would begin at snapshots of this one with less in them, or not at all: then raise the number
# and have `decode_snapshot` turn older ones into the new form, or the steps that were dropped are lost. Within an
# unreleased version the digest alone is replaced.
SNAPSHOT_FORMS = {2: "d8252cf77a625e53"}


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
    assert _digest(msgspec.json.schema(Step)) == FORMS[SCHEMA_VERSION]


def test_what_a_snapshot_can_hold_changes_only_with_its_number() -> None:
    indexes = (history, pools, series)
    kept = {f"{index.__name__} {name}": kind for index in indexes for name, kind in index._KEPT.items()}
    kinds = [PlatformSnapshot, EndedJob, EndedService, tuple[HistoryEntry, ...], list[ProgressPoint], *kept.values()]
    forms, parts = msgspec.json.schema_components(kinds, schema_hook=_as_list)
    assert _digest([forms, parts, list(kept)]) == SNAPSHOT_FORMS[SCHEMA_VERSION]


def test_the_older_schema_is_the_present_one_without_what_an_export_leaves_out() -> None:
    schema = json.loads(json.dumps(msgspec.json.schema(Step)))
    parts = schema["$defs"]
    for name, fields in NEW_FIELDS.items():
        for field in fields:
            del parts[name]["properties"][field]
    events = parts["Step"]["properties"]["events"]["items"]
    for name in NEW_EVENTS:
        del events["discriminator"]["mapping"][name]
        events["anyOf"].remove({"$ref": f"#/$defs/{name}"})
    used = {"Step"}
    while more := set(re.findall(r"#/\$defs/(\w+)", json.dumps([parts[name] for name in used]))) - used:
        used |= more
    assert _digest({**schema, "$defs": {name: parts[name] for name in used}}) == FORMS[1]


def _digest(form: object) -> str:
    text = json.dumps(_without_descriptions(json.loads(json.dumps(form))), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _as_list(kind: type) -> dict[str, object]:
    return {"type": "array", "of": str(kind)}


def _without_descriptions(value: object) -> object:
    """Without what says nothing of a form, and what versions of msgspec before 0.23 leave out."""
    left_out = {"description", "title", "propertyNames"}
    if isinstance(value, dict):
        left_out |= {"default"} if value.get("default") in ({}, []) else set()
        return {key: _without_descriptions(part) for key, part in value.items() if key not in left_out}
    if isinstance(value, list):
        return [_without_descriptions(part) for part in value]
    return value
