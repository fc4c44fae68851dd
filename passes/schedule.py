"""Schedule: the regimes of the plan, with what each launches and what that costs.

In: the final graph and the sizes that were chosen. Out: one regime a bucket. On the CPU every
regime launches the same package, whose sizes are free: nothing is ever padded.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import fx

from sitsc.core.plan import (
    UNMATCHED,
    Argument,
    KernelRow,
    KvGroup,
    Launch,
    LaunchGroup,
    LayerClass,
    Regime,
    Target,
)
from sitsc.core.printer import symbol_names, target_name
from sitsc.core.weights import dtype_name
from sitsc.passes.cost import Sizes, cost_of, predict_us
from sitsc.passes.cuda_values import is_selection
from sitsc.passes.fxutil import arguments, is_op, layer_of, module_path, tensor, weight_of
from sitsc.passes.unmatched import unmatched_kind

_KERNELS = ("fused_linear", "packed_embedding", "rms_norm", "layer_norm", "paged_attention", "moe")
KERNELS = tuple(f"sitsc::{name}" for name in _KERNELS)  # of aten there is a layer_norm too
PACKAGE_GROUP = "step"
_TYPICAL_CONTEXT = 512


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The sizes of one bucket: new tokens, sequences and tokens already in the pages of each."""

    kind: str
    tokens: int
    sequences: int
    context: int

    def priced(self) -> "StepSizes":
        """The step whose time is predicted: of a bucket for prompts, one prompt alone."""
        return self if self.kind == "decode" else replace(self, sequences=1)

    def values(self, page_tokens: int) -> dict[str, int]:
        """All sizes of the step by the names that shapes use."""
        length = self.context + -(-self.tokens // self.sequences)
        return {
            "tokens": self.tokens,
            "rows": self.sequences,
            "sequences": self.sequences,
            "sequences+1": self.sequences + 1,
            "sequence_pages": -(-length // page_tokens),
            "context": self.context,
        }


def powers_of_two(low: int, high: int) -> tuple[int, ...]:
    """low, 2·low, … and `high` itself; low <= high."""
    sizes = []
    while low < high:
        sizes.append(low)
        low *= 2
    return (*sizes, high)


def buckets(max_batch: int, chunk_tokens: int, max_context: int) -> list[StepSizes]:
    """Decode buckets 1, 2, 4 … max_batch, then prefill buckets up to the largest step."""
    context = min(_TYPICAL_CONTEXT, max(1, max_context - 1))
    decode = [StepSizes("decode", b, b, context) for b in powers_of_two(1, max_batch)]
    largest = chunk_tokens + max_batch  # a chunk beside a full batch of decoding sequences
    prefill = [StepSizes("prefill", t, 1, 0) for t in powers_of_two(min(64, chunk_tokens), largest)]
    return decode + prefill


CPU_LAYOUT = "page, layer, k: [head, dim, token], v: [head, token, dim]"


def kv_groups(graph: fx.Graph, page_tokens: int, layout: str = CPU_LAYOUT) -> tuple[KvGroup, ...]:
    """The KV pools of a graph, one group of layers each."""
    groups = []
    pools = [n for n in graph.nodes if str(n.meta.get("input", "")).startswith("kv_")]
    for pool in pools:
        calls = [
            n for n in graph.nodes if is_op(n, "paged_attention") and arguments(n)["kv"] is pool
        ]
        windows = {arguments(n)["window"] for n in calls}
        heads, dim = (int(size) for size in tensor(arguments(calls[0])["k"]).shape[1:])
        value = tensor(pool)
        groups.append(
            KvGroup(
                name=pool.meta["input"],
                layers=tuple(n.meta["layer"] for n in calls),
                kv_heads=heads,
                head_dim=dim,
                page_tokens=page_tokens,
                page_bytes=2 * heads * dim * page_tokens * value.dtype.itemsize * len(calls),
                window=windows.pop() if len(windows) == 1 else 0,
                dtype=dtype_name(value.dtype),
                layout=layout,
            )
        )
    return tuple(groups)


def step_arguments(graph: fx.Graph) -> tuple[Argument, ...]:
    """The step inputs of a graph in order, as arguments of the package."""
    arguments_ = []
    for node in graph.nodes:
        if node.op == "placeholder" and "input" in node.meta:
            name = node.meta["input"]
            source = "kv" if name.startswith("kv_") else "arena"
            dtype = dtype_name(tensor(node).dtype)
            arguments_.append(Argument(name, source, name, dtype, node.meta["dims"]))
    return tuple(arguments_)


class RowKey(NamedTuple):
    """What the calls of one row have in common; `layer_class` is "" outside of layers."""

    name: str
    op: str
    layer_class: str


def row_key(node: fx.Node, classes: tuple[LayerClass, ...]) -> RowKey:
    """The row of a call."""
    layer = layer_of(node)
    layer_class = next((c.name for c in classes if layer in c.layers), "")
    return RowKey(_label(node), target_name(node), layer_class)


def kernel_rows(
    graph: fx.Graph,
    sizes: Sizes,
    classes: tuple[LayerClass, ...],
    target: Target,
    times: Mapping[fx.Node, float] | None = None,
    computed_by: Mapping[RowKey, str] | None = None,
) -> tuple[KernelRow, ...]:
    """One row a kernel class: the same operator of the same module in the layers of one class.

    `times` are µs of what is launched for a node; what has none is computed inside of others.
    `computed_by` says for each row what its launches are, where there are any.
    """
    rows: dict[tuple[RowKey, str], KernelRow] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        cost = cost_of(node, sizes)
        if not cost.bytes and not cost.flops and not (times and node in times):
            continue
        time = predict_us(cost, target) if times is None else times.get(node, 0.0)
        key = row_key(node, classes)
        by = _package_part(node) if computed_by is None else computed_by[key]
        empty = KernelRow(key.name, key.op, by, key.layer_class, 0, 0, 0, 0.0)
        old = rows.get((key, by), empty)
        rows[key, by] = replace(
            old,
            count=old.count + 1,
            bytes=old.bytes + cost.bytes,
            flops=old.flops + cost.flops,
            predicted_us=old.predicted_us + time,
        )
    return tuple(rows.values())


def _package_part(node: fx.Node) -> str:
    """What computes a call inside of a package."""
    if is_op(node, *KERNELS):
        return "kernel"
    kind = unmatched_kind(node)
    return f"{UNMATCHED} {kind}" if kind else "inductor"


def _label(node: fx.Node) -> str:
    """The module of a node without its layer number; merged weights name all their modules.

    Rows that need logits are taken for what reads them, not by the module that they stand in.
    """
    if is_selection(node):
        return "logit_rows"
    path = module_path(node)
    if is_op(node, "fused_linear", "packed_embedding"):
        spec = weight_of(arguments(node)["weight"])
        path = spec.name.rsplit(".", 1)[0] if spec else path
        if is_op(node, "fused_linear") and layer_of(node) is None:
            path = module_path(node)
    parts = [part for part in path.split(".") if not part.isdigit()]
    return ".".join(part for part in parts if part not in ("model", "layers", "")) or "step"


def regimes(
    graph: fx.Graph,
    steps: list[StepSizes],
    classes: tuple[LayerClass, ...],
    target: Target,
    page_tokens: int,
    package: str,
    logits_width: int,
) -> tuple[Regime, ...]:
    """One regime a bucket, each launching `package` once."""
    symbols = symbol_names(graph)
    inputs = step_arguments(graph)
    logits = Argument("logits", "package", "logits", "float32", ("rows", logits_width))
    found = []
    for step in steps:
        values = step.values(page_tokens)
        rows = kernel_rows(graph, Sizes(symbols, values), classes, target)
        time = sum(row.predicted_us for row in rows)
        launch = Launch(
            kind="package",
            kernel=package,
            template="aotinductor",
            tile={},
            grid=(target.threads,),
            arguments=inputs,
            outputs=(logits,),
            stream=0,
            dependent=False,
            bytes=sum(row.bytes for row in rows),
            flops=sum(row.flops for row in rows),
            predicted_us=time,
        )
        name = f"{step.kind}_{step.tokens}"
        group = LaunchGroup(PACKAGE_GROUP, (), (launch,))
        found.append(Regime(name, step.kind, values, (group,), rows, time))
    return tuple(found)
