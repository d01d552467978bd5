"""The commands against a double of the platform: what they ask it, print, and exit with."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from springtide.cli.main import COMMANDS, cli
from springtide.cli.session import Session
from springtide.core.errors import BackendError, InvalidRequest
from springtide.core.options import library_versions
from springtide.core.status.platform import JobStatus, ServiceStatus
from springtide.core.status.quote import Quote, Range

Run = Callable[..., Result]
MakeJob = Callable[..., JobStatus]
TRAINING = "import springtide as st\n@st.train(deadline='10m', epochs=3)\ndef fit(ctx): ...\n"
SERVING = """
import springtide as st
@st.serve
class Sentiment:
    def predict(self, texts: list[str], limit: int = 3) -> list[float]:
        return [0.0 for _ in texts]
"""


@pytest.fixture
def training_file(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(TRAINING, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_command_has_help_and_json(command: str, springtide: Run) -> None:
    result = springtide(command, "--help")
    assert result.exit_code == 0
    assert "--json" in result.output
    assert "--state" in result.output


def test_help_lists_every_command(springtide: Run) -> None:
    listed = springtide("--help").output
    assert all(f"  {command} " in listed for command in COMMANDS)


@pytest.mark.parametrize("arguments", [["statsu"], ["scale", "fit"], ["run"], ["up", "--slots", "0"], ["ps", "--no"]])
def test_wrong_use_is_exit_code_2(arguments: list[str], springtide: Run) -> None:
    result = springtide(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


def test_a_misspelt_command_names_the_right_one(springtide: Run) -> None:
    assert "did you mean `springtide status`?" in springtide("statsu").stderr


@pytest.mark.parametrize(("error", "code"), [(InvalidRequest("do this"), 2), (BackendError("do this"), 1)])
def test_errors_are_one_sentence(error: Exception, code: int, tmp_path: Path) -> None:
    def refuse(state_dir: Path) -> Any:
        raise error

    result = CliRunner().invoke(cli, ["ps"], obj=Session(given_state_dir=tmp_path, connect=refuse))
    assert (result.exit_code, result.stderr, result.stdout) == (code, "do this\n", "")


def test_ps(client: Any, springtide: Run, make_job: MakeJob, make_service: Callable[..., ServiceStatus]) -> None:
    assert "nothing runs yet" in springtide("ps").output
    client.add(make_job(), make_service())
    for index in range(7):
        client.add(make_job(job_id=f"old-{index}", state="SUCCEEDED"))
    output = springtide("ps").output
    assert output.startswith("1 of 2 devices held   policy elastic\n\nJOB ")
    assert "old-1 " not in output
    assert "old-6 " in output
    assert "(2 more ended jobs: springtide ps --all)" in output
    assert "old-0 " in springtide("ps", "--all").output


def test_json_is_the_status_and_nothing_else(client: Any, springtide: Run, make_job: MakeJob) -> None:
    client.add(make_job())
    answer = json.loads(springtide("ps", "--json").stdout)
    assert answer["jobs"][0]["job_id"] == "fit-3f2a"
    assert answer["policy"] == "elastic"
    assert json.loads(springtide("status", "fit", "--json").stdout)["loss"] == 0.412


@pytest.mark.parametrize("identifier", ["fit-3f2a", "fit", "fit-3"])
def test_ids_names_and_beginnings(identifier: str, client: Any, springtide: Run, make_job: MakeJob) -> None:
    client.add(make_job(), make_job(job_id="other-1", name="other"))
    assert springtide("status", identifier).output.startswith("fit-3f2a RUNNING: ")


def test_a_name_that_several_jobs_have(client: Any, springtide: Run, make_job: MakeJob) -> None:
    client.add(make_job(job_id="fit-1", state="SUCCEEDED"), make_job(job_id="fit-2"))
    assert springtide("status", "fit").output.startswith("fit-2 ")
    client.add(make_job(job_id="old-1", name="old", state="FAILED"))
    client.add(make_job(job_id="old-2", name="old", state="SUCCEEDED"))
    assert springtide("status", "old").output.startswith("old-2 ")
    client.add(make_job(job_id="fit-3"))
    result = springtide("status", "fit")
    assert result.exit_code == 2
    assert "'fit' could be any of fit-1, fit-2, fit-3" in result.stderr
    assert "there is no job 'nothing'" in springtide("status", "nothing").stderr


def test_why(client: Any, springtide: Run, make_job: MakeJob) -> None:
    client.add(make_job())
    assert springtide("why", "fit").output == (
        "fit-3f2a PENDING: all 2 devices are held\n"
        "  because sentiment holds local/1\n"
        "  you could:\n    springtide scale sentiment 0..1\n"
        "  what happened:\n    " + f"{datetime.fromtimestamp(0.5):%H:%M:%S}  submitted\n"
    )


def test_logs(client: Any, springtide: Run, make_job: MakeJob) -> None:
    client.add(make_job())
    assert springtide("logs", "fit", "--tail", "5").output == "[fit-3f2a-0] step 1\n"
    assert client.calls == [("logs", "fit-3f2a", {"replica": None, "tail": 5, "follow": False})]


@pytest.mark.parametrize(
    ("arguments", "call"),
    [
        (["scale", "fit", "1..4"], ("scale", "fit-3f2a", 1, 4)),
        (["scale", "sentiment", "0..2"], ("scale", "sentiment", 0, 2)),
        (
            ["change", "fit", "--deadline", "90m", "--budget", "none", "--soft", "--retries", "9"],
            ("change", "fit-3f2a", {"deadline_s": 5400.0, "budget_usd": None, "is_soft": True, "max_restarts": 9}),
        ),
        (["change", "fit", "--hard"], ("change", "fit-3f2a", {"is_soft": False})),
        (["move", "fit", "--to", "functions", "--quote"], ("quote_move", "fit-3f2a", None)),
        (["pause", "fit"], ("pause", "fit-3f2a")),
        (["resume", "fit"], ("resume", "fit-3f2a")),
        (["cancel", "fit"], ("cancel", "fit-3f2a")),
        (["cancel", "sentiment"], ("remove_service", "sentiment")),
    ],
)
def test_acting(
    arguments: list[str],
    call: tuple[Any, ...],
    client: Any,
    springtide: Run,
    make_job: MakeJob,
    make_service: Callable[..., ServiceStatus],
) -> None:
    client.add(make_job(), make_service())
    result = springtide(*arguments)
    assert result.exit_code == 0, result.output
    assert client.calls == [call]


def test_a_move_says_what_the_rest_would_take_and_then_asks_for_it(
    client: Any, springtide: Run, make_job: MakeJob
) -> None:
    client.add(make_job())
    client.quoted = Quote(
        verdict="accepted", reason="", finish_s=Range(p10=50.0, p90=60.0), cost_usd=Range(p10=0.004, p90=0.005)
    )
    result = springtide("move", "fit", "--to", "functions")
    assert result.exit_code == 0, result.output
    assert client.calls == [("quote_move", "fit-3f2a", None), ("move", "fit-3f2a", None)]
    assert "the rest of fit-3f2a on functions: done in 50.0 s .. 1m00, for $0.004 .. $0.005" in result.output
    assert "fit-3f2a leaves its machines at step 570" in result.output


def test_a_move_names_its_target(client: Any, springtide: Run, make_job: MakeJob) -> None:
    client.add(make_job())
    for arguments in ((), ("--to", "cluster")):
        assert springtide("move", "fit", *arguments).exit_code == 2
    assert client.calls == []


@pytest.mark.parametrize(
    "arguments", [["scale", "fit", "0"], ["scale", "fit", "many"], ["change", "fit"], ["pause", "sentiment"]]
)
def test_acting_wrongly_asks_nothing(
    arguments: list[str],
    client: Any,
    springtide: Run,
    make_job: MakeJob,
    make_service: Callable[..., ServiceStatus],
) -> None:
    client.add(make_job(), make_service())
    assert springtide(*arguments).exit_code == 2
    assert client.calls == []


def test_run_detached_submits_with_the_flags(
    client: Any, springtide: Run, make_job: MakeJob, training_file: str
) -> None:
    client.add(make_job())
    result = springtide("run", training_file, "--detach", "--workers", "1..2", "--param", "lr=0.1", "--batch", "64")
    assert result.exit_code == 0, result.output
    assert "springtide logs fit-3f2a -f" in result.output
    ((_, asked),) = client.calls
    assert asked["name"] == "fit"
    assert asked["source"].object_name == "fit"
    assert asked["options"]["deadline_s"] == 600.0
    assert (asked["options"]["max_workers"], asked["options"]["global_batch_size"]) == (2, 64)
    assert asked["options"]["params"] == {"lr": "0.1"}


def test_a_batch_may_be_given_bounds(client: Any, springtide: Run, make_job: MakeJob, training_file: str) -> None:
    client.add(make_job())
    flags = ("--batch", "64..512", "--max-local-batch", "32", "--learning-rate", "sqrt", "--length", "progress")
    result = springtide("run", training_file, "--detach", *flags)
    assert result.exit_code == 0, result.output
    ((_, asked),) = client.calls
    assert asked["options"]["global_batch_size"] == 64
    assert asked["options"]["batch"]["max_size"] == 512
    assert asked["options"]["batch"]["max_local_size"] == 32
    assert asked["options"]["batch"]["learning_rate"] == "sqrt"
    assert asked["options"]["length_unit"] == "progress"
    refused = springtide("run", training_file, "--learning-rate", "sqrt")
    assert "needs a batch that may change" in refused.output


def test_best_effort_drops_the_goal(client: Any, springtide: Run, make_job: MakeJob, training_file: str) -> None:
    client.add(make_job())
    springtide("run", training_file, "--detach", "--best-effort", "--budget", "4")
    ((_, asked),) = client.calls
    assert not {"deadline_s", "budget_usd"} & set(asked["options"])


@pytest.mark.slow
def test_run_watches_until_the_end(client: Any, springtide: Run, make_job: MakeJob, training_file: str) -> None:
    ended = make_job(state="SUCCEEDED", ended_at_s=479.0, num_workers=0, num_resizes=2, step=1000)
    client.add(make_job(), make_job(), make_job(num_workers=1, num_resizes=2), ended)
    result = springtide("run", training_file)
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0].endswith("travels with the job: 1 file, 78 B")
    assert lines[1].startswith("fit-3f2a RUNNING 2 workers [###")
    assert "  resized 2 -> 1, pause 41 ms, global batch 512 kept, step 570 continued" in lines
    assert lines[-4:-1] == [
        "fit-3f2a SUCCEEDED in 7m58  step 1000/1000  loss 0.412",
        "  deadline met with 2m01 to spare",
        "  workers 1 -> 2, 2 resizes (pause 41 ms), 0 restarts, 240 device-seconds",
    ]


def test_a_job_that_ended_early_or_diverged_says_so(
    client: Any, springtide: Run, make_job: MakeJob, training_file: str
) -> None:
    reason = "the training function returned early, at step 570 of 1000 (57 %)"
    client.add(make_job(state="SUCCEEDED", ended_at_s=479.0, reason=reason, loss=None, is_diverged=True))
    lines = springtide("run", training_file).output.splitlines()
    assert "fit-3f2a SUCCEEDED in 7m58  step 570/1000  loss not finite" in lines
    assert f"  {reason}" in lines


def test_a_failed_job_is_exit_code_1(client: Any, springtide: Run, make_job: MakeJob, training_file: str) -> None:
    client.add(make_job(state="FAILED", reason="ValueError: no", ended_at_s=9.0))
    result = springtide("run", training_file, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["reason"] == "ValueError: no"


def test_a_refused_job_says_what_would_work(
    client: Any, springtide: Run, make_job: MakeJob, training_file: str
) -> None:
    refused = make_job(state="REJECTED", reason="it cannot finish in time", alternatives=("--deadline 20m",))
    client.add(refused)
    result = springtide("run", training_file)
    assert result.exit_code == 1
    told = "REFUSED it cannot finish in time\n  would work: --deadline 20m | --best-effort\n"
    line, _, rest = result.output.partition("\n")
    assert line.startswith(f"{Path(training_file).parent} travels with the job: 1 file, ")
    assert rest == told
    assert springtide("run", training_file, "--detach").exit_code == 1


def test_ctrl_c_detaches(
    client: Any, springtide: Run, make_job: MakeJob, training_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.add(make_job())

    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("springtide.cli.commands.run.follow", interrupt)
    result = springtide("run", training_file)
    assert result.exit_code == 0
    assert "detached; fit-3f2a goes on" in result.output
    assert "springtide cancel fit-3f2a" in result.output


def test_a_plain_script_is_not_imported_and_not_elastic(
    client: Any, springtide: Run, make_job: MakeJob, tmp_path: Path
) -> None:
    client.add(make_job())
    path = tmp_path / "plain.py"
    path.write_text("raise SystemExit('must not run here')\n", encoding="utf-8")
    result = springtide("run", str(path), "--workers", "2", "--detach", "--", "--lr", "0.1")
    assert result.exit_code == 0, result.output
    ((_, asked),) = client.calls
    assert (asked["source"].kind, asked["source"].args) == ("script", ("--lr", "0.1"))
    assert (asked["options"]["min_workers"], asked["options"]["max_workers"]) == (2, 2)
    assert springtide("run", str(path), "--workers", "1..2").exit_code == 2
    assert springtide("run", str(path), "--epochs", "2").exit_code == 2


def test_a_script_whose_loop_a_library_runs_may_have_a_range_of_workers(
    client: Any, springtide: Run, make_job: MakeJob, tmp_path: Path
) -> None:
    client.add(make_job())
    path = tmp_path / "program.py"
    path.write_text("import lightning as L\nL.Trainer().fit(model)\nraise SystemExit('not here')\n", encoding="utf-8")
    for workers, library in (("1..3", "lightning"), ("2", "")):
        result = springtide("run", str(path), "--workers", workers, "--detach")
        assert result.exit_code == 0, result.output
        _, asked = client.calls[-1]
        assert (asked["source"].kind, asked["source"].library) == ("script", library)
    assert (client.calls[0][1]["options"]["min_workers"], client.calls[0][1]["options"]["max_workers"]) == (1, 3)


def test_a_script_that_calls_adopt_is_elastic_with_any_number_of_workers(
    client: Any, springtide: Run, make_job: MakeJob, tmp_path: Path
) -> None:
    client.add(make_job())
    path = tmp_path / "ddp.py"
    # What else it takes from springtide does not have it imported.
    text = (
        "import springtide\nspringtide.model_path\nraise SystemExit('not here')\nspringtide.adopt(model, optimizer)\n"
    )
    path.write_text(text, encoding="utf-8")
    for flags, bounds in (([], None), (["--workers", "1..3"], (1, 3)), (["--workers", "2"], (2, 2))):
        result = springtide("run", str(path), *flags, "--detach", "--", "--lr", "0.1")
        assert result.exit_code == 0, result.output
        _, asked = client.calls[-1]
        source, options = asked["source"], asked["options"]
        assert (source.kind, source.library, source.args) == ("script", "springtide", ("--lr", "0.1"))
        assert options["max_workers"] > 1
        assert bounds is None or (options["min_workers"], options["max_workers"]) == bounds
    refused = springtide("run", str(path), "--epochs", "2")
    assert refused.exit_code == 2
    assert "ddp.py is a script, which --epochs cannot steer; pass it on: -- --epochs N" in refused.output
    # Importing it to look for the function would run it.
    path.write_text(text + "raise SystemError('it ran')\n", encoding="utf-8")
    refused = springtide("run", f"{path}:main")
    assert "ddp.py has no training function 'main': it is a script that calls springtide.adopt()" in refused.output


def test_the_library_of_a_script_is_found_in_what_it_imports(
    client: Any, springtide: Run, make_job: MakeJob, tmp_path: Path
) -> None:
    client.add(make_job())
    (tmp_path / "parts.py").write_text("import lightning as L\ntrainer = L.Trainer()\n", encoding="utf-8")
    path = tmp_path / "program.py"
    path.write_text("from parts import trainer\ntrainer.fit(model)\n", encoding="utf-8")
    assert springtide("run", str(path), "--workers", "1..2", "--detach").exit_code == 0
    assert client.calls[-1][1]["source"].library == "lightning"


@pytest.mark.parametrize("command", ["run", "quote"])
def test_a_library_of_a_release_that_is_not_tested_is_warned_of(
    springtide: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    installed = {"lightning": "2.7.0"}
    monkeypatch.setattr(library_versions.importlib.metadata, "version", lambda package: installed.get(package, "2.6.0"))
    path = tmp_path / "program.py"
    path.write_text("import lightning as L\nL.Trainer().fit(model)\n", encoding="utf-8")
    told = "lightning 2.7.0 is not tested for resizing in place; tested: 2.6.*"
    (tmp_path / "needed.txt").write_text("lightning==2.6.1\n", encoding="utf-8")
    own = ["--requirements", str(tmp_path / "needed.txt")]
    for flags, is_told in (
        (["--workers", "1..2"], True),
        (["--workers", "1"], False),
        (["--workers", "1..2", *own], False),
    ):
        assert (told in springtide(command, str(path), *flags).output) is is_told
    installed["lightning"] = "2.6.6"
    assert told not in springtide(command, str(path), "--workers", "1..2").output


def test_a_script_of_which_each_worker_would_train_the_same_is_warned_of(
    client: Any, springtide: Run, make_job: Callable[..., JobStatus], tmp_path: Path
) -> None:
    client.add(make_job())
    path = tmp_path / "mine.py"
    path.write_text("import torch\ntorch.nn.Linear(1, 1)\n", encoding="utf-8")
    told = "each of its workers trains the same by itself"
    assert told in springtide("run", str(path), "--workers", "2", "--detach").output
    assert told not in springtide("run", str(path), "--workers", "1", "--detach").output
    assert told not in springtide("run", str(path), "--detach").output


def test_deploy_prints_how_to_call_it(
    client: Any, springtide: Run, make_service: Callable[..., ServiceStatus], tmp_path: Path
) -> None:
    client.add(make_service(num_ready=0, state="IDLE"))
    path = tmp_path / "serve.py"
    path.write_text(SERVING, encoding="utf-8")
    result = springtide("deploy", str(path), "--slo", "200ms", "--scale", "0..4")
    assert result.exit_code == 0, result.output
    assert "(sleeps until the first request)" in result.output
    assert "http://127.0.0.1:8787/f/sentiment" in result.output
    assert """{"texts": ["good"], "limit": 1}""" in result.output
    ((_, asked),) = client.calls
    assert asked["options"]["slo_s"] == pytest.approx(0.2)
    assert asked["options"]["target_in_flight"] == 8
    assert f"{tmp_path} travels with the service: " in result.output
    assert (asked["folder"].path, asked["folder"].origin) == ("serve.py", str(tmp_path))
    result = springtide("deploy", str(path), "--no-folder")
    assert "travels" not in result.output
    assert "folder" not in client.calls[-1][1]


def test_deploy_takes_a_command_instead_of_a_file(
    client: Any, springtide: Run, make_service: Callable[..., ServiceStatus], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    client.add(make_service(num_ready=0, state="IDLE"))
    result = springtide("deploy", "--command", "bin/server --port {port}", "--ready", "/up", "--name", "sentiment")
    assert result.exit_code == 0, result.output
    assert "/f/sentiment/ -H" in result.output
    ((_, asked),) = client.calls
    assert (asked["name"], asked["folder"].origin, asked["source"].kind) == ("sentiment", str(tmp_path), "class")
    for given, why in (
        (("serve.py", "--command", "server"), "name one of three"),
        ((), "name one of three"),
        (("serve.py", "--ready", "/up"), "--ready is for --command"),
        (("--command", "server", "--ready", "up"), "ready is a path"),
    ):
        refused = springtide("deploy", *given)
        assert refused.exit_code != 0
        assert why in refused.output, refused.output


def test_deploy_says_when_the_guaranteed_replicas_are_not_there(
    client: Any, springtide: Run, make_service: Callable[..., ServiceStatus], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("springtide.cli.commands.deploy._FREE_TIMEOUT_S", 0.0)
    client.add(make_service(num_ready=0, state="IDLE", min_replicas=2))
    path = tmp_path / "serve.py"
    path.write_text(SERVING, encoding="utf-8")
    result = springtide("deploy", str(path), "--scale", "2..4", "--in-flight", "3")
    assert result.exit_code == 0, result.output
    assert "none is ready yet" in result.output
    ((_, asked),) = client.calls
    assert (asked["options"]["min_replicas"], asked["options"]["target_in_flight"]) == (2, 3)


def test_policies_and_their_hint(springtide: Run) -> None:
    known = json.loads(springtide("policies", "--json").stdout)
    assert {"elastic", "edf", "fifo"} <= {policy["name"] for policy in known if policy["kind"] == "policy"}
    assert {"dedicated", "one-way", "two-way", "tide"} == {entry["name"] for entry in known if entry["kind"] == "loans"}
    assert "tide/POLICY" in springtide("policies").output


@pytest.mark.parametrize("cluster", ["4", "0x4", "4x", "axb", "4x-1"])
def test_a_cluster_that_cannot_be(cluster: str, springtide: Run) -> None:
    result = springtide("simulate", "--trace", "generated:3", "--cluster", cluster, "--policy", "fifo")
    assert result.exit_code == 2
    assert "16x8" in result.stderr


@pytest.mark.slow
def test_a_trace_under_two_policies(springtide: Run, tmp_path: Path) -> None:
    asked = ["simulate", "--trace", "generated:5", "--cluster", "1x4", "--policy", "fifo,elastic", "--seed", "3"]
    answer = json.loads(springtide(*asked, "--json", "-").stdout)
    assert answer["cluster"] == "1x4"
    assert [answer["policies"][name]["jobs"] for name in ("fifo", "elastic")] == [5, 5]
    output = tmp_path / "out.json"
    assert springtide(*asked, "--json", str(output)).output.startswith("POLICY ")
    assert set(json.loads(output.read_bytes())["policies"]) == {"fifo", "elastic"}
    assert "no trace" in springtide(*asked[:2], "nothing.csv", *asked[3:]).stderr


def test_down_and_dashboard_without_a_platform(springtide: Run) -> None:
    assert springtide("down").exit_code == 0
    assert json.loads(springtide("down", "--json").stdout)["stopped"] is False
    assert springtide("dashboard").exit_code == 1
