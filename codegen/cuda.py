"""Everything generated for a CUDA target: kernel instances for the planner, then cubins.

In: shapes and step sizes that the planner asks for. Out: `KernelInfo` for the plan and, at the
end, every kernel compiled without a GPU. Tiles come from the target's table or its rule.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sitsc.codegen.aot import compile_kernels
from sitsc.codegen.cuda_attention import MERGES, Heads
from sitsc.codegen.cuda_candidates import prefill_candidates
from sitsc.codegen.cuda_experts import tile as experts_tile
from sitsc.codegen.cuda_linear import Linear, scaling_programs, workspace
from sitsc.codegen.cuda_templates import Sizes, grid, instance
from sitsc.codegen.triton_source import KernelSource
from sitsc.core.errors import CompileError
from sitsc.core.hardware import CudaLimits
from sitsc.core.kernels import MOST_PROGRAMS, KernelInfo
from sitsc.core.tiles import (
    NORM_PROGRAMS,
    choose_attention,
    choose_linear,
    load_table,
    wide_bytes,
    wide_supported,
)

_DEPENDENT_FROM = 90
_SEQUENCES = 256  # of a step, at least: one kernel for all buckets
Grid = tuple[int | str, ...]


class CudaProvider:
    """Makes kernel instances for one target and remembers their sources."""

    def __init__(self, target: str, limits: CudaLimits) -> None:
        self.limits = limits
        self.table = load_table(target)
        self.pdl = limits.sm >= _DEPENDENT_FROM
        self.sources: dict[str, KernelSource] = {}

    def linear(
        self,
        shape: dict[str, Any],
        tokens: int,
        *,
        parts: bool = False,
        norm_apart: bool = False,
        squares: int = 0,
        ahead: float | None = None,
    ) -> KernelInfo | None:
        """The kernel of a linear layer; None: take the library."""
        gpu, room = self.limits, wide_bytes(self.limits)
        choice = choose_linear(self.table.linear, shape, tokens, gpu.num_sms, room)
        if norm_apart and "separate_norm" not in choice.tile and choice.kernel != "library":
            choice = replace(choice, tile=choice.tile | {"separate_norm": NORM_PROGRAMS})
        if choice.kernel == "wide" and not self._has_wide(shape, choice.tile, parts):
            choice = choose_linear((), shape, tokens, gpu.num_sms)
        if choice.kernel == "library":
            return None
        op, shown = Linear(**shape), dict(choice.tile)
        if squares:
            shown.pop("separate_norm", None)
        tile = dict(shown)
        if blocks := squares or tile.pop("separate_norm", 0):
            op = replace(op, norm=False, x_dtype="bf16", squares=blocks if blocks > 1 else 0)
        if tile.pop("parts", 0) and parts:
            op = replace(op, epilogue="parts", out_dtype="fp32")
        shown.pop("scaled", None)
        wanted = tile.pop("scaled", 0) and choice.kernel != "wide"  # which scales nothing
        scaled = scaling_programs(op.rows, tile) if wanted else 0
        if scaled > 1 and ahead is not None:
            shown["scaled"] = scaled
            op = replace(op, scaled=scaled, next_offset=ahead)
        if choice.kernel.startswith(("gemv", "wide")):
            tile["tokens"] = tokens
        tile |= {name: bool(tile[name]) for name in ("ahead", "early") if name in tile}
        programs = tile.pop("programs", 0)
        source = instance(choice.kernel, op, **tile, pdl=self.pdl)
        partials, counters = workspace(op, source, tokens)
        blocks = grid(source, Sizes(tokens=tokens, programs=programs))
        return self._info(source, blocks, shown, partials, counters)

    def _has_wide(self, shape: dict[str, Any], tile: dict[str, int], parts: bool) -> bool:
        """Whether a layer can have a wide kernel: norm apart, sums of split columns in parts."""
        apart = not shape["norm"] or bool(tile.get("separate_norm"))
        whole = tile.get("split", 1) == 1 or bool(parts and tile.get("parts"))
        return apart and whole and wide_supported(shape["columns"], self.limits.sm)

    def attention(self, shape: dict[str, Any], kind: str) -> tuple[KernelInfo, ...]:
        """Decode: one token a sequence, split over keys; prefill: pages, then attention."""
        heads = self.heads(shape)
        return self._decode(heads, shape) if kind == "decode" else self._prefill(heads, shape)

    @staticmethod
    def heads(shape: dict[str, Any]) -> Heads:
        """The heads of a shape as the planner gives it."""
        return Heads(
            heads=shape["q_heads"],
            kv_heads=shape["kv_heads"],
            head_dim=shape["head_dim"],
            page_tokens=shape["page_tokens"],
            scale=shape["scale"],
            rope=shape["rope_style"],
            rotary_dim=shape["rotary_dim"],
            angle_dtype=shape.get("angle_dtype", "bf16"),
            window=shape["window"],
            softcap=shape["softcap"],
            sinks=shape["sinks"],
            row_parts=shape.get("row_parts", 0),
        )

    def _decode(self, heads: Heads, shape: dict[str, Any]) -> tuple[KernelInfo, ...]:
        batch = shape["sequences"]
        choice = choose_attention(self.table.attention, shape, batch, self.limits.num_sms)
        tile = dict(choice.tile)
        splits, merge = tile.pop("splits"), MERGES[tile.pop("merge")]
        tile.pop("carveout", None)  # of the whole step
        more = {name: tile[name] for name in ("block", "share")} | {"max_splits": splits}
        source = instance("attention_decode", heads, merge=merge, pdl=self.pdl, **(tile | more))
        sums, weights = batch * heads.heads * splits * heads.head_dim, batch * heads.heads * splits
        scratch = {
            "none": (0, 0),
            "last": (sums + weights, batch * heads.kv_heads),
            "reduce": (sums, weights),
        }[merge]
        blocks = ("sequences", heads.kv_heads, splits)
        first = self._info(source, blocks, choice.tile, *scratch)
        if merge != "reduce":
            return (first,)
        second = instance("attention_reduce", heads, pdl=self.pdl, **more)
        sizes = Sizes(tokens=batch, sequences=batch, rows=batch, splits=splits)
        return first, self._info(second, grid(second, sizes), {"splits": splits})

    def _prefill(self, heads: Heads, shape: dict[str, Any]) -> tuple[KernelInfo, ...]:
        more: dict[str, Any] = {"pdl": self.pdl}
        more["max_sequences"] = max(_SEQUENCES, shape["sequences"])
        found = prefill_candidates(heads, self.limits, shape["sequences"])
        if not found:
            what = f"no prefill attention for head_dim {heads.head_dim}"
            raise CompileError(what, hint="compile for --target cpu")
        write = instance("kv_write", heads, **more)
        choice, tile = found[0], dict(found[0].tile)
        attend = instance(choice.template, heads, **(more | tile))
        programs = choice.programs[0] if choice.programs else 0
        tile |= {"programs": programs} if programs else {}
        sizes = Sizes(shape["tokens"], shape["sequences"], programs=programs)
        return (
            self._info(write, ("tokens",), {}),
            self._info(attend, grid(attend, sizes), tile, counters=1 if programs else 0),
        )

    def make(self, template: str, **shape: Any) -> KernelInfo:
        """A kernel of any other template; `count` names the size that its rows are."""
        count = shape.pop("count", "tokens")
        if template == "moe_linear":
            tile = experts_tile(shape, self.limits.num_sms, self.limits.shared_bytes)
            source = instance(template, pdl=self.pdl, **shape, **tile)
            return self._info(source, grid(source, Sizes()), tile)
        if template == "moe_route":
            source = instance(template, pdl=self.pdl, **shape)
            return self._info(source, (count,), {})
        if template in ("all_reduce", "all_gather"):
            return self._among_ranks(template, shape)
        if template in ("rms_norm", "gather", "glu", "pointwise", "row_norm", "moe_sum"):
            source = instance(template, pdl=self.pdl, **shape)
            return self._info(source, (count, grid(source, Sizes())[1]), {})
        if template == "rope_table":
            tokens = shape.pop("tokens")
            source = instance(template, pdl=self.pdl, **shape)
            return self._info(source, grid(source, Sizes(tokens=tokens)), {})
        if template.startswith("sample_"):
            source = instance(template, pdl=self.pdl, **shape)
            parts = grid(source, Sizes())[1]
            return self._info(source, (count, parts), {"parts": parts})
        source = instance(template, pdl=self.pdl, **shape)
        return self._info(source, grid(source, Sizes()), {})

    def _among_ranks(self, template: str, shape: dict[str, Any]) -> KernelInfo:
        """A collective over at most `rows` rows; in steps of any size few programs take them."""
        rows, many = shape.pop("rows"), shape.pop("many", False)
        if template == "all_gather":
            source = instance(template, pdl=self.pdl, **shape)
            items = rows * source.constants["CHUNKS"]
            return self._info(source, (min(items, MOST_PROGRAMS),), {})
        items = rows * shape.get("blocks", 1)
        many = many or items > MOST_PROGRAMS
        source = instance(template, pdl=self.pdl, many=many, **shape)
        items = -(-items * shape["columns"] // source.constants["H"])
        programs = min(items, self.limits.num_sms if many else MOST_PROGRAMS)
        return self._info(source, (programs,), {"blocks": shape.get("blocks", 1)})

    def _info(
        self,
        source: KernelSource,
        blocks: Grid,
        tile: dict[str, int],
        partials: int = 0,
        counters: int = 0,
    ) -> KernelInfo:
        key = source.key()
        self.sources[key] = source
        while len(blocks) > 1 and blocks[-1] == 1:
            blocks = blocks[:-1]
        return KernelInfo(
            key=key,
            template=source.template,
            arguments=source.arguments,
            grid=blocks,
            tile=dict(tile),
            dependent=source.pdl,
            num_partials=partials,
            num_counters=counters,
        )


def generate(
    provider: CudaProvider, keys: Sequence[str], folder: Path, progress: Callable[[float], None]
) -> None:
    """Compile the kernels of a plan into the artifact folder. Raises CompileError."""
    sources = [provider.sources[key] for key in sorted(set(keys))]
    compile_kernels(sources, provider.limits.sm, folder, progress)
