"""What no pass matched is told as an operator of aten, never as a kernel of ours."""

import pytest
import torch
import torch.nn.functional as F
from modules import CONTEXT, graph_of
from torch import Tensor, nn

from sitsc.core.hardware import load_target
from sitsc.passes import PLAIN
from sitsc.passes.cost import Sizes
from sitsc.passes.runner import run_passes
from sitsc.passes.schedule import kernel_rows

NORMS = {
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-2:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-2:]),
    "group_norm": lambda x: F.group_norm(x, 2),
}


class Outside(nn.Module):
    """A norm in no layer, and a linear layer that becomes a kernel."""

    def __init__(self, norm: str) -> None:
        super().__init__()
        self.norm, self.out = norm, nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(NORMS[self.norm](x))


@pytest.mark.parametrize("norm", NORMS)
def test_norms_over_other_dimensions_are_no_kernels(norm: str):
    module = graph_of(Outside(norm), torch.randn(2, 4, 16))
    run_passes(module, PLAIN, CONTEXT)
    rows = kernel_rows(module.graph, Sizes({}, {}), (), load_target("cpu").target)
    by = {row.op: row.by for row in rows}
    assert by == {"sitsc.fused_linear": "kernel", f"aten.{norm}": "unmatched norm"}


def test_norms_over_rows_are_kernels():
    norms = nn.Sequential(nn.LayerNorm(16), nn.RMSNorm(16), nn.Tanh())
    module = graph_of(norms, torch.randn(2, 4, 16))
    run_passes(module, PLAIN, CONTEXT)
    rows = kernel_rows(module.graph, Sizes({}, {}), (), load_target("cpu").target)
    assert {row.op: row.by for row in rows if "norm" in row.op} == {
        "sitsc.layer_norm": "kernel",
        "sitsc.rms_norm": "kernel",
    }
