import subprocess
import sys
import textwrap

import msgspec
import pytest

from kits.runtime.models_of_users import KEYS, whole_plan
from kits.runtime.pipeline_plans import nothing, plan_of
from kits.runtime.pipeline_tasks_of_users import job_of
from springtide.core.errors import InvalidRequest
from springtide.core.wire.functions import Place
from springtide.runtime.functions.data_parallel.worker import ReplicaWorker
from springtide.runtime.functions.pipeline.worker import PipelineWorker
from springtide.runtime.functions.place_worker import build_place_worker, imports_torch
from springtide.runtime.functions.source import user_source
from springtide.storage.bundles import pack
from springtide.storage.stores.open import memory_store

NUMPY_TASK = """
import numpy as np
import springtide as st


class Line:
    def __init__(self, params):
        self.slope = np.full(1, float(params.get("slope", 0)), np.float32)

    def gradients(self, x, y):
        error = x[:, 0] * self.slope - y
        return float((error**2).mean()), {"slope": np.array([(2 * error * x[:, 0]).mean()], np.float32)}

    def apply(self, gradients):
        self.slope = self.slope - np.float32(0.1) * gradients["slope"]

    def state(self):
        return {"slope": self.slope}

    def load(self, state):
        self.slope = state["slope"]


def points():
    x = np.linspace(-1, 1, 40, dtype=np.float32)[:, None]
    return x, 3 * x[:, 0]


task = st.Task(model=Line, dataset=points)
"""
TORCH_TASK = """
import springtide as st
import torch


def points():
    x = torch.linspace(-1, 1, 40)[:, None]
    return x, 3 * x


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.slope = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.slope * x


def model(params):
    line = Line()
    return torch.nn.Sequential(line, torch.nn.Identity()) if params.get("layers") else line


task = st.Task(
    model=model, dataset=points, loss=torch.nn.functional.mse_loss, optimizer=lambda p: torch.optim.SGD(p, 0.1)
)
"""


def build(text, plan=None, **fields):
    store = memory_store()
    job = job_of(**fields)
    store.put(KEYS.bundle, pack("task.py", text, None))
    store.put(KEYS.job, msgspec.json.encode(job))
    with user_source(store, KEYS) as source:
        return build_place_worker(source, plan or whole_plan(1), Place(0, 0), store=store, wire=store, check=nothing)


def test_numpy_and_torch_train_the_same_line():
    losses = []
    for text in (NUMPY_TASK, TORCH_TASK):
        worker = build(text)
        assert isinstance(worker, ReplicaWorker)
        losses.append([worker.run_step(KEYS.wire(1, 0, step)).loss for step in range(10)])
        worker.close()
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert losses[0][-1] < losses[0][0] / 2


def test_a_sequence_of_torch_is_a_pipeline_and_factories_get_the_jobs_params():
    worker = build(TORCH_TASK, plan_of(2, 1, 1, num_micro_batches=4, micro_batch_size=2), params={"layers": "1"})
    assert isinstance(worker, PipelineWorker)
    worker.close()
    assert build(NUMPY_TASK, params={"slope": "2"}).model.slope == [2.0]


def test_a_job_without_torch_starts_without_it(tmp_path):
    (tmp_path / "task.py").write_text(NUMPY_TASK)
    script = textwrap.dedent("""
        import sys, time
        import msgspec
        from springtide.core.wire.functions import Keys, Place
        from springtide.core.functions import FunctionPlan, FunctionStage
        from springtide.core.workload import Entrypoint, TrainingJob
        from springtide.runtime.functions.source import user_source
        from springtide.runtime.functions.place_worker import build_place_worker
        from springtide.storage.bundles import pack
        from springtide.storage.stores.open import memory_store
        store, keys = memory_store(), Keys("job")
        store.put(keys.bundle, pack("task.py", open("task.py").read(), None))
        job = TrainingJob(
            job_id="j", name="j", entrypoint=Entrypoint(source_path="task.py", object_name="task"), num_epochs=2
        )
        store.put(keys.job, msgspec.json.encode(job))
        plan = FunctionPlan(stages=(FunctionStage(first_layer=0, end_layer=1, memory_mb=512),))
        with user_source(store, keys) as source:
            worker = build_place_worker(source, plan, Place(0, 0), store=store, wire=store, check=lambda: None)
            while not worker.is_over:
                worker.run_step(keys.wire(0, 0, worker.position.step))
            worker.save_state(store, keys)
        assert worker.position.step == 4
        print(sorted({"torch", "jax"} & set(sys.modules)))
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.strip() == "[]"


def test_a_file_that_imports_torch_is_known_before_it_runs(tmp_path):
    (tmp_path / "one.py").write_text("# torch is not imported here\nimport numpy\n")
    assert not imports_torch(tmp_path)
    (tmp_path / "two.py").write_text("if True:\n    from torch import nn\n")
    assert imports_torch(tmp_path)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("def task(ctx):\n    pass\n", r"only a declared st.Task can run on functions"),
        ("import springtide as st\ntask = st.Task(model=dict, dataset=[1, 2])\n", "without gradients, apply, state"),
        (NUMPY_TASK.replace("return x, 3", "return x[:0], 3"), "differ in length"),
        (NUMPY_TASK.replace("dataset=points", "dataset=(1, 2)"), "samples along the first axis"),
        (NUMPY_TASK.replace("import numpy as np", "import numpy as np, jaxlib.absent_x as jax"), "needs jaxlib, which"),
        (NUMPY_TASK.replace("dataset=points", "dataset=lambda: 3"), "the dataset needs __len__ and __getitem__"),
    ],
)
def test_tasks_that_cannot_run_are_told_in_one_sentence(text, sentence):
    with pytest.raises(InvalidRequest, match=sentence) as caught:
        build(text)
    assert "\n" not in str(caught.value)


def test_a_plan_of_several_stages_is_no_plan_for_a_whole_model():
    with pytest.raises(InvalidRequest, match="2 stages, but it is trained whole"):
        build(NUMPY_TASK, plan_of(2, 2, 1, num_micro_batches=1, micro_batch_size=2))
