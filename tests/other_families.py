"""Families of transformers that have no entry of their own: small configs, and what is expected.

Folders of EQUAL are as transformers saves them, the names and layout of published checkpoints.
EQUAL: what is left unmatched of each (empty: kernels take all of it). REFUSED: part of the message.
`table` is what docs/families.md shows of both.
"""

import json
from pathlib import Path
from typing import Any

_SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "d_model": 64,
    "n_layers": 2,
    "n_heads": 4,
    "max_seq_len": 256,
    "ffn_dim": 96,
    "word_embed_proj_dim": 64,
    "rotary_dim": 8,
    "num_experts": 12,
    "num_local_experts": 12,
    "n_routed_experts": 12,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "sliding_window": 16,
    "attention_chunk_size": 16,
}
_IDS = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0}
_LEFT_OUT = ("architectures", "id2label", "label2id", "transformers_version", "dtype")
_LATENT = {"head_dim": 8, "num_key_value_heads": 4}
_HEADS = {"head_dim": 16}
_CHANGES: dict[str, dict[str, Any]] = {
    "deepseek_v2": _LATENT
    | {"n_group": 1, "topk_group": 1, "topk_method": "greedy"}
    | {"num_experts_per_tok": 2},
    "ernie4_5_moe": {"moe_num_experts": 12, "moe_k": 3},
    "codegen": {"n_positions": 2048, "rotary_dim": 16},
    "gpt_bigcode": {"n_positions": 2048},
    "gptj": {"n_positions": 2048, "rotary_dim": 16},
    "glm4_moe_lite": _LATENT,
    "minicpm3": _LATENT,
    "hunyuan_v1_dense": _HEADS,
    "hunyuan_v1_moe": _HEADS,
    "ministral": _HEADS,
    "nemotron": _HEADS | {"num_key_value_heads": 2},
    "youtu": _LATENT,
}

EQUAL: dict[str, tuple[str, ...]] = {
    "afmoe": ("activation",),
    "arcee": ("activation",),
    "biogpt": (),
    "cohere2": (),
    "cwm": (),
    "deepseek_v2": (),
    "ernie4_5": (),
    "ernie4_5_moe": (),
    "exaone": (),
    "exaone4": (),
    "exaone_moe": (),
    "flex_olmo": (),
    "glm": (),
    "glm4_moe": (),
    "glm4_moe_lite": (),
    "granitemoe": (),
    "granitemoeshared": (),
    "helium": (),
    "hunyuan_v1_dense": (),
    "hunyuan_v1_moe": (),
    "internlm3": (),
    "jais2": (),
    "mimo_v2_flash": (),
    "minicpm3": (),
    "minimax_m2": (),
    "ministral": (),
    "nanochat": ("rope",),
    "nemotron": ("norm",),
    "olmo": (),
    "olmo3": (),
    "olmoe": (),
    "opt": (),
    "persimmon": (),
    "phi": ("activation",),
    "phimoe": (),
    "seed_oss": (),
    "solar_open": (),
    "vaultgemma": (),
    "youtu": (),
}
_OWN = "attention of its own"
_PARTS = "layers have attention that the compiler knows"
_TABLE = "is larger than 65536 bytes"
REFUSED: dict[str, str] = {
    "apertus": "has no dimension",
    "bloom": _OWN,
    "deepseek_v32": _OWN,
    "diffllama": _PARTS,
    "doge": _OWN,
    "falcon": _OWN,
    "falcon_h1": "cannot trace 'falcon_h1'",
    "codegen": _TABLE,
    "gpt_bigcode": _TABLE,
    "gptj": _TABLE,
    "gpt_neox_japanese": _OWN,
    "llama4_text": "hides tokens otherwise than by a window",
    "minimax": "cannot trace 'minimax'",
    "mpt": _OWN,
    "qwen3_next": "cannot trace 'qwen3_next'",
    "xglm": _OWN,
}


def small_config(kind: str) -> dict[str, Any]:
    """The defaults of a family with sizes that suit a test: two layers, of all kinds there are."""
    from transformers import AutoConfig  # noqa: PLC0415  (seconds)

    usual = json.loads(AutoConfig.for_model(kind).to_json_string(use_diff=False))
    config = {k: v for k, v in usual.items() if not isinstance(v, list) and k not in _LEFT_OUT}
    small = {k: v for k, v in _SMALL.items() if usual.get(k) is not None}
    config |= small | _IDS | {"model_type": kind}
    for key in ("layer_types", "mlp_layer_types"):
        if isinstance(usual.get(key), list):
            kinds = list(dict.fromkeys(usual[key]))
            config[key] = (kinds * 2)[:2]
    return config | _CHANGES.get(kind, {})


def saved(kind: str, root: Path) -> tuple[Path, Any]:
    """(folder of a checkpoint with random weights as transformers saves it, the model in it)."""
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415  (seconds)

    values = {key: value for key, value in small_config(kind).items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(kind, **values)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    ).eval()
    generator = torch.Generator().manual_seed(5)
    persistent = {value.data_ptr() for value in model.state_dict().values()}
    for value in [*model.parameters(), *model.buffers()]:
        if value.data_ptr() in persistent and value.is_floating_point():
            noise = torch.randn(value.shape, generator=generator)
            wide = value.dim() > 1 and value.shape[0] > 1
            value.data.copy_(noise / value.shape[-1] ** 0.5 if wide else 1 + 0.2 * noise)
    folder = root / kind
    model.save_pretrained(folder)
    return folder, model


def table() -> str:
    """Both lists as a table of Markdown."""
    lines = ["| `model_type` | | left to torch's operators |", "|---|---|---|"]
    lines += [f"| {k} | equal | {', '.join(left)} |" for k, left in sorted(EQUAL.items())]
    lines += [f"| {kind} | refused: … {why} … | |" for kind, why in sorted(REFUSED.items())]
    return "\n".join(lines)
