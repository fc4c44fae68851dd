"""Random weights of an artifact on the CPU, for benchmarks without a checkpoint.

In: a plan. Out: every planned weight in one block of huge pages, quantised and packed as kernels
read it, from rows scaled so that activations stay of order one.
"""

from torch import Tensor

from sitsc.core.plan import Plan
from sitsc.core.weights import materialise
from sitsc.runtime.memory import huge_block
from sitsc.runtime.random_rows import RandomRows
from sitsc.runtime.weight_layout import WeightLayout, view


def random_weights(plan: Plan, seed: int = 0) -> dict[str, Tensor]:
    """Random weights by name; the same for the same seed, whatever their format."""
    layout = WeightLayout.of(plan.model.parameters)
    block, rows = huge_block(layout.nbytes), RandomRows(plan.model.parameters, seed)
    for place in layout.places:
        view(block, place).copy_(materialise(place.spec, rows.read))
    return layout.views(block)
