"""Plans of a profile: scored by the model as written, proved, recommended, and refused in one sentence."""

import msgspec
import pytest

from kits.perf.pipeline_profiles import drawn_profile, plan_pipeline
from springtide.core.errors import InvalidRequest
from springtide.perf.functions.pipeline.merge import merged, unmerged
from springtide.perf.functions.pipeline.plan import (
    WEIGHTS,
    PipelinePlanner,
    delta_of,
    plan_of,
    problem_of,
    recommended,
)
from springtide.perf.functions.pipeline.step_time import estimate_step, objective
from springtide.solvers.pipeline.exhaustive import best_of, every_memory


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("collective", ["duplex", "funcpipe"])
def test_the_plan_is_the_best_of_all_by_the_model_as_written(seed, collective):
    profile = drawn_profile(seed, 5)
    points = every_memory(problem_of(profile, 8, degrees=(1, 2, 4), collective=collective))
    for planned in plan_pipeline(profile, 8, degrees=(1, 2, 4), collective=collective):
        value, point = best_of(points, planned.weights)
        assert planned.is_proved
        assert planned.value == pytest.approx(value, rel=1e-9)
        assert objective(estimate_step(profile, planned.plan), planned.weights) == planned.value
        other = plan_of(point.stages, point.degree, profile, collective=collective)
        assert objective(estimate_step(profile, other), planned.weights) == pytest.approx(value, rel=1e-9)


def test_no_plan_of_the_model_as_written_is_better_than_the_one_found():
    profile = drawn_profile(5, 4)
    best = plan_pipeline(profile, 4, weights=[(1.0, 2.0**16)], degrees=(2,))[0]
    for point in every_memory(problem_of(profile, 4, degrees=(2,))):
        plan = plan_of(point.stages, point.degree, profile)
        assert objective(estimate_step(profile, plan), best.weights) >= best.value * (1 - 1e-12)


def test_more_weight_on_time_is_never_slower_or_cheaper():
    planned = plan_pipeline(drawn_profile(1, 10), 16)
    steps = [one.estimate.step_s for one in planned]
    costs = [one.estimate.cost_mb_s for one in planned]
    assert steps == sorted(steps, reverse=True)
    assert costs == sorted(costs)


def test_the_recommended_plan_is_the_fastest_worth_its_cost():
    planned = plan_pipeline(drawn_profile(1, 10), 16)
    chosen = recommended(planned)
    assert planned[chosen].delta is None or planned[chosen].delta >= 0.8
    for one in planned:
        if one.delta is not None and one.delta >= 0.8:
            assert one.estimate.step_s >= planned[chosen].estimate.step_s
    cheapest = planned[0].estimate
    assert planned[0].delta is None
    twice = msgspec.structs.replace(cheapest, step_s=cheapest.step_s / 2, cost_mb_s=cheapest.cost_mb_s * 1.5)
    assert delta_of(twice, cheapest) == pytest.approx(2.0)


def test_replicas_share_micro_batches_and_none_is_idle():
    problem = problem_of(drawn_profile(1, 4), 6, degrees=(1, 2, 4, 8))
    assert [(one.num_replicas, one.num_micro_batches) for one in problem.degrees] == [(1, 6), (2, 3), (4, 2)]


def test_a_limit_on_functions_holds():
    profile = drawn_profile(1, 10)
    free = PipelinePlanner(profile, 16).plan((1.0, 2.0**22))
    bound = PipelinePlanner(profile, 16, max_functions=4).plan((1.0, 2.0**22))
    assert free.plan.num_functions > 4 >= bound.plan.num_functions
    assert bound.value >= free.value
    with pytest.raises(InvalidRequest, match="as few functions"):
        PipelinePlanner(drawn_profile(1, 10, megabytes=250), 1, max_functions=1).plan((1.0, 0.0))


