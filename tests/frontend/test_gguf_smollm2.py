"""The real file: SmolLM2-135M-Instruct, Q4_1 with a Q8_0 embedding. Skipped if not fetched."""

import hashlib
from functools import cache
from pathlib import Path

import gguf
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from sitsc.frontend.checkpoint import Checkpoint, open_checkpoint
from sitsc.frontend.config_lint import lint_config, lint_tensors
from sitsc.frontend.gguf_header import read_gguf_header
from sitsc.models.fetch import SHA256
from sitsc.models.presets import preset
from tests.frontend.checkpoint_files import real_gguf

pytestmark = pytest.mark.skipif(real_gguf() is None, reason="SmolLM2 is not fetched")


def path() -> Path:
    found = real_gguf()
    assert found is not None
    return found


@cache
def opened() -> Checkpoint:
    return open_checkpoint(path())


@cache
def tokenizer() -> Tokenizer:
    data = opened().tokenizer.tokenizer_json
    assert data is not None
    return Tokenizer.from_str(data.decode())


@cache
def package_reader() -> gguf.GGUFReader:
    return gguf.GGUFReader(path())


def test_config_is_that_of_the_preset():
    c = opened()
    lint_config(c.config)
    assert lint_tensors(c.config, c.tensors).duplicates == {}
    assert c.config == {k: v for k, v in preset("smollm2-135m").items() if k != "torch_dtype"}


def test_header_agrees_with_the_gguf_package():
    header, reader = read_gguf_header(path()), package_reader()
    assert {n: (t.offset, t.info.nbytes) for n, t in header.tensors.items()} == {
        t.name: (t.data_offset, t.n_bytes) for t in reader.tensors
    }
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "llama.rope.freq_base"):
        field = reader.get_field(key)
        assert field is not None and header.metadata[key] == field.contents()


def test_q_proj_rows_are_in_hugging_face_order():
    """As transformers does it: [heads, head_dim / 2, 2] transposed to [heads, 2, head_dim / 2]."""
    name = "model.layers.7.self_attn.q_proj.weight"
    stored = next(t for t in package_reader().tensors if t.name == "blk.7.attn_q.weight")
    values = torch.from_numpy(gguf.quants.dequantize(stored.data, stored.tensor_type))
    expected = values.reshape(9, 32, 2, 576).transpose(1, 2).reshape(576, 576)
    assert torch.equal(opened().read(name), expected)
    assert torch.equal(opened().read(name, (100, 301)), expected[100:301])


def test_tokenizer_and_chat_template():
    files = opened().tokenizer
    assert files.eos_token_ids == (2,) and files.eos_token == "<|im_end|>"
    assert (files.bos_token, files.bos_token_id, files.add_bos) == ("<|im_start|>", 1, False)
    assert files.chat_template is not None and "<|im_start|>" in files.chat_template
    assert tokenizer().encode("<|im_start|>").ids == [1]
    assert tokenizer().encode("Hello world<|im_end|>").ids == [19556, 905, 2]
    assert len(tokenizer().encode("1234").ids) == 4


def encodable(text: str) -> bool:
    """Whether all bytes of the text are tokens: the model's vocabulary lacks 21 rare ones."""
    pre = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters = {letter for piece, _ in pre.pre_tokenize_str(text) for letter in piece}
    return all(tokenizer().token_to_id(letter) is not None for letter in letters)


@settings(max_examples=200, deadline=None)
@given(text=st.text().filter(encodable))
@example("  two  spaces\n\n\ttabs\r\n and 12,345.67 — don't, won't, I'LL")
@example("def f(x):\n    return x ** 2  # مرحبا 你好 🙂 é")
def test_any_text_comes_back(text: str):
    assert tokenizer().decode(tokenizer().encode(text).ids, skip_special_tokens=False) == text


def test_the_file_is_the_expected_one():
    assert hashlib.sha256(path().read_bytes()).hexdigest() == SHA256


@pytest.mark.slow
def test_all_tensors_equal_what_transformers_loads():
    from transformers import AutoModelForCausalLM, LlamaConfig  # noqa: PLC0415
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint  # noqa: PLC0415

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**opened().config))
    theirs = load_gguf_checkpoint(path(), return_tensors=True, model_to_load=model)["tensors"]
    assert set(theirs) == set(dict(model.named_parameters())) == set(opened().tensors)
    for name, parameter in theirs.items():
        assert torch.equal(opened().read(name), parameter), name
