"""The journal in PostgreSQL keeps what it acknowledged, writes nothing twice, and obeys the newest term alone."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

import psycopg
import pytest
from msgspec.structs import replace

from kits.control.years import Years, bare_controller
from kits.servers import missing_postgres, running_postgres
from springtide.control.journal import journal as journals
from springtide.control.journal import postgres
from springtide.control.journal.chain import link
from springtide.control.journal.codec import encode_step
from springtide.control.journal.inspection import inspect_journal
from springtide.control.journal.journal import cut_journal, open_journal, read_journal
from springtide.control.journal.postgres import PostgresJournal
from springtide.control.journal.retention import Retention
from springtide.control.journal.sqlite import SqliteJournal
from springtide.control.loop import replay, run
from springtide.control.state_data import data_of
from springtide.control.upkeep import JournalUpkeep
from springtide.core.containers import ContainerSettings
from springtide.core.errors import InvalidRequest, JournalDamaged, JournalError, Superseded
from springtide.core.events import PlatformStarted
from springtide.core.ports import Step

pytestmark = pytest.mark.skipif(bool(missing_postgres()), reason=missing_postgres() or "none")
STEP = Step(now_s=1.5, events=(PlatformStarted(),), reasons={"a": "because \u2014 \x00"}, memory={"rounds": [1, 2]})
PLAIN = Step(now_s=2.5, events=(PlatformStarted(),))


@pytest.fixture(scope="module")
def server():
    with running_postgres() as running:
        yield running


@pytest.fixture
def url(server, request):
    """A database of its own for each test."""
    name = f"t{abs(hash(request.node.nodeid)) % 10**12}"
    with psycopg.connect(server.postgres_url(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return server.postgres_url(name)


def count_steps(url):
    with psycopg.connect(url) as connection:
        return connection.execute("SELECT count(*) FROM springtide_steps").fetchone()[0]


def append_until_it_fails(journal, seqs):
    while True:
        seqs.append(journal.append(STEP))


def end_backends(url):
    """What a failover does to a connection: the server's side of it is gone."""
    with psycopg.connect(url) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )


@pytest.mark.slow
def test_what_was_appended_comes_back_in_order(url, monkeypatch):
    monkeypatch.setattr("springtide.control.journal.postgres.PAGE_STEPS", 3)
    journal = PostgresJournal(url)
    seqs = [journal.append(Step(now_s=float(n))) for n in range(7)] + [journal.append(STEP)]
    assert seqs == list(range(1, 9))
    assert [seq for seq, _ in journal.read()] == seqs
    assert [step for _, step in journal.read(7)] == [STEP]
    assert journal.last_now_s() == 1.5
    journal.close()
    again = PostgresJournal(url)
    assert [seq for seq, _ in again.read()] == seqs
    assert again.append(STEP) == 9
    again.close()


def test_steps_may_be_appended_while_others_are_read(url):
    journal = PostgresJournal(url)
    for n in range(3):
        journal.append(Step(now_s=float(n)))
    reader = read_journal(url, None)
    for seq, _ in journal.read():
        if seq < 5:
            journal.append(STEP)
    assert [seq for seq, _ in reader.read()] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(JournalError, match="cannot be written"):
        reader.append(STEP)
    with pytest.raises(JournalError, match="cannot be written"):
        reader.set_meta("a", "b")
    assert reader.term == 0
    reader.close()
    journal.close()


def test_facts_about_the_journal_stay(url):
    journal = PostgresJournal(url, holder="first")
    assert journal.meta("clock") is None
    journal.set_meta("clock", "1")
    journal.set_meta("clock", "2")
    assert journal.meta("clock") == "2"
    assert journal.holder() == (1, "first")
    journal.close()
    with pytest.raises(JournalError, match="closed"):
        journal.meta("clock")


def test_every_opening_has_a_higher_term_and_only_the_newest_may_write(url):
    old = PostgresJournal(url, holder="old")
    old.append(STEP)
    newer = PostgresJournal(url, holder="newer")
    assert (old.term, newer.term) == (1, 2)
    newer.check()
    for attempt in (lambda: old.append(STEP), lambda: old.append(STEP), lambda: old.set_meta("a", "b"), old.check):
        with pytest.raises(Superseded, match="newer writes the journal in term 2, this one had term 1"):
            attempt()
    assert old.meta("a") is None
    assert newer.append(STEP) == 2
    assert [seq for seq, _ in old.read()] == [1, 2]
    old.close()
    newer.close()


