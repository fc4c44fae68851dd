"""Elementwise and row kernels on CUDA for whatever the planner asks for: expressions, norms.

In: a `Pointwise`, or the shape of a norm over rows of heads. Out: a `KernelSource`. Everything is
computed in fp32 (whole numbers in int64) and rounded to the dtype that each line gives.
"""

import math

from sitsc.codegen.cuda_instance import make, power_of_two
from sitsc.codegen.triton_source import KernelSource
from sitsc.core.errors import CompileError
from sitsc.core.kernels import Pointwise

_POINTERS = {"bfloat16": "*bf16", "float32": "*fp32", "int64": "*i64", "int32": "*i32"}
_WIDE = {"int64": "tl.int64", "int32": "tl.int32", "bool": "tl.int1"}
_MOST_HEADS = 4096
ACTIVATIONS = ("silu", "relu", "gelu_tanh", "gelu_erf")
FUNCTIONS: dict[str, str] = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "neg": "-{0}",
    "abs": "tl.abs({0})",
    "exp": "tl.exp({0})",
    "log": "tl.log({0})",
    "sqrt": "tl.sqrt({0})",
    "rsqrt": "tl.rsqrt({0})",
    "square": "{0} * {0}",
    "reciprocal": "1.0 / {0}",
    "cos": "tl.cos({0})",
    "sin": "tl.sin({0})",
    "tanh": "1.0 - 2.0 / (1.0 + tl.exp(2.0 * {0}))",
    "sigmoid": "1.0 / (1.0 + tl.exp(-{0}))",
    "silu": "{0} / (1.0 + tl.exp(-{0}))",
    "relu": "tl.maximum({0}, 0.0)",
    "gelu_tanh": "{0} - {0} / (1.0 + tl.exp(1.5957691216057308 * {0}"
    " * (1.0 + 0.044715 * {0} * {0})))",
    "gelu_erf": "0.5 * {0} * (1.0 + tl.erf({0} * 0.7071067811865476))",
    "maximum": "tl.maximum({0}, {1})",
    "minimum": "tl.minimum({0}, {1})",
    "cast": "{0}",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "masked_fill": "tl.where({1}, {2}, {0})",
}
FUNCTIONS |= {f"glu_{name}": f"({FUNCTIONS[name]}) * {{1}}" for name in ACTIVATIONS}
_POWERS = {
    2.0: "{0} * {0}",
    3.0: "{0} * {0} * {0}",
    0.5: "tl.sqrt({0})",
    -0.5: "tl.rsqrt({0})",
    -1.0: "1.0 / {0}",
    1.0: "{0}",
}
_FLOAT = ("bfloat16", "float16", "float32")


def pointwise(
    *,
    program: Pointwise,
    block: int = 1024,
    num_warps: int = 4,
    pdl: bool = True,
    early: bool = True,
) -> KernelSource:
    """One row of the step a program along x, a block of its elements (or a reduced row) along y."""
    total = math.prod(program.sizes)
    last = program.sizes[-1]
    width = last if program.reduce else min(block, power_of_two(total))
    constants = {"TOTAL": total, "BLOCK": power_of_two(width)}
    constants["PARTS"] = total // last if program.reduce else -(-total // width)
    names = [(f"in{n}_ptr", _pointer(kind)) for n, kind in enumerate(program.inputs)]
    names.append(("y_ptr", _pointer(program.out_dtype)))
    return make(
        "pointwise",
        tuple(names),
        constants,
        num_warps,
        pdl,
        early,
        count=len(program.inputs),
        indices=_indices(program.sizes),
        last=last,
        lines=[_line(line) for line in program.lines],
        result=program.result,
        reduce=program.reduce,
        out_index=_spread(program.out_index),
    )


def _pointer(kind: str) -> str:
    if kind not in _POINTERS:
        hint = f"one of: {', '.join(_POINTERS)}"
        raise CompileError(f"elementwise kernels know no {kind}", hint=hint)
    return _POINTERS[kind]


def _indices(sizes: tuple[int, ...]) -> list[tuple[str, str]]:
    """Names and texts of the indices of an element `at` of a row."""
    found, step = [], 1
    for dim in reversed(range(len(sizes))):
        text = f"at // {step}" if step != 1 else "at"
        found.append((f"i{dim}", f"{text} % {sizes[dim]}" if dim else text))
        step *= sizes[dim]
    return found


