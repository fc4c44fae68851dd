"""A CUDA plan executed on the CPU: arena, pools and weights in memory, kernels in the interpreter.

In: a plan, its kernel sources and weights; then steps. Out: the logits of each step. Runs in the
process of `Interpreter`, so that kernels see one memory: what they write over is seen by others.
Places that no step input owns are filled with NaN before every step.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sitsc.codegen.triton_source import KernelSource, import_text
from sitsc.core.layer_names import name_in_layer
from sitsc.core.plan import STEP_GROUPS, Argument, Launch, Plan, Regime
from sitsc.core.weights import DTYPES


@dataclass(frozen=True)
class PlanStep:
    """The inputs of one step; a decode step has one token a sequence, idle rows have length -1."""

    regime: str
    token_ids: list[int]
    position_ids: list[int]
    query_start: list[int]
    context_lens: list[int]
    block_table: list[list[int]]
    logit_rows: list[int]


def run_plan(
    plan: Plan, sources: dict[str, KernelSource], weights: dict[str, Tensor], steps: list[PlanStep]
) -> list[Tensor]:
    """Logits [rows, width] of each step, in order; only in an interpreting process."""
    machine = Machine(plan, sources, weights)
    return [machine.step(step) for step in steps]


class Machine:
    """One GPU: its arena, pools and weights."""

    def __init__(
        self, plan: Plan, sources: dict[str, KernelSource], weights: dict[str, Tensor]
    ) -> None:
        self.plan, self.sources, self.weights = plan, sources, weights
        self.arena = torch.zeros(plan.memory.arena_bytes, dtype=torch.uint8)
        self.pools = {
            group.name: torch.full((plan.memory.kv_pages * group.page_bytes,), 0xFF).to(torch.uint8)
            for group in plan.kv
        }
        self.regimes = {regime.name: regime for regime in plan.regimes}
        self.buffers = {buffer.name: buffer for buffer in plan.memory.arena}
        self.counters = [b for b in plan.memory.arena if b.name.endswith("counters")]

    def step(self, step: PlanStep) -> Tensor:
        """One step of a regime, every launch in order."""
        sizes = self.begin(step)
        for launch, layer in self.launches(step.regime):
            self.launch(launch, layer, sizes)
        return self.logits(step)

    def begin(self, step: PlanStep) -> dict[str, int]:
        """Write the inputs of a step, and nothing where nothing is known; the sizes of the step."""
        regime = self.regimes[step.regime]
        self._poison()
        width = self.buffers["block_table"].shape[1]
        table = [row + [0] * (width - len(row)) for row in step.block_table]
        for name in ("token_ids", "position_ids", "query_start", "context_lens", "logit_rows"):
            self._write(name, getattr(step, name))
        self._write("block_table", [page for row in table for page in row])
        sizes = dict(regime.sizes)
        if regime.kind == "prefill":
            sizes |= {"tokens": len(step.token_ids), "sequences": len(step.context_lens)}
            sizes["rows"] = len(step.logit_rows)
        return sizes | {"sequence_pages": width}

    def launches(self, regime: str) -> list[tuple[Launch, int | None]]:
        """What a regime launches in the model, each with its layer, in order."""
        return [
            (launch, layer)
            for group in self.regimes[regime].groups
            if group.name not in STEP_GROUPS
            for layer in group.layers or (None,)
            for launch in group.launches
        ]

    def logits(self, step: PlanStep) -> Tensor:
        """What the step has left for sampling [rows, width]."""
        regime = self.regimes[step.regime]
        sample = next(group for group in regime.groups if group.name == "sample")
        logits = next(a for a in sample.launches[0].arguments if a.name == "logits_ptr")
        count = len(step.logit_rows) if regime.kind == "prefill" else len(step.token_ids)
        return self._tensor(logits, (count, self.plan.tokens.logits_width)).clone()

    def part(self, name: str) -> Tensor:
        """The bytes of a buffer."""
        buffer = self.buffers[name]
        return self.arena[buffer.offset : buffer.offset + buffer.bytes]

    def _poison(self) -> None:
        """Not-a-number everywhere but in the step inputs and the counters, which are zero."""
        inside = tuple(f"{name}/" for name in self.regimes)
        kept = [b for b in self.plan.memory.arena if not b.name.startswith(inside)]
        low = max(b.offset + b.bytes for b in kept)
        self.arena[low:] = 0xFF
        for buffer in kept:
            if buffer.name in ("partials", "sums", "scaled", "squares"):
                self.part(buffer.name).fill_(0xFF)
        for buffer in self.counters:
            assert not self.part(buffer.name).any(), f"{buffer.name} is not zero again"

    def _write(self, name: str, values: list[int]) -> None:
        buffer = self.buffers[name]
        data = torch.tensor(values, dtype=DTYPES[buffer.dtype]).view(torch.uint8)
        self.arena[buffer.offset : buffer.offset + len(data)] = data

    def _tensor(self, argument: Argument, shape: tuple[int, ...]) -> Tensor:
        dtype = DTYPES[argument.dtype]
        end = argument.offset + math.prod(shape) * dtype.itemsize
        return self.arena[argument.offset : end].view(dtype).view(shape)

    def _place(self, layer: int | None) -> int:
        """The place of a layer in its pool."""
        found = (g.layers.index(layer) for g in self.plan.kv if layer in g.layers)
        return 0 if layer is None else next(found)

    def _memory(self, argument: Argument, layer: int | None) -> Tensor:
        """All memory from the start of an argument on."""
        at = argument.offset
        if argument.source == "arena":
            part = self.arena[at : at + (len(self.arena) - at) // 8 * 8]
            return part.view(DTYPES[argument.dtype])
        if argument.source == "kv":
            pool = self.pools[argument.buffer]
            return pool[at + self._place(layer) * argument.layer_stride :].view(torch.bfloat16)
        return self._weight(argument, layer).reshape(-1)[at // DTYPES[argument.dtype].itemsize :]

    def _weight(self, argument: Argument, layer: int | None) -> Tensor:
        return self.weights[name_in_layer(argument.buffer, layer)]

    def launch(self, launch: Launch, layer: int | None, sizes: dict[str, int]) -> None:
        """A kernel in the interpreter, or the library's product by torch."""
        if launch.kind == "library":
            self._library(launch, layer, sizes)
            return
        source, values = self.sources[launch.kernel], self.values(launch, layer, sizes)
        grid = [sizes[size] if isinstance(size, str) else size for size in launch.grid]
        kernel = getattr(import_text(source.text), source.name)
        kernel[(*grid, 1, 1)[:3]](*values.values(), **source.constants)

    def values(self, launch: Launch, layer: int | None, sizes: dict[str, int]) -> dict[str, Any]:
        """The arguments of a kernel by name: numbers, and all memory from where one points."""
        source, values = self.sources[launch.kernel], {}
        for (name, _), argument in zip(source.arguments, launch.arguments, strict=True):
            assert name == argument.name
            if argument.source == "size":
                values[name] = sizes[argument.buffer]
            elif argument.source == "scalar":
                assert argument.value is not None
                whole = argument.dtype.startswith("i")
                values[name] = int(argument.value) if whole else argument.value
            else:
                values[name] = self._memory(argument, layer)
        return values

    def _library(self, launch: Launch, layer: int | None, sizes: dict[str, int]) -> None:
        x, w, y = (
            tuple(sizes[n] if isinstance(n, str) else n for n in a.shape) for a in launch.arguments
        )
        left, out = self._tensor(launch.arguments[0], x), self._tensor(launch.arguments[2], y)
        weight = self._weight(launch.arguments[1], layer)
        assert tuple(weight.shape) == w
        right = weight if launch.kernel == "mm_kn" else weight.t()
        product = left.float() @ right.float()
        out.copy_(out.float() + product if launch.kernel == "addmm" else product)


def regime_of(plan: Plan, kind: str, tokens: int) -> Regime:
    """The smallest regime of a kind that holds this many tokens."""
    fitting = [r for r in plan.regimes if r.kind == kind and r.sizes["tokens"] >= tokens]
    return min(fitting, key=lambda r: r.sizes["tokens"])
