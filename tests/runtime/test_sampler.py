"""The sampler against transformers' processors, its independence of neighbours, its refusals."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sitsc.core.errors import SamplingError
from sitsc.core.sampling import SamplingOptions
from sitsc.runtime.sampler import Sampler, SamplerRow, _pick, candidates

HISTORY = [3, 5, 5, 8]
DRAWN = st.builds(
    SamplingOptions,
    temperature=st.floats(0.05, 5),
    top_k=st.sampled_from([0, 1, 2, 7, 40, 1000]),
    top_p=st.sampled_from([1.0, 0.95, 0.6, 0.2, 1e-6]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.2, 0.7]),
    min_tokens=st.sampled_from([0, 5]),
)


def row(options: SamplingOptions, **rest) -> SamplerRow:
    made = SamplerRow.begin(options, HISTORY, 2)
    for name, value in rest.items():
        setattr(made, name, value)
    return made


def reference(scores: torch.Tensor, options: SamplingOptions, eos: int) -> torch.Tensor:
    """Probabilities [vocab] by transformers' processors in their order."""
    steps = LogitsProcessorList()
    if options.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(options.repetition_penalty))
    if options.min_tokens:
        steps.append(MinNewTokensLengthLogitsProcessor(2, options.min_tokens, eos))
    steps.append(TemperatureLogitsWarper(float(options.temperature)))
    if options.top_k:
        steps.append(TopKLogitsWarper(options.top_k))
    if options.top_p < 1:
        steps.append(TopPLogitsWarper(options.top_p))
    if options.min_p:
        steps.append(MinPLogitsWarper(options.min_p))
    history = torch.tensor([HISTORY])
    return steps(history, scores[None].clone())[0].softmax(0)  # pyright: ignore[reportArgumentType]


def probabilities(scores: torch.Tensor, options: SamplingOptions, eos: int) -> torch.Tensor:
    """The same by ours, spread over the vocabulary."""
    sampler = Sampler(len(scores), eos_ids=[eos])
    changed = sampler._adjust(scores.numpy(), row(options))
    ids, weights = candidates(scores.numpy() if changed is None else changed, options)
    spread = torch.zeros(len(scores)).numpy()
    spread[slice(None) if ids is None else ids] = weights / weights.sum()
    return torch.from_numpy(spread)


@settings(max_examples=200, deadline=None)
@given(DRAWN, st.integers(0, 2**31), st.sampled_from([20, 101, 2500]))
def test_probabilities_equal_transformers(options, seed, vocab) -> None:
    scores = torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 4
    expected = reference(scores, options, eos=1)
    torch.testing.assert_close(probabilities(scores, options, 1), expected, atol=2e-6, rtol=1e-4)


def test_ties_at_the_edge_of_top_k_stay() -> None:
    scores = torch.tensor([1.0, 2.0, 2.0, 2.0, 0.0, 1.0, 0.0, 0.0, 0.0])
    options = SamplingOptions(temperature=1, top_k=2)
    expected = reference(scores, options, eos=0)
    assert probabilities(scores, options, 0).tolist() == pytest.approx(expected.tolist())
    assert (expected > 0).sum() == 3


def test_of_equal_scores_top_p_takes_the_lowest_ids() -> None:
    scores = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, 1.0, -9.0]).numpy()
    ids, weights = candidates(scores, SamplingOptions(temperature=1, top_p=0.4))
    assert ids is not None and ids.tolist() == [1, 3]
    assert weights.tolist() == [1, 1]


def test_draws_follow_the_probabilities() -> None:
    scores = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    options = SamplingOptions(temperature=0.9, seed=5)
    one, counts = row(options), torch.zeros(5)
    sampler = Sampler(5)
    for _ in range(20_000):
        (token,) = sampler.sample(scores[None], [one])
        assert isinstance(token, int)
        counts[token] += 1
    expected = (scores / 0.9).softmax(0)
    assert (counts / 20_000 - expected).abs().max() < 0.015


