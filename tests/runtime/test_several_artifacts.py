"""Artifacts of several kinds and sizes in one process: none knows that the others are there."""

import gc
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sitsc
from sitsc.core.sampling import SamplingOptions
from sitsc.runtime.loader import Session, load
from sitsc.runtime.plain import PlainModel, load_plain

PROMPT = [(7 * i * i + 3) % 250 for i in range(40)]
NUM_NEW = 6
NUM_FIXED = 5  # rows of the function that takes no other number of them
ROWS = (1, 300, 3, 70, 1200, 2)


class Wide(nn.Module):
    """Linear layers over rows far wider than those of the tiny decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(1000)
        self.down, self.up = nn.Linear(1000, 24), nn.Linear(24, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(torch.relu(self.down(self.norm(x))))


@pytest.fixture(scope="module")
def wide() -> Wide:
    torch.manual_seed(0)
    return Wide().eval()


@pytest.fixture(scope="module")
def wide_artifact(wide: Wide, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sitsc.compile(
        wide,
        example_inputs=(torch.randn(3, 1000),),
        dynamic_shapes=({0: torch.export.Dim("rows")},),
        out=tmp_path_factory.mktemp("wide") / "wide.sitsc",
    ).root


@pytest.fixture(scope="module")
def fixed_artifact(wide: Wide, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with one number of rows, so that its scratch is planned."""
    inputs = (torch.randn(NUM_FIXED, 1000),)
    out = tmp_path_factory.mktemp("fixed") / "fixed.sitsc"
    return sitsc.compile(wide, example_inputs=inputs, out=out).root


@pytest.fixture(scope="module")
def answer(tiny_checkpoint: Path) -> tuple[int, ...]:
    """What transformers continues the prompt with."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415  (seconds)

    model: Any = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    ids = list(PROMPT)
    with torch.no_grad():
        for _ in range(NUM_NEW):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return tuple(ids[len(PROMPT) :])


def check(function: PlainModel, wide: Wide, rows: int) -> None:
    x = torch.randn(rows, 1000, generator=torch.Generator().manual_seed(rows))
    with torch.no_grad():
        assert (function(x) - wide(x)).abs().max() <= 1e-5


def greedy(session: Session) -> tuple[int, ...]:
    return session.engine.generate_batch([PROMPT], SamplingOptions(max_tokens=NUM_NEW))[0].token_ids


def test_a_plain_one_and_a_decoder_in_turn(
    wide: Wide,
    wide_artifact: Path,
    fixed_artifact: Path,
    tiny_artifact: Path,
    answer: tuple[int, ...],
):
    """Between the steps of an engine, functions with less and more scratch run."""
    small, large = load_plain(fixed_artifact), load_plain(wide_artifact)
    session = load(tiny_artifact)
    request = session.engine.add_request(PROMPT, SamplingOptions(max_tokens=NUM_NEW))
    found, turn = [], 0
    while session.engine.has_work:
        found += [t for o in session.engine.step() if o.request_id == request for t in o.token_ids]
        check(large, wide, ROWS[turn % len(ROWS)])
        check(small, wide, NUM_FIXED)
        turn += 1
    assert tuple(found) == answer


def test_one_that_is_gone_leaves_nothing(
    wide: Wide, wide_artifact: Path, fixed_artifact: Path, tiny_artifact: Path
):
    """Kernels keep no scratch of an artifact after its call: what else calls them has its own."""
    check(load_plain(fixed_artifact), wide, NUM_FIXED)
    greedy(load(tiny_artifact))
    gc.collect()
    check(load_plain(wide_artifact), wide, 1200)


def test_in_two_threads_at_once(
    wide: Wide, wide_artifact: Path, tiny_artifact: Path, answer: tuple[int, ...]
):
    session, function = load(tiny_artifact), load_plain(wide_artifact)
    failures: list[BaseException] = []

    def call() -> None:
        try:
            for rows in ROWS * 4:
                check(function, wide, rows)
        except BaseException as error:
            failures.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    answers = [greedy(session) for _ in range(8)]
    caller.join()
    assert not failures and answers == [answer] * 8


def test_threads_of_one_plan_are_not_those_of_the_next(wide: Wide, wide_artifact: Path):
    """A plan that leaves the number of threads open gets what the program has set."""
    before = torch.get_num_threads()
    open_, one = load_plain(wide_artifact), load_plain(wide_artifact)
    one._launch = replace(one._launch, grid=(1,))
    try:
        for ambient in (2, 3):
            torch.set_num_threads(ambient)
            check(one, wide, 300)
            assert torch.get_num_threads() == 1
            check(open_, wide, 300)
            assert torch.get_num_threads() == ambient
    finally:
        torch.set_num_threads(before)
