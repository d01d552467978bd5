"""Training on functions without a pipeline: workers, memory and times against numbers worked out by hand."""

import msgspec
import pytest

from springtide.core.functions import MIB, LayerProfile, ModelProfile
from springtide_studies.rivals.pipeline_baselines import BASELINES, ParameterServerBaseline, baseline_step

SERVER = ParameterServerBaseline(name="s", bytes_per_s=40e6, usd_per_hour=3600.0)


def _profile(parameter_mb: int = 100, activation_mb: int = 40) -> ModelProfile:
    """Two equal layers; per sample, 1 s and 2 s on 1,000 and 0.5 s and 1 s on 2,000 MB each."""
    layer = LayerProfile(
        name="a",
        parameter_bytes=parameter_mb * MIB,
        activation_bytes=4 * activation_mb * MIB,
        output_bytes=1,
        gradient_bytes=1,
        forward_s=(4.0, 2.0),
        backward_s=(8.0, 4.0),
    )
    return ModelProfile(
        model="m",
        micro_batch_size=4,
        memory_mb=(1000, 2000),
        bytes_per_s=(10.0 * MIB, 20.0 * MIB),
        layers=(layer, layer),
        latency_s=0.5,
        slowdown=3.0,
        base_bytes=200 * MIB,
    )


def test_one_worker_is_taken_where_the_batch_fits_and_exchanges_nothing() -> None:
    # 2,000 - 200 - 2 x 200 leaves 1,400 MB: 17 samples of 80 MB.
    for name in BASELINES:
        step = baseline_step(name, _profile(), 17, server=SERVER)
        assert step is not None
        assert (step.num_workers, step.sync_s, step.server_usd) == (1, 0.0, 0.0)
    whole = baseline_step("LambdaML", _profile(), 17)
    assert whole is not None
    assert (whole.memory_mb, whole.step_s, whole.cost_mb_s) == (2000, 17 * 3.0, 17 * 3.0 * 2000)
    # One sample at a time needs 200 + 400 + 80 MB, which the small one has.
    small = baseline_step("LambdaML-GA", _profile(), 17)
    assert small is not None
    assert (small.memory_mb, small.step_s) == (1000, 17 * 6.0)


def test_more_workers_hold_what_they_exchange_as_well() -> None:
    # 2,000 - 200 - 4 x 200 leaves 1,000 MB: 12 samples a worker.
    step = baseline_step("LambdaML", _profile(), 48)
    assert step is not None
    assert (step.num_workers, step.local_batch_size) == (4, 12)
    assert step.computation_s == pytest.approx(12 * 3.0)
    assert step.sync_s == pytest.approx((3 - 2 / 4) * 200 / 20 + 4 * 0.5)
    assert step.cost_mb_s == pytest.approx(step.step_s * 4 * 2000)


def test_with_accumulation_as_many_workers_have_the_least_memory() -> None:
    # One sample needs 200 + 800 + 80 MB: more than the small one has.
    step = baseline_step("LambdaML-GA", _profile(), 48)
    assert step is not None
    assert (step.num_workers, step.memory_mb) == (4, 2000)
    light = baseline_step("LambdaML-GA", _profile(activation_mb=0, parameter_mb=90), 48)
    assert light is not None
    assert light.num_workers == 1
    assert light.memory_mb == 1000


def test_a_parameter_server_s_link_is_shared_and_its_time_paid() -> None:
    step = baseline_step("HybridPS", _profile(), 48, server=SERVER)
    assert step is not None
    # Four workers share 40 MB/s: 10 MB/s each, twice 200 MiB.
    assert step.sync_s == pytest.approx(2 * 200 * MIB / 10e6 + 2 * 0.5)
    assert step.server_usd == pytest.approx(step.step_s)
    wide = baseline_step(
        "HybridPS", _profile(), 48, server=ParameterServerBaseline(name="w", bytes_per_s=1e9, usd_per_hour=1)
    )
    assert wide is not None
    assert wide.sync_s == pytest.approx(2 * 200 / 20 + 1.0)


def test_a_model_that_no_function_holds_has_no_step() -> None:
    assert baseline_step("LambdaML", _profile(parameter_mb=500), 16) is None
    # It fits alone with a batch of two, but not with what workers exchange.
    tight = _profile(parameter_mb=350)
    assert baseline_step("LambdaML", tight, 4) is not None
    assert baseline_step("LambdaML", tight, 64) is None
    layer = msgspec.structs.replace(_profile().layers[0], forward_s=(None, None), backward_s=(None, None))
    assert baseline_step("LambdaML", msgspec.structs.replace(_profile(), layers=(layer,)), 4) is None
