import numpy as np
import pytest

from kits.runtime.models_of_users import KEYS, Replicas
from kits.runtime.pipeline_tasks_of_users import job_of
from springtide.client.models import jax_model
from springtide.core.errors import CheckpointError, InvalidRequest

jax = pytest.importorskip("jax")
jnp = jax.numpy


def init(key):
    one, two = jax.random.split(key)
    return {
        "hidden": {"w": jax.random.normal(one, (6, 5)) * 0.3, "b": jnp.zeros(5)},
        "out": [jax.random.normal(two, (5, 3)) * 0.3, jnp.zeros(3)],
    }


def loss(weights, x, y):
    hidden = jnp.tanh(x @ weights["hidden"]["w"] + weights["hidden"]["b"])
    scores = hidden @ weights["out"][0] + weights["out"][1]
    return -jnp.mean(jax.nn.log_softmax(scores)[jnp.arange(len(y)), y])


def update(weights, gradients, memory):
    memory = jax.tree.map(lambda old, gradient: 0.9 * old + gradient, memory, gradients)
    return jax.tree.map(lambda weight, velocity: weight - 0.2 * velocity, weights, memory), memory


def start(weights):
    return jax.tree.map(jnp.zeros_like, weights)


FACTORY = jax_model(init, loss, update, start=start)


def make():
    return FACTORY({})


@pytest.mark.slow
def test_replicas_of_a_jax_model_train_as_one():
    job = job_of(batch=6, epochs=2)
    one, many = Replicas(make, 1, job=job, micro_batch_size=6), Replicas(make, 3, job=job)
    losses = one.run(7)
    assert losses[-1] < losses[0]
    assert np.allclose(many.run(7), losses, atol=1e-6, rtol=0)
    state = many.workers[1].model.state()
    assert set(state) == {"hidden/w", "hidden/b", "out/0", "out/1", *(f"optimizer/{index}" for index in range(4))}
    for name, array in one.workers[0].model.state().items():
        assert np.allclose(array, state[name], atol=1e-6, rtol=0), name


def test_a_saved_state_goes_on_with_the_same_bits():
    expected = Replicas(make, 1)
    losses = expected.run(5)
    begun = Replicas(make, 1)
    assert begun.run(3) == losses[:3]
    begun.workers[0].save_state(begun.store, KEYS)
    begun.workers[0] = begun.build(begun.workers[0].plan, 0)
    begun.workers[0].load_state(begun.store, KEYS, 3)
    assert begun.run(2) == losses[3:]


def test_the_first_weights_follow_from_the_seed():
    one, same, other = (Replicas(make, 1, job=job_of(seed=seed)).workers[0].model for seed in (3, 3, 4))
    assert np.array_equal(one.weights["hidden"]["w"], same.weights["hidden"]["w"])
    assert not np.array_equal(one.weights["hidden"]["w"], other.weights["hidden"]["w"])


@pytest.mark.slow
def test_half_precision_keeps_its_type_on_its_way_through_the_store():
    def narrow(key):
        return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), init(key))

    def model():
        return jax_model(
            narrow, loss, lambda weights, gradients, memory: (jax.tree.map(lambda w, g: w - g, weights, gradients), 0)
        )({})

    replicas = Replicas(model, 2)
    replicas.run(2)
    worker = replicas.workers[0]
    worker.save_state(replicas.store, KEYS)
    before = worker.model.weights["hidden"]["w"]
    assert before.dtype == jnp.bfloat16
    fresh = replicas.build(worker.plan, 0)
    fresh.model.memory = 0
    fresh.load_state(replicas.store, KEYS, 2)
    assert fresh.model.weights["hidden"]["w"].dtype == jnp.bfloat16
    assert np.array_equal(np.asarray(fresh.model.weights["hidden"]["w"]), np.asarray(before))


@pytest.mark.slow
def test_a_model_may_have_another_size_in_each_epoch():
    def resize(weights, epoch):
        if epoch == 0:
            return weights
        return {
            "hidden": {
                "w": jnp.concatenate([weights["hidden"]["w"], jnp.full((6, 1), 0.1)], axis=1),
                "b": jnp.concatenate([weights["hidden"]["b"], jnp.zeros(1)]),
            },
            "out": [jnp.concatenate([weights["out"][0], jnp.full((1, 3), 0.1)]), weights["out"][1]],
        }

    factory = jax_model(init, loss, update, start=start, resize=resize)
    job = job_of(batch=44, epochs=3)
    one, two = (Replicas(lambda: factory({}), count, job=job, micro_batch_size=22) for count in (1, 2))
    assert np.allclose(two.run(2), one.run(2), atol=1e-6, rtol=0)
    assert two.workers[0].model.weights["hidden"]["w"].shape == (6, 6)
    # Whoever comes in then has the size that the others have.
    two.workers[0].save_state(two.store, KEYS)
    joiner = two.build(two.workers[1].plan, 1)
    joiner.load_state(two.store, KEYS, 2)
    joiner.exchange = two.communicator(joiner.plan, 1)
    two.workers[1] = joiner
    assert np.allclose(two.run(1), one.run(1), atol=1e-6, rtol=0)
    assert joiner.model.weights["hidden"]["w"].shape == (6, 7)


@pytest.mark.slow
def test_an_optimizer_as_those_of_optax():
    class Sgd:
        def init(self, weights):
            return ()

        def update(self, gradients, memory, weights):
            return jax.tree.map(lambda gradient: -0.2 * gradient, gradients), memory

    def by_hand():
        return jax_model(
            init, loss, lambda weights, g, memory: (jax.tree.map(lambda w, d: w + -0.2 * d, weights, g), memory)
        )({})

    assert Replicas(lambda: jax_model(init, loss, Sgd())({}), 1).run(4) == Replicas(by_hand, 1).run(4)


def test_what_cannot_be_a_jax_model_is_refused():
    with pytest.raises(InvalidRequest, match="needs loss to be a function"):
        jax_model(init, 3, update)
    with pytest.raises(InvalidRequest, match="an optimizer with init and update"):
        jax_model(init, loss, 3)
    with pytest.raises(InvalidRequest, match="must give at least one array"):
        jax_model(lambda key: {}, loss, update)({})
    with pytest.raises(InvalidRequest, match="must give two"):
        Replicas(lambda: jax_model(init, loss, lambda weights, gradients, memory: weights)({}), 1).run(1)
    with pytest.raises(CheckpointError, match="another optimizer"):
        make().load({name: array for name, array in make().state().items() if not name.startswith("optimizer/")})
