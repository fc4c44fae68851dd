"""The executor of CUDA targets: launches bound once, decode steps replayed as CUDA graphs.

In: a plan, its kernels and placed weights. Out: logits or sampled ids, on the device. Every buffer
lies where the plan says; sizes, order, grids and arguments all come from the plan.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from sitsc.core.artifact import Artifact
from sitsc.core.errors import ArtifactError, CapacityError
from sitsc.core.kernel_meta import kernel_folder, read_kernel_meta
from sitsc.core.plan import Argument, Launch, Plan, Regime
from sitsc.core.serving.batch import StepBatch
from sitsc.core.weights import DTYPES
from sitsc.runtime import cuda_driver
from sitsc.runtime.cuda_driver import DRIVER_CARVEOUT
from sitsc.runtime.launcher import KernelImage

_CARVEOUT, _FEW_TOKENS = 100, 2
_MOST_KEPT = 16
Step = Callable[[int], None]


class CudaMemory:
    """The allocations of a plan on one device: weights, arena and KV pools."""

    def __init__(self, plan: Plan, weights: dict[str, Tensor]) -> None:
        self.plan, self.weights = plan, weights
        self.arena = torch.zeros(plan.memory.arena_bytes, dtype=torch.uint8, device="cuda")
        self.pools = {
            g.name: torch.zeros(
                plan.memory.kv_pages * g.page_bytes, dtype=torch.uint8, device="cuda"
            )
            for g in plan.kv
        }
        self._buffers = {b.name: b for b in plan.memory.arena}

    def view(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The first elements of an arena buffer."""
        buffer = self._buffers[name]
        dtype = DTYPES[buffer.dtype]
        nbytes = math.prod(shape) * dtype.itemsize
        return self.arena[buffer.offset : buffer.offset + nbytes].view(dtype).view(shape)

    def at(self, argument: Argument, shape: tuple[int, ...]) -> Tensor:
        """An arena argument as a tensor of `shape`."""
        dtype = DTYPES[argument.dtype]
        nbytes = math.prod(shape) * dtype.itemsize
        return self.arena[argument.offset : argument.offset + nbytes].view(dtype).view(shape)

    def address(self, argument: Argument, layer: int | None, place: int) -> int:
        """The device address that an argument means in one layer of its group."""
        moved = argument.offset + place * argument.layer_stride
        if argument.source == "arena":
            return self.arena.data_ptr() + moved
        if argument.source == "kv":
            return self.pools[argument.buffer].data_ptr() + moved
        return self.weights[weight_name(argument, layer)].data_ptr() + moved


def weight_name(argument: Argument, layer: int | None) -> str:
    """The weight of an argument in a layer."""
    return argument.buffer if layer is None else argument.buffer.replace("{layer}", str(layer))


def carveout(regime: Regime) -> int:
    """Percent of on-chip memory that the kernels of a regime ask for as shared memory.

    All of it for tensor-core tiles; the driver's choice for one or two tokens, where kernels
    wait in registers for their predecessor and want the cache.
    """
    small = regime.kind == "decode" and regime.sizes["tokens"] <= _FEW_TOKENS
    return DRIVER_CARVEOUT if small else _CARVEOUT


