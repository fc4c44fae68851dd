"""A decode step on the GPU for tuning: a few of its layers, random weights, any alternative.

In: a chain of a `TuneSet`, the choice of a case for each subject. Out: whether the step gives the
logits of another choice, and microseconds a step, as a CUDA graph with dependent launches. Layers
past the first few are left out: what counts is that each launch has its true neighbours.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sitsc.core.errors import DeviceError
from sitsc.core.kernel_meta import kernel_folder, read_kernel_meta
from sitsc.core.layer_names import name_in_layer
from sitsc.core.plan import Argument, Launch
from sitsc.core.tuning import TuneCase, TuneChain, TuneSet, contexts
from sitsc.core.weights import DTYPES, WeightSpec
from sitsc.runtime.cuda_driver import Device
from sitsc.runtime.kernel_parameters import TensorMap
from sitsc.runtime.launcher import KernelImage

Step = Callable[[int], None]
Choice = dict[int, TuneCase]
LAYERS = 8  # enough that one does not find its weights in the cache
_INTEGERS = {"token_ids": "int64", "position_ids": "int64", "logit_rows": "int64"}
_OF_RANKS = ("tp_rank", "peers", "calls", "pads")
_INTEGERS |= {"block_table": "int32", "query_start": "int32", "context_lens": "int32"}


def layers_of(chain: TuneChain) -> list[tuple[int, ...]]:
    """The layers of each group that are run."""
    return [group.layers[:LAYERS] for group in chain.groups]


class TuneMemory:
    """Random weights of the layers that are run, KV pools and kernels of a tune set."""

    def __init__(self, folder: Path, made: TuneSet, device: Device) -> None:
        self._folder, self._device, self.made = folder / kernel_folder(made.sm), device, made
        torch.manual_seed(0)
        wanted = {name for chain in made.chains for name in _weight_names(chain)}
        self.weights = {s.name: _random(s) for s in made.parameters if s.name in wanted}
        self.pools: dict[str, Tensor] = {}
        run = {i for chain in made.chains for part in layers_of(chain) for i in part}
        self.layers = {g.name: sorted(run & set(g.layers)) for g in made.kv}
        for group in made.kv:
            nbytes = made.kv_pages * group.page_bytes
            count = nbytes // len(group.layers) * len(self.layers[group.name]) // 2
            pool = torch.empty(count, dtype=torch.bfloat16, device="cuda").normal_()
            self.pools[group.name] = pool
        self._images: dict[tuple[str, int], KernelImage] = {}

    def image(self, key: str, carveout: int) -> KernelImage:
        """The kernel, loaded once for each carve-out."""
        if (key, carveout) not in self._images:
            path = self._folder / f"{key}.cubin"
            meta = read_kernel_meta(path.with_suffix(".json").read_text(), path.name)
            image = KernelImage.load(path.read_bytes(), meta, self._device, carveout)
            self._images[key, carveout] = image
        return self._images[key, carveout]


class StepChain:
    """The step of one token count: its buffers, inputs and bound launches."""

    def __init__(self, memory: TuneMemory, chain: TuneChain, carveout: int) -> None:
        self.memory, self.chain, self.carveout = memory, chain, carveout
        self.buffers = {
            name: torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
            for name, nbytes in chain.buffers.items()
        }
        self.stream = torch.cuda.Stream()
        self._bound: dict[tuple[int, str, int | None, int], list[Step]] = {}
        self._subject_at = {
            place: case.subject
            for case in chain.cases
            for place in case.launches
            if place not in chain.fixed
        }
        self._inputs()
        self._alone()

    def _alone(self) -> None:
        """A step of several ranks runs without the others: all of them are this one.

        What it sends it finds itself; links between GPUs are not measured.
        """
        if "peers" not in self.buffers:
            return
        ranks = len(self.buffers["peers"]) // 8 - 2
        slot_bytes = len(self.buffers["slots"]) // (2 * (ranks - 1)) // 16 * 16
        peers = torch.tensor([0] * ranks + [0, slot_bytes], dtype=torch.int64)
        self.buffers["peers"].view(torch.int64).copy_(peers)
        self.buffers["slots"].fill_(255)
        self.buffers["pads"].view(torch.int32).fill_(1 << 30)

    def _inputs(self) -> None:
        """Tokens, scattered pages and the shortest context."""
        count, page = self.chain.tokens, self.memory.made.kv[0].page_tokens
        self.width = max(-(-length // page) + 1 for length in contexts(count))
        pages = torch.randperm(self.memory.made.kv_pages)[: count * self.width]
        values = {
            "token_ids": torch.arange(count) + 100,
            "position_ids": torch.zeros(count),
            "logit_rows": torch.arange(count),
            "block_table": pages.reshape(count, self.width),
            "query_start": torch.arange(count + 1),
            "context_lens": torch.zeros(count),
        }
        for name, value in values.items():
            self.buffers[name] = value.to("cuda", DTYPES[_INTEGERS[name]])
        self.set_context(contexts(count)[0])

    def set_context(self, length: int) -> None:
        """Every sequence has that many old tokens."""
        self.context = length
        self.buffers["context_lens"].fill_(length)
        self.buffers["position_ids"].fill_(length)

    # --- launches -------------------------------------------------------------------------------

    def steps(self, choice: Choice, without: int | None = None) -> list[Step]:
        """The launches of the step in order; leaves out the subject `without`."""
        found: list[Step] = []
        for group, layers in zip(self.chain.groups, layers_of(self.chain), strict=True):
            for layer in layers or (None,):
                for place in group.places:
                    subject = self._subject_at.get(place)
                    if subject is None:
                        changed = next((c for c in choice.values() if place in c.launches), None)
                        case = id(changed) if changed is not None else 0
                        launches = changed.launches if changed is not None else self.chain.fixed
                        found += self._bind(case, launches[place], place, layer)
                    elif subject != without:
                        case = choice[subject]
                        found += self._bind(id(case), case.launches[place], place, layer)
        return found

    def _bind(
        self, case: int, launches: tuple[Launch, ...], place: str, layer: int | None
    ) -> list[Step]:
        key = (case, place, layer, self.carveout)
        if key not in self._bound:
            self._bound[key] = [self._bound_launch(launch, layer) for launch in launches]
        return self._bound[key]

    def _bound_launch(self, launch: Launch, layer: int | None) -> Step:
        if launch.kind == "library":
            return self._library(launch, layer)
        grid = [self._size(g) for g in launch.grid]
        image = self.memory.image(launch.kernel, self.carveout)
        maps = image.map_arguments
        values = {
            a.name: self._map(image, a, layer) if a.name in maps else self._value(a, layer)
            for a in launch.arguments
        }
        return image.bind(grid, values, dependent=launch.dependent).launch

    def _size(self, size: int | str) -> int:
        if isinstance(size, int):
            return size
        return self.width if size == "sequence_pages" else self.chain.tokens

    def _value(self, argument: Argument, layer: int | None) -> int | float:
        if argument.source == "size":
            return self._size(argument.buffer)
        if argument.source == "scalar":
            assert argument.value is not None
            return int(argument.value) if argument.dtype.startswith("i") else argument.value
        return self._tensor(argument, layer).data_ptr() + self._moved(argument, layer)

    def _map(self, image: KernelImage, argument: Argument, layer: int | None) -> TensorMap:
        shape = [self._size(size) for size in argument.shape]
        return image.tensor_map(argument.name, int(self._value(argument, layer)), shape)

    def _moved(self, argument: Argument, layer: int | None) -> int:
        if layer is None or not argument.layer_stride:
            return argument.offset
        layers = next(part for part in self.memory.layers.values() if layer in part)
        return argument.offset + layers.index(layer) * argument.layer_stride

    def _tensor(self, argument: Argument, layer: int | None) -> Tensor:
        if argument.source == "kv":
            return self.memory.pools[argument.buffer]
        if argument.source == "weight":
            return self.memory.weights[name_in_layer(argument.buffer, layer)]
        return self.buffers[argument.buffer]

    def _library(self, launch: Launch, layer: int | None) -> Step:
        x, w, y = launch.arguments
        left, out = self._shaped(x), self._shaped(y)
        weight = self._tensor(w, layer).t()

        def multiply(stream: int) -> None:
            """On torch's current stream."""
            del stream
            if launch.kernel == "addmm":
                torch.addmm(out, left, weight, out=out)
            elif out.dtype != left.dtype:
                torch.ops.aten.mm.dtype_out(left, weight, torch.float32, out=out)
            else:
                torch.mm(left, weight, out=out)

        return multiply

    def _shaped(self, argument: Argument) -> Tensor:
        """An arena argument as a tensor."""
        shape = [self._size(size) for size in argument.shape]
        dtype = DTYPES[argument.dtype]
        end = argument.offset + math.prod(shape) * dtype.itemsize
        return self.buffers[argument.buffer][argument.offset : end].view(dtype).view(shape)

    # --- running --------------------------------------------------------------------------------

    def logits(self, choice: Choice) -> Tensor:
        """What the step gives; workspaces hold NaN before, counters zero."""
        for name, buffer in self.buffers.items():
            if name == "counters":
                buffer.zero_()
            elif name not in _INTEGERS and name not in _OF_RANKS:
                buffer.fill_(255)  # NaN in every type
        every = [place for group in self.chain.groups for place in group.places]
        last = [place for place in every if place in self._subject_at][-1]
        subject = self._subject_at[last]
        launch = choice[subject].launches[last][-1]
        y = next(a for a in launch.arguments if a.name in ("y", "y_ptr"))
        with torch.cuda.stream(self.stream):
            for step in self.steps(choice):
                step(self.stream.cuda_stream)
        self.stream.synchronize()
        width = self.memory.made.subjects[subject].shape["rows"]
        whole = self.buffers[y.buffer][y.offset :].view(DTYPES[y.dtype])
        return whole[: self.chain.tokens * width].view(self.chain.tokens, width).clone()

    def graph(self, steps: Sequence[Step]) -> torch.cuda.CUDAGraph:
        """The step, captured."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            for step in steps[:1]:
                step(self.stream.cuda_stream)
            self.stream.synchronize()
            graph.capture_begin()
            try:
                for step in steps:
                    step(self.stream.cuda_stream)
            finally:
                graph.capture_end()
        return graph

    def steps_us(self, graphs: Sequence[torch.cuda.CUDAGraph], replays: int) -> list[float]:
        """Median microseconds of each step, replayed in turn: all see the same clocks."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays * len(graphs) + 1)]
        with torch.cuda.stream(self.stream):
            for graph in graphs:
                graph.replay()
            marks[0].record(self.stream)
            for mark, graph in zip(marks[1:], itertools.cycle(graphs), strict=False):
                graph.replay()
                mark.record(self.stream)
        self.stream.synchronize()
        times = [a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(marks)]
        return [statistics.median(times[i :: len(graphs)]) for i in range(len(graphs))]