@settings(max_examples=40, deadline=None)
@given(st.lists(DRAWN, min_size=2, max_size=5), st.integers(0, 1000), st.randoms())
def test_neighbours_and_row_order_do_not_matter(many, seed, random) -> None:
    many = [SamplingOptions(temperature=o.temperature, top_p=o.top_p, seed=seed) for o in many]
    logits = torch.randn(6, len(many), 60, generator=torch.Generator().manual_seed(seed))
    sampler = Sampler(50, 60)
    alone = []
    for index, options in enumerate(many):
        one = row(options)
        alone.append([sampler.sample(step[index : index + 1], [one])[0] for step in logits])
    order = list(range(len(many)))
    random.shuffle(order)
    rows = [row(many[index]) for index in order]
    together = [sampler.sample(step[order], rows) for step in logits]
    for place, index in enumerate(order):
        assert [step[place] for step in together] == alone[index]


def test_rounding_never_reaches_a_weight_of_zero() -> None:
    weights = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0]).numpy()
    assert [_pick(weights, point) for point in (0.0, 0.49, 0.5, 1.0)] == [1, 1, 2, 2]


def test_seed_decides_and_no_seed_varies() -> None:
    logits = torch.zeros(1, 10_000)
    sampler = Sampler(10_000)

    def draw(seed: int | None) -> object:
        return sampler.sample(logits, [row(SamplingOptions(temperature=1, seed=seed))])[0]

    assert draw(7) == draw(7) != draw(8)
    assert len({draw(None) for _ in range(8)}) > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_lowest_of_equals(dtype) -> None:
    logits = torch.zeros(3, 12, dtype=dtype)
    logits[1, [4, 9]] = 1
    logits[2, 11] = 5  # padding of the vocabulary
    before = logits.clone()
    assert Sampler(10, 12).sample(logits, [row(SamplingOptions())] * 3) == [0, 4, 0]
    assert torch.equal(logits, before)


def test_padding_is_never_drawn() -> None:
    logits = torch.full((1, 64), 50.0)
    logits[0, :3] = 0
    one = row(SamplingOptions(temperature=2, seed=1))
    assert {Sampler(3, 64).sample(logits, [one])[0] for _ in range(100)} == {0, 1, 2}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("options", [SamplingOptions(), SamplingOptions(temperature=1, top_p=0.5)])
def test_not_finite_is_an_error_of_that_request(bad, options) -> None:
    logits = torch.zeros(3, 8)
    logits[1, 5] = bad
    first, middle, last = Sampler(8).sample(logits, [row(options) for _ in range(3)])
    assert isinstance(middle, SamplingError) and "logits are not finite" in str(middle)
    assert isinstance(first, int) and isinstance(last, int)
    logits[1] = -torch.inf
    assert isinstance(Sampler(8).sample(logits, [row(options)] * 3)[1], SamplingError)


def test_minus_infinity_elsewhere_is_fine() -> None:
    logits = torch.full((1, 8), -torch.inf)
    logits[0, 6] = -3
    drawn = row(SamplingOptions(temperature=1, min_p=0.1, seed=0))
    assert Sampler(8).sample(logits, [row(SamplingOptions())]) == [6]
    assert Sampler(8).sample(logits, [drawn]) == [6]


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_mask_allows_and_forbids(temperature) -> None:
    logits = torch.arange(8.0)[None].repeat(3, 1)
    allowed = torch.tensor([False, True, False, False, False, False, False, True])
    options = SamplingOptions(temperature=temperature, seed=0)
    masks = [allowed, torch.zeros(8, dtype=torch.bool), torch.ones(7, dtype=torch.bool)]
    rows = [row(options, mask=mask) for mask in masks]
    one, empty, short = Sampler(7, 8).sample(logits, rows)
    assert one == 1  # id 7 is padding
    assert isinstance(empty, SamplingError) and "no token is allowed" in str(empty)
    assert isinstance(short, SamplingError) and "bool [8]" in str(short)


def test_end_of_text_waits_for_min_tokens() -> None:
    logits = torch.tensor([[0.0, 1.0, 9.0]])
    history = [0]
    one = SamplerRow.begin(SamplingOptions(min_tokens=2), history, 1)
    tokens = []
    for _ in range(4):
        (token,) = Sampler(3, eos_ids=[2, 400]).sample(logits, [one])
        tokens.append(token)
        history.append(1)
    assert tokens == [1, 1, 2, 2]


def test_extreme_but_finite_values() -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0]])
    cold = row(SamplingOptions(temperature=1e-4, seed=0))
    hot = row(SamplingOptions(temperature=100, repetition_penalty=100, seed=0))
    assert Sampler(3).sample(logits, [cold]) == [0]
    assert Sampler(3).sample(logits, [hot]) == [0]
