"""What is written of the sampled rows, and when nothing is."""

from typing import Any

import numpy as np
import torch

from sitsc.core.sampling import SamplingOptions
from sitsc.core.serving.batch import UNKNOWN, StepBatch
from sitsc.core.serving.sampling_rows import bitmap_of_ids, bitmap_words
from sitsc.runtime.cuda_rows import DeviceRows
from sitsc.runtime.sampler import SamplerRow

VOCABULARY, MOST = 70, 6
WORDS = bitmap_words(VOCABULARY)


class Device:
    """Buffers as the device would hold them."""

    def __init__(self) -> None:
        self.buffers: dict[str, Any] = {n: np.zeros(MOST * WORDS) for n in ("seen", "mask")}
        self.puts = 0

    def put(self, name: str, values: Any, start: int = 0) -> None:
        self.puts += 1
        buffer = self.buffers.setdefault(name, np.zeros(MOST))
        buffer[start : start + len(values)] = values

    def field(self, name: str, count: int = MOST) -> list[float]:
        return self.buffers[name][:count].tolist()


def begun() -> tuple[DeviceRows, Device]:
    rows, device = DeviceRows(MOST, VOCABULARY), Device()
    rows.reset(device)  # pyright: ignore[reportArgumentType]
    device.puts = 0
    return rows, device


def batch(ids: tuple[int, ...], tokens: list[int] | None = None) -> StepBatch:
    count = len(ids)
    tokens = tokens or [UNKNOWN] * count
    return StepBatch(
        "decode", ids, tokens, list(range(count + 1)), [9] * count, [[0]] * count, [True] * count
    )


def row(history: list[int], prompt: int, mask: torch.Tensor | None = None, **options: Any):
    made = SamplerRow.begin(SamplingOptions(**options), history, prompt)
    made.mask = mask
    return made


def write(rows: DeviceRows, device: Device, step: StepBatch, given: list[Any], bucket: int = 4):
    rows.write(device, step, given, bucket)  # pyright: ignore[reportArgumentType]


def test_greedy_rows_are_never_written() -> None:
    rows, device = begun()
    for ids in ((1,), (1, 2, 3), (2, 3)):
        write(rows, device, batch(ids), [row([5], 1) for _ in ids])
    assert device.puts == 0


def test_a_row_is_written_once_and_left_idle_after() -> None:
    rows, device = begun()
    drawn = row([5, 6, 7], 2, temperature=0.5, top_k=9, seed=77, min_tokens=4)
    write(rows, device, batch((8, 9)), [row([5], 1), drawn])
    assert device.field("temperature", 4) == [0, 0.5, 0, 0]
    assert device.field("step", 2) == [1, 2]  # one more is in flight
    assert (device.field("suppress", 2), device.field("seed", 2)[1]) == ([0, 2], 77)
    before = device.puts
    write(rows, device, batch((8, 9)), [row([5], 1), drawn])
    assert device.puts == before
    write(rows, device, batch((8,)), [row([5], 1)], bucket=1)
    assert device.field("temperature", 1) == [0]
    write(rows, device, batch((8, 10)), [row([5], 1), row([5], 1)])
    assert device.field("temperature", 4) == [0] * 4 and device.field("penalty", 4) == [1] * 4


def test_known_tokens_are_not_counted_twice() -> None:
    rows, device = begun()
    write(rows, device, batch((1,), [7]), [row([5, 6, 7], 2, temperature=1.0)])
    assert device.field("step", 1) == [1]


def test_penalised_requests_keep_a_bitmap_that_is_given_back() -> None:
    rows, device = begun()
    ids = tuple(range(MOST))
    write(rows, device, batch(ids), [row([i, 69], 2, repetition_penalty=1.2) for i in ids], MOST)
    slots = [int(slot) for slot in device.field("slot")]
    assert sorted(slots) == list(range(MOST))
    for request, slot in zip(ids, slots, strict=True):
        words = device.buffers["seen"][slot * WORDS : (slot + 1) * WORDS]
        assert words.tolist() == bitmap_of_ids([request, 69], VOCABULARY).tolist()
    rows.forget(3)
    rows.forget(3)
    write(rows, device, batch((77,)), [row([1], 1, repetition_penalty=1.2)], 1)
    assert device.field("slot", 1) == [slots[3]]


def test_masks_are_written_each_step_and_taken_off() -> None:
    rows, device = begun()
    allowed = torch.zeros(VOCABULARY + 10, dtype=torch.bool)
    for step in range(3):
        allowed[:] = False
        allowed[step] = True
        write(rows, device, batch((4, 5)), [row([1], 1), row([1], 1, mask=allowed)])
        words = device.buffers["mask"][WORDS : 2 * WORDS]
        assert words.tolist() == bitmap_of_ids([step], VOCABULARY).tolist()
        assert device.field("has_mask", 2) == [0, 1]
    write(rows, device, batch((4, 5)), [row([1], 1), row([1], 1)])
    assert device.field("has_mask", 2) == [0, 0]


def test_a_seed_is_drawn_once() -> None:
    rows, device = begun()
    one, two = row([1], 1, temperature=1.0), row([2], 1, temperature=1.0)
    write(rows, device, batch((1, 2)), [one, two])
    first = device.field("seed", 2)
    write(rows, device, batch((2, 1)), [two, one])
    assert device.field("seed", 2) == first[::-1] and first[0] != first[1]


def test_whether_a_row_draws() -> None:
    """Known for every step, whether or not fields are written for it."""
    rows, device = begun()
    greedy, hot = row([3], 1), row([3], 1, temperature=0.5)
    penalised = row([3], 1, repetition_penalty=2.0)
    steps = [
        ((1, 2), [greedy, greedy], False),
        ((1, 3), [greedy, hot], True),
        ((1, 3), [greedy, hot], True),
        ((1,), [greedy], False),
        ((4,), [penalised], False),
        ((3,), [hot], True),
        ((3,), [row([3], 1, torch.ones(VOCABULARY), temperature=0.5)], True),
        ((2,), [greedy], False),
    ]
    for ids, given, draws in steps:
        write(rows, device, batch(ids), given)
        assert rows.draws == draws, ids
    write(rows, device, batch((3,)), [hot])
    rows.reset(device)  # pyright: ignore[reportArgumentType]
    assert not rows.draws
