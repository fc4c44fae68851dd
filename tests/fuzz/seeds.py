"""Small valid inputs of each fuzz target, from which the fuzzers start."""

import json
import struct
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from sitsc.models.presets import preset
from tests.frontend.checkpoint_files import llama_metadata, write_gguf
from tests.frontend.onnx_files import masked_decoder, outside, small_decoder, with_function
from tests.fuzz.targets import SEPARATOR

KINDS = ("safetensors", "gguf", "folder", "onnx")


def seeds(kind: str) -> list[bytes]:
    """Valid inputs of `kind`."""
    return {"safetensors": _safetensors, "gguf": _gguf, "folder": _folder, "onnx": _onnx}[kind]()


def _safetensors() -> list[bytes]:
    raw = save({"model.a": torch.ones(3, 5), "b": torch.ones(7, dtype=torch.bfloat16)})
    (length,) = struct.unpack("<Q", raw[:8])
    header, tail = raw[8 : 8 + length], raw[8 + length :]
    empty = save({"e": torch.ones(0, 3)}, metadata={"format": "pt"})
    return [b"\x01" + raw, b"\x00" + header + SEPARATOR + tail, b"\x01" + empty]


def _gguf() -> list[bytes]:
    found = []
    small = {"embedding_length": 4, "feed_forward_length": 4, "attention.head_count": 2}
    small |= {"attention.head_count_kv": 1, "block_count": 1}
    base = llama_metadata() | {f"llama.{key}": value for key, value in small.items()}
    yarn = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0}
    no_tokens = {k: v for k, v in base.items() if "tokenizer" not in k}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        for metadata in (base | {"tokenizer.ggml.add_bos_token": True}, no_tokens, base | yarn):
            rows = 262 if metadata is not no_tokens else 6
            found.append(write_gguf(path, metadata, _small_tensors(4, rows)).read_bytes())
        for arch in ("qwen2", "qwen3", "gemma", "phi3"):
            found.append(write_gguf(path, *_other(arch, no_tokens), arch=arch).read_bytes())
        wide = no_tokens | {"llama.embedding_length": 32}
        kinds = {"blk.0.attn_q.weight": "Q8_0", "blk.0.ffn_up.weight": "Q4_1"}
        found.append(write_gguf(path, wide, _small_tensors(32), kinds).read_bytes())
    return found


def _other(arch: str, llama: dict[str, Any]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Metadata and tensors of another architecture."""
    metadata = {key.replace("llama.", f"{arch}."): value for key, value in llama.items()}
    tensors = _small_tensors(4, 6)
    if arch == "qwen3":
        tensors |= {f"blk.0.attn_{n}_norm.weight": np.ones(2, np.float32) for n in "qk"}
        metadata |= {"qwen3.attention.key_length": 2}
    if arch == "qwen2":
        tensors |= {f"blk.0.attn_{n}.bias": np.ones(2, np.float32) for n in "kv"}
        tensors["blk.0.attn_q.bias"] = np.ones(4, np.float32)
    if arch == "gemma":
        metadata |= {"gemma.attention.key_length": 2}
    if arch == "phi3":
        gone = ("attn_q", "attn_k", "attn_v", "ffn_gate")
        tensors = {n: t for n, t in tensors.items() if n.split(".")[-2] not in gone}
        tensors["blk.0.attn_qkv.weight"] = np.ones((8, 4), np.float32)
        tensors["blk.0.ffn_up.weight"] = np.ones((8, 4), np.float32)
        tensors |= {f"rope_factors_{n}.weight": np.ones(1, np.float32) for n in ("long", "short")}
        metadata |= {"phi3.rope.scaling.original_context_length": 32}
    return metadata, tensors


def _small_tensors(hidden: int, rows: int = 6) -> dict[str, np.ndarray]:
    """One layer of Llama by GGUF name: 2 heads, 1 key head."""
    shapes = {"token_embd.weight": (rows, hidden), "output_norm.weight": (hidden,)}
    square = ("attn_q", "attn_output")
    shapes |= {f"blk.0.{n}.weight": (hidden, hidden) for n in square}
    shapes |= {f"blk.0.{n}.weight": (hidden // 2, hidden) for n in ("attn_k", "attn_v")}
    shapes |= {f"blk.0.{n}.weight": (hidden,) for n in ("attn_norm", "ffn_norm")}
    shapes |= {f"blk.0.{n}.weight": (4, hidden) for n in ("ffn_gate", "ffn_up")}
    shapes["blk.0.ffn_down.weight"] = (hidden, 4)
    return {n: np.ones(s, np.float32) for n, s in shapes.items()}


def _folder() -> list[bytes]:
    index = {"metadata": {}, "weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
    vocab = {"a": 0, "b": 1, "ab": 2}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {"type": "BPE", "vocab": vocab, "merges": [["a", "b"]]},
    }
    settings = {"bos_token": "a", "eos_token": {"content": "b"}, "add_bos_token": True}
    found = []
    for name in ("tiny-llama31", "tiny-qwen2"):
        parts = (preset(name), index, {"eos_token_id": [1, 2]}, settings, {"unk_token": "a"})
        found.append(SEPARATOR.join(json.dumps(p).encode() for p in (*parts, tokenizer)))
    return found


def _onnx() -> list[bytes]:
    """A small decoder with its weights inside and outside, with a mask and a norm, a function."""
    plain = small_decoder()
    kinds = (plain, outside(small_decoder()), masked_decoder(), with_function())
    return [model.SerializeToString() + SEPARATOR + bytes(4096) for model in kinds]
