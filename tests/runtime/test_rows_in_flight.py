"""Sampled rows and ids on their way, while micro-batches take turns on GPUs.

A model of what the devices hold: tokens come from the mail by `_where`'s sources, the kernels move
`step`, `suppress` and the seen ids on. With preemptions, aborts, ends in flight and chunks.
"""

import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sitsc.core.sampling import SamplingOptions
from sitsc.core.serving.batch import UNKNOWN, StepBatch
from sitsc.core.serving.kv_blocks import PagePool
from sitsc.core.serving.sampling_rows import bitmap_words
from sitsc.core.serving.scheduler import Scheduler, SchedulerLimits
from sitsc.passes.cuda_step import mail_slots
from sitsc.runtime.cuda_executor import CudaExecutor
from sitsc.runtime.cuda_rows import DeviceRows
from sitsc.runtime.sampler import SamplerRow

VOCABULARY, EOS = 70, 1
WORDS = bitmap_words(VOCABULARY)


class Stages:
    """Several GPUs: the last samples, the first finds the ids in its mail."""

    def __init__(self, stages: int, most: int, rng: random.Random) -> None:
        self.stages, self.most, self.rng = stages, most, rng
        self.rows, self.fields = DeviceRows(most, VOCABULARY), {}
        self.rows.reset(self)  # pyright: ignore[reportArgumentType]
        self.mail: dict[int, tuple[int, list[int]]] = {}
        self.sources: deque[dict[int, int]] = deque(maxlen=stages)
        self.tokens: dict[int, list[int]] = {}  # of each request, those in flight included
        self.count = 0

    def put(self, name: str, values: Any, start: int = 0) -> None:
        each = WORDS if name in ("seen", "mask") else 1
        kind = np.int64 if name == "seen" else values.dtype
        buffer = self.fields.setdefault(name, np.zeros(self.most * each, kind))
        buffer[start : start + len(values)] = values

    def step(self, batch: StepBatch, rows: list[SamplerRow]) -> list[int]:
        """The ids of a step; all that it was given must be right."""
        self.place(batch)
        count = len(batch.sampled_ids)
        sizes = [size for size in (1, 2, 4, 8) if size >= count]
        bucket = min(self.most, sizes[0]) if batch.regime == "decode" else max(1, count)
        self.rows.write(self, batch, rows, bucket)  # pyright: ignore[reportArgumentType]
        ids = [self.sample(*one) for one in enumerate(zip(batch.sampled_ids, rows, strict=True))]
        self.fields["step"][:bucket] += 1
        self.fields["suppress"][:bucket] = np.maximum(self.fields["suppress"][:bucket] - 1, 0)
        self.mail[self.count % mail_slots(self.stages)] = (self.count, ids)
        self.sources.appendleft({owner: row for row, owner in enumerate(batch.sampled_ids)})
        self.count += 1
        return ids

    def place(self, batch: StepBatch) -> None:
        plan = SimpleNamespace(schedule=SimpleNamespace(max_batch=self.most))
        executor: Any = SimpleNamespace(plan=plan, _sources=self.sources)
        where = CudaExecutor._where(executor)
        for row, owner in enumerate(batch.request_ids):
            start, end = batch.query_start[row : row + 2]
            given = batch.token_ids[start:end]
            if given[-1] == UNKNOWN:
                since, at = divmod(where[owner], self.most)
                number, ids = self.mail[(self.count - 1 - since) % mail_slots(self.stages)]
                assert number == self.count - 1 - since, "the mail was written over"
                given[-1] = ids[at]
            context = batch.context_lens[row]
            assert given == self.tokens[owner][context : context + len(given)]

    def sample(self, at: int, one: tuple[int, SamplerRow]) -> int:
        (owner, row), fields = one, self.fields
        known, options = self.tokens[owner], row.options
        generated = len(known) - row.num_prompt_tokens
        suppress = max(0, options.min_tokens - generated)
        assert fields["suppress"][at] == suppress
        assert fields["temperature"][at] == options.temperature
        if options.temperature:
            assert (fields["seed"][at], fields["step"][at]) == (options.seed, generated)
        token = self.rng.randint(EOS + (suppress > 0), VOCABULARY - 1)
        if options.repetition_penalty != 1:
            start = int(fields["slot"][at]) * WORDS
            words = fields["seen"][start : start + WORDS]
            seen = {t for t in range(VOCABULARY) if int(words[t // 32]) >> t % 32 & 1}
            assert seen == set(known)
            words[token // 32] |= 1 << token % 32
        known.append(token)
        return token


OPTIONS = [
    SamplingOptions(max_tokens=9),
    SamplingOptions(max_tokens=12, temperature=1.0, seed=7, min_tokens=3),
    SamplingOptions(max_tokens=12, repetition_penalty=1.5),
    SamplingOptions(max_tokens=9, min_tokens=4),
]


@pytest.mark.parametrize("seed", range(12))
def test_every_row_has_the_fields_of_its_request(seed: int) -> None:
    rng, stages = random.Random(seed), 2 + seed % 3
    most = rng.randint(1, 6)
    limits = SchedulerLimits(
        most,
        most + rng.randint(0, 8),
        rng.randint(1, 6),
        60,
        micro_batches=stages,
        tokens_ahead=True,
    )
    machine = Scheduler(limits, PagePool(rng.randint(20, 40), 3), {EOS})
    devices = Stages(stages, most, rng)
    rows: dict[int, SamplerRow] = {}
    flying: deque[tuple[StepBatch, list[int]]] = deque()
    for _ in range(250):
        if rng.random() < 0.3 and len(rows) < 10:
            prompt = [rng.randint(2, VOCABULARY - 1) for _ in range(rng.randint(1, 12))]
            request = machine.add(prompt, rng.choice(OPTIONS))
            rows[request.id] = SamplerRow.begin(request.options, request.token_ids, len(prompt))
            devices.tokens[request.id] = list(prompt)
        ended = []
        if rng.random() < 0.05 and rows:
            ended.append(machine.abort(rng.choice(list(rows))))
        batch = machine.schedule() if not ended else None
        if batch is not None:
            flying.append((batch, devices.step(batch, [rows[i] for i in batch.sampled_ids])))
        if flying and (batch is None or len(flying) > stages):
            ended += machine.settle(*flying.popleft())
        for request in ended:
            assert request is not None
            devices.rows.forget(request.id)
            del rows[request.id]
    assert devices.count > 100
