"""Canonical TOML: one text for one value, the same bytes on every machine.

In: a table of values as `to_value` makes them, dates besides. Out: text that tomllib reads back.
Keys keep their order, floats have six significant digits, lists of tables become `[[name]]`. None
is left out. Raises ValueError for what TOML cannot hold.
"""

import math
import re
from datetime import date
from typing import Any

from sitsc.core.canonical import SIGNIFICANT_DIGITS

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_SHORT = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
_SMALLEST, _LARGEST = -(1 << 63), (1 << 63) - 1
_LONG_LINE = 100


def toml_text(table: dict[str, Any]) -> str:
    """The text of a table, ending in a newline."""
    return "\n".join(_table(table, "")) + "\n"


def rounded(value: float) -> float:
    """A float with the digits that a text keeps. Raises ValueError for what is not finite."""
    if not math.isfinite(value):
        raise ValueError(f"{value} has no canonical form")
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}") + 0.0  # -0.0 becomes 0.0


def _table(table: dict[str, Any], path: str) -> list[str]:
    """Plain values first: what follows a header belongs to it."""
    lines, parts = [], []
    for key, value in table.items():
        if value is None:
            continue
        name = _key(key)
        inner = f"{path}.{name}" if path else name
        if isinstance(value, dict):
            parts += ["", f"[{inner}]", *_table(value, inner)]
        elif isinstance(value, list) and value and all(isinstance(v, dict) for v in value):
            for item in value:
                parts += ["", f"[[{inner}]]", *_table(item, inner)]
        else:
            lines.append(_line(name, value))
    return lines + parts


def _line(name: str, value: Any) -> str:
    text = f"{name} = {_value(value)}"
    if isinstance(value, list) and len(text) > _LONG_LINE:
        return "\n".join([f"{name} = [", *(f"  {_value(item)}," for item in value), "]"])
    return text


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _quoted(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        if not _SMALLEST <= value <= _LARGEST:
            raise ValueError(f"{value} does not fit 64 bits")
        return str(value)
    if isinstance(value, float):
        return repr(rounded(value))
    if isinstance(value, str):
        return _quoted(value)
    if type(value) is date:
        return value.isoformat()
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    raise ValueError(f"a value of type {type(value).__name__} has no form in TOML")


def _quoted(text: str) -> str:
    """Raises ValueError for a lone surrogate."""
    text.encode()
    return f'"{"".join(map(_escaped, text))}"'


def _escaped(char: str) -> str:
    if char in _SHORT:
        return _SHORT[char]
    return f"\\u{ord(char):04x}" if ord(char) < 0x20 or ord(char) == 0x7F else char
