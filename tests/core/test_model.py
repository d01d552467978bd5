from springtide.core.model import call_factory, is_model


class Whole:
    def gradients(self, x, y):
        return 0.0, {}

    def apply(self, gradients):
        pass

    def state(self):
        return {}

    def load(self, state):
        pass


def test_a_model_is_what_has_its_four_methods_and_a_class_of_them_is_a_factory():
    assert is_model(Whole())
    assert not is_model(Whole)
    assert not is_model(object())


def test_a_factory_gets_the_params_that_it_names():
    params = {"width": "8"}
    assert call_factory(lambda: 3, params=params) == 3
    assert call_factory(lambda params: params["width"], params=params) == "8"
    assert call_factory(lambda weights, *, params: (weights, params["width"]), [1], params=params) == ([1], "8")


def test_what_an_optimizer_calls_params_are_the_weights():
    def optimizer(params, rate=0.1):
        return params, rate

    assert call_factory(optimizer, [1.0], params={"rate": "9"}) == ([1.0], 0.1)
    assert call_factory(dict, params={"rate": "9"}) == {}
