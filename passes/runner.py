"""The runner: runs passes in order; verifies, times, counts and, when asked, dumps and checks each.

With `check`, the graph is executed before and after every pass that must not change numerics, and a
difference beyond the tolerance of the dtype is an error that names the pass. At the end two steps
must give what one gives.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from sitsc.core.disk import disk_errors
from sitsc.core.errors import NumericsError
from sitsc.core.interpret import (
    RandomTensors,
    relative_error,
    run_graph,
    run_in_two,
    step_inputs,
    tensor_shapes,
)
from sitsc.core.printer import print_graph
from sitsc.core.verify import verify_graph
from sitsc.passes.base import Pass, PassContext

_TOLERANCE = {"float32": 2e-5, "bfloat16": 4e-2, "float16": 1e-2}


@dataclass(frozen=True, slots=True)
class PassReport:
    """What one pass did: time in seconds, operator counts, and the error against before."""

    name: str
    seconds: float
    ops_before: int
    ops_after: int
    error: float | None


def num_ops(graph: fx.Graph) -> int:
    """Calls in a graph."""
    return sum(node.op == "call_function" for node in graph.nodes)


def tidy(graph: fx.Graph) -> None:
    """Remove dead calls and weights that nothing reads any more."""
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    for node in list(graph.nodes):
        if node.op == "placeholder" and "weight" in node.meta and not node.users:
            graph.erase_node(node)


def run_passes(
    module: fx.GraphModule,
    passes: tuple[Pass, ...],
    context: PassContext,
    *,
    dump: Path | None = None,
    check: bool = False,
    tokens: int = 21,
) -> list[PassReport]:
    """Run `passes` over the graph in place. Raises GraphError or NumericsError naming the pass.

    Raises ArtifactError where the texts cannot be written to the folder `dump`.
    """
    graph = module.graph
    known: dict[Any, Any] = {}
    verify_graph(graph, "tracing", known)
    runner = _Checker(graph, context, tokens) if check else None
    _dump(dump, "00_trace.txt", graph)
    reports = []
    for index, item in enumerate(passes, 1):
        before, start = num_ops(graph), time.perf_counter()
        item.run(graph, context)
        tidy(graph)
        verify_graph(graph, item.name, known)
        error = runner.compare(graph, item) if runner else None
        seconds = time.perf_counter() - start
        reports.append(PassReport(item.name, seconds, before, num_ops(graph), error))
        _dump(dump, f"{index:02d}_{item.name}.txt", graph)
    if runner is not None:
        runner.compare_steps(graph)
    module.recompile()
    return reports


def _dump(folder: Path | None, name: str, graph: fx.Graph) -> None:
    """Write the text of the graph, when there is a folder for it."""
    if folder is None:
        return
    with disk_errors(folder, hint="choose another folder for --dump"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(print_graph(graph))


class _Checker:
    """Executes the graph after each pass on the same weights and the same step."""

    def __init__(self, graph: fx.Graph, context: PassContext, tokens: int) -> None:
        self.context = context
        self.weights = RandomTensors(tensor_shapes(graph))
        vocabulary = next(iter(tensor_shapes(graph).values()))[0]
        self.ids = [(7 * i * i + 3 * i + 1) % vocabulary for i in range(tokens)]
        self.last = self._run(graph)

    def _inputs(self, graph: fx.Graph) -> dict[str, Tensor]:
        return step_inputs(graph, self.ids, self.context.page_tokens)

    def _run(self, graph: fx.Graph) -> Tensor:
        """Logits of all tokens, the last first: what follows rows must follow them everywhere."""
        rows = torch.arange(len(self.ids)).flip(0)
        return run_graph(graph, self.weights, self._inputs(graph) | {"logit_rows": rows})

    def compare(self, graph: fx.Graph, item: Pass) -> float:
        now = self._run(graph)
        error = relative_error(now, self.last)
        if item.preserves_numerics and not error <= _TOLERANCE[self.context.dtype]:
            raise NumericsError(
                f"pass {item.name} changed results: relative error {error:.3g}, allowed "
                f"{_TOLERANCE[self.context.dtype]:.3g}",
                hint="compile with --dump to see the graph before and after",
            )
        self.last = now
        return error

    def compare_steps(self, graph: fx.Graph) -> None:
        """A paged graph over two steps against one: all that it keeps must be in the pages."""
        inputs = self._inputs(graph)
        if not any(name.startswith("kv_") for name in inputs):
            return
        two = run_in_two(graph, self.weights, inputs, len(self.ids) * 2 // 3)
        error = relative_error(two, run_graph(graph, self.weights, self._inputs(graph)))
        if not error <= _TOLERANCE[self.context.dtype]:
            raise NumericsError(
                f"two steps give another result than one: relative error {error:.3g}",
                hint="the model reads positions or tokens in a way that the compiler does not know",
            )
