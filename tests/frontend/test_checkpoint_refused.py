import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sitsc.core.errors import CheckpointError
from sitsc.frontend.checkpoint import open_checkpoint
from sitsc.frontend.safetensors_reader import read_header
from tests.frontend.checkpoint_files import (
    safetensors_bytes,
    write_folder,
    write_gguf,
    write_index,
    write_shards,
)

SHARD = "model-00002-of-00002.safetensors"


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8), **more: Any) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets} | more


HEADERS: dict[str, tuple[Any, str]] = {
    "no object": ("[]", "no safetensors header"),
    "half an object": ('{"t": {', "not valid JSON"),
    "a list behind a space": (" {}", "no safetensors header"),
    "unknown dtype": ({"t": entry("F31")}, "unknown dtype 'F31'"),
    "dtype no text": ({"t": entry([])}, "unknown dtype"),
    "negative shape": ({"t": entry(shape=[-2])}, "bad shape"),
    "fractional shape": ({"t": entry(shape=[2.0])}, "bad shape"),
    "true as a shape": ({"t": entry("U8", [True], [0, 1])}, "bad shape"),
    "shape no list": ({"t": entry(shape=2)}, "bad shape"),
    "huge shape": ({"t": entry(shape=[1 << 60, 1 << 60])}, "bad shape"),
    "rank of a hundred": ({"t": entry(shape=[1] * 100)}, "bad shape"),
    "three offsets": ({"t": entry(offsets=[0, 4, 8])}, "bad data_offsets"),
    "offsets backwards": ({"t": entry(offsets=[8, 0])}, "spans -8 bytes"),
    "too few bytes": ({"t": entry(offsets=[0, 4])}, "spans 4 bytes, .* need 8"),
    "beyond the file": ({"t": entry(shape=[4], offsets=[0, 16])}, "describes"),
    "hole in front": ({"t": entry(offsets=[4, 12])}, "hole"),
    "overlap": ({"t": entry(), "u": entry(shape=[1], offsets=[4, 8])}, "overlaps"),
    "rest undescribed": ({"t": entry(shape=[1], offsets=[0, 4])}, "describes"),
    "missing field": ({"t": {"dtype": "F32"}}, "must hold"),
    "extra field": ({"t": entry(scale=1)}, "must hold"),
    "entry no object": ({"t": 5}, "must hold"),
    "control character": ({"t\n": entry()}, "not plain text"),
    "lone surrogate": ('{"\\ud800": 1}', "not plain text"),
    "empty name": ({"": entry()}, "not plain text"),
    "metadata of numbers": ({"__metadata__": {"a": 1}, "t": entry()}, "__metadata__"),
    "metadata no object": ({"__metadata__": 3, "t": entry()}, "__metadata__"),
    "name twice": ('{"t": 1, "t": 2}', "'t' is given twice"),
    "deep nesting": ("{" + '"a":{' * 100_000, "not valid JSON"),
    "number without end": ('{"t": ' + "9" * 10_000 + "}", "not valid JSON"),
    "NaN": ('{"t": NaN}', "not valid JSON"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_bad_header_is_refused(tmp_path: Path, case: str):
    header, message = HEADERS[case]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(safetensors_bytes(header, bytes(8)))
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(path)
    assert "bad.safetensors" in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize("raw", [b"", b"1234567", bytes(8), b"\xff" * 8, b"\xff" * 100])
def test_a_file_without_a_header_is_refused(tmp_path: Path, raw: bytes):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        read_header(path)


def change(name: str, text: str | bytes) -> Callable[[Path], Any]:
    raw = text.encode() if isinstance(text, str) else text
    return lambda root: (root / name).write_bytes(raw)


def truncate(root: Path) -> None:
    os.truncate(root / SHARD, (root / SHARD).stat().st_size - 1)


def link_out(root: Path) -> None:
    outside = root.parent / "outside.safetensors"
    (root / SHARD).rename(outside)
    (root / SHARD).symlink_to(outside)


def pipe(root: Path) -> None:
    (root / SHARD).unlink()
    os.mkfifo(root / SHARD)


FOLDERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda r: (r / "config.json").unlink(), "no config.json"),
    "config cut short": (change("config.json", '{"model_type": '), "config.json is not valid JSON"),
    "config a list": (change("config.json", "[]"), "config.json holds no JSON object"),
    "config not UTF-8": (change("config.json", b"\xff\xfe{}"), "config.json is not valid JSON"),
    "config key twice": (change("config.json", '{"a": 1, "a": 2}'), "given twice"),
    "generation config": (change("generation_config.json", "nope"), "generation_config.json"),
    "eos of text": (change("config.json", '{"eos_token_id": "</s>"}'), "eos_token_id"),
    "shard missing": (lambda r: (r / SHARD).unlink(), f"{SHARD}, which is not there"),
    "shard truncated": (truncate, f"{SHARD} has"),
    "shard empty": (change(SHARD, b""), f"{SHARD} is not a whole"),
    "shard a link out": (link_out, "leaves the model folder"),
    "shard a pipe": (pipe, "not a regular file"),
    "shard a folder": (lambda r: ((r / SHARD).unlink(), (r / SHARD).mkdir()), "not a regular file"),
    "link to nothing": (
        lambda r: ((r / SHARD).unlink(), (r / SHARD).symlink_to("no")),
        "not there",
    ),
    "index no JSON": (change("model.safetensors.index.json", "{"), "not valid JSON"),
    "index without map": (change("model.safetensors.index.json", "{}"), "no weight_map"),
    "index a list": (change("model.safetensors.index.json", '{"weight_map": []}'), "no weight_map"),
    "tensor absent": (lambda r: write_index(r, a=1, b=1, c=2, d=2), "'d' into .* no such tensor"),
    "tensor stray": (lambda r: write_index(r, a=1, c=2), "holds 'b', which the index"),
    "wrong shard": (lambda r: write_index(r, a=2, b=1, c=2), "does not place there"),
    "parent folder": (lambda r: write_index(r, a="../x.safetensors"), "not a plain file name"),
    "absolute": (lambda r: write_index(r, a="/etc/passwd"), "not a plain file name"),
    "sub-folder": (lambda r: write_index(r, a="sub/x.safetensors"), "not a plain file name"),
    "backslash": (lambda r: write_index(r, a="..\\x"), "not a plain file name"),
    "dots": (lambda r: write_index(r, a=".."), "not a plain file name"),
    "shard no text": (change("model.safetensors.index.json", '{"weight_map": {"a": 1}}'), "plain"),
    "tokenizer": (change("tokenizer.json", "{}"), "tokenizer.json is not laid out"),
    "tokenizer binary": (change("tokenizer.json", b"\xff"), "tokenizer.json is not valid JSON"),
    "tokenizer config": (change("tokenizer_config.json", "3"), "tokenizer_config.json"),
    "eos token a list": (change("tokenizer_config.json", '{"eos_token": []}'), "eos_token"),
    "chat template": (change("tokenizer_config.json", '{"chat_template": 7}'), "chat_template"),
    "template binary": (change("chat_template.jinja", b"\xff\xff"), "not UTF-8"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_a_damaged_folder_is_refused_in_one_line(tmp_path: Path, case: str):
    damage, message = FOLDERS[case]
    root = write_shards(tmp_path / "model")
    damage(root)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(root)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_other_things_that_are_not_a_checkpoint(tmp_path: Path):
    with pytest.raises(CheckpointError, match="no such model"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="no such model"):
        open_checkpoint("x" * 5000)
    (tmp_path / "model.zip").write_bytes(b"")
    with pytest.raises(CheckpointError, match="neither a model folder nor"):
        open_checkpoint(tmp_path / "model.zip")


def test_pickles_are_never_opened(tmp_path: Path):
    root = write_folder(tmp_path)
    (root / "pytorch_model.bin").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(CheckpointError, match=r"pickle .*convert"):
        open_checkpoint(root)


def test_a_gguf_beside_a_config_must_be_named(tmp_path: Path):
    write_gguf(write_folder(tmp_path) / "m.gguf")
    with pytest.raises(CheckpointError, match=r"name the file itself: m\.gguf"):
        open_checkpoint(tmp_path)


def test_several_files_without_an_index_are_refused(tmp_path: Path):
    root = write_shards(tmp_path)
    (root / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match="2 safetensors files and no"):
        open_checkpoint(root)


def test_a_file_that_shrinks_after_opening_is_noticed(tmp_path: Path):
    root = write_folder(tmp_path, {"t": torch.ones(100)})
    c = open_checkpoint(root)
    os.truncate(root / "model.safetensors", 200)
    with pytest.raises(CheckpointError, match="shorter"):
        c.read("t")


def test_configs_keep_their_values(tmp_path: Path):
    root = write_folder(tmp_path, a=[1, {"b": None}], eos_token_id=1)
    (root / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 1]}))
    c = open_checkpoint(root)
    assert c.config["a"] == [1, {"b": None}]
    assert c.tokenizer.eos_token_ids == (1, 2)
