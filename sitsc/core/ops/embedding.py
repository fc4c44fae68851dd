"""sitsc::packed_embedding: rows of an embedding table kept in a kernel's weight format."""

import torch
from torch import Tensor

from sitsc.core.ops.linear import stored_weight
from sitsc.core.weights import DTYPES


@torch.library.custom_op("sitsc::packed_embedding", mutates_args=())
def packed_embedding(
    ids: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    rows: int,
    hidden: int,
    dtype: str,
    weight_format: str,
) -> Tensor:
    """Rows `ids` [...] of a table [rows, hidden], as [..., hidden] of `dtype`."""
    table = stored_weight(weight, scale, rows, hidden, weight_format)
    return table[ids].to(DTYPES[dtype])


@packed_embedding.register_fake
def _(
    ids: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    rows: int,
    hidden: int,
    dtype: str,
    weight_format: str,
) -> Tensor:
    return ids.new_empty((*ids.shape, hidden), dtype=DTYPES[dtype])
