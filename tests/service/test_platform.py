"""A platform on more than one machine: its journal elsewhere, its nodes coming and going, its sources kept."""

from __future__ import annotations

import threading
from pathlib import PurePosixPath

import pytest

from kits.servers import missing_postgres, running_postgres
from kits.service.api_fixtures import job_body, service_body
from springtide.backends.inbox import Inbox
from springtide.control.journal.journal import open_journal
from springtide.control.journal.postgres import PostgresJournal
from springtide.core.actions import StartReplica
from springtide.core.decision import Overheads
from springtide.core.errors import BackendError, StorageError
from springtide.core.events import ClockAnchored, NodeJoined, NodeLost, PlatformStarted
from springtide.core.resources import make_node
from springtide.core.status.pods import ClusterStatus
from springtide.core.status.shares import SharingStatus
from springtide.service.assembly.pool_settings import tide_of
from springtide.service.platform import Platform, PlatformBuild
from springtide.service.submission.schemas import JobIn, JobSourceIn, ServiceIn
from springtide.service.submission.source_stores import DirectorySources, ObjectSources
from springtide.service.submission.submission import SubmissionService
from springtide.storage.stores.checked import CheckedStore
from springtide.storage.stores.files import FileStore


class Machines:
    """An executor that runs nothing and notes what it is told, in order."""

    def __init__(self, clock, nodes):
        self.inbox = Inbox(clock)
        self.nodes_now = nodes
        self.notes = []
        self.started = []
        self.standing = None

    def nodes(self):
        return self.nodes_now

    def post(self, event):
        self.notes.append(event)
        self.inbox.post(event)

    def recover(self, standing):
        self.notes.append("recover")
        self.standing = standing

    def start(self, action):
        self.started.append(action)

    def wait(self, deadline_s):
        return self.inbox.wait(deadline_s)

    def acknowledge(self, events):
        self.inbox.take_sources(events)

    def sharing(self):
        return SharingStatus()


class Control:
    """One control plane on a state directory that is its own, with journal and store elsewhere."""

    def __init__(self, folder, journal_url, store_url, nodes, day_s=None):
        self.machines = None
        self.superseded = []
        self.has_ended = threading.Event()
        store = CheckedStore(FileStore(store_url, is_durable=False))

        def make(clock):
            self.machines = Machines(clock, nodes)
            return self.machines

        self.platform = Platform(
            folder,
            "springtide",
            (),
            make,
            tide=tide_of(day_s),
            build=PlatformBuild(
                journal=open_journal(journal_url, folder, holder=folder.name),
                source_store=ObjectSources(store, folder),
                nodes=lambda: self.machines.nodes(),
                store_url=f"file://{store_url}",
                overheads=Overheads(change_s=6.0),
                cluster=lambda: ClusterStatus(server="https://somewhere"),
                on_superseded=self.superseded.append,
            ),
        )

    def start(self):
        self.platform.start(on_stop=self.has_ended.set)
        return self

    def end(self):
        self.platform.request_shutdown(stop_workers=False)
        self.platform.join(timeout_s=20.0)


@pytest.fixture
def make(tmp_path):
    made = []

    def make(name, nodes, journal_url="", day_s=None):
        (tmp_path / name).mkdir(exist_ok=True)
        url = journal_url or f"sqlite://{tmp_path}/journal.db"
        made.append(Control(tmp_path / name, url, tmp_path / "objects", nodes, day_s))
        return made[-1]

    yield make
    for control in made:
        if control.platform._thread.is_alive():
            control.end()


def settled(control):
    """What its loop knows once everything that was posted is in the journal."""
    control.platform.submit(PlatformStarted())
    return control.platform.view()


def test_nodes_are_compared_with_the_journal_before_anything_is_recovered(make):
    first = make("first", (make_node("a", 2), make_node("b", 1))).start()
    assert {node.node_id for node in settled(first).nodes} == {"a", "b"}
    assert [type(note) for note in first.machines.notes[:3]] == [ClockAnchored, NodeJoined, NodeJoined]
    assert first.machines.notes[3] == "recover"
    # At run time the executor tells by itself.
    first.machines.post(NodeJoined(node=make_node("c", 4)))
    first.machines.post(NodeLost(node_id="a"))
    assert {node.node_id for node in settled(first).nodes} == {"b", "c"}
    first.end()

    second = make("second", (make_node("c", 4), make_node("d", 1))).start()
    assert {node.node_id for node in settled(second).nodes} == {"c", "d"}
    assert second.machines.notes[1:4] == [
        NodeLost(node_id="b"),
        NodeJoined(node=make_node("d", 1)),
        "recover",
    ]


