"""A control plane that writes how long its turns take: what `springtide k8s serve` runs, with timers.

A turn begins when events are there and ends when the loop asks for more: decision, journal, and every action handed to
the executor. Lines of JSON, one for each turn: how long it was, how much of it was computing, how many actions it
began, how long the longest of them took to hand over. Beside them lines of seconds: how old news of a pod were when the
watch that all pods come by brought them, by the time that is written in the pod (the clock of this machine).
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import msgspec

from springtide.backends.kubernetes.client.cache import ObjectChange
from springtide.backends.kubernetes.client.kinds import Key
from springtide.backends.kubernetes.executor import KubernetesExecutor
from springtide.backends.kubernetes.install.settings_file import read_settings
from springtide.core.actions import Action
from springtide.core.events import Event
from springtide.service.assembly import kubernetes as kubernetes_assembly


class TimedExecutor:
    """Holds the executor; writes each turn of the loop to `turns` and the age of news to `news`."""

    turns: TextIO
    news: TextIO
    sent_annotation: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._executor = KubernetesExecutor(*args, **kwargs)
        self._began: tuple[float, float] | None = None
        self._longest_s = 0.0
        self._num_started = 0
        self._last_sent: dict[Key, str] = {}

    def __getattr__(self, name: str) -> Any:
        # Everything that is not measured is the executor's own.
        return getattr(self._executor, name)

    def open(self) -> None:
        """Open the executor, and listen to its pods."""
        self._executor.open()
        self._executor._pod_cache.listen(self._hear)

    def _hear(self, change: ObjectChange) -> None:
        if change.before is None or change.now is None:
            # Pods that exist at the start are not news.
            return
        sent = (change.now["metadata"].get("annotations") or {}).get(self.sent_annotation, "")
        if sent and sent != self._last_sent.get(change.key):
            self._last_sent[change.key] = sent
            self.news.write(f"{time.monotonic() - float(sent)}\n")

    def wait(self, deadline_s: float | None) -> Sequence[Event]:
        """Wait as the executor does; a turn ends here, and one begins when this returns something."""
        if self._began is not None:
            turn = (
                time.monotonic() - self._began[0],
                time.thread_time() - self._began[1],
                self._num_started,
                self._longest_s,
            )
            self.turns.write(msgspec.json.encode(turn).decode() + "\n")
        events = self._executor.wait(deadline_s)
        self._began, self._longest_s, self._num_started = (time.monotonic(), time.thread_time()), 0.0, 0
        return events

    def start(self, action: Action) -> None:
        """Begin an action as the executor does."""
        began_s = time.monotonic()
        self._executor.start(action)
        self._longest_s = max(self._longest_s, time.monotonic() - began_s)
        self._num_started += 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until told to end; the exit code is that of the control plane."""
    parser = argparse.ArgumentParser()
    for name in ("--settings", "--state", "--kubeconfig", "--turns", "--news"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--sent", required=True)
    chosen = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING)
    with chosen.turns.open("w", buffering=1) as turns, chosen.news.open("w", buffering=1) as news:
        TimedExecutor.turns, TimedExecutor.news, TimedExecutor.sent_annotation = turns, news, chosen.sent
        vars(kubernetes_assembly)["KubernetesExecutor"] = TimedExecutor
        return kubernetes_assembly.serve_on_kubernetes(
            kubernetes_assembly.ClusterOptions(
                settings=read_settings(chosen.settings),
                state_dir=chosen.state,
                kubeconfig=chosen.kubeconfig,
                host="127.0.0.1",
            )
        )


if __name__ == "__main__":
    sys.exit(main())
