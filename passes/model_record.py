"""What the cost model needs of a graph, in a compact record: taken once, asked many times.

For every class of layers its operators, with bytes and operations as functions of the step's sizes,
and how tensor parallelism would cut them. `record_maker.py` takes it from a graph.
"""

from dataclasses import dataclass

from sitsc.passes.cost_formulas import Cost, attention_cost, experts_share

LINEAR, ATTENTION, EXPERTS = "linear", "attention", "experts"
EMBEDDING, OTHER = "embedding", "other"
# Roles, which `tp_roles.py` finds:
WHOLE = "whole"  # every rank computes all of it
COLUMN = "column"  # outputs are cut
ROW = "row"  # inputs are cut; the sum over ranks is an all-reduce
HEADS = "heads"  # attention, or whatever is computed head by head
VOCABULARY = "vocabulary"  # outputs (or rows of a table) are tokens of the vocabulary
BY_EXPERTS = "experts"  # routed experts; the sum over ranks is an all-reduce, or tokens travel


@dataclass(frozen=True, slots=True)
class Heads:
    """Shape of attention: heads, KV heads, dimensions a head, bytes a KV element, window or 0."""

    heads: int
    kv_heads: int
    dim: int
    itemsize: int
    window: int


@dataclass(frozen=True, slots=True)
class Experts:
    """Shape of routed experts."""

    experts: int
    top_k: int
    intermediate: int


@dataclass(frozen=True, slots=True)
class Op:
    """One operator: bytes of weights, and of values and operations for each row.

    `rows` names what counts its rows: "tokens" of the step, or "rows" that need logits. For a
    linear layer `columns` are its inputs, `outputs` its products (gate and up both), and `norm`
    and `glu` say what is fused before and after; `heads` are those of the attention that it feeds
    with "qkv", "q" or "kv" (k or v). `inner` says that it reads what other linear layers made, and
    not attention. `reduced_bytes` of a row are summed over ranks after it.
    """

    name: str
    kind: str
    role: str
    rows: str
    weight: str
    weight_bytes: int
    read_bytes: int
    in_bytes: float
    out_bytes: float
    flops: float
    dtype: str
    columns: int = 0
    outputs: int = 0
    norm: bool = False
    glu: bool = False
    reduced_bytes: int = 0
    heads: Heads | None = None
    feeds: str = ""
    inner: bool = False
    experts: Experts | None = None

    def cost(self, tokens: int, rows: int, sequences: int, context: int) -> Cost:
        """The uncut cost of a step, as `cost_of` says."""
        count = tokens if self.rows == "tokens" else rows
        if self.kind == ATTENTION and self.heads is not None:
            h = self.heads
            moved, flops = attention_cost(
                tokens, sequences, context, h.heads, h.kv_heads, h.dim, h.itemsize, h.window
            )
            moved += int((self.in_bytes + self.out_bytes) * tokens)
            return Cost(moved, flops, self.dtype)
        fixed = float(self.read_bytes)
        if self.experts is not None:
            fixed *= experts_share(self.experts.experts, self.experts.top_k, count)
        moved = fixed + (self.in_bytes + self.out_bytes) * count
        return Cost(int(moved), int(self.flops * count), self.dtype)


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """Operators before the layers, of each class of layers, and after; layer → class."""

    architecture: str
    before: tuple[Op, ...]
    classes: tuple[tuple[Op, ...], ...]
    layers: tuple[int, ...]
    after: tuple[Op, ...]
    hidden: int
    vocabulary: int
    max_context: int

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    def attention(self) -> tuple[Heads, ...]:
        """The distinct shapes of attention."""
        found = [op.heads for ops in self.classes for op in ops if op.kind == ATTENTION]
        return tuple(dict.fromkeys(h for h in found if h is not None))

    def experts(self) -> tuple[Experts, ...]:
        """The distinct shapes of routed experts."""
        found = [op.experts for ops in self.classes for op in ops]
        return tuple(dict.fromkeys(e for e in found if e is not None))
