"""Optimizers without torch's compiler compute the same, and the compiler still comes when it is asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import torch
from springtide.runtime.process.deferred_compiler import defer_compiler
if sys.argv[1] == "deferred":
    defer_compiler()
    defer_compiler()
for name in "SGD Adam AdamW RMSprop Adagrad Adamax NAdam RAdam ASGD Rprop Adadelta LBFGS".split():
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 3)
    optimizer = getattr(torch.optim, name)(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().sum()
        loss.backward()
        return loss
    for _ in range(3):
        optimizer.step(closure)
        schedule.step()
    optimizer.load_state_dict(optimizer.state_dict())
    print(name, [parameter.flatten().tolist() for parameter in model.parameters()])
print("compiler", "torch._dynamo" in sys.modules)
fast = torch.compile(lambda x: x + 1, backend="eager")
assert fast(torch.ones(1)).item() == 2.0
optimizer.zero_grad()
torch.optim.SGD(model.parameters()).step()
kept = getattr(torch.optim.Optimizer.zero_grad.__wrapped__, "__dynamo_disable")
print("its own again", "torch/_dynamo" in kept.__code__.co_filename)
"""


def outcome(mode: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.slow
def test_optimizers_compute_the_same_without_the_compiler_and_it_comes_when_it_is_needed() -> None:
    deferred, plain = outcome("deferred"), outcome("plain")
    assert deferred[:-2] == plain[:-2]
    assert len(deferred) == 14
    assert deferred[-2:] == ["compiler False", "its own again True"]
    # Without this torch imports it for the first optimizer: once it no longer does, the module is needless.
    assert plain[-2] == "compiler True"
