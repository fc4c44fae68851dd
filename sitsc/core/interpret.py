"""Running a graph on real tensors: random weights and a small step, to check passes and kernels.

In: a graph at any stage. Out: its result. Weights come from a seeded source by checkpoint name, so
that a model gives the same values before and after fusing, quantising and packing.
"""

import hashlib
import math
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from sitsc.core.weights import WeightSpec, materialise


class RandomTensors:
    """Seeded random checkpoint tensors: the same name and shape give the same values."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], seed: int = 0) -> None:
        self.shapes, self.seed = shapes, seed
        self._made: dict[str, Tensor] = {}

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a tensor; vectors are near one, matrices near 1/sqrt(columns)."""
        if name not in self._made:
            digest = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
            shape = self.shapes[name]
            value = torch.randn(shape, generator=generator)
            wide = len(shape) > 1
            self._made[name] = value / math.sqrt(shape[-1]) if wide else 1 + 0.2 * value
        return self._made[name][start:stop]


def tensor_shapes(graph: fx.Graph) -> dict[str, tuple[int, ...]]:
    """The checkpoint tensors that a graph as traced reads, and their shapes."""
    found: dict[str, tuple[int, ...]] = {}
    for node in graph.nodes:
        spec = node.meta.get("weight")
        if spec is not None and spec.role == "weight":
            for source in (s for s in spec.sources if not s.zeros):
                shape = spec.source_shape(source)
                found[source.tensor] = max(found.get(source.tensor, shape), shape)
    return found


def step_inputs(
    graph: fx.Graph, token_ids: list[int], page_tokens: int, *, scatter: bool = True
) -> dict[str, Tensor]:
    """Inputs of one step over one new sequence that wants logits of every token."""
    count = len(token_ids)
    pages = -(-count // page_tokens)
    order = list(range(2 * pages))[::-2] if scatter else list(range(pages))
    values = {
        "token_ids": torch.tensor(token_ids),
        "position_ids": torch.arange(count),
        "logit_rows": torch.arange(count),
        "block_table": torch.tensor([order], dtype=torch.int32),
        "query_start": torch.tensor([0, count], dtype=torch.int32),
        "context_lens": torch.zeros(1, dtype=torch.int32),
        "tp_rank": torch.zeros(1, dtype=torch.int64),
    }
    for node in graph.nodes:
        name = node.meta.get("input", "")
        if node.op == "placeholder" and name.startswith("kv_"):
            shape = list(node.meta["val"].shape)
            shape[0] = 2 * pages + 1
            values[name] = torch.full(shape, float("nan"), dtype=node.meta["val"].dtype)
    return values


def run_graph(graph: fx.Graph, weights: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Execute `graph`; `weights.read(name, start, stop)` gives rows. Other inputs are ignored."""
    values: dict[fx.Node, Any] = {}
    made: dict[WeightSpec, Tensor] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            spec = node.meta.get("weight")
            if spec is None:
                values[node] = inputs[node.meta["input"]]
            else:
                values[node] = made.setdefault(spec, materialise(spec, weights.read))
        elif node.op == "output":
            return map_arg(node.args[0], lambda n: values[n])
        else:
            values[node] = call_node(node, values)
    raise AssertionError("a graph ends in an output")


def run_in_two(graph: fx.Graph, weights: Any, inputs: dict[str, Tensor], cut: int) -> Tensor:
    """The result of a paged `graph` when the first `cut` tokens come a step before the others.

    `inputs` are those of one step over all tokens; its pools are written. Same result as one step.
    """
    count, parts = len(inputs["token_ids"]), []
    for low, high in ((0, cut), (cut, count)):
        part = {name: inputs[name][low:high] for name in ("token_ids", "position_ids")}
        part["logit_rows"] = torch.arange(high - low)
        part["query_start"] = torch.tensor([0, high - low], dtype=torch.int32)
        part["context_lens"] = torch.tensor([low], dtype=torch.int32)
        parts.append(run_graph(graph, weights, inputs | part))
    return torch.cat(parts)


def call_node(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """What a call gives for the values of its arguments; on the CPU."""
    args = map_arg(node.args, lambda n: values[n])
    kwargs = dict(map_arg(node.kwargs, lambda n: values[n]))
    if isinstance(kwargs.get("device"), torch.device):
        kwargs["device"] = torch.device("cpu")
    target: Any = node.target
    with torch.no_grad():
        return target(*args, **kwargs)


def relative_error(value: Tensor, reference: Tensor) -> float:
    """max|a − b| / max|b| over finite tensors; infinite when `value` is not finite."""
    a, b = value.double().flatten(), reference.double().flatten()
    if not bool(torch.isfinite(a).all()) or a.shape != b.shape:
        return math.inf
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))
