"""A journal for people, as lines of JSON, and for the release before, in the schema that it reads."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from springtide.control.journal.chain import CLOCK_BEGAN, MIDNIGHT
from springtide.control.journal.journal import DurableJournal
from springtide.control.records import PlatformState
from springtide.control.runs import apply_actions, apply_events
from springtide.core.errors import InvalidRequest, JournalError
from springtide.core.events import ClockAnchored
from springtide.core.ports import Step
from springtide.core.workload import InferenceService, TrainingJob, WorkloadId

# What schema 2 has and schema 1 has not: events, and whether the state of schema 1 is right without them;
NEW_EVENTS: Mapping[str, bool] = MappingProxyType(
    {
        "ClockAnchored": True,
        "DecisionsResumed": True,
        # They stay in the state there.
        "JobsArchived": True,
        "ServicesArchived": True,
        # It moves a limit that is not there.
        "StartHeldUp": True,
        "FenceFound": False,
        "MoveRequested": False,
        "MoveFailed": False,
        "JobStalled": False,
        "StartTimedOut": False,
        "RevisionJudged": False,
    }
)
# and fields, with the values without which it is right: defaults, and what a submission has that asks for nothing; or
# None, if it is right without any value: that is measured at each start, a sentence that is there as text or decides
# nothing, known from the record of the service, or in the speeds of the job's profile.
NEW_FIELDS: Mapping[str, Mapping[str, tuple[Any, ...] | None]] = MappingProxyType(
    {
        # Since when a promise is given up: it is only shown.
        "Step": {"promises": None},
        "Node": {"room": None},
        "Device": {"accelerator": None},
        # Its file and import root are in the job's copy of the folder.
        "Entrypoint": {"library": ("",), "folder": None},
        "StartReplica": {"change": None, "more_devices": ((),)},
        "ResizeJob": {"change": None},
        # There each deploy replaces what answers at once.
        "ServiceDeployed": {"first_replica": None, "terms": None, "is_rollback": None},
        "TrainingJob": {
            "stall_timeout_s": (0.0, None),
            "on_stall": ("report",),
            "start_timeout_s": (0.0, 1800.0),
            "on_nan": ("report",),
            "belief": None,
            "confidence": None,
            "place_reason": None,
            "profiles": None,
            "exact": (True,),
            "env": ({},),
            "secrets": (None,),
            "packages": (None,),
            "devices_each": (1,),
            "machine_run": (None,),
        },
        "InferenceService": {
            "start_timeout_s": (0.0, 600.0),
            "env": ({},),
            "secrets": (None,),
            "packages": (None,),
            "devices_each": (1,),
            "max_body_mib": (1,),
            "concurrency": (None,),
            "calls": ((),),
        },
        "ProgressReported": {"is_diverged": (False,), "diverged_at_step": (None,), "exact_obstacle": None},
        "JobFinished": {"diverged_at_step": (None,)},
        # There the job has failed.
        "JobFailed": {"is_fixed_size": (False,)},
        "Usage": {"machines_usd": (0.0,)},
        "Bill": {"machines_usd": (0.0,)},
        "ReplicaReady": {"device_seen": None},
        "ScaleRequested": {"reason": None, "is_limit": None},
        "ReplicaLost": {"is_refused": (False,)},
    }
)
_TABLES = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT",
    "CREATE TABLE steps (seq INTEGER PRIMARY KEY, now_s REAL NOT NULL, step BLOB NOT NULL) STRICT",
)
_MOST_NAMED = 5


class OlderExport(msgspec.Struct, frozen=True, kw_only=True):
    """A journal that was written in an older schema. `left_out` counts what that has no words for, by kind."""

    file: str
    schema: int
    num_steps: int
    left_out: dict[str, int]


def export_rows(journal: DurableJournal) -> Iterator[bytes]:
    """Each step as a line of JSON: its number, term, time and content. Raises JournalDamaged, JournalError."""
    for row in journal.rows():
        step = msgspec.Raw(row.step)
        yield msgspec.json.encode({"seq": row.seq, "term": row.term, "now_s": row.now_s, "step": step}) + b"\n"


def export_older(journal: DurableJournal, schema: int, file: Path) -> OlderExport:
    """Write the journal to a new SQLite file, in a schema that an older version starts from.

    Raises InvalidRequest, with what it is and nothing written, if the state of a workload that has not ended cannot be
    told in that schema; JournalError.
    """
    if schema != 1:
        raise InvalidRequest(f"a journal cannot be exported in schema {schema}; of the older ones, 1 can be written")
    file = file.absolute()
    file.open("xb").close()
    file.chmod(0o600)
    try:
        found = _Downgrade()
        with closing(sqlite3.connect(file, isolation_level=None)) as target:
            target.execute("BEGIN")
            for statement in _TABLES:
                target.execute(statement)
            for seq, step in journal.read():
                target.execute("INSERT INTO steps VALUES (?, ?, ?)", (seq, step.now_s, found.downgraded(seq, step)))
            found.check()
            target.executemany("INSERT INTO meta VALUES (?, ?)", _meta(journal, found).items())
            target.execute("COMMIT")
    except sqlite3.Error as error:
        file.unlink()
        raise JournalError(f"the journal {file} cannot be written: {error}") from error
    except BaseException:
        file.unlink()
        raise
    return OlderExport(file=str(file), schema=schema, num_steps=found.num_steps, left_out=dict(found.left_out))


def _meta(journal: DurableJournal, found: _Downgrade) -> dict[str, str]:
    newest = next(journal.rows(max(0, journal.newest.seq - 1)), None)
    anchor = found.anchor
    # There platform time is the wall clock's, less this.
    began = journal.meta(CLOCK_BEGAN) if anchor is None else repr(anchor.unix_s - anchor.at_s)
    term = str(newest.term) if newest is not None and newest.term else None
    facts = {"schema": "1", "term": term, CLOCK_BEGAN: began, MIDNIGHT: journal.meta(MIDNIGHT)}
    return {key: value for key, value in facts.items() if value is not None}


class _Downgrade:
    """Turns steps of schema 2 into those of schema 1, one after another, and notes what that cannot hold."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.left_out: Counter[str] = Counter()
        self.anchor: ClockAnchored | None = None
        self._state = PlatformState()
        # By workload and what cannot be told of it: the first step that has it.
        self._lost: dict[tuple[WorkloadId, str], int] = {}

    def downgraded(self, seq: int, step: Step) -> bytes:
        """The step in schema 1. Raises InvalidRequest if it is not the next one."""
        if seq != self.num_steps + 1:
            raise InvalidRequest(
                f"the steps before {seq} were dropped by retention, and schema 1 has no snapshots to begin from"
            )
        self.num_steps = seq
        plain = msgspec.json.decode(msgspec.json.encode(step))
        for event in step.events:
            self._note_event(seq, event)
        for name, told in (("events", step.events), ("actions", step.actions)):
            self._strip(seq, WorkloadId(""), told, plain[name])
        for name in NEW_FIELDS["Step"]:
            plain.pop(name, None)
        plain["events"] = [event for event in plain["events"] if event["event"] not in NEW_EVENTS]
        apply_events(step.events, self._state, step.now_s)
        apply_actions(step.actions, self._state, step.now_s)
        return msgspec.json.encode(plain)

    def check(self) -> None:
        """Raise InvalidRequest if the state after the last step cannot be told in schema 1."""
        lost = [f"{who}: {what} (step {seq})" for (who, what), seq in self._lost.items() if not self._is_over(who)]
        if self.anchor is not None and self.anchor.is_in_doubt:
            lost.append(f"the clock is in doubt (step {self.num_steps}), and platform time is the wall clock's there")
        if lost:
            named = "; ".join(lost[:_MOST_NAMED])
            more = f"; and {len(lost) - _MOST_NAMED} more" if len(lost) > _MOST_NAMED else ""
            raise InvalidRequest(
                f"schema 1 has no words for {named}{more}. Nothing was written; what a workload says is no hindrance "
                "once it has ended"
            )

    def _is_over(self, workload_id: WorkloadId) -> bool:
        record = self._state.jobs.get(workload_id) or self._state.services.get(workload_id)
        return record is None or (record.is_over and not record.replicas)

    def _note_event(self, seq: int, event: Any) -> None:
        kind = type(event).__name__
        if isinstance(event, ClockAnchored):
            self.anchor = event
            for record in self._state.live_records() if event.skipped_s else ():
                if record.replicas:
                    what = "workers that are not charged for the time in which the machine was off"
                    self._lost.setdefault((record.workload_id, what), seq)
        if kind in NEW_EVENTS:
            self.left_out[kind] += 1
            if not NEW_EVENTS[kind]:
                self._lost.setdefault((_workload_of(event), kind), seq)

    def _strip(self, seq: int, owner: WorkloadId, value: Any, plain: Any) -> None:
        """Take away from `plain`, which is `value` as JSON, the fields that schema 1 does not have."""
        if isinstance(value, msgspec.Struct):
            owner = _workload_of(value) or owner
            for name, silent in NEW_FIELDS.get(type(value).__name__, {}).items():
                if name in plain and silent is not None and (found := getattr(value, name)) not in silent:
                    self.left_out[f"{type(value).__name__}.{name}"] += 1
                    self._lost.setdefault((owner, f"{name} {found!r}"), seq)
                plain.pop(name, None)
            for name in value.__struct_fields__:
                # Others are at their default.
                if name in plain:
                    self._strip(seq, owner, getattr(value, name), plain[name])
        elif isinstance(value, tuple):
            for part, plain_part in zip(value, plain, strict=True):
                self._strip(seq, owner, part, plain_part)


def _workload_of(value: Any) -> WorkloadId:
    """The workload that an event or an action is about, or that a record is of; empty for another value."""
    if isinstance(value, TrainingJob):
        return value.job_id
    if isinstance(value, InferenceService):
        return value.service_id
    named = (getattr(value, name, "") for name in ("workload_id", "job_id", "service_id"))
    return WorkloadId(next(filter(None, named), ""))
