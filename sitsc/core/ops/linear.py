"""sitsc::fused_linear: a linear layer with an optional norm before and an epilogue after it.

The prologue "rms_norm" normalises x first; the epilogue "residual" adds a tensor, "glu" multiplies
activation(gate) by up, where the weight rows are [gate; up]; "activation" applies it to the result.
Accumulation is in fp32.
"""

import torch
from torch import Tensor

from sitsc.core import weight_formats
from sitsc.core.ops.norm import ACTIVATIONS, rms_norm_reference
from sitsc.core.weights import DTYPES


def stored_weight(
    weight: Tensor, scale: Tensor | None, rows: int, columns: int, weight_format: str
) -> Tensor:
    """The weight [rows, columns] in fp32 from the way it is stored."""
    plain = weight
    if weight_format != "plain":
        plain = weight_formats.unpack(weight, rows, columns, weight_format)
    plain = plain.float()
    return plain if scale is None else plain * scale[:rows, None]


def fused_linear_reference(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    residual: Tensor | None,
    out_features: int,
    prologue: str,
    eps: float,
    offset: float,
    epilogue: str,
    activation: str,
    out_dtype: str,
    weight_format: str,
) -> Tensor:
    """x [..., columns] to [..., out_features] of `out_dtype`; see the module for the parts."""
    normed = rms_norm_reference(x, norm_weight, eps, offset) if prologue == "rms_norm" else x
    rows = out_features * (2 if epilogue == "glu" else 1)
    plain = stored_weight(weight, scale, rows, x.shape[-1], weight_format)
    y = torch.nn.functional.linear(normed.float(), plain, None if bias is None else bias.float())
    if epilogue == "residual":
        assert residual is not None
        y = residual.float() + y
    elif epilogue == "activation":
        y = ACTIVATIONS[activation](y)
    elif epilogue == "glu":
        y = ACTIVATIONS[activation](y[..., :out_features]) * y[..., out_features:]
    return y.to(DTYPES[out_dtype])


@torch.library.custom_op("sitsc::fused_linear", mutates_args=())
def fused_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    residual: Tensor | None,
    out_features: int,
    prologue: str,
    eps: float,
    offset: float,
    epilogue: str,
    activation: str,
    out_dtype: str,
    weight_format: str,
) -> Tensor:
    """x [..., columns] to [..., out_features] of `out_dtype`; see the module for the parts."""
    return fused_linear_reference(
        x,
        weight,
        scale,
        bias,
        norm_weight,
        residual,
        out_features,
        prologue,
        eps,
        offset,
        epilogue,
        activation,
        out_dtype,
        weight_format,
    )


@fused_linear.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    residual: Tensor | None,
    out_features: int,
    prologue: str,
    eps: float,
    offset: float,
    epilogue: str,
    activation: str,
    out_dtype: str,
    weight_format: str,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features), dtype=DTYPES[out_dtype])