def _line(line: tuple[str, ...]) -> str:
    """One line of a program as Triton."""
    name, op, *operands, kind = line
    if op == "load":
        number, index, mask = operands
        return f"{name} = {_load(number, index, mask, kind)}"
    if op == "select":
        condition, one, two = operands
        return f"{name} = {_rounded(f'tl.where({condition}, {one}, {two})', kind)}"
    return f"{name} = {_rounded(_expression(op, operands, kind), kind)}"


def _load(number: str, index: str, mask: str, kind: str) -> str:
    inside = f"inside & {mask}" if mask else "inside"
    text = f"tl.load(in{number}_ptr + ({_spread(index)}), mask={inside}, other=0)"
    return f"{text}.to(tl.float32)" if kind in _FLOAT else f"{text}.to({_WIDE[kind]})"


def _spread(index: str) -> str:
    """An index with an entry for every element of the block, also where all are the same."""
    varies = "v" in index or any(f"i{n}" in index for n in range(8))
    return index if varies else f"{index} + at * 0"


def _expression(op: str, operands: list[str], kind: str) -> str:
    if op == "pow":
        return _power(*operands)
    if op == "div":
        return f"({operands[0]} + 0.0) / {operands[1]}"
    if op == "clamp":
        text = operands[0]
        for limit, name in zip(operands[1:], ("maximum", "minimum"), strict=False):
            text = text if limit == "None" else f"tl.{name}({text}, {limit})"
        return text
    if op not in FUNCTIONS:
        raise CompileError(f"elementwise kernels know no function {op!r}", hint="add it")
    return FUNCTIONS[op].format(*operands)


def _power(x: str, exponent: str) -> str:
    if float(exponent) not in _POWERS:
        raise CompileError(f"elementwise kernels raise to no power of {exponent}")
    return _POWERS[float(exponent)].format(x)


def _rounded(text: str, kind: str) -> str:
    if kind == "bfloat16":
        return f"({text}).to(tl.bfloat16).to(tl.float32)"
    if kind == "float16":
        return f"({text}).to(tl.float16).to(tl.float32)"
    return f"({text}).to(tl.float32)" if kind == "float32" else f"({text}).to({_WIDE[kind]})"


def row_norm(
    *,
    kind: str,
    columns: int,
    heads: int,
    eps: float,
    offset: float,
    x: tuple[int, int, int],
    y: tuple[int, int, int],
    dtypes: tuple[str, str | None, str | None],
    num_warps: int = 0,
    pdl: bool = True,
    early: bool = True,
) -> KernelSource:
    """ "rms" or "layer" norm of `heads` heads in every row; y may be x.

    x and y are (first element, elements from row to row, from head to head), in elements of the
    buffers; `dtypes` those of x and y, of the weight and of the bias, None where there is none.
    By default a warp has 1024 elements, and a program at least four and at most 16 warps.
    """
    if kind not in ("rms", "layer"):
        raise CompileError(f"no norm {kind!r}", hint="rms or layer")
    own, weight, bias = dtypes
    names = [("x_ptr", f"*{own}"), ("weight_ptr", f"*{weight}"), ("bias_ptr", f"*{bias}")]
    names.append(("y_ptr", f"*{own}"))
    names = [pair for pair in names if pair[1] != "*None"]
    block = power_of_two(columns)
    together = min(power_of_two(heads), max(1, _MOST_HEADS // block))
    constants = {"H": columns, "HEADS": heads, "BLOCK": block, "BLOCK_HEADS": together}
    constants["PARTS"] = -(-heads // together)
    num_warps = num_warps or min(16, max(4, block * together // 1024))
    constants |= dict(zip(("X_AT", "X_ROW", "X_HEAD"), x, strict=True))
    constants |= dict(zip(("Y_AT", "Y_ROW", "Y_HEAD"), y, strict=True))
    given = {"weight": weight is not None, "bias": bias is not None}
    more = {"kind": kind, "eps": eps, "offset": offset}
    return make("row_norm", tuple(names), constants, num_warps, pdl, early, **given, **more)
