"""What is known of config.json's keys (config_keys.toml), and the errors told about them.

Families that the file does not list are known through transformers' own config class: the keys it
declares are those its modelling code reads, and that code is what we trace.
"""

import json
import math
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from sitsc.core.errors import ConfigError, UnsupportedModelError
from sitsc.frontend.safe_files import shown

MODEL_TYPE = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@cache
def knowledge() -> dict[str, Any]:
    """The contents of config_keys.toml."""
    return tomllib.loads((resources.files("sitsc") / "data" / "config_keys.toml").read_text())


def family_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of the config's family. Raises UnsupportedModelError for what no one knows."""
    kind, families = config.get("model_type"), knowledge()["families"]
    if isinstance(kind, str) and kind in families:
        family = families[kind]
    else:
        family = untested_family(kind) if isinstance(kind, str) else None
    if family is None:
        raise UnsupportedModelError(
            f"model_type {shown(kind)} is not supported", hint=f"supported: {', '.join(families)}"
        )
    names = config.get("architectures")
    if names is not None and names != [family["architecture"]]:
        raise UnsupportedModelError(
            f"architectures is {shown(names)}", hint=f"supported: {family['architecture']}"
        )
    return family


@cache
def untested_family(kind: str) -> dict[str, Any] | None:
    """A decoder of transformers that we have no entry for; None when it has none of that name."""
    if not MODEL_TYPE.fullmatch(kind):
        return None
    from transformers import AutoConfig  # noqa: PLC0415  (seconds; only for unlisted families)
    from transformers.models.auto.modeling_auto import (  # noqa: PLC0415
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES,
    )

    if kind not in NAMES or not isinstance(NAMES[kind], str):
        return None
    try:
        usual = AutoConfig.for_model(kind)
        declared = json.loads(usual.to_json_string(use_diff=False))
    except Exception:  # (a class of transformers that cannot stand alone)
        return None
    return {
        "architecture": NAMES[kind],
        "tensors": "model",
        "untested": True,
        "theta_default": True,
        "consumed": [key for key in declared if key not in ("model_type", "architectures")],
        "optional": ["intermediate_size", "max_position_embeddings"],
        "aliases": {name: own for name, own in usual.attribute_map.items() if own in declared},
    }


def canonical(config: Mapping[str, Any], family: Mapping[str, Any]) -> dict[str, Any]:
    """The config with common keys in place of the family's own names for them."""
    named = dict(config)
    for common, own in family.get("aliases", {}).items():
        if named.get(common) is None and own in named:
            named[common] = named[own]
    return named


def use_of(key: str, value: Any, family: Mapping[str, Any]) -> str:
    """ "consumed", "inert", "inert at this value", "wrong value", "refused" or "unknown"."""
    common = knowledge()["common"]
    if key in common["consumed"] or key in family["consumed"]:
        return "consumed"
    if key in common["inert"] or key in family.get("inert", ()):
        return "inert"
    only = common["only"] | family.get("only", {})
    if key in only:
        good = value is None or any(value == a and type(value) is type(a) for a in only[key])
        return "inert at this value" if good else "wrong value"
    return "refused" if key in common["refused"] else "unknown"


def check_key(key: str, value: Any, family: Mapping[str, Any], allow: frozenset[str]) -> None:
    """ConfigError unless the key is consumed, inert (at this value) or named in `allow`."""
    common, use = knowledge()["common"], use_of(key, value, family)
    if use == "wrong value":
        allowed = (common["only"] | family.get("only", {}))[key]
        raise bad_value(key, value, f"only {' or '.join(map(repr, allowed))} is supported")
    if use == "refused" and key not in allow:
        raise bad_value(key, value, common["refused"][key])
    if use == "unknown":
        refuse_unknown(key, value, allow)


def refuse_unknown(key: str, value: Any, allow: frozenset[str]) -> None:
    """ConfigError for a key nobody knows, unless `allow` names it."""
    if key not in allow:
        raise ConfigError(
            f"unknown key {shown(key)} = {shown(value)}",
            where="config.json",
            hint="if it changes nothing in the computation, pass --allow-unknown-key "
            + shown(key)[1:-1],
        )


def bad_value(key: str, value: Any, hint: str) -> ConfigError:
    """The error for a known key with a value that cannot be used."""
    return ConfigError(f"{key} = {shown(value)} cannot be used", where="config.json", hint=hint)


def is_positive(value: Any) -> bool:
    """Whether `value` is a finite number above zero (and not a bool)."""
    if type(value) not in (int, float):
        return False
    try:
        return math.isfinite(value) and value > 0
    except OverflowError:  # an integer beyond every float
        return False
