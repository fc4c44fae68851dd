"""Decoders written by hand in the engine: equal to eager execution, or refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sitsc
from sitsc.core.errors import NumericsError, OptionError, UnsupportedModelError
from sitsc.core.sampling import SamplingOptions
from sitsc.core.serving.batch import StepBatch
from sitsc.decoder_pipeline import check_steps
from sitsc.frontend.decoder import logits_of, trace_decoder
from sitsc.passes.base import PassContext
from tests.api_modules import BufferDecoder, LearnedDecoder, RopeDecoder

DECODERS: dict[str, Any] = {
    "rope": RopeDecoder,
    "learned": LearnedDecoder,
    "buffers": BufferDecoder,
}
CONTEXT = {"rope": 128, "learned": 96, "buffers": 64}


def make(name: str) -> nn.Module:
    torch.manual_seed(3)
    return DECODERS[name]()


@pytest.fixture(scope="module", params=DECODERS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(name, module, session) of each decoder; compiled once."""
    name: str = request.param
    module = make(name)
    out = tmp_path_factory.mktemp("decoders") / name
    options: dict[str, Any] = {"max_context": 128} if name == "rope" else {}
    made = sitsc.compile(module, decoder=True, out=out, prefill_chunk_tokens=32, **options)
    assert made.plan.tokens.max_context == CONTEXT[name]
    return name, module.eval(), made.load()


def eager(module: nn.Module, ids: list[int]) -> Tensor:
    with torch.no_grad():
        return logits_of(module(torch.tensor([ids])))[0]


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


def prompt(length: int, vocabulary: int) -> list[int]:
    return [(5 * i * i + 11 * i + 2) % vocabulary for i in range(length)]


