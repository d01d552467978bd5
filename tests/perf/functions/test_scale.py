"""A profile of one core on a service's sizes: speeds by CPU, None where a layer does not fit."""

import pytest

from springtide.core.errors import InvalidRequest
from springtide.core.functions import MIB, LayerProfile, ModelProfile
from springtide.perf.functions.scale import compute_speed, layer_bytes, scaled_profile
from springtide.perf.functions.services import aws_lambda, lambda_vcpus


def _profile(*parameter_mb: int, forward_s: float | None = 1.0) -> ModelProfile:
    layers = [
        LayerProfile(
            name=f"layer{index}",
            parameter_bytes=size * MIB,
            activation_bytes=10 * MIB,
            output_bytes=MIB,
            gradient_bytes=MIB,
            forward_s=(forward_s,),
            backward_s=(2.0,),
        )
        for index, size in enumerate(parameter_mb)
    ]
    return ModelProfile(
        model="m", micro_batch_size=4, memory_mb=(8192,), bytes_per_s=(1.0,), layers=tuple(layers), source="measured"
    )


def test_more_cores_help_less_and_less() -> None:
    assert compute_speed(0.5) == 0.5
    assert compute_speed(1.0) == 1.0
    assert compute_speed(4.0, 0.0) == pytest.approx(4.0)
    assert compute_speed(4.0, 0.1) == pytest.approx(1 / (0.1 + 0.9 / 4))
    assert compute_speed(1e9) == pytest.approx(20.0)


def test_times_follow_the_service_s_cpu() -> None:
    service = aws_lambda()
    scaled = scaled_profile(_profile(1), service, core_speed=2.0)
    assert scaled.memory_mb == tuple(size.memory_mb for size in service.sizes)
    assert scaled.bytes_per_s == tuple(size.bytes_per_s for size in service.sizes)
    layer = scaled.layers[0]
    assert layer.forward_s[0] == pytest.approx(1.0 / lambda_vcpus(512) / 2)
    assert layer.backward_s[-1] == pytest.approx(2.0 / compute_speed(lambda_vcpus(10240)) / 2)
    assert list(layer.forward_s) == sorted(layer.forward_s, reverse=True)
    assert scaled.source == "measured; scaled to aws by its CPU for each memory size"


def test_a_layer_has_no_time_where_it_does_not_fit() -> None:
    profile = _profile(1000)
    assert layer_bytes(profile.layers[0], profile.base_bytes) == (10 + 2000 + 300) * MIB
    layer = scaled_profile(profile, aws_lambda()).layers[0]
    assert [time is None for time in layer.forward_s] == [True, True, True, False, False, False, False, False]
    assert [time is None for time in layer.backward_s] == [True, True, True, False, False, False, False, False]


def test_what_cannot_be_scaled_is_named() -> None:
    with pytest.raises(InvalidRequest, match=r"layer layer1 needs 12,310 MB .* 10,240 MB"):
        scaled_profile(_profile(1, 6000), aws_lambda())
    with pytest.raises(InvalidRequest, match="layer layer0 has no measured time"):
        scaled_profile(_profile(1, forward_s=None), aws_lambda())
    with pytest.raises(InvalidRequest, match="already has 8 memory sizes"):
        scaled_profile(scaled_profile(_profile(1), aws_lambda()), aws_lambda())
