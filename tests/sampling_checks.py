"""The sampling kernels over rows of a batch, against the CPU sampler on the same logits.

Used at tiny vocabularies in Triton's interpreter and at a real one on a GPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sitsc.codegen.cuda_templates import Sizes, instance
from sitsc.codegen.triton_source import KernelSource
from sitsc.core.errors import SamplingError
from sitsc.core.sampling import SamplingOptions
from sitsc.core.serving import sampling_rows
from sitsc.core.serving.sampling_rows import SamplingRow, bitmap_of_flags, bitmap_of_ids
from sitsc.runtime.sampler import Sampler, SamplerRow, candidates
from tests.kernel_checks import Step, launch

KERNELS = ("sample_scan", "sample_count", "sample_gather", "sample_draw")
TYPES = {"*fp32": torch.float32, "*fp64": torch.float64, "*i32": torch.int32, "*i64": torch.int64}
FIELDS = tuple(field.name for field in fields(SamplingRow))


@dataclass(frozen=True)
class Case:
    """A request: its options, prompt, answer so far, allowed ids (None: all)."""

    options: SamplingOptions
    prompt: tuple[int, ...] = (3, 5, 5, 8)
    answer: tuple[int, ...] = ()
    allowed: tuple[int, ...] | None = None
    seed: int = 0


class DeviceRows:
    """The arrays of a batch on a device, and the launches over them.

    `tile` is for all kernels, or under a kernel's name for that one.
    """

    def __init__(
        self,
        vocabulary: int,
        cases: Sequence[Case],
        *,
        width: int | None = None,
        eos_ids: tuple[int, ...] = (),
        device: str = "cpu",
        **tile: Any,
    ) -> None:
        self.vocabulary, self.width, self.eos_ids = vocabulary, width or vocabulary, eos_ids
        self.cases, self.device, self.tile = list(cases), device, tile
        words, rows = sampling_rows.bitmap_words(vocabulary), len(cases)
        order = list(reversed(range(rows)))  # of the slots
        self.rows = [self._row(case, order[i]) for i, case in enumerate(cases)]
        seen, allowed = np.zeros((rows, words), np.int32), np.zeros((rows, words), np.int32)
        for i, case in enumerate(cases):
            seen[order[i]] = bitmap_of_ids((*case.prompt, *case.answer), vocabulary)
            if case.allowed is not None:
                allowed[i] = bitmap_of_flags(self.mask(case).numpy()[:vocabulary])
        self.values: dict[str, Any] = {
            "logits_ptr": torch.zeros(rows, self.width, device=device),
            "seen_ptr": torch.from_numpy(seen).to(device),
            "mask_ptr": torch.from_numpy(allowed).to(device),
        }
        sources = self.sources(pdl=False)
        types = {name: TYPES[kind] for source in sources for name, kind in source.arguments}
        for name in FIELDS:
            column = [getattr(row, name) for row in self.rows]
            self.values[f"{name}_ptr"] = torch.tensor(
                column, dtype=types[f"{name}_ptr"], device=device
            )
        scan, count, _, draw = (source.constants for source in sources)
        shapes = {
            "best_ptr": (rows, 2, scan["PARTS"]),
            "index_ptr": (rows, 2, scan["PARTS"]),
            "counter_ptr": (rows, 2),
            "state_ptr": (rows,),
            "summary_ptr": (rows, 4),
            "ids_ptr": (rows,),
            "histogram_ptr": (rows, count["BINS"]),
            "weight_ptr": (rows, count["PARTS"]),
            "plan_ptr": (rows, 8),
            "list_ptr": (rows, draw["MANY"]),
            "mass_ptr": (rows, 5),
            "border_ptr": (rows,),
        }
        for name, shape in shapes.items():
            self.values[name] = torch.full(shape, -7, dtype=types[name], device=device)
        for name in ("counter_ptr", "histogram_ptr", "mass_ptr"):
            self.values[name].zero_()
        # With `advance`, the inputs of the next step: every third row is idle.
        lengths = torch.arange(rows, device=device)
        lengths[::3] = -1
        self.values["token_ids_ptr"] = torch.full((rows,), -7, device=device)
        self.values["position_ids_ptr"] = lengths + 5
        self.values["context_lens_ptr"] = lengths.int()

    def _row(self, case: Case, slot: int) -> SamplingRow:
        return sampling_rows.sampling_row(
            case.options,
            seed=case.seed,
            num_generated=len(case.answer),
            vocabulary=self.vocabulary,
            slot=slot,
            has_mask=case.allowed is not None,
        )

    def mask(self, case: Case) -> Tensor:
        """Allowed ids, bool [width]."""
        flags = torch.zeros(self.width, dtype=torch.bool)
        flags[list(case.allowed or ())] = True
        return flags

    def sources(self, pdl: bool) -> list[KernelSource]:
        shape: dict[str, Any] = {
            "vocabulary": self.vocabulary,
            "width": self.width,
            "eos_ids": self.eos_ids,
        }
        found = []
        for name in KERNELS:
            own = {k: v for k, v in self.tile.items() if k not in (*KERNELS, "few", "many")}
            sizes = {"sample_gather": ("many",), "sample_draw": ("few", "many")}.get(name, ())
            own |= {k: v for k, v in self.tile.items() if k in sizes}
            if name == "sample_draw":
                own.pop("parts", None)
            own |= self.tile.get(name, {})
            found.append(instance(name, pdl=pdl, **shape, **own))
        return found

    def steps(self, pdl: bool) -> list[Step]:
        sizes = Sizes(rows=len(self.cases))
        return [launch(source, sizes, self.values) for source in self.sources(pdl)]

    def sample(self, logits: Tensor, run: Callable[[Step], None], pdl: bool = False) -> list[int]:
        """One step over `logits` [rows, width]; counters and histograms must end at zero."""
        self.values["logits_ptr"].copy_(logits)
        for step in self.steps(pdl):
            run(step)
        for name in ("counter_ptr", "histogram_ptr", "mass_ptr"):
            assert not self.values[name].any(), name
        return self.values["ids_ptr"].tolist()

    def kept(self, index: int) -> Tensor:
        """The ids that top_k and top_p kept in the last step, by the border that it left."""
        distance, scores = distances(self, index)
        border = int(self.values["border_ptr"][index])
        order = torch.from_numpy(distance).view(torch.int32).long()
        keys = (order << 32) | torch.arange(self.vocabulary)
        return torch.nonzero((keys <= border) & torch.from_numpy(scores > -np.inf)).flatten()


def adjusted(rows: DeviceRows, index: int) -> np.ndarray:
    """The scores of a row after penalty, suppression and mask, by the CPU sampler."""
    case = rows.cases[index]
    scores = rows.values["logits_ptr"][index].cpu().numpy()[: rows.vocabulary]
    sampler = Sampler(rows.vocabulary, rows.width, rows.eos_ids)
    changed = sampler._adjust(scores, cpu_row(rows, case))
    return scores if changed is None else changed


def distances(rows: DeviceRows, index: int) -> tuple[np.ndarray, np.ndarray]:
    scores = adjusted(rows, index)
    temperature = np.float32(rows.cases[index].options.temperature)
    return (scores.max() - scores) / temperature, scores


def cpu_row(rows: DeviceRows, case: Case) -> SamplerRow:
    row = SamplerRow.begin(case.options, [*case.prompt, *case.answer], len(case.prompt))
    row.mask = None if case.allowed is None else rows.mask(case)
    return row


def cpu_sample(rows: DeviceRows, logits: Tensor) -> list[int]:
    """What the CPU sampler draws, errors as the device writes them."""
    sampler = Sampler(rows.vocabulary, rows.width, rows.eos_ids)
    found = sampler.sample(logits, [cpu_row(rows, case) for case in rows.cases])
    return [_code(one) if isinstance(one, SamplingError) else one for one in found]


def _code(error: SamplingError) -> int:
    nothing = "no token is allowed" in str(error)
    return sampling_rows.NOTHING_ALLOWED if nothing else sampling_rows.NOT_FINITE


def survivors(rows: DeviceRows, index: int) -> tuple[np.ndarray, np.ndarray]:
    """The CPU sampler's ids of a drawing row; and all ids of the row that weigh anything.

    A weight below exp(-32) of the best's is nothing to the kernels.
    """
    distance, scores = distances(rows, index)
    ids, _ = candidates(scores, rows.cases[index].options)
    everything = np.arange(len(scores))
    return (everything if ids is None else ids), everything[distance < 32]


def random_bits(seed: int, step: int) -> int:
    """The 64 bits of a draw: Philox 4x32 with 10 rounds, keyed by the seed, at the step."""
    word = 2**32 - 1
    counter, keys = [step & word, step >> 32, 0, 0], [seed & word, seed >> 32]
    for _ in range(10):
        left, right = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (right >> 32) ^ counter[1] ^ keys[0],
            right & word,
            (left >> 32) ^ counter[3] ^ keys[1],
            left & word,
        ]
        keys = [(keys[0] + 0x9E3779B9) & word, (keys[1] + 0xBB67AE85) & word]
    return counter[0] << 32 | counter[1]


def drawn(ids: np.ndarray, distance: np.ndarray, shift: int, bits: int) -> int:
    """The id that 64 random bits mean among `ids` [n] at these distances from the best [n]."""
    order = np.lexsort((ids, distance))
    masses = (np.exp(-distance[order]) * np.float32(2**shift) + np.float32(0.5)).astype(np.int64)
    sums = masses.cumsum()
    return int(ids[order[sums.searchsorted(bits * int(sums[-1]) >> 64, side="right")]])
