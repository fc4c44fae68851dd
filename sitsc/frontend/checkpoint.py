"""Opening a checkpoint: a Hugging Face folder or a GGUF file, by headers alone.

In: a path. Out: a `Checkpoint`, whose `read` maps one tensor at a time. The index, where there is
one, is the authority on which shard holds what; files it does not name are not looked at.
Never reads tensor bytes while opening, never unpickles.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from sitsc.core.errors import CheckpointError, UnsupportedModelError
from sitsc.frontend.checkpoint_types import Checkpoint, Rows, TensorInfo, TokenizerFiles
from sitsc.frontend.gguf_reader import open_gguf
from sitsc.frontend.nested import is_nested, open_nested
from sitsc.frontend.safe_files import file_inside, is_plain_name, read_json_object, shown
from sitsc.frontend.safetensors_reader import TensorSpan, read_header, read_span
from sitsc.frontend.tokenizer_files import read_tokenizer_files

__all__ = ["Checkpoint", "TensorInfo", "TokenizerFiles", "open_checkpoint"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ONNX = "model.onnx"
ADAPTER = "adapter_config.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a model folder, a .gguf or .onnx file, or a folder with one .gguf and no config.json.

    A folder with config.json alone opens too, with no tensors. Raises CheckpointError for what is
    missing, damaged or hostile, UnsupportedModelError for a GGUF architecture we cannot read or
    an adapter beside the weights.
    """
    path = Path(path)
    try:
        found = path.exists()
    except OSError:  # a name too long for the file system, a folder that may not be looked into
        found = False
    if not found:
        raise CheckpointError(
            f"no such model: {shown(str(path))}", hint="give a model folder or a .gguf file"
        )
    if path.is_file():
        return _open_file(path)
    ggufs = sorted(path.glob("*.gguf"))
    if not (path / "config.json").exists() and ggufs:
        if len(ggufs) > 1:
            raise CheckpointError(
                f"the folder holds {len(ggufs)} .gguf files", where=path.name, hint="name one"
            )
        return open_gguf(file_inside(path, ggufs[0].name))
    if (path / ONNX).exists() and not list(path.glob("*.safetensors")):
        return _open_onnx(path / ONNX)
    return _open_folder(path)


def _open_file(path: Path) -> Checkpoint:
    if path.suffix.lower() == ".gguf":
        return open_gguf(path)
    if path.suffix.lower() == ".onnx":
        return _open_onnx(path)
    raise CheckpointError(
        f"{path.name} is neither a model folder nor a .gguf or .onnx file",
        hint="give the folder that holds config.json",
    )


def _open_onnx(path: Path) -> Checkpoint:
    from sitsc.frontend.onnx_checkpoint import open_onnx  # noqa: PLC0415  (onnx is imported late)

    return open_onnx(path)


def _open_folder(root: Path) -> Checkpoint:
    if not (root / "config.json").exists():
        raise CheckpointError(
            "the folder has no config.json", where=root.name, hint="give the model's folder"
        )
    if (root / ADAPTER).exists():
        raise UnsupportedModelError(
            "the folder holds an adapter, which would not be applied",
            where=ADAPTER,
            hint="merge the adapter into the weights first",
        )
    config = read_json_object(root, "config.json")
    generation_config: dict[str, Any] = {}
    if (root / "generation_config.json").exists():
        generation_config = read_json_object(root, "generation_config.json")
    spans = _folder_spans(root)
    tensors = {name: span.info for name, span in sorted(spans.items())}
    tokenizer = read_tokenizer_files(root, config, generation_config)
    nested = None
    if is_nested(config):
        config, nested = open_nested(config, tensors)

    def read(name: str, rows: Rows) -> torch.Tensor:
        return read_span(root / spans[name].info.file, spans[name], rows)

    return Checkpoint(
        root=root,
        format="safetensors",
        config=config,
        generation_config=generation_config,
        tensors=tensors,
        tokenizer=tokenizer,
        reader=read,
        nested=nested,
    )


def _folder_spans(root: Path) -> dict[str, TensorSpan]:
    """Tensors by name, from the index, the single file, or nothing for a config alone."""
    if (root / INDEX).exists():
        return _indexed_spans(root, read_json_object(root, INDEX).get("weight_map"))
    files = sorted(p.name for p in root.glob("*.safetensors"))
    if SINGLE in files or len(files) == 1:
        return read_header(file_inside(root, SINGLE if SINGLE in files else files[0]))
    if files:
        raise CheckpointError(
            f"{len(files)} safetensors files and no {INDEX}",
            where=root.name,
            hint="fetch the index: it says which shard holds what",
        )
    _refuse_other_weights(root)
    return {}


def _refuse_other_weights(root: Path) -> None:
    """A folder with weights in another form must not pass for one with a config alone."""
    ggufs = sorted(p.name for p in root.glob("*.gguf"))
    if ggufs:
        raise CheckpointError(
            "the folder holds config.json and .gguf, but no safetensors",
            where=root.name,
            hint=f"name the file itself: {ggufs[0]}",
        )
    pickles = sorted(p.name for pattern in PICKLES for p in root.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"weights are a pickle ({pickles[0]}), which can run code when it is read",
            where=root.name,
            hint="convert to safetensors: model.save_pretrained(folder, safe_serialization=True)",
        )


def _indexed_spans(root: Path, weight_map: Any) -> dict[str, TensorSpan]:
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("the index has no weight_map", where=INDEX)
    shards: dict[str, set[str]] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not is_plain_name(shard):
            raise CheckpointError(
                f"shard {shown(shard)} of {shown(tensor)} is not a plain file name", where=INDEX
            )
        shards.setdefault(shard, set()).add(tensor)
    spans: dict[str, TensorSpan] = {}
    for shard, names in sorted(shards.items()):
        if not (root / shard).exists():
            raise CheckpointError(
                f"the index names shard {shard}, which is not there",
                where=root.name,
                hint="fetch the missing shard",
            )
        header = read_header(file_inside(root, shard))
        _check_same_names(names, header, shard)
        spans |= header
    return spans


def _check_same_names(names: set[str], header: Mapping[str, TensorSpan], shard: str) -> None:
    absent, stray = sorted(names - set(header)), sorted(set(header) - names)
    if absent:
        raise CheckpointError(
            f"the index puts {shown(absent[0])} into {shard}, which has no such tensor",
            where=INDEX,
            hint="index and shards are of different versions; fetch both again",
        )
    if stray:
        raise CheckpointError(
            f"{shard} holds {shown(stray[0])}, which the index does not place there",
            where=INDEX,
            hint="index and shards are of different versions; fetch both again",
        )
