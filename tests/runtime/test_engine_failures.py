"""The engine over a real tiny model: what is refused, fails or is given up ends alone."""

import gc
from collections.abc import Sequence

import pytest
import torch

from sitsc.core.errors import CapacityError, ExecutionError, RequestError, SamplingError
from sitsc.core.sampling import SamplingOptions
from sitsc.core.serving.batch import StepBatch
from tests.runtime.engine_models import (
    PROMPTS,
    VOCAB,
    WIDTH,
    AheadExecutor,
    drain,
    engine,
    executor,
    is_clean,
    one_thread,  # noqa: F401  (a fixture of every test here)
    plain,
)


def test_a_failure_with_steps_ahead_ends_them_all() -> None:
    made = engine(kind=AheadExecutor)
    ahead = made.executor
    assert isinstance(ahead, AheadExecutor)
    for prompt in PROMPTS[:3]:
        made.add_request(prompt, SamplingOptions(max_tokens=20, ignore_eos=True))

    def fail(batch: StepBatch) -> None:
        if ahead.num_steps == 6:
            raise RuntimeError("gone")

    ahead.before = fail
    outputs = drain(made)
    assert [each[-1].finish_reason for each in outputs.values()] == ["error"] * 3
    ahead.flying = 0
    assert is_clean(made)


def test_refused_prompts() -> None:
    made = engine(context=16)
    for prompt, error in [
        ("", RequestError),
        ([], RequestError),
        ([VOCAB], RequestError),
        ([-1], RequestError),
        ([5] * 16, CapacityError),
        ("a\ud800", RequestError),
    ]:
        with pytest.raises(error):
            made.add_request(prompt)
    good, refused = made.generate_batch(["a", [5] * 99], SamplingOptions(max_tokens=2))
    assert good.error is None and len(good.token_ids) == 2
    assert isinstance(refused.error, CapacityError) and refused.finish_reason == "error"
    assert is_clean(made)


def test_a_failing_step_ends_its_requests_and_the_engine_goes_on() -> None:
    made = engine(max_batch=2)
    failing: list[int] = []

    def fail_third(batch: StepBatch) -> None:
        if executor(made).num_steps == 3:
            failing.extend(batch.request_ids)
            raise RuntimeError("out of\nmemory")

    executor(made).before = fail_third
    ids = [made.add_request(prompt, SamplingOptions(max_tokens=6)) for prompt in PROMPTS]
    outputs = drain(made)
    assert sorted(outputs) == ids and failing == ids[:2]
    for request_id, prompt in zip(ids, PROMPTS, strict=True):
        last = outputs[request_id][-1]
        if request_id in failing:
            assert last.finish_reason == "error" and isinstance(last.error, ExecutionError)
            assert str(last.error) == "the step failed: RuntimeError: out of memory"
            assert isinstance(last.error.__cause__, RuntimeError)
        else:
            tokens = [token for output in outputs[request_id] for token in output.token_ids]
            assert tokens == plain(prompt, 16)[:6]
    assert is_clean(made)


@pytest.mark.parametrize("shape", [(1, WIDTH - 1), (3, WIDTH)])
def test_logits_of_a_wrong_shape_are_a_failed_step(shape) -> None:
    made = engine()
    executor(made).execute = lambda batch: torch.zeros(shape)
    (answer,) = made.generate_batch([[5]])
    assert isinstance(answer.error, ExecutionError)
    assert is_clean(made)


def test_an_interrupt_passes_and_leaves_the_engine_usable() -> None:
    made = engine()
    other = made.add_request("a", SamplingOptions(max_tokens=3))

    def interrupt(batch: StepBatch) -> None:
        if executor(made).num_steps == 2:
            raise KeyboardInterrupt

    executor(made).before = interrupt
    with pytest.raises(KeyboardInterrupt):
        list(made.generate(PROMPTS[1], SamplingOptions(max_tokens=9)))
    assert [output.finish_reason for output in drain(made)[other]] == [None, "error"]
    (answer,) = made.generate_batch([PROMPTS[1]], SamplingOptions(max_tokens=9))
    assert list(answer.token_ids) == plain(PROMPTS[1], 16)[:9]
    assert is_clean(made)


def test_bad_logits_and_masks_end_one_request_only() -> None:
    made = engine()

    def broken(ids: Sequence[int]) -> torch.Tensor | None:
        raise ValueError("no such grammar")

    options = SamplingOptions(max_tokens=4)
    nothing = made.add_request("a", options, mask=lambda ids: torch.zeros(WIDTH, dtype=torch.bool))
    raising = made.add_request("a", options, mask=broken)
    fine = made.add_request("a", options, mask=lambda ids: None)
    outputs = drain(made)
    assert isinstance(outputs[nothing][-1].error, SamplingError)
    assert "the mask failed: ValueError: no such grammar" in str(outputs[raising][-1].error)
    assert [o.token_ids[0] for o in outputs[fine]] == plain("a", 16)[:4]
    assert is_clean(made)


def test_abort_is_answered_once() -> None:
    made = engine(max_batch=1)
    ids = [made.add_request(prompt, SamplingOptions(max_tokens=20)) for prompt in PROMPTS[:3]]
    made.step()
    made.abort(ids[0])
    made.abort(ids[2])  # still waiting
    made.abort(ids[2])
    made.abort(12345)
    outputs = drain(made)
    assert [outputs[i][-1].finish_reason for i in ids] == ["abort", "length", "abort"]
    assert is_clean(made)


def test_closing_a_stream_frees_its_pages() -> None:
    made = engine()
    stream = made.generate(PROMPTS[0], SamplingOptions(max_tokens=20))
    next(stream)
    assert not is_clean(made)
    stream.close()
    assert is_clean(made)
    for _ in made.generate(PROMPTS[0]):
        break
    gc.collect()
    assert is_clean(made)
