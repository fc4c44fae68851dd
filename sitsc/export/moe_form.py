"""What one of our ONNX functions computes, as a description that stands in it.

The exporter writes it, the importer reads it and makes the same function again to compare.
"""

import json
from dataclasses import asdict, dataclass

from sitsc.core.ops.moe import CLAMPED, SCORINGS
from sitsc.core.ops.norm import ACTIVATIONS

DOMAIN = "sitsc"
INPUTS = ("x", "logits", "correction", "gate_up", "gate_up_bias", "down", "down_bias")


@dataclass(frozen=True, slots=True)
class MoeForm:
    """What a function computes: see sitsc.core.ops.moe. `inputs` are those that are given."""

    inputs: tuple[str, ...]
    experts: int
    top_k: int
    scoring: str
    groups: int
    group_top: int
    normalise: int
    scaling: float
    activation: str
    alpha: float
    limit: float


def read_form(text: str) -> MoeForm:
    """The form that a function describes. Raises ValueError, TypeError or KeyError for another."""
    value = json.loads(text)
    form = MoeForm(**(value | {"inputs": tuple(value["inputs"])}))
    known = form.activation in (*ACTIVATIONS, CLAMPED) and form.scoring in SCORINGS
    small = all(
        isinstance(n, int) and 0 < n < 4096 for n in (form.experts, form.top_k, form.groups)
    )
    if not known or not small or form.experts % form.groups or not set(form.inputs) <= set(INPUTS):
        raise ValueError("not a mixture of experts")
    return form


def form_text(form: MoeForm) -> str:
    """The description that `read_form` reads."""
    return json.dumps(asdict(form), sort_keys=True)
