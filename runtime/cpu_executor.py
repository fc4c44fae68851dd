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
    """Executes the plan of an artifact on this CPU."""

    def __init__(self, artifact: Artifact, weights: dict[str, Tensor]) -> None:
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

    def execute(self, batch: StepBatch, rows: list[int] | None = None) -> Tensor:
        """Logits [sampled rows, width] float32, in the order of the True of `batch.sample`.

        `rows` asks for other rows of the step instead, at most as many as the largest batch.
        """
        sizes = self._fill(batch, rows)
        regime = self._regime(batch.regime, sizes["tokens"])
        result: Tensor | None = None
        for group in regime.groups:
            for launch in group.launches:
                result = self._launch(launch, sizes)
        assert result is not None
        return result if rows or any(batch.sample) else result[:0]

    def _regime(self, kind: str, tokens: int) -> Regime:
        """The smallest regime of a kind that holds the step, or the largest there is."""
        for regime in self._regimes[kind]:
            if tokens <= regime.sizes["tokens"]:
                return regime
        return self._regimes[kind][-1]

    def _launch(self, launch: Launch, sizes: dict[str, int]) -> Tensor:
        package, threads = self._packages[launch.kernel], int(launch.grid[0])
        arguments = self._bind(launch, sizes)
        return self.library.run(launch.kernel, package, arguments, self._workspace, threads)[0]

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
        """Write the step into the input buffers; its sizes by name."""
        tokens, sequences = len(batch.token_ids), len(batch.context_lens)
        pages = max(len(table) for table in batch.block_tables)
        inputs = self._inputs
        inputs["token_ids"][:tokens] = batch.token_ids
        inputs["query_start"][: sequences + 1] = batch.query_start
        inputs["context_lens"][:sequences] = batch.context_lens
        if batch.regime == "decode":
            inputs["position_ids"][:tokens] = batch.context_lens
            rows = list(range(sequences))
        else:
            inputs["position_ids"][:tokens] = _positions(batch)
            rows = [batch.query_start[i + 1] - 1 for i in range(sequences) if batch.sample[i]]
        table = inputs["block_table"]
        for index, row in enumerate(batch.block_tables):
            table[index * pages : index * pages + len(row)] = row
            table[index * pages + len(row) : (index + 1) * pages] = 0
        wanted = wanted or rows or [tokens - 1]
        inputs["logit_rows"][: len(wanted)] = wanted
        return {
            "tokens": tokens,
            "rows": len(wanted),
            "sequences": sequences,
            "sequences+1": sequences + 1,
            "sequence_pages": pages,
        }


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
