"""GGUF files of Gemma 2 and 3, OLMo 2, Granite and mixtures of experts, against transformers.

The files are written from tiny transformers models; what the public converter does to names and
values is written again here.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sitsc.core.errors import CheckpointError, ConfigError, UnsupportedModelError
from sitsc.core.interpret import relative_error
from sitsc.frontend.checkpoint import Checkpoint, open_checkpoint
from sitsc.frontend.gguf_families import FAMILIES
from sitsc.frontend.lint import check, lint_checkpoint
from sitsc.frontend.trace import trace
from tests.frontend.checkpoint_files import byte_level_metadata, write_gguf
from tests.frontend.test_gguf_families import CASES as OTHERS
from tests.frontend.test_gguf_families import build, logits_of, logits_of_graph
from tests.frontend.test_gguf_reader import to_file_order

SLIDING, FULL = "sliding_attention", "full_attention"
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": (
        "gemma2",
        {
            "model_type": "gemma2",
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 8,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        "gemma3",
        {
            "model_type": "gemma3_text",
            "num_hidden_layers": 6,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 8,
            "tie_word_embeddings": True,
            "rope_parameters": {
                SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
                FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
        },
    ),
    "qwen2moe": (
        "qwen2moe",
        {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 80} | _EXPERTS,
    ),
    "qwen3moe": (
        "qwen3moe",
        {"model_type": "qwen3_moe", "head_dim": 32, "norm_topk_prob": True} | _EXPERTS,
    ),
    "mixtral": (
        "llama",
        {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"sliding_window": None},
    ),
    "olmo2": ("olmo2", {"model_type": "olmo2", "rope_theta": 5e5}),
    "granite": (
        "granite",
        {
            "model_type": "granite",
            "attention_multiplier": 0.125,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
        },
    ),
}
TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
AROUND = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def tensors(model: Any, arch: str) -> dict[str, np.ndarray]:
    """The model's tensors as the converter stores them, in float32."""
    c, found = model.config, {}
    names = NAMES | (AROUND if arch in ("gemma2", "gemma3", "olmo2") else {})
    for name, parameter in model.named_parameters():
        value = parameter.detach().numpy().copy()
        if arch in ("llama", "granite") and (".q_proj" in name or ".k_proj" in name):
            heads = c.num_attention_heads if ".q_proj" in name else c.num_key_value_heads
            value = to_file_order(value, heads)
        if arch in ("gemma2", "gemma3") and name.endswith("norm.weight"):
            value = value + 1
        if name in TOP:
            found[TOP[name]] = value
            continue
        _, _, layer, rest = name.split(".", 3)
        if rest == "mlp.experts.gate_up_proj":
            gate, up = np.split(value, 2, axis=1)
            found[f"blk.{layer}.ffn_gate_exps.weight"] = np.ascontiguousarray(gate)
            found[f"blk.{layer}.ffn_up_exps.weight"] = np.ascontiguousarray(up)
            continue
        part, kind = (rest, "weight") if rest in names else rest.rsplit(".", 1)
        found[f"blk.{layer}.{names[part]}.{kind}"] = value
    return found


def metadata(model: Any, arch: str) -> dict[str, Any]:
    """What the converter writes about a model."""
    c = model.config
    rope = c.rope_parameters.get(FULL, c.rope_parameters)
    values: dict[str, Any] = {
        "block_count": c.num_hidden_layers,
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": c.rms_norm_eps,
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if "factor" in rope:
        values |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope["factor"]}
    if arch in ("gemma2", "gemma3", "qwen3moe"):
        values |= {"attention.key_length": c.head_dim, "attention.value_length": c.head_dim}
    if arch in ("gemma2", "gemma3"):
        values["attention.sliding_window"] = c.sliding_window
    if arch == "gemma2":
        names = ("attn_logit_softcapping", "final_logit_softcapping")
        values |= {name: getattr(c, name) for name in names}
    if c.model_type == "mixtral" or "moe" in arch:
        count = getattr(c, "num_experts", None) or c.num_local_experts
        values |= {"expert_count": count, "expert_used_count": c.num_experts_per_tok}
    if "moe" in arch:
        values["expert_feed_forward_length"] = c.moe_intermediate_size
    if arch == "qwen2moe":
        values["expert_shared_feed_forward_length"] = c.shared_expert_intermediate_size
    if arch == "granite":
        values |= {
            "attention.scale": c.attention_multiplier,
            "embedding_scale": c.embedding_multiplier,
            "residual_scale": c.residual_multiplier,
            "logit_scale": c.logits_scaling,
        }
    return {f"{arch}.{k}": v for k, v in values.items()} | byte_level_metadata()


