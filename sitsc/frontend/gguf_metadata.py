"""Typed access to the metadata of a GGUF file's architecture, remembering what was asked for.

In: the metadata of the header. Out: checked numbers and texts, and the keys nobody asked for.
"""

import struct
from typing import Any

from sitsc.core.errors import CheckpointError, UnsupportedModelError
from sitsc.frontend.safe_files import shown

# Metadata that says nothing beyond what is read elsewhere.
INERT = {"vocab_size", "attention.layer_norm_epsilon", "attention.value_length", "expert_count"} | {
    "expert_used_count"
}


class Metadata:
    """Typed access to `llama.*` keys that remembers which were used."""

    def __init__(self, metadata: dict[str, Any], arch: str) -> None:
        self.values = {
            k.removeprefix(f"{arch}."): v for k, v in metadata.items() if k.startswith(f"{arch}.")
        }
        self.arch, self.used = arch, set(INERT)

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """Value of `key`; without a default its absence is an error."""
        self.used.add(key)
        value = self.values.get(key, default)
        if value is None:
            raise CheckpointError(f"metadata key {self.arch}.{key} is missing")
        if isinstance(value, list):
            raise UnsupportedModelError(f"{self.arch}.{key} differs from layer to layer")
        good = type(value) is kind
        if kind in (int, float):
            good = good and 0 < value < 1 << 31
        if not good:
            raise CheckpointError(f"{self.arch}.{key} is {shown(value)}")
        return shortest(value) if kind is float else value

    def has(self, key: str) -> bool:
        return key in self.values

    def unknown(self) -> dict[str, Any]:
        """Keys nobody asked for, under their full name."""
        return {f"{self.arch}.{k}": v for k, v in self.values.items() if k not in self.used}


def shortest(value: float) -> float:
    """The decimal number a float32 was written from: 9.99999974e-06 is 1e-05."""
    for digits in range(1, 10):
        text = float(f"{value:.{digits}g}")
        try:
            if struct.pack("<f", text) == struct.pack("<f", value):
                return text
        except OverflowError:
            continue
    return value
