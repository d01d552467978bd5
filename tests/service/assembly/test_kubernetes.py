"""A control plane that cannot lead yet: it refuses settings that cannot be, says that it waits, and ends when told."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from springtide.backends.kubernetes.settings import KubernetesSettings
from springtide.core.errors import BackendError, InvalidRequest
from springtide.service.assembly.kubernetes import ClusterOptions, serve_on_kubernetes

NOWHERE = """
apiVersion: v1
kind: Config
current-context: x
contexts: [{name: x, context: {cluster: x, user: x}}]
clusters: [{name: x, cluster: {server: "http://127.0.0.1:%d"}}]
users: [{name: x, user: {}}]
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def options(tmp_path, kubeconfig, **settings):
    asked = {"store_url": f"file://{tmp_path}/objects", "port": free_port(), "lease_s": 2.0, **settings}
    return ClusterOptions(
        settings=KubernetesSettings(**asked), state_dir=tmp_path / "state", kubeconfig=kubeconfig, host="127.0.0.1"
    )


def test_a_platform_without_an_object_store_is_refused(tmp_path):
    with pytest.raises(InvalidRequest, match="store_url must name the object store"):
        serve_on_kubernetes(options(tmp_path, tmp_path / "config", store_url=""))


def test_a_cluster_that_nobody_named_is_said(tmp_path):
    with pytest.raises(BackendError, match="no way to a Kubernetes cluster is known"):
        serve_on_kubernetes(options(tmp_path, tmp_path / "nowhere"))


def test_a_port_that_is_taken_is_said(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(BackendError, match="cannot be used"):
            serve_on_kubernetes(options(tmp_path, tmp_path / "nowhere", port=taken.getsockname()[1]))


def test_a_directory_that_another_control_plane_holds_is_refused(tmp_path):
    state = tmp_path / "state"
    state.mkdir()
    with open(state / "control-plane.lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(BackendError, match="give each a state directory of its own"):
            serve_on_kubernetes(options(tmp_path, tmp_path / "nowhere"))


@pytest.mark.slow
def test_while_the_api_server_is_away_it_lives_waits_and_ends_in_order(tmp_path):
    port = free_port()
    (tmp_path / "config").write_text(NOWHERE % free_port())
    (tmp_path / "settings.yaml").write_text(json.dumps({"store_url": f"file://{tmp_path}/objects", "port": port}))
    command = [sys.executable, "-m", "springtide", "k8s", "serve", "--settings", str(tmp_path / "settings.yaml")]
    command += ["--state", str(tmp_path / "state"), "--kubeconfig", str(tmp_path / "config"), "--host", "127.0.0.1"]
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "POD_NAME": ""})
    try:

        def ask(path):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5.0) as answer:
                    return answer.status, json.loads(answer.read())
            except urllib.error.HTTPError as error:
                with error:
                    return error.code, json.loads(error.read())
            except OSError:
                return 0, {}

        while ask("/healthz")[0] == 0:
            assert process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.05)
        assert ask("/healthz")[1]["role"] == "standby"
        assert ask("/readyz")[0] == 200
        assert ask("/v1/status")[0] == 503
        # Nobody was elected, so nothing was made: no journal, no token.
        assert not (tmp_path / "state" / "journal.db").exists()
        assert not (tmp_path / "state" / "token").exists()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20.0) == 0, (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait()
