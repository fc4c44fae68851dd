"""Cases of the linear kernels for 9-256 tokens on sm_90, which only a GPU can run.

See kernel_cases.py. The bucket has more tokens than the step: rows of x past it hold NaN.
"""

from dataclasses import dataclass

import torch

from sitsc.codegen.cuda_linear import Linear
from sitsc.codegen.cuda_templates import Sizes, instance
from sitsc.codegen.triton_source import KernelSource
from sitsc.core.ops.linear import fused_linear_reference
from tests.kernel_checks import NAMES, TYPES, Check, Inputs, Prepared, Tile, launch

EPS = 1e-5


@dataclass(frozen=True)
class WideCheck:
    """A wide kernel of a step of `tokens` in a bucket of `bucket`."""

    op: Linear
    tokens: int
    bucket: int
    tile: Tile

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
        y = make.poison(split, self.tokens, op.rows, dtype=TYPES[op.out_dtype])
        values = {"x_map": x, "w_map": weight, "bias_ptr": bias, "residual_ptr": residual}
        values |= {"squares_ptr": squares, "y_ptr": y[0], "parts_ptr": y}
        step = launch(source, Sizes(), values | {"num_tokens": self.tokens})
        return Prepared((step,), (Check("y", y, want, 8e-3, parts=True),))


QKV = Linear(6144, 4096, out_dtype="fp32", epilogue="parts", squares=4, eps=EPS)
O_PARTS = Linear(4096, 4096, out_dtype="fp32", epilogue="parts")
GLU = Linear(14336, 4096, epilogue="glu", squares=4, eps=EPS)
DOWN = Linear(4096, 14336, out_dtype="fp32", epilogue="parts")
ODD = Linear(1537, 1000, epilogue="glu", activation="gelu_tanh", bias=True)


def wide_checks() -> dict[str, WideCheck]:
    """Every check by name."""
    return {
        "wide 8b qkv, 128 tokens": WideCheck(
            QKV, 128, 128, {"block_n": 128, "split": 2, "stages": 6}
        ),
        "wide 8b o, 97 tokens": WideCheck(
            O_PARTS, 97, 128, {"block_n": 64, "split": 4, "stages": 4}
        ),
        "wide 8b o, 70 of 96 tokens": WideCheck(
            O_PARTS, 70, 96, {"block_n": 64, "split": 2, "stages": 8}
        ),
        "wide 8b gate_up, 128 tokens": WideCheck(GLU, 128, 128, {"block_n": 128, "stages": 4}),
        "wide 8b gate_up, 256 tokens": WideCheck(GLU, 256, 256, {"block_n": 64, "stages": 3}),
        "wide 8b gate_up, 64 tokens": WideCheck(
            GLU, 64, 64, {"block_t": 64, "block_n": 64, "stages": 6}
        ),
        "wide 8b down, 129 of 192 tokens": WideCheck(
            DOWN, 129, 192, {"block_n": 256, "split": 4, "stages": 4}
        ),
        "wide 8b down, 256 at once": WideCheck(
            DOWN, 250, 256, {"block_t": 256, "block_n": 128, "split": 4, "stages": 4}
        ),
        "wide odd glu": WideCheck(ODD, 65, 96, {"block_n": 32, "stages": 3}),
        "wide odd store": WideCheck(
            Linear(1537, 1000, bias=True), 101, 128, {"block_n": 64, "stages": 8}
        ),
        "wide odd residual": WideCheck(
            Linear(1000, 1544, epilogue="residual"), 128, 128, {"block_n": 128, "stages": 3}
        ),
        "wide odd parts": WideCheck(
            Linear(1000, 1544, out_dtype="fp32", epilogue="parts"),
            88,
            96,
            {"block_n": 64, "split": 4, "stages": 4},
        ),
        "wide logits": WideCheck(
            Linear(32001, 2048, out_dtype="fp32"), 66, 96, {"block_n": 256, "stages": 4}
        ),
        "wide few columns": WideCheck(Linear(256, 40), 34, 48, {"block_n": 32, "stages": 4}),
    }
