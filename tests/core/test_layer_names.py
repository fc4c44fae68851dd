"""Names of weights with their layer left open: exactly that part, and back for every layer."""

from hypothesis import given
from hypothesis import strategies as st

from sitsc.core.layer_names import LAYER, NEXT, name_in_layer, open_name


@given(layer=st.integers(0, 99), inner=st.integers(0, 9), other=st.integers(0, 99))
def test_the_layer_alone_is_left_open(layer: int, inner: int, other: int):
    name = f"model.layers.{layer}.mlp.{inner}.weight"
    opened = open_name(name, layer)
    assert opened == f"model.layers.{LAYER}.mlp.{inner}.weight"
    assert name_in_layer(opened, layer) == name
    assert name_in_layer(opened, other) == f"model.layers.{other}.mlp.{inner}.weight"
    ahead = open_name(f"model.layers.{layer + 1}.norm.weight", layer, following=True)
    assert ahead == f"model.layers.{NEXT}.norm.weight"
    assert name_in_layer(ahead, other) == f"model.layers.{other + 1}.norm.weight"


def test_names_outside_of_layers_stay():
    for name in ("model.norm.weight", "model.layers.7.norm.weight"):
        assert open_name(name, 3) == name and open_name(name, 3, following=True) == name
        assert name_in_layer(name, None) == name and name_in_layer(name, 3) == name
