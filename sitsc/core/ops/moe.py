"""sitsc::experts (as traced, any router) and sitsc::moe (as executed: router, experts, residual).

Weights of E experts: gate_up [2E, inter, hidden] (gate of expert 0, its up, gate of expert 1 …),
down [E, hidden, inter]; biases [2E, inter] and [E, hidden]. Every token's experts are added in the
order of their scores, in fp32: its result does not depend on the tokens beside it.
"""

import torch
from torch import Tensor

from sitsc.core import weight_formats
from sitsc.core.ops.norm import ACTIVATIONS

CLAMPED = "swiglu_clamped"
SCORINGS = ("softmax", "sigmoid", "softmax_chosen")
_TINY = 1e-20


def gated(gate: Tensor, up: Tensor, activation: str, alpha: float, limit: float) -> Tensor:
    """What comes between the two products of an expert; fp32 in and out.

    "swiglu_clamped" (GPT-OSS): gate·sigmoid(alpha·gate)·(up + 1), gate at most `limit`, up within
    ± `limit`. Others: activation(gate)·up.
    """
    if activation != CLAMPED:
        return ACTIVATIONS[activation](gate) * up
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(gate * alpha) * (up + 1)


def route_reference(
    logits: Tensor,
    correction: Tensor | None,
    top_k: int,
    scoring: str,
    groups: int,
    group_top: int,
    normalise: int,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """Weights fp32 and indices int64, both [tokens, top_k], from logits [tokens, experts].

    The best scores (+ correction) are chosen, the lower index first among equals; with groups only
    those of the `group_top` groups whose best two add up highest. "softmax_chosen" takes the
    softmax over the chosen logits alone.
    """
    wide = logits.float()
    scores = wide
    if scoring == "softmax":
        scores = wide.softmax(-1)
    elif scoring == "sigmoid":
        scores = wide.sigmoid()
    choice = scores if correction is None else scores + correction.float()
    if groups > 1:
        apart = choice.view(choice.shape[0], groups, -1)
        best = apart.topk(min(2, apart.shape[-1]), -1).values.sum(-1)
        kept = best.sort(dim=-1, descending=True, stable=True).indices[:, :group_top]
        mask = torch.ones_like(best, dtype=torch.bool).scatter(1, kept, False)
        choice = apart.masked_fill(mask[..., None], float("-inf")).flatten(1)
    indices = choice.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, indices)
    if scoring == "softmax_chosen":
        weights = weights.softmax(-1)
    elif normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
    return weights * scaling, indices


def experts_dense(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
) -> Tensor:
    """The result of sitsc::experts by computing every expert for every token; slow, no loops."""
    wide = x.float()
    hidden = torch.einsum("th,eih->tei", wide, gate_up.float())
    if gate_up_bias is not None:
        hidden = hidden + gate_up_bias.float()
    act = gated(hidden[:, 0::2], hidden[:, 1::2], activation, alpha, limit)
    out = torch.einsum("tei,ehi->teh", act, down.float())
    if down_bias is not None:
        out = out + down_bias.float()
    share = torch.zeros(x.shape[0], down.shape[0], dtype=torch.float32, device=x.device)
    share = share.scatter_add(1, indices, weights.float())
    return torch.einsum("teh,te->th", out, share).to(x.dtype)


def experts_reference(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
) -> Tensor:
    """x [tokens, hidden] through the experts `indices`, times `weights`, added: fp32 [tokens, …].

    What an expert computes between its two products is rounded to x's dtype.
    """
    rows = torch.zeros(*indices.shape, down.shape[1], dtype=torch.float32, device=x.device)
    for expert in range(down.shape[0]):
        token, slot = (indices == expert).nonzero(as_tuple=True)
        if not len(token):
            continue
        part = x[token].float()
        gate, up = (part @ gate_up[2 * expert + side].float().T for side in (0, 1))
        if gate_up_bias is not None:
            gate = gate + gate_up_bias[2 * expert].float()
            up = up + gate_up_bias[2 * expert + 1].float()
        act = gated(gate, up, activation, alpha, limit).to(x.dtype).float()
        out = act @ down[expert].float().T
        rows[token, slot] = out if down_bias is None else out + down_bias[expert].float()
    return (rows * weights.float()[..., None]).sum(1)


@torch.library.custom_op("sitsc::experts", mutates_args=())
def experts(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
) -> Tensor:
    """x [tokens, hidden], indices and weights [tokens, top_k] of any router; out like x."""
    return experts_reference(
        x, indices, weights, gate_up, gate_up_bias, down, down_bias, activation, alpha, limit
    ).to(x.dtype)


@experts.register_fake
def _(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def stored_matrices(
    weight: Tensor, scale: Tensor | None, rows: int, columns: int, weight_format: str
) -> Tensor:
    """Matrices [count, rows, columns] in fp32 from the way they are stored."""
    if weight_format == "plain":
        plain = weight.float()
    else:
        blocks = weight_formats.num_blocks(rows)
        parts = weight.split(blocks)
        plain = torch.stack([weight_formats.unpack(p, rows, columns, weight_format) for p in parts])
        plain = plain.float()
    if scale is None:
        return plain
    return plain * scale.view(plain.shape[0], -1)[:, :rows, None]


@torch.library.custom_op("sitsc::moe", mutates_args=())
def moe(
    x: Tensor,
    logits: Tensor,
    correction: Tensor | None,
    first: Tensor | None,
    residual: Tensor | None,
    gate_up: Tensor,
    gate_up_scale: Tensor | None,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_scale: Tensor | None,
    down_bias: Tensor | None,
    intermediate: int,
    top_k: int,
    scoring: str,
    groups: int,
    group_top: int,
    normalise: int,
    scaling: float,
    activation: str,
    alpha: float,
    limit: float,
    weight_format: str,
) -> Tensor:
    """x [..., hidden], logits [..., experts], residual like x; out like x. See the module.

    With `first`, int64 [1], the weights are those of experts `first`, `first` + 1 …: what others
    would add is left out.
    """
    flat = x.reshape(-1, x.shape[-1])
    weights, indices = route_reference(
        logits.reshape(-1, logits.shape[-1]),
        correction,
        top_k,
        scoring,
        groups,
        group_top,
        normalise,
        scaling,
    )
    if first is not None:
        indices = indices - first
    hidden = flat.shape[-1]
    out = experts_reference(
        flat,
        indices,
        weights,
        stored_matrices(gate_up, gate_up_scale, intermediate, hidden, weight_format),
        gate_up_bias,
        stored_matrices(down, down_scale, hidden, intermediate, weight_format),
        down_bias,
        activation,
        alpha,
        limit,
    ).view(x.shape)
    return (out if residual is None else residual.float() + out).to(x.dtype)


@moe.register_fake
def _(
    x: Tensor,
    logits: Tensor,
    correction: Tensor | None,
    first: Tensor | None,
    residual: Tensor | None,
    gate_up: Tensor,
    gate_up_scale: Tensor | None,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_scale: Tensor | None,
    down_bias: Tensor | None,
    intermediate: int,
    top_k: int,
    scoring: str,
    groups: int,
    group_top: int,
    normalise: int,
    scaling: float,
    activation: str,
    alpha: float,
    limit: float,
    weight_format: str,
) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