def test_who_runs_on_a_node_that_is_not_there_now_is_the_executors_to_judge(make):
    """Pods are looked for wherever they are: no replica is left out of what should be standing."""
    first = make("first", (make_node("a", 2),)).start()
    desk = SubmissionService(first.platform)
    settled(first)
    record, _ = desk.submit_job(JobIn.model_validate(job_body()), None)
    settled(first)
    starts = [action for action in first.machines.started if isinstance(action, StartReplica)]
    assert {start.workload_id for start in starts} == {record.workload_id}
    first.end()
    second = make("second", ()).start()
    settled(second)
    named = {*(start.replica_id for start in second.machines.standing.replicas)}
    named |= {action.replica_id for action in second.machines.standing.actions if isinstance(action, StartReplica)}
    assert named == {start.replica_id for start in starts}


def test_sources_survive_a_control_plane_that_comes_back_with_an_empty_directory(make, tmp_path):
    first = make("first", (make_node("a", 1),)).start()
    body = job_body(source__files={"net.py": "WIDTH = 3\n"}, source__import_root="/nowhere/of/mine")
    record, is_new = SubmissionService(first.platform).submit_job(JobIn.model_validate(body), "key-1")
    service = SubmissionService(first.platform).deploy_service("echo", ServiceIn.model_validate(service_body()))
    assert is_new
    entrypoint = record.job.entrypoint
    assert entrypoint.source_path == f"workloads/{record.workload_id}/source/digits.py"
    assert entrypoint.import_root == ""
    assert service.service.entrypoint.source_path.startswith("workloads/echo/source/")
    first.end()

    second = make("second", (make_node("a", 1),)).start()
    source_store = second.platform.source_store
    assert source_store.holds(entrypoint.source_path, body["source"]["text"])
    assert not source_store.holds(entrypoint.source_path, "something else")
    assert not source_store.holds("workloads/nobody/source/x.py", "")
    keys = CheckedStore(FileStore(tmp_path / "objects", is_durable=False)).keys(f"workloads/{record.workload_id}/")
    assert [key.rpartition("/")[2] for key in keys] == ["digits.py", "net.py"]
    # The same request under the same key is the same job, whichever control plane is asked.
    again, is_new = SubmissionService(second.platform).submit_job(JobIn.model_validate(body), "key-1")
    assert (again.workload_id, is_new) == (record.workload_id, False)
    assert not (tmp_path / "second" / "workloads" / record.workload_id / "source").exists()


def test_a_second_control_plane_on_the_same_sqlite_journal_gets_the_next_term(make):
    terms = []
    for name in ("first", "second"):
        control = make(name, ()).start()
        terms.append(control.platform._journal.term)
        control.end()
    assert terms == [1, 2]


def test_the_length_of_a_day_is_that_of_the_newest_start_also_after_a_snapshot(make):
    found = []
    for name, day_s in (("first", None), ("second", 120.0), ("third", 120.0)):
        control = make(name, (make_node("a", 1),), day_s=day_s).start()
        settled(control)
        found.append(control.platform._controller.state.tide)
        control.platform._controller.state.tide = found[-1].noted(1e5, 3)
        control.end()
        control.platform._upkeep.cut(control.platform.clock.now_s())
    assert [tide.day_s for tide in found] == [86_400.0, 120.0, 120.0]
    # Of a day of another length the present need is known, of the same one its past, too.
    assert [tide.level for tide in found] == [None, 3, 3]
    assert found[2].open_bin == int(1e5 / found[1].bin_s)


def test_workers_go_on_after_a_failure_of_the_control_loop(make, monkeypatch):
    control = make("only", (make_node("a", 1),)).start()
    settled(control)
    assert control.platform.stop_workers

    def fail(now_s, events):
        raise KeyError("a bug")

    monkeypatch.setattr(control.platform._controller, "step", fail)
    with pytest.raises(BackendError):
        control.platform.submit(NodeJoined(node=make_node("b", 1)), timeout_s=10.0)
    assert control.has_ended.wait(10.0)
    assert isinstance(control.platform.failure, KeyError)
    assert not control.platform.stop_workers


@pytest.mark.slow
@pytest.mark.skipif(bool(missing_postgres()), reason=missing_postgres() or "none")
def test_a_superseded_platform_says_so_and_begins_nothing_more(make):
    with running_postgres() as server:
        url = server.postgres_url()
        old = make("old", (make_node("a", 1),), url).start()
        settled(old)
        assert old.platform.failure is None
        newer = PostgresJournal(url, holder="newer")
        before = [seq for seq, _ in newer.read()]
        with pytest.raises(BackendError, match="did not record"):
            old.platform.submit(NodeJoined(node=make_node("b", 1)), timeout_s=1.0)
        assert old.has_ended.wait(10.0)
        assert "newer writes the journal in term 2" in str(old.superseded[0])
        assert old.platform.failure is old.superseded[0]
        assert old.machines.started == []
        assert [seq for seq, _ in newer.read()] == before
        assert {node.node_id for node in old.platform.view().nodes} == {"a"}
        old.platform.join(timeout_s=10.0)
        newer.close()


