import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, processors

from sitsc.frontend.checkpoint import open_checkpoint
from sitsc.models.random_tokenizer import write_tokenizer
from tests.frontend.checkpoint_files import write_folder


def settings(root: Path, **values) -> None:
    (root / "tokenizer_config.json").write_text(json.dumps(values))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path, {"vocab_size": 300, "bos_token_id": 5, "eos_token_id": 7})
    (tmp_path / "tokenizer_config.json").unlink()
    return write_folder(tmp_path, eos_token_id=3)


def encode(root: Path) -> list[int]:
    files = open_checkpoint(root).tokenizer
    assert files.tokenizer_json is not None
    return Tokenizer.from_str(files.tokenizer_json.decode()).encode("a").ids


def test_eos_is_the_union_of_all_three_files(root: Path):
    settings(root, eos_token="<|im_end|>", bos_token={"content": "<|bos|>"})
    (root / "generation_config.json").write_text('{"eos_token_id": [11, 3]}')
    files = open_checkpoint(root).tokenizer
    assert files.eos_token_ids == (3, 7, 11)
    assert (files.bos_token, files.bos_token_id, files.eos_token) == ("<|bos|>", 5, "<|im_end|>")
    assert files.special_tokens == {"bos_token": "<|bos|>", "eos_token": "<|im_end|>"}


def test_an_eos_token_the_tokenizer_does_not_know_adds_no_id(root: Path):
    settings(root, eos_token="<nowhere>")
    assert open_checkpoint(root).tokenizer.eos_token_ids == (3,)


def test_special_tokens_map_fills_in_for_the_tokenizer_config(root: Path):
    (root / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>", "pad_token": "x"}')
    settings(root, pad_token="y")
    special = open_checkpoint(root).tokenizer.special_tokens
    assert special == {"eos_token": "<|im_end|>", "pad_token": "y"}


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("plain", "plain"),
        ([{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}], "d"),
        ([{"name": "rag", "template": "r"}], None),
        (None, None),
    ],
)
def test_chat_template_of_the_tokenizer_config(root: Path, value, found):
    settings(root, chat_template=value)
    assert open_checkpoint(root).tokenizer.chat_template == found


def test_a_template_file_wins(root: Path):
    settings(root, chat_template="old")
    (root / "chat_template.jinja").write_text("new")
    assert open_checkpoint(root).tokenizer.chat_template == "new"


def test_without_a_flag_the_tokenizer_says_whether_bos_is_added(root: Path):
    settings(root, bos_token="<|bos|>")
    assert not open_checkpoint(root).tokenizer.add_bos
    tokenizer = Tokenizer.from_file(str(root / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", 5)]
    )
    tokenizer.save(str(root / "tokenizer.json"))
    assert open_checkpoint(root).tokenizer.add_bos
    assert encode(root)[0] == 5


@pytest.mark.parametrize("add", [True, False])
def test_the_flag_overrules_and_the_tokenizer_follows(root: Path, add: bool):
    tokenizer = Tokenizer.from_file(str(root / "tokenizer.json"))
    if not add:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", 5)]
        )
        tokenizer.save(str(root / "tokenizer.json"))
    settings(root, bos_token="<|bos|>", add_bos_token=add)
    assert open_checkpoint(root).tokenizer.add_bos is add
    assert encode(root) == [5] * add + tokenizer.encode("a", add_special_tokens=False).ids


def test_an_agreeing_tokenizer_is_handed_on_byte_for_byte(root: Path):
    settings(root, bos_token="<|bos|>", add_bos_token=False)
    data = open_checkpoint(root).tokenizer.tokenizer_json
    assert data == (root / "tokenizer.json").read_bytes()


def test_a_folder_without_a_tokenizer_has_none(tmp_path: Path):
    files = open_checkpoint(write_folder(tmp_path, bos_token_id=4)).tokenizer
    assert files.tokenizer_json is None and files.chat_template is None
    assert (files.bos_token_id, files.add_bos) == (4, False)
