"""Mixtures of experts as an ONNX function: routing, then a loop over the experts that were chosen.

A function (domain `sitsc`) and not loose nodes, so that the importer can know it again: it compares
the function with the one that its description makes. Other programs inline it.
"""

import torch
from onnx import FunctionProto, TensorProto, helper

from sitsc.core.ops.moe import CLAMPED
from sitsc.export.moe_form import DOMAIN, INPUTS, MoeForm, form_text, read_form
from sitsc.export.onnx_builder import OPSET, Builder
from sitsc.export.onnx_layer_ops import name_of
from sitsc.export.onnx_math_ops import ACTIVATIONS, LOW
from sitsc.export.onnx_shape_ops import Arguments, Operator
from sitsc.export.onnx_stored import Stored, matrix
from sitsc.export.onnx_values import UnwrittenError


def moe_function(form: MoeForm, name: str) -> FunctionProto:
    """x [tokens, hidden], logits [tokens, experts], weights as sitsc::moe has them, unpacked."""
    b = Builder(inside=True)
    given = {key: key if key in form.inputs else "" for key in INPUTS}
    weights, indices = _route(b, given["logits"], given["correction"], form)
    rows = _all_experts(b, given, indices, form)
    b.named(
        "ReduceSum",
        "out",
        b.node("Mul", rows, b.unsqueeze(weights, -1)),
        b.constant([1]),
        keepdims=0,
    )
    opsets = [helper.make_opsetid("", OPSET)]
    made = helper.make_function(DOMAIN, name, list(form.inputs), ["out"], b.nodes, opsets)
    made.doc_string = form_text(form)
    return made


def _route(b: Builder, logits: str, correction: str, form: MoeForm) -> tuple[str, str]:
    """Weights and indices [tokens, top_k]."""
    scores = logits
    if form.scoring == "softmax":
        scores = b.node("Softmax", logits, axis=-1)
    elif form.scoring == "sigmoid":
        scores = b.node("Sigmoid", logits)
    choice = b.node("Add", scores, correction) if correction else scores
    if form.groups > 1:
        choice = _in_groups(b, choice, form)
    _, indices = _top(b, choice, form.top_k)
    weights = b.node("GatherElements", scores, indices, axis=1)
    if form.scoring == "softmax_chosen":
        weights = b.node("Softmax", weights, axis=-1)
    elif form.normalise:
        total = b.node("ReduceSum", weights, b.constant([-1]), keepdims=1)
        weights = b.node("Div", weights, b.node("Add", total, b.real(1e-20)))
    if form.scaling != 1:
        weights = b.node("Mul", weights, b.real(form.scaling))
    return weights, indices


def _top(b: Builder, values: str, count: int) -> list[str]:
    return b.nodes_of("TopK", (values, b.constant([count])), 2, axis=-1, largest=1, sorted=1)


def _in_groups(b: Builder, choice: str, form: MoeForm) -> str:
    """The choice with a low score for experts outside of the best groups."""
    size = form.experts // form.groups
    apart = b.reshape(choice, [-1, form.groups, size])
    best = b.node("ReduceSum", _top(b, apart, min(2, size))[0], b.constant([-1]), keepdims=0)
    kept = _top(b, best, form.group_top)[1]
    low = b.node("Expand", b.real(LOW), b.node("Shape", best))
    zeros = b.node("Expand", b.real(0.0), b.node("Shape", kept))
    mask = b.node("ScatterElements", low, kept, zeros, axis=1)
    chosen = b.node("GreaterOrEqual", mask, b.real(0.0))
    inside = b.node("Where", b.unsqueeze(chosen, -1), apart, b.real(LOW))
    return b.reshape(inside, [-1, form.experts])


