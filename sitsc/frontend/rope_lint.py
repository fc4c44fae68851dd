"""Rope settings of a config: both spellings, every key of every type, no contradiction.

In: a config dict. Out: nothing, or ConfigError naming the key. Never assumes a base frequency.
"""

from typing import Any

from sitsc.frontend.config_knowledge import bad_value, is_positive, knowledge, refuse_unknown
from sitsc.frontend.longrope import SWITCH, longrope_entries
from sitsc.frontend.safe_files import shown


def check_rope(config: dict[str, Any], family: dict[str, Any], allow: frozenset[str]) -> None:
    """Old and new spelling of rope settings, and that they say the same where both are given."""
    if family.get("no_rope"):
        return
    own = ("rope_parameters", "rope_scaling")
    allow |= {f"{key}.{part}" for key in own for part in family.get("rope_keys", ())}
    theta = config.get("rope_theta")
    if theta is not None and not is_positive(theta):
        raise bad_value("rope_theta", theta, "a positive number is needed")
    for key in ("rope_scaling", "rope_parameters"):
        for where, values in _rope_entries(key, config.get(key)).items():
            _check_rope_entry(where, values, theta, allow)
    old, new = config.get("rope_scaling"), config.get("rope_parameters")
    if old is not None and new is not None and _without_theta(old) != _without_theta(new):
        raise bad_value("rope_scaling", old, f"rope_parameters says {shown(new)}; keep one of them")
    if theta is None and new is None and not _has_base(config, family):
        raise bad_value("rope_theta", None, "it is given nowhere, and this family has no default")
    if new is not None and theta is None:
        for where, values in _rope_entries("rope_parameters", new).items():
            if "rope_theta" not in values:
                raise bad_value(where, values, "rope_theta is given nowhere")
    _check_switch(config, family)


def _check_switch(config: dict[str, Any], family: dict[str, Any]) -> None:
    """Where longrope changes its factors; transformers reads the top first, with its own default.

    A family that has the key at the top would take 4096 there for one that stands elsewhere.
    """
    entries = longrope_entries(config)
    for values in (config, *entries) if entries else ():
        value = values.get(SWITCH)
        if value is not None and (type(value) is not int or value < 1):
            raise bad_value(SWITCH, value, "a whole number of positions is needed")
    if entries and config.get(SWITCH) is None and SWITCH in family["consumed"]:
        raise bad_value(SWITCH, None, "longrope of this family needs it beside its rope settings")


def _has_base(config: dict[str, Any], family: dict[str, Any]) -> bool:
    """Whether the base frequency is known without rope_theta and rope_parameters."""
    inside = (config.get("rope_scaling") or {}).get("rope_theta")
    own = config.get("rotary_emb_base")
    if own is not None and not is_positive(own):
        raise bad_value("rotary_emb_base", own, "a positive number is needed")
    return inside is not None or own is not None or bool(family.get("theta_default"))


def _rope_entries(key: str, value: Any) -> dict[str, dict[str, Any]]:
    """The one set of settings, or one for each layer type."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise bad_value(key, value, "an object is needed")
    layer_types = set(knowledge()["common"]["layer_types"])
    if value and set(value) <= layer_types:
        nested = {f"{key}.{k}": v for k, v in value.items() if v is not None}
        for where, entry in nested.items():
            if not isinstance(entry, dict):
                raise bad_value(where, entry, "an object is needed")
        return nested
    return {key: value}


def _check_rope_entry(
    where: str, values: dict[str, Any], theta: Any, allow: frozenset[str]
) -> None:
    kinds = {values[k] for k in ("type", "rope_type") if isinstance(values.get(k), str)}
    if len(kinds) > 1:
        raise bad_value(where, values, "type and rope_type contradict each other")
    kind = kinds.pop() if kinds else "default" if where.startswith("rope_parameters") else None
    known = knowledge()["rope"]
    if kind not in known:
        raise bad_value(f"{where}.rope_type", kind, f"known: {', '.join(known)}")
    own = values.get("rope_theta")
    if own is not None and (not is_positive(own) or theta not in (None, own)):
        raise bad_value(f"{where}.rope_theta", own, f"rope_theta at the top is {theta}")
    missing = [key for key in known[kind]["must"] if values.get(key) is None]
    if missing:
        raise bad_value(where, values, f"{kind} needs {', '.join(missing)}")
    free = {"type", "rope_type", "rope_theta", "partial_rotary_factor"}
    for key, value in values.items():
        if key not in free and key not in known[kind]["must"] + known[kind]["may"]:
            refuse_unknown(f"{where}.{key}", value, allow)


def _without_theta(values: dict[str, Any]) -> dict[str, Any]:
    named = dict(values)
    kind = named.pop("type", None)
    return {k: v for k, v in named.items() if k != "rope_theta"} | (
        {"rope_type": kind} if kind is not None else {}
    )