def test_reading_takes_no_term(url):
    writer = PostgresJournal(url)
    read_journal(url, None).close()
    assert writer.append(STEP) == 1
    writer.close()


def test_of_many_that_open_at_once_exactly_one_can_write(url):
    opened: list[PostgresJournal] = []
    threads = [threading.Thread(target=lambda: opened.append(PostgresJournal(url))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(journal.term for journal in opened) == [1, 2, 3, 4, 5, 6]
    written = []
    for journal in opened:
        try:
            written.append((journal.term, journal.append(STEP)))
        except Superseded:
            continue
    assert written == [(6, 1)]
    for journal in opened:
        journal.close()


def test_appends_that_race_with_a_take_over_are_before_it_or_nowhere(url):
    """Whatever was acknowledged to the old one is what the new one reads, to the step."""
    old = PostgresJournal(url)
    acknowledged = [old.append(STEP)]
    has_begun = threading.Event()

    def write_on():
        try:
            while True:
                acknowledged.append(old.append(STEP))
                has_begun.set()
        except Superseded:
            pass

    writer = threading.Thread(target=write_on)
    writer.start()
    has_begun.wait()
    newer = PostgresJournal(url)
    found = [seq for seq, _ in newer.read()]
    first = newer.append(Step(now_s=9.0))
    writer.join()
    assert acknowledged == found
    assert first == found[-1] + 1
    old.close()
    newer.close()


def test_a_connection_that_was_cut_is_opened_again(url):
    journal = PostgresJournal(url)
    journal.append(STEP)
    end_backends(url)
    assert journal.append(STEP) == 2
    end_backends(url)
    assert len(list(journal.read())) == 2
    assert journal.term == 1
    journal.close()


def insert_next(connection, journal):
    """What the journal's own attempt would do, on another connection."""
    row = link(journal.newest, journal.term, PLAIN.now_s, encode_step(PLAIN))
    connection.execute(postgres._APPEND, row._asdict())


def test_a_step_whose_answer_was_lost_is_recorded_once(url):
    """The commit went through and the connection broke before the answer: the attempt that follows finds the step."""
    journal = PostgresJournal(url)
    journal.append(STEP)
    with psycopg.connect(url) as behind:
        insert_next(behind, journal)
    assert journal.append(PLAIN) == 2
    assert journal.append(PLAIN) == 3
    assert len(list(journal.read())) == 3
    journal.close()


def test_an_insert_that_is_still_on_its_way_is_waited_for_and_not_doubled(url):
    journal = PostgresJournal(url)
    journal.append(STEP)
    late = psycopg.connect(url)
    insert_next(late, journal)
    seqs = []
    writer = threading.Thread(target=lambda: seqs.append(journal.append(PLAIN)))
    writer.start()
    with psycopg.connect(url, autocommit=True) as looker:
        query = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        while looker.execute(query).fetchone()[0] == 0:
            pass
    late.commit()
    writer.join()
    late.close()
    assert seqs == [2]
    assert len(list(journal.read())) == 2
    journal.close()


def test_a_database_that_lost_steps_is_found_out(url):
    journal = PostgresJournal(url)
    for _ in range(3):
        journal.append(STEP)
    with psycopg.connect(url) as behind:
        behind.execute("DELETE FROM springtide_steps WHERE seq > 1")
    with pytest.raises(JournalError, match="ends at step 1, but step 3 was written here last") as found:
        journal.append(STEP)
    assert not isinstance(found.value, Superseded)
    assert count_steps(url) == 1
    journal.close()


def test_another_schema_is_refused_with_the_mend(url):
    PostgresJournal(url).close()
    with psycopg.connect(url) as connection:
        connection.execute("UPDATE springtide_meta SET value = '99' WHERE key = 'schema'")
    with pytest.raises(JournalError, match="schema 99, this version reads up to 2: it was written by a newer version"):
        PostgresJournal(url)


def test_a_damaged_step_is_named(url):
    journal = PostgresJournal(url)
    journal.append(STEP)
    with psycopg.connect(url) as connection:
        connection.execute("UPDATE springtide_steps SET step = '{'::bytea")
    with pytest.raises(JournalError, match=r"step 1 of the journal .*was changed after it was written"):
        list(journal.read())
    journal.close()


def test_what_is_committed_is_synced_even_where_the_database_would_not(url):
    name = url.rpartition("/")[2]
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {name} SET synchronous_commit = off")
    with psycopg.connect(url) as connection:
        assert connection.execute("SHOW synchronous_commit").fetchone() == ("off",)
    journal = PostgresJournal(url)
    assert journal._connection.execute("SHOW synchronous_commit").fetchone() == ("on",)
    journal.close()


def test_no_password_is_ever_shown(server):
    wrong = server.postgres_url("nowhere")
    with pytest.raises(JournalError) as found:
        PostgresJournal(wrong)
    assert server.password not in str(found.value)
    assert f"postgresql://127.0.0.1:{server.port}/nowhere cannot be opened" in str(found.value)


def test_a_journal_is_opened_by_url(url, tmp_path, monkeypatch):
    by_url = open_journal(url, tmp_path, holder="pod-a")
    assert isinstance(by_url, PostgresJournal)
    assert by_url.holder() == (1, "pod-a")
    by_url.close()
    for number, (given, path) in enumerate(
        [("", tmp_path / "journal.db"), (f"sqlite://{tmp_path}/other.db", tmp_path / "other.db")]
    ):
        journal = open_journal(given, tmp_path)
        assert isinstance(journal, SqliteJournal)
        assert path.exists()
        assert journal.term == 1, number
        journal.close()
        again = open_journal(given, tmp_path)
        assert again.term == 2
        again.close()
    for wrong in ("mysql://host/db", "sqlite://host/path", "sqlite:///", "postgresql"):
        with pytest.raises(InvalidRequest, match="it is one of: postgresql://"):
            open_journal(wrong, tmp_path)
    monkeypatch.setitem(sys.modules, "springtide.control.journal.postgres", None)
    with pytest.raises(InvalidRequest, match=r"pip install 'springtide\[postgres\]'"):
        journals.open_journal(url, tmp_path)


class Quiet:
    """An executor in which one thing after another happens, and that counts what it is told to begin."""

    def __init__(self):
        self.num_acknowledged = 0

    def wait(self, deadline_s):
        return [PlatformStarted()]

    def acknowledge(self, events):
        self.num_acknowledged += 1

    def start(self, action):
        raise AssertionError("nothing is decided here")


class Still:
    def now_s(self):
        return 1.0


def test_the_loop_ends_when_its_journal_was_taken_over(url):
    from springtide.control.controller import Controller
    from springtide.scheduling.registry import make_live_policy

    journal = PostgresJournal(url)
    executor = Quiet()
    seqs = []
    newer = []

    def on_step(seq, step):
        seqs.append(seq)
        if seq == 3:
            newer.append(PostgresJournal(url))

    controller = Controller(make_live_policy("springtide"))
    with pytest.raises(Superseded):
        run(controller, executor, Still(), journal, until=lambda: False, on_step=on_step)
    assert seqs == [1, 2, 3]
    # The third was recorded before the other came; the fourth was not acknowledged.
    assert executor.num_acknowledged == 3
    assert count_steps(url) == 3
    newer[0].close()
    journal.close()


WRITER = """
import sys
from springtide.control.journal.postgres import PostgresJournal
from springtide.core.errors import Superseded
from springtide.core.ports import Step
journal = PostgresJournal(sys.argv[1], holder="child")
try:
    while True:
        print(journal.append(Step(now_s=1.0)), flush=True)
except Superseded as error:
    print(error, flush=True)
    sys.exit(3)
"""


@pytest.mark.slow
def test_a_process_that_slept_through_a_take_over_writes_nothing_when_it_wakes(url):
    child = subprocess.Popen([sys.executable, "-c", WRITER, url], stdout=subprocess.PIPE, text=True)
    try:
        acknowledged = [int(child.stdout.readline()) for _ in range(5)]
        os.kill(child.pid, signal.SIGSTOP)
        newer = PostgresJournal(url)
        found = [seq for seq, _ in newer.read()]
        first = newer.append(Step(now_s=2.0))
        os.kill(child.pid, signal.SIGCONT)
        said, _ = child.communicate()
    finally:
        child.kill()
        child.wait()
    lines = said.splitlines()
    acknowledged += [int(line) for line in lines[:-1]]
    assert "another control plane has taken over" in lines[-1]
    assert child.returncode == 3
    # What had reached the database before is whole; after the other's first step there is nothing of the child's.
    assert set(acknowledged) <= set(found)
    assert len(found) - len(acknowledged) <= 1
    with psycopg.connect(url) as connection:
        terms = connection.execute("SELECT term FROM springtide_steps WHERE seq >= %s", (first,)).fetchall()
    assert terms == [(2,)]
    newer.close()


@pytest.mark.slow
def test_a_server_that_dies_and_comes_back_has_every_acknowledged_step(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pg")
    # The user that runs the server must be able to enter it.
    for parent in [folder, *folder.parents]:
        if parent.stat().st_uid == os.getuid() and parent.stat().st_mode & 0o011 == 0:
            parent.chmod(parent.stat().st_mode | 0o011)
    with running_postgres(folder=folder) as first:
        journal = PostgresJournal(first.postgres_url())
        seqs = [journal.append(Step(now_s=float(n))) for n in range(20)]
        first.kill()
        # A process that serves a connection notices a moment later that the server is gone.
        with pytest.raises(JournalError, match="cannot be written"):
            append_until_it_fails(journal, seqs)
    with running_postgres(folder=folder, port=first.port, password=first.password) as second:
        last = journal.append(STEP)
        assert last == len(seqs) + 1
        assert [seq for seq, _ in journal.read()] == [*seqs, last]
        assert second.port == first.port
        journal.close()


def read_as_a_writer(url):
    with contextlib.closing(PostgresJournal(url)) as journal:
        return list(journal.read())


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ("DELETE FROM springtide_steps WHERE seq = 3", "step 3 of the journal is missing: step 4 stands there"),
        ("DELETE FROM springtide_steps WHERE seq > 4", "the journal ends at step 4, but step 6 was acknowledged"),
        ("DELETE FROM springtide_steps", "the journal ends at step 0, but step 6 was acknowledged"),
        ("UPDATE springtide_steps SET now_s = 9 WHERE seq = 2", "step 2 of the journal was changed"),
        ("UPDATE springtide_meta SET value = '2' WHERE key = 'clock'", "step 1 of the journal or what the journal was"),
    ],
)
def test_edits_are_noticed_named_and_repaired(url, edit, said):
    journal = PostgresJournal(url)
    journal.set_meta("clock", "1")
    for n in range(6):
        journal.append(Step(now_s=float(n)))
    journal.close()
    with psycopg.connect(url) as connection:
        connection.execute(edit)
    with contextlib.closing(read_journal(url, None)) as reader:
        report = inspect_journal(reader)
    assert report.problem.startswith(said)
    with pytest.raises(JournalDamaged):
        read_as_a_writer(url)
    if report.num_sound:
        assert cut_journal(url, None, report.damaged_seq) == "springtide_steps_damaged_1"
        again = PostgresJournal(url)
        assert [seq for seq, _ in again.read()] == list(range(1, report.damaged_seq))
        assert again.append(STEP) == report.damaged_seq
        again.close()


def test_a_journal_of_the_first_schema_is_converted_and_kept(url):
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE springtide_meta (key text PRIMARY KEY, value text NOT NULL)")
        connection.execute("INSERT INTO springtide_meta VALUES ('schema', '1'), ('clock_began_unix_s', '7.0')")
        connection.execute(
            "CREATE TABLE springtide_term (only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row), "
            "term bigint NOT NULL, holder text NOT NULL, taken_at timestamptz NOT NULL DEFAULT now())"
        )
        connection.execute("INSERT INTO springtide_term (term, holder) VALUES (4, 'old')")
        connection.execute(
            "CREATE TABLE springtide_steps (seq bigint PRIMARY KEY, term bigint NOT NULL, "
            "now_s double precision NOT NULL, step bytea NOT NULL)"
        )
        for n in range(1, 6):
            step = encode_step(Step(now_s=float(n), events=STEP.events))
            connection.execute("INSERT INTO springtide_steps VALUES (%s, %s, %s, %s)", (n, 3, float(n), step))
    with pytest.raises(JournalError, match="converts it when it starts"):
        read_journal(url, None)
    journal = PostgresJournal(url)
    assert journal.term == 5
    assert [step.now_s for _, step in journal.read()] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert [row.term for row in journal.rows()] == [3] * 5
    assert journal.append(STEP) == 6
    journal.close()
    again = PostgresJournal(url)
    assert len(list(again.read())) == 6
    again.close()
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT count(*) FROM springtide_steps_schema_1").fetchone() == (5,)


@pytest.fixture
def cuts(url, monkeypatch):
    """A journal of two hours that was cut often, and the state at its end."""
    monkeypatch.setattr("springtide.control.upkeep.SNAPSHOT_STEPS", 50)
    monkeypatch.setattr("springtide.control.upkeep.STAYS_S", 600.0)
    monkeypatch.setattr("springtide.control.journal.archive.SEGMENT_STEPS", 30)
    controller, journal = bare_controller(), PostgresJournal(url)
    years = Years(journal, JournalUpkeep(controller, journal, Retention()), controller, 10)
    years.run(2.12 * 3600.0, 60.0, 1800.0)
    yield journal, data_of(controller.state)
    journal.close()


def state_at_start(journal):
    controller = bare_controller()
    replay(controller, journal, snapshots=journal.archive.snapshots())
    return data_of(controller.state)


@pytest.mark.slow
def test_it_begins_at_a_snapshot_and_keeps_every_step_in_segments(url, cuts):
    journal, state = cuts
    assert state_at_start(journal) == state
    assert count_steps(url) < 110
    assert len(journal.archive.segments()) > 5
    assert [row.seq for row in journal.rows()] == list(range(1, journal.newest.seq + 1))
    assert [seq for seq, _ in journal.read(33)] == list(range(34, journal.newest.seq + 1))
    assert journal.ended.get("job-3").record.lifecycle.state == "SUCCEEDED"
    assert journal.ended.with_key("job-3").job.name == "job-3"
    owned = journal.ended.get("job-4")
    container = ContainerSettings(owner_uid="uid-4")
    owned = replace(owned, record=replace(owned.record, job=replace(owned.record.job, container=container)))
    journal.ended.put([owned])
    report = inspect_journal(journal)
    assert (report.damaged_past, report.damaged_seq, report.begins_at) == ("", None, 1)
    journal.cut(b"", 9000.0, Retention(steps_bytes=1000, ended_s=3600.0), lambda name: None)
    assert journal.ended.dropped_at_s("job-3") is not None
    assert (journal.ended.of_owner("uid-4"), journal.ended.owned()) == (owned.record, [("job-4", "uid-4")])
    journal.ended.release("job-4")
    assert (journal.ended.of_owner("uid-4"), journal.ended.owned()) == (None, [])
    assert len(journal.archive.segments()) == 1
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT count(*) FROM springtide_segment_contents").fetchone() == (1,)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("edit", "damage"),
    [
        ("UPDATE springtide_snapshots SET blob = set_bit(blob, 99, 1 - get_bit(blob, 99))", "a snapshot of the state"),
        (
            "UPDATE springtide_segment_contents SET content = set_bit(content, 99, 1 - get_bit(content, 99))",
            "segment of",
        ),
        ("UPDATE springtide_segments SET sha256 = '' WHERE first_seq = 21", "the segment of steps 21 to 40"),
        ("UPDATE springtide_ended SET record = set_bit(record, 99, 1 - get_bit(record, 99))", "has ended was changed"),
    ],
)
def test_damage_beside_the_steps_is_told_and_not_used(url, cuts, edit, damage):
    journal, state = cuts
    with psycopg.connect(url) as connection:
        connection.execute(edit)
    assert state_at_start(journal) == state
    assert damage in inspect_journal(journal).damaged_past


@pytest.mark.slow
def test_a_control_plane_of_an_older_term_cuts_nothing(url, cuts):
    journal, _ = cuts
    before = len(journal.archive.segments()), journal.archive.newest_mark()
    newer = PostgresJournal(url)
    newer.append(STEP)
    with pytest.raises(Superseded):
        journal.cut(b"", 9000.0, Retention(), lambda name: None)
    with pytest.raises(Superseded):
        journal.ended.put([])
    assert (len(newer.archive.segments()), newer.archive.newest_mark()) == before
    newer.close()
