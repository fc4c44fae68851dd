"""Opening GGUF files of the Llama architecture, and reading their tensors as float32.

In: a path. Out: a `Checkpoint` with HF names and config. Rows are dequantised by the gguf package
as they are asked for; q and k rows come back in HF order.
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
    ROPE_FACTORS,
    architecture,
    hf_config,
    hf_names,
    llama3_scaling,
)
from sitsc.frontend.gguf_header import GgufTensor, read_gguf_header
from sitsc.frontend.gguf_tokenizer import LLAMA3_PRE, build_tokenizer_json, token_list
from sitsc.frontend.safe_files import shown
from sitsc.frontend.safetensors_reader import map_bytes

DTYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def open_gguf(path: Path) -> Checkpoint:
    """Open one GGUF file by its header (and the few bytes of rope factors, if it has them).

    CheckpointError for damage, UnsupportedModelError naming what we cannot read.
    """
    header = read_gguf_header(path)
    architecture(header.metadata)
    tensors = hf_names(header)
    _check_types(tensors)
    factors = tensors.pop(ROPE_FACTORS, None)
    config = hf_config(header.metadata, tensors)
    if factors is not None:
        _check_rope_factors(factors, config["head_dim"])
        config |= llama3_scaling(read_rows(path, factors).tolist(), config)
    heads = {
        "q_proj": config["num_attention_heads"],
        "k_proj": config["num_key_value_heads"],
    }
    _check_divisible(tensors, heads)

    def read(name: str, rows: Rows) -> torch.Tensor:
        part = name.split(".")[-2]
        return read_rows(path, tensors[name], rows, permuted_heads=heads.get(part, 0))

    return Checkpoint(
        root=path.parent,
        format="gguf",
        config=config,
        generation_config={},
        tensors={n: replace(t.info, name=n) for n, t in sorted(tensors.items())},
        tokenizer=_tokenizer(header.metadata),
        reader=read,
    )


def _check_types(tensors: dict[str, GgufTensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.info.dtype not in DTYPES:
            raise UnsupportedModelError(
                f"{name} is stored as {tensor.info.dtype}, which is not supported",
                hint=f"supported: {', '.join(DTYPES)}",
            )


def _check_rope_factors(tensor: GgufTensor, head_dim: int) -> None:
    if tensor.info.dtype != "F32" or tensor.info.shape != (head_dim // 2,):
        raise CheckpointError(
            f"{tensor.info.name} is {tensor.info.dtype} {list(tensor.info.shape)}, "
            f"expected F32 [{head_dim // 2}]"
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
