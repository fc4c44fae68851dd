"""GGUF files of every architecture and tensor type: the graph's logits are those of transformers.

The files are written from tiny transformers models, with what the public converter does to names
and values written again here.
"""

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from torch import Tensor

from sitsc.core.errors import CheckpointError, UnsupportedModelError
from sitsc.core.interpret import relative_error, run_graph, step_inputs
from sitsc.frontend.checkpoint import Checkpoint, open_checkpoint
from sitsc.frontend.gguf_reader import DTYPES
from sitsc.frontend.lint import lint_checkpoint
from sitsc.frontend.trace import trace
from tests.frontend.checkpoint_files import byte_level_metadata, write_gguf
from tests.frontend.test_gguf_reader import to_file_order

IDS = [(7 * i * i + 3 * i + 1) % 60 for i in range(24)]
SIZES: dict[str, Any] = {
    "vocab_size": 262,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0, 1.25, 1.5, 2.0, 2.0, 2.0, 2.0, 2.5],
    "long_factor": [1.5, 2.5, 4.0, 8.0, 8.0, 8.0, 9.0, 9.0],
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_theta": 5e5},
    "llama_biased": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "qwen2": {"model_type": "qwen2", "rope_theta": 1e6},
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "rope_theta": 1e6},
    "gemma": {"model_type": "gemma", "head_dim": 32, "tie_word_embeddings": True},
    "phi3": {"model_type": "phi3", "sliding_window": 16},
    "phi3_partial": {"model_type": "phi3", "partial_rotary_factor": 0.5},
}
LONG = {"max_position_embeddings": 128, "original_max_position_embeddings": 32}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def build(changes: dict[str, Any]) -> Any:
    """A transformers model with random weights; norms away from one."""
    import transformers  # noqa: PLC0415  (seconds)

    values = {k: v for k, v in (SIZES | changes).items() if k != "model_type"}
    config = transformers.AutoConfig.for_model(changes["model_type"], **values)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            width = parameter.shape[-1] if parameter.ndim > 1 else 25
            parameter.add_(torch.randn_like(parameter) / math.sqrt(width))
    return model


def gguf_name(name: str) -> str:
    if name in TOP:
        return TOP[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def metadata(model: Any) -> dict[str, Any]:
    """What the converter writes about a model."""
    c, arch = model.config, model.config.model_type
    values: dict[str, Any] = {
        "block_count": c.num_hidden_layers,
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": c.rms_norm_eps,
        "rope.freq_base": float(c.rope_parameters["rope_theta"]),
    }
    head_dim = getattr(c, "head_dim", None)
    if arch in ("qwen3", "gemma"):
        values |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if arch == "phi3":
        width = c.hidden_size // c.num_attention_heads
        values |= {
            "rope.dimension_count": int(width * c.rope_parameters["partial_rotary_factor"]),
            "attention.sliding_window": c.sliding_window or 0,
            "rope.scaling.original_context_length": c.original_max_position_embeddings,
        }
    return {f"{arch}.{k}": v for k, v in values.items()} | byte_level_metadata()


def tensors(model: Any) -> dict[str, np.ndarray]:
    """The model's tensors as the converter stores them, in float32."""
    c, found = model.config, {}
    for name, parameter in model.named_parameters():
        value = parameter.detach().numpy().copy()
        if c.model_type == "llama" and (".q_proj" in name or ".k_proj" in name):
            heads = c.num_attention_heads if ".q_proj" in name else c.num_key_value_heads
            value = to_file_order(value, heads)
        if c.model_type == "gemma" and name.endswith("norm.weight"):
            value = value + 1
        found[gguf_name(name)] = value
    return found


def logits_of_graph(c: Checkpoint, graph: Any) -> Tensor:
    class Weights:
        def read(self, name: str, start: int, stop: int) -> Tensor:
            return c.read(name, (start, stop))

    return run_graph(graph, Weights(), step_inputs(graph, IDS, 16))


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([IDS]), use_cache=False).logits[0]


@pytest.mark.parametrize("case", CASES)
def test_the_graph_of_a_file_computes_what_transformers_does(tmp_path: Path, case: str):
    model = build(CASES[case])
    arch = model.config.model_type
    stored = tensors(model)
    if arch == "gemma":
        stored = {n: t for n, t in stored.items() if n != "output.weight"}
    c = open_checkpoint(write_gguf(tmp_path / "m.gguf", metadata(model), stored, arch=arch))
    report = lint_checkpoint(c)
    assert report.ok, report.findings
    assert (
        relative_error(logits_of_graph(c, trace(c.config, torch.float32).graph), logits_of(model))
        < 1e-5
    )