def _all_experts(b: Builder, given: dict[str, str], indices: str, form: MoeForm) -> str:
    """What each chosen expert computes for each token [tokens, top_k, hidden], by a loop."""
    body = Builder(inside=True, prefix="body_")
    body.named("Identity", "body_condition", "body_before")
    at, out = _one_expert(body, given, indices, form)
    body.named("ScatterND", "body_rows", "body_filled", at, out)
    number = helper.make_tensor_value_info("body_expert", TensorProto.INT64, [])
    before = helper.make_tensor_value_info("body_before", TensorProto.BOOL, [])
    after = helper.make_tensor_value_info("body_condition", TensorProto.BOOL, [])
    filled, rows = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, None, None])
        for name in ("body_filled", "body_rows")
    )
    graph = helper.make_graph(body.nodes, "experts", [number, before, filled], [after, rows])
    hidden = b.node("Shape", given["x"], start=1, end=2)
    sizes = b.node("Concat", b.node("Shape", indices), hidden, axis=0)
    empty = b.node("Expand", b.real(0.0), sizes)
    count = b.constant(form.experts)
    return b.node("Loop", count, b.constant(True, torch.bool), empty, body=graph)


def _one_expert(b: Builder, given: dict[str, str], indices: str, form: MoeForm) -> tuple[str, str]:
    """Places [chosen, 2] of an expert's tokens, and its results for them."""
    expert, one, zero = "body_expert", b.constant(1), b.constant(0)
    hit = b.node("Equal", indices, expert)
    at = b.transpose(b.node("NonZero", hit), [1, 0])
    part = b.node("Gather", given["x"], b.node("Gather", at, zero, axis=1), axis=0)
    gate_at = b.node("Add", expert, expert)
    up_at = b.node("Add", gate_at, one)
    gate, up = (_linear(b, part, given, "gate_up", place) for place in (gate_at, up_at))
    return at, _linear(b, _gated(b, gate, up, form), given, "down", expert)


def _linear(b: Builder, x: str, given: dict[str, str], key: str, place: str) -> str:
    """x by one of many matrices [out, in], and its bias."""
    weight = b.transpose(b.node("Gather", given[key], place, axis=0), [1, 0])
    made = b.node("MatMul", x, weight)
    bias = given[f"{key}_bias"]
    return b.node("Add", made, b.node("Gather", bias, place, axis=0)) if bias else made


def _gated(b: Builder, gate: str, up: str, form: MoeForm) -> str:
    if form.activation != CLAMPED:
        return b.node("Mul", ACTIVATIONS[form.activation](b, gate), up)
    gate = b.node("Min", gate, b.real(form.limit))
    up = b.node("Max", b.node("Min", up, b.real(form.limit)), b.real(-form.limit))
    share = b.node("Sigmoid", b.node("Mul", gate, b.real(form.alpha)))
    return b.node("Mul", b.node("Mul", gate, share), b.node("Add", up, b.real(1.0)))


def moe(b: Builder, a: Arguments) -> str:
    """Router, experts and residual: a call of a function."""
    x, experts = a["x"], a["logits"].shape[-1]
    hidden, inter = x.shape[-1], a["intermediate"]
    names = {
        "x": b.reshape(x.name, [-1, hidden]),
        "logits": b.reshape(a["logits"].name, [-1, experts]),
        "gate_up": _matrices(b, a, "gate_up", inter, hidden),
        "down": _matrices(b, a, "down", hidden, inter),
    }
    for key in ("correction", "gate_up_bias", "down_bias"):
        if a[key] is not None:
            names[key] = name_of(b, a[key])
    inputs = tuple(key for key in INPUTS if key in names)
    keys = ("top_k", "scoring", "groups", "group_top", "normalise", "scaling")
    fields = {key: a[key] for key in (*keys, "activation", "alpha", "limit")}
    function = _function(b, MoeForm(inputs=inputs, experts=experts, **fields))
    out = b.fresh("Moe")
    given = [names[key] for key in inputs]
    b.nodes.append(helper.make_node(function, given, [out], name=out, domain=DOMAIN))
    out = b.node("Reshape", out, b.node("Shape", x.name))
    return out if a["residual"] is None else b.node("Add", a["residual"].name, out)


def _matrices(b: Builder, a: Arguments, key: str, rows: int, columns: int) -> str:
    if not isinstance(a[key], Stored):
        raise UnwrittenError("of weights that are computed")
    return matrix(b, a[key], a[f"{key}_scale"], rows, columns, turned=False)


def _function(b: Builder, form: MoeForm) -> str:
    """The name of the function of a form."""
    for name, made in b.functions.items():
        if read_form(made.doc_string) == form:
            return name
    name = f"Moe_{len(b.functions) + 1}"
    b.functions[name] = moe_function(form, name)
    return name


EXPERT_OPS: dict[str, Operator] = {"moe.default": moe}
