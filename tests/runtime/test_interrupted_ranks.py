"""Answers of the last stage belong to their steps, also after an interrupt dropped some."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from sitsc.core.sampling import SamplingOptions
from sitsc.core.serving.batch import StepBatch
from sitsc.runtime import cuda_rank_steps, rank_messages, rank_steps
from sitsc.runtime.sampler import Sampler, SamplerRow

VOCABULARY = 8
STEP = StepBatch("decode", (4,), [3], [0, 1], [5], [[0]], [True])
QUIET = StepBatch("prefill", (4,), [3], [0, 1], [5], [[0]], [False])


class Wire:
    """Answers of the last rank in the order in which it sends them: a token a step with rows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.next = 0
        sent = SimpleNamespace(wait=lambda: None)
        monkeypatch.setattr(rank_messages.dist, "isend", lambda *a, **k: sent)
        for module in (rank_steps, cuda_rank_steps):
            monkeypatch.setattr(module.dist, "recv", self.receive)

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> None:
        assert source == 1
        if tensor.dim() == 2:  # logits
            tensor.zero_()
            tensor[:, self.next] = 1
        else:
            tensor.fill_(self.next)
        self.next += 1


def world() -> Any:
    watch = Mock(busy=nullcontext, waiting=nullcontext, on_device=nullcontext)
    return SimpleNamespace(rank=0, tp=1, pp=2, last=1, after=1, watch=watch)


def on_cpus() -> Any:
    tokens = SimpleNamespace(logits_width=VOCABULARY)
    executor: Any = SimpleNamespace(
        plan=SimpleNamespace(tokens=tokens),
        outputs=lambda batch: [torch.zeros(1)],
        predicted_s=lambda batch: 0.0,
    )
    return rank_steps.RankSteps(executor, SimpleNamespace(), world(), Sampler(VOCABULARY))  # pyright: ignore


def on_gpus() -> Any:
    plan = SimpleNamespace(memory=SimpleNamespace(arena=()))
    executor: Any = SimpleNamespace(
        plan=plan, write_rows=lambda *_: None, follow=lambda *_, **__: None
    )
    return cuda_rank_steps.CudaRankSteps(executor, world())


@pytest.mark.parametrize("make", [on_cpus, on_gpus])
def test_answers_of_dropped_steps_are_left_out(make, monkeypatch: pytest.MonkeyPatch) -> None:
    Wire(monkeypatch)
    steps, row = make(), SamplerRow.begin(SamplingOptions(), [1, 2], 2)
    assert steps.collect(steps.submit(STEP, [row])) == [0]
    steps.submit(STEP, [row])  # its answer is 1, and nobody asks for it
    steps.submit(QUIET, [])
    assert steps.collect(steps.submit(STEP, [row])) == [2]
    first, second = steps.submit(STEP, [row]), steps.submit(STEP, [row])
    assert (steps.collect(first), steps.collect(second)) == ([3], [4])
