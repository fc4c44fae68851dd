import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sitsc.core.errors import ConfigError, UnsupportedModelError
from sitsc.frontend.checkpoint_names import renamed
from sitsc.frontend.checkpoint_types import TensorInfo
from sitsc.frontend.config_lint import lint_config, lint_tensors, supported_models
from sitsc.models.parameters import parameter_shapes
from sitsc.models.presets import PRESETS, preset
from tests.compiled_families import FAMILIES

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MOE = {"num_experts": 4, "moe_intermediate_size": 8, "num_experts_per_tok": 2}
EXPERTS: dict[str, dict[str, int]] = {
    "qwen3_moe": MOE,
    "qwen2_moe": MOE | {"shared_expert_intermediate_size": 24},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 8,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 8,
        "q_lora_rank": 12,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    },
}


NO_HEAD_DIM = ("phi3", "smollm3", "olmo2", "granite", "qwen2", "qwen2_moe", "qwen3_moe") + (
    "gpt2",
    "gpt_neox",
    "cohere",
    "starcoder2",
    "stablelm",
    "deepseek_v3",
)


def tiny(**changes: Any) -> dict[str, Any]:
    config = preset("tiny-llama") | changes
    return {k: v for k, v in config.items() if v != "absent"}


def infos(shapes: dict[str, tuple[int, ...]], dtype: str = "BF16") -> dict[str, TensorInfo]:
    return {name: TensorInfo(name, dtype, shape, 0, "") for name, shape in shapes.items()}


def reference(family: str) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Config and parameters as transformers has them, on the meta device."""
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "head_dim": 12}
    sizes |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if family in NO_HEAD_DIM:
        del sizes["head_dim"]
    if family == "deepseek_v3":  # a key for each query head
        sizes["num_key_value_heads"] = 4
    config = AutoConfig.for_model(family, **sizes, **EXPERTS.get(family, {}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    written = json.loads(config.to_json_string(use_diff=False))
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    buffers = {name for name, _ in model.named_buffers()}
    shapes |= {n: tuple(t.shape) for n, t in model.state_dict().items() if n in buffers}
    return written | {"architectures": [type(model).__name__]}, shapes


def deepseek_experts(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The routed experts of the layers that have them."""
    inner, hidden = config["moe_intermediate_size"], config["hidden_size"]
    sizes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    return {
        f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight": size
        for layer in range(config["first_k_dense_replace"], config["num_hidden_layers"])
        for expert in range(config["n_routed_experts"])
        for part, size in sizes.items()
    }


@pytest.mark.parametrize("name", PRESETS)
def test_presets_pass(name: str):
    lint_config(preset(name))
    result = lint_tensors(preset(name), infos(parameter_shapes(preset(name))))
    assert result.duplicates == {} and result.ignored == ()


@pytest.mark.parametrize("family", supported_models())
def test_what_transformers_writes_passes_and_its_tensors_are_expected(family: str):
    config, shapes = reference(family)
    lint_config(config)
    shapes = {renamed(name, family): shape for name, shape in shapes.items()}
    if family in EXPERTS and family != "gpt_oss":  # experts are apart on disk, stacked in memory
        shapes = {n: s for n, s in shapes.items() if ".experts." not in n}
        if family == "deepseek_v3":
            ours = deepseek_experts(config)
        else:
            ours = parameter_shapes(config | EXPERTS[family])
        shapes |= {n: s for n, s in ours.items() if ".experts." in n}
    assert lint_tensors(config, infos(shapes)).duplicates == {}


