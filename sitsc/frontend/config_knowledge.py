"""What is known of config.json's keys (config_keys.toml), and the two errors told about them."""

import math
import tomllib
from functools import cache
from importlib import resources
from typing import Any

from sitsc.core.errors import ConfigError
from sitsc.frontend.safe_files import shown


@cache
def knowledge() -> dict[str, Any]:
    """The contents of config_keys.toml."""
    return tomllib.loads((resources.files("sitsc") / "data" / "config_keys.toml").read_text())


def refuse_unknown(key: str, value: Any, allow: frozenset[str]) -> None:
    """ConfigError for a key nobody knows, unless `allow` names it."""
    if key not in allow:
        raise ConfigError(
            f"unknown key {shown(key)} = {shown(value)}",
            where="config.json",
            hint=f"if it changes nothing in the computation, pass --allow-unknown-key {key}",
        )


def bad_value(key: str, value: Any, hint: str) -> ConfigError:
    """The error for a known key with a value that cannot be used."""
    return ConfigError(f"{key} = {shown(value)} cannot be used", where="config.json", hint=hint)


def is_positive(value: Any) -> bool:
    """Whether `value` is a finite number above zero (and not a bool)."""
    return type(value) in (int, float) and math.isfinite(value) and value > 0
