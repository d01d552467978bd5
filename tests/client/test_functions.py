"""The Python surface without a platform: what decorators check, what is shipped, what submitting asks the API for."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import springtide as st
from kits.client.sent_contents import SentContents
from springtide.client.functions import TrainFunction
from springtide.client.goals import TrainOptions, workers_range
from springtide.client.serving_goals import ServeOptions
from springtide.client.sources.source import IMPORTING_VARIABLE, name_from
from springtide.core.errors import InvalidRequest
from springtide.core.options.kinds import deadline_in_s, objective_s
from springtide.core.workload import shards_for

FILE = '''
import springtide as st

@st.train(deadline="10m", workers=(1, 4), params={"lr": 0.1})
def fit(ctx):
    """What it learns."""
    return "fitted", ctx

@st.serve(slo="p99 < 200ms", scale=(0, 4), params={"path": "x"})
class TextScore:
    def load(self):
        self.loaded = True
    def predict(self, texts: list[str]) -> list[float]:
        return [float(len(text)) for text in texts]

task = st.Task(model=dict, dataset=[1], loss=max, optimizer=list, epochs=3)

def nested():
    @st.train
    def inner(ctx): ...
    return inner
'''


class FakeClient:
    """Remembers what it was asked; answers with what the functions read."""

    def __init__(self) -> None:
        self.request = SentContents().request
        self.asked: dict[str, Any] = {}
        self.cluster: Any = None

    def status(self) -> Any:
        devices = tuple(type("Device", (), {"kind": "cpu"}) for _ in range(3))
        return type("Status", (), {"devices": devices, "cluster": self.cluster})()

    def submit_job(self, **asked: Any) -> Any:
        self.asked = asked
        return type("Job", (), {"job_id": "fit-1"})()

    def deploy_service(self, **asked: Any) -> Any:
        self.asked = asked
        return type("Service", (), {"name": asked["name"], "revision": 2, "releasing": 3})()


@pytest.fixture
def module(tmp_path: Path) -> Iterator[ModuleType]:
    path = tmp_path / "user_file.py"
    path.write_text(FILE, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("user_file", path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules["user_file"] = loaded
    spec.loader.exec_module(loaded)
    yield loaded
    del sys.modules["user_file"]


def test_with_and_without_parentheses() -> None:
    @st.train
    def plain(ctx: Any) -> str:
        return "ran"

    @st.train()
    def called(ctx: Any) -> None: ...

    assert isinstance(plain, TrainFunction)
    assert isinstance(called, TrainFunction)
    assert plain.name == "plain"
    assert plain(None) == "ran"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"deadline": "soon"}, "deadline"),
        ({"budget": "-4"}, "budget"),
        ({"workers": (4, 1)}, "workers"),
        ({"workers": "1..9999"}, "workers"),
        ({"epochs": 0}, "epochs"),
        ({"global_batch": True}, "global_batch"),
        ({"global_batch": 2.5}, "global_batch"),
        ({"global_batch": (64, 32)}, "global_batch"),
        ({"global_batch": (32, 64), "max_local_batch": 0}, "max_local_batch"),
        ({"global_batch": (32, 64), "learning_rate": "cubic"}, "one of 'linear', 'sqrt'"),
        ({"global_batch": (32, 64), "length": "hours"}, "must be 'epochs' or 'progress'"),
        ({"global_batch": 32, "max_local_batch": 16}, r"needs a batch that may change.*global_batch=\(32, 512\)"),
        ({"learning_rate": "sqrt"}, "learning_rate needs a batch that may change"),
        ({"length": "progress"}, "length needs a batch that may change"),
        ({"seed": -1}, "seed"),
        ({"name": "No Name"}, "name"),
        ({"params": {"a": object()}}, "param 'a'"),
        ({"params": {1: "a"}}, "params"),
        ({"epoch": 3}, "does not know 'epoch'"),
    ],
)
def test_what_cannot_be_is_refused_when_the_file_is_read(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        st.train(**options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"slo": "fast"}, "slo"),
        ({"scale": (3, 1)}, "scale"),
        ({"scale": 0}, "scale"),
        ({"gpu": "a third"}, "fraction"),
        ({"gpu": 2}, "more than one device"),
        ({"share": (0.6, 0.3)}, "between its request"),
        ({"gpu": 0.3, "share": 0.3}, "twice"),
        ({"memory": "4GB"}, "ask for a share beside it"),
        ({"capacity": 0}, "capacity"),
        ({"idle": "-1s"}, "idle"),
        ({"max_batch": 0}, "max_batch"),
        ({"in_flight": 0}, "in_flight"),
    ],
)
def test_what_a_service_cannot_be(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        st.serve(**options)


def test_a_decorator_on_the_wrong_thing() -> None:
    with pytest.raises(InvalidRequest, match="a function"):
        st.train(3)  # type: ignore[call-overload]
    with pytest.raises(InvalidRequest, match="predict"):

        @st.serve
        class Mute:
            pass


def test_a_platform_of_pods_is_sent_the_files_that_are_imported(module: ModuleType) -> None:
    path = Path(module.__file__ or "")
    path.with_name("net.py").write_text("WIDTH = 3\n", encoding="utf-8")
    path.write_text(f"{FILE}\nimport net\n", encoding="utf-8")
    client = FakeClient()
    client.cluster = object()
    module.fit.submit(client)
    assert client.asked["source"].files == {"net.py": "WIDTH = 3\n"}
    assert client.asked["folder"].origin == str(path.parent)
    module.fit.submit(client, folder=False)
    source = client.asked["source"]
    assert (source.files, source.import_root, client.asked.get("folder")) == ({"net.py": "WIDTH = 3\n"}, "", None)


def test_submit_ships_the_file_and_the_options(module: ModuleType) -> None:
    client = FakeClient()
    handle = module.fit.submit(client, epochs=7, params={"depth": 3})
    assert handle.id == "fit-1"
    source = client.asked["source"]
    assert (source.filename, source.object_name, source.kind) == ("user_file.py", "fit", "function")
    assert source.text == FILE
    assert (client.asked["folder"].path, client.asked["folder"].origin) == (
        "user_file.py",
        str(Path(module.__file__ or "").parent),
    )
    assert client.asked["options"] == {
        "global_batch_size": 32,
        "num_epochs": 7,
        "min_workers": 1,
        "max_workers": 4,
        "seed": 0,
        "max_restarts": 3,
        "params": {"lr": "0.1", "depth": "3"},
        "deadline_s": 600.0,
    }


def test_auto_is_as_many_workers_as_there_are_devices(module: ModuleType) -> None:
    client = FakeClient()
    module.fit.submit(client, workers=st.auto)
    assert (client.asked["options"]["min_workers"], client.asked["options"]["max_workers"]) == (1, 3)
    assert workers_range("auto", 2) == (1, 2)
    assert workers_range(st.auto) is None


def test_a_misspelt_override_names_the_right_ones(module: ModuleType) -> None:
    with pytest.raises(InvalidRequest, match=r"does not know 'worker'; it knows .*workers"):
        module.fit.submit(FakeClient(), worker=3)


def test_deploy_ships_the_class(module: ModuleType) -> None:
    client = FakeClient()
    handle = module.TextScore.deploy(client, scale="0..2")
    assert handle.name == "text-score"
    assert client.asked["source"].kind == "class"
    assert client.asked["options"]["slo_s"] == pytest.approx(0.2)
    assert (client.asked["options"]["min_replicas"], client.asked["options"]["max_replicas"]) == (0, 2)


def test_a_service_runs_locally(module: ModuleType) -> None:
    instance = module.TextScore.local()
    assert instance.loaded
    assert instance.params == {"path": "x"}
    assert instance.predict(["abc"]) == [3.0]


def test_a_task_finds_its_name_in_its_file(module: ModuleType) -> None:
    client = FakeClient()
    module.task.submit(client)
    assert client.asked["name"] == "task"
    assert client.asked["source"].object_name == "task"
    assert client.asked["options"]["num_epochs"] == 3


def test_a_task_is_a_training_loop(module: ModuleType) -> None:
    steps: list[float] = []

    class Context:
        params: Mapping[str, str] = {}

        def prepare(self, model: Any, optimizer: Any) -> Any:
            return (lambda x: x + 1), None

        def batches(self, dataset: Any) -> Any:
            return [st.Batch(x=value, y=10, ids=(0,), epoch=0, step=0, shard=0) for value in dataset]

        def step(self, loss: float) -> None:
            steps.append(loss)

    declared = st.Task(model=dict, dataset=lambda: [1, 2], loss=lambda out, y: y - out, optimizer=list)
    declared.function(Context())  # type: ignore[arg-type]
    assert steps == [8, 7]


def test_what_no_worker_could_import_is_refused(module: ModuleType) -> None:
    with pytest.raises(InvalidRequest, match="top level"):
        module.nested().submit(FakeClient())


def test_submitting_while_being_imported_is_refused(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(IMPORTING_VARIABLE, "1")
    with pytest.raises(InvalidRequest, match="__main__"):
        module.fit.submit(FakeClient())


def test_deadlines_by_the_clock() -> None:
    now = datetime(2026, 1, 1, 17, 30)
    assert deadline_in_s("18:00", now) == 1800
    assert deadline_in_s("17:00", now) == 23.5 * 3600
    assert deadline_in_s("90m", now) == 5400


@pytest.mark.parametrize(("text", "seconds"), [("p99 < 200ms", 0.2), ("P99<=1s", 1.0), ("250ms", 0.25), (0.5, 0.5)])
def test_objectives(text: str | float, seconds: float) -> None:
    assert objective_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("identifier", "name"),
    [("fit", "fit"), ("MyModel", "my-model"), ("_private_", "private"), ("HTTPThing2", "httpthing2"), ("__", "job")],
)
def test_names_from_identifiers(identifier: str, name: str) -> None:
    assert name_from(identifier) == name


def test_options_without_a_goal_send_none() -> None:
    assert "deadline_s" not in TrainOptions().as_request(2, datetime(2026, 1, 1))
    assert "slo_s" not in ServeOptions().as_request()
    guaranteed = ServeOptions(scale="1..3", slo="50ms", in_flight=2).as_request()
    assert (guaranteed["min_replicas"], guaranteed["max_replicas"], guaranteed["target_in_flight"]) == (1, 3, 2)


LOCAL = """
import torch
import springtide as st

