"""The CPU kernel of mixture-of-experts layers through ctypes, against the torch reference."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from sitsc.codegen.cpu_ctypes import CpuKernels
from sitsc.codegen.cpu_kernels import moe_workspace_bytes
from sitsc.core.interpret import relative_error
from sitsc.core.ops.moe import SCORINGS, experts_reference, route_reference
from sitsc.core.weight_formats import format_of, pack, pad_scale, quantize_int8

F32, BF16, INT8 = torch.float32, torch.bfloat16, torch.int8
TOLERANCE = {F32: 5e-6, BF16: 2e-2}
ACTIVATIONS = ["silu", "gelu_tanh", "gelu_erf", "relu", "swiglu_clamped"]


def packed(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor]:
    """Matrices packed one by one, padded scales or None, and the values they stand for."""
    if dtype is not INT8:
        rounded = weight.to(dtype)
        blocks = [pack(matrix, format_of(dtype)) for matrix in rounded]
        return torch.cat(blocks), None, rounded.float()
    pairs = [quantize_int8(matrix) for matrix in weight]
    blocks = torch.cat([pack(values, "n16k2") for values, _ in pairs])
    scales = torch.cat([pad_scale(scale) for _, scale in pairs])
    return blocks, scales, torch.stack([v.float() * s[:, None] for v, s in pairs])


class Layer:
    """Random weights of one layer, and the call of the kernel with them."""

    def __init__(
        self,
        kernels: CpuKernels,
        experts: int,
        hidden: int,
        inter: int,
        dtypes: tuple[torch.dtype, torch.dtype],
        bias: bool = False,
        **route: Any,
    ) -> None:
        self.kernels, self.dtype = kernels, dtypes[0]
        self.hidden, self.inter, self.experts = hidden, inter, experts
        up = torch.randn(2 * experts, inter, hidden) / math.sqrt(hidden)
        down = torch.randn(experts, hidden, inter) / math.sqrt(inter)
        self.up, self.down = packed(up, dtypes[1]), packed(down, dtypes[1])
        self.weight_dtype = dtypes[1]
        self.biases: tuple[Tensor | None, Tensor | None] = (None, None)
        if bias:
            self.biases = (
                torch.randn(2 * experts, inter).to(self.dtype),
                torch.randn(experts, hidden).to(self.dtype),
            )
        given = {"top_k": 2, "scoring": 0, "groups": 1, "group_top": 1, "normalise": 1}
        self.route: dict[str, Any] = (
            given | {"scaling": 1.0, "correction": None, "activation": 0} | route
        )

    def run(self, x: Tensor, logits: Tensor, residual: Tensor | None) -> Tensor:
        out = torch.full((x.shape[0], self.hidden), math.nan, dtype=self.dtype)
        code = self.kernels.moe(
            x=x, x_stride=x.stride(0), x_dtype=self.dtype, tokens=x.shape[0], hidden=self.hidden,
            inter=self.inter, experts=self.experts, logits=logits, logits_stride=logits.stride(0),
            logits_dtype=logits.dtype, gate_up=self.up[0], gate_up_scale=self.up[1],
            gate_up_bias=self.biases[0], down=self.down[0], down_scale=self.down[1],
            down_bias=self.biases[1], weight_dtype=self.weight_dtype, alpha=1.702, limit=0.7,
            residual=residual, residual_stride=self.hidden, out=out, out_stride=self.hidden,
            **self.route,
        )  # fmt: skip
        assert code == 0, self.kernels.error(code)
        return out

    def reference(self, x: Tensor, logits: Tensor, residual: Tensor | None) -> Tensor:
        r: dict[str, Any] = self.route
        weights, indices = route_reference(
            logits, r["correction"], r["top_k"], SCORINGS[r["scoring"]], r["groups"],
            r["group_top"], r["normalise"], r["scaling"],
        )  # fmt: skip
        out = experts_reference(
            x, indices, weights, self.up[2], self.biases[0], self.down[2], self.biases[1],
            ACTIVATIONS[r["activation"]], 1.702, 0.7,
        )  # fmt: skip
        return out if residual is None else residual.float() + out


@pytest.mark.parametrize("tokens", [1, 33])
@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, BF16), (F32, INT8)], ids=str)
def test_some_of_the_experts_add_their_part(kernels: CpuKernels, dtypes: Any, tokens: int):
    """Each call has the weights of two of six; the sum of all calls is the whole."""
    torch.manual_seed(tokens)
    layer = Layer(kernels, 6, 40, 24, dtypes, bias=True, top_k=3)
    x, logits = torch.randn(tokens, 40).to(dtypes[0]), torch.randn(tokens, 6).to(dtypes[0])
    total = torch.zeros(tokens, 40)
    for first in (0, 2, 4):
        part = copy.copy(layer)
        part.up, part.down = _held(layer.up, 6, first), _held(layer.down, 6, first)
        one, two = layer.biases
        assert one is not None and two is not None
        part.biases = (one[2 * first : 2 * first + 4], two[first : first + 2])
        part.route = layer.route | {"first": first, "held": 2}
        total += part.run(x, logits, None).float()
    wanted = layer.reference(x, logits, None)
    assert relative_error(total, wanted) < max(2e-4, 2 * TOLERANCE[dtypes[0]])


def _held(weight: Any, experts: int, first: int) -> Any:
    """Blocks and scales of experts `first` and the next one."""
    return tuple(
        None if item is None else item.chunk(experts // 2)[first // 2].contiguous()
        for item in weight
    )


CASES = [
    # x and weight dtype, tokens, experts, hidden, inter
    *[((F32, F32), t, 5, 40, 24) for t in (1, 2, 7, 33)],
    *[((BF16, BF16), t, 5, 41, 23) for t in (1, 2, 7, 33)],
    *[((x, INT8), t, 5, 40, 25) for t in (1, 9) for x in (F32, BF16)],
    ((F32, F32), 130, 3, 64, 48),
    ((BF16, BF16), 130, 12, 320, 96),
    ((F32, BF16), 3, 4, 33, 17),
    ((F32, F32), 4, 1, 1, 1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_moe(kernels: CpuKernels, case: Any, bias: bool):
    dtypes, tokens, experts, hidden, inter = case
    torch.manual_seed(tokens * hidden + inter)
    layer = Layer(
        kernels, experts, hidden, inter, dtypes, bias,
        activation=(tokens + inter) % 4 if not bias else 4, top_k=min(3, experts),
        scoring=tokens % 3, scaling=1.5,
    )  # fmt: skip
    x = torch.randn(tokens, hidden + 3).to(dtypes[0])[:, :hidden]
    logits = torch.randn(tokens, experts + 1).to(dtypes[0])[:, :experts]
    residual = torch.randn(tokens, hidden).to(dtypes[0]) if tokens % 2 else None
    out = layer.run(x, logits, residual)
    exact = dtypes[1] is not INT8
    tolerance = TOLERANCE[dtypes[0]] if exact else max(2e-4, TOLERANCE[dtypes[0]])
    assert relative_error(out, layer.reference(x, logits, residual)) < tolerance


@pytest.mark.parametrize("groups", [1, 4, 16])
@pytest.mark.parametrize("corrected", [False, True])
def test_routing(kernels: CpuKernels, groups: int, corrected: bool):
    torch.manual_seed(groups)
    correction = 0.3 * torch.randn(16) if corrected else None
    layer = Layer(
        kernels, 16, 32, 16, (F32, F32), top_k=4, scoring=1, groups=groups,
        group_top=max(1, groups // 2), correction=correction, scaling=2.5,
    )  # fmt: skip
    x, logits = torch.randn(19, 32), torch.randn(19, 16)
    assert relative_error(layer.run(x, logits, None), layer.reference(x, logits, None)) < 5e-6


def test_equal_scores_choose_the_lower_expert(kernels: CpuKernels):
    torch.manual_seed(0)
    layer = Layer(kernels, 6, 16, 16, (F32, F32), top_k=3)
    x, logits = torch.randn(5, 16), torch.zeros(5, 6)
    logits[1:, 4] = 1
    assert relative_error(layer.run(x, logits, None), layer.reference(x, logits, None)) < 5e-6


@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, BF16), (BF16, INT8), (F32, INT8)])
def test_a_token_does_not_depend_on_its_neighbours(kernels: CpuKernels, dtypes: Any):
    torch.manual_seed(3)
    layer = Layer(kernels, 6, 300, 80, dtypes, bias=True, top_k=3)
    x, logits = torch.randn(70, 300).to(dtypes[0]), torch.randn(70, 6).to(dtypes[0])
    whole = layer.run(x, logits, x)
    for rows in (slice(0, 1), slice(3, 8), slice(20, 69)):
        part = layer.run(x[rows], logits[rows], x[rows])
        assert torch.equal(part, whole[rows])


def test_the_workspace_is_enough(kernels: CpuKernels):
    torch.manual_seed(4)
    for dtypes in ((F32, F32), (BF16, BF16), (BF16, INT8), (F32, INT8), (F32, BF16)):
        layer = Layer(kernels, 7, 130, 70, dtypes, top_k=3)
        sizes = {"tokens": 9, "top_k": 3, "experts": 7, "hidden": 130, "intermediate": 70}
        room = torch.empty(moe_workspace_bytes(**sizes) + 64, dtype=torch.uint8)
        kernels.library.sitsc_cpu_set_workspace(room.data_ptr(), room.numel())
        x, logits = torch.randn(9, 130).to(dtypes[0]), torch.randn(9, 7)
        layer.run(x, logits, None)


def test_bad_arguments_are_told(kernels: CpuKernels):
    layer = Layer(kernels, 4, 16, 16, (F32, F32), top_k=5)
    with pytest.raises(AssertionError, match="bad size"):
        layer.run(torch.randn(1, 16), torch.randn(1, 4), None)
    layer = Layer(kernels, 4, 16, 16, (F32, F32), scoring=3)
    with pytest.raises(AssertionError, match="unknown option"):
        layer.run(torch.randn(1, 16), torch.randn(1, 4), None)
