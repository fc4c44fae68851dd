"""Graphs that look like a usual decoder and compute something else: as onnxruntime, or refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from sitsc import lowering
from sitsc.core.errors import OptionError, UnsupportedModelError
from sitsc.core.interpret import relative_error, run_in_two, step_inputs
from sitsc.core.options import CompileOptions
from sitsc.frontend.checkpoint import open_checkpoint
from sitsc.frontend.onnx_trace import trace_onnx
from sitsc.passes import CPU
from sitsc.passes.base import PassContext
from sitsc.passes.runner import run_passes
from sitsc.pipeline import plan_checkpoint
from tests.export.onnx_runs import Weights
from tests.frontend.onnx_models import onnxruntime_logits

IDS = [(7 * i * i + 3 * i + 1) % 16 for i in range(60)]
Nodes = list[tuple[str, list[str], str]]
CONSTANTS: dict[str, Any] = {
    "zero": np.int64(0),
    "one": np.int64(1),
    "first": np.array([0]),
    "second": np.array([1]),
    "two": np.int64(2),
    "forty": np.int64(40),
    "hundredth": np.float32(0.01),
    "limit": np.float32(0.4),
    "low": np.float32(-1e9),
    "cap": np.float32(3.0),
    "minus_cap": np.float32(-3.0),
    "from_the_end": np.arange(-1, -33, -1),
}
PLACES: Nodes = [("Identity", ["counted"], "places")]
VISIBLE: Nodes = [("LessOrEqual", ["counted", "rows"], "visible")]
CAPPED: Nodes = [("Identity", ["raw"], "scores")]
MIXED: Nodes = [("Identity", ["y"], "mixed")]


def _model(
    places: Nodes = PLACES,
    visible: Nodes = VISIBLE,
    capped: Nodes = CAPPED,
    mixed: Nodes = MIXED,
    axis: int = -1,
    rows: int = 4200,
) -> bytes:
    """One attention over a table and positions, of width 32."""
    nodes: Nodes = [
        ("Shape", ["input_ids"], "sizes"),
        ("Gather", ["sizes", "one"], "count"),
        ("Range", ["zero", "count", "one"], "counted"),
        ("Unsqueeze", ["counted", "second"], "rows"),
        ("Sub", ["rows", "counted"], "apart"),
        ("Cast", ["apart"], "apart_float"),
        ("Cast", ["count"], "count_float"),
        *places,
        *visible,
        ("Gather", ["table", "input_ids"], "e"),
        ("Gather", ["spots", "places"], "spot"),
        ("Add", ["e", "spot"], "x"),
        ("Unsqueeze", ["x", "second"], "q"),
        ("Transpose", ["q"], "k"),
        ("MatMul", ["q", "k"], "raw"),
        *capped,
        ("Where", ["visible", "scores", "low"], "masked"),
        ("Softmax", ["masked"], "share"),
        ("MatMul", ["share", "q"], "a"),
        ("Squeeze", ["a", "second"], "y"),
        *mixed,
        ("MatMul", ["mixed", "head"], "logits"),
    ]
    random = np.random.default_rng(0)
    tables = {"table": (16, 32), "spots": (rows, 32), "head": (32, 16)}
    constants = CONSTANTS | {
        n: random.standard_normal(shape).astype(np.float32) / 2 for n, shape in tables.items()
    }
    given = {"Transpose": {"perm": [0, 1, 3, 2]}, "Softmax": {"axis": axis}, "Cast": {"to": 1}}
    given |= {"Gather by": {"axis": 2}}
    made = [
        helper.make_node(op.split()[0], inputs, [output], **given.get(op, {}))
        for op, inputs, output in nodes
    ]
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "tokens"])
    out = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "tokens", 16])
    tensors = [numpy_helper.from_array(np.array(v), n) for n, v in constants.items()]
    graph = helper.make_graph(made, "g", [ids], [out], tensors)
    opset = [helper.make_opsetid("", 20)]
    return helper.make_model(graph, opset_imports=opset, ir_version=10).SerializeToString()


def _seen(*more: tuple[str, list[str], str]) -> Nodes:
    return [("LessOrEqual", ["counted", "rows"], "before"), *more]


TAKEN: dict[str, dict[str, Any]] = {
    "nothing else": {},
    "positions that are cut off": {"places": [("Min", ["counted", "forty"], "places")]},
    "positions that begin again": {"places": [("Mod", ["counted", "forty"], "places")]},
    "a window made of fractions": {
        "visible": _seen(
            ("Mul", ["apart_float", "hundredth"], "distance"),
            ("Less", ["distance", "limit"], "near"),
            ("And", ["before", "near"], "visible"),
        )
    },
    "a softcap below zero": {
        "capped": [
            ("Div", ["raw", "minus_cap"], "by"),
            ("Tanh", ["by"], "within"),
            ("Mul", ["within", "minus_cap"], "scores"),
        ]
    },
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "softmax over queries": ({"axis": 2}, "softmax goes over dimension 2, not over the keys"),
    "a window of half the tokens": (
        {
            "visible": _seen(
                ("Div", ["count", "two"], "half"),
                ("Less", ["apart", "half"], "near"),
                ("And", ["before", "near"], "visible"),
            )
        },
        "the mask depends on the number of tokens",
    ),
    "a softcap with two signs": (
        {
            "capped": [
                ("Div", ["raw", "minus_cap"], "by"),
                ("Tanh", ["by"], "within"),
                ("Mul", ["within", "cap"], "scores"),
            ]
        },
        "capped in a way that is not known",
    ),
    "the number of tokens as a factor": (
        {"mixed": [("Mul", ["y", "count_float"], "mixed")]},
        "computes with the number of tokens",
    ),
    "a bound of the number of tokens": (
        {"mixed": [("Log", ["count_float"], "log"), ("Min", ["y", "log"], "mixed")]},
        "computes with the number of tokens",
    ),
    "places from the end": (
        {"mixed": [("Gather by", ["y", "from_the_end"], "mixed")]},
        "Gather with places below 0",
    ),
}


def _write(folder: Path, **parts: Any) -> Path:
    path = folder / "model.onnx"
    path.write_bytes(_model(**parts))
    return path


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_taken_has_the_logits_of_onnxruntime(name: str, tmp_path: Path):
    path = _write(tmp_path, **TAKEN[name])
    checkpoint = open_checkpoint(path)
    module = trace_onnx(checkpoint, torch.float32)
    run_passes(module, CPU, PassContext("float32", "none", "float32", 16, "cpu"))
    inputs = step_inputs(module.graph, IDS, 16)
    found = run_in_two(module.graph, Weights(checkpoint), inputs, 33)
    assert relative_error(found, onnxruntime_logits(path, IDS)) < 2e-6


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_computed_that_way_is_refused(name: str, tmp_path: Path):
    parts, message = REFUSED[name]
    checkpoint = open_checkpoint(_write(tmp_path, **parts))
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        trace_onnx(checkpoint, torch.float32)
    assert "\n" not in str(caught.value)


SHIFTED: Nodes = [("Add", ["counted", "two"], "places")]  # two rows before those of positions


@pytest.mark.parametrize(
    ("rows", "places", "asked", "expected"),
    [(40, PLACES, 0, 40), (40, PLACES, 33, 33), (42, SHIFTED, 0, 40), (9000, PLACES, 0, 8192)]
    + [(9000, PLACES, 9000, 9000), (9000, PLACES, 9001, None), (42, SHIFTED, 41, None)],
)
def test_the_table_of_positions_is_the_longest_context(
    rows: int, places: Nodes, asked: int, expected: int | None, tmp_path: Path
):
    """Without a config.json nothing else says it."""
    path, options = _write(tmp_path, rows=rows, places=places), CompileOptions(max_context=asked)
    checkpoint = open_checkpoint(path)
    graph = trace_onnx(checkpoint, torch.float32).graph
    facts = lowering.model_facts(checkpoint, options)
    if expected is None:
        with pytest.raises(OptionError, match=f"a context of {asked} is beyond the graph's"):
            lowering.fit_context(facts, checkpoint, options, graph)
    else:
        fitted = lowering.fit_context(facts, checkpoint, options, graph)
        assert fitted.tokens.max_context == expected


def test_a_config_that_promises_more_than_the_table_is_an_error(tmp_path: Path):
    path = _write(tmp_path, rows=40)
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 64}')
    with pytest.raises(OptionError, match="a context of 64 is beyond the graph's 40 positions"):
        plan_checkpoint(open_checkpoint(path), CompileOptions())
