"""Operators of plain graphs as ONNX nodes: onnxruntime against eager torch, over free sizes."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sitsc.core.hardware import load_target
from sitsc.core.plan import Numerics
from sitsc.core.reference import read_reference, reference_value
from sitsc.core.weights import materialise
from sitsc.export.onnx_export import model_of
from sitsc.export.onnx_graph import GraphWriter
from sitsc.export.onnx_write import write_model
from sitsc.frontend.module import trace_plain
from sitsc.passes import PLAIN
from sitsc.passes.base import PassContext
from sitsc.passes.plain_planner import make_plain_plan
from sitsc.passes.planner import Workspace
from sitsc.passes.runner import run_passes

Results = dict[str, Tensor]


def elementwise(x: Tensor, y: Tensor, n: Tensor) -> Results:
    """x and y [rows, 6], positive and real; n [rows, 4] of small integers."""
    real = {name: getattr(torch, name)(y) for name in ("exp", "sin", "cos", "tanh", "erf", "abs")}
    real |= {name: getattr(torch, name)(x) for name in ("log", "sqrt", "rsqrt", "reciprocal")}
    real |= {name: getattr(torch, name)(3 * y) for name in ("floor", "ceil", "round", "sign")}
    real |= {"sigmoid": torch.sigmoid(y), "neg": -y, "square": y**2, "power": x**y, "base": 2.0**y}
    real |= {"relu": F.relu(y), "silu": F.silu(y), "gelu": F.gelu(y), "softplus": F.softplus(y)}
    real |= {"tanh_gelu": F.gelu(y, approximate="tanh"), "leaky": F.leaky_relu(y, 0.1)}
    real |= {"add": x + y, "alpha": torch.add(x, y, alpha=3), "rsub": 1.0 - y, "div": x / 3}
    real |= {"mixed": n[:, :1] * y, "int_div": n / 2, "floor_div": torch.floor(x / y)}
    real |= {"clamp": y.clamp(-0.5, 0.5), "least": y.clamp_min(0.1), "tail": F.hardtanh(y)}
    real |= {"largest": torch.maximum(x, y), "smallest": torch.minimum(x, y)}
    truth = {"gt": x > y, "eq": n == 2, "ne": n != 2, "le": n <= 1.5, "ge": x >= 1}
    truth |= {"and": (n > 1) & (n < 3), "or": (n > 2) | (n < 1), "xor": (n > 1) ^ (n > 2)}
    truth |= {"not": ~(n > 1), "logical": torch.logical_and(n, n - 1), "any": (n > 2).any(1)}
    truth |= {"all": (n >= 1).all(1), "nan": torch.isnan(y)}
    bits = {"bits": n & 1, "turned": ~n}
    return real | truth | bits


def moving(x: Tensor, y: Tensor, n: Tensor) -> Results:
    """Sizes, parts, and values made of sizes."""
    rows = x.shape[0]
    first, second, third = x.split([1, 2, 3], dim=1)
    found = {"split": torch.cat((third, first, second), 1), "stack": torch.stack((x, y), 1)}
    found |= {"select": x[:, 2], "slice": x[1:, ::2], "last": x[-1], "flip": x.flip(0, 1)}
    found |= {
        "turned": x.T,
        "permuted": x.view(rows, 2, 3).permute(2, 0, 1),
        "repeat": x.repeat(2, 3),
    }
    found |= {"wide": x[:, None].expand(-1, 4, -1), "every": x.repeat_interleave(2, 1)}
    found |= {"each": x.repeat_interleave(3, dim=0), "flat": x.flatten(), "double": x.double()}
    found |= {
        "count": torch.arange(rows) * 2,
        "step": torch.arange(1, 9, 3),
        "ones": torch.ones(rows, 2),
    }
    found |= {
        "full": torch.full((rows, 3), 7),
        "like": torch.zeros_like(n),
        "new": x.new_full((2,), 3),
    }
    found |= {"low": torch.tril(x @ x.T, -1), "high": torch.triu(x > 1, 1), "sum": x.cumsum(0)}
    found |= {"where": torch.where(x > 1, x, y), "filled": x.masked_fill(y > 0, -1.0)}
    found |= {"either": torch.where(n > 1, n, 0.5), "pad": F.pad(x, (1, 2, 0, 1), value=9.0)}
    found |= {"rows": x[n[:, 0]], "pairs": x[n[:, 0], n[:, 1]], "take": torch.gather(x, 1, n)}
    found |= {"columns": torch.index_select(x, 1, torch.tensor([5, 0])), "one": x[:, :1].squeeze(1)}
    found |= {"size": torch.full((1,), rows * 2 + 1), "roomy": x.unsqueeze(-1).unsqueeze(0)}
    return found


def reducing(x: Tensor, y: Tensor, n: Tensor) -> Results:
    """Reductions, products, norms, softmax and attention."""
    found = {"sum": x.sum(), "rows": x.sum(1, keepdim=True), "count": (n > 1).sum(0)}
    found |= {
        "mean": y.mean(0),
        "most": y.amax(1),
        "least": y.min(),
        "var": y.var(1),
        "std": y.std(1),
    }
    found |= {"norm": y.norm(dim=1), "one": torch.linalg.vector_norm(y, 1, dim=0)}
    found |= {
        "best": y.max(1).values,
        "where": y.max(1).indices,
        "arg": y.argmax(),
        "low": y.argmin(1),
    }
    values, places = y.topk(2, dim=1)
    found |= {"top": values, "places": places, "soft": y.softmax(1), "log": y.log_softmax(0)}
    found |= {
        "mm": x @ y.T,
        "bmm": torch.bmm(x[None], y.T[None]),
        "addmm": torch.addmm(x, x @ y.T, y),
    }
    found |= {"norm3": F.layer_norm(y, (6,), eps=1e-3)}
    q, k = (t.view(1, -1, 2, 3).transpose(1, 2) for t in (x, y))
    found |= {"causal": F.scaled_dot_product_attention(q, k, k, is_causal=True)}
    mask = (n[:, 0] > 1)[None] | torch.eye(x.shape[0], dtype=torch.bool)
    found |= {"masked": F.scaled_dot_product_attention(q, k, k, attn_mask=mask, scale=0.4)}
    added = torch.where(mask, 0.0, -1e4)
    return found | {"added": F.scaled_dot_product_attention(q, k, k, attn_mask=added)}


class Function(nn.Module):
    def __init__(self, function: Callable[..., Results]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, y: Tensor, n: Tensor) -> Results:
        return self.function(x, y, n)


class Pictures(nn.Module):
    """A small convolutional network; in training torch would count, so it is in eval."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm = nn.Conv2d(3, 8, 3, padding=1, stride=2), nn.BatchNorm2d(8)
        self.two = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.three, self.groups = nn.Conv1d(4, 6, 3, groups=2), nn.GroupNorm(2, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        first = F.relu(self.norm(self.one(x)))
        pooled = {"most": F.max_pool2d(first, 2), "all": F.adaptive_avg_pool2d(first, 1)}
        pooled |= {"mean": F.avg_pool2d(first, 3, 1, 1), "groups": self.groups(first)}
        return pooled | {"last": self.three(self.two(first).mean(-1))}


def _write(module: nn.Module, inputs: tuple[Tensor, ...], shapes: Any, out: Path) -> Any:
    """The graph of a module after its passes, as a session of onnxruntime."""
    import onnxruntime  # noqa: PLC0415

    plain = trace_plain(module.eval(), inputs, {}, shapes)
    graph = plain.module.graph
    run_passes(plain.module, PLAIN, PassContext("float32", "none", "float32", 16, "cpu"))
    numerics = Numerics("float32", "none", "none", "float32", False, "nothing", ())
    plan = make_plain_plan(plain, numerics, load_target("cpu"), Workspace(1, {}))
    reference = read_reference(json.loads(json.dumps(reference_value(graph))))
    written = GraphWriter(reference, plan, lambda s: materialise(s, plain.read)).write()
    artifact: Any = SimpleNamespace(plan=plan, manifest=SimpleNamespace(built_with={}))
    promises = list(written.builder.promises.values())
    write_model(model_of(artifact, written), promises, out, lambda share: None)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(out), options, ["CPUExecutionProvider"])


