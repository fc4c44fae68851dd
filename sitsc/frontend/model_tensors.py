"""The tensors of a family as transformers' own module has them, with the names of checkpoints.

In: a config that has passed the key check. Out: shape by name, and which names are tied to which.
Builds the module on the meta device; never reads a weight.
"""

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from sitsc.core.errors import UnsupportedModelError
from sitsc.core.weights import WeightSpec
from sitsc.frontend.checkpoint_names import expert_names, is_renamed, renamed
from sitsc.frontend.config_knowledge import knowledge

if TYPE_CHECKING:
    from sitsc.frontend.experts import Stacked

Shapes = dict[str, tuple[int, ...]]


def model_shapes(config: dict[str, Any]) -> tuple[Shapes, dict[str, str]]:
    """(shapes, tied name → its owner). Raises UnsupportedModelError.

    Parameters and the buffers that checkpoints hold; experts apart, as on disk.
    """
    return _model_shapes(json.dumps(config, sort_keys=True))


@lru_cache(maxsize=4)
def _model_shapes(text: str) -> tuple[Shapes, dict[str, str]]:
    from sitsc.frontend.experts import stacked_parameters  # noqa: PLC0415
    from sitsc.frontend.trace import build_model  # noqa: PLC0415

    config = json.loads(text)
    model: Any = build_model(config, torch.bfloat16)
    kind = str(config["model_type"])
    _check_layout(model, kind)
    stacked = stacked_parameters(model)
    shapes: Shapes = {}
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if name in stacked:
            shapes |= _sources(stacked[name])
            continue
        own = renamed(name, kind)
        owner = first.setdefault(id(value), own)
        if owner != own:
            tied[own] = owner
            continue
        shapes[own] = tuple(value.shape)
    return shapes, tied


def _sources(stacked: "Stacked") -> Shapes:
    """The tensors that experts are made of."""
    spec = WeightSpec("", "weight", stacked.sources, stacked.shape, "bfloat16", "plain", "")
    shapes: Shapes = {}
    for piece in stacked.sources:  # of slices of one tensor the last says how many rows there are
        shapes[piece.tensor] = max(shapes.get(piece.tensor, ()), spec.source_shape(piece))
    return shapes


def _check_layout(model: Any, kind: str) -> None:
    """Refuse a family whose checkpoints are laid out otherwise than its module, unknown to us."""
    from transformers.conversion_mapping import (  # noqa: PLC0415
        extract_weight_conversions_for_model,
    )

    if kind in knowledge()["families"] or is_renamed(kind):  # tested: what differs is known
        return
    parts = expert_names(kind)
    for change in extract_weight_conversions_for_model(model) or ():
        sources = getattr(change, "source_patterns", None) or [""]
        known = all(".experts." in s and s.split(".")[-2] in parts for s in sources)
        if not known:
            raise UnsupportedModelError(
                f"checkpoints of model_type {kind!r} hold {sources[0]!r} in a form that is not "
                "known to us",
                hint="transformers converts it when loading; report the family",
            )
