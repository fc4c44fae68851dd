"""From the graph in an artifact to ONNX nodes: calls in order, each by its operator's table.

In: the reference of an artifact and its plan. Out: a filled builder, inputs and outputs. What has
no ONNX form is collected and named at once, with counts.
"""

import operator
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from onnx import ValueInfoProto, helper
from torch import Tensor

import sitsc.core.ops  # noqa: F401  (registers the operators)
from sitsc.core.errors import UnsupportedModelError
from sitsc.core.plan import PLAIN, Plan
from sitsc.core.reference import Reference, operator_of
from sitsc.core.weights import DTYPES, WeightSpec
from sitsc.export.onnx_attention_ops import (
    IDS,
    MASK,
    POSITIONS,
    Cache,
    KvShape,
    past_name,
    present_name,
)
from sitsc.export.onnx_builder import Builder
from sitsc.export.onnx_expert_ops import EXPERT_OPS
from sitsc.export.onnx_layer_ops import LAYER_OPS
from sitsc.export.onnx_math_ops import MATH_OPS
from sitsc.export.onnx_picture_ops import PICTURE_OPS
from sitsc.export.onnx_shape_ops import SHAPE_OPS, Operator
from sitsc.export.onnx_stored import ReadStored, Stored, plain
from sitsc.export.onnx_values import (
    ONNX_TYPES,
    Size,
    UnwrittenError,
    Value,
    computed,
    example,
)

ATTENTION = "sitsc.paged_attention.default"
OPERATORS: dict[str, Operator] = {f"aten.{name}": call for name, call in SHAPE_OPS.items()}
OPERATORS |= {f"aten.{name}": call for name, call in (MATH_OPS | PICTURE_OPS).items()}
OPERATORS |= {f"sitsc.{name}": call for name, call in (LAYER_OPS | EXPERT_OPS).items()}
_ARITHMETIC = {"add": "Add", "sub": "Sub", "mul": "Mul", "floordiv": "Div", "mod": "Mod"}
_PACKED = ("weight", "scale", "gate_up", "gate_up_scale", "down", "down_scale")
_EXAMPLES = (7, 10)
_SIZE = re.compile(r"(?:(\d+)\*)?([A-Za-z_]\w*)([+-]\d+)?")
FLOAT, INT64 = ONNX_TYPES[torch.float32], ONNX_TYPES[torch.int64]


@dataclass(slots=True)
class Written:
    """A graph that was written: its builder, inputs and outputs."""

    builder: Builder
    inputs: list[ValueInfoProto]
    outputs: list[ValueInfoProto]


