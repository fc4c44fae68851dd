"""The executor of CUDA targets: launches bound once, decode steps replayed as CUDA graphs.

In: a plan, its kernels and placed weights; then step after step. Out: sampled ids, read after the
next step has started, or logits. Every buffer lies where the plan says; sizes, order, grids and
arguments all come from the plan.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sitsc.core.artifact import Artifact
from sitsc.core.errors import ArtifactError, CapacityError
from sitsc.core.kernel_meta import kernel_folder, read_kernel_meta
from sitsc.core.plan import DRAW_GROUP, PLACE_GROUP, Argument, LaunchGroup, Regime, greedy
from sitsc.core.serving.batch import StepBatch
from sitsc.core.serving.sampling_rows import sampling_error
from sitsc.runtime import cuda_driver
from sitsc.runtime.cuda_bound import BoundGroups, Sizes, Step
from sitsc.runtime.cuda_driver import DRIVER_CARVEOUT
from sitsc.runtime.cuda_inputs import StepInputs, Upload, Uploads
from sitsc.runtime.cuda_memory import CudaMemory
from sitsc.runtime.cuda_rows import DeviceRows
from sitsc.runtime.cuda_weights import random_weights
from sitsc.runtime.launcher import KernelImage
from sitsc.runtime.row_fields import Field, RecordedFields
from sitsc.runtime.sampler import SamplerRow
from sitsc.runtime.steps import Sampled

_CARVEOUT, _FEW_TOKENS = 100, 2
_RING = 3
_COUNTERS = ("calls", "sent", "received")  # an error is noted behind the count
_UPLOAD_BYTES = 1 << 22


def carveout(regime: Regime) -> int:
    """Percent of on-chip memory that the kernels of a regime ask for as shared memory.

    What was measured with attention's tile. Else all of it for tensor-core tiles; the driver's
    choice for one or two tokens, where kernels wait in registers and want the cache.
    """
    for group in regime.groups:
        for launch in group.launches:
            if launch.template == "attention_decode" and "carveout" in launch.tile:
                return launch.tile["carveout"]
    small = regime.kind == "decode" and regime.sizes["tokens"] <= _FEW_TOKENS
    return DRIVER_CARVEOUT if small else _CARVEOUT


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A submitted step: its ids are in `host` [rows] when `done`."""

    host: Tensor
    rows: int
    done: torch.cuda.Event


