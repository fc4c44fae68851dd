"""The `sitsc::` operators: schema, fake implementation and plain-torch reference of each.

Importing this package registers all of them, so that a graph can be executed at every stage.
"""

from sitsc.core.ops import (
    attention,
    collectives,
    embedding,
    keep,
    linear,
    moe,
    norm,
    rope,
    rope_table,
)

__all__ = [
    "attention",
    "collectives",
    "embedding",
    "keep",
    "linear",
    "moe",
    "norm",
    "rope",
    "rope_table",
]
