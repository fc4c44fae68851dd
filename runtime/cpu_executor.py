"""The executor of the CPU target: one step is the launches of a regime, bound as the plan says.

In: a `StepBatch`. Out: logits. It fills the planned input buffers, picks the smallest regime that
holds the step, and calls its packages; sizes, order and bindings all come from the plan.
"""

from collections import OrderedDict

from torch import Tensor

from sitsc.core.artifact import Artifact
from sitsc.core.plan import Argument, Launch, Regime
from sitsc.core.serving.batch import StepBatch
from sitsc.runtime.cpu_library import CpuLibrary
from sitsc.runtime.memory import Arena, allocate_pool
from sitsc.runtime.package import bind_package

_MOST_BINDINGS = 256


class CpuExecutor:
    """Executes the plan of an artifact on this CPU, or that of a rank with its number."""

    def __init__(self, artifact: Artifact, weights: dict[str, Tensor], tp_rank: int = 0) -> None:
        self.plan = artifact.plan
        self.library = CpuLibrary.of(artifact)
        self.arena = Arena(self.plan.memory)
        self.pools = {g.name: allocate_pool(g, self.plan.memory.kv_pages) for g in self.plan.kv}
        self.weights = weights
        self._packages = {p.name: bind_package(artifact, p, weights) for p in self.plan.packages}
        scratch = self.arena.buffer("workspace")
        self._workspace = self.arena.view("workspace", (scratch.bytes,))
        self._regimes = _by_kind(self.plan.regimes)
        self._bound: OrderedDict[tuple[str, tuple[int, ...]], list[Tensor]] = OrderedDict()
        self._inputs = {
            b.name: self.arena.view(
                b.name, (b.bytes // 8 if b.dtype == "int64" else b.bytes // 4,)
            ).numpy()
            for b in self.plan.memory.arena
            if b.dtype in ("int64", "int32")
        }
        self._write("tp_rank", [tp_rank])

    def execute(self, batch: StepBatch, rows: list[int] | None = None) -> Tensor:
        """Logits [sampled rows, width] float32, in the order of the True of `batch.sample`.

        `rows` asks for other rows of the step instead, at most as many as the largest batch.
        """
        result = self.outputs(batch, rows)[0]
        return result if rows or any(batch.sample) else result[:0]

    def outputs(self, batch: StepBatch, rows: list[int] | None = None) -> list[Tensor]:
        """What the step's package gives: logits, or what crosses into the next stage.

        What comes from the stage before is in its `places` already. A step without a sampled row
        gives logits of its last token.
        """
        sizes = self._fill(batch, rows)
        regime = self._regime(batch.regime, sizes["tokens"])
        results: list[Tensor] = []
        for group in regime.groups:
            for launch in group.launches:
                results = self._launch(launch, sizes)
        return results

    def places(self, batch: StepBatch, names: tuple[str, ...]) -> list[Tensor]:
        """Where inputs that other ranks compute belong for this step, each in its shape."""
        sizes, _ = _sizes(batch, None)
        regime = self._regime(batch.regime, sizes["tokens"])
        arguments = {a.name: a for a in regime.groups[0].launches[0].arguments}
        return [self._tensor(arguments[name], sizes) for name in names]

    def predicted_s(self, batch: StepBatch) -> float:
        """How long the plan says a step takes, in proportion to its tokens."""
        regime = self._regime(batch.regime, batch.num_tokens)
        share = max(1.0, batch.num_tokens / regime.sizes["tokens"])
        return share * regime.predicted_us / 1e6

    def _regime(self, kind: str, tokens: int) -> Regime:
        """The smallest regime of a kind that holds the step, or the largest there is."""
        for regime in self._regimes[kind]:
            if tokens <= regime.sizes["tokens"]:
                return regime
        return self._regimes[kind][-1]

    def _launch(self, launch: Launch, sizes: dict[str, int]) -> list[Tensor]:
        package, threads = self._packages[launch.kernel], int(launch.grid[0])
        arguments = self._bind(launch, sizes)
        return self.library.run(launch.kernel, package, arguments, self._workspace, threads)

    def _bind(self, launch: Launch, sizes: dict[str, int]) -> list[Tensor]:
        """The tensors of a launch at these sizes; views are kept, since most steps repeat."""
        key = (launch.kernel, tuple(sizes.values()))
        found = self._bound.get(key)
        if found is None:
            found = [self._tensor(argument, sizes) for argument in launch.arguments]
            self._bound[key] = found
            if len(self._bound) > _MOST_BINDINGS:
                self._bound.popitem(last=False)
        return found

    def _tensor(self, argument: Argument, sizes: dict[str, int]) -> Tensor:
        if argument.source == "kv":
            return self.pools[argument.buffer]
        shape = tuple(sizes[d] if isinstance(d, str) else d for d in argument.shape)
        return self.arena.view(argument.buffer, shape)

    def _fill(self, batch: StepBatch, wanted: list[int] | None) -> dict[str, int]:
        """Write the step into the input buffers that the plan has; its sizes by name."""
        sizes, rows = _sizes(batch, wanted)
        decoding, pages = batch.regime == "decode", sizes["sequence_pages"]
        self._write("token_ids", batch.token_ids)
        self._write("query_start", batch.query_start)
        self._write("context_lens", batch.context_lens)
        self._write("position_ids", batch.context_lens if decoding else _positions(batch))
        self._write("logit_rows", rows)
        table = self._inputs["block_table"]
        for index, row in enumerate(batch.block_tables):
            table[index * pages : index * pages + len(row)] = row
            table[index * pages + len(row) : (index + 1) * pages] = 0
        return sizes

    def _write(self, name: str, values: list[int]) -> None:
        if (place := self._inputs.get(name)) is not None:
            place[: len(values)] = values


def _sizes(batch: StepBatch, wanted: list[int] | None) -> tuple[dict[str, int], list[int]]:
    """The sizes of a step by name, and the rows that need logits: one at least."""
    tokens, sequences = len(batch.token_ids), len(batch.context_lens)
    if batch.regime == "decode":
        rows = list(range(sequences))
    else:
        rows = [batch.query_start[i + 1] - 1 for i in range(sequences) if batch.sample[i]]
    rows = wanted or rows or [tokens - 1]
    sizes = {
        "tokens": tokens,
        "rows": len(rows),
        "sequences": sequences,
        "sequences+1": sequences + 1,
        "sequence_pages": max(len(table) for table in batch.block_tables),
    }
    return sizes, rows


def _positions(batch: StepBatch) -> list[int]:
    positions: list[int] = []
    for index, before in enumerate(batch.context_lens):
        count = batch.query_start[index + 1] - batch.query_start[index]
        positions.extend(range(before, before + count))
    return positions


def _by_kind(regimes: tuple[Regime, ...]) -> dict[str, list[Regime]]:
    found: dict[str, list[Regime]] = {"decode": [], "prefill": []}
    for regime in regimes:
        found[regime.kind].append(regime)
    for kind in found.values():
        kind.sort(key=lambda regime: regime.sizes["tokens"])
    return found
