"""`run --on k8s`, `deploy --on k8s` and `apply`: what is told while an object is watched, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner

from springtide.backends.kubernetes.client.kinds import Key
from springtide.cli.jobs import in_cluster
from springtide.cli.jobs.in_cluster import Watcher, check_cluster_options, deploy_in_cluster, final_text
from springtide.cli.main import cli
from springtide.client.serving_goals import ServeOptions
from springtide.client.sources.source import SourceFile
from springtide.core.errors import InvalidRequest


class Moments:
    def __init__(self):
        self.at_s = 0.0

    def __call__(self):
        return self.at_s


class Told:
    def __init__(self):
        self.lines = []
        self.now = Moments()
        self.watcher = Watcher(self.lines.append, "ml", self.now)

    def watch(self, *statuses, every_s=1.0):
        def states():
            for status in statuses:
                self.now.at_s += every_s
                yield {"status": status} if status is not None else {}

        return self.watcher.watch(states())


def running(percent, workers="2/1..4", **more):
    return {"state": "RUNNING", "workers": workers, "progress": f"{percent}%", "cost": "$0.10", **more}


END = {"state": "SUCCEEDED", "workers": "0/1..4", "progress": "100%", "reason": "the training function returned"}


def test_a_line_is_told_for_what_changes_and_not_for_a_cent_more():
    told = Told()
    starting = {"state": "STARTING", "workers": "0/1..4", "reason": "starting on 2 devices"}
    told.watch({**starting, "cost": "$0.01"}, {**starting, "cost": "$0.02"}, running(1), running(2), running(7), END)
    assert [line.split()[0] for line in told.lines] == ["STARTING", "RUNNING", "RUNNING", "SUCCEEDED"]
    assert "(starting on 2 devices)" in told.lines[0]
    assert "7%" in told.lines[2]


def test_a_slow_job_is_told_of_now_and_then():
    told = Told()
    told.watch(running(1), running(1), running(1), END, every_s=6.0)
    assert len([line for line in told.lines if line.startswith("RUNNING")]) == 2


def test_a_pod_that_waits_is_told_with_its_reason():
    told = Told()
    waiting = {"state": "STARTING", "workers": "0/1..4", "pods": [{"name": "p", "reason": "ImagePullBackOff: x"}]}
    told.watch(waiting, END)
    assert "(pod p: ImagePullBackOff: x)" in told.lines[0]


def test_silence_is_told_once_and_not_at_once():
    told = Told()
    told.watch(None, None, END)
    assert not any("control plane" in line for line in told.lines)
    told = Told()
    told.watch(*[None] * 12, END)
    assert [line for line in told.lines if "serves the namespace 'ml'" in line] == told.lines[:1]


def test_how_it_ended_is_told_as_for_any_other_job():
    told = Told()
    told.watch(running(1), running(30, "4/1..4"), running(60, "1/1..4"), END)
    status = {
        **END,
        "step": 128,
        "totalSteps": 128,
        "loss": "0.26",
        "deadline": "18:00:00 UTC",
        "slackSeconds": 192.0,
        "resizes": 2,
        "restarts": 0,
        "cost": "$0.42",
        "startedAt": "2030-01-31T12:00:00Z",
        "artifact": "workloads/a/artifacts/model.safetensors",
    }
    assert final_text("digits-1", status, told.watcher.workers).splitlines() == [
        "digits-1 SUCCEEDED  step 128/128  loss 0.26",
        "  deadline 18:00:00 UTC met by 3m12",
        "  workers 2 -> 4 -> 1, 2 resizes, 0 restarts, $0.42",
        "  model workloads/a/artifacts/model.safetensors",
    ]


def test_a_refusal_is_told_with_what_would_be_accepted():
    status = {"state": "REJECTED", "reason": "too late", "alternatives": ["--deadline 2h"]}
    assert final_text("a", status).splitlines() == [
        "a REJECTED",
        "  too late",
        "  it would be accepted with: --deadline 2h",
    ]


@pytest.mark.parametrize("name", ["namespace", "image"])
def test_what_only_a_cluster_knows_is_refused_elsewhere(name):
    with pytest.raises(InvalidRequest, match="add --on k8s"):
        check_cluster_options({name: "x"}, None)
    check_cluster_options({name: "x"}, in_cluster.K8S)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("kind: Deployment\nmetadata: {name: a}\n", "kubectl apply the rest"),
        ("a: [1\n", "is not valid YAML"),
        ("", "there is no object in it"),
        (
            "apiVersion: springtide.dev/v1alpha1\nkind: TrainingFunction\nmetadata: {name: a}\nspec: {sauce: {}}\n",
            "did you mean source",
        ),
    ],
)
def test_apply_says_what_is_wrong_with_a_file_before_any_cluster_is_asked(tmp_path, monkeypatch, text, told):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    (tmp_path / "a.yaml").write_text(text)
    result = CliRunner().invoke(cli, ["apply", "-f", str(tmp_path / "a.yaml")])
    assert result.exit_code != 0
    assert told in result.output


def test_run_in_a_cluster_takes_no_profile(tmp_path):
    (tmp_path / "a.py").write_text("import springtide as st\n@st.train\ndef fit(ctx): ...\n")
    (tmp_path / "profile.json").write_text("{}")
    result = CliRunner().invoke(
        cli, ["run", str(tmp_path / "a.py"), "--on", "k8s", "--profile", str(tmp_path / "profile.json")]
    )
    assert result.exit_code != 0
    assert "leave it out with --on k8s" in result.output
    assert isinstance(cli, click.Group)


def test_run_in_a_cluster_sends_the_folder_and_what_its_header_asks_for(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    project = tmp_path / "project"
    (project / "wheels").mkdir(parents=True)
    (project / "train.py").write_text(
        "# /// script\n# dependencies = ['./wheels/x-1-py3-none-any.whl']\n# ///\nimport net\n"
    )
    (project / "net.py").write_text("x = 1\n")
    (project / "data.bin").write_bytes(b"\xff")
    sent = []

    class Cluster:
        namespace = "ml"

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def create(self, obj, secrets, folder):
            sent.append((obj, folder))
            return obj

    monkeypatch.setattr("springtide.client.kubernetes.ClusterClient", Cluster)
    for options in ((), ("--no-folder",)):
        command = ["run", str(project / "train.py"), "--on", "k8s", "--detach", *options]
        result = CliRunner().invoke(cli, command)
        if options:
            assert result.exit_code == 2
            assert "which pods do not see; put it into the folder" in result.output
        else:
            assert result.exit_code == 0, result.output
            assert f"{project} travels with it: 3 files, " in result.output
    ((obj, folder),) = sent
    assert obj["spec"]["requirements"] == ["./wheels/x-1-py3-none-any.whl"]
    assert sorted(obj["spec"]["source"]["files"]) == ["net.py", "train.py"]
    assert (folder.sent.path, folder.sent.origin, folder.archive[:2]) == ("train.py", str(project), b"PK")


class Shown:
    """A session that keeps what it was told, and a cluster whose object goes through these statuses, 10 s apart."""

    def __init__(self, monkeypatch, *statuses):
        self.notes, self.answers, self.statuses, self.now_s = [], [], statuses, 0.0
        monkeypatch.setattr("springtide.client.kubernetes.ClusterClient", lambda: self)
        monkeypatch.setattr("springtide.client.kubernetes.inference_object", lambda *_, **__: {"metadata": {}})
        monkeypatch.setattr(in_cluster, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        self.namespace, self.note = "ml", self.notes.append

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def answer(self, value, text, hint=""):
        self.answers.append(text)

    def apply(self, obj, secrets, folder):
        obj = {"kind": "InferenceFunction", "metadata": {"name": "echo", "namespace": "ml", "generation": 2}}
        return SimpleNamespace(object=obj, verb="configured")

    def follow(self, kind, key):
        assert (kind, key) == ("InferenceFunction", Key("ml", "echo"))
        for status in self.statuses:
            self.now_s += 10.0
            yield {"status": status}
        pytest.fail("it still watches")

    def deploy(self):
        """The exit code of the command."""
        served = SimpleNamespace(source=lambda: SourceFile(filename="echo.py", text="x = 1\n"), name="echo")
        try:
            deploy_in_cluster(self, served, ServeOptions(), namespace="", image="")
        except click.exceptions.Exit as end:
            return end.exit_code
        return 0


def of_service(state, reason, ready, applied=("True", "InForce", ""), seen=2):
    conditions = [
        {"type": kind, "status": status, "reason": why, "message": text}
        for kind, (status, why, text) in (("Ready", ready), ("Applied", applied))
    ]
    return {"state": state, "reason": reason, "observedGeneration": seen, "conditions": conditions, "url": "http://x"}


UP = ("True", "ReplicasReady", "1 of 1 replicas ready")
OLD_ANSWERS = ("False", "Starting", "revision 1 answers until revision 2 is ready")


def test_a_deployed_service_is_ready_once_its_new_revision_answers(monkeypatch):
    before = of_service("READY", "1 of 1 replicas ready", UP, seen=1)
    old = of_service("READY", "1 of 1 replicas ready; revision 1 answers until revision 2 is ready", UP, OLD_ANSWERS)
    pulling = ("False", "PodsWaiting", "pod echo-1: pulls its image x since 16:52:05 UTC")
    gap = of_service("STARTING", "the first replica is loading revision 2", pulling)
    shown = Shown(monkeypatch, before, old, *[gap] * 20, of_service("READY", "1 of 1 replicas ready", UP))
    assert shown.deploy() == 0
    assert shown.now_s == 230.0, "what loads is not given up before the platform does"
    assert shown.notes == ["inferencefunction/echo configured in ml", OLD_ANSWERS[2], pulling[2]]
    assert shown.answers == ["echo READY: 1 of 1 replicas ready\n  http://x"]


def test_a_deployed_service_that_sleeps_or_waits_for_a_device_is_told_as_it_is(monkeypatch):
    asleep = of_service("IDLE", "scaled to zero", ("False", "Sleeping", "it sleeps until the first request"))
    assert Shown(monkeypatch, asleep).deploy() == 0
    waits = of_service("IDLE", "others have the devices", ("False", "Waiting", "others have the devices"))
    shown = Shown(monkeypatch, *[waits] * 13)
    assert shown.deploy() == 0
    assert shown.answers == ["echo IDLE: others have the devices\n  http://x"]


def test_a_new_revision_that_is_refused_or_rolled_back_is_no_success_although_the_old_one_answers(monkeypatch):
    given_up = ("False", "ChangeRefused", "revision 2 was rolled back: echo.1 was not ready within 3.0 s")
    shown = Shown(monkeypatch, of_service("READY", "1 of 1 replicas ready", UP, given_up))
    assert shown.deploy() == 1
    assert shown.answers == [f"echo READY: {given_up[2]}\n  http://x"]
    assert Shown(monkeypatch, of_service("FAILED", "crashed 4 times", ("False", "Failed", ""))).deploy() == 1


def test_a_deployed_service_that_no_control_plane_takes_in_is_no_success(monkeypatch):
    shown = Shown(monkeypatch, {})
    assert shown.deploy() == 1
    assert "serves the namespace 'ml'" in shown.notes[-1]