class GraphWriter:
    """Writes the calls of a reference; `read` gives stored weights."""

    def __init__(self, reference: Reference, plan: Plan, read: ReadStored) -> None:
        self.reference, self.plan = reference, plan
        self.builder, self.cache = Builder(), Cache()
        self.stored = {s.name: Stored(s, read) for s in plan.model.parameters}
        self.inputs: dict[str, Value] = {}
        self.values: dict[int, Any] = {}
        self.unwritten: Counter[str] = Counter()

    def write(self) -> Written:
        """All of the graph. Raises UnsupportedModelError naming everything that is not written."""
        decoder = self.plan.kind != PLAIN
        infos = self._decoder_inputs() if decoder else self._plain_inputs()
        for index, (name, arguments, keywords) in enumerate(self.reference.calls):
            self.values[index] = self._call(name, list(arguments), keywords)
        if self.unwritten:
            names = ", ".join(f"{n} ×{c}" for n, c in self.unwritten.most_common())
            raise UnsupportedModelError(
                f"operators without an ONNX form: {names}",
                where=self.plan.model.architecture,
                hint="nothing was written; report the model",
            )
        outputs = self._decoder_outputs() if decoder else self._plain_outputs()
        if decoder:
            infos += self._past(past_name, "past_sequence_length")
        return Written(self.builder, infos, outputs)

    # --- calls ----------------------------------------------------------------------------------

    def _call(self, name: str, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        given = [self._given(item) for item in arguments]
        named = {key: self._given(item) for key, item in keywords.items()}
        if name == "getitem":
            return given[0][given[1]]
        if name == "aten.sym_size.int":
            return self.builder.size(self._value(given[0]), given[1])
        if name.startswith("operator."):
            return self._arithmetic(name.partition(".")[2], given)
        target = operator_of(name)
        schema = target._schema.arguments  # pyright: ignore
        whole = {a.name: a.default_value for a in schema}
        whole |= {a.name: item for a, item in zip(schema, given, strict=False)} | named
        packed = _PACKED if name.startswith("sitsc.") else ()
        whole = {k: item if k in packed else self._value(item) for k, item in whole.items()}
        metas = [_metas(target, whole, which) for which in (0, 1)]
        return self._named(self._write_call(name, whole), metas)

    def _write_call(self, name: str, whole: dict[str, Any]) -> Any:
        if name == "aten.index.Tensor" and self._selects_rows(whole):
            return whole["self"].name
        call = self.cache.attention if name == ATTENTION else OPERATORS.get(name)
        if call is None:
            self.unwritten[name] += 1
            return None
        try:
            return call(self.builder, whole)
        except UnwrittenError as error:
            self.unwritten[f"{name} {error}"] += 1
            return None

    def _selects_rows(self, whole: dict[str, Any]) -> bool:
        """Whether a call takes the rows of logits, which here are all."""
        chosen = [item for item in whole["indices"] if item is not None]
        rows = self.inputs.get("logit_rows")
        return len(chosen) == 1 and rows is not None and chosen[0] is rows

    def _named(self, names: Any, metas: list[Any]) -> Any:
        """Values of the names that an operator gave."""
        if isinstance(metas[0], (list, tuple)):
            names = names or ["unwritten"] * len(metas[0])
            return [
                Value(n, (x, y)) for n, x, y in zip(names, *metas, strict=True) if x is not None
            ]
        return Value(names or "unwritten", (metas[0], metas[1]))

    def _arithmetic(self, name: str, given: list[Any]) -> Any:
        """Arithmetic on sizes: numbers stay numbers."""
        function: Callable[..., Any] = getattr(operator, name)
        results = [function(*(example(item, which) for item in given)) for which in (0, 1)]
        if not any(isinstance(item, Size) for item in given):
            return results[0]
        if name not in _ARITHMETIC:
            self.unwritten[f"operator.{name}"] += 1
            return Size("unwritten", (results[0], results[1]))
        names = [self.builder.operand(item, torch.int64) for item in given]
        return Size(self.builder.node(_ARITHMETIC[name], *names), (results[0], results[1]))

    def _given(self, item: Any) -> Any:
        if isinstance(item, list):
            return [self._given(part) for part in item]
        if not isinstance(item, dict):
            return item
        ((kind, what),) = item.items()
        if kind == "dtype":
            return getattr(torch, what)
        if kind == "device":
            return torch.device("meta")
        if kind == "weight":
            return self.stored[what]
        return self.values[what] if kind == "value" else self._input(what)

    def _value(self, item: Any) -> Any:
        """A stored weight as a tensor of the graph; other values as they are."""
        if isinstance(item, list):
            return [self._value(part) for part in item]
        if not isinstance(item, Stored):
            return item
        meta = _meta(item.spec)
        return Value(plain(self.builder, item), (meta, meta))

    # --- inputs and outputs ---------------------------------------------------------------------

    def _input(self, name: str) -> Value:
        """An input of a step; those of pages stand for nothing in the graph."""
        if name in self.inputs:
            return self.inputs[name]
        shapes: dict[str, Any] = {"block_table": (1, 2), "query_start": (2,), "context_lens": (1,)}
        if name.startswith("kv_"):
            group = self.plan.kv[int(name.removeprefix("kv_"))]
            width = group.head_dim * group.page_tokens
            shape: Any = (3, len(group.layers), 2, group.kv_heads, width)
            dtype = DTYPES[group.dtype]
        else:
            shape, dtype = shapes[name], torch.int32
        meta = torch.empty(shape, dtype=dtype, device="meta")
        return self.inputs.setdefault(name, Value(name, (meta, meta)))

    def _decoder_inputs(self) -> list[ValueInfoProto]:
        b = self.builder
        flat = _metas_of(("tokens",), torch.int64, {"tokens": _EXAMPLES})
        for ours, theirs in (("token_ids", IDS), ("position_ids", POSITIONS)):
            if any(_names(call, ours) for call in self.reference.calls):
                self.inputs[ours] = Value(b.reshape(theirs, [-1]), flat)
        self.inputs["logit_rows"] = Value("logit_rows", flat)
        shape = ["batch_size", "sequence_length"]
        infos = [helper.make_tensor_value_info(IDS, INT64, shape)]
        whole = ["batch_size", "past_sequence_length + sequence_length"]
        infos.append(helper.make_tensor_value_info(MASK, INT64, whole))
        infos.append(helper.make_tensor_value_info(POSITIONS, INT64, shape))
        return infos

    def _past(self, name: Callable[[int, str], str], length: str) -> list[ValueInfoProto]:
        infos = []
        for layer, kv in enumerate(self.cache.layers):
            for part, width in (("key", kv.key), ("value", kv.value)):
                shape = ["batch_size", kv.heads, length, width]
                infos.append(helper.make_tensor_value_info(name(layer, part), FLOAT, shape))
        return infos

    def _decoder_outputs(self) -> list[ValueInfoProto]:
        (logits,) = self._results()
        batch, tokens = (self.builder.once(("ids", axis), lambda: "") for axis in (0, 1))
        width = logits.shape[-1]
        sizes = self.builder.sizes([Size(batch, (0, 0)), Size(tokens, (0, 0)), width])
        self.builder.named("Reshape", "logits", logits.name, sizes)
        shape = ["batch_size", "sequence_length", width]
        infos = [helper.make_tensor_value_info("logits", FLOAT, shape)]
        return infos + self._past(present_name, "past_sequence_length + sequence_length")

    def _plain_inputs(self) -> list[ValueInfoProto]:
        infos, sizes = [], _example_sizes(self.plan)
        for argument in _launch(self.plan).arguments:
            dtype = DTYPES[argument.dtype]
            metas = _metas_of(argument.shape, dtype, sizes)
            name = argument.name
            kind = ONNX_TYPES[computed(dtype)]
            infos.append(helper.make_tensor_value_info(name, kind, list(argument.shape)))
            self.inputs[name] = Value(name, metas)
        return infos

    def _plain_outputs(self) -> list[ValueInfoProto]:
        infos, results = [], iter(self._results())
        for output in _launch(self.plan).outputs:
            if output.dtype == "none":
                continue
            value = next(results)
            name = output.name if output.name not in self.inputs else f"{output.name}_out"
            self.builder.named("Identity", name, value.name)
            kind = ONNX_TYPES[value.dtype]
            infos.append(helper.make_tensor_value_info(name, kind, list(output.shape)))
        return infos

    def _results(self) -> list[Value]:
        return [self._value(self._given(item)) for item in self.reference.results]


def _launch(plan: Plan) -> Any:
    return plan.regimes[0].groups[0].launches[0]


def _names(call: Any, name: str) -> bool:
    return f"'input': {name!r}" in repr(call)


def _metas(target: Any, whole: dict[str, Any], which: int) -> Any:
    """The result of a call on the meta device."""

    def meta(item: Any) -> Any:
        if isinstance(item, Stored):
            return _meta(item.spec)
        if isinstance(item, list):
            return [meta(part) for part in item]
        return example(item, which)

    given = {key: meta(item) for key, item in whole.items()}
    schema = target._schema.arguments
    positional = [given.pop(a.name) for a in schema if not a.kwarg_only and a.name in given]
    with torch.no_grad(), torch.device("meta"):
        return target(*positional, **given)


def _meta(spec: WeightSpec) -> Tensor:
    return torch.empty(spec.stored_shape, dtype=DTYPES[spec.dtype], device="meta")


def _metas_of(
    shape: tuple[int | str, ...], dtype: torch.dtype, sizes: dict[str, tuple[int, int]]
) -> tuple[Tensor, Tensor]:
    """Meta tensors of both examples; a size is a number, a name or a sum of them ("2*rows+1")."""
    made = []
    for which in (0, 1):
        numbers = [_number(dim, {n: both[which] for n, both in sizes.items()}) for dim in shape]
        made.append(torch.empty(numbers, dtype=dtype, device="meta"))
    return made[0], made[1]


def _number(dim: int | str, sizes: dict[str, int]) -> int:
    if isinstance(dim, int):
        return dim
    found = _SIZE.fullmatch(dim)
    if found is None:
        raise UnsupportedModelError(f"an input of size {dim}", hint="report the model")
    factor, name, more = found.groups()
    return int(factor or 1) * sizes[name] + int(more or 0)


def _example_sizes(plan: Plan) -> dict[str, tuple[int, int]]:
    """Two values of each free size, within its bounds."""
    bounds, found = plan.model.dimensions, {}
    names = [n for a in _launch(plan).arguments for n in a.shape if isinstance(n, str)]
    for place, text in enumerate(names):
        match = _SIZE.fullmatch(text)
        name = match.group(2) if match else text
        least, most = bounds.get(f"{name}_min", 1), bounds.get(f"{name}_max", 1 << 30)
        first = min(most, max(least, 2) + 2 + place)
        found.setdefault(name, (first, min(most, first + 3) if first < most else least))
    return found


__all__ = ["GraphWriter", "KvShape", "Written"]
