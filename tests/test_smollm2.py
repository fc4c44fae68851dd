"""The real model: SmolLM2-135M-Instruct compiled in three precisions, against transformers."""

import math
import os
from pathlib import Path

import pytest
import torch
import transformers

from sitsc.core.options import CompileOptions
from sitsc.core.sampling import SamplingOptions
from sitsc.core.serving.batch import StepBatch
from sitsc.frontend.checkpoint import Checkpoint, open_checkpoint
from sitsc.pipeline import compile_model
from sitsc.runtime.loader import Session, load
from sitsc.runtime.score import iterate_logits, perplexity

TEXT = Path(__file__).parent.parent / "bench" / "data" / "devils_dictionary.txt"
WINDOW, LENGTH = 1024, 2048
PROMPTS = [
    "The capital of France is",
    "Water boils at a temperature of",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "The three laws of motion were stated by",
    "A recipe for bread needs flour,",
    "Dear Sir or Madam, I am writing to",
    "The largest planet of the solar system",
    "1, 2, 4, 8, 16,",
    "In 1969, the first people",
    "She opened the old wooden door and",
    "The difference between a virus and a bacterium is",
    "SELECT name FROM users WHERE",
    "Photosynthesis is the process by which",
    "To be, or not to be,",
    "The opposite of hot is",
    "My favourite colour is",
    "Rivers flow from the mountains to",
    "An atom consists of",
    "The quick brown fox",
]


def model_file() -> Path:
    place = Path(os.environ.get("SITSC_SMOLLM2", ""))
    found = sorted(place.glob("**/*.gguf")) if place.is_dir() else [place]
    if not found or not found[0].is_file():
        pytest.skip("SITSC_SMOLLM2 does not name the model (make test fetches it)")
    return found[0]


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(model_file())


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Session]:
    """One session a precision. Kernels are global, so all come from one build of them."""
    folder = tmp_path_factory.mktemp("smollm2")
    made = {}
    for name, options in {
        "float32": CompileOptions(dtype="float32"),
        "bfloat16": CompileOptions(dtype="bfloat16"),
        "int8": CompileOptions(dtype="bfloat16", weights="int8"),
    }.items():
        made[name] = load(compile_model(model_file(), folder / name, options).root)
    return made


@pytest.fixture(scope="module")
def reference(checkpoint: Checkpoint):
    config = transformers.LlamaConfig(**checkpoint.config)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    weights = {name: checkpoint.read(name).float() for name in checkpoint.tensors}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def test_greedy_tokens_and_logits_are_those_of_transformers(sessions, reference):
    session = sessions["float32"]
    worst = 0.0
    prompts = [session.tokenizer.encode(prompt, True) for prompt in PROMPTS]
    options = SamplingOptions(max_tokens=64, ignore_eos=True)
    answers = session.engine.generate_batch(prompts, options)
    for prompt, ids, answer in zip(PROMPTS, prompts, answers, strict=True):
        whole = [*ids, *answer.token_ids]
        with torch.no_grad():
            wanted = reference(torch.tensor([whole])).logits[0]
        greedy = wanted[len(ids) - 1 : -1].argmax(-1).tolist()
        assert list(answer.token_ids) == greedy, prompt
        ours = torch.cat(list(iterate_logits(session.executor, whole)))
        errors = (ours - wanted).abs().amax(-1) / wanted.abs().amax(-1)
        worst = max(worst, float(errors.max()))
    assert worst <= 1e-3


def test_decode_one_token_at_a_time_gives_the_logits_of_prefill(sessions):
    session = sessions["float32"]
    ids = session.tokenizer.encode(PROMPTS[2] * 3, True)
    prefill = torch.cat(list(iterate_logits(session.executor, ids)))
    for position, token in enumerate(ids):
        batch = StepBatch("decode", (0,), [token], [0, 1], [position], [list(range(64))], [True])
        row = session.executor.execute(batch)[0]
        error = (row - prefill[position]).abs().max() / prefill[position].abs().max()
        assert error < 1e-4


def test_quality_of_each_precision(sessions):
    ids = sessions["float32"].tokenizer.encode(TEXT.read_text(), True)
    assert len(ids) > LENGTH
    ids = ids[:LENGTH]
    found = {name: perplexity(s.executor, ids, WINDOW) for name, s in sessions.items()}
    assert math.isfinite(found["float32"]) and found["float32"] < 60
    assert abs(found["bfloat16"] / found["float32"] - 1) <= 0.01
    assert abs(found["int8"] / found["float32"] - 1) <= 0.03


def test_a_batch_of_different_lengths_gives_the_tokens_of_each_alone(sessions):
    session = sessions["float32"]
    options = SamplingOptions(max_tokens=24, ignore_eos=True)
    prompts = [PROMPTS[0], PROMPTS[11] * 5, PROMPTS[3], PROMPTS[7] * 40, PROMPTS[8]]
    alone = [session.engine.generate_batch([p], options)[0].token_ids for p in prompts]
    together = [answer.token_ids for answer in session.engine.generate_batch(prompts, options)]
    assert together == alone


def test_chat_answers(sessions):
    for session in sessions.values():
        text = session.chat_prompt([{"role": "user", "content": "What is the capital of France?"}])
        outputs = session.engine.generate(text, SamplingOptions(max_tokens=32), add_bos=False)
        assert "Paris" in "".join(output.new_text for output in outputs)


def test_the_bits_of_a_prompt_do_not_depend_on_its_neighbours(sessions):
    for name in ("float32", "bfloat16", "int8"):
        session = sessions[name]
        assert session.artifact.plan.numerics.batch_invariant
        first = session.tokenizer.encode(PROMPTS[11] * 3, True)
        other = session.tokenizer.encode(PROMPTS[4] * 7, True)
        tables = [list(range(8)), list(range(8, 24))]
        alone = StepBatch("prefill", (0,), first, [0, len(first)], [0], tables[:1], [True])
        ids, starts = [*other, *first], [0, len(other), len(other) + len(first)]
        both = StepBatch("prefill", (1, 0), ids, starts, [0, 0], tables[::-1], [True, True])
        one = session.executor.execute(alone)[0].clone()
        assert torch.equal(session.executor.execute(both)[1], one), name