def test_prefill_and_decode_logits(served: Any):
    """A prompt in one step, then a token at a time; every logit of every step."""
    _, module, session = served
    ids = prompt(41, session.artifact.plan.tokens.vocab_size)
    pages = list(range(-(-len(ids) // 16)))[::-1]
    wanted = eager(module, ids)

    def step(regime: Any, new: list[int], before: int, rows: list[int]) -> Tensor:
        batch = StepBatch(
            regime=regime,
            request_ids=(0,),
            token_ids=new,
            query_start=[0, len(new)],
            context_lens=[before],
            block_tables=[pages],
            sample=[True],
        )
        return session.executor.execute(batch, rows).clone()

    first = step("prefill", ids[:20], 0, list(range(8)))
    assert relative(first, wanted[:8]) <= 1e-4
    for place in range(20, len(ids)):
        assert relative(step("decode", [ids[place]], place, [0])[0], wanted[place]) <= 1e-4


def test_greedy_generation_of_several_requests(served: Any):
    name, module, session = served
    vocabulary = session.artifact.plan.tokens.vocab_size
    count = 12
    prompts = [prompt(length, vocabulary) for length in (1, 7, 23, CONTEXT[name] - count)]
    answers = session.engine.generate_batch(prompts, SamplingOptions(max_tokens=count))
    for given, answer in zip(prompts, answers, strict=True):
        assert answer.error is None
        ids = given + list(answer.token_ids)
        best = eager(module, ids[:-1])[len(given) - 1 :].argmax(-1).tolist()
        assert best == list(answer.token_ids)


def test_one_request_by_generate(served: Any):
    _, _, session = served
    outputs = list(session.engine.generate([1, 2, 3], SamplingOptions(max_tokens=4)))
    assert sum(len(output.token_ids) for output in outputs) == 4


def test_pools_and_windows(served: Any):
    """Repeated heads are stored once; windows and tables are read off the graph."""
    name, _, session = served
    plan = session.artifact.plan
    [group] = plan.kv
    heads = {"rope": (2, 16), "learned": (4, 12), "buffers": (1, 8)}
    assert (group.kv_heads, group.head_dim) == heads[name]
    assert plan.model.architecture == DECODERS[name].__name__
    names = [spec.name for spec in plan.model.parameters]
    assert sum("embed" in part for part in names) == (name == "rope")  # tied, once


CASES: dict[str, tuple[Any, str]] = {}


def case(message: str) -> Any:
    """A decorator: the class is refused with this message."""

    def add(kind: Any) -> Any:
        CASES[kind.__name__] = (kind, message)
        return kind

    return add


class Small(nn.Module):
    """One layer of attention; what the cases change is in `mix` and `attend`."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 16)
        self.places = nn.Parameter(torch.randn(64, 16))
        self.qkv = nn.Linear(16, 48)
        self.head = nn.Linear(16, 30)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places[: ids.shape[1]]
        parts = self.qkv(x).view(1, -1, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.attend(*parts, ids).transpose(1, 2).flatten(2)  # pyright: ignore[reportCallIssue]
        return self.head(self.mix(x))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def mix(self, x: Tensor) -> Tensor:
        return x


@case("sees later tokens: neither is_causal nor a mask")
class NotCausal(Small):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


@case("mask shows later tokens")
class LaterTokens(Small):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        place = torch.arange(ids.shape[1])
        return F.scaled_dot_product_attention(q, k, v, place[:, None] >= place[None] - 1)


@case("neither causal nor a window")
class Strided(Small):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        place = torch.arange(ids.shape[1])
        apart = place[:, None] - place[None]
        return F.scaled_dot_product_attention(q, k, v, (apart >= 0) & (apart % 2 == 0))


@case("adds other values than 0 and -inf")
class Biased(Small):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        place = torch.arange(ids.shape[1])
        apart = (place[None] - place[:, None]).float()
        return F.scaled_dot_product_attention(
            q, k, v, torch.where(apart > 0, float("-inf"), 0.1 * apart)
        )


@case("mask depends on the tokens")
class Padded(Small):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, k, v, causal & (ids != 0)[:, None, None])


@case("attention written by hand")
class ByHand(Small):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        first = super().attend(q, k, v, ids)
        hidden = torch.full((ids.shape[1], ids.shape[1]), float("-inf")).triu(1)
        return first + (q @ k.transpose(-1, -2) + hidden).softmax(-1) @ v


@case("never calls scaled_dot_product_attention")
class NoAttention(Small):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        return q + k + v


@case("dropout of 0.5 in attention")
class Dropout(Small):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5, is_causal=True)


@case("logits of one token only")
class LastOnly(Small):
    def mix(self, x: Tensor) -> Tensor:
        return x[:, -1:]


@case(r"the forward takes \(ids, segments\)")
class TwoInputs(Small):
    def forward(self, ids: Tensor, segments: Tensor) -> Tensor:  # pyright: ignore
        return super().forward(ids) + segments


@case("changes buffer seen")
class Counting(Small):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(16))

    def mix(self, x: Tensor) -> Tensor:
        self.get_buffer("seen").add_(1)
        return x + self.get_buffer("seen")


@case("depends on the values of a tensor")
class Branches(Small):
    def mix(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


@case("pad mixes the tokens")
class Shifted(Small):
    """Each token is mixed with the one before, outside of attention."""

    def mix(self, x: Tensor) -> Tensor:
        return x + F.pad(x, (0, 0, 1, 0))[:, :-1]


@case("pad mixes the tokens")
class Distant(Small):
    """As the one above, with a token farther away than any that is executed."""

    def mix(self, x: Tensor) -> Tensor:
        return x + F.pad(x, (0, 0, 40, 0))[:, : x.shape[1]]


@case("conv1d mixes the tokens")
class DistantConvolution(Small):
    def mix(self, x: Tensor) -> Tensor:
        weight = torch.ones(16, 1, 2)
        return x + F.conv1d(x.transpose(1, 2), weight, padding=40, dilation=80, groups=16).mT


@case("mean mixes the tokens")
class Averaged(Small):
    def mix(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)


@case("arange computes with the number of tokens")
class Backwards(Small):
    """Positions that count from the end."""

    def mix(self, x: Tensor) -> Tensor:
        return x + torch.arange(x.shape[1] - 1, -1, -1)[:, None] * 0.1


@case("computes with the number of tokens")
class Longer(Small):
    """A factor that differs from one in long sequences alone."""

    def mix(self, x: Tensor) -> Tensor:
        return x * torch.full((), x.shape[1] / 32.0).clamp(min=1.0)


@pytest.mark.parametrize("name", CASES)
def test_what_a_decoder_may_not_do(name: str, tmp_path: Path):
    kind, message = CASES[name]
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        sitsc.compile(kind(), decoder=True, out=tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


class ByRow(Small):
    """What a row holds depends on where it lies in its step."""

    def mix(self, x: Tensor) -> Tensor:
        return x + x.tril()


def test_what_is_known_by_executing_alone_is_found(tmp_path: Path):
    torch.manual_seed(0)
    with pytest.raises(NumericsError, match="differs from the module") as caught:
        sitsc.compile(ByRow(), decoder=True, out=tmp_path / "out")
    assert "\n" not in str(caught.value)


class Exact(Small):
    """What is understood: a mask of floats with a window, keys repeated in other ways."""

    def __init__(self, window: int, repeat: str) -> None:
        super().__init__()
        self.window, self.repeat = window, repeat
        self.kv = nn.Linear(16, 16)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        tokens = ids.shape[1]
        wide = self.kv(self.words(ids)).view(1, tokens, 1, 16)
        if self.repeat == "early":
            wide = wide.repeat_interleave(2, dim=2)
        k, v = wide.transpose(1, 2).chunk(2, -1)
        mask = torch.zeros(tokens, tokens)
        seen = torch.ones_like(mask, dtype=torch.bool).tril()
        seen = seen.triu(1 - self.window) if self.window else seen
        mask = mask.masked_fill(~seen, torch.finfo(torch.float32).min)
        gqa = self.repeat == "gqa"
        return F.scaled_dot_product_attention(q, k, v, mask[None, None], enable_gqa=gqa)


@pytest.mark.parametrize("window", [0, 1, 5])
@pytest.mark.parametrize("repeat", ["early", "gqa", "broadcast"])
def test_masks_and_groups_that_are_understood(window: int, repeat: str):
    torch.manual_seed(1)
    module = Exact(window, repeat).eval()
    traced = trace_decoder(module, None, 40)
    calls = traced.module.graph.find_nodes(
        op="call_function", target=torch.ops.sitsc.attention.default
    )
    assert [node.args[6] for node in calls] == [window]
    check_steps(module, traced, PassContext("float32", "none", "float32", 16, "cpu"))


def test_bfloat16_is_checked_too():
    module = make("learned").to(torch.bfloat16).eval()
    traced = trace_decoder(module, None, 0)
    check_steps(module, traced, PassContext("bfloat16", "none", "bfloat16", 16, "cpu"))


LIMITS: dict[str, tuple[dict[str, Any], str]] = {
    "context": ({"max_context": 65}, "max_context=65 is beyond the module's 64 positions"),
    "dtype": ({"dtype": "bfloat16"}, "the weights are float32"),
    "inputs": ({"example_inputs": (torch.ones(1, 3), torch.ones(1, 3))}, "2 example inputs"),
    "shapes": ({"dynamic_shapes": {}}, "dynamic_shapes does not fit"),
    "tokenizer": ({"tokenizer": "nowhere.json"}, "tokenizer cannot be read"),
}


@pytest.mark.parametrize("name", LIMITS)
def test_options_of_a_decoder(name: str, tmp_path: Path):
    options, message = LIMITS[name]
    with pytest.raises(OptionError, match=message):
        sitsc.compile(Small(), decoder=True, out=tmp_path / "out", **options)
    assert list(tmp_path.iterdir()) == []


def test_other_dtypes_and_ids_are_refused(tmp_path: Path):
    with pytest.raises(UnsupportedModelError, match="the weights are float16"):
        sitsc.compile(Small().half(), decoder=True, out=tmp_path / "out")
    with pytest.raises(UnsupportedModelError, match=r"int64 token ids \[1, tokens\]"):
        sitsc.compile(Small(), example_inputs=torch.ones(2, 3), decoder=True, out=tmp_path / "out")