def test_a_layer_that_fits_no_function_is_named_with_what_it_needs():
    profile = drawn_profile(2, 4)
    huge = msgspec.structs.replace(profile.layers[2], name="embedding", parameter_bytes=3000 * 2**20)
    profile = msgspec.structs.replace(profile, layers=(*profile.layers[:2], huge, profile.layers[3]))
    with pytest.raises(InvalidRequest, match=r"layer 2 \(embedding\) fits no function: alone it needs 6\d\d\d MB"):
        PipelinePlanner(profile, 4).plan((1.0, 0.0))
    unmeasured = msgspec.structs.replace(profile.layers[0], forward_s=(None,) * 4, backward_s=(None,) * 4)
    with pytest.raises(InvalidRequest, match="measured on none"):
        PipelinePlanner(msgspec.structs.replace(profile, layers=(unmeasured,)), 4).plan((1.0, 0.0))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"memory_mb": (1024, 512, 2048, 4096)}, "ascending"),
        ({"bytes_per_s": (1e6,)}, "each size has one"),
        ({"bytes_per_s": (0.0, 1e6, 1e6, 1e6)}, "above 0"),
        ({"slowdown": float("nan")}, "finite"),
        ({"layers": ()}, "0 layers"),
    ],
)
def test_bad_profiles_get_one_sentence(change, said):
    with pytest.raises(InvalidRequest, match=said):
        PipelinePlanner(msgspec.structs.replace(drawn_profile(1, 3), **change), 4)


def test_bad_layers_weights_and_counts_get_one_sentence():
    profile = drawn_profile(1, 3)
    wrong = msgspec.structs.replace(profile.layers[1], forward_s=(1.0,))
    with pytest.raises(InvalidRequest, match=r"layer 1 \(layer1\) must have 4 times"):
        PipelinePlanner(msgspec.structs.replace(profile, layers=(profile.layers[0], wrong)), 4)
    wrong = msgspec.structs.replace(profile.layers[1], parameter_bytes=-1)
    with pytest.raises(InvalidRequest, match="negative"):
        PipelinePlanner(msgspec.structs.replace(profile, layers=(profile.layers[0], wrong)), 4)
    for weights in [(0.0, 0.0), (-1.0, 1.0), (1.0, float("inf"))]:
        with pytest.raises(InvalidRequest, match="two finite numbers"):
            PipelinePlanner(profile, 4, weights=[weights])
    with pytest.raises(InvalidRequest, match="at least 1"):
        problem_of(profile, 0)
    with pytest.raises(InvalidRequest, match="too many for this step"):
        problem_of(profile, 2, degrees=(4,))
    with pytest.raises(InvalidRequest, match="whole numbers from 1"):
        problem_of(profile, 2, degrees=(0,))


def test_merging_keeps_the_sums_and_its_plans_are_plans_of_the_original():
    profile = drawn_profile(4, 20)
    short, ends = merged(profile, 6)
    assert len(short.layers) == len(ends) == 6
    assert ends[-1] == 20
    assert sum(one.parameter_bytes for one in short.layers) == sum(one.parameter_bytes for one in profile.layers)
    merged_plan = PipelinePlanner(short, 8).plan(WEIGHTS[1])
    exact = PipelinePlanner(profile, 8).plan(WEIGHTS[1])
    again = estimate_step(profile, unmerged(merged_plan.plan, ends))
    assert again.step_s == pytest.approx(merged_plan.estimate.step_s)
    assert exact.value <= merged_plan.value * (1 + 1e-12)


def test_merged_groups_compute_about_as_long():
    profile = drawn_profile(4, 30)
    short, ends = merged(profile, 5)
    times = [one.forward_s[-1] + one.backward_s[-1] for one in short.layers]
    longest = max(one.forward_s[-1] + one.backward_s[-1] for one in profile.layers)
    assert max(times) <= sum(times) / 5 + longest
    assert merged(profile, 40) == (profile, tuple(range(1, 31)))
    assert [len(merged(profile, n)[1]) for n in range(1, 31)] == list(range(1, 31))
    with pytest.raises(InvalidRequest, match="at least 1"):
        merged(profile, 0)
    del ends


def test_a_group_with_a_layer_that_does_not_fit_does_not_fit():
    profile = drawn_profile(4, 4)
    small = msgspec.structs.replace(
        profile.layers[0], forward_s=(None, 1.0, 1.0, 1.0), backward_s=(None, 1.0, 1.0, 1.0)
    )
    short, _ = merged(msgspec.structs.replace(profile, layers=(small, *profile.layers[1:])), 1)
    assert short.layers[0].forward_s[0] is None
    assert short.layers[0].forward_s[1] is not None
