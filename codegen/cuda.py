"""Everything generated for a CUDA target: kernel instances for the planner, then cubins.

In: shapes and step sizes that the planner asks for. Out: `KernelInfo` for the plan and, at the
end, every kernel compiled without a GPU. Tiles come from the target's table or its rule.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sitsc.codegen.aot import compile_kernels
from sitsc.codegen.cuda_attention import Heads
from sitsc.codegen.cuda_linear import Linear, workspace
from sitsc.codegen.cuda_templates import Sizes, grid, instance
from sitsc.codegen.triton_source import KernelSource
from sitsc.core.hardware import CudaLimits
from sitsc.core.kernels import KernelInfo
from sitsc.core.tiles import choose_linear, load_entries

_DEPENDENT_FROM = 90
_MAX_SPLITS = 32
Grid = tuple[int | str, ...]


class CudaProvider:
    """Makes kernel instances for one target and remembers their sources."""

    def __init__(self, target: str, limits: CudaLimits) -> None:
        self.limits = limits
        self.entries = load_entries(target)
        self.pdl = limits.sm >= _DEPENDENT_FROM
        self.sources: dict[str, KernelSource] = {}

    def linear(self, shape: dict[str, Any], tokens: int) -> KernelInfo | None:
        """The kernel of a linear layer; None: take the library."""
        choice = choose_linear(self.entries, shape, tokens, self.limits.num_sms)
        if choice.kernel == "library":
            return None
        op, tile = Linear(**shape), dict(choice.tile)
        if choice.kernel.startswith("gemv"):
            tile["tokens"] = tokens
        if "ahead" in tile:
            tile["ahead"] = bool(tile["ahead"])
        programs = tile.pop("programs", 0)
        source = instance(choice.kernel, op, **tile, pdl=self.pdl)
        partials, counters = workspace(op, source, tokens)
        blocks = grid(source, Sizes(tokens=tokens, programs=programs))
        return self._info(source, blocks, choice.tile, partials, counters)

    def attention(self, shape: dict[str, Any], kind: str) -> tuple[KernelInfo, ...]:
        """Decode: one token a sequence, split over keys; prefill: pages, then attention."""
        heads = Heads(
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
        )
        return self._decode(heads, shape) if kind == "decode" else self._prefill(heads, shape)

    def _decode(self, heads: Heads, shape: dict[str, Any]) -> tuple[KernelInfo, ...]:
        batch = shape["sequences"]
        splits = max(1, min(_MAX_SPLITS, 2 * self.limits.num_sms // (batch * heads.kv_heads)))
        tile = {"block": 64, "stages": 3, "num_warps": 4}
        source = instance("attention_decode", heads, partial=splits > 1, pdl=self.pdl, **tile)
        rows = batch * heads.heads * splits if splits > 1 else 0
        blocks = ("sequences", heads.kv_heads, splits)
        tile["splits"] = splits
        first = self._info(source, blocks, tile, rows * heads.head_dim, rows)
        if splits == 1:
            return (first,)
        merge = instance("attention_reduce", heads, max_splits=splits, pdl=self.pdl)
        sizes = Sizes(tokens=batch, sequences=batch, rows=batch, splits=splits)
        return first, self._info(merge, grid(merge, sizes), {"splits": splits})

    def _prefill(self, heads: Heads, shape: dict[str, Any]) -> tuple[KernelInfo, ...]:
        write = instance("kv_write", heads, pdl=self.pdl)
        tile = {"block_m": 128, "block_n": 64, "stages": 3, "num_warps": 8}
        attend = instance("attention_prefill", heads, pdl=self.pdl, **tile)
        sizes = Sizes(tokens=shape["tokens"], sequences=shape["sequences"])
        return (
            self._info(write, ("tokens",), {}),
            self._info(attend, grid(attend, sizes), tile),
        )

    def make(self, template: str, **shape: Any) -> KernelInfo:
        """A kernel of any other template; `count` names the size that its rows are."""
        count = shape.pop("count", "tokens")
        if template == "rms_norm":
            source = instance(template, pdl=self.pdl, **shape)
            return self._info(source, (count,), {})
        if template in ("gather", "glu", "pointwise", "row_norm"):
            source = instance(template, pdl=self.pdl, **shape)
            return self._info(source, (count, grid(source, Sizes())[1]), {})
        if template == "rope_table":
            tokens = shape.pop("tokens")
            source = instance(template, pdl=self.pdl, **shape)
            return self._info(source, grid(source, Sizes(tokens=tokens)), {})
        if template == "argmax":
            source = instance(template, pdl=self.pdl, **shape)
            return self._info(source, (count, shape["parts"]), {"parts": shape["parts"]})
        source = instance(template, pdl=self.pdl, **shape)
        return self._info(source, grid(source, Sizes()), {})

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
