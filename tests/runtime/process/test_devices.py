"""Which torch devices a worker has."""

from __future__ import annotations

import pytest
import torch

from springtide.core.errors import InvalidRequest
from springtide.runtime.models.prepare_arguments import prepared_arguments
from springtide.runtime.process.devices import worker_devices

CPU, OTHER = torch.device("cpu"), torch.device("meta")


def test_slots_are_all_the_processor() -> None:
    assert worker_devices("cpu", 3, 2) == [CPU, CPU]


def test_gpus_are_numbered_from_the_first_that_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6")
    assert worker_devices("gpu", 0, 2) == [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert current == [0]
    with pytest.raises(InvalidRequest, match="given 4 GPUs, but torch sees 2"):
        worker_devices("gpu", 0, 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6")
    assert worker_devices("gpu", 6, 1) == [torch.device("cuda", 0)]


def test_a_model_stays_where_it_is_on_a_worker_of_several_devices() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1, device=OTHER))
    prepared_arguments((model, torch.optim.SGD(model.parameters())), [CPU, OTHER])
    assert [layer.weight.device for layer in model] == [CPU, OTHER]
