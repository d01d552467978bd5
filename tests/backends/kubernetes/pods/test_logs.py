"""What pods write, followed into files: once each, in order, whatever breaks on the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from springtide.backends.kubernetes.client.errors import NoSuchObject, Unreachable
from springtide.backends.kubernetes.client.kinds import Key
from springtide.backends.kubernetes.pods import logs as pod_logs
from springtide.backends.kubernetes.pods.logs import PodLogs
from springtide.backends.kubernetes.pods.state import Acknowledgement, PodLifecycle, PodState
from springtide.storage.step_lines import pack_lines, unpack_lines


class Kubelet:
    """Answers each request for output with the next of `answers`: lines, then an error where one is."""

    def __init__(self, pod: PodState, *answers: list[Any]) -> None:
        self.pod = pod
        self.answers = list(answers)
        self.asked: list[dict[str, Any]] = []

    async def logs(self, key: Key, **options: Any) -> AsyncIterator[bytes]:
        self.asked.append(options)
        answer = self.answers.pop(0) if self.answers else []
        if not self.answers:
            self.pod.state = PodLifecycle.OVER
        for line in answer:
            if isinstance(line, Exception):
                raise line
            yield line


def make_pod() -> PodState:
    return PodState(
        replica_id="job.0",
        workload_id="job",
        key=Key("ml", "job-0"),
        device_ids=("n/0",),
        node_id="n",
        uid="u",
        state=PodLifecycle.RUNNING,
    )


def line(second: int, text: str, part: int = 0) -> bytes:
    return f"2026-01-01T00:00:{second:02}.{part:09}Z {text}".encode()


def follow(path: Path, *answers: list[Any], max_log_bytes: int = 1 << 20) -> Kubelet:
    pod = make_pod()
    kubelet = Kubelet(pod, *answers)
    done: list[PodState] = []

    class Thread:
        def run(self, task: Any) -> Any:
            self.task = task

    thread = Thread()
    logs = PodLogs(thread, lambda pod: path, done.append, max_log_bytes=max_log_bytes)  # type: ignore[arg-type]
    logs.follow(pod)
    assert Acknowledgement.LOGS in pod.awaiting
    asyncio.run(thread.task(kubelet))
    assert done == [pod]
    return kubelet


@pytest.fixture(autouse=True)
def promptly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_logs, "_BACKOFF_S", (0.0, 0.0))


def test_a_stream_that_breaks_is_taken_up_without_loss_or_repetition(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "job.0.log"
    kubelet = follow(
        path,
        [line(1, "a"), line(2, "b", 5), Unreachable("the connection broke")],
        # The API knows whole seconds only: what was read of the second already comes again.
        [line(2, "a again", 1), line(2, "b", 5), line(2, "c", 6), line(3, "d e")],
    )
    assert path.read_text() == "a\nb\nc\nd e\n"
    assert [each["since_time"] for each in kubelet.asked] == ["", "2026-01-01T00:00:02Z", "2026-01-01T00:00:03Z"]
    assert [each["follow"] for each in kubelet.asked] == [True, True, False], "once more when it has ended"


def test_what_a_kubelet_says_in_place_of_output_is_none(tmp_path: Path) -> None:
    path = tmp_path / "job.0.log"
    path.write_text("kept by an earlier control plane\n")
    follow(path, [b"unable to retrieve container logs for containerd://abc", b"NotFound desc = gone"], [])
    assert path.read_text() == "kept by an earlier control plane\n"


def test_what_an_earlier_control_plane_kept_is_replaced_by_the_whole(tmp_path: Path) -> None:
    path = tmp_path / "job.0.log"
    path.write_text("a\n")
    follow(path, [line(1, "a"), line(2, "b")], [])
    assert path.read_text() == "a\nb\n"


def test_a_pod_that_is_gone_has_no_more_to_say(tmp_path: Path) -> None:
    kubelet = follow(tmp_path / "log", [line(1, "a")], [NoSuchObject(404, "NotFound", "no such pod")])
    assert len(kubelet.asked) == 2
    assert (tmp_path / "log").read_text() == "a\n"


def test_output_without_end_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_logs, "_CHECK_BYTES", 1000)
    path = tmp_path / "log"
    follow(path, [line(n % 60, "x" * 99, n) for n in range(60)], [], max_log_bytes=2000)
    assert path.stat().st_size <= 3100
    assert (tmp_path / "log.1").exists()


def test_what_a_pod_says_of_the_step_log_is_kept_apart(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "job.0.log"
    lines = [(step, f'{{"generation": 1, "step": {step}}}') for step in range(1, 101)]
    said = [line(3, text, part) for part, text in enumerate(pack_lines(lines))]
    follow(path, [line(1, "a"), *said, line(4, "b")], [])
    assert path.read_text() == "a\nb\n"
    assert unpack_lines((tmp_path / "logs" / "job.0.steps").read_text().splitlines()) == lines
    assert (tmp_path / "logs" / "job.0.ended").exists()
    # Followed anew, from its beginning.
    follow(path, [line(1, "a")], [])
    assert not (tmp_path / "logs" / "job.0.steps").exists()


def test_what_is_said_without_end_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_logs, "_MAX_STEPS_BYTES", 1000)
    path = tmp_path / "job.0.log"
    follow(path, [line(n % 60, "springtide-steps: " + "x" * 90, n) for n in range(60)], [])
    assert (tmp_path / "job.0.steps").stat().st_size <= 1000


def test_a_pod_that_goes_on_when_the_control_plane_ends_has_not_ended(tmp_path: Path) -> None:
    path = tmp_path / "job.0.log"
    pod = make_pod()

    class Endless(Kubelet):
        async def logs(self, key: Key, **options: Any) -> AsyncIterator[bytes]:
            yield line(1, "a")
            self.begun.set()
            await asyncio.Event().wait()

    class Thread:
        def run(self, task: Any) -> Any:
            self.task = task

    async def cut_off(is_over: bool) -> None:
        thread, kubelet = Thread(), Endless(pod)
        kubelet.begun = asyncio.Event()  # type: ignore[attr-defined]
        logs = PodLogs(thread, lambda _: path, lambda _: None)  # type: ignore[arg-type]
        logs.follow(pod)
        stream = asyncio.ensure_future(thread.task(kubelet))
        await kubelet.begun.wait()  # type: ignore[attr-defined]
        pod.state = PodLifecycle.OVER if is_over else PodLifecycle.RUNNING
        stream.cancel()
        await asyncio.wait([stream])

    asyncio.run(cut_off(is_over=False))
    assert path.read_text() == "a\n"
    assert not path.with_suffix(".ended").exists()
    asyncio.run(cut_off(is_over=True))
    assert path.with_suffix(".ended").exists()
