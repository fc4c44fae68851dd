"""Predicted microseconds of each launch of a bucket on a GPU, by what its target reached.

In: launches with what each is for, the sizes that are predicted, the limits of the device. Out: the
same launches with their time, and the time of every node. The rules are those of `op_time`
(docs/partition.md), applied to the kernels that were chosen: another template, or one kernel more,
is another time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from sitsc.core.calibration import Calibration
from sitsc.core.plan import Ceiling, Launch, LaunchGroup, greedy
from sitsc.core.tiles import GEMV_TOKENS, SKINNY_TOKENS
from sitsc.passes.collectives import Topology, all_gather, all_reduce
from sitsc.passes.cost import Cost, Sizes, active_experts, cost_of
from sitsc.passes.fxutil import arguments, is_op, tensor
from sitsc.passes.op_time import Device

_GEMV, _WIDE = "gemv", "wide"  # how templates on CUDA cores begin; a product as the library's
# The launches of attention that read the keys and values; others store them or join sums.
_ATTENTION = ("attention_decode", "attention_prefill", "attention_prefill_hopper")
_COLLECTIVES = {"all_reduce": all_reduce, "all_gather": all_gather}


@dataclass(frozen=True, slots=True)
class Work:
    """What a launch is for: a node, its cost unless another of its launches has it.

    `moved` are bytes of the places in the arena that it reads and writes, `sent` those that it
    sums or gathers over ranks.
    """

    node: fx.Node
    cost: Cost | None
    moved: int
    sent: int = 0


@dataclass(frozen=True, slots=True)
class Clock:
    """The limits of a device, and the links among the ranks that share its layers."""

    device: Device
    ranks: int = 1
    where: Topology | None = None

    def moving_us(self, nbytes: float) -> float:
        """A kernel that does little else than move bytes."""
        return 1e6 * nbytes / self.device.read + self.device.kernel_us

    def launch_us(self, launch: Launch, work: Work, sizes: Sizes) -> float:
        """One launch."""
        collective = _COLLECTIVES.get(launch.template)
        if collective is not None and work.sent and self.where is not None:
            us = collective(float(work.sent), self.ranks, self.where).us
            return us + 1e6 * work.moved / self.device.read
        if is_op(work.node, "paged_attention") and launch.template in _ATTENTION:
            return self._attention(work.node, cost_of(work.node, sizes))
        if work.cost is None or is_op(work.node, "paged_attention"):
            return self.moving_us(work.moved)
        if is_op(work.node, "fused_linear", "moe"):
            return self._product(launch, work.node, work.cost, sizes)
        device = self.device
        computing = 1e6 * work.cost.flops / device.flops[work.cost.dtype]
        return max(1e6 * work.cost.bytes / device.read, computing) + device.kernel_us

    def _attention(self, node: fx.Node, cost: Cost) -> float:
        """Products on tensor cores, and an exponential for each pair of tokens and head."""
        device, dim = self.device, int(tensor(arguments(node)["q"]).shape[2])
        exps = cost.flops / (4 * dim)
        work = cost.flops / device.matmul_share + exps * device.flops_per_exp
        reading = cost.bytes / (device.read * device.read_share)
        return 1e6 * max(reading, work / device.flops["bfloat16"]) + device.kernel_us

    def _product(self, launch: Launch, node: fx.Node, cost: Cost, sizes: Sizes) -> float:
        device, share, filled = self.device, self.device.read_share, 1.0
        a = arguments(node)
        if is_op(node, "moe"):
            experts = sizes.of(tensor(a["logits"]).shape[-1])
            rows = sizes.elements(node) // sizes.of(tensor(node).shape[-1])
            chosen = active_experts(experts, a["top_k"], rows)
            if round(rows * a["top_k"] / chosen) <= GEMV_TOKENS:
                share = 1.0
        elif launch.template.startswith(_GEMV):
            share = 1.0
        elif launch.kind == "library" or launch.template == _WIDE:
            x = a["x"]
            rows = sizes.elements(x) // sizes.of(tensor(x).shape[-1])
            outputs = a["out_features"] * (2 if a["epilogue"] == "glu" else 1)
            if launch.kind == "library" or rows > SKINNY_TOKENS:
                filled = device.filled(rows, outputs)
        peak = device.flops[cost.dtype] * device.matmul_share * filled
        us = 1e6 * max(cost.bytes / (device.read * share), cost.flops / peak)
        return us + device.kernel_us


def timed(
    groups: Sequence[LaunchGroup], works: Sequence[Work], sizes: Sizes, clock: Clock
) -> tuple[list[LaunchGroup], dict[fx.Node, float]]:
    """Groups with predicted times, and the µs of each node in all layers of its group.

    `works` are those of all launches, in order.
    """
    left, found = iter(works), []
    nodes: dict[fx.Node, float] = {}
    for group in groups:
        launches = []
        for launch in group.launches:
            work = next(left)
            us = clock.launch_us(launch, work, sizes)
            launches.append(replace(launch, predicted_us=us))
            times = max(1, len(group.layers))
            nodes[work.node] = nodes.get(work.node, 0.0) + us * times
        found.append(replace(group, launches=tuple(launches)))
    assert next(left, None) is None
    return found, nodes


def step_us(groups: Sequence[LaunchGroup], kind: str, device: Device) -> float:
    """A whole step: decode is a graph, launches of prompts wait for the host where it is slower.

    The step is a greedy one.
    """
    us, count = 0.0, 0
    for group in greedy(groups):
        times = max(1, len(group.layers))
        us += times * sum(launch.predicted_us for launch in group.launches)
        count += times * len(group.launches)
    return us if kind == "decode" else max(us, count * device.host_us)


def with_shares(
    ceilings: Mapping[str, Ceiling], calibration: Calibration | None
) -> dict[str, Ceiling]:
    """The ceilings of a plan: those of its target, and what of them its kernels reach."""
    if calibration is None:
        return dict(ceilings)
    shares: dict[str, Any] = {
        name: Ceiling(item.value, item.unit, item.source)
        for name, item in calibration.parameters.items()
    }
    return dict(ceilings) | shares
