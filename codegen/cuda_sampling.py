"""Sampling on CUDA with every option of the CPU sampler: four kernels, a row a sequence.

sample_scan ends greedy rows; sample_count, sample_gather and sample_draw
draw for the others, and return at once for a row that is done. Between two steps nothing is needed
from the host. Candidates and draws hang on a row's logits, options, seed and step alone.
"""

from collections.abc import Collection

from sitsc.codegen.cuda_instance import make, power_of_two
from sitsc.codegen.triton_source import KernelSource
from sitsc.core.errors import CompileError
from sitsc.core.serving.sampling_rows import bitmap_words

_REACH = 32  # of distances that are told apart: beyond, a weight rounds to 0
_MAX_SHIFT = 45  # exp(-_REACH) * 2**45 < 0.5
_ROW = {
    "logits_ptr": "*fp32",
    "temperature_ptr": "*fp32",
    "penalty_ptr": "*fp32",
    "suppress_ptr": "*i32",
    "has_mask_ptr": "*i32",
    "mask_ptr": "*i32",
    "slot_ptr": "*i32",
    "seen_ptr": "*i32",
    "step_ptr": "*i64",
}
_DRAW = {"top_k_ptr": "*i32", "top_p_ptr": "*fp64", "min_p_ptr": "*fp32", "seed_ptr": "*i64"}
_LINK = {"state_ptr": "*i32", "summary_ptr": "*fp32"}
_NEXT = {"token_ids_ptr": "*i64", "position_ids_ptr": "*i64", "context_lens_ptr": "*i32"}


