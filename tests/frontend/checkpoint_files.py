"""Small checkpoints that tests write, damage and open."""

import json
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from sitsc.models.fetch import FILE, default_folder


def write_folder(root: Path, tensors: dict[str, torch.Tensor] | None = None, **config: Any) -> Path:
    """A folder with config.json and, with `tensors`, model.safetensors."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    if tensors is not None:
        save_file(tensors, root / "model.safetensors")
    return root


def write_shards(root: Path) -> Path:
    """Two shards with an index: tensors a, b in the first, c in the second."""
    write_folder(root)
    a, b, c = torch.arange(6.0).reshape(2, 3), torch.ones(4), torch.zeros(2, 2)
    save_file({"a": a, "b": b}, root / "model-00001-of-00002.safetensors")
    save_file({"c": c}, root / "model-00002-of-00002.safetensors")
    write_index(root, a=1, b=1, c=2)
    return root


def write_index(root: Path, **shard_of: int | str) -> None:
    """An index; a whole number stands for the shard of that number."""
    names = {
        tensor: f"model-{shard:05}-of-00002.safetensors" if isinstance(shard, int) else shard
        for tensor, shard in shard_of.items()
    }
    text = json.dumps({"metadata": {}, "weight_map": names})
    (root / "model.safetensors.index.json").write_text(text)


def safetensors_bytes(header: Any, data: bytes = b"") -> bytes:
    """A file with any header, right or wrong; a text is taken as it is."""
    text = header if isinstance(header, str) else json.dumps(header)
    return len(text.encode()).to_bytes(8, "little") + text.encode() + data


HIDDEN, INNER, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 2
BYTE_TOKENS = ["<|bos|>", "<|im_start|>", "<|im_end|>"]


def byte_alphabet() -> list[str]:
    """The 256 characters that stand for bytes in byte-level BPE."""
    from tokenizers import pre_tokenizers  # noqa: PLC0415

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def gguf_tensors(seed: int = 0, vocab: int = 262, tied: bool = False) -> dict[str, np.ndarray]:
    """Float32 tensors of a two-layer Llama by GGUF name, q and k in the order of the file."""
    random = np.random.default_rng(seed)
    kv = HIDDEN // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, HIDDEN)}
    for i in range(LAYERS):
        block = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN)}
        block |= {"attn_output": (HIDDEN, HIDDEN), "ffn_gate": (INNER, HIDDEN)}
        block |= {"ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER)}
        block |= {"attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,)}
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in block.items()}
    shapes["output_norm.weight"] = (HIDDEN,)
    if not tied:
        shapes["output.weight"] = (vocab, HIDDEN)
    return {n: random.standard_normal(s, dtype=np.float32) for n, s in shapes.items()}


def byte_level_metadata(pre: str = "smollm") -> dict[str, Any]:
    """Tokenizer metadata of a byte-level BPE with three special tokens and three merges."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*BYTE_TOKENS, *byte_alphabet(), "he", "ll", "hell"],
        "tokenizer.ggml.token_type": [3] * 3 + [1] * 259,
        "tokenizer.ggml.merges": ["h e", "l l", "he ll"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
    }


def llama_metadata(**extra: Any) -> dict[str, Any]:
    """Metadata of the model of `gguf_tensors`; keyword __ stands for a dot."""
    values = {
        "llama.block_count": LAYERS,
        "llama.context_length": 128,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": INNER,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.rope.freq_base": 10000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }
    return values | byte_level_metadata() | {k.replace("__", "."): v for k, v in extra.items()}


def write_gguf(
    path: Path,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    kinds: dict[str, str] | None = None,
    arch: str = "llama",
) -> Path:
    """A GGUF file; `kinds` gives the stored type of a tensor (F32 where it does not)."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (llama_metadata() if metadata is None else metadata).items():
        if key == "general.alignment" and value % 8 == 0:
            writer.add_custom_alignment(value)
        elif value is not None:
            _add(writer, key, value)
    for name, values in (gguf_tensors() if tensors is None else tensors).items():
        kind = gguf.GGMLQuantizationType[(kinds or {}).get(name, "F32")]
        data = gguf.quants.quantize(values, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def real_gguf() -> Path | None:
    """The fetched SmolLM2 file, from `SITSC_SMOLLM2` (file or folder) or the usual cache."""
    named = Path(os.environ.get("SITSC_SMOLLM2") or default_folder())
    path = named if named.is_file() else named / FILE
    return path if path.exists() else None
