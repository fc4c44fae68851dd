"""Cases of the linear kernel for 9-256 tokens on sm_90, which only a GPU can run.

See kernel_cases.py. The bucket has more tokens than the step: rows of x past it hold NaN, and what
lies behind the rows of y must stay NaN.
"""

from dataclasses import dataclass, replace

import torch

from sitsc.codegen.cuda_linear import Linear
from sitsc.codegen.cuda_templates import Sizes, instance
from sitsc.codegen.triton_source import KernelSource
from sitsc.core.ops.linear import fused_linear_reference
from tests.kernel_checks import NAMES, TYPES, Check, Inputs, Prepared, Tile, launch

EPS = 1e-5


@dataclass(frozen=True)
class WideCheck:
    """A wide kernel of a step of `tokens` in a bucket of `bucket`; `in_place` over the residual."""

    op: Linear
    tokens: int
    bucket: int
    tile: Tile
    in_place: bool = False

    def sources(self, pdl: bool) -> list[KernelSource]:
        return [instance("wide", self.op, tokens=self.bucket, pdl=pdl, **self.tile)]

    def prepare(self, device: str, pdl: bool) -> Prepared:
        (source,), make, op = self.sources(pdl), Inputs(device), self.op
        x = make.poison(self.bucket, op.columns)
        x[: self.tokens] = make.normal(self.tokens, op.columns)
        weight = make.normal(op.rows * op.sides, op.columns, scale=op.columns**-0.5)
        bias = make.normal(op.rows * op.sides)
        residual = make.normal(self.tokens, op.rows, dtype=TYPES[op.out_dtype])
        squares = make.normal(self.tokens, max(1, op.squares), dtype=torch.float32).square()
        scaled = x[: self.tokens].float()
        if op.squares:
            scaled *= torch.rsqrt(squares.sum(1, keepdim=True) / op.columns + op.eps)
        epilogue = "none" if op.epilogue in ("parts", "store") else op.epilogue
        want = fused_linear_reference(
            scaled,
            weight,
            None,
            bias if op.bias else None,
            None,
            residual if epilogue == "residual" else None,
            op.rows,
            "none",
            op.eps,
            op.offset,
            epilogue,
            op.activation,
            NAMES[op.out_dtype],
            "plain",
        )
        split = int(source.constants["SPLIT"])
        written = split * self.tokens * op.rows
        room = make.poison(split * (self.bucket + 1) * op.rows, dtype=TYPES[op.out_dtype])
        y, behind = room[:written].view(split, self.tokens, op.rows), room[written:]
        if self.in_place:
            y[0] = residual
        values = {"x_map": x, "w_map": weight, "bias_ptr": bias, "squares_ptr": squares}
        values |= {"residual_ptr": y[0] if self.in_place else residual, "y_ptr": y, "parts_ptr": y}
        step = launch(source, Sizes(), values | {"num_tokens": self.tokens})
        checks = (
            Check("y", y, want, 8e-3, parts=True),
            Check("behind y", behind, torch.full_like(behind, float("nan"))),
        )
        return Prepared((step,), checks)


QKV = Linear(6144, 4096, out_dtype="fp32", epilogue="parts", squares=4, eps=EPS)
O_PARTS = Linear(4096, 4096, out_dtype="fp32", epilogue="parts")
GLU = Linear(14336, 4096, epilogue="glu", squares=4, eps=EPS)
DOWN = Linear(4096, 14336, out_dtype="fp32", epilogue="parts")
ODD = Linear(1537, 1000, epilogue="glu", activation="gelu_tanh", bias=True)
ODD_RESIDUAL = Linear(1000, 1544, epilogue="residual")
ODD_PARTS = Linear(1000, 1544, out_dtype="fp32", epilogue="parts")
EIGHT = replace(QKV, squares=8)
LATE = {"early": False}


def tile(block_t: int, block_n: int, stages: int, split: int = 1) -> Tile:
    """A tile as a table has it."""
    return {"block_t": block_t, "block_n": block_n, "stages": stages, "split": split}


def wide_checks() -> dict[str, WideCheck]:
    """Every check by name."""
    cases = {
        "8b qkv, 128 tokens": WideCheck(QKV, 128, 128, tile(128, 128, 6, 2)),
        "8b qkv, 32 tokens": WideCheck(EIGHT, 32, 32, tile(64, 128, 4, 2)),
        "8b o, 9 of 16 tokens": WideCheck(O_PARTS, 9, 16, tile(64, 128, 8, 4)),
        "8b o, 33 of 48 tokens": WideCheck(O_PARTS, 33, 48, tile(64, 64, 8, 2)),
        "8b o, 97 tokens": WideCheck(O_PARTS, 97, 128, tile(128, 64, 4, 4)),
        "8b o, 70 of 96 tokens": WideCheck(O_PARTS, 70, 96, tile(128, 64, 8, 2)),
        "8b gate_up, 128 tokens": WideCheck(GLU, 128, 128, tile(128, 128, 4)),
        "8b gate_up, 256 tokens": WideCheck(GLU, 256, 256, tile(128, 64, 3)),
        "8b gate_up, 64 tokens": WideCheck(GLU, 64, 64, tile(64, 64, 6)),
        "8b down, late": WideCheck(DOWN, 100, 128, tile(128, 128, 6, 4) | LATE),
        "8b down, 129 of 192 tokens": WideCheck(DOWN, 129, 192, tile(128, 256, 4, 4)),
        "8b down, 256 at once": WideCheck(DOWN, 250, 256, tile(256, 128, 4, 4)),
        "odd glu": WideCheck(ODD, 65, 96, tile(128, 32, 3)),
        "odd glu, two tiles": WideCheck(
            replace(ODD, activation="gelu_erf"), 140, 192, tile(128, 64, 3)
        ),
        "odd store": WideCheck(Linear(1537, 1000, bias=True), 101, 128, tile(128, 64, 8)),
        "odd residual": WideCheck(ODD_RESIDUAL, 128, 128, tile(128, 128, 3)),
        "odd residual in place": WideCheck(ODD_RESIDUAL, 131, 192, tile(128, 64, 4), in_place=True),
        "odd fp32 residual": WideCheck(
            replace(ODD_RESIDUAL, out_dtype="fp32", bias=True), 50, 64, tile(64, 64, 4)
        ),
        "odd parts": WideCheck(ODD_PARTS, 88, 96, tile(128, 64, 4, 4)),
        "odd parts, 64 tokens": WideCheck(ODD_PARTS, 64, 64, tile(64, 32, 4, 8)),
        "logits": WideCheck(Linear(32001, 2048, out_dtype="fp32"), 66, 96, tile(128, 256, 4)),
        "few columns": WideCheck(Linear(256, 40), 34, 48, tile(64, 32, 4)),
    }
    return {f"wide {name}": check for name, check in cases.items()}