def distance(got: Tensor, want: Tensor) -> float:
    """max|got - want| / max|want|, NaN where there is one."""
    return float((got.float() - want.float()).abs().max() / want.float().abs().max())


def require(error: float, most: float) -> None:
    """Raises DeviceError for logits that are too far from those wanted, or not numbers."""
    if not error <= most:
        raise DeviceError(f"wrong logits: relative error {error:.1e}, limit {most:.0e}")


def _weight_names(chain: TuneChain) -> set[str]:
    """The weights that the layers which are run read."""
    found: set[str] = set()
    for group, layers in zip(chain.groups, layers_of(chain), strict=True):
        for place in group.places:
            cases = [case.launches.get(place, ()) for case in chain.cases]
            for launch in itertools.chain(chain.fixed.get(place, ()), *cases):
                names = [a.buffer for a in launch.arguments if a.source == "weight"]
                found |= {name_in_layer(n, i) for n in names for i in layers or (None,)}
    return found


def _random(spec: WeightSpec) -> Tensor:
    """A weight scaled so that activations stay of order one, or the constant itself."""
    dtype = DTYPES[spec.dtype]
    if spec.role == "constant":
        raw = torch.frombuffer(bytearray(bytes.fromhex(spec.data)), dtype=dtype)
        return raw.reshape(spec.shape).cuda()
    if len(spec.shape) == 1:
        return (1 + 0.1 * torch.randn(spec.shape, device="cuda")).to(dtype)
    value: Any = torch.empty(spec.shape, dtype=dtype, device="cuda").normal_()
    return value.mul_(spec.shape[-1] ** -0.5)