def test_the_published_config_of_smollm2_passes():
    lint_config(
        tiny(
            is_llama_config=True,
            rope_interleaved=False,
            pretraining_tp=1,
            rope_scaling=None,
            transformers_version="4.42.3",
            **{"transformers.js_config": {"dtype": "q4"}},
        )
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logit_scale": 2.0}, "'logit_scale' = 2.0.*--allow-unknown-key logit_scale"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"auto_map": {}}, "auto_map.*never run"),
        ({"rope_interleaved": True}, "rope_interleaved = True"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"hidden_act": "snake"}, "hidden_act = 'snake'.*known: silu"),
        ({"hidden_size": "absent"}, "hidden_size = None"),
        ({"hidden_size": 64.0}, "hidden_size = 64.0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"num_attention_heads": True}, "num_attention_heads = True"),
        ({"num_key_value_heads": 3}, "must divide the 4 query heads"),
        ({"head_dim": None, "hidden_size": 66}, "4 heads do not divide it"),
        ({"head_dim": -1}, "head_dim = -1"),
        ({"rms_norm_eps": 0}, "rms_norm_eps = 0"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ({"attention_bias": 1}, "attention_bias = 1"),
        ({"layer_types": ["full_attention"]}, "unknown key 'layer_types'"),
    ],
)
def test_keys_and_values_that_are_not_understood(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message) as caught:
        lint_config(tiny(**changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": []}, "an object is needed"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_type = None"),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "rope_type = 'ntk'.*known: default"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 2.0}}, "contradict"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "llama3 needs low_freq_factor"),
        ({"rope_scaling": LLAMA3 | {"beta_fast": 32}}, "rope_scaling.beta_fast"),
        ({"rope_scaling": LLAMA3, "rope_parameters": LLAMA3 | {"factor": 4.0}}, "keep one"),
        ({"rope_theta": 0.0}, "rope_theta = 0.0"),
        ({"rope_theta": float("inf")}, "rope_theta = inf"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "rope_theta at the top"),
        ({"rope_theta": "absent", "rope_parameters": {"rope_type": "default"}}, "given nowhere"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "rope_theta = -1.0"),
        ({"rope_parameters": {"full_attention": 3}}, "an object is needed"),
    ],
)
def test_rope_settings_that_are_not_understood(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        lint_config(tiny(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": LLAMA3},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": "absent", "rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
        {"rope_scaling": LLAMA3, "rope_parameters": LLAMA3},
        {"rope_scaling": {"type": "yarn", "rope_type": "yarn", "factor": 4.0}},
        {"rope_parameters": {"rope_theta": 10000.0}},
        {"rope_theta": 10000},
    ],
)
def test_both_spellings_of_rope_pass(changes: dict[str, Any]):
    lint_config(tiny(**changes))


VALUES = st.none() | st.booleans() | st.integers(-2, 1 << 40) | st.floats() | st.text(max_size=4)
VALUES |= st.lists(VALUES, max_size=2) | st.dictionaries(st.sampled_from([*LLAMA3, "type"]), VALUES)
KEYS = [*preset("tiny-llama31"), "rope_parameters", "layer_types", "sliding_window", "num_experts"]


@settings(max_examples=300)
@given(
    family=st.sampled_from(supported_models()),
    changes=st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=3),
)
def test_any_values_give_a_clean_answer(family: str, changes: dict[str, Any]):
    config = {k: v for k, v in tiny(model_type=family).items() if k != "architectures"} | changes
    try:
        lint_config(config)
        lint_tensors(config, infos(parameter_shapes(tiny())))
    except (ConfigError, UnsupportedModelError) as error:
        assert "\n" not in str(error)


def test_a_model_of_endless_layers_is_refused_at_once():
    with pytest.raises(ConfigError, match="more than 2000000000 tensors"):
        lint_tensors(tiny(num_hidden_layers=2_000_000_000), infos(parameter_shapes(tiny())))


def test_an_unknown_key_passes_when_it_is_named():
    allow = frozenset({"odd", "rope_scaling.extra"})
    lint_config(tiny(odd=1, rope_scaling=LLAMA3 | {"extra": 1}), allow)
    with pytest.raises(ConfigError, match="'other'"):
        lint_config(tiny(odd=1, other=2), allow)


