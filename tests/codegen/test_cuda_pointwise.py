"""Elementwise kernels and norms over heads: every function against torch, odd sizes, real ones."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from sitsc.codegen.aot import compile_kernels
from sitsc.codegen.cuda_pointwise import FUNCTIONS, pointwise, row_norm
from sitsc.codegen.interpreter import Interpreter
from sitsc.core.errors import CompileError
from sitsc.core.interpret import relative_error
from sitsc.core.kernels import Pointwise
from sitsc.passes.cuda_values import ELEMENTWISE

ROWS, WIDTH = 3, 37
SPECIAL = {"pow", "div", "clamp", "gelu", "glu"}
ACTIVATIONS = {
    "silu": functional.silu,
    "relu": functional.relu,
    "gelu_erf": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}
REFERENCES: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "cast": lambda x: x,
}
REFERENCES |= {f"glu_{name}": lambda x, y, f=f: f(x) * y for name, f in ACTIVATIONS.items()}
REFERENCES |= ACTIVATIONS


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    with Interpreter() as started:
        yield started


def program(op: str, *operands: str, reduce: str = "", dtype: str = "float32") -> Pointwise:
    """op of x and y bfloat16 [rows, width], or of x and numbers; the mean over the width."""
    at = f"t * {WIDTH} + i0"
    loads = (("v0", "load", "0", at, "", "bfloat16"), ("v1", "load", "1", at, "", "bfloat16"))
    lines = (*loads, ("v2", op, *operands, dtype))
    out = "t" if reduce else at
    return Pointwise((WIDTH,), ("bfloat16", "bfloat16"), lines, "v2", dtype, out, reduce)


def run(interpreter: Interpreter, kernel: Pointwise, x: Tensor, y: Tensor) -> Tensor:
    """The result of a program, [rows, width] or [rows]."""
    shape = (ROWS,) if kernel.reduce else (ROWS, WIDTH)
    out = torch.full(shape, torch.nan, dtype=getattr(torch, kernel.out_dtype))
    source = pointwise(program=kernel, block=16, pdl=False)
    interpreter.launch(source, (ROWS, int(source.constants["PARTS"])), x, y, out)
    return out


def values(positive: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x = 2 * torch.randn(ROWS, WIDTH, generator=generator)
    return (x.abs() + 0.1 if positive else x).bfloat16()


def test_passes_ask_for_known_functions_alone():
    assert set(ELEMENTWISE.values()) - SPECIAL <= set(FUNCTIONS)


@pytest.mark.parametrize("op", [op for op, text in FUNCTIONS.items() if "{2}" not in text])
def test_functions(interpreter, op):
    x, y = values(op in ("log", "sqrt", "rsqrt", "reciprocal")), values(positive=True)
    reference = REFERENCES.get(op) or getattr(torch, op)
    operands = ("v0", "v1") if "{1}" in FUNCTIONS[op] else ("v0",)
    wanted = reference(*(x.float(), y.float())[: len(operands)])
    assert relative_error(run(interpreter, program(op, *operands), x, y), wanted) < 1e-5


CALLS: list[tuple[str, tuple[str, ...], Callable[[Tensor], Tensor]]] = [
    ("pow", ("v0", "3"), lambda x: x**3),
    ("pow", ("v0", "2.0"), lambda x: x * x),
    ("div", ("v0", "30.0"), lambda x: x / 30),
    ("clamp", ("v0", "-1.0", "0.5"), lambda x: x.clamp(-1, 0.5)),
    ("clamp", ("v0", "None", "0.5"), lambda x: x.clamp(max=0.5)),
    ("masked_fill", ("v0", "(i0 < 5)", "0"), lambda x: x * (torch.arange(WIDTH) >= 5)),
    ("select", ("(i0 < 5)", "v0", "1.0"), lambda x: torch.where(torch.arange(WIDTH) < 5, x, 1.0)),
]


@pytest.mark.parametrize("case", CALLS, ids=lambda case: f"{case[0]}{case[1][1:]}")
def test_functions_of_numbers(interpreter, case):
    op, operands, reference = case
    x = values()
    assert (
        relative_error(run(interpreter, program(op, *operands), x, x), reference(x.float())) < 1e-5
    )


@pytest.mark.parametrize("kind", ["mean", "sum"])
def test_reductions(interpreter, kind):
    x = values()
    found = run(interpreter, program("square", "v0", reduce=kind), x, x)
    assert relative_error(found, getattr(torch, kind)(x.float() ** 2, -1)) < 1e-5


def test_results_are_rounded_line_by_line(interpreter):
    x = values()
    found = run(interpreter, program("tanh", "v0", dtype="bfloat16"), x, x)
    assert torch.equal(found, x.tanh())


def test_an_unknown_function_is_refused():
    with pytest.raises(CompileError, match="no function 'erfinv'"):
        pointwise(program=program("erfinv", "v0"), pdl=False)
    with pytest.raises(CompileError, match="no power of 7"):
        pointwise(program=program("pow", "v0", "7"), pdl=False)


NORMS = [("rms", 0.0, False), ("rms", 1.0, False), ("layer", 0.0, True), ("layer", 0.0, False)]


@pytest.mark.parametrize(("heads", "columns"), [(1, 37), (3, 20)])
@pytest.mark.parametrize(("kind", "offset", "bias"), NORMS)
def test_norms_over_heads_in_their_place(interpreter, kind, offset, bias, heads, columns):
    row, start = heads * columns + 9, 5
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(ROWS, row, generator=generator).bfloat16()
    weight, shift = (torch.randn(columns, generator=generator).bfloat16() for _ in range(2))
    before, steps = x.clone(), (start, row, columns)
    dtypes = ("bf16", "bf16", "bf16" if bias else None)
    source = row_norm(
        kind=kind,
        columns=columns,
        heads=heads,
        eps=1e-5,
        offset=offset,
        x=steps,
        y=steps,
        dtypes=dtypes,
        pdl=False,
    )
    given = (x, weight, *((shift,) if bias else ()), x.clone())
    out = given[-1]
    interpreter.launch(source, (ROWS, int(source.constants["PARTS"])), *given)
    inside = before[:, start : start + heads * columns].view(ROWS, heads, columns).float()
    if kind == "layer":
        b = shift.float() if bias else None
        wanted = functional.layer_norm(inside, (columns,), weight.float(), b, 1e-5)
    else:
        wanted = functional.rms_norm(inside, (columns,), weight.float() + offset, 1e-5)
    found = out[:, start : start + heads * columns].view(ROWS, heads, columns).float()
    assert relative_error(found, wanted) < 8e-3
    rest = torch.ones(row, dtype=torch.bool)
    rest[start : start + heads * columns] = False
    assert torch.equal(out[:, rest], before[:, rest])


@pytest.mark.parametrize("sm", [80, 90])
def test_real_sizes_fit(sm: int, tmp_path: Path):
    pdl = sm >= 90
    sources = [pointwise(program=program("glu_silu", "v0", "v1", dtype="bfloat16"), pdl=pdl)]
    for heads, columns in ((1, 16384), (32, 128), (8, 256)):
        steps = (0, heads * columns, columns)
        shape = {"columns": columns, "heads": heads, "eps": 1e-6, "offset": 0.0}
        dtypes = ("bf16", "bf16", "bf16")
        sources.append(row_norm(kind="layer", x=steps, y=steps, dtypes=dtypes, pdl=pdl, **shape))
    assert len(compile_kernels(sources, sm, tmp_path)) == len(sources)