class CudaExecutor:
    """Executes the plan of an artifact on one GPU. One thread at a time."""

    num_ahead = 1

    def __init__(
        self, artifact: Artifact, weights: dict[str, Tensor], arena: Tensor | None = None
    ) -> None:
        """`arena` is what the ranks of a stage share; None: memory of its own."""
        self.plan = artifact.plan
        self.device = cuda_driver.open_device(torch.cuda.current_device())
        self.memory = CudaMemory(self.plan, weights, arena)
        self.images = self._load_kernels(artifact)
        self.stream = torch.cuda.Stream()
        self.inputs = StepInputs(self.memory)
        self.rows = DeviceRows(self.plan.schedule.max_batch, self.plan.tokens.vocab_size)
        self._uploads = Uploads(self.memory, _UPLOAD_BYTES, self.plan.parallel.pp)
        with torch.cuda.stream(self.stream), self._uploads.begin() as upload:
            self.rows.reset(upload)
        self._graphs: dict[tuple[str, bool], torch.cuda.CUDAGraph] = {}
        self._draws = False  # whether a row that the last step sampled has a temperature
        self._bound: dict[tuple[str, bool], BoundGroups] = {}
        self._places: dict[str, BoundGroups] = {}
        self._logits = {r.name: _logits_of(r) for r in self.plan.regimes}
        # Rows of the last steps by request, the last one first, as far back as tokens are unknown.
        self._sources: deque[dict[int, int]] = deque(maxlen=self.plan.parallel.pp)
        batch = self.plan.schedule.max_batch
        ring = range(_RING + self.plan.parallel.pp)
        self._host = [torch.empty(batch, dtype=torch.int64, pin_memory=True) for _ in ring]
        self._done = [torch.cuda.Event() for _ in ring]
        self._turn = 0

    def _load_kernels(self, artifact: Artifact) -> dict[tuple[str, int], KernelImage]:
        sm = int(self.plan.target.isa.removeprefix("sm_"))
        images = {}
        for regime in self.plan.regimes:
            share = carveout(regime)
            for group in regime.groups:
                for launch in group.launches:
                    key = (launch.kernel, share)
                    if launch.kind != "kernel" or key in images:
                        continue
                    stem = f"{kernel_folder(sm)}/{launch.kernel}"
                    cubin = artifact.file(f"{stem}.cubin").read_bytes()
                    meta = read_kernel_meta(artifact.file(f"{stem}.json").read_text(), stem)
                    images[key] = KernelImage.load(cubin, meta, self.device, key[1])
        return images

    # --- binding --------------------------------------------------------------------------------

    def steps(self, regime: Regime, sizes: Sizes) -> Iterator[Step]:
        """Everything that a regime launches in a step, newly bound at these sizes, in order."""
        yield from self.bind_groups(regime, _step_groups(regime, draws=True), sizes).steps

    def bind_groups(self, regime: Regime, groups: list[LaunchGroup], sizes: Sizes) -> BoundGroups:
        """Some groups of a regime, newly bound at these sizes."""
        share = carveout(regime)
        return BoundGroups(groups, lambda key: self.images[key, share], self.memory, sizes)

    def full_sizes(self, regime: Regime) -> Sizes:
        """The sizes of a regime's bucket, with the whole width of the block table."""
        return regime.sizes | {"sequence_pages": self.inputs.width}

    def _bind(self, regime: Regime, draws: bool) -> BoundGroups:
        """The steps of a regime, bound once, with or without the launches that draw."""
        key = regime.name, draws and any(group.name == DRAW_GROUP for group in regime.groups)
        if key not in self._bound:
            groups = _step_groups(regime, draws=draws)
            self._bound[key] = self.bind_groups(regime, groups, self.full_sizes(regime))
        return self._bound[key]

    def _place(self, regime: Regime, count: int) -> None:
        """Fetch tokens that the last step sampled, where the host does not know them."""
        if count:
            if regime.name not in self._places:
                groups = [group for group in regime.groups if group.name == PLACE_GROUP]
                self._places[regime.name] = self.bind_groups(
                    regime, groups, self.full_sizes(regime)
                )
            bound = self._places[regime.name]
            bound.resize(self.full_sizes(regime) | {"sequences": count})
            bound.run(self.stream.cuda_stream)

    def capture(self, names: list[str] | None = None) -> None:
        """Capture the CUDA graphs of every decode regime and bind the others (or those named).

        A bucket has two: one for steps in which a row draws, one that leaves those launches out.
        """
        pool = None
        for regime in sorted(self.plan.regimes, key=lambda r: -r.sizes["tokens"]):
            if names is not None and regime.name not in names:
                continue
            greedy, whole = self._bind(regime, False), self._bind(regime, True)
            if regime.kind != "decode":
                continue
            with torch.cuda.stream(self.stream):
                whole.run(self.stream.cuda_stream)
                self.stream.synchronize()
            graph = self._captured(whole, pool)
            pool = graph.pool()
            self._graphs[regime.name, True] = self._graphs[regime.name, False] = graph
            if greedy is not whole:
                self._graphs[regime.name, False] = self._captured(greedy, pool)
        self.inputs.forget_layout()

    def _captured(self, bound: BoundGroups, pool: Any) -> torch.cuda.CUDAGraph:
        """The graph of bound groups, none of which runs now."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=pool)
            try:
                bound.run(self.stream.cuda_stream)
            finally:
                graph.capture_end()
        return graph

    def lost_exchanges(self) -> list[str]:
        """Counters of kernels between ranks that have waited in vain; waits for the stream."""
        self.stream.synchronize()
        names = [b.name for b in self.plan.memory.arena if b.name.rpartition("/")[2] in _COUNTERS]
        return [name for name in names if int(self.memory.view(name, (2,))[1])]

    # --- steps of the engine --------------------------------------------------------------------

    def submit(self, batch: StepBatch, rows: Sequence[SamplerRow]) -> StepInFlight:
        """Start a step and the copy of its sampled ids. Raises CapacityError."""
        with torch.cuda.stream(self.stream), self._uploads.begin() as upload:
            self.write_rows(upload, batch, rows)
            return self._start(upload, batch)

    def write_rows(
        self, upload: "Upload | RecordedFields", batch: StepBatch, rows: Sequence[SamplerRow]
    ) -> None:
        """The fields of the sampled rows of a step, where they changed."""
        wanted = len(batch.sampled_ids)
        if batch.regime == "decode":
            wanted = self.decode_regime(wanted).sizes["sequences"]
        self.rows.write(upload, batch, rows, max(1, wanted))
        self._draws = self.rows.draws

    def follow(
        self, batch: StepBatch, fields: Iterable[Field] = (), *, alone: bool = False
    ) -> StepInFlight:
        """Start a step that rank 0 scheduled, with the fields of rows that it tells.

        `alone`: the last step left no tokens here that this one could begin with.
        """
        with torch.cuda.stream(self.stream), self._uploads.begin() as upload:
            if alone:
                self.inputs.forget_layout()
            for name, values, start in fields:
                upload.put(name, values, start)
                if name == "temperature":
                    self._draws = bool(values.any())
            return self._start(upload, batch)

    def _start(self, upload: Upload, batch: StepBatch) -> StepInFlight:
        """Launch a step whose rows have their fields, and the copy of its sampled ids."""
        if batch.regime == "decode":
            self._replay(upload, batch)
        else:
            self._prefill(upload, batch, _sampled_rows(batch))
        rows = {request: row for row, request in enumerate(batch.sampled_ids)}
        self._sources.appendleft(rows)
        return self._read_back(len(batch.sampled_ids))

    def collect(self, step: StepInFlight) -> Sampled:
        """Wait for a step; its tokens, or errors in their place."""
        if not step.rows:
            return []
        step.done.synchronize()
        return [sampling_error(id) or id for id in step.host[: step.rows].tolist()]

    def forget(self, request_id: int) -> None:
        """The request has ended."""
        self.rows.forget(request_id)

    def execute(self, batch: StepBatch, rows: list[int] | None = None) -> Tensor:
        """Logits [sampled rows, width] float32 on the CPU; `rows` asks for others of the step."""
        wanted = rows or _sampled_rows(batch)
        with torch.cuda.stream(self.stream), self._uploads.begin() as upload:
            regime = self._prefill(upload, batch, wanted)
            return self.logits(regime, len(wanted)).cpu()

    def _replay(self, upload: Upload, batch: StepBatch) -> None:
        regime = self.decode_regime(len(batch.request_ids))
        bucket = regime.sizes["sequences"]
        self._place(regime, self.inputs.decode(upload, batch, bucket, self._where()))
        self._graphs[regime.name, self._draws].replay()

    def _prefill(self, upload: Upload, batch: StepBatch, rows: list[int]) -> Regime:
        regime = self._prefill_regime(len(batch.token_ids), len(batch.request_ids))
        sizes, placed = self.inputs.prefill(
            upload, batch, rows or [len(batch.token_ids) - 1], self._where()
        )
        self._place(regime, placed)
        bound = self._bind(regime, self._draws)
        bound.resize(regime.sizes | sizes)
        bound.run(self.stream.cuda_stream)
        return regime

    def _where(self) -> dict[int, int]:
        """Where `place` finds a request's last token: its row, and `most` for every step since.

        With one stage there is no step since.
        """
        most, found = self.plan.schedule.max_batch, {}
        for since, rows in reversed(list(enumerate(self._sources))):
            found |= {request: since * most + row for request, row in rows.items()}
        return found

    def _read_back(self, rows: int) -> StepInFlight:
        host, done = self._host[self._turn], self._done[self._turn]
        self._turn = (self._turn + 1) % len(self._host)
        if rows:
            host[:rows].copy_(self.sampled(rows), non_blocking=True)
            done.record()
        return StepInFlight(host, rows, done)

    def decode_regime(self, sequences: int) -> Regime:
        """The smallest decode regime that holds this many sequences."""
        for regime in self.plan.regimes:
            if regime.kind == "decode" and sequences <= regime.sizes["sequences"]:
                return regime
        raise CapacityError(f"{sequences} sequences, the plan holds {self.plan.schedule.max_batch}")

    def _prefill_regime(self, tokens: int, sequences: int) -> Regime:
        for regime in self.plan.regimes:
            fits = tokens <= regime.sizes["tokens"] and sequences <= regime.sizes["sequences"]
            if regime.kind == "prefill" and fits:
                return regime
        raise CapacityError(f"a step of {tokens} tokens in {sequences} sequences fits no bucket")

    # --- single steps, for measurements and checks -----------------------------------------------

    def set_decode(
        self, token_ids: list[int], context_lens: list[int], tables: list[list[int]]
    ) -> str:
        """Write the inputs of a run of decode steps; rows past them are idle. The regime's name."""
        regime, count = self.decode_regime(len(token_ids)), len(token_ids)
        ids, starts = tuple(range(count)), list(range(count + 1))
        batch = StepBatch("decode", ids, token_ids, starts, context_lens, tables, [True] * count)
        with torch.cuda.stream(self.stream), self._uploads.begin() as upload:
            self.inputs.forget_layout()
            self.inputs.decode(upload, batch, regime.sizes["sequences"], {})
            self.inputs.forget_layout()
        return regime.name

    def replay(self, name: str, *, draws: bool = False) -> None:
        """One decode step on the stream; the next needs nothing from the host.

        `draws`: with the launches that draw, which greedy rows pass.
        """
        with torch.cuda.stream(self.stream):
            self._graphs[name, draws].replay()

    def sampled(self, count: int) -> Tensor:
        """The ids that the last step sampled, on the device."""
        return self.memory.view("sampled_ids", (count,))

    def logits(self, regime: Regime, rows: int) -> Tensor:
        """The logits that the last step of a regime left, [rows, width] on the device."""
        argument = self._logits[regime.name]
        if argument is None:
            raise ArtifactError("the plan names no logits")
        return self.memory.at(argument, (rows, self.plan.tokens.logits_width))

    def prefill(self, batch: StepBatch) -> tuple[Regime, int]:
        """Launch a ragged step; its regime and the number of rows with logits."""
        rows = _sampled_rows(batch)
        with torch.cuda.stream(self.stream), self._uploads.begin() as upload:
            regime = self._prefill(upload, batch, rows)
        return regime, max(1, len(rows))


def _step_groups(regime: Regime, *, draws: bool) -> list[LaunchGroup]:
    """What every step of a regime launches, and with `draws` those in which a row draws."""
    groups = regime.groups if draws else greedy(regime.groups)
    return [group for group in groups if group.name != PLACE_GROUP]


def _sampled_rows(batch: StepBatch) -> list[int]:
    """The token of each sampled sequence whose logits are wanted."""
    ends = batch.query_start[1:]
    return [end - 1 for end, wanted in zip(ends, batch.sample, strict=True) if wanted]


def _logits_of(regime: Regime) -> Argument | None:
    """Where a regime leaves its logits: what its sampling reads."""
    for group in reversed(regime.groups):
        for launch in group.launches:
            for argument in launch.arguments:
                if argument.name == "logits_ptr":
                    return argument
    return None


__all__ = ["CudaExecutor", "CudaMemory", "carveout", "random_weights"]