def longrope_file(path: Path, **changes: Any) -> Path:
    model = build({"model_type": "phi3", "rope_scaling": dict(LONGROPE)} | LONG)
    factors = {
        f"rope_factors_{kind}.weight": np.array(LONGROPE[f"{kind}_factor"], np.float32)
        for kind in ("long", "short")
    }
    attention = math.sqrt(1 + math.log(128 / 32) / math.log(32))
    values = metadata(model) | {"phi3.rope.scaling.attn_factor": attention} | changes
    return write_gguf(path, values, factors | tensors(model), arch="phi3")


def test_phi3_with_two_lists_of_rope_factors(tmp_path: Path):
    c = open_checkpoint(longrope_file(tmp_path / "m.gguf"))
    assert c.config["rope_scaling"] == LONGROPE
    assert c.config["original_max_position_embeddings"] == 32
    assert lint_checkpoint(c).ok


def test_another_attention_factor_is_refused(tmp_path: Path):
    path = longrope_file(tmp_path / "m.gguf", **{"phi3.rope.scaling.attn_factor": 1.5})
    with pytest.raises(UnsupportedModelError, match=r"attn_factor is 1\.5, longrope gives"):
        open_checkpoint(path)


def test_one_list_of_factors_alone_is_refused(tmp_path: Path):
    model = build({"model_type": "phi3"})
    stored = tensors(model) | {"rope_factors_long.weight": np.ones(8, np.float32)}
    path = write_gguf(tmp_path / "m.gguf", metadata(model), stored, arch="phi3")
    with pytest.raises(CheckpointError, match="alone of two lists"):
        open_checkpoint(path)


# --- tensor types ---------------------------------------------------------------------------------

WIDE = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 256, "vocab_size": 64} | {
    "num_hidden_layers": 1
}
# Where a block keeps its half-precision scales, which must be small finite numbers.
SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def blocks(kind: str, rows: int, columns: int, random: np.random.Generator) -> np.ndarray:
    """Random blocks of a type that the gguf package can read but not write: uint8 [rows, bytes]."""
    size, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = random.integers(0, 256, (rows * columns // size, nbytes), np.uint8)
    scale = random.uniform(0.0005, 0.002, len(raw)).astype(np.float16)
    if kind == "IQ1_M":  # its scale is spread over the top bits of four words
        words = raw[:, 48:56].view(np.uint16)
        bits = scale.view(np.uint16)
        for i in range(4):
            words[:, i] = (words[:, i] & 0x0FFF) | (((bits >> (4 * i)) & 0xF) << 12)
    for at in SCALES.get(kind, () if kind == "IQ1_M" else (0,)):
        raw[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
    return raw.reshape(rows, -1)


@cache
def wide_model() -> tuple[Any, Any, dict[str, Any]]:
    """A model wide enough for blocks of 256, its graph, and its config as a file gives it."""
    model = build(WIDE)
    config = json.loads(model.config.to_json_string(use_diff=False))
    return model, trace(config, torch.float32).graph, config


def stored_as(kind: str, value: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """uint8 rows of a matrix in a type; random ones where the package cannot quantise."""
    try:
        return quantize(value, gguf.GGMLQuantizationType[kind])
    except NotImplementedError:
        rows, columns = value.shape
        return blocks(kind, rows, columns, random)


def write_as(path: Path, model: Any, kind: str) -> Checkpoint:
    """A file with all matrices in a type; the model gets what they are dequantised to."""
    random, qtype = np.random.default_rng(1), gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata(model).items():
        if key.startswith("llama.") and isinstance(value, float):
            writer.add_float32(key, value)
        elif key.startswith("llama."):
            writer.add_uint32(key, value)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = parameter.detach().numpy()
            if value.ndim < 2:
                writer.add_tensor(gguf_name(name), value)
                continue
            raw = stored_as(kind, value, random)
            writer.add_tensor(gguf_name(name), raw, raw_dtype=qtype)
            read = dequantize(raw, qtype)
            assert np.isfinite(read).all()
            if ".q_proj" in name or ".k_proj" in name:
                heads = model.config.num_attention_heads if ".q_proj" in name else 2
                read = to_hf_order(read, heads)
            parameter.copy_(torch.from_numpy(read))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return open_checkpoint(path)


@pytest.mark.parametrize("kind", [k for k in DTYPES if k not in ("F32", "F16", "BF16")])
def test_every_tensor_type_is_read_as_it_is_dequantised(tmp_path: Path, kind: str):
    model, graph, _ = wide_model()
    c = write_as(tmp_path / "m.gguf", model, kind)
    assert lint_checkpoint(c).ok
    assert relative_error(logits_of_graph(c, graph), logits_of(model)) < 1e-5


def to_hf_order(stored: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of `to_file_order`, found by sending row numbers through it."""
    rows = to_file_order(np.arange(len(stored)), heads)
    out = np.empty_like(stored)
    out[rows] = stored
    return out