def written(path: Path, case: str, **changes: Any) -> Path:
    """A file of a case, with other metadata; a value of None is left out."""
    arch, config = CASES[case]
    model = build(config)
    stored = tensors(model, arch)
    if model.config.tie_word_embeddings:
        stored.pop("output.weight", None)
    values = metadata(model, arch) | changes
    values = {key: value for key, value in values.items() if value is not None}
    return write_gguf(path, values, stored, arch=arch)


@pytest.mark.parametrize("case", CASES)
def test_the_graph_of_a_file_computes_what_transformers_does(tmp_path: Path, case: str):
    c = open_checkpoint(written(tmp_path / "m.gguf", case))
    report = lint_checkpoint(c)
    assert report.ok, report.findings
    wanted = logits_of(build(CASES[case][1]))
    found = logits_of_graph(c, trace(c.config, torch.float32).graph)
    assert relative_error(found, wanted) < 1e-5


def test_every_architecture_is_tried():
    tried = {arch for arch, _ in CASES.values()} | {c["model_type"] for c in OTHERS.values()}
    assert tried == set(FAMILIES)


def test_the_largest_gemma_has_a_scale_of_its_own(tmp_path: Path):
    """llama.cpp tells it by the number of layers, since files do not hold the scale."""
    path = written(tmp_path / "m.gguf", "gemma2")
    assert open_checkpoint(path).config["query_pre_attn_scalar"] == 32
    path = written(tmp_path / "n.gguf", "gemma2", **{"gemma2.block_count": 46})
    assert open_checkpoint(path).config["query_pre_attn_scalar"] == 64 // 4


def test_gemma3_says_which_layers_have_a_window(tmp_path: Path):
    def types(**changes: Any) -> Any:
        return open_checkpoint(written(tmp_path / "m.gguf", "gemma3", **changes)).config

    key = "gemma3.attention.sliding_window_pattern"
    assert types()["layer_types"] == [SLIDING] * 5 + [FULL]
    assert types(**{key: 3})["layer_types"] == ([SLIDING] * 2 + [FULL]) * 2
    assert types(**{key: [True, False] * 3})["layer_types"] == [SLIDING, FULL] * 3
    rope = types(**{"gemma3.rope.freq_base_swa": 20000.0})["rope_parameters"]
    assert rope[SLIDING]["rope_theta"] == 20000.0 and rope[FULL]["rope_theta"] == 1e6
    with pytest.raises(CheckpointError, match="sliding_window_pattern is"):
        types(**{key: [True, False]})
    with pytest.raises(CheckpointError, match=r"attention\.sliding_window is missing"):
        types(**{"gemma3.attention.sliding_window": None})


def test_granite_without_a_scale_has_the_usual_one(tmp_path: Path):
    config = open_checkpoint(
        written(tmp_path / "m.gguf", "granite", **{"granite.attention.scale": None})
    ).config
    assert math.isclose(config["attention_multiplier"], 1 / math.sqrt(16))


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("olmo2", {"olmo2.attention.sliding_window": 8}, r"unknown key 'olmo2\.attention\.sl"),
        ("qwen3moe", {"qwen3moe.expert_weights_scale": 2.5}, r"unknown key 'qwen3moe\.expert_w"),
        ("qwen3moe", {"qwen3moe.expert_count": 5}, "unexpected tensors"),
        ("qwen3moe", {"qwen3moe.expert_feed_forward_length": None}, "length is missing"),
        ("mixtral", {"llama.expert_used_count": 5}, "there are 4 experts"),
        ("mixtral", {"llama.expert_count": 0}, "no model of architecture llama has"),
    ],
)
def test_what_a_file_must_not_say(tmp_path: Path, case: str, changes: dict[str, Any], message: str):
    with pytest.raises((ConfigError, CheckpointError, UnsupportedModelError), match=message):
        check(_opened(tmp_path, case, changes), frozenset())


def _opened(folder: Path, case: str, changes: dict[str, Any]) -> Checkpoint:
    return open_checkpoint(written(folder / "m.gguf", case, **changes))


def test_a_stack_that_is_no_stack_of_experts(tmp_path: Path):
    model = build(CASES["mixtral"][1])
    stored = tensors(model, "llama")
    stored["blk.0.ffn_up_exps.weight"] = np.ones((4, 64), np.float32)
    path = write_gguf(tmp_path / "m.gguf", metadata(model, "llama"), stored, arch="llama")
    with pytest.raises(CheckpointError, match="is no stack of up to 1024 experts"):
        open_checkpoint(path)


def test_architectures_that_are_not_known_are_told_with_those_that_are(tmp_path: Path):
    path = write_gguf(tmp_path / "m.gguf", {}, {"a": np.ones(2, np.float32)}, arch="starcoder2")
    with pytest.raises(UnsupportedModelError, match=r"'starcoder2'.*gemma2, gemma3, qwen2moe"):
        open_checkpoint(path)
