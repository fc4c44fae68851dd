"""Where longrope changes its factors: contexts of an artifact end there.

In: a configuration. Out: the number of positions up to which the short factors hold. transformers
rotates all of a longer sequence by the long factors, so its keys in the pages would have to be
rotated again when it crosses the switch; such a context is refused, never approximated.
"""

from typing import Any

_KINDS = {"longrope", "su"}
_KEY = "original_max_position_embeddings"


def longrope_switch(config: dict[str, Any]) -> int | None:
    """Positions that the short factors are for; None without longrope."""
    found = [_switch(entry, config) for entry in _entries(config)]
    return min((switch for switch in found if switch is not None), default=None)


def _entries(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Rope settings under both spellings, for all layers or for each kind of layer."""
    given = [config.get("rope_parameters"), config.get("rope_scaling")]
    outer = [value for value in given if isinstance(value, dict)]
    return outer + [v for value in outer for v in value.values() if isinstance(v, dict)]


def _switch(entry: dict[str, Any], config: dict[str, Any]) -> int | None:
    kinds = {kind for kind in (entry.get("rope_type"), entry.get("type")) if isinstance(kind, str)}
    if not kinds & _KINDS:
        return None
    value = config.get(_KEY) or entry.get(_KEY) or config.get("max_position_embeddings")
    return value if isinstance(value, int) else None
