from decimal import Decimal
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sitsc.frontend.checkpoint import open_checkpoint
from sitsc.frontend.checkpoint_types import TensorInfo
from sitsc.frontend.config_lint import lint_config, lint_tensors
from sitsc.frontend.gguf_config import shortest
from sitsc.frontend.gguf_header import GgufTensor, read_gguf_header
from sitsc.frontend.gguf_reader import DTYPES, read_rows
from tests.frontend.checkpoint_files import (
    HEADS,
    HIDDEN,
    KV_HEADS,
    gguf_tensors,
    llama_metadata,
    write_gguf,
)


def to_file_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """The converter's order of q and k rows, written row by row from its definition."""
    head_dim = weight.shape[0] // heads
    out = np.empty_like(weight)
    for head in range(heads):
        for half in range(2):
            for i in range(head_dim // 2):
                row = head * head_dim + half * (head_dim // 2) + i
                out[head * head_dim + 2 * i + half] = weight[row]
    return out


def test_config_names_and_order_of_rows(tmp_path: Path):
    hf = gguf_tensors()
    stored = dict(hf)
    for name in hf:
        if "attn_q" in name or "attn_k" in name:
            stored[name] = to_file_order(hf[name], HEADS if "attn_q" in name else KV_HEADS)
    c = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors=stored))
    lint_config(c.config)
    assert lint_tensors(c.config, c.tensors).duplicates == {}
    assert c.config["head_dim"] == HIDDEN // HEADS and c.config["vocab_size"] == 262
    assert c.config["rms_norm_eps"] == 1e-5 and not c.config["tie_word_embeddings"]
    for ours, theirs in [
        ("model.layers.1.self_attn.q_proj.weight", "blk.1.attn_q.weight"),
        ("model.layers.0.self_attn.k_proj.weight", "blk.0.attn_k.weight"),
        ("model.layers.0.mlp.down_proj.weight", "blk.0.ffn_down.weight"),
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("lm_head.weight", "output.weight"),
        ("model.norm.weight", "output_norm.weight"),
    ]:
        assert torch.equal(c.read(ours), torch.from_numpy(hf[theirs])), ours


def test_a_folder_with_one_gguf_opens_and_ties_without_an_output(tmp_path: Path):
    write_gguf(tmp_path / "m.gguf", tensors=gguf_tensors(tied=True))
    c = open_checkpoint(tmp_path)
    assert c.format == "gguf" and c.config["tie_word_embeddings"]
    assert "lm_head.weight" not in c.tensors


@given(data=st.data())
def test_row_ranges_equal_rows_of_the_whole(tmp_path_factory, data):
    path = write_gguf(tmp_path_factory.mktemp("rows") / "m.gguf")
    c = open_checkpoint(path)
    name = data.draw(st.sampled_from(["self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj"]))
    name = f"model.layers.0.{name}.weight"
    first = data.draw(st.integers(0, c.tensors[name].shape[0]))
    last = data.draw(st.integers(first, c.tensors[name].shape[0]))
    assert torch.equal(c.read(name, (first, last)), c.read(name)[first:last])


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_every_stored_type_comes_back_within_its_precision(tmp_path: Path, kind: str):
    values = gguf_tensors()
    name = "blk.0.ffn_up.weight"
    c = open_checkpoint(write_gguf(tmp_path / "m.gguf", kinds={name: kind}))
    info = c.tensors["model.layers.0.mlp.up_proj.weight"]
    got = c.read(info.name)
    assert (info.dtype, info.shape, got.dtype) == (kind, (96, HIDDEN), torch.float32)
    error = (got - torch.from_numpy(values[name])).abs().max().item()
    assert error <= {"F32": 0, "F16": 2e-3, "BF16": 2e-2, "Q8_0": 2e-2}.get(kind, 0.4)


