"""Random checkpoints of a preset or a config, for tests and benchmarks.

In: a preset's name or a config dict. Out: a Hugging Face folder (configs, tokenizer, safetensors).
The same arguments give the same bytes; memory holds one slice of one tensor at a time.
"""

import copy
import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from sitsc.models.parameters import Shapes, parameter_shapes
from sitsc.models.presets import preset
from sitsc.models.random_tokenizer import write_tokenizer

if TYPE_CHECKING:
    import numpy as np

DTYPES = {"bfloat16": ("BF16", 2), "float16": ("F16", 2), "float32": ("F32", 4)}  # name, bytes
CHUNK_ELEMENTS = 1 << 24


def write_random(
    preset_or_config: str | dict[str, Any],
    out: Path,
    *,
    seed: int = 0,
    dtype: str = "bfloat16",
    layers: int | None = None,
    headers_only: bool = False,
    shard_bytes: int = 4 << 30,
) -> Path:
    """Write a checkpoint folder and return it.

    `layers` cuts the model short; `headers_only` writes real headers over a hole in the file, so
    that a model of any size takes no disk; above `shard_bytes` the weights are split and indexed.
    ValueError for an unknown preset, family or dtype.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    named = isinstance(preset_or_config, str)
    config = preset(preset_or_config) if named else copy.deepcopy(preset_or_config)
    if layers is not None:
        config["num_hidden_layers"] = layers
    config["torch_dtype"] = dtype
    shapes = parameter_shapes(config)
    out.mkdir(parents=True, exist_ok=True)
    _write_json(out / "config.json", config)
    ids = {k: config[k] for k in ("bos_token_id", "eos_token_id") if k in config}
    _write_json(out / "generation_config.json", ids)
    write_tokenizer(out, config)
    shards = _split(shapes, DTYPES[dtype][1], shard_bytes)
    for file, names in shards.items():
        with (out / file).open("wb") as stream:
            part = {name: shapes[name] for name in names}
            _write_shard(stream, part, dtype, seed, headers_only, len(config_layers(config)))
    if len(shards) > 1:
        _write_index(out, shards, shapes, DTYPES[dtype][1])
    return out


def config_layers(config: dict[str, Any]) -> range:
    """Layer numbers of the model."""
    return range(config["num_hidden_layers"])


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _split(shapes: Shapes, itemsize: int, shard_bytes: int) -> dict[str, list[str]]:
    """Tensors of each file, in order; a tensor larger than a shard gets a file of its own."""
    groups: list[list[str]] = [[]]
    room = shard_bytes
    for name, shape in shapes.items():
        nbytes = math.prod(shape) * itemsize
        if nbytes > room and groups[-1]:
            groups.append([])
            room = shard_bytes
        groups[-1].append(name)
        room -= nbytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    total = len(groups)
    return {f"model-{i:05}-of-{total:05}.safetensors": g for i, g in enumerate(groups, 1)}


def _write_index(out: Path, shards: dict[str, list[str]], shapes: Shapes, itemsize: int) -> None:
    weight_map = {name: file for file, names in shards.items() for name in names}
    total = sum(math.prod(shape) for shape in shapes.values()) * itemsize
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(out / "model.safetensors.index.json", index)


def _write_shard(
    stream: BinaryIO, shapes: Shapes, dtype: str, seed: int, headers_only: bool, layers: int
) -> None:
    header, data_bytes = _header(shapes, dtype)
    stream.write(len(header).to_bytes(8, "little") + header)
    if headers_only:
        stream.truncate(8 + len(header) + data_bytes)
        return
    import torch  # noqa: PLC0415  (a second, and headers need none of it)

    for name, shape in shapes.items():
        for values in _values(name, shape, seed, layers):
            tensor = torch.from_numpy(values).to(getattr(torch, dtype))
            stream.write(tensor.view(torch.uint8).numpy().data)


def _header(shapes: Shapes, dtype: str) -> tuple[bytes, int]:
    stored, itemsize = DTYPES[dtype]
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * itemsize
        entries[name] = {"dtype": stored, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8), end


def _values(name: str, shape: tuple[int, ...], seed: int, layers: int) -> "Iterator[np.ndarray]":
    """Float32 slices of one tensor, from a stream that only its name and the seed decide."""
    import numpy as np  # noqa: PLC0415  (a tenth of a second)

    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    random = np.random.Generator(np.random.Philox(int.from_bytes(digest[:8], "little")))
    mean, deviation = _distribution(name, shape, layers)
    left = math.prod(shape)
    while left:
        count = min(left, CHUNK_ELEMENTS)
        values = random.standard_normal(count, dtype=np.float32)
        yield values * np.float32(deviation) + np.float32(mean)
        left -= count


def _distribution(name: str, shape: tuple[int, ...], layers: int) -> tuple[float, float]:
    """Mean and deviation that keep activations near 1 through any number of layers."""
    if len(shape) == 1:
        return (0.0, 0.1) if name.endswith("bias") else (1.0, 0.1)
    deviation = 1 / math.sqrt(shape[1])
    if name.endswith(("o_proj.weight", "down_proj.weight", "w2.weight", "experts.down_proj")):
        deviation /= math.sqrt(2 * layers)
    return 0.0, deviation
