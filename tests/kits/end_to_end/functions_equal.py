"""Whether a job on functions trained exactly what one process trains."""

from __future__ import annotations

import msgspec
from safetensors.torch import load_file

from kits.end_to_end.functions_run import Run, reference
from springtide.backends.functions.shell.notes import NOTES_FILE, Notes
from springtide.core import events


def check_equal(run: Run, example: str) -> None:
    """The same loss as in one process, every sample once in its place.

    One bit more or less in one weight grows with every step of a network with kinks, in one process, too, to the
    third digit of the loss after some fifty: beyond twenty only the steps and the samples are compared here.
    """
    losses, model, digest = reference(run.job, example, is_whole=False)
    whole, _, _ = reference(run.job, example, is_whole=True)
    told = run.losses()
    notes = msgspec.json.decode((run.work_dir / NOTES_FILE).read_bytes(), type=Notes)
    assert notes.ids_digest == digest
    assert [step for step, _, _ in told] == list(range(1, len(losses) + 1))
    worst = max(abs(loss - expected) for (_, loss, _), expected in zip(told[:20], losses, strict=False))
    assert worst < 1e-6, f"a step's loss differs by {worst}"
    worst = max(abs(loss - expected) for (_, loss, _), expected in zip(told[:20], whole, strict=False))
    assert worst < 1e-6, f"a step's loss differs by {worst} from that on whole batches"
    saved = load_file(run.of(events.JobFinished)[0].artifact_path)
    assert saved.keys() == model.keys()
    for name, tensor in model.items():
        assert saved[name].shape == tensor.shape
        assert saved[name].isfinite().all()