class CudaExecutor:
    """Executes the plan of an artifact on one GPU."""

    def __init__(self, artifact: Artifact, weights: dict[str, Tensor]) -> None:
        self.plan = artifact.plan
        self.device = cuda_driver.open_device(0)
        self.memory = CudaMemory(self.plan, weights)
        self.images = self._load_kernels(artifact)
        self.stream = torch.cuda.Stream()
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}
        self._steps: dict[str, list[Step]] = {}
        self._kept: OrderedDict[tuple[str, tuple[int, ...]], list[Step]] = OrderedDict()
        self._logits = {r.name: self._logits_of(r) for r in self.plan.regimes}
        self._width = self.memory._buffers["block_table"].shape[1]

    def _load_kernels(self, artifact: Artifact) -> dict[tuple[str, int], KernelImage]:
        sm = int(self.plan.target.isa.removeprefix("sm_"))
        images = {}
        for regime in self.plan.regimes:
            for group in regime.groups:
                for launch in group.launches:
                    key = (launch.kernel, carveout(regime))
                    if launch.kind != "kernel" or key in images:
                        continue
                    stem = f"{kernel_folder(sm)}/{launch.kernel}"
                    cubin = artifact.file(f"{stem}.cubin").read_bytes()
                    meta = read_kernel_meta(artifact.file(f"{stem}.json").read_text(), stem)
                    images[key] = KernelImage.load(cubin, meta, self.device, key[1])
        return images

    # --- binding --------------------------------------------------------------------------------

    def steps(self, regime: Regime, sizes: dict[str, int]) -> Iterator[Step]:
        """Everything that a regime launches, bound at these sizes, in order, one at a time."""
        for group in regime.groups:
            for layer in group.layers or (None,):
                place = 0 if layer is None else self._place(layer)
                for launch in group.launches:
                    yield self._bind(launch, layer, place, sizes, carveout(regime))

    def _bound_steps(self, regime: Regime, sizes: dict[str, int]) -> list[Step]:
        """The steps of a regime at these sizes; those of the last few sizes are kept."""
        key = (regime.name, tuple(sizes.values()))
        if key not in self._kept:
            self._kept[key] = list(self.steps(regime, sizes))
            if len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        return self._kept[key]

    def _place(self, layer: int) -> int:
        """The place of a layer in its KV pool."""
        return next(g.layers.index(layer) for g in self.plan.kv if layer in g.layers)

    def _bind(
        self,
        launch: Launch,
        layer: int | None,
        place: int,
        sizes: dict[str, int],
        share: int = _CARVEOUT,
    ) -> Step:
        if launch.kind == "library":
            return self._library(launch, layer, sizes)
        values: dict[str, Any] = {}
        for argument in launch.arguments:
            if argument.source == "size":
                values[argument.name] = sizes[argument.buffer]
            elif argument.source == "scalar":
                whole = argument.dtype.startswith("i")
                assert argument.value is not None
                values[argument.name] = int(argument.value) if whole else argument.value
            else:
                values[argument.name] = self.memory.address(argument, layer, place)
        image = self.images[launch.kernel, share]
        grid = [sizes[g] if isinstance(g, str) else g for g in launch.grid]
        return image.bind(grid, values, dependent=launch.dependent).launch

    def _library(self, launch: Launch, layer: int | None, sizes: dict[str, int]) -> Step:
        x, w, y = launch.arguments
        shape = {
            a.name: tuple(sizes[d] if isinstance(d, str) else d for d in a.shape) for a in (x, w, y)
        }
        left, out = self.memory.at(x, shape["x"]), self.memory.at(y, shape["y"])
        weight = self.memory.weights[weight_name(w, layer)].t()
        add, wide = launch.kernel == "addmm", out.dtype != left.dtype

        def multiply(stream: int) -> None:
            """On torch's current stream, which the caller has set to `stream`."""
            del stream
            if add:
                torch.addmm(out, left, weight, out=out)
            elif wide:  # logits: bfloat16 operands, fp32 result
                torch.ops.aten.mm.dtype_out(left, weight, torch.float32, out=out)
            else:
                torch.mm(left, weight, out=out)

        return multiply

    def _logits_of(self, regime: Regime) -> Argument | None:
        """Where a regime leaves its logits: the last argument that is named so."""
        last: Argument | None = None
        for group in regime.groups:
            for launch in group.launches:
                for argument in launch.arguments:
                    if argument.name in ("y_ptr", "y") and argument.dtype == "float32":
                        last = argument
        return last

    # --- decode ---------------------------------------------------------------------------------

    def capture(self, names: list[str] | None = None) -> None:
        """Capture the CUDA graph of every decode regime (or those named)."""
        for regime in self.plan.regimes:
            if regime.kind != "decode" or (names is not None and regime.name not in names):
                continue
            sizes = regime.sizes | {"sequence_pages": self._width}
            steps = self._steps[regime.name] = list(self.steps(regime, sizes))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(self.stream):
                for step in steps:
                    step(self.stream.cuda_stream)
                self.stream.synchronize()
                graph.capture_begin()
                try:
                    for step in steps:
                        step(self.stream.cuda_stream)
                finally:
                    graph.capture_end()
            self._graphs[regime.name] = graph

    def decode_regime(self, sequences: int) -> Regime:
        """The smallest decode regime that holds this many sequences."""
        for regime in self.plan.regimes:
            if regime.kind == "decode" and sequences <= regime.sizes["sequences"]:
                return regime
        raise CapacityError(f"{sequences} sequences, the plan holds {self.plan.schedule.max_batch}")

    def set_decode(
        self, token_ids: list[int], context_lens: list[int], tables: list[list[int]]
    ) -> str:
        """Write the inputs of a run of decode steps; rows past them are idle. The regime's name."""
        regime = self.decode_regime(len(token_ids))
        count = regime.sizes["sequences"]
        idle = count - len(token_ids)
        lens = [*context_lens, *[-1] * idle]
        self._write("token_ids", [*token_ids, *[0] * idle])
        self._write("position_ids", [max(0, n) for n in lens])
        self._write("context_lens", lens)
        rows = [row + [0] * (self._width - len(row)) for row in tables]
        self._write(
            "block_table", [page for row in rows for page in row] + [0] * (idle * self._width)
        )
        return regime.name

    def replay(self, name: str) -> None:
        """One decode step on the stream; the next needs nothing from the host."""
        with torch.cuda.stream(self.stream):
            self._graphs[name].replay()

    def sampled(self, count: int) -> Tensor:
        """The ids that the last decode step sampled, on the device."""
        return self.memory.view("sampled_ids", (count,))

    def logits(self, regime: Regime, rows: int) -> Tensor:
        """The logits that the last step of a regime left, [rows, width] on the device."""
        argument = self._logits[regime.name]
        if argument is None:
            raise ArtifactError("the plan names no logits")
        return self.memory.at(argument, (rows, self.plan.tokens.logits_width))

    # --- prefill --------------------------------------------------------------------------------

    def prefill(self, batch: StepBatch) -> tuple[Regime, int]:
        """Launch a ragged step; its regime and the number of rows with logits."""
        tokens, sequences = len(batch.token_ids), len(batch.context_lens)
        regime = self._prefill_regime(tokens, sequences)
        positions: list[int] = []
        for index, before in enumerate(batch.context_lens):
            count = batch.query_start[index + 1] - batch.query_start[index]
            positions.extend(range(before, before + count))
        rows = [batch.query_start[i + 1] - 1 for i in range(sequences) if batch.sample[i]]
        self._write("token_ids", batch.token_ids)
        self._write("position_ids", positions)
        self._write("logit_rows", rows or [tokens - 1])
        self._write("query_start", batch.query_start)
        self._write("context_lens", batch.context_lens)
        tables = [row + [0] * (self._width - len(row)) for row in batch.block_tables]
        self._write("block_table", [page for row in tables for page in row])
        sizes = {"tokens": tokens, "sequences": sequences, "rows": max(1, len(rows))}
        sizes["sequence_pages"] = self._width
        with torch.cuda.stream(self.stream):
            for step in self._bound_steps(regime, sizes):
                step(self.stream.cuda_stream)
        return regime, max(1, len(rows))

    def _prefill_regime(self, tokens: int, sequences: int) -> Regime:
        for regime in self.plan.regimes:
            fits = tokens <= regime.sizes["tokens"] and sequences <= regime.sizes["sequences"]
            if regime.kind == "prefill" and fits:
                return regime
        raise CapacityError(f"a step of {tokens} tokens in {sequences} sequences fits no bucket")

    def _write(self, name: str, values: list[int]) -> None:
        buffer = self.memory._buffers[name]
        host = torch.tensor(values, dtype=DTYPES[buffer.dtype])
        with torch.cuda.stream(self.stream):
            self.memory.view(name, (len(values),)).copy_(host)


def random_weights(plan: Plan, seed: int = 0) -> dict[str, Tensor]:
    """Random weights placed on the GPU, scaled so that activations stay of order one."""
    torch.manual_seed(seed)
    weights = {}
    for spec in plan.model.parameters:
        dtype = DTYPES[spec.dtype]
        if spec.role == "constant":
            raw = torch.frombuffer(bytearray(bytes.fromhex(spec.data)), dtype=dtype)
            weights[spec.name] = raw.reshape(spec.shape).cuda()
        elif len(spec.shape) == 1:
            weights[spec.name] = (1 + 0.1 * torch.randn(spec.shape, device="cuda")).to(dtype)
        else:
            value = torch.empty(spec.shape, dtype=dtype, device="cuda").normal_()
            weights[spec.name] = value.mul_(spec.shape[1] ** -0.5)
    return weights


__all__ = ["CudaExecutor", "CudaMemory", "random_weights"]
