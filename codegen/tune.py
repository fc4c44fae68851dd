"""Candidates for the tile table of a GPU: instantiated, compiled and written, without the GPU.

In: the linear layers of a model, token counts, a target. Out: a folder with cubins and tune.json.
Kernels that spill or do not fit are left out. Each is made from a table entry, by the same code
that will read the measured table.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sitsc.codegen.aot import compile_kernels
from sitsc.codegen.cuda import CudaProvider
from sitsc.codegen.cuda_candidates import Candidate, candidates
from sitsc.codegen.cuda_linear import Linear
from sitsc.core.errors import CompileError
from sitsc.core.hardware import CudaLimits
from sitsc.core.kernel_meta import kernel_folder
from sitsc.core.kernels import KernelInfo
from sitsc.core.tiles import TileEntry, choose_linear, shape_of
from sitsc.core.tuning import SCHEMA, TuneCase, TuneSet, write_tune_set

_RANK_WEIGHT = 3.0  # how much being likely counts against being different from those chosen


class ShapeRecorder(CudaProvider):
    """A provider that remembers the linear layers it was asked for, each shape once."""

    def __init__(self, target: str, limits: CudaLimits) -> None:
        super().__init__(target, limits)
        self.shapes: list[dict[str, Any]] = []

    def linear(self, shape: dict[str, Any], tokens: int) -> KernelInfo | None:
        """Like the base; remembers the shape."""
        if shape not in self.shapes:
            self.shapes.append(dict(shape))
        return CudaProvider.linear(self, shape, tokens)


def build(
    shapes: Sequence[dict[str, Any]],
    tokens: Sequence[int],
    most: int,
    target: str,
    limits: CudaLimits,
    folder: Path,
    progress: Callable[[float], None] = lambda share: None,
) -> tuple[TuneSet, list[CompileError]]:
    """Compile at most `most` kernels for each shape and token count into `folder`.

    Also returns why kernels were left out. Raises CacheError, OSError of the folder.
    """
    provider = CudaProvider(target, limits)
    cases = [
        case
        for shape in shapes
        for count in tokens
        for case in _cases(provider, shape, count, most)
    ]
    refused: list[CompileError] = []
    sources = [provider.sources[key] for key in dict.fromkeys(case.key for case in cases)]
    metas = compile_kernels(sources, limits.sm, folder, progress, refused=refused)
    for source in (folder / kernel_folder(limits.sm)).glob("*.py"):
        source.unlink()  # the launcher needs none, and the folder travels
    made = {meta.key for meta in metas}
    found = TuneSet(SCHEMA, target, limits.sm, tuple(c for c in cases if c.key in made))
    write_tune_set(found, folder)
    return found, refused


def _cases(
    provider: CudaProvider, shape: dict[str, Any], tokens: int, most: int
) -> Iterator[TuneCase]:
    """Today's choice, then the candidates on their likeliest grid, then on the others."""
    table = provider.entries
    seen: set[tuple[str, tuple[int | str, ...]]] = set()
    choice = choose_linear(table, shape, tokens, provider.limits.num_sms)
    wanted = [] if choice.kernel == "library" else [(choice.kernel, choice.tile, True)]
    found = spread(candidates(Linear(**shape), tokens, provider.limits), most - len(wanted))
    for index in range(max((len(one.programs) for one in found), default=0) or 1):
        wanted += [(one.template, tile, False) for one in found for tile in _tile(one, index)]
    for kernel, tile, current in wanted:
        case = _case(provider, shape, tokens, kernel, tile, current)
        if (case.key, case.grid) not in seen:
            seen.add((case.key, case.grid))
            yield case
    provider.entries = table


def _tile(candidate: Candidate, index: int) -> Iterator[dict[str, int]]:
    """The tile as a table writes it, on grid `index`; nothing where there is no such grid."""
    tile = {name: int(value) for name, value in candidate.tile.items() if name != "tokens"}
    if candidate.programs[index : index + 1]:
        yield tile | {"programs": candidate.programs[index]}
    elif index == 0:
        yield tile


def _case(
    provider: CudaProvider,
    shape: dict[str, Any],
    tokens: int,
    kernel: str,
    tile: dict[str, int],
    current: bool,
) -> TuneCase:
    """What the provider makes of a table with this one entry."""
    provider.entries = (TileEntry(*shape_of(shape), tokens, tokens, kernel, tile, {}),)
    info = provider.linear(shape, tokens)
    assert info is not None and all(isinstance(size, int) for size in info.grid)
    grid = tuple(int(size) for size in info.grid)
    return TuneCase(
        dict(shape),
        tokens,
        kernel,
        dict(tile),
        current,
        info.key,
        grid,
        info.num_partials,
        info.num_counters,
    )


def spread(found: Sequence[Candidate], most: int) -> list[Candidate]:
    """At most `most` candidates: likely ones, but each unlike those before it.

    The next is the one whose parameters were taken least often so far, its place in `found`
    counting as well.
    """
    left = list(enumerate(found))
    taken: Counter[tuple[str, Any]] = Counter()
    chosen: list[Candidate] = []
    while left and len(chosen) < most:

        def cost(item: tuple[int, Candidate]) -> float:
            seen = sum(taken[feature] for feature in _features(item[1]))
            return seen / max(1, len(chosen)) + _RANK_WEIGHT * item[0] / len(found)

        best = min(left, key=cost)
        left.remove(best)
        taken.update(_features(best[1]))
        chosen.append(best[1])
    return chosen


def _features(candidate: Candidate) -> list[tuple[str, Any]]:
    """What makes candidates alike: template, each parameter, and the block as a whole."""
    tile = candidate.tile
    block = tuple(tile.get(name) for name in ("block_n", "block_k", "num_warps"))
    return [("template", candidate.template), ("block", block), *tile.items()]
