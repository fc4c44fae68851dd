"""Paged attention as plain ONNX nodes over past keys and values, in the way optimum names things.

The rows of a step become [batch, sequence]; pages become past_key_values.N.key and .value [batch,
heads, past, dim], which come back longer as present.N. A key is seen by its place in the cache, as
far as attention_mask lets it.
"""

from dataclasses import dataclass, field

import torch

from sitsc.export.onnx_builder import Builder
from sitsc.export.onnx_layer_ops import name_of, rotate
from sitsc.export.onnx_math_ops import LOW
from sitsc.export.onnx_shape_ops import Arguments
from sitsc.export.onnx_values import Size

IDS, MASK, POSITIONS = "input_ids", "attention_mask", "position_ids"


@dataclass(frozen=True, slots=True)
class KvShape:
    """Heads, and sizes of a key and of a value, of one layer."""

    heads: int
    key: int
    value: int


@dataclass(slots=True)
class Cache:
    """What the attentions of a decoder share: the past, and masks by window."""

    layers: list[KvShape] = field(default_factory=list)

    def attention(self, b: Builder, a: Arguments) -> str:
        """One layer of paged attention: [tokens, heads · value size]."""
        layer = len(self.layers)
        heads, dim = a["q"].shape[1:]
        shape = KvShape(a["k"].shape[1], dim, a["v"].shape[2])
        self.layers.append(shape)
        q, k, v = (_by_sequence(b, a[key].name, a[key].shape[1:]) for key in ("q", "k", "v"))
        if a["rope_style"] != "none":
            cos, sin = (_tables(b, a[key].name, a[key].shape[-1]) for key in ("cos", "sin"))
            widths = (dim, a["cos"].shape[-1])
            q, k = (rotate(b, x, cos, sin, widths, a["rope_style"]) for x in (q, k))
        k, v = (_grown(b, layer, part, x) for part, x in (("key", k), ("value", v)))
        groups = heads // shape.heads
        k, v = (_repeated(b, x, shape.heads, groups, n) for x, n in ((k, dim), (v, shape.value)))
        scores = b.node("MatMul", q, b.transpose(k, [0, 1, 3, 2]))
        scores = b.node("Mul", scores, b.real(a["scale"]))
        if a["softcap"] > 0:
            cap = b.real(a["softcap"])
            scores = b.node("Mul", b.node("Tanh", b.node("Div", scores, cap)), cap)
        scores = b.node("Where", visible(b, a["window"]), scores, b.real(LOW))
        share = _shares(b, scores, a, heads)
        out = b.transpose(b.node("MatMul", share, v), [0, 2, 1, 3])
        return b.reshape(out, [-1, heads * shape.value])


def _shares(b: Builder, scores: str, a: Arguments, heads: int) -> str:
    """The softmax of the scores; a sink takes part in it and is left out of the result."""
    if a["sinks"] is None:
        return b.node("Softmax", scores, axis=-1)
    sinks = b.reshape(name_of(b, a["sinks"]), [1, heads, 1, 1])
    batch, tokens = sizes(b)
    column = b.node("Expand", sinks, b.sizes([batch, heads, tokens, 1]))
    wide = b.node("Softmax", b.node("Concat", scores, column, axis=-1), axis=-1)
    return b.slice(wide, -1, 0, -1)


def sizes(b: Builder) -> tuple[Size, Size]:
    """Batch and sequence of input_ids."""

    def of(axis: int) -> str:
        return b.node("Squeeze", b.node("Shape", IDS, start=axis, end=axis + 1))

    batch, tokens = (b.once(("ids", axis), lambda axis=axis: of(axis)) for axis in (0, 1))
    return Size(batch, (0, 0)), Size(tokens, (0, 0))


def _past(b: Builder) -> str:
    """The number of tokens in the past."""
    return b.once(
        "past",
        lambda: b.node("Squeeze", b.node("Shape", past_name(0, "key"), start=2, end=3)),
    )


def past_name(layer: int, part: str) -> str:
    """An input."""
    return f"past_key_values.{layer}.{part}"


def present_name(layer: int, part: str) -> str:
    """An output."""
    return f"present.{layer}.{part}"


def _by_sequence(b: Builder, name: str, inner: tuple[int | None, ...]) -> str:
    """[tokens, heads, dim] as [batch, heads, sequence, dim]."""
    wide = b.reshape(name, [*sizes(b), *inner])
    return b.transpose(wide, [0, 2, 1, 3])


def _tables(b: Builder, name: str, width: int) -> str:
    """Cosines or sines [tokens, width] as [batch, 1, sequence, width]."""
    return b.once(("table", name), lambda: b.unsqueeze(b.reshape(name, [*sizes(b), width]), 1))


def _grown(b: Builder, layer: int, part: str, new: str) -> str:
    """Past and new, which is an output as well."""
    output = present_name(layer, part)
    b.named("Concat", output, past_name(layer, part), new, axis=2)
    return output


def _repeated(b: Builder, x: str, heads: int, groups: int, dim: int) -> str:
    """Each head for a group of query heads."""
    if groups == 1:
        return x
    batch, tokens = sizes(b)
    length = Size(b.once("length", lambda: b.node("Add", _past(b), tokens.name)), (0, 0))
    wide = b.node("Expand", b.unsqueeze(x, 2), b.sizes([batch, heads, groups, length, dim]))
    return b.reshape(wide, [batch, heads * groups, length, dim])


def visible(b: Builder, window: int) -> str:
    """Which keys a token sees: [batch, 1, sequence, past + sequence]."""
    return b.once(("visible", window), lambda: _visible(b, window))


def _visible(b: Builder, window: int) -> str:
    past, tokens = _past(b), sizes(b)[1].name
    length = b.once("length", lambda: b.node("Add", past, tokens))
    zero, one = b.constant(0), b.constant(1)
    column = b.once("columns", lambda: b.node("Range", zero, length, one))
    row = b.once("rows", lambda: b.unsqueeze(b.node("Range", past, length, one), 1))
    seen = b.node("LessOrEqual", column, row)
    if window > 0:
        first = b.node("Sub", row, b.constant(window))
        seen = b.node("And", seen, b.node("Greater", column, first))
    kept = b.once("kept", lambda: b.unsqueeze(b.cast(MASK, torch.bool), 1, 2))
    return b.node("And", seen, kept)