@pytest.mark.parametrize("kind", DTYPES)
def test_ranges_of_raw_blocks_equal_the_package(tmp_path: Path, kind: str):
    """Random blocks, also of the types the package can only read: whole and any range of rows."""
    rows, width = 7, 512
    dtype = gguf.GGMLQuantizationType[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[dtype]
    row_bytes = width // block * block_bytes
    raw = np.random.default_rng(1).integers(0, 120, (rows, row_bytes), dtype=np.uint8)
    path = tmp_path / "raw"
    path.write_bytes(b"xyz" + raw.tobytes())
    expected = torch.from_numpy(np.array(gguf.quants.dequantize(raw, dtype), dtype=np.float32))
    tensor = GgufTensor(TensorInfo("t", kind, (rows, width), raw.nbytes, "raw"), 3)
    assert torch.equal(read_rows(path, tensor), expected.reshape(rows, width))
    for rng in [(0, 1), (2, 5), (6, 7), (3, 3), (0, 7)]:
        assert torch.equal(read_rows(path, tensor, rng), expected.reshape(rows, width)[slice(*rng)])


def test_our_header_parser_agrees_with_the_gguf_package(tmp_path: Path):
    path = write_gguf(tmp_path / "m.gguf", llama_metadata(general__alignment=64))
    header, reader = read_gguf_header(path), gguf.GGUFReader(path)
    theirs = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert header.metadata == theirs
    assert {n: (t.offset, t.info.nbytes, t.info.shape) for n, t in header.tensors.items()} == {
        t.name: (t.data_offset, t.n_bytes, tuple(reversed(t.shape.tolist())))
        for t in reader.tensors
    }


@pytest.mark.parametrize(
    ("extra", "scaling"),
    [
        ({"llama__rope__scaling__type": "none"}, None),
        (
            {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        (
            {
                "llama__rope__scaling__type": "yarn",
                "llama__rope__scaling__factor": 8.0,
                "llama__rope__scaling__original_context_length": 64,
            },
            {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
        ),
    ],
)
def test_rope_scaling_of_the_metadata(tmp_path: Path, extra, scaling):
    c = open_checkpoint(write_gguf(tmp_path / "m.gguf", llama_metadata(**extra)))
    assert c.config.get("rope_scaling") == scaling
    lint_config(c.config)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_found_from_its_factors(tmp_path: Path, factor: float):
    """Factors as transformers computes them: the plain frequencies over the scaled ones."""
    from transformers import LlamaConfig  # noqa: PLC0415
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding  # noqa: PLC0415

    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "num_attention_heads": HEADS}
    sizes["rope_theta"] = 500000.0
    plain = LlamaRotaryEmbedding(LlamaConfig.from_dict(sizes)).inv_freq
    sizes["rope_scaling"] = dict(scaling)
    scaled = LlamaRotaryEmbedding(LlamaConfig.from_dict(sizes)).inv_freq
    tensors = {"rope_freqs.weight": (plain / scaled).numpy()} | gguf_tensors()
    meta = llama_metadata(llama__rope__freq_base=500000.0)
    c = open_checkpoint(write_gguf(tmp_path / "m.gguf", meta, tensors))
    assert c.config["rope_scaling"] == scaling
    assert "rope_freqs.weight" not in c.tensors
    ours = LlamaRotaryEmbedding(LlamaConfig(**c.config)).inv_freq
    assert torch.allclose(ours, scaled)


def test_transformers_reads_our_config_as_it_was_meant(tmp_path: Path):
    from transformers import LlamaConfig  # noqa: PLC0415

    c = open_checkpoint(write_gguf(tmp_path / "m.gguf"))
    theirs = LlamaConfig(**c.config)
    assert theirs.rope_parameters == {"rope_theta": 10000.0, "rope_type": "default"}
    assert (theirs.head_dim, theirs.num_key_value_heads) == (HIDDEN // HEADS, KV_HEADS)


@given(st.floats(2.0**-100, 2.0**100, width=32))
def test_shortest_decimal_is_the_same_float32(value: float):
    text = shortest(value)
    assert np.float32(text) == np.float32(value)
    assert digits(text) <= digits(value)


def digits(value: float) -> int:
    """Digits of the shortest decimal number that is this float64."""
    return len(Decimal(repr(value)).normalize().as_tuple().digits)


def test_a_key_nobody_knows_reaches_the_config_check(tmp_path: Path):
    c = open_checkpoint(write_gguf(tmp_path / "m.gguf", llama_metadata(llama__logit_scale=2.0)))
    assert c.config["llama.logit_scale"] == 2.0
    lint_config(c.config, allow=frozenset({"llama.logit_scale"}))
