"""Opening an ONNX file: bounded, checked, tensors as headers; external data only from its folder.

In: the path of a file. Out: `OnnxFile` with nodes, inputs, outputs and the header of every tensor.
Never runs, follows or allocates what the file only claims to hold.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sitsc.core.errors import CheckpointError, UnsupportedModelError
from sitsc.export.moe_form import MoeForm
from sitsc.frontend.safe_files import file_inside, shown

OPSETS = range(18, 24)
MAX_NODES = 200_000
MAX_FILE_BYTES = 2 << 30
_MAX_RANK = 16
_HINT = "the file is damaged or was cut short; fetch it again"

# ONNX's numbers of element types.
DTYPES: Mapping[int, torch.dtype] = {
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    10: torch.float16,
    11: torch.float64,
    16: torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class OnnxTensor:
    """Header of an initializer. `file` is None when its bytes lie in the ONNX file itself."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path | None
    offset: int
    proto: Any

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> torch.Tensor:
        """The tensor, copied."""
        if self.file is None:
            return _inline(self.proto, self.dtype, self.shape)
        return self._stored(0, self.nbytes).reshape(self.shape)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) of dimension 0; of external data only their bytes are read."""
        if self.file is None:
            return self.read()[start:stop]
        row = self.nbytes // max(1, self.shape[0])
        part = self._stored(start * row, (stop - start) * row)
        return part.reshape(stop - start, *self.shape[1:])

    def _stored(self, start: int, size: int) -> torch.Tensor:
        assert self.file is not None
        data = bytearray(size)
        with self.file.open("rb") as stream:
            stream.seek(self.offset + start)
            if stream.readinto(data) != size:
                raise CheckpointError(f"{self.file.name} became shorter", hint=_HINT)
        return _from_bytes(data, self.dtype)


@dataclass(frozen=True, slots=True)
class OnnxInput:
    """An input of the graph; sizes that are not fixed are None."""

    name: str
    dtype: torch.dtype
    shape: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class OnnxFile:
    """An opened file. `nodes` are ONNX's own records, `widths` the last sizes of the outputs.

    `digest` is that of the file, which holds the graph, not of external data. `functions` are those
    of our own exporter, by name.
    """

    path: Path
    opset: int
    nodes: tuple[Any, ...]
    inputs: tuple[OnnxInput, ...]
    outputs: tuple[str, ...]
    widths: tuple[int | None, ...]
    tensors: Mapping[str, OnnxTensor]
    digest: str
    functions: Mapping[str, MoeForm]


def open_onnx_file(root: Path, name: str) -> OnnxFile:
    """Open `name` in the folder `root`.

    Raises CheckpointError for damage, UnsupportedModelError for another opset or kind of graph.
    """
    import onnx  # noqa: PLC0415  (only compiling an ONNX file needs it)
    from google.protobuf.message import DecodeError  # noqa: PLC0415

    path = file_inside(root, name)
    if path.stat().st_size > MAX_FILE_BYTES:
        raise CheckpointError(
            f"{name} is larger than 2 GiB", hint="export with external data beside the graph"
        )
    data = path.read_bytes()
    try:
        model: Any = onnx.ModelProto.FromString(data)
    except (DecodeError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{name} is not an ONNX file", where=name, hint=_HINT) from error
    opset = _opset(model, name)
    _check_size(model, name)
    if any(not isinstance(text, str) for text in _texts(model.graph)):
        raise CheckpointError("a name in the graph is not UTF-8 text", where=name, hint=_HINT)
    tensors = {t.name: _header(path, t) for t in model.graph.initializer}
    if len(tensors) != len(model.graph.initializer) or "" in tensors:
        raise CheckpointError("two initializers have one name, or none", where=name, hint=_HINT)
    inputs = tuple(_input(i) for i in model.graph.input if i.name not in tensors)
    outputs = tuple(o.name for o in model.graph.output)
    widths = tuple(_width(o) for o in model.graph.output)
    nodes = tuple(model.graph.node)
    digest = hashlib.sha256(data).hexdigest()
    functions = {f.name: _own_function(f, name) for f in model.functions}
    return OnnxFile(path, opset, nodes, inputs, outputs, widths, tensors, digest, functions)


def _opset(model: Any, name: str) -> int:
    """The version of the standard operators. Raises UnsupportedModelError."""
    found = [item.version for item in model.opset_import if item.domain in ("", "ai.onnx")]
    if not found:
        raise CheckpointError(f"{name} names no operator set", where=name, hint=_HINT)
    if found[0] not in OPSETS:
        raise UnsupportedModelError(
            f"{name} is of opset {found[0]}",
            where=name,
            hint=f"export it with an opset of {OPSETS[0]} to {OPSETS[-1]}",
        )
    return int(found[0])


def _check_size(model: Any, name: str) -> None:
    if not model.graph.node or not model.graph.output:
        raise CheckpointError(f"{name} holds no graph", where=name, hint=_HINT)
    if len(model.graph.node) > MAX_NODES:
        raise UnsupportedModelError(f"{name} has more than {MAX_NODES} nodes", where=name)


def _own_function(proto: Any, name: str) -> MoeForm:
    """What a function computes that `sitsc export` wrote, to the byte. Raises others by name."""
    from sitsc.export.onnx_expert_ops import moe_function, read_form  # noqa: PLC0415  (needs onnx)

    try:
        form = read_form(proto.doc_string)
        ours = moe_function(form, proto.name)
        if ours.SerializeToString(deterministic=True) == proto.SerializeToString(
            deterministic=True
        ):
            return form
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise UnsupportedModelError(
        f"{name} defines functions of its own: {shown(proto.name)}",
        where=name,
        hint="inline them: onnx.inliner.inline_local_functions",
    )


def _texts(graph: Any) -> Iterator[Any]:
    """Every name in a graph; protobuf gives bytes for one that is no text."""
    for item in (*graph.input, *graph.output, *graph.initializer):
        yield item.name
    for tensor in graph.initializer:
        for entry in tensor.external_data:
            yield from (entry.key, entry.value)
    for node in graph.node:
        yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
        for attribute in node.attribute:
            yield from (attribute.name, attribute.t.name)


def _header(path: Path, proto: Any) -> OnnxTensor:
    """The checked header of one initializer. Raises CheckpointError."""
    dtype, shape = tensor_type(proto, path.name)
    where = f"{path.name}, {shown(proto.name)}"
    if proto.data_location != 1:
        check_inline(proto, dtype, shape, where)
        return OnnxTensor(proto.name, dtype, shape, None, 0, proto)
    keys = {entry.key: entry.value for entry in proto.external_data}
    file = file_inside(path.parent, keys.get("location", ""))
    nbytes = math.prod(shape) * dtype.itemsize
    offset, length = _number(keys, "offset", 0, where), _number(keys, "length", nbytes, where)
    if length != nbytes or offset + nbytes > file.stat().st_size:
        raise CheckpointError(
            f"{nbytes} bytes at {offset} are not in {file.name} of {file.stat().st_size}",
            where=where,
            hint=_HINT,
        )
    return OnnxTensor(proto.name, dtype, shape, file, offset, None)


def _number(keys: dict[str, str], key: str, default: int, where: str) -> int:
    text = keys.get(key, str(default))
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise CheckpointError(f"{key} {shown(text)} is not a number", where=where, hint=_HINT)
    return int(text)


def tensor_type(proto: Any, where: str) -> tuple[torch.dtype, tuple[int, ...]]:
    """Element type and shape of a tensor record. Raises CheckpointError, UnsupportedModelError."""
    dtype, shape = DTYPES.get(proto.data_type), tuple(proto.dims)
    if dtype is None:
        raise UnsupportedModelError(
            f"tensor {shown(proto.name)} is of ONNX type {proto.data_type}",
            where=where,
            hint="floats, 8, 32 and 64 bit integers and bool are read",
        )
    if len(shape) > _MAX_RANK or any(s < 0 for s in shape) or math.prod(shape) >= 1 << 48:
        raise CheckpointError(
            f"tensor {shown(proto.name)} has an impossible shape", where=where, hint=_HINT
        )
    return dtype, shape


def _typed(proto: Any, dtype: torch.dtype) -> Any:
    """The field of a tensor record that holds its values when they are not raw bytes."""
    if dtype == torch.float32:
        return proto.float_data
    if dtype == torch.float64:
        return proto.double_data
    return proto.int64_data if dtype == torch.int64 else proto.int32_data


def check_inline(proto: Any, dtype: torch.dtype, shape: tuple[int, ...], where: str) -> None:
    """CheckpointError unless a tensor record holds exactly as many values as its shape says."""
    count = math.prod(shape)
    held = len(proto.raw_data) / dtype.itemsize if proto.raw_data else len(_typed(proto, dtype))
    if held != count:
        raise CheckpointError(
            f"{held:g} values where the shape {list(shape)} wants {count}", where=where, hint=_HINT
        )


def inline_tensor(proto: Any, where: str) -> torch.Tensor:
    """The tensor of a record inside a node. Raises CheckpointError."""
    dtype, shape = tensor_type(proto, where)
    if proto.data_location == 1:
        raise UnsupportedModelError("a node's own tensor lies in another file", where=where)
    check_inline(proto, dtype, shape, where)
    return _inline(proto, dtype, shape)


def _inline(proto: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if math.prod(shape) == 0:
        return torch.empty(shape, dtype=dtype)
    if proto.raw_data:
        return _from_bytes(bytearray(proto.raw_data), dtype).reshape(shape)
    values = _typed(proto, dtype)
    if dtype in (torch.float16, torch.bfloat16):  # int32_data holds their bits
        bits = torch.from_numpy(np.array(values, dtype=np.int64).astype(np.uint16).view(np.int16))
        return bits.view(dtype).reshape(shape)
    return torch.tensor(list(values)).to(dtype).reshape(shape)


def _from_bytes(data: bytearray, dtype: torch.dtype) -> torch.Tensor:
    if not data:
        return torch.empty(0, dtype=dtype)
    if dtype == torch.bool:
        return torch.frombuffer(data, dtype=torch.uint8) != 0
    return torch.frombuffer(data, dtype=dtype)


def _input(proto: Any) -> OnnxInput:
    kind = proto.type.tensor_type
    dtype = DTYPES.get(kind.elem_type)
    if dtype is None:
        raise UnsupportedModelError(f"input {shown(proto.name)} is no tensor of a known type")
    sizes = [d.dim_value if d.WhichOneof("value") == "dim_value" else None for d in kind.shape.dim]
    return OnnxInput(proto.name, dtype, tuple(sizes))


def _width(proto: Any) -> int | None:
    """The last size of an output, where it is fixed."""
    sizes = list(proto.type.tensor_type.shape.dim)
    return sizes[-1].dim_value or None if sizes else None


def counted(found: Counter[str]) -> str:
    """Names with counts, most frequent first, for one line of an error."""
    parts = [f"{shown(name)[1:-1]} ×{count}" for name, count in found.most_common(20)]
    return ", ".join(parts) + (f" and {len(found) - 20} more" if len(found) > 20 else "")
