"""FuncPipe's performance model against sums done by hand."""

import numpy as np
import pytest

from kits.perf.pipeline_profiles import drawn_profile
from springtide.core.errors import InvalidRequest
from springtide.core.functions import MIB, FunctionPlan, FunctionStage, LayerProfile, ModelProfile
from springtide.perf.functions.collective_time import sync_time_s
from springtide.perf.functions.pipeline.step_time import SyncRule, estimate_step, memory_bytes, objective, sync_rule


def layer(name, forward_s, backward_s, output_bytes=0, gradient_bytes=0, parameter_bytes=0, activation_bytes=0):
    return LayerProfile(
        name=name,
        parameter_bytes=parameter_bytes,
        activation_bytes=activation_bytes,
        output_bytes=output_bytes,
        gradient_bytes=gradient_bytes,
        forward_s=(forward_s, forward_s / 2),
        backward_s=(backward_s, backward_s / 2),
    )


PROFILE = ModelProfile(
    model="hand",
    micro_batch_size=1,
    memory_mb=(1024, 2048),
    bytes_per_s=(10.0, 20.0),
    layers=(
        layer("a", 1.0, 2.0, output_bytes=30, parameter_bytes=100, activation_bytes=10),
        layer("b", 3.0, 4.0, output_bytes=40, gradient_bytes=20, parameter_bytes=200, activation_bytes=20),
        layer("c", 2.0, 6.0, gradient_bytes=50, parameter_bytes=300, activation_bytes=30),
    ),
    latency_s=0.5,
    slowdown=1.0,
    base_bytes=1000,
)


def plan_of(*stages, num_replicas=1, num_micro_batches=1, **changes):
    return FunctionPlan(
        stages=tuple(FunctionStage(first_layer=f, end_layer=e, memory_mb=m) for f, e, m in stages),
        num_replicas=num_replicas,
        num_micro_batches=num_micro_batches,
        **changes,
    )


def test_one_function_computes_everything_and_waits_for_nothing():
    found = estimate_step(PROFILE, plan_of((0, 3, 1024), num_micro_batches=3))
    # (1 + 3 + 2) forward and (2 + 4 + 6) backward, three times.
    assert found.step_s == pytest.approx(54.0)
    assert found.computation_s == pytest.approx(54.0)
    assert (found.flush_s, found.sync_s) == (pytest.approx(0.0), 0.0)
    assert found.cost_mb_s == pytest.approx(54.0 * 1024)


def test_two_stages_with_transfers_lags_and_an_exchange():
    plan = plan_of((0, 2, 1024), (2, 3, 2048), num_replicas=2, num_micro_batches=3)
    found = estimate_step(PROFILE, plan, SyncRule(gamma=2.0, delta=4.0))
    # Forward: 4 and 1, the output of b up in 40/10 + .5 and down in 40/20 + .5; the longest lag is the upload's 4.5.
    forward_s = 4.0 + 1.0 + 4.5 + 2.5 + 2 * 4.5
    assert found.forward_s == pytest.approx(forward_s)
    # Above: c takes 3 backward, lags 3, and exchanges 300 bytes at 20/s twice, and four latencies.
    upper = forward_s + 3.0 + 2 * 3.0 + 2.0 * 300 / 20 + 4 * 0.5
    # Below: c's gradient up in 50/20 + .5, down in 50/10 + .5; a and b take 6, the longest lag; 300 bytes at 10/s.
    lower = forward_s + 3.0 + 3.0 + 5.5 + 6.0 + 2 * 6.0 + 2.0 * 300 / 10 + 4 * 0.5
    assert [stage.end_s for stage in found.stages] == [pytest.approx(lower), pytest.approx(upper)]
    assert found.step_s == pytest.approx(lower)
    assert found.memory_mb == 2 * (1024 + 2048)
    assert found.computation_s == pytest.approx(3 * (4.0 + 6.0))
    assert found.computation_s + found.flush_s + found.sync_s == pytest.approx(found.step_s)
    assert objective(found, (1.0, 2.0**16)) == pytest.approx(found.step_s * (6144 + 2**16))


