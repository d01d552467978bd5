"""Models larger than the memory: the same weights, in files until they are asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from springtide.core.errors import StorageError
from springtide.core.functions import MIB
from springtide.runtime.functions.spilling import bring_back, kept_bytes, spilled


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.register_buffer("scale", torch.rand(width, width))

    def forward(self, x):
        return x @ self.scale + self.down(torch.relu(self.up(x)))


def model() -> nn.Module:
    torch.manual_seed(7)
    made = nn.Sequential(*(Block(128) for _ in range(4)), nn.Linear(128, 10))
    # Whoever initialises at the end touches everything once more.
    for parameter in made.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)
    return made


def test_the_weights_are_the_same_and_only_what_is_asked_for_is_in_memory(tmp_path):
    plain = model()
    with spilled(tmp_path / "spill", 300 * 1024):
        frugal = model()
    files = list((tmp_path / "spill").iterdir())
    assert len(files) >= 8
    for (name, one), (_, other) in zip(plain.state_dict().items(), frugal.state_dict().items(), strict=True):
        assert torch.equal(one, other), name
    assert frugal[2].up.weight.untyped_storage().filename
    bring_back(frugal[2])
    assert not frugal[2].up.weight.untyped_storage().filename
    assert not frugal[2].scale.untyped_storage().filename
    assert frugal[3].up.weight.untyped_storage().filename
    assert torch.equal(plain(torch.ones(3, 128)), frugal(torch.ones(3, 128)))


def test_outside_of_it_and_below_the_limit_nothing_moves(tmp_path):
    with spilled(tmp_path / "spill", 1 << 30):
        model()
    model()
    assert not (tmp_path / "spill").exists()


def test_tied_and_shared_tensors_stay_as_they_are(tmp_path):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Embedding(300, 128)
            self.outer = nn.Linear(128, 300, bias=False)
            self.outer.weight = self.inner.weight

    with spilled(tmp_path / "spill", 0):
        tied = nn.Sequential(Tied())
        flat = torch.zeros(2, 200, 200)
        halves = [nn.Parameter(part) for part in flat]
        holder = nn.Module()
        holder.first, holder.second = halves
        nn.Sequential(holder)
    assert tied[0].outer.weight is tied[0].inner.weight
    with torch.no_grad():
        flat.add_(1.0)
    assert float(holder.second.detach().sum()) == 200 * 200


def test_a_full_disk_is_told_in_one_sentence(tmp_path):
    (tmp_path / "spill").write_text("a file is in the way")
    with (
        pytest.raises(StorageError, match="do not fit the function's temporary storage"),
        spilled(tmp_path / "spill", 0),
    ):
        model()


def test_a_larger_function_keeps_more():
    assert kept_bytes(512) < kept_bytes(2048) < kept_bytes(10240) < 10240 * MIB // 2


PEAK = """
import sys
import torch
from pathlib import Path
from springtide.runtime.functions.spilling import spilled
def build():
    return torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(40)))
def peak_mb():
    # The kernel's other figure, ru_maxrss, begins with what the parent had.
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) // 1024
before = peak_mb()
if sys.argv[1] == "spilled":
    with spilled(Path(sys.argv[2]), 32 << 20):
        build()
else:
    build()
print(peak_mb() - before)
"""


@pytest.mark.slow
def test_the_peak_of_memory_is_a_fraction_of_the_model(tmp_path: Path):
    grown = {
        way: int(
            subprocess.run(
                [sys.executable, "-c", PEAK, way, str(tmp_path / way)], capture_output=True, text=True, check=True
            ).stdout
        )
        for way in ("spilled", "plain")
    }
    # 40 x 16 MB.
    assert grown["plain"] > 600
    assert grown["spilled"] < 150