def _values(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.rand(rows, 6, generator=generator) + 0.5
    n = torch.randint(0, 4, (rows, 4), generator=generator)
    return x, torch.randn(rows, 6, generator=generator), n


@pytest.mark.parametrize("function", [elementwise, moving, reducing])
def test_operators_are_those_of_torch(function: Callable[..., Results], tmp_path: Path):
    rows = torch.export.Dim("rows", min=4)
    shapes = {"x": {0: rows}, "y": {0: rows}, "n": {0: rows}}
    session = _write(Function(function), _values(7), shapes, tmp_path / "m.onnx")
    for count in (7, 13):
        values = _values(count)
        feed = {name: v.numpy() for name, v in zip("xyn", values, strict=True)}
        results = session.run(None, feed)
        names = [item.name.removesuffix("_out") for item in session.get_outputs()]
        wanted = function(*values)
        assert set(names) == set(wanted)
        for name, found in zip(names, results, strict=True):
            expected = wanted[name].numpy()
            assert found.dtype == expected.dtype and found.shape == expected.shape, name
            assert np.allclose(found, expected, rtol=1e-5, atol=1e-5), name


def test_a_convolutional_network(tmp_path: Path):
    torch.manual_seed(2)
    model = Pictures().eval()
    batch = torch.export.Dim("batch", min=1)
    example = torch.randn(2, 3, 8, 12)
    session = _write(model, (example,), {"x": {0: batch}}, tmp_path / "m.onnx")
    x = torch.randn(5, 3, 8, 12)
    with torch.no_grad():
        wanted = model(x)
    for name, found in zip(wanted, session.run(list(wanted), {"x": x.numpy()}), strict=True):
        assert np.allclose(found, wanted[name].numpy(), atol=1e-5), name