@st.train(epochs=2, global_batch=8, workers=(1, 6), params={"lr": 0.1})
def fit(ctx):
    model, _ = ctx.prepare(torch.nn.Linear(2, 1), lambda p: torch.optim.SGD(p, lr=float(ctx.params["lr"])))
    for batch in ctx.batches(torch.ones(16, 2)):
        ctx.metrics(seen=batch.step)
        ctx.step(model(batch.x).square().mean())

class Pairs(torch.utils.data.TensorDataset): ...

net = torch.nn.Linear(2, 1)
task = st.Task(net, Pairs(torch.ones(16, 2), torch.ones(16, 1)), torch.nn.functional.mse_loss,
               lambda p: torch.optim.SGD(p, lr=0.1), global_batch=8, name="declared")
"""


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = tmp_path / "local_file.py"
    path.write_text(LOCAL, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    specification = importlib.util.spec_from_file_location("local_file", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_function_trains_in_this_process(
    local: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = local.fit.local(epochs=1, params={"lr": 0.2})
    assert (result.num_steps, result.metrics) == (2, {"seen": 1.0})
    assert result.artifact_path == str(tmp_path / "springtide-out" / "fit" / "model.safetensors")
    assert Path(result.artifact_path).is_file()
    assert "fit step 2/2  loss " in capsys.readouterr().out
    elsewhere = local.fit.local(out=tmp_path / "mine", seed=5)
    assert elsewhere.artifact_path == str(tmp_path / "mine" / "model.safetensors")
    assert elsewhere.num_steps == 4
    with pytest.raises(InvalidRequest, match=r"local\(\) does not know 'lr'"):
        local.fit.local(lr=0.1)


def test_a_task_with_a_model_of_its_own_can_be_run_again(local: ModuleType) -> None:
    before = local.net.weight.clone()
    losses = [local.task.local().loss for _ in range(2)]
    assert losses[0] == losses[1]
    assert bool((local.net.weight == before).all())


@pytest.mark.parametrize("max_workers", [1, 4, 5, 8, 9, 200])
def test_a_local_run_has_the_shards_of_the_platform(max_workers: int) -> None:
    job = TrainOptions(workers=(1, max_workers)).as_local_job("fit")
    assert job.num_virtual_shards == shards_for(max_workers)


@pytest.mark.parametrize(("given", "num_shards"), [(True, 4), (8, 8), (False, None), (None, None)])
def test_an_exact_job_has_as_many_shards_as_it_says_and_no_more_workers(given: Any, num_shards: int | None) -> None:
    options = TrainOptions(exact=given)
    request = options.as_request(16, datetime(2026, 1, 1))
    assert request.get("num_virtual_shards") == num_shards
    assert request["max_workers"] == (num_shards or 16)
    job = options.as_local_job("fit")
    assert job.exact == (num_shards is not None)
    assert job.num_virtual_shards == (num_shards or 4)
    assert TrainOptions(exact=given, global_batch=(32, 64)).as_local_job("fit").exact == job.exact


def test_an_exact_job_with_more_workers_than_shards_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="exact 4 must be a power of two that is at least the most workers"):
        TrainOptions(exact=True, workers=(1, 8))


@pytest.mark.parametrize("given", [(32, 512), "32..512"])
def test_a_batch_with_bounds_starts_at_the_lower_one(given: Any) -> None:
    options = TrainOptions(global_batch=given, max_local_batch=64, learning_rate="adascale", length="progress")
    request = options.as_request(4, datetime(2026, 1, 1))
    assert request["global_batch_size"] == 32
    assert request["batch"] == {
        "min_size": 32,
        "max_size": 512,
        "min_local_size": 1,
        "max_local_size": 64,
        "learning_rate": "adascale",
    }
    assert request["length_unit"] == "progress"
    job = options.as_local_job("fit")
    assert (job.global_batch_size, job.num_virtual_shards) == (32, 8)
    assert job.batch is not None


def test_a_fixed_batch_says_nothing_of_bounds() -> None:
    request = TrainOptions(global_batch=64).as_request(4, datetime(2026, 1, 1))
    assert "batch" not in request
    assert "length_unit" not in request


def test_a_training_function_cannot_go_to_functions(module: ModuleType) -> None:
    for ask in (module.fit.submit, module.fit.quote):
        with pytest.raises(InvalidRequest, match="only a declared job can be cut into stages"):
            ask(FakeClient(), on="functions")
