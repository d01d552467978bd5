"""Profiles of layers: sizes that can be counted by hand, times that add up, models that cannot be cut."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from springtide.core.errors import BackendError, InvalidRequest
from springtide.core.functions import LayerProfile
from springtide.core.workload import Entrypoint
from springtide.runtime.__main__ import main
from springtide.runtime.models.layers import Layer, layers_of
from springtide.runtime.profiling.layer_profiler import profile_layers
from springtide.runtime.profiling.layer_profiling import (
    cached_source_layers,
    profile_source_layers,
    read_layer_profile,
    write_layer_profile,
)
from springtide.runtime.profiling.place import loopback_transfer
from springtide.runtime.profiling.task_profiler import profile_task

SOURCE = textwrap.dedent(
    """
    import torch
    from torch import nn
    import springtide as st

    def build():
        return nn.Sequential(nn.Linear(3, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 2)))

    task = st.Task(
        model=build,
        dataset=lambda: (torch.ones(32, 3), torch.zeros(32, dtype=torch.int64)),
        loss=nn.functional.cross_entropy,
        optimizer=torch.optim.SGD,
    )
    whole = st.Task(model=lambda: nn.Linear(3, 2), dataset=(torch.ones(32, 3), torch.ones(32, 2)),
        loss=nn.functional.mse_loss, optimizer=torch.optim.SGD)
    """
)


class _Ticks:
    """A clock that goes one second further whenever it is asked."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


def _profile(model: nn.Module, x: object, y: object, loss: object, **options: object) -> list[LayerProfile]:
    profile = profile_layers(
        layers_of(model),
        x,
        y,
        loss,  # type: ignore[arg-type]
        name="m",
        micro_batch_size=4,
        memory_mb=1024,
        **options,  # type: ignore[arg-type]
    )
    return list(profile.layers)


def test_sizes_are_those_that_the_layers_have() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    first, middle, last = _profile(model, torch.randn(4, 3), torch.randn(4, 2), nn.functional.mse_loss, num_rounds=1)
    assert [layer.name for layer in (first, middle, last)] == ["0", "1", "2"]
    assert [layer.parameter_bytes for layer in (first, middle, last)] == [(24 + 8) * 4, 0, (16 + 2) * 4]
    assert [layer.output_bytes for layer in (first, middle, last)] == [4 * 8 * 4, 4 * 8 * 4, 4 * 2 * 4]
    # The first layer's input needs no gradient; a gradient is as large as the input it is of.
    assert [layer.gradient_bytes for layer in (first, middle, last)] == [0, 4 * 8 * 4, 4 * 8 * 4]
    # A linear layer keeps its input, tanh its output, the loss the prediction and the target.
    assert [layer.activation_bytes for layer in (first, middle, last)] == [48, 128, 128 + 2 * 32]


def test_a_layer_may_take_and_give_several_tensors_and_whole_numbers() -> None:
    class Split(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x.float() * 2.0, x

    class Join(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(5))

        def forward(self, both: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            return both[0] * self.scale + both[1]

    x = torch.arange(20).view(4, 5)
    split, join = _profile(nn.Sequential(Split(), Join()), x, torch.zeros(4, 5), nn.functional.mse_loss, num_rounds=1)
    assert split.output_bytes == 20 * 4 + 20 * 8
    assert join.gradient_bytes == 20 * 4
    assert split.backward_s[0] is not None


def test_layers_that_write_over_their_input_can_be_profiled() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.ReLU(inplace=True))
    layers = _profile(model, torch.randn(4, 3), torch.zeros(4, 4), nn.functional.mse_loss, num_rounds=1)
    assert len(layers) == 3


def test_times_are_medians_of_the_rounds_after_the_first() -> None:
    class Slow(nn.Module):
        """Its n-th forward takes as many ticks as `delays` says."""

        def __init__(self, clock: _Ticks, delays: list[float]) -> None:
            super().__init__()
            self.clock, self.delays = clock, [0.0, *delays]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.clock.now_s += self.delays.pop(0)
            return x * 1.0

    clock = _Ticks()
    model = nn.Sequential(nn.Linear(3, 3), Slow(clock, [100.0, 4.0, 9.0, 2.0]))
    _, slow = _profile(model, torch.ones(4, 3), torch.ones(4, 3), nn.functional.mse_loss, num_rounds=3, clock=clock)
    assert slow.forward_s == (5.0,)
    assert slow.backward_s == (1.0,)


def test_gradients_and_parameters_are_as_before() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    _profile(model, torch.ones(4, 3), torch.ones(4, 2), nn.functional.mse_loss, num_rounds=2)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_every_second_round_runs_beside_a_transfer() -> None:
    opened = []

    @contextmanager
    def transfer() -> Iterator[None]:
        opened.append(True)
        yield

    profile = profile_layers(
        layers_of(nn.Sequential(nn.Linear(2, 2))),
        torch.ones(4, 2),
        torch.ones(4, 2),
        nn.functional.mse_loss,
        name="m",
        micro_batch_size=4,
        num_rounds=2,
        memory_mb=1024,
        transfer=transfer,
    )
    assert len(opened) == 3
    assert profile.slowdown >= 1.0


def test_a_loopback_transfer_ends_with_its_context() -> None:
    with loopback_transfer(1e6):
        pass


def test_a_layer_that_cannot_take_its_input_is_named() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(5, 2))
    with pytest.raises(InvalidRequest, match="layer 1 does not take what the layer before it gives"):
        _profile(model, torch.ones(4, 3), torch.ones(4, 2), nn.functional.mse_loss)
    with pytest.raises(InvalidRequest, match="one element"):
        _profile(nn.Sequential(nn.Linear(3, 3)), torch.ones(4, 3), torch.ones(4, 3), lambda x, y: x - y)
    with pytest.raises(InvalidRequest, match="at least one round"):
        profile_layers(
            [Layer("0", nn.Linear(2, 2))],
            torch.ones(1, 2),
            torch.ones(1, 2),
            nn.functional.mse_loss,
            name="m",
            micro_batch_size=1,
            num_rounds=0,
            memory_mb=1,
        )


