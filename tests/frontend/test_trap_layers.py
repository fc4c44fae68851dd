"""Peculiarities of multipliers, norms, experts, attention from public bug reports, one test each.

Each either works as the reference does or is refused by an error that names key, value and what to
do.
"""

import math
from typing import Any

import pytest
import torch

from sitsc.core.errors import (
    ConfigError,
    UnsupportedModelError,
)
from sitsc.core.interpret import (
    relative_error,
    tensor_shapes,
)
from sitsc.frontend.config_lint import lint_config, lint_tensors
from tests.frontend.test_config_lint import infos, shapes_of, tiny
from tests.frontend.trap_models import SIZES, constants, logits, model, reference, traced

MULTIPLIERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma2": (
        {"head_dim": 16, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}
        | {"query_pre_attn_scalar": 24, "tie_word_embeddings": True},
        {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.0}
        | {"query_pre_attn_scalar": 8},
    ),
    "granite": (
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 4.0}
        | {"attention_multiplier": 0.1},
        {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0}
        | {"attention_multiplier": 0.5},
    ),
    "cohere": (
        {"logit_scale": 0.25, "layer_norm_eps": 1e-5, "tie_word_embeddings": True},
        {"logit_scale": 1.0},
    ),
}


@pytest.mark.parametrize("kind", MULTIPLIERS)
def test_softcaps_and_multipliers_are_consumed(kind: str):
    given, others = MULTIPLIERS[kind]
    config = model(kind, **given)
    graph = traced(config)
    found = logits(graph)
    assert relative_error(found, reference(config, graph)) < 1e-5
    for key, value in others.items():
        assert relative_error(logits(traced(config | {key: value})), found) > 1e-4, key


@pytest.mark.parametrize(
    "key", ["attn_logit_softcapping", "embedding_multiplier", "residual_multiplier", "logit_scale"]
)
def test_a_multiplier_that_the_family_does_not_read_is_an_error(key: str):
    with pytest.raises(ConfigError, match=f"unknown key '{key}'"):
        lint_config(model("llama", **{key: 2.0}))


def test_gemma_scales_its_embedding_and_norms_as_the_reference_rounds():
    graph = traced(model("gemma", hidden_size=96, head_dim=16), torch.bfloat16)
    (scale,) = (v for name, v in constants(graph).items() if name.endswith("embed_scale"))
    assert scale.dtype == torch.bfloat16 and float(scale) == 9.8125 != math.sqrt(96)
    adds = graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    one_plus = [n for n in adds if n.args[1] == 1.0]
    assert len(one_plus) == 3  # 1 + w of each norm …
    assert all(n.meta["val"].dtype == torch.float32 for n in one_plus)  # … in float32


def test_norms_of_q_and_k_per_head_and_over_the_full_width():
    for kind, width in (("qwen3", 16), ("olmo2", 64)):
        config = model(kind, head_dim=16 if kind == "qwen3" else None)
        graph = traced(config)
        shapes = tensor_shapes(graph)
        assert shapes["model.layers.0.self_attn.q_norm.weight"] == (width,)
        lint_tensors(config, infos(shapes))
        assert relative_error(logits(graph), reference(config, graph)) < 1e-5


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (model("qwen2"), "model__layers__0__self_attn__q_proj__bias", "q_proj.bias"),
        (tiny(attention_bias=True), "model__layers__1__self_attn__o_proj__bias", "o_proj.bias"),
        (tiny(mlp_bias=True), "model__layers__1__mlp__up_proj__bias", "up_proj.bias"),
    ],
)
def test_biases_in_config_and_checkpoint_agree(config: dict[str, Any], change: str, message: str):
    lint_tensors(config, shapes_of(config))
    with pytest.raises(ConfigError, match=f"missing, first .*{message}"):
        lint_tensors(config, shapes_of(config, **{change: None}))
    with pytest.raises(ConfigError, match=r"unexpected tensors, first .*proj\.bias"):
        lint_tensors(tiny(), shapes_of(tiny(), **{change: (64,)}))


DEEPSEEK = {
    "num_hidden_layers": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring_func": "softmax"}, "only 'sigmoid' is supported"),
        ({"topk_method": "greedy"}, "only 'noaux_tc' is supported"),
        ({"moe_layer_freq": 2}, "only 1 is supported"),
        ({"num_experts_per_tok": 5}, "there are 4 experts"),
        ({"num_experts_per_tok": 3}, "the chosen groups have 2 experts"),
        ({"n_group": 3}, "must divide the 4 experts"),
        ({"topk_group": 3}, "there are 2 groups"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob"),
        ({"routed_scaling_factor": 0.0}, "routed_scaling_factor = 0.0"),
        ({"n_shared_experts": 0}, "n_shared_experts = 0 cannot be used"),
        ({"n_shared_expert": 1}, "unknown key 'n_shared_expert'"),
    ],
)
def test_options_of_experts_that_are_not_understood(changes: dict[str, Any], message: str):
    lint_config(model("deepseek_v3", **DEEPSEEK))
    with pytest.raises(ConfigError, match=message):
        lint_config(model("deepseek_v3", **DEEPSEEK | changes))


def test_normalising_and_scaling_of_expert_weights_are_consumed():
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = model("qwen3_moe", head_dim=16, norm_topk_prob=True, **moe)
    found = logits(traced(config))
    assert relative_error(logits(traced(config | {"norm_topk_prob": False})), found) > 1e-3
    deep = model("deepseek_v3", routed_scaling_factor=2.5, norm_topk_prob=True, **DEEPSEEK)
    scaled = logits(traced(deep))
    assert relative_error(logits(traced(deep | {"routed_scaling_factor": 1.0})), scaled) > 1e-4


def test_tensors_of_the_next_token_prediction_layer_are_left_out_by_name():
    config = model("deepseek_v3", num_nextn_predict_layers=1, **DEEPSEEK)
    shapes: dict[str, tuple[int, ...]] = dict(tensor_shapes(traced(config)))
    shapes |= {"model.layers.2.eh_proj.weight": (64, 128), "model.layers.2.enorm.weight": (64,)}
    result = lint_tensors(config, infos(shapes))
    assert set(result.rules.values()) == {"next_token_prediction_layer"}
    with pytest.raises(ConfigError, match=r"unexpected.*layers\.2"):
        lint_tensors(config | {"num_nextn_predict_layers": 0}, infos(shapes))


def test_attention_sinks_and_mla_are_traced_and_other_mixers_refused_by_name():
    sinks = model("gpt_oss", num_local_experts=4, num_experts_per_tok=2, head_dim=16)
    target = torch.ops.sitsc.attention.default
    assert all(n.args[3] is not None for n in traced(sinks).nodes if n.target is target)
    mla = traced(model("deepseek_v3", **DEEPSEEK))
    assert sum(n.target is target for n in mla.nodes) == 2
    for kind in ("mamba", "jamba", "recurrent_gemma"):
        with pytest.raises((UnsupportedModelError, ConfigError)):
            traced({"model_type": kind, **{k: v for k, v in SIZES.items() if "rope" not in k}})
