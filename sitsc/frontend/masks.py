"""What transformers' masks hide, told to attention as one number in place of a tensor.

A mask is asked about single positions while the model is traced. Attention is then either causal or
causal with a window; every other mask (chunks, prefixes seen both ways) is refused by name.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from sitsc.core.errors import UnsupportedModelError

# Rows of the mask that are looked at, beside those around a window's edge.
_ROWS = (0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 255, 1000, 4096)

OWN = "the model has attention of its own, which the compiler does not know"
OWN_HINT = "biases by distance (ALiBi) and layers that choose what they see cannot be compiled"


@dataclass(frozen=True, slots=True)
class Seen:
    """How many tokens up to itself each token sees; 0 means all. None: something else.

    Only our attention reads it: a model that computes with its mask has attention of its own.
    """

    window: int | None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedModelError(OWN, hint=OWN_HINT)

    def __getitem__(self, key: Any) -> Any:
        raise UnsupportedModelError(OWN, hint=OWN_HINT)

    def __radd__(self, other: Any) -> Any:
        raise UnsupportedModelError(OWN, hint=OWN_HINT)


@contextmanager
def told_masks(implementation: str) -> Iterator[None]:
    """While tracing: masks of attention `implementation` are `Seen`, one sequence a step."""
    from transformers import masking_utils  # noqa: PLC0415  (heavy; only compiling needs it)

    def seen(**given: Any) -> Seen:
        return Seen(window_of(given["mask_function"], int(given.get("local_size") or 0)))

    masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register(implementation, seen)
    # It looks for several sequences in one row, by position; a step's row is never asked for that.
    packed = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = packed


def window_of(mask: Callable[..., Any], local: int) -> int | None:
    """The window of a mask function (batch, head, query, key) → seen; `local` is near its edge."""
    near = [local + d for d in (-2, -1, 0, 1, 2)] + [2 * local, 2 * local + 1, 3 * local + 2]
    rows = sorted({row for row in [*_ROWS, *near] if row >= 0})
    window = 0
    try:
        with _disable_current_modes(), torch.device("cpu"):  # real numbers while others are traced
            zero = torch.zeros((), dtype=torch.long)
            for row in reversed(rows):
                keys = torch.arange(row + 4)
                seen = mask(zero, zero, torch.tensor(row), keys).expand(len(keys))
                if row == rows[-1]:
                    window = int(seen.sum())
                    window = 0 if window == row + 1 else window
                first = max(0, row + 1 - window) if window else 0
                if not torch.equal(seen, (keys <= row) & (keys >= first)):
                    return None
    except Exception:  # it depends on more than positions: on the tokens, say
        return None
    return window


def agreed_window(mask: Any, window: int, layer: int) -> int:
    """The window of a layer, by its mask and by what attention was told, 0 for none.

    Raises UnsupportedModelError when they differ or the mask is of another kind.
    """
    if mask is None:
        return window
    if not isinstance(mask, Seen):
        raise UnsupportedModelError("the model passes its own attention mask")
    if mask.window is None:
        raise UnsupportedModelError(
            f"layer {layer} hides tokens otherwise than by a window of the last ones",
            hint="attention in chunks or over blocks seen both ways is not known",
        )
    if window not in (0, mask.window):
        raise UnsupportedModelError(
            f"layer {layer} attends with a window of {window}, its mask shows "
            f"{mask.window or 'all'} tokens"
        )
    return mask.window
