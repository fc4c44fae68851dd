"""sitsc::rope_table: cosines and sines of the rotary embedding for the tokens of a step.

angle[t, i] = position[t] · inv_freq[i]; both halves of the last dimension hold the same angles.
"""

import torch
from torch import Tensor

from sitsc.core.weights import DTYPES


def rope_table_reference(
    position_ids: Tensor, inv_freq: Tensor, scaling: float, dtype: str
) -> Tensor:
    """[2, tokens, rotary_dim]: cosines, then sines, times `scaling`, rounded to `dtype`."""
    angles = position_ids[:, None].float() * inv_freq.float()
    angles = torch.cat((angles, angles), -1)
    return torch.stack((angles.cos() * scaling, angles.sin() * scaling)).to(DTYPES[dtype])


@torch.library.custom_op("sitsc::rope_table", mutates_args=())
def rope_table(position_ids: Tensor, inv_freq: Tensor, scaling: float, dtype: str) -> Tensor:
    """position_ids [tokens], inv_freq [rotary_dim / 2]; out [2, tokens, rotary_dim]."""
    return rope_table_reference(position_ids, inv_freq, scaling, dtype)


@rope_table.register_fake
def _(position_ids: Tensor, inv_freq: Tensor, scaling: float, dtype: str) -> Tensor:
    shape = (2, position_ids.shape[0], 2 * inv_freq.shape[0])
    return position_ids.new_empty(shape, dtype=DTYPES[dtype])
