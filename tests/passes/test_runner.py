"""The runner: order, reports, dumps, and catching passes that break a graph or its results."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
from families import FAMILIES
from torch import fx

from sitsc.core.errors import GraphError, NumericsError
from sitsc.core.printer import print_graph
from sitsc.passes import CPU, FUSED
from sitsc.passes.base import PassContext
from sitsc.passes.fxutil import add_weight, aten, call, calls, replace, set_arguments, weight_of
from sitsc.passes.runner import num_ops, run_passes

CONTEXT = PassContext("float32", "none", "float32", 16, "cpu")


@dataclass(frozen=True, slots=True)
class Halve:
    """Halves the result of the first linear layer."""

    name: ClassVar[str] = "halve"
    preserves_numerics: ClassVar[bool] = True

    def run(self, graph: fx.Graph, context: PassContext) -> None:
        """Rewrite `graph` in place."""
        node = calls(graph, "linear")[0]
        users = list(node.users)
        with graph.inserting_after(node):
            half = call(graph, aten.mul.Tensor, (node, 0.5), node)
        for user in users:
            user.replace_input_with(node, half)


class HalveOnDemand(Halve):
    """The same, and says so."""

    preserves_numerics: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Widen:
    """Changes what a layer says without changing what it computes."""

    name: ClassVar[str] = "widen"
    preserves_numerics: ClassVar[bool] = True

    def run(self, graph: fx.Graph, context: PassContext) -> None:
        """Rewrite `graph` in place."""
        node = calls(graph, "linear")[0]
        with node.meta["val"].fake_mode:
            node.meta["val"] = node.meta["val"].double()


@dataclass(frozen=True, slots=True)
class Epsilon:
    """Gives every norm another epsilon: a small change that must be seen all the same."""

    name: ClassVar[str] = "epsilon"
    preserves_numerics: ClassVar[bool] = True

    def run(self, graph: fx.Graph, context: PassContext) -> None:
        """Rewrite `graph` in place."""
        for node in calls(graph, "rms_norm"):
            set_arguments(node, eps=1e-2)


UP_TO_NORMS = FUSED[: 1 + [each.name for each in FUSED].index("match_rms_norm")]


@pytest.mark.parametrize("wrong", [Halve(), Epsilon()])
def test_a_pass_that_changes_results_is_named(wrong: Any, traced: Any):
    module = traced(FAMILIES["llama"], "float32")
    with pytest.raises(NumericsError, match=f"pass {wrong.name} changed results"):
        run_passes(module, (*UP_TO_NORMS, wrong), CONTEXT, check=True)


def test_without_the_check_nothing_is_executed(traced: Any):
    reports = run_passes(traced(FAMILIES["llama"], "float32"), (Halve(),), CONTEXT)
    assert [report.error for report in reports] == [None]


def test_a_pass_that_may_change_results_reports_by_how_much(traced: Any):
    module = traced(FAMILIES["llama"], "float32")
    (report,) = run_passes(module, (HalveOnDemand(),), CONTEXT, check=True)
    assert report.error is not None
    assert report.error > 1e-3


def test_a_pass_that_breaks_the_graph_is_named(traced: Any):
    module = traced(FAMILIES["llama"], "float32")
    with pytest.raises(GraphError, match=r"\[after widen\]") as error:
        run_passes(module, (*FUSED[:2], Widen()), CONTEXT)
    assert "q_proj" in str(error.value)  # the module path
    assert any("aten.linear" in note for note in error.value.__notes__)


def test_reports_and_dumps_follow_the_order(traced: Any, tmp_path: Path):
    module = traced(FAMILIES["llama"], "float32")
    before = print_graph(module.graph)
    reports = run_passes(module, CPU, CONTEXT, dump=tmp_path / "new" / "dumps")
    assert [report.name for report in reports] == [item.name for item in CPU]
    names = [f"{i:02d}_{item.name}.txt" for i, item in enumerate(CPU, 1)]
    files = sorted(path.name for path in (tmp_path / "new" / "dumps").iterdir())
    assert files == ["00_trace.txt", *names]
    dumps = [(tmp_path / "new" / "dumps" / name).read_text() for name in files]
    assert dumps[0] == before
    assert dumps[-1] == print_graph(module.graph)
    for report, after in pairwise(reports):
        assert report.ops_after == after.ops_before
    assert reports[-1].ops_after == num_ops(module.graph)
    assert all(report.seconds > 0 for report in reports)


@dataclass(frozen=True, slots=True)
class CountFromZero:
    """Positions from the start of the step: right for one step, wrong for the next."""

    name: ClassVar[str] = "count_from_zero"
    preserves_numerics: ClassVar[bool] = True

    def run(self, graph: fx.Graph, context: PassContext) -> None:
        """Rewrite `graph` in place."""
        node = graph.find_nodes(op="placeholder", target="position_ids")[0]
        users = list(node.users)
        with graph.inserting_before(users[0]):
            first = call(graph, aten.select.int, (node, 0, 0), users[0])
            counted = call(graph, aten.sub.Tensor, (node, first), users[0])
        for user in users:
            user.replace_input_with(node, counted)


def test_what_only_a_second_step_shows_is_caught(traced: Any):
    module = traced(FAMILIES["llama"], "float32")
    with pytest.raises(NumericsError, match="two steps give another result than one"):
        run_passes(module, (CountFromZero(), *CPU), CONTEXT, check=True)


def test_what_nothing_reads_is_removed(traced: Any):
    @dataclass(frozen=True, slots=True)
    class Litter:
        name: ClassVar[str] = "litter"
        preserves_numerics: ClassVar[bool] = True

        def run(self, graph: fx.Graph, context: PassContext) -> None:
            node = calls(graph, "linear")[0]
            spec = weight_of(node.args[1])
            assert spec is not None
            add_weight(graph, spec, node.args[1])
            with graph.inserting_before(node):
                replace(node, node)
                call(graph, aten.neg.default, (node.args[0],), node)

    module = traced(FAMILIES["llama"], "float32")
    before = print_graph(module.graph)
    run_passes(module, (Litter(),), CONTEXT)
    assert print_graph(module.graph) == before