@pytest.mark.parametrize("kind", ["no_such", "mamba/../x", None, 3, ["llama"]])
def test_unknown_models_are_refused_with_those_we_know(kind: Any):
    with pytest.raises(UnsupportedModelError, match=r"supported: llama, mistral, .*qwen3"):
        lint_config(tiny(model_type=kind))


def test_another_head_on_a_known_model_is_refused():
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM"):
        lint_config(tiny(architectures=["LlamaForSequenceClassification"]))


def test_a_family_without_a_safe_default_needs_its_kv_heads():
    with pytest.raises(ConfigError, match="num_key_value_heads = None"):
        lint_config({k: v for k, v in preset("tiny-qwen2").items() if k != "num_key_value_heads"})
    lint_config(tiny(num_key_value_heads="absent"))


def shapes_of(config: dict[str, Any], **changes: Any) -> dict[str, TensorInfo]:
    """Tensors of a config; a keyword changes (or with None removes) the tensor it abbreviates."""
    shapes: dict[str, Any] = dict(parameter_shapes(config))
    for short, shape in changes.items():
        name = next((n for n in shapes if short.replace("__", ".") in n), short.replace("__", "."))
        shapes[name] = shape
    return infos({n: s for n, s in shapes.items() if s is not None})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lm_head": None}, "lm_head.weight is missing and tie_word_embeddings is false"),
        ({"q_proj": None}, "1 tensors are missing, first model.layers.0.self_attn.q_proj.weight"),
        ({"q_proj": (64, 63)}, r"q_proj.weight has shape \[64, 63\].*calls for \[64, 64\]"),
        ({"k_proj": (64, 64)}, "k_proj.* — check head_dim"),
        ({"lm_head": (321, 64)}, "lm_head"),
        ({"model__layers__0__self_attn__q_proj__bias": (64,)}, "unexpected.*q_proj.bias"),
        ({"model__layers__2__input_layernorm__weight": (64,)}, "unexpected.*layers.2"),
    ],
)
def test_tensors_that_the_config_does_not_call_for(changes: dict[str, Any], message: str):
    tensors = shapes_of(tiny(), **changes)
    with pytest.raises(ConfigError, match=message):
        lint_tensors(tiny(), tensors)


def test_a_tied_head_in_the_file_is_reported_for_the_equality_check():
    tied = tiny(tie_word_embeddings=True)
    result = lint_tensors(tied, infos(parameter_shapes(tiny())))
    assert result.duplicates == {"lm_head.weight": "model.embed_tokens.weight"}
    with pytest.raises(ConfigError, match="lm_head"):
        lint_tensors(tied, shapes_of(tiny(), lm_head=(320, 63)))


def test_saved_rotary_buffers_are_ignored_by_name():
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    result = lint_tensors(tiny(), infos(parameter_shapes(tiny()) | {name: (8,)}, "F32"))
    assert result.ignored == (name,)


def test_latent_attention_has_a_key_for_each_query_head():
    lint_config(FAMILIES["deepseek_v3"])
    with pytest.raises(ConfigError, match=r"num_key_value_heads = 2 .*the 4 query heads"):
        lint_config(FAMILIES["deepseek_v3"] | {"num_key_value_heads": 2})


def test_quantised_tensors_are_refused():
    with pytest.raises(UnsupportedModelError, match=r"stored as I8.*quantised"):
        lint_tensors(tiny(), infos(parameter_shapes(tiny()), "I8"))
    with pytest.raises(UnsupportedModelError, match=r"stored as F64.*store it in float32"):
        lint_tensors(tiny(), infos(parameter_shapes(tiny()), "F64"))


def test_head_dim_decides_the_shapes_not_the_hidden_size():
    config = preset("tiny-odd")
    lint_tensors(config, infos(parameter_shapes(config)))
    with pytest.raises(ConfigError, match="check head_dim"):
        lint_tensors(config | {"head_dim": 12}, infos(parameter_shapes(config)))
