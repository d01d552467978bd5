"""A training job that lasts as long as a test says, and the proof that each of its steps was made once."""

from __future__ import annotations

import http.server
import json
import shutil
import subprocess
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import yaml

from kits.kubernetes.kube_http import Kube
from springtide.storage.workloads.store import open_workload_store

BATCH, NUM_SAMPLES = 16, 96
TINY = '''
"""A linear model on 96 seeded samples; every four samples are stretched, for as long as the test says."""
import time
import urllib.request
import torch

class Pace:
    def __init__(self, url):
        self.url, self.asked_s, self.pause_s = url, 0.0, 0.0

    def wait(self, num_samples):
        if time.monotonic() - self.asked_s > 1.0:
            self.asked_s = time.monotonic()
            try:
                with urllib.request.urlopen(self.url, timeout=10.0) as answer:
                    self.pause_s = float(answer.read())
            except OSError:
                pass
        time.sleep(self.pause_s * num_samples / 4)

def fit(ctx):
    pace = Pace(ctx.params["pace"])
    torch.manual_seed(7)
    x = torch.randn(96, 6)
    y = x @ torch.randn(6, 1) + 0.1 * torch.randn(96, 1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    model, optimizer = ctx.prepare(model, lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9))
    for batch in ctx.batches((x, y)):
        pace.wait(len(batch.x))
        ctx.step(torch.nn.functional.mse_loss(model(batch.x), batch.y))
    ctx.save()
'''


class Pace:
    """Tells the job how many seconds four samples of a step are to take; a step of one worker has four times four.

    What is slept away, two processors can do beside everything else.
    """

    def __init__(self, host: str, pause_s: float) -> None:
        pace = self
        self.pause_s = pause_s

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(str(pace.pause_s).encode())

            def log_message(self, *_: object) -> None:
                return

        self._server = http.server.ThreadingHTTPServer((host, 0), Handler)
        self.url = f"http://{host}:{self._server.server_port}/"
        self._thread = threading.Thread(target=self._server.serve_forever, name="pace")
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def paced_function(name: str, namespace: str, pace_url: str, num_epochs: int) -> dict[str, Any]:
    """An object whose job runs on one to two workers."""
    return {
        "apiVersion": "springtide.dev/v1alpha1",
        "kind": "TrainingFunction",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "source": {"function": "fit", "files": {"job.py": TINY}},
            "workers": "1..2",
            "epochs": num_epochs,
            "globalBatch": BATCH,
            "retries": 20,
            "params": {"pace": pace_url},
        },
    }


def apply(kubeconfig: Path, *objects: dict[str, Any]) -> None:
    """`kubectl apply -f -`, as people type it; where there is no kubectl, what it does."""
    if shutil.which("kubectl") is None:
        Kube(kubeconfig).apply(*objects)
        return
    command = ["kubectl", "--kubeconfig", str(kubeconfig), "apply", "-f", "-"]
    done = subprocess.run(command, input=yaml.safe_dump_all(objects), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def each_step_once(store_url: str, workload_id: str, num_epochs: int, *, num_restarts: int = 0) -> None:
    """Every step was committed once, whoever wrote it down, and every sample of every epoch was used once.

    Whoever comes to lead writes once more what may be missing: copies are allowed, a second commit is not, unless the
    job was restarted from a checkpoint or its beginning.
    """
    store = open_workload_store(store_url, workload_id)
    written = defaultdict(set)
    for key in store.store.keys(store.key("steps/")):
        for line in store.store.get(key).decode().splitlines():
            # Each member writes how long the step took by its own clock.
            record = {name: value for name, value in json.loads(line).items() if name != "took_s"}
            written[record["step"]].add(json.dumps(record))
    twice = {step: sorted(lines) for step, lines in written.items() if len(lines) != 1}
    assert num_restarts or not twice, f"committed more than once: {twice}"
    records = store.steps()
    num_steps = NUM_SAMPLES // BATCH * num_epochs
    held = {record["step"] for record in records}
    lacking = [step for step in range(1, num_steps + 1) if step not in held]
    assert not lacking, f"{len(lacking)} steps are not in the log, and of these it holds no copy: " + str(
        [step for step in lacking if step not in written]
    )
    assert [record["step"] for record in records] == list(range(1, num_steps + 1)) == sorted(written)
    generations = [record["generation"] for record in records]
    assert generations == sorted(generations)
    for epoch in range(num_epochs):
        assert sum(record["num_samples"] for record in records if record["epoch"] == epoch) == NUM_SAMPLES
    assert store.read_artifact("model.safetensors")
    store.close()
