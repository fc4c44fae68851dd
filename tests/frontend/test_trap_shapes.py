"""Peculiarities of shapes, biases and rotary embeddings from public bug reports, one test each.

Each either works as the reference does or is refused by an error that names key, value and what to
do. Those that only splitting over devices meets are in test_trap_ranks.py.
"""

import math
from typing import Any

import pytest
import torch

from sitsc.core.errors import (
    ConfigError,
)
from sitsc.core.interpret import (
    relative_error,
)
from sitsc.frontend.config_lint import lint_config, lint_tensors
from sitsc.models.parameters import parameter_shapes
from tests.frontend.test_config_lint import infos
from tests.frontend.trap_models import (
    constants,
    cosine_factor,
    frequencies,
    logits,
    model,
    reference,
    traced,
    windows,
)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3"])
def test_head_dim_differs_from_hidden_by_heads(kind: str):
    config = model(kind, head_dim=24)
    tensors = infos(parameter_shapes(config))
    assert tensors["model.layers.0.self_attn.q_proj.weight"].shape == (96, 64)
    lint_tensors(config, tensors)
    with pytest.raises(ConfigError, match=r"calls for \[64, 64\].*check head_dim"):
        lint_tensors(config | {"head_dim": 16}, tensors)
    with pytest.raises(ConfigError, match="check head_dim"):
        lint_tensors({k: v for k, v in config.items() if k != "head_dim"}, tensors)


def test_head_dim_of_gemma_and_qwen3_has_the_familys_default():
    for kind, default in (("gemma", 256), ("qwen3", 128), ("gpt_oss", 64)):
        config = model(kind, num_local_experts=4 if kind == "gpt_oss" else None)
        like = config | {"head_dim": default, "model_type": "llama" if kind == "gemma" else kind}
        lint_tensors(config, infos(parameter_shapes(like)))
        with pytest.raises(ConfigError, match=rf"calls for \[64, {4 * default}\]"):
            lint_tensors(config, infos(parameter_shapes(like | {"head_dim": 16})))


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_every_spelling_of_rope_scaling_means_the_same():
    spellings: list[dict[str, Any]] = [
        {"rope_scaling": LLAMA3 | {"rope_type": "llama3"}},
        {"rope_scaling": LLAMA3 | {"type": "llama3"}},
        {"rope_scaling": LLAMA3 | {"type": "llama3", "rope_type": "llama3"}},
        {
            "rope_theta": None,
            "rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 10000.0},
        },
    ]
    values = [frequencies(traced(model("llama", **spelling))) for spelling in spellings]
    assert all(torch.equal(value, values[0]) for value in values)
    assert not torch.equal(values[0], frequencies(traced(model("llama"))))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, "contradict"),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "'ntk'.*known: default, linear"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_type = None"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "rope_theta at the top"),
        ({"rope_theta": None}, "given nowhere, and this family has no default"),
    ],
)
def test_rope_conflicts_unknown_types_and_a_missing_base(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        lint_config(model("qwen2", **changes))


def yarn(head_dim: int, base: float, factor: float, original: int) -> list[float]:
    """Frequencies of YaRN in double precision, from its definition: ramp between 32 and 1 turns."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(dimension(32)), 0), min(math.ceil(dimension(1)), head_dim - 1)
    found = []
    for i in range(head_dim // 2):
        plain = base ** (-2 * i / head_dim)
        ramp = min(max((i - low) / max(high - low, 0.001), 0.0), 1.0)
        found.append(plain / factor * ramp + plain * (1 - ramp))
    return found


def test_yarn_frequencies_and_attention_factor_to_a_millionth():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    graph = traced(model("llama", head_dim=32, rope_scaling=scaling))
    wanted = torch.tensor(yarn(32, 1e4, 4.0, 128), dtype=torch.float64)
    assert float((frequencies(graph).double() / wanted - 1).abs().max()) < 1e-6
    assert math.isclose(cosine_factor(graph), 0.1 * math.log(4.0) + 1, rel_tol=1e-6)
    given = traced(model("llama", rope_scaling=scaling | {"attention_factor": 1.25}))
    assert cosine_factor(given) == 1.25
    with_mscale = scaling | {"mscale": 0.8, "mscale_all_dim": 0.5}
    both = cosine_factor(traced(model("llama", rope_scaling=with_mscale)))
    ratio = (0.08 * math.log(4.0) + 1) / (0.05 * math.log(4.0) + 1)
    assert math.isclose(both, ratio, rel_tol=1e-6)


@pytest.mark.parametrize(
    ("kind", "changes", "rotated"),
    [
        ("stablelm", {}, 4),
        ("stablelm", {"partial_rotary_factor": 0.5}, 8),
        ("gpt_neox", {"num_key_value_heads": None}, 4),
        ("gpt_neox", {"num_key_value_heads": None, "rotary_pct": 1.0}, 16),
        ("glm4", {"head_dim": 16}, 8),
        ("phi3", {}, 16),
    ],
)
def test_partial_rotary_has_the_familys_default(kind: str, changes: dict[str, Any], rotated: int):
    assert len(frequencies(traced(model(kind, **changes)))) == rotated // 2


def test_layers_differ_in_rope_base_window_and_rope_at_all():
    inverted = model(
        "qwen2",
        num_hidden_layers=2,
        use_sliding_window=True,
        sliding_window=16,
        max_window_layers=1,
    )
    graph = traced(inverted)
    assert windows(graph) == [0, 16]  # the first max_window_layers layers see everything
    assert relative_error(logits(graph), reference(inverted, graph)) < 1e-5  # past the window
    unused = inverted | {"use_sliding_window": False}
    assert windows(traced(unused)) == [0, 0]
    types = ["sliding_attention", "full_attention"]
    bases = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    }
    gemma = model(
        "gemma3_text",
        num_hidden_layers=2,
        head_dim=16,
        layer_types=types,
        sliding_window=16,
        rope_theta=None,
        rope_parameters=bases,
        query_pre_attn_scalar=16,
    )
    graph = traced(gemma)
    assert windows(graph) == [16, 0]
    values = [v for n, v in constants(graph).items() if n.endswith("inv_freq")]
    assert sorted(round(float(v[-1]) ** (-8 / 7)) for v in values) == [10000, 1000000]


def test_layers_without_rope():
    config = model("smollm3", num_hidden_layers=2, no_rope_layers=[1, 0])
    graph = traced(config)
    assert relative_error(logits(graph), reference(config, graph)) < 1e-5
    other = logits(traced(config | {"no_rope_layers": [1, 1]}))
    assert relative_error(other, logits(graph)) > 1e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["sliding_attention"]}, "one for each of 2 layers"),
        ({"layer_types": ["chunked_attention"] * 2}, "known: full_attention, sliding_attention"),
        ({"layer_types": ["sliding_attention"] * 2, "use_sliding_window": False}, "use_sliding"),
        ({"sliding_window": -4}, "sliding_window = -4"),
    ],
)
def test_layer_types_that_make_no_sense(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        lint_config(model("qwen2", num_hidden_layers=2, **changes))