def _constants(vocabulary: int, width: int | None, parts: int, block: int) -> dict[str, int]:
    width = vocabulary if width is None else width
    if not 0 < vocabulary <= width:
        raise CompileError(
            f"{vocabulary} ids do not fit in logits of {width}", hint="width >= vocabulary"
        )
    span = -(-vocabulary // parts)
    return {
        "V": vocabulary,
        "WIDTH": width,
        "WORDS": bitmap_words(vocabulary),
        "PARTS": parts,
        "SPAN": span,
        "BLOCK": min(block, power_of_two(span)),
    }


def sample_scan(
    *,
    vocabulary: int,
    width: int | None = None,
    eos_ids: Collection[int] = (),
    parts: int = 32,
    bins: int = 2048,
    block: int = 1024,
    ahead: int = 4,
    advance: int = 0,
    num_warps: int = 8,
    pdl: bool = True,
    early: bool = True,
) -> KernelSource:
    """The best id of every row, as the CPU sampler's greedy choice; grid (rows, parts).

    `ahead` blocks are requested at once. With `advance` here and in sample_draw a row's id also
    becomes its next token_ids [rows], and its position_ids and context_lens move on (-1: idle).

    Fields of the rows, written by the host before a row's first step (`SamplingRow`):
      logits_ptr       fp32 [rows, width]; ids from `vocabulary` on are padding
      temperature_ptr  fp32 [rows]: 0 greedy
      penalty_ptr      fp32 [rows]: repetition penalty, 1 none
      suppress_ptr     int32 [rows]: tokens to come before end of text is allowed; counts down here
      has_mask_ptr     int32 [rows]: not 0 where the row's mask holds
      mask_ptr         int32 [rows, ceil(vocabulary / 32)]: allowed ids, bit id % 32 of id // 32
      slot_ptr         int32 [rows]: the row of seen_ptr (any valid one where the penalty is 1)
      seen_ptr         int32 [slots, ceil(vocabulary / 32)]: ids of prompt and answer; kept here
      step_ptr         int64 [rows]: tokens generated so far; counts up here
    Scratch: best_ptr fp32 and index_ptr int32 [rows, 2, parts], counter_ptr int32 [rows, 2] zero.
    Out: state_ptr int32 [rows], summary_ptr fp32 [rows, 4] for the next kernels; ids_ptr int64
    [rows]: the id, or NOTHING_ALLOWED (-1), NOT_FINITE (-2), which leave the row's fields alone.
    """
    kinds = _ROW | {"best_ptr": "*fp32", "index_ptr": "*i32", "counter_ptr": "*i32"}
    kinds |= _LINK | {"ids_ptr": "*i64"} | (_NEXT if advance else {})
    constants = _constants(vocabulary, width, parts, block)
    constants |= {"BLOCK_PARTS": power_of_two(parts), "BINS": bins, "REACH": _REACH}
    more = {"ahead": ahead, "advance": advance}
    return _make("sample_scan", kinds, constants, eos_ids, num_warps, pdl, early, **more)


def sample_count(
    *,
    vocabulary: int,
    width: int | None = None,
    eos_ids: Collection[int] = (),
    parts: int = 32,
    bins: int = 2048,
    block: int = 4096,
    num_warps: int = 16,
    pdl: bool = True,
    early: bool = True,
) -> KernelSource:
    """Plans the draws of rows with a temperature; grid (rows, parts). See sample_scan, and:

      top_k_ptr   int32 [rows]: 0 all        top_p_ptr  fp64 [rows]: 1 all
      min_p_ptr   fp32 [rows]: 0 all         seed_ptr   int64 [rows]
    Scratch: histogram_ptr int64 [rows, bins] zero, weight_ptr fp32 [rows, parts]; counter_ptr as
    there. Out: plan_ptr int32 [rows, 8]. `bins` is the same in the four kernels.
    """
    kinds = _ROW | _DRAW | _LINK | {"histogram_ptr": "*i64", "weight_ptr": "*fp32"}
    kinds |= {"counter_ptr": "*i32", "plan_ptr": "*i32"}
    constants = _constants(vocabulary, width, parts, block)
    constants |= {"BLOCK_PARTS": power_of_two(parts), "BINS": bins, "REACH": _REACH}
    return _make("sample_count", kinds, constants, eos_ids, num_warps, pdl, early)


def sample_gather(
    *,
    vocabulary: int,
    width: int | None = None,
    eos_ids: Collection[int] = (),
    parts: int = 32,
    bins: int = 2048,
    many: int = 2048,
    block: int = 512,
    num_warps: int = 16,
    pdl: bool = True,
    early: bool = True,
) -> KernelSource:
    """Gathers the candidates that decide a draw; grid (rows, parts). See the two before.

    Out: list_ptr int64 [rows, many], in counter_ptr how many, and mass_ptr int64 [rows, 5], zero
    before and after a step. `many` is the same here and in sample_draw.
    """
    names = ("step_ptr", "top_k_ptr", "top_p_ptr", "seed_ptr")
    kinds = {name: kind for name, kind in (_ROW | _DRAW | _LINK).items() if name not in names}
    kinds |= {"plan_ptr": "*i32", "list_ptr": "*i64", "mass_ptr": "*i64", "counter_ptr": "*i32"}
    constants = _constants(vocabulary, width, parts, block)
    constants |= {"BINS": bins, "SHIFT": _shift(vocabulary), "MANY": many}
    return _make("sample_gather", kinds, constants, eos_ids, num_warps, pdl, early)


def sample_draw(
    *,
    vocabulary: int,
    width: int | None = None,
    eos_ids: Collection[int] = (),
    bins: int = 2048,
    few: int = 256,
    many: int = 2048,
    block: int = 512,
    advance: int = 0,
    num_warps: int = 8,
    pdl: bool = True,
    early: bool = True,
) -> KernelSource:
    """Draws the token of rows with a temperature; grid (rows,). See those before, and:

    Out: ids_ptr int64 [rows], and border_ptr int64 [rows]: the key of the last candidate that
    top_k and top_p keep, its distance's bits << 32 | id. More than `many` candidates about a border
    (thousands of equal logits) are searched by bisection: right, but slow. `few` and `many` are
    powers of two.
    """
    kinds = _ROW | _DRAW | _LINK | {"plan_ptr": "*i32", "list_ptr": "*i64", "mass_ptr": "*i64"}
    kinds |= {"counter_ptr": "*i32", "border_ptr": "*i64", "ids_ptr": "*i64"}
    kinds |= _NEXT if advance else {}
    constants = _constants(vocabulary, width, 1, block)
    del constants["PARTS"], constants["SPAN"]
    constants |= {"BINS": bins, "SHIFT": _shift(vocabulary), "FEW": few, "MANY": many}
    return _make("sample_draw", kinds, constants, eos_ids, num_warps, pdl, early, advance=advance)


def _shift(vocabulary: int) -> int:
    """Masses are weights in units of 2**-shift: the sum of all stays below 2**63."""
    return min(_MAX_SHIFT, 62 - (vocabulary - 1).bit_length())


def _make(
    name: str,
    kinds: dict[str, str],
    constants: dict[str, int],
    eos_ids: Collection[int],
    num_warps: int,
    pdl: bool,
    early: bool,
    **parameters: int,
) -> KernelSource:
    eos = [id for id in sorted(set(eos_ids)) if 0 <= id < constants["V"]]
    return make(name, tuple(kinds.items()), constants, num_warps, pdl, early, eos=eos, **parameters)
