"""Canonical JSON: one text for one value, the same bytes on every machine.

Keys are sorted, floats keep six significant digits, lines are indented by one blank, and values
that JSON cannot hold are refused. Digests are taken over exactly these bytes.
"""

import hashlib
import json
import math
from typing import Any

SIGNIFICANT_DIGITS = 6


def _normal(value: Any) -> Any:
    if isinstance(value, bool) or value is None or isinstance(value, (int, str)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} has no canonical form")
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}") + 0.0  # -0.0 becomes 0.0
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise ValueError("keys of a canonical object must be strings")
        return {key: _normal(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_normal(item) for item in value]
    raise ValueError(f"a value of type {type(value).__name__} has no canonical form")


def canonical_json(value: Any) -> str:
    """The one text of `value`, ending in a newline. Raises ValueError for what JSON cannot hold."""
    text = json.dumps(_normal(value), sort_keys=True, indent=1, ensure_ascii=True, allow_nan=False)
    return text + "\n"


def digest(value: Any) -> str:
    """SHA-256 (hex) of the canonical text of `value`."""
    return sha256_hex(canonical_json(value).encode())


def sha256_hex(data: bytes) -> str:
    """SHA-256 of bytes as lower-case hex."""
    return hashlib.sha256(data).hexdigest()