def test_an_upper_stage_with_much_to_exchange_can_end_last():
    plan = plan_of((0, 2, 1024), (2, 3, 2048), num_replicas=2)
    rule = SyncRule(gamma=0.0, delta=0.0)
    quick = estimate_step(PROFILE, plan, rule)
    assert quick.stages[0].end_s > quick.stages[1].end_s
    heavy = estimate_step(
        ModelProfile(
            **{name: getattr(PROFILE, name) for name in PROFILE.__struct_fields__ if name != "layers"},
            layers=(*PROFILE.layers[:2], layer("c", 2.0, 6.0, gradient_bytes=50, parameter_bytes=9000)),
        ),
        plan,
        SyncRule(gamma=1.0, delta=0.0),
    )
    assert heavy.step_s == pytest.approx(heavy.stages[1].end_s)
    assert heavy.sync_s == pytest.approx(9000 / 20)


def test_memory_counts_activations_of_every_micro_batch_and_two_or_four_copies_of_parameters():
    assert memory_bytes(PROFILE, 0, 2, 5, 1) == 5 * 30 + 2 * 300 + 1000
    assert memory_bytes(PROFILE, 0, 2, 5, 2) == 5 * 30 + 4 * 300 + 1000


def test_what_does_not_fit_is_refused_in_one_sentence():
    large = ModelProfile(
        **{name: getattr(PROFILE, name) for name in PROFILE.__struct_fields__ if name != "layers"},
        layers=(*PROFILE.layers[:2], layer("c", 2.0, 6.0, parameter_bytes=2000 * MIB)),
    )
    with pytest.raises(InvalidRequest, match="stage 1 needs 4000 MB and has 2048 MB"):
        estimate_step(large, plan_of((0, 2, 1024), (2, 3, 2048)))
    with pytest.raises(InvalidRequest, match="plan again"):
        estimate_step(PROFILE, plan_of((0, 2, 1024)))
    with pytest.raises(InvalidRequest, match="knows 1024, 2048 MB"):
        estimate_step(PROFILE, plan_of((0, 3, 4096)))
    unknown = ModelProfile(
        **{name: getattr(PROFILE, name) for name in PROFILE.__struct_fields__ if name != "layers"},
        layers=(LayerProfile(name="big", parameter_bytes=0, activation_bytes=0, output_bytes=0, gradient_bytes=0,
                             forward_s=(None, 1.0), backward_s=(None, 1.0)),),
    )  # fmt: skip
    with pytest.raises(InvalidRequest, match="big"):
        estimate_step(unknown, plan_of((0, 1, 1024)))
    assert estimate_step(unknown, plan_of((0, 1, 2048))).step_s == 2.0


def test_the_papers_rules():
    assert sync_rule("funcpipe", 8) == SyncRule(gamma=2.0, delta=10.0)
    assert sync_rule("lambdaml", 8) == SyncRule(gamma=2.75, delta=4.0)
    assert sync_rule("smlt", 4).gamma == 3.25
    assert sync_rule("duplex", 1).seconds(1e9, 1.0, 1.0) == 0.0


@pytest.mark.parametrize("collective", ["duplex", "parameter-server"])
@pytest.mark.parametrize("num_replicas", [2, 3, 8, 16])
def test_our_schedules_are_timed_as_they_are_walked(collective, num_replicas):
    rng = np.random.default_rng(num_replicas)
    for chunks in (1, 4, 6):
        rule = sync_rule(collective, num_replicas, chunks)
        for _ in range(40):
            num_bytes, latency_s = 10 ** rng.uniform(3, 9), float(rng.choice([0.0, 0.002, 0.04]))
            expected = sync_time_s(collective, num_replicas, num_bytes, 7e7, latency_s, chunks)
            assert rule.seconds(num_bytes, 7e7, latency_s) == pytest.approx(expected, rel=2e-3)


def test_more_bandwidth_is_never_slower():
    profile = drawn_profile(3, 6)
    plan = plan_of((0, 3, 2048), (3, 6, 4096), num_replicas=2, num_micro_batches=2)
    faster = ModelProfile(
        **{name: getattr(profile, name) for name in profile.__struct_fields__ if name != "bytes_per_s"},
        bytes_per_s=tuple(2 * one for one in profile.bytes_per_s),
    )
    assert estimate_step(faster, plan).step_s < estimate_step(profile, plan).step_s
