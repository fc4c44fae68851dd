"""One request's sampling options as the fields of its row on the device, and bitmaps of ids.

In: `SamplingOptions` and where the request stands. Out: plain numbers and int32 words, and what an
id below 0 from the device means. Writes nothing to a device.
"""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sitsc.core.errors import SamplingError
from sitsc.core.sampling import SamplingOptions

NOTHING_ALLOWED = -1
NOT_FINITE = -2
Words = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """The fields of a row, named as the kernels' arguments; the defaults are an idle row's.

    `suppress` counts the tokens to come before end of text is allowed, `step` those generated so
    far, `slot` is the place of the request's bitmap of seen ids.
    """

    temperature: float = 0.0  # fp32
    top_k: int = 0  # int32
    top_p: float = 1.0  # fp64
    min_p: float = 0.0  # fp32
    penalty: float = 1.0  # fp32
    seed: int = 0  # int64
    step: int = 0  # int64
    suppress: int = 0  # int32
    has_mask: int = 0  # int32
    slot: int = 0  # int32

    @property
    def is_plain(self) -> bool:
        """Whether the best logit is the token: no kernel but the first has anything to do."""
        return (
            self.temperature == 0
            and np.float32(self.penalty) == 1
            and not self.suppress
            and not self.has_mask
        )

    @property
    def needs_seen(self) -> bool:
        """Whether the bitmap at `slot` must hold the ids of prompt and answer."""
        return bool(np.float32(self.penalty) != 1)


def sampling_row(
    options: SamplingOptions,
    *,
    seed: int,
    num_generated: int,
    vocabulary: int,
    slot: int = 0,
    has_mask: bool = False,
) -> SamplingRow:
    """The row of a request that has `num_generated` tokens; `seed` from `request_seed`, kept."""
    largest = 2**31 - 1
    return SamplingRow(
        temperature=float(options.temperature),
        top_k=options.top_k if options.top_k < vocabulary else 0,
        top_p=float(options.top_p),
        min_p=float(options.min_p),
        penalty=float(options.repetition_penalty),
        seed=seed,
        step=num_generated,
        suppress=min(max(0, options.min_tokens - num_generated), largest),
        has_mask=int(has_mask),
        slot=slot,
    )


def request_seed(options: SamplingOptions) -> int:
    """The seed of a request, drawn once in its life: the option, or fresh entropy, below 2**63."""
    return secrets.randbits(63) if options.seed is None else options.seed


def bitmap_words(vocabulary: int) -> int:
    """How many int32 words a bitmap of ids takes."""
    return -(-vocabulary // 32)


def bitmap_of_ids(ids: Iterable[int], vocabulary: int) -> Words:
    """int32 [ceil(vocabulary / 32)] with the bits of `ids` set; those past the vocabulary drop."""
    flags = np.zeros(vocabulary, dtype=bool)
    wanted = np.fromiter(ids, dtype=np.int64)
    flags[wanted[wanted < vocabulary]] = True
    return bitmap_of_flags(flags)


def bitmap_of_flags(flags: npt.NDArray[np.bool_]) -> Words:
    """int32 [ceil(n / 32)]: bit id % 32 of word id // 32 is `flags`[id], bool [n]."""
    words = np.zeros(bitmap_words(len(flags)) * 32, dtype=bool)
    words[: len(flags)] = flags
    return np.packbits(words, bitorder="little").view("<i4").astype(np.int32, copy=False)


def sampling_error(id: int) -> SamplingError | None:
    """What an id that the device sampled means if it is below 0, as the CPU sampler says it."""
    if id == NOTHING_ALLOWED:
        return SamplingError("no token is allowed", hint="the mask leaves none over")
    if id == NOT_FINITE:
        return SamplingError(
            "the logits are not finite",
            hint="run `sitsc verify` on the model; a high repetition penalty can overflow them too",
        )
    assert id >= 0, f"the device sampled {id}"
    return None
