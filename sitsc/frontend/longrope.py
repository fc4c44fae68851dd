"""Longrope: which of its two sets of factors an artifact has, one for all sequences.

In: a configuration and the longest context. transformers rotates a sequence by the short factors up
to the switch and all of a longer one by the long factors, so keys kept in pages would have to be
rotated again when a sequence crosses it. An artifact whose contexts end at the switch has the short
factors, one with longer contexts the long ones: equal for sequences that are longer from the start.
"""

from typing import Any

from torch import Tensor

_KINDS = {"longrope", "su"}
SWITCH = "original_max_position_embeddings"


def takes_long_factors(config: dict[str, Any], context: int) -> bool:
    """Whether sequences of up to `context` tokens are rotated by the long factors."""
    switch = longrope_switch(config)
    return switch is not None and context > switch


def longrope_warnings(config: dict[str, Any], context: int) -> list[str]:
    """What a context past the switch means for short sequences."""
    if not takes_long_factors(config, context):
        return []
    return [
        f"--max-context {context} is past position {longrope_switch(config)}, where longrope "
        "changes its factors: every sequence is rotated by the long ones, also one that stays "
        "shorter, which transformers would rotate by the short ones"
    ]


def long_frequencies(config: Any) -> Tensor:
    """Inverse frequencies [rotary width / 2] by the long factors, of transformers' own formula."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: PLC0415  (heavy)

    past = config.rope_parameters[SWITCH] + 1
    return ROPE_INIT_FUNCTIONS["longrope"](config, "cpu", seq_len=past)[0]


def longrope_switch(config: dict[str, Any]) -> int | None:
    """Positions that the short factors are for; None without longrope.

    As transformers does, the key at the top goes before that of the rope settings.
    """
    last = config.get("max_position_embeddings")
    found = [config.get(SWITCH) or v.get(SWITCH) or last for v in longrope_entries(config)]
    return min((switch for switch in found if isinstance(switch, int)), default=None)


def longrope_entries(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The settings of longrope under both spellings, for all layers or for each kind of layer."""
    given = [config.get("rope_parameters"), config.get("rope_scaling")]
    outer = [value for value in given if isinstance(value, dict)]
    inner = [v for value in outer for v in value.values() if isinstance(v, dict)]
    return [entry for entry in outer + inner if _is_longrope(entry)]


def _is_longrope(entry: dict[str, Any]) -> bool:
    kinds = (entry.get("rope_type"), entry.get("type"))
    return any(isinstance(kind, str) and kind in _KINDS for kind in kinds)
