"""One linear layer on the GPU: a chain of launches over many weights, checked and timed.

In: a shape, a token count, one allocation of random weights. Out: whether a kernel is right, and
microseconds a launch inside a CUDA graph, each launch with weights that are not in the L2 cache.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sitsc.core.ops.linear import fused_linear_reference
from sitsc.core.tuning import TuneCase
from sitsc.core.weights import DTYPES
from sitsc.runtime.launcher import KernelImage

Step = Callable[[int], None]
MOST_ERROR = 2e-2
_NAMES = {"bf16": "bfloat16", "fp32": "float32"}
_CHAIN_US = 1200.0  # of one replay, so that the gap between replays counts little
_MOST_LAUNCHES = 1024
_L2_TIMES, _LEAST_COPIES, _MOST_COPIES = 16, 16, 32
_FILL = 1 << 28


def weight_rows(shape: dict[str, Any]) -> int:
    """Rows of the weight: gates and ups for a gated layer."""
    return shape["rows"] * (2 if shape["epilogue"] == "glu" else 1)


def weight_bytes(shape: dict[str, Any]) -> int:
    """Bytes of the weight, in bfloat16."""
    return 2 * weight_rows(shape) * shape["columns"]


def copies(shape: dict[str, Any], l2_bytes: int, free_bytes: int) -> int:
    """How many different weights a chain reads: many times the L2 cache, within half of memory."""
    nbytes = weight_bytes(shape)
    wanted = min(_MOST_COPIES, max(_LEAST_COPIES, -(-_L2_TIMES * l2_bytes // nbytes)))
    return max(1, min(wanted, free_bytes // 2 // nbytes))


def random_pool(nbytes: int) -> Tensor:
    """One allocation of normal bfloat16 values, small enough for sums of order one."""
    pool = torch.empty(nbytes // 2, dtype=torch.bfloat16, device="cuda")
    for part in pool.split(_FILL):
        part.normal_(0.0, 1 / 64)
    return pool


class LinearChain:
    """The layer's inputs and outputs, and the references of the first and the last weight."""

    def __init__(self, cases: Sequence[TuneCase], pool: Tensor, count: int) -> None:
        shape, tokens = cases[0].shape, cases[0].tokens
        self.shape, self.tokens = shape, tokens
        rows, columns = weight_rows(shape), shape["columns"]
        whole = pool[: count * rows * columns].view(count, rows, columns)
        self.weights = list(whole.unbind())
        self.x = self._normal(tokens, columns)
        self.norm = 1 + 0.1 * self._normal(columns)
        self.bias, self.residual = self._normal(rows), self._normal(tokens, shape["rows"])
        out = DTYPES[_NAMES[shape["out_dtype"]]]
        self.y = torch.empty(tokens, shape["rows"], dtype=out, device="cuda")
        self.wide = torch.empty(tokens, rows, dtype=out, device="cuda")
        partials = max(case.partials for case in cases)
        self.partials = torch.empty(max(4, partials), dtype=torch.float32, device="cuda")
        counters = max(case.counters for case in cases)
        self.counters = torch.zeros(max(4, counters), dtype=torch.int32, device="cuda")
        self.stream = torch.cuda.Stream()
        self.want = {place: self._reference(place) for place in (0, count - 1)}
        torch.cuda.synchronize()

    @staticmethod
    def _normal(*sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=torch.bfloat16, device="cuda").normal_()

    def _reference(self, place: int) -> Tensor:
        """The layer with one weight, accumulated in fp32."""
        shape = self.shape
        return fused_linear_reference(
            self.x,
            self.weights[place],
            None,
            self.bias if shape["bias"] else None,
            self.norm if shape["norm"] else None,
            self.residual if shape["epilogue"] == "residual" else None,
            shape["rows"],
            "rms_norm" if shape["norm"] else "none",
            shape["eps"],
            shape["offset"],
            shape["epilogue"],
            shape["activation"],
            _NAMES[shape["out_dtype"]],
            "plain",
        ).float()

    def bind(self, case: TuneCase, image: KernelImage) -> list[Step]:
        """A launch of the kernel for each weight, overlapping the one before it if it can."""
        names = [name for name, _ in image.meta.arguments]
        values: dict[str, Any] = {
            "x_ptr": self.x,
            "norm_ptr": self.norm,
            "bias_ptr": self.bias,
            "residual_ptr": self.residual,
            "y_ptr": self.y,
            "partial_ptr": self.partials,
            "counter_ptr": self.counters,
            "num_tokens": self.tokens,
        }
        steps = []
        for weight in self.weights:
            given = values | {"w_ptr": weight}
            steps.append(image.bind(case.grid, {name: given[name] for name in names}).launch)
        return steps

    def library(self) -> list[Step]:
        """The library's product for each weight, with the residual where the layer adds one."""

        def step(weight: Tensor) -> Step:
            if self.shape["epilogue"] == "residual":
                return lambda stream: self._keep(
                    torch.addmm(self.residual, self.x, weight.t(), out=self.wide)
                )
            if self.wide.dtype != self.x.dtype:
                multiply = torch.ops.aten.mm.dtype_out
                return lambda stream: self._keep(
                    multiply(self.x, weight.t(), torch.float32, out=self.wide)
                )
            return lambda stream: self._keep(torch.mm(self.x, weight.t(), out=self.wide))

        return [step(weight) for weight in self.weights]

    @staticmethod
    def _keep(result: Tensor) -> None:
        del result

    def error(self, steps: Sequence[Step]) -> float:
        """The largest relative error over launches with the first and the last weight.

        Outputs and partial sums are NaN before each, counters zero before the first.
        """
        self.counters.zero_()
        errors = []
        for place in self.want:
            self.y.fill_(math.nan)
            self.partials.fill_(math.nan)
            torch.cuda.synchronize()
            steps[place](self.stream.cuda_stream)
            torch.cuda.synchronize()
            errors.append(self._distance(place))
        return math.nan if any(map(math.isnan, errors)) else max(errors)

    def error_after_chain(self) -> float:
        """The relative error of what the last launch of a chain left."""
        torch.cuda.synchronize()
        return self._distance(len(self.weights) - 1)

    def _distance(self, place: int) -> float:
        want = self.want[place]
        return float((self.y.float() - want).abs().max() / want.abs().max())

    def graph(self, steps: Sequence[Step], limit_us: float) -> "TimedGraph":
        """The chain, repeated until a replay is long enough to be timed, as a CUDA graph."""
        wanted = min(_MOST_LAUNCHES, math.ceil(_CHAIN_US / limit_us))
        rounds = -(-wanted // len(steps))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            steps[0](self.stream.cuda_stream)
            self.stream.synchronize()
            graph.capture_begin()
            try:
                for step in list(steps) * rounds:
                    step(self.stream.cuda_stream)
            finally:
                graph.capture_end()
        return TimedGraph(graph, self.stream, rounds * len(steps))


class TimedGraph:
    """A captured chain of `launches` launches."""

    def __init__(
        self, graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, launches: int
    ) -> None:
        self._graph, self._stream, self._launches = graph, stream, launches

    def launch_us(self, replays: int) -> float:
        """Median microseconds a launch over so many replays, after one to warm up."""
        with torch.cuda.stream(self._stream):
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
            self._graph.replay()
            marks[0].record(self._stream)
            for mark in marks[1:]:
                self._graph.replay()
                mark.record(self._stream)
        self._stream.synchronize()
        times = [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
        return statistics.median(times) * 1e3 / self._launches
