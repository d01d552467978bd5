"""What the tests of the API share: bodies that are taken, and a client that knows the token."""

from __future__ import annotations

import copy
import threading
import time

import uvicorn

TOKEN = "a-token-for-tests-0123456789"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
SOURCE = "def fit(ctx):\n    raise SystemExit('never run in the control plane')\n"
_JOB = {
    "name": "digits",
    "source": {"filename": "digits.py", "text": SOURCE, "object_name": "fit", "kind": "function"},
    "options": {"deadline_s": 600, "global_batch_size": 64, "num_epochs": 3, "min_workers": 1, "max_workers": 2},
}
_SERVICE = {
    "source": {"filename": "serve.py", "text": "class Digits:\n    pass\n", "object_name": "Digits", "kind": "class"},
    "options": {"min_replicas": 0, "max_replicas": 2, "slo_s": 0.2},
}


def job_body(**changes):
    """A job that is taken, with changes named by dotted paths written with __."""
    return _changed(_JOB, changes)


def service_body(**changes):
    return _changed(_SERVICE, changes)


def _changed(original, changes):
    body = copy.deepcopy(original)
    for path, value in changes.items():
        *folders, last = path.split("__")
        target = body
        for folder in folders:
            target = target[folder]
        target[last] = value
    return body


class Served:
    """The application on a real socket, for what a test client cannot show: answers that never end."""

    def __init__(self, app):
        self.server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=1))
        self.thread = threading.Thread(target=self.server.run)

    def __enter__(self):
        self.thread.start()
        while not self.server.started:
            time.sleep(0.005)
        port = self.server.servers[0].sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}"

    def __exit__(self, *_):
        self.server.should_exit = True
        self.thread.join()