def test_the_logs_of_pods_that_are_gone_are_found_in_the_store(tmp_path):
    store = CheckedStore(FileStore(tmp_path / "objects", is_durable=False))
    source_store = ObjectSources(store, tmp_path / "state")
    store.put("workloads/a/logs/a.0.log", b"one\n")
    store.put("workloads/a/logs/a.1.log", b"two\n")
    store.put("workloads/a/logs/other.txt", b"no log\n")
    folder = tmp_path / "state" / "workloads" / "a" / "logs"
    folder.mkdir(parents=True)
    (folder / "a.1.log").write_text("what was followed while it r")
    (folder / "a.2.log").write_text("still runs\n")
    num_gets = store.requests().num_gets
    source_store.fetch_logs("a")
    source_store.fetch_logs("a")
    assert store.requests().num_gets == num_gets + 2
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        "a.0.log": "one\n",
        "a.1.log": "two\n",
        "a.2.log": "still runs\n",
    }
    source_store.fetch_logs("nobody")
    assert not (tmp_path / "state" / "workloads" / "nobody").exists()


def test_what_functions_wrote_elsewhere_is_found_unless_more_of_it_is_here(tmp_path):
    store = CheckedStore(FileStore(tmp_path / "objects", is_durable=False))
    source_store = ObjectSources(store, tmp_path / "state")
    for name in ("a.0.0.log", "a.0.1.log", "a.coordinator.log"):
        store.put(f"workloads/a/functions/logs/{name}", b"one\ntwo\n")
    store.put("workloads/a/functions/losses.jsonl", b"[1, 0.5, 8]\n")
    folder = tmp_path / "state" / "workloads" / "a" / "logs"
    folder.mkdir(parents=True)
    (folder / "a.0.0.log").write_text("one\ntwo\nthree\n")
    (folder / "a.0.1.log").write_text("one\n")
    source_store.fetch_logs("a")
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        "a.0.0.log": "one\ntwo\nthree\n",
        "a.0.1.log": "one\ntwo\n",
        "a.coordinator.log": "one\ntwo\n",
    }
    # It is written on here from now on.
    (folder / "a.0.1.log").write_text("")
    source_store.fetch_logs("a")
    assert (folder / "a.0.1.log").read_text() == ""


def test_what_a_job_on_functions_has_left_goes_with_the_rest_of_it(tmp_path):
    store = CheckedStore(FileStore(tmp_path / "objects", is_durable=False))
    for key in (
        "workloads/a/source/t.py",
        "workloads/a/functions/losses.jsonl",
        "jobs/a/state/000000004/0",
        "jobs/b/job",
    ):
        store.put(key, b"1")
    assert ObjectSources(store, tmp_path / "state").retire("a", keeps_artifacts=True) == 3
    assert store.keys("") == ["jobs/b/job", "workloads/a/head"]


def test_a_long_log_is_fetched_by_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr("springtide.service.submission.source_stores.MAX_FETCHED_LOG_BYTES", 8)
    store = CheckedStore(FileStore(tmp_path / "objects", is_durable=False))
    store.put("workloads/a/logs/a.0.log", b"first line\nlast\n")
    ObjectSources(store, tmp_path / "state").fetch_logs("a")
    assert (tmp_path / "state" / "workloads" / "a" / "logs" / "a.0.log").read_bytes() == b"ne\nlast\n"


def test_a_store_that_is_away_hides_no_log_that_is_here(tmp_path, caplog):
    store = CheckedStore(FileStore(tmp_path / "objects", is_durable=False))
    store.put("workloads/a/logs/a.0.log", b"one\n")

    def fail(prefix):
        raise StorageError("the store does not answer")

    store.keys = fail
    ObjectSources(store, tmp_path / "state").fetch_logs("a")
    assert "the store does not answer" in caplog.text


def test_a_state_directory_that_was_moved_says_so_before_its_workloads_fail(tmp_path):
    before, place = tmp_path / "before", PurePosixPath("workloads/fit-1/source/fit.py")
    DirectorySources(before).write(place, JobSourceIn(filename="fit.py", text="pass", object_name="fit"))
    address = DirectorySources(before).address(place)
    DirectorySources(before).check_not_moved({"fit-1": address, "other": "/elsewhere/workloads/other/a.py"})
    after = before.rename(tmp_path / "after")
    with pytest.raises(BackendError, match=f"ln -s {after} {before}"):
        DirectorySources(after).check_not_moved({"fit-1": address})
    before.symlink_to(after)
    DirectorySources(after).check_not_moved({"fit-1": address})
    # A file that is nowhere is the failure of its workload alone.
    (after / place).unlink()
    DirectorySources(after).check_not_moved({"fit-1": address})
