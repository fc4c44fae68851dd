"""Seconds of the batches that a scheduler forms, by the cost model of partitions.

In: a replica and the sizes of a step. Out: its cost for each stage. What does not depend on the
context is remembered for each number of tokens and rows, attention for each length, so that a
replay of millions of steps asks a table.
"""

from sitsc.core.serving.simulator import BatchSizes, StepCost
from sitsc.passes.model_record import ATTENTION, Op
from sitsc.passes.op_time import Cut, Sizes, op_time
from sitsc.passes.replica_time import Replica
from sitsc.passes.step_time import Time

_US = 1e-6


class BatchTime:
    """`BatchTime(replica)(sizes)`: a `StepCost`. A lone sequence takes what the replica predicts.

    Beside prompts, decoding sequences share the linear layers of a step; attention is that of each
    group. The mean context of decoding sequences is rounded to whole tokens.
    """

    def __init__(self, replica: Replica) -> None:
        self.replica, self.model = replica, replica.model
        pairs = zip(replica.bounds, replica.bounds[1:], strict=False)
        self.attention = [self._ops(low, high) for low, high in pairs]
        self._decode: dict[tuple[int, int], StepCost] = {}
        self._fixed: dict[tuple[int, int], list[Time]] = {}
        self._attention: dict[tuple[Op, Sizes, Cut], tuple[float, int]] = {}

    def __call__(self, sizes: BatchSizes) -> StepCost:
        """The cost of a step."""
        if sizes.pieces:
            return self._mixed(sizes)
        key = (sizes.decode, round(sizes.decode_context / sizes.decode))
        if key not in self._decode:
            rows, context = key
            self._decode[key] = self._cost(rows, rows, [Sizes(rows, rows, rows, context)], False)
        return self._decode[key]

    def _mixed(self, sizes: BatchSizes) -> StepCost:
        groups = [Sizes(p.tokens, 1, 1, p.context) for p in sizes.pieces]
        if sizes.decode:
            context = round(sizes.decode_context / sizes.decode)
            groups.append(Sizes(sizes.decode, sizes.decode, sizes.decode, context))
        return self._cost(sizes.tokens, max(1, sizes.rows), groups, True)

    def _ops(self, low: int, high: int) -> list[tuple[Op, int]]:
        """Attention of a stage, each shape once, with how often it is there."""
        record = self.model.record
        counts: dict[Op, int] = {}
        for index in record.layers[low:high]:
            for op in record.classes[index]:
                if op.kind == ATTENTION:
                    counts[op] = counts.get(op, 0) + 1
        return list(counts.items())

    def _cost(self, tokens: int, rows: int, groups: list[Sizes], launched: bool) -> StepCost:
        cut = self.replica.cut(tokens)
        stages, comm = [], []
        for time, ops in zip(self._without(tokens, rows), self.attention, strict=True):
            us, launches = time.us, time.launches
            for op, count in ops:
                attention, kernels = self._attend(op, groups, cut)
                us, launches = us + count * attention, launches + count * kernels
            if launched:  # no graph: no faster than the host launches
                us = max(us, launches * self.model.device.host_us)
            stages.append(us * _US)
            comm.append(time.comm_us * _US)
        return StepCost(tuple(stages), tuple(comm), self.replica.send_us(tokens) * _US)

    def _attend(self, op: Op, groups: list[Sizes], cut: Cut) -> tuple[float, int]:
        """One attention of all groups: their work one after the other, launched once."""
        fixed, work, kernels = self.model.device.kernel_us, 0.0, 0
        for sizes in groups:
            key = (op, sizes, cut)
            if key not in self._attention:
                time = op_time(op, sizes, cut, self.model.device)
                self._attention[key] = time.us - time.kernels * fixed, time.kernels
            us, count = self._attention[key]
            work, kernels = work + us, max(kernels, count)
        return work + kernels * fixed, kernels

    def _without(self, tokens: int, rows: int) -> list[Time]:
        """Each stage without attention."""
        key = (tokens, rows)
        if key not in self._fixed:
            sizes, cut = Sizes(tokens, rows, tokens, 0), self.replica.cut(tokens)
            found = []
            for stage, ops in zip(self.replica.stages(sizes), self.attention, strict=True):
                us, launches = 0.0, 0
                for op, count in ops:
                    time = op_time(op, sizes, cut, self.model.device)
                    us, launches = us + count * time.us, launches + count * time.kernels
                found.append(
                    Time(stage.compute_us - us, stage.comm_us, 0.0, stage.launches - launches)
                )
            self._fixed[key] = found
        return self._fixed[key]
