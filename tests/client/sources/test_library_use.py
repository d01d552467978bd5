"""Which library runs a script's loop is told by its text."""

from __future__ import annotations

import pytest

from springtide.client.sources.library_use import library_of, trains_alone

LIGHTNING = "import lightning as L\ntrainer = L.Trainer(max_epochs=3)\ntrainer.fit(model, data)\n"
TRANSFORMERS = "from transformers import Trainer\nTrainer(model, arguments).train()\n"
ACCELERATE = (
    "from accelerate import Accelerator\naccelerator = Accelerator()\n"
    "model, train = accelerator.prepare(model, train)\nfor batch in train:\n    accelerator.backward(model(batch))\n"
)
FABRIC = (
    "from lightning.fabric import Fabric\nfabric = Fabric()\n"
    "model = fabric.setup(model)\nfabric.backward(model(batch))\n"
)


@pytest.mark.parametrize(
    ("text", "library"),
    [
        (LIGHTNING, "lightning"),
        (LIGHTNING.replace("import lightning as L", "import lightning.pytorch as L"), "lightning"),
        (LIGHTNING.replace("import lightning as L", "import pytorch_lightning as L"), "lightning"),
        (TRANSFORMERS, "transformers"),
        (TRANSFORMERS.replace("Trainer", "Seq2SeqTrainer"), "transformers"),
        (TRANSFORMERS.replace("Trainer(", "Weighted(") + "class Weighted(Trainer): ...\n", "transformers"),
        (TRANSFORMERS.replace("Trainer(", "T(").replace("Trainer\n", "Trainer as T\n"), "transformers"),
        ("def main():\n    from transformers import Trainer\n    Trainer(model).train()\nmain()\n", "transformers"),
        # Both are there, and one of them trains.
        ("import transformers\n" + LIGHTNING, "lightning"),
        # It only tests.
        (LIGHTNING.replace(".fit(", ".test("), ""),
        # The loop is its own.
        ("import lightning\nfor batch in data:\n    model.fit(batch)\n", ""),
        ("from transformers import AutoModel\nmodel.train()\n", ""),
        ("from .transformers import Trainer\nTrainer(model).train()\n", ""),
        (ACCELERATE, "accelerate"),
        (
            ACCELERATE.replace("from accelerate import Accelerator", "import accelerate").replace(
                "Acc", "accelerate.Acc"
            ),
            "accelerate",
        ),
        # A Trainer runs the loop, whatever else is done.
        (ACCELERATE + TRANSFORMERS, "transformers"),
        ("import transformers\n" + ACCELERATE + "model.train()\n", "accelerate"),
        (FABRIC, "lightning"),
        (FABRIC.replace("from lightning.fabric", "from lightning_fabric"), "lightning"),
        (FABRIC.replace("from lightning.fabric", "from loom"), ""),
        # It only evaluates.
        (FABRIC.replace("backward", "to_device"), ""),
        (ACCELERATE.replace("backward", "gather"), ""),
        ("import torch\n" + ACCELERATE.partition("\n")[2], ""),
        ("import torch\n", ""),
        ("import springtide\njob = springtide.adopt(model, optimizer)\n", "springtide"),
        ("import springtide as st\n\ndef main():\n    st.adopt(model, optimizer)\n", "springtide"),
        ("from springtide import adopt as begin\nbegin(model, optimizer)\n", "springtide"),
        # It adopts a training that it would otherwise leave to a library.
        ("import springtide\nspringtide.adopt(model, optimizer)\n" + LIGHTNING, "springtide"),
        # It only reports, or the call is of something else.
        ("import springtide\nspringtide.report(1, 2)\n", ""),
        ("import springtide\nshelter.adopt(cat)\n", ""),
        ("from .springtide import adopt\nadopt(cat)\n", ""),
        ("from springtide import adopt\n", ""),
        ("def (\n", ""),
    ],
)
def test_the_library_whose_trainer_is_made_and_started_is_found(text, library):
    assert library_of(text) == library


def test_what_the_files_of_a_script_import_together_tells_its_library():
    model = "import lightning as L\ndef make():\n    return L.Trainer(max_epochs=3)\n"
    script = "from parts import make\nmake().fit(model, data)\n"
    assert (library_of(script), library_of(model)) == ("", "")
    assert library_of(script, "def (\n", model) == "lightning"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import torch\nfrom torch import nn\nfrom sklearn.datasets import load_digits\nimport math", True),
        ("import os, torch\nrank = os.environ['RANK']", False),
        ("import torch.distributed as dist", False),
        # What these do is not known.
        ("import torch\nfrom helpers import fit", False),
        ("import torch\nfrom . import helpers", False),
        ("import numpy", False),
        ("import torch\nthis is no Python", False),
    ],
)
def test_a_script_that_asks_for_no_other_processes_is_known_by_its_text(text, expected):
    assert trains_alone(text) == expected
