"""Peculiarities of vocabularies, tokenizers and prompts from public bug reports, one test each.

Each either works as the reference does or is refused by an error that names key, value and what to
do.
"""

import json
from pathlib import Path

import pytest
import torch

from sitsc import packer
from sitsc.core.errors import (
    CapacityError,
    CheckpointError,
    RequestError,
    TokenizerError,
)
from sitsc.core.options import CompileOptions
from sitsc.core.sampling import SamplingOptions
from sitsc.frontend.checkpoint import open_checkpoint
from sitsc.frontend.lint import lint_checkpoint
from sitsc.lowering import model_facts
from sitsc.runtime.chat import ChatTemplate
from sitsc.runtime.tokenizer import Tokenizer
from tests.frontend.test_config_lint import tiny
from tests.frontend.trap_models import (
    write_model,
    write_tokenizer,
)


def test_tied_embeddings_with_a_redundant_head_are_compared(tmp_path: Path):
    config = tiny(tie_word_embeddings=True)
    same = torch.ones(320, 64, dtype=torch.bfloat16)
    other = same.clone()
    other[319, 63] = 2.0
    names = {"model__embed_tokens__weight": same, "lm_head__weight": same.clone()}
    good = open_checkpoint(write_model(tmp_path / "good", config, **names))
    assert lint_checkpoint(good).left_out == {"lm_head.weight": "model.embed_tokens.weight"}
    packer._check_duplicates(good)  # pyright: ignore[reportPrivateUsage]
    names["lm_head__weight"] = other
    bad = open_checkpoint(write_model(tmp_path / "bad", config, **names))
    with pytest.raises(CheckpointError, match=r"two different ones.*to false"):
        packer._check_duplicates(bad)  # pyright: ignore[reportPrivateUsage]


def test_untied_flag_with_the_head_missing_is_never_tied_by_guess(tmp_path: Path):
    config = tiny(tie_word_embeddings=False)
    c = open_checkpoint(write_model(tmp_path, config, lm_head__weight=None))
    (finding,) = lint_checkpoint(c).findings
    assert "lm_head.weight is missing and tie_word_embeddings is false" in finding.what


def test_logits_wider_than_the_tokenizer_are_never_sampled(tmp_path: Path):
    write_tokenizer(write_model(tmp_path, tiny()), 300)
    c = open_checkpoint(tmp_path)
    assert lint_checkpoint(c).ok
    tokens = model_facts(c, CompileOptions()).tokens
    assert (tokens.vocab_size, tokens.logits_width) == (300, 320)


def test_a_tokenizer_wider_than_the_logits_is_refused(tmp_path: Path):
    write_tokenizer(write_model(tmp_path, tiny()), 321)
    (finding,) = [
        f for f in lint_checkpoint(open_checkpoint(tmp_path)).findings if f.level == "error"
    ]
    assert "1 tokens beyond the model's 320 rows, first 't320' = 320" in finding.what


def test_end_tokens_are_the_union_of_all_that_name_one(tmp_path: Path):
    root = write_model(tmp_path, tiny(eos_token_id=[3, 4]))
    (root / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 5]}))
    write_tokenizer(root, 320, eos_token="t9")
    c = open_checkpoint(root)
    assert c.tokenizer.eos_token_ids == (3, 4, 5, 9)
    assert model_facts(c, CompileOptions()).tokens.eos_token_ids == (3, 4, 5, 9)


def test_special_tokens_that_do_not_exist(tmp_path: Path):
    root = write_model(tmp_path, tiny(eos_token_id=999))
    write_tokenizer(root, 320, eos_token="</s>", bos_token="t1")
    findings = lint_checkpoint(open_checkpoint(root)).findings
    text = " | ".join(f"{f.level}: {f.what}" for f in findings)
    assert "error: every EOS id (999) is beyond the model's 320 rows" in text
    assert "warning: eos_token '</s>' is not a token of tokenizer.json" in text
    assert "warning: eos_token_id 999 in config.json is outside the 320 rows" in text


def test_without_a_chat_template_chat_is_refused_and_completion_works(tmp_path: Path):
    root = write_model(tmp_path, tiny())
    write_tokenizer(root, 320)
    files = open_checkpoint(root).tokenizer
    assert files.chat_template is None and files.tokenizer_json is not None
    assert Tokenizer(files.tokenizer_json).encode("t7 t8") == [7, 8]
    with pytest.raises(TokenizerError, match=r"no chat template.*plain completion works"):
        ChatTemplate.from_config({})


def test_bos_is_added_once_to_plain_text_and_never_to_a_rendered_template(tmp_path: Path):
    root = write_model(tmp_path, tiny())
    template = "{{ bos_token }} {% for m in messages %}{{ m.content }}{% endfor %}"
    write_tokenizer(root, 320, bos_token="t1", add_bos_token=True, chat_template=template)
    files = open_checkpoint(root).tokenizer
    assert files.tokenizer_json is not None and files.chat_template is not None
    tokenizer = Tokenizer(files.tokenizer_json)
    assert tokenizer.encode("t7") == [1, 7]
    text = ChatTemplate(files.chat_template, files.special_tokens).render(
        [{"role": "user", "content": "t7"}]
    )
    assert tokenizer.encode(text, add_bos=False) == [1, 7]


def test_an_empty_or_too_long_prompt_fails_alone():
    from tests.runtime.engine_models import engine  # noqa: PLC0415  (builds a model)

    made = engine(context=16)
    for prompt, error, message in [
        ("", RequestError, "the prompt is empty"),
        ([], RequestError, "empty"),
        ([5] * 99, CapacityError, "99"),
    ]:
        with pytest.raises(error, match=message):
            made.add_request(prompt)
    (answer,) = made.generate_batch(["a"], SamplingOptions(max_tokens=2))
    assert answer.error is None and len(answer.token_ids) == 2