def test_what_is_no_task_or_too_small_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"f is no st\.Task"):
        profile_task(lambda: None, name="f", micro_batch_size=4, memory_mb=1024)
    task = SimpleNamespace(
        model=nn.Sequential(nn.Linear(2, 1)),
        dataset=(torch.ones(3, 2), torch.ones(3, 1)),
        loss=nn.functional.mse_loss,
        optimizer=torch.optim.SGD,
    )
    with pytest.raises(InvalidRequest, match="has 3 samples and a micro-batch 4"):
        profile_task(task, name="t", micro_batch_size=4, memory_mb=1024)
    taken = profile_task(task, name="t", micro_batch_size=3, memory_mb=1024, num_rounds=1)
    assert (taken.num_samples, taken.stream) == (3, "")
    assert taken.profile.base_bytes > 0


@pytest.mark.slow
def test_a_file_is_profiled_in_a_process_of_its_own_and_only_once(tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text(SOURCE)
    entrypoint = Entrypoint(source_path=str(path), object_name="task", import_root="")
    cache = tmp_path / "cache"
    measured = cached_source_layers(entrypoint, cache, name="job")
    assert [layer.name for layer in measured.profile.layers] == ["0", "1.0", "1.1"]
    assert (measured.num_layers, measured.num_samples) == (3, 32)
    assert measured.profile.base_bytes > 50 << 20
    assert cached_source_layers(entrypoint, cache, name="job") == measured
    path.write_text(SOURCE.replace("nn.Linear(8, 2)", "nn.Linear(8, 2), nn.Identity()"))
    assert cached_source_layers(entrypoint, cache, name="job").num_layers == 4


@pytest.mark.slow
def test_a_model_that_is_no_sequence_is_profiled_whole_and_params_make_another_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.py"
    path.write_text(SOURCE)
    entrypoint = Entrypoint(source_path=str(path), object_name="whole", import_root="")
    whole = profile_source_layers(entrypoint, name="job")
    assert [layer.name for layer in whole.profile.layers] == ["model"]
    path.write_text(SOURCE.replace("def build():", "def build(params):\n    params['width']"))
    task = Entrypoint(source_path=str(path), object_name="task", import_root="")
    with pytest.raises((InvalidRequest, BackendError), match="KeyError: 'width'"):
        cached_source_layers(task, tmp_path, name="job")
    named = cached_source_layers(task, tmp_path, name="job", params={"width": "3"})
    assert named.params == {"width": "3"}
    path.write_text(SOURCE)
    out = tmp_path / "p.json"
    command = ["profile-layers", "--source", str(path), "--object", "task", "--micro-batch", "2", "--out", str(out)]
    assert main(command) == 0
    assert read_layer_profile(out).profile.micro_batch_size == 2
    assert main(["profile-layers", "--source", str(path)]) == 2
    assert "give --source FILE" in capsys.readouterr().err


def test_a_file_that_is_no_profile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    with pytest.raises(InvalidRequest, match=r"is no profile of layers .* `springtide profile FILE --layers"):
        read_layer_profile(path)
    path.write_text(json.dumps({"format": "springtide-profile-1"}))
    with pytest.raises(InvalidRequest, match="is no profile of layers"):
        read_layer_profile(path)


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    from springtide.core.functions import ModelProfile
    from springtide.runtime.profiling.layer_profiling import LayerProfileFile

    layer = LayerProfile(
        name="a",
        parameter_bytes=1,
        activation_bytes=2,
        output_bytes=3,
        gradient_bytes=4,
        forward_s=(1.0,),
        backward_s=(2.0,),
    )
    profile = ModelProfile(model="m", micro_batch_size=4, memory_mb=(1,), bytes_per_s=(1.0,), layers=(layer,))
    file = LayerProfileFile(profile=profile, num_samples=9, num_layers=1, source_sha256="x", object_name="task")
    write_layer_profile(tmp_path / "p.json", file)
    assert read_layer_profile(tmp_path / "p.json") == file
