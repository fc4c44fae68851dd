"""Opening GGUF files, and reading their tensors as float32.

In: a path. Out: a `Checkpoint` with HF names and config. Rows are dequantised by the gguf package
as they are asked for, in the order and with the values that HF has.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from sitsc.core.errors import CheckpointError, UnsupportedModelError
from sitsc.frontend.checkpoint_types import Checkpoint, Rows, TokenizerFiles
from sitsc.frontend.gguf_config import (
    architecture,
    hf_config,
    hf_names,
    llama3_scaling,
    longrope_scaling,
)
from sitsc.frontend.gguf_families import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS
from sitsc.frontend.gguf_header import GgufTensor, read_gguf_header
from sitsc.frontend.gguf_tokenizer import LLAMA3_PRE, build_tokenizer_json, token_list
from sitsc.frontend.safe_files import shown
from sitsc.frontend.safetensors_reader import map_bytes

DTYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1") + (
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ1_S",
    "IQ1_M",
    "IQ2_XXS",
    "IQ2_XS",
    "IQ2_S",
    "IQ3_XXS",
    "IQ3_S",
    "IQ4_NL",
    "IQ4_XS",
)
EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def open_gguf(path: Path) -> Checkpoint:
    """Open one GGUF file by its header (and the few bytes of rope factors, if it has them).

    CheckpointError for damage, UnsupportedModelError naming what we cannot read.
    """
    header = read_gguf_header(path)
    family = architecture(header.metadata)
    tensors = hf_names(header, family)
    _check_types(tensors)
    factors = {name: tensors.pop(name) for name in family.factors if name in tensors}
    config = hf_config(header.metadata, tensors)
    config |= _factors(path, factors, header.metadata, config)
    heads: dict[str, int] = {}
    if family.interleaved:
        heads["q_proj"] = config["num_attention_heads"]
        heads["k_proj"] = config["num_key_value_heads"]
    _check_divisible(tensors, heads)

    def read(name: str, rows: Rows) -> torch.Tensor:
        part = name.split(".")[-2]
        value = read_rows(path, tensors[name], rows, permuted_heads=heads.get(part, 0))
        return value - 1 if family.norm_plus_one and _is_norm(name) else value

    return Checkpoint(
        root=path.parent,
        format="gguf",
        config=config,
        generation_config={},
        tensors={n: replace(t.info, name=n) for n, t in sorted(tensors.items())},
        tokenizer=_tokenizer(header.metadata),
        reader=read,
    )


def _is_norm(name: str) -> bool:
    return name.endswith("norm.weight")


def _factors(
    path: Path, found: dict[str, GgufTensor], metadata: dict[str, Any], config: dict[str, Any]
) -> dict[str, Any]:
    """`rope_scaling` of the rope factors in the file; their bytes are read."""
    rotary = round(config["head_dim"] * config.get("partial_rotary_factor", 1.0))
    values: dict[str, list[float]] = {}
    for name, tensor in found.items():
        _check_rope_factors(tensor, rotary)
        values[name] = read_rows(path, tensor).tolist()
    if ROPE_FACTORS in values:
        return llama3_scaling(values[ROPE_FACTORS], config)
    if not values:
        return {}
    if set(values) != {LONG_FACTORS, SHORT_FACTORS}:
        raise CheckpointError(f"the file holds {', '.join(values)} alone of two lists of factors")
    return longrope_scaling(values[SHORT_FACTORS], values[LONG_FACTORS], metadata, config)


def _check_types(tensors: dict[str, GgufTensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.info.dtype not in DTYPES:
            raise UnsupportedModelError(
                f"{name} is stored as {tensor.info.dtype}, which is not supported",
                hint=f"supported: {', '.join(DTYPES)}",
            )


def _check_rope_factors(tensor: GgufTensor, rotary: int) -> None:
    if tensor.info.dtype != "F32" or tensor.info.shape != (rotary // 2,):
        raise CheckpointError(
            f"{tensor.info.name} is {tensor.info.dtype} {list(tensor.info.shape)}, "
            f"expected F32 [{rotary // 2}]"
        )


def _check_divisible(tensors: dict[str, GgufTensor], heads: dict[str, int]) -> None:
    for name, tensor in tensors.items():
        num_heads = heads.get(name.split(".")[-2], 0)
        if num_heads and tensor.info.shape[0] % (2 * num_heads):
            raise CheckpointError(
                f"{name} has {tensor.info.shape[0]} rows, not an even share for {num_heads} heads"
            )


def read_rows(
    path: Path, tensor: GgufTensor, rows: Rows = None, *, permuted_heads: int = 0
) -> torch.Tensor:
    """Rows [a, b) (or all) as float32; with `permuted_heads`, undo the converter's rope order.

    The converter stores row (half, i) of a head of 2·n rows at 2·i + half; HF wants half·n + i.
    """
    num_rows = tensor.info.shape[0]
    first, last = rows if rows is not None else (0, num_rows)
    if not permuted_heads:
        return _dequantised(path, tensor, first, last)
    head_dim = num_rows // permuted_heads
    start, stop = first // head_dim * head_dim, -(-last // head_dim) * head_dim
    stored = _dequantised(path, tensor, start, stop)
    pairs = stored.reshape(-1, head_dim // 2, 2, *stored.shape[1:])
    return pairs.transpose(1, 2).reshape(stored.shape)[first - start : last - start]


def _dequantised(path: Path, tensor: GgufTensor, first: int, last: int) -> torch.Tensor:
    info = tensor.info
    shape, row_bytes = (last - first, *info.shape[1:]), info.nbytes // info.shape[0]
    if first == last:
        return torch.empty(shape, dtype=torch.float32)
    if len(shape) == 1 and info.dtype not in ("F32", "F16", "BF16"):
        raise UnsupportedModelError(f"{info.name} is a quantised vector")
    raw = map_bytes(path, tensor.offset + first * row_bytes, (last - first) * row_bytes).numpy()
    kind = GGMLQuantizationType[info.dtype]
    if info.dtype in ("F32", "F16"):
        view = raw.copy().view(np.float32 if info.dtype == "F32" else np.float16)
        values = view.astype(np.float32, copy=False)
    else:
        values = dequantize(raw.reshape(last - first, row_bytes), kind)
    return torch.from_numpy(np.ascontiguousarray(values)).reshape(shape)


def _tokenizer(metadata: dict[str, Any]) -> TokenizerFiles:
    if "tokenizer.ggml.tokens" not in metadata:
        return TokenizerFiles()
    tokens, _ = token_list(metadata)
    names = ("bos", "eos", "unknown", "padding")
    ids = {n: metadata.get(f"tokenizer.ggml.{n}_token_id") for n in names}
    eos = [metadata.get(f"tokenizer.ggml.{key}") for key in EOS_KEYS]
    for value in [*ids.values(), *eos]:
        if value is not None and not (type(value) is int and 0 <= value < len(tokens)):
            raise CheckpointError(f"special token id {shown(value)} is outside the vocabulary")
    short = {"unknown": "unk", "padding": "pad"}
    special = {f"{short.get(n, n)}_token": tokens[i] for n, i in ids.items() if i is not None}
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise CheckpointError("tokenizer.chat_template is no text")
    add_bos = metadata.get("tokenizer.ggml.add_bos_token")
    if add_bos is None:  # files that leave it out follow the tokenizer's kind
        pre = metadata.get("tokenizer.ggml.pre")
        add_bos = metadata.get("tokenizer.ggml.model") == "llama" or pre in LLAMA3_PRE
    add_bos = bool(add_bos) and ids["bos"] is not None
    return TokenizerFiles(
        tokenizer_json=build_tokenizer_json(metadata, ids["bos"], add_bos),
        chat_template=template,
        bos_token=special.get("bos_token"),
        eos_token=special.get("eos_token"),
        bos_token_id=ids["bos"],
        add_bos=add_bos,
        eos_token_ids=tuple(sorted({i for i in eos if i is not None})),
        special_tokens=special,
    )
