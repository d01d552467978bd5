"""A worker from a profile, and the sizes it could have."""

import itertools

import msgspec
import pytest

from kits.perf.pipeline_profiles import drawn_profile
from springtide.core.errors import InvalidRequest
from springtide.core.function_search import WorkerModel
from springtide.core.functions import MIB, FunctionService, LayerProfile, MemorySize, ModelProfile
from springtide.perf.functions.scale import scaled_profile
from springtide.perf.functions.services import alibaba_function_compute, aws_lambda, emulator, lambda_vcpus
from springtide.perf.functions.workers.model import space_of, worker_bytes, worker_model_of


def profile_of(fixed_s=0.0):
    layers = tuple(
        LayerProfile(
            name=f"layer{number}",
            parameter_bytes=(number + 1) * MIB,
            activation_bytes=4 * MIB,
            output_bytes=MIB,
            gradient_bytes=MIB,
            forward_s=(0.1,),
            backward_s=(0.3,),
        )
        for number in range(3)
    )
    profile = ModelProfile(model="net", micro_batch_size=4, memory_mb=(1769,), bytes_per_s=(70e6,), layers=layers)
    return msgspec.structs.replace(profile, fixed_s=fixed_s)


def test_a_worker_is_the_sum_of_the_layers():
    model = worker_model_of(profile_of())
    assert model.parameter_bytes == 6 * MIB
    assert model.sample_s == pytest.approx(0.3)
    assert model.sample_bytes == 3 * MIB
    assert (model.fixed_s, model.micro_batch_size) == (0.0, 4)
    part = worker_model_of(profile_of(fixed_s=0.2))
    assert part.fixed_s == pytest.approx(0.2)
    assert part.sample_s == pytest.approx(0.25)


def test_a_scaled_profile_comes_back_to_one_core():
    service = aws_lambda()
    scaled = scaled_profile(profile_of(), service)
    assert worker_model_of(scaled, service).sample_s == pytest.approx(0.3)
    with pytest.raises(InvalidRequest, match="take one on one core"):
        worker_model_of(scaled)
    unmeasured = drawn_profile(1, 3)
    gone = msgspec.structs.replace(unmeasured.layers[0], forward_s=(None,) * len(unmeasured.memory_mb))
    broken = msgspec.structs.replace(unmeasured, layers=(gone, *unmeasured.layers[1:]))
    sizes = tuple(
        MemorySize(memory_mb=memory_mb, vcpus=1.0, bytes_per_s=speed)
        for memory_mb, speed in zip(broken.memory_mb, broken.bytes_per_s, strict=True)
    )
    with pytest.raises(InvalidRequest, match="has no measured time"):
        worker_model_of(broken, FunctionService(name="drawn", sizes=sizes, prices=service.prices))


def test_sizes_go_in_steps_from_the_smallest_that_holds_the_model():
    model = WorkerModel(parameter_bytes=100 * MIB, sample_s=0.1, sample_bytes=10 * MIB, base_bytes=300 * MIB)
    space = space_of(aws_lambda(), model)
    memory_mb = [size.memory_mb for size in space.sizes]
    assert all(other - one == 128 for one, other in itertools.pairwise(memory_mb))
    assert memory_mb[-1] == 10240
    assert memory_mb[0] * MIB >= worker_bytes(model) > (memory_mb[0] - 128) * MIB
    assert space.max_workers == 200
    for size in space.sizes:
        assert size.vcpus == pytest.approx(lambda_vcpus(size.memory_mb))
        assert size.bytes_per_s == pytest.approx(70e6)


def test_what_a_provider_names_is_kept_and_lies_on_its_curve():
    tiny = WorkerModel(parameter_bytes=MIB, sample_s=0.1)
    for service in (alibaba_function_compute(), aws_lambda(enhanced_network=True), emulator(max_vcpus=1.0)):
        space = {size.memory_mb: size for size in space_of(service, tiny).sizes}
        for size in service.sizes:
            assert space[size.memory_mb].vcpus == pytest.approx(size.vcpus)
            assert space[size.memory_mb].bytes_per_s == pytest.approx(size.bytes_per_s)
    capped = space_of(emulator(max_vcpus=1.0), tiny)
    assert max(size.vcpus for size in capped.sizes) == pytest.approx(1.0)


def test_bounds_are_the_askers_and_the_services():
    model = WorkerModel(parameter_bytes=MIB, sample_s=0.1)
    assert space_of(emulator(concurrency=16), model).max_workers == 16
    assert space_of(emulator(concurrency=16), model, max_workers=5).max_workers == 5
    assert space_of(emulator(concurrency=16), model, max_workers=50).max_workers == 16
    with pytest.raises(InvalidRequest, match="at least one worker"):
        space_of(emulator(), model, max_workers=0)


def test_a_model_that_fits_no_function_is_refused_with_what_would_do():
    large = WorkerModel(parameter_bytes=4000 * MIB, sample_s=1.0)
    with pytest.raises(InvalidRequest, match="cut the model into stages"):
        space_of(aws_lambda(), large)
