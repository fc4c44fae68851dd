"""Time of a step: of one layer, of a run of layers, of a whole model, cut by TP and EP.

In: a model's record, a device, the links. Out: microseconds, computing and communicating apart,
remembered for each cut and size. A stage is layers [first, last) of the model.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from sitsc.passes.collectives import (
    SUM_BYTES,
    Topology,
    all_gather,
    all_reduce,
    all_to_all,
    sum_itemsize,
)
from sitsc.passes.model_record import (
    BY_EXPERTS,
    EXPERTS,
    LINEAR,
    VOCABULARY,
    ModelRecord,
    Op,
)
from sitsc.passes.op_time import Cut, Device, Sizes, op_time, weight_share

# Placing tokens and taking the best ones, and what more ranks add: those of a greedy step.
_SAMPLE_KERNELS, _RANK_KERNELS = 2, 2
_LOGIT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Time:
    """Microseconds of computing and of collectives; `reducible` is what chunks could hide.

    `launches` counts kernels and collectives.
    """

    compute_us: float
    comm_us: float
    reducible_us: float = 0.0
    launches: int = 0

    @property
    def us(self) -> float:
        """All of it, one after the other."""
        return self.compute_us + self.comm_us

    def __add__(self, other: "Time") -> "Time":
        return Time(
            self.compute_us + other.compute_us,
            self.comm_us + other.comm_us,
            self.reducible_us + other.reducible_us,
            self.launches + other.launches,
        )

    def times(self, count: int) -> "Time":
        """`count` of them."""
        compute, comm, reducible = (
            count * part for part in (self.compute_us, self.comm_us, self.reducible_us)
        )
        return Time(compute, comm, reducible, count * self.launches)


ZERO = Time(0.0, 0.0)


class StepModel:
    """Answers for one model on one kind of device and links; remembers what it was asked."""

    def __init__(self, record: ModelRecord, device: Device, where: Topology) -> None:
        self.record, self.device, self.where = record, device, where
        self._parts: dict[tuple[int, Sizes, Cut], Time] = {}
        self._counts: dict[tuple[int, int], tuple[tuple[int, int], ...]] = {}

    def layer(self, index: int, sizes: Sizes, cut: Cut) -> Time:
        """One layer."""
        return self._part(self.record.layers[index], sizes, cut)

    def stage(self, first: int, last: int, sizes: Sizes, cut: Cut) -> Time:
        """Layers [first, last), with the embedding before the first and logits after the last."""
        total = ZERO
        for index, count in self._counted(first, last):
            total += self._part(index, sizes, cut).times(count)
        return total

    def _counted(self, first: int, last: int) -> tuple[tuple[int, int], ...]:
        """Classes of layers [first, last) with how many there are, and what stands around them."""
        if (first, last) not in self._counts:
            counts = Counter(self.record.layers[first:last])
            counts.update([-1] * (first == 0) + [-2] * (last == self.record.num_layers))
            self._counts[first, last] = tuple(counts.items())
        return self._counts[first, last]

    def whole(self, sizes: Sizes, cut: Cut) -> Time:
        """The whole model."""
        return self.stage(0, self.record.num_layers, sizes, cut)

    def step_us(self, sizes: Sizes, cut: Cut) -> float:
        """The whole model in one step: decode by a graph, prompts as fast as the host launches."""
        time = self.whole(sizes, cut)
        return time.us if sizes.tokens == sizes.sequences else self.launched_us(time, time.us)

    def launched_us(self, time: Time, us: float) -> float:
        """`us`, or longer where the host cannot launch as fast."""
        return max(us, time.launches * self.device.host_us)

    def _part(self, index: int, sizes: Sizes, cut: Cut) -> Time:
        key = (index, sizes, cut)
        if key not in self._parts:
            self._parts[key] = self._ops(self.ops(index), sizes, cut)
            if index == -2:
                self._parts[key] += self._sampling(sizes, cut)
        return self._parts[key]

    def ops(self, index: int) -> tuple[Op, ...]:
        """Operators of a class of layers; -1: before the layers, -2: after them."""
        special = {-1: self.record.before, -2: self.record.after}
        return special[index] if index < 0 else self.record.classes[index]

    def _ops(self, ops: Iterable[Op], sizes: Sizes, cut: Cut) -> Time:
        compute, comm, launches = 0.0, 0.0, 0
        for op in ops:
            time, sums = op_time(op, sizes, cut, self.device), self.communication(op, sizes, cut)
            compute, comm = compute + time.us, comm + sums
            launches += time.kernels + (sums > 0)
        return Time(compute, comm, comm, launches)

    def communication(self, op: Op, sizes: Sizes, cut: Cut) -> float:
        """Microseconds of the collectives after an operator."""
        rows, ranks = sizes.tokens if op.rows == "tokens" else sizes.rows, cut.tp
        nbytes = float(rows * op.reduced_bytes)
        if self.device.gpu and op.kind == LINEAR:  # of few rows a kernel of ours leaves float32
            nbytes *= sum_itemsize(rows, op.outputs, "float32") / SUM_BYTES
        if op.kind == EXPERTS and op.role == BY_EXPERTS and op.reduced_bytes:
            return self._experts(op, rows, cut)
        return all_reduce(nbytes, ranks, self.where).us

    def _experts(self, op: Op, rows: int, cut: Cut) -> float:
        """Partial sums of all ranks, which have all tokens of their stage.

        In an ideal topology a rank may send its share of them to their experts and back, where
        that is faster. Nothing executes it.
        """
        summed = all_reduce(float(rows * op.reduced_bytes), cut.tp, self.where).us
        if cut.ep == 1 or op.experts is None or not self.where.ideal:
            return summed
        choices = min(op.experts.top_k, cut.ep)
        share = rows * op.reduced_bytes * choices * cut.imbalance / cut.tp
        gathered = all_gather(float(rows * op.reduced_bytes), cut.tp, self.where).us
        travel = 2 * all_to_all(share, cut.ep, self.where).us + gathered
        return min(summed, travel)

    def _sampling(self, sizes: Sizes, cut: Cut) -> Time:
        """Reads the logits, which vocabulary-parallel ranks gather first."""
        nbytes = float(sizes.rows * self.record.vocabulary * _LOGIT_BYTES)
        kernels = 1
        if self.device.gpu:
            kernels = _SAMPLE_KERNELS + _RANK_KERNELS * (cut.tp > 1)
        us = 1e6 * nbytes / self.device.read + kernels * self.device.kernel_us
        cut_logits = any(op.role == VOCABULARY for op in self.record.after)
        comm = all_gather(nbytes, cut.tp, self.where).us if cut_logits else 0.0
        return Time(us, comm, 0.0, kernels)

    # --- memory -------------------------------------------------------------------------------

    def weight_bytes(self, first: int, last: int, cut: Cut) -> float:
        """Bytes of weights of one rank of layers [first, last); a table that two use is one."""
        tables: dict[str, float] = {}
        total = 0.0
        classes = list(self.record.layers[first:last])
        classes += [-1] * (first == 0) + [-2] * (last == self.record.num_layers)
        for index in classes:
            for op in self.ops(index):
                held = op.weight_bytes * weight_share(op, cut)
                if op.weight:
                    tables[op.weight] = max(held, tables.get(op.weight, 0.0))
                else:
                    total += held
        return total + sum(tables.values())
