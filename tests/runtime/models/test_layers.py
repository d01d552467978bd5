import pytest
import torch
from torch import nn

from springtide.core.errors import InvalidRequest
from springtide.runtime.models.layers import borders, build_stage, has_gradient, layers_of


class Declared(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 7)
        self.register_buffer("unused_mask", torch.ones(2), persistent=False)
        del self._buffers["unused_mask"]

    def pipeline_layers(self):
        return [self.embed, *self.blocks, nn.Sequential(nn.ReLU(), self.head)]


def test_nested_sequences_are_flattened_with_their_names():
    model = nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.BatchNorm1d(3))), nn.ReLU())
    assert [layer.name for layer in layers_of(model)] == ["0", "1.0", "1.1.0", "2"]


def test_the_layers_make_the_models_forward():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 2)))
    x = torch.randn(5, 4)
    value = x
    for layer in layers_of(model):
        value = layer.module(value)
    assert torch.equal(value, model(x))


def test_a_sequence_with_a_forward_of_its_own_stays_whole():
    class Residual(nn.Sequential):
        def forward(self, x):
            return x + super().forward(x)

    model = nn.Sequential(nn.Linear(4, 4), Residual(nn.Linear(4, 4), nn.ReLU()))
    assert [layer.name for layer in layers_of(model)] == ["0", "1"]
    with pytest.raises(InvalidRequest, match="pipeline_layers"):
        layers_of(Residual(nn.Linear(4, 4)))


def test_a_declared_model_keeps_its_own_names():
    model = Declared()
    layers = layers_of(model)
    assert [layer.name for layer in layers] == ["embed", "blocks.0", "blocks.1", "layer3"]
    stages = [build_stage(model, layers, 0, 2), build_stage(model, layers, 2, 4)]
    names = [name for stage in stages for of_tensor in stage.names.values() for name in of_tensor]
    assert sorted(names) == sorted(model.state_dict())
    assert stages[1].names["layers.3.1.weight"] == ["head.weight"]
    assert stages[0].get_parameter("layers.1.weight") is model.blocks[0].weight


def test_buffers_keep_their_names_and_what_is_not_kept_has_none():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.ones(3), persistent=False)

        def forward(self, x):
            return x * self.mask

    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), Masked())
    stage = build_stage(model, layers_of(model), 1, 3)
    assert stage.names["layers.1.running_mean"] == ["1.running_mean"]
    assert "layers.2.mask" not in stage.names
    assert set(dict(stage.named_buffers())) == {
        "layers.1.running_mean",
        "layers.1.running_var",
        "layers.1.num_batches_tracked",
        "layers.2.mask",
    }


def test_weights_tied_within_a_layer_keep_both_names():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(3, 3, bias=False)
            self.two = nn.Linear(3, 3, bias=False)
            self.two.weight = self.one.weight

        def forward(self, x):
            return self.two(self.one(x))

    model = nn.Sequential(Tied())
    stage = build_stage(model, layers_of(model), 0, 1)
    assert stage.names == {"layers.0.one.weight": ["0.one.weight", "0.two.weight"]}


def test_a_tensor_lives_in_exactly_one_layer():
    shared = nn.Linear(4, 4)
    with pytest.raises(InvalidRequest, match=r"share '0.weight'"):
        layers_of(nn.Sequential(shared, nn.ReLU(), shared))
    tied = Declared()
    tied.head.weight = tied.embed.weight
    with pytest.raises(InvalidRequest, match=r"embed and layer3 share 'embed.weight'"):
        layers_of(tied)


def test_a_function_without_tensors_may_come_twice():
    relu = nn.ReLU()
    assert len(layers_of(nn.Sequential(nn.Linear(2, 2), relu, nn.Linear(2, 2), relu))) == 4


@pytest.mark.parametrize(
    ("declared", "sentence"),
    [
        (lambda model: None, "must return the list"),
        (lambda model: [model.embed, lambda x: x], "has a function in its list"),
        (lambda model: [model.embed], "in none of the model's layers"),
        (lambda model: [], "no layers"),
        (lambda model: [*Declared.pipeline_layers(model), nn.Linear(7, 7)], "which the model itself does not"),
    ],
)
def test_what_is_declared_wrongly_is_refused(declared, sentence):
    class Wrong(Declared):
        pipeline_layers = declared

    with pytest.raises(InvalidRequest, match=sentence):
        layers_of(Wrong())


def test_a_model_without_layers_is_told_how_to_declare_them():
    with pytest.raises(InvalidRequest, match=r"give it a method pipeline_layers\(\)"):
        layers_of(nn.Linear(2, 2))


def test_a_plan_for_another_model_is_refused():
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(InvalidRequest, match="the model has 1"):
        build_stage(model, layers_of(model), 0, 2)


def test_what_writes_over_its_input_is_known():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True), nn.Linear(2, 2))
    layers = layers_of(model)
    assert build_stage(model, layers, 1, 3).starts_in_place
    assert not build_stage(model, layers, 0, 3).starts_in_place


def test_what_travels_is_a_tensor_or_a_tuple_of_them():
    one, two = torch.ones(2), torch.ones(3, dtype=torch.int64)
    assert borders(one, "a layer") == ((one,), False)
    assert borders((one, two), "a layer")[1]
    assert has_gradient(one)
    assert not has_gradient(two)
    with pytest.raises(InvalidRequest, match="gives a dict"):
        borders({"x": one}, "the layer 3")
