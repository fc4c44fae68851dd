import struct
from pathlib import Path

import numpy as np
import pytest

from sitsc.core.errors import CheckpointError, SitscError, UnsupportedModelError
from sitsc.frontend.checkpoint import open_checkpoint
from sitsc.pipeline import lint_model
from tests.frontend.checkpoint_files import gguf_tensors, llama_metadata, write_gguf

METADATA = {
    "no block count": ({"llama__block_count": None}, CheckpointError, "block_count is missing"),
    "layers of text": ({"llama__block_count": "2"}, CheckpointError, "block_count"),
    "zero heads": ({"llama__attention__head_count": 0}, CheckpointError, "head_count"),
    "heads per layer": (
        {"llama__attention__head_count_kv": [2, 1]},
        UnsupportedModelError,
        "from layer to layer",
    ),
    "eps zero": (
        {"llama__attention__layer_norm_rms_epsilon": 0.0}, CheckpointError, "epsilon",
    ),
    "theta not finite": ({"llama__rope__freq_base": float("nan")}, CheckpointError, "freq_base"),
    "experts": ({"llama__expert_count": 8}, CheckpointError, "expert_used_count is missing"),
    "partial rotary": (
        {"llama__rope__dimension_count": 8}, UnsupportedModelError, "rotary width 8",
    ),
    "rope scaling": (
        {"llama__rope__scaling__type": "su"}, UnsupportedModelError, "rope scaling 'su'",
    ),
    "pre-tokenizer": (
        {"tokenizer__ggml__pre": "tekken"}, UnsupportedModelError, "pre-tokenizer 'tekken'",
    ),
    "no pre-tokenizer": (
        {"tokenizer__ggml__pre": None}, UnsupportedModelError, "pre-tokenizer None",
    ),
    "tokenizer": (
        {"tokenizer__ggml__model": "rwkv"}, UnsupportedModelError, "model 'rwkv'",
    ),
    "eos outside": (
        {"tokenizer__ggml__eos_token_id": 262}, CheckpointError, "outside the vocabulary",
    ),
    "types too short": (
        {"tokenizer__ggml__token_type": [1, 1]}, CheckpointError, "token_type does not match",
    ),
    "merge of unknown tokens": (
        {"tokenizer__ggml__merges": ["zz zz"]}, CheckpointError, "GGUF tokenizer cannot be used",
    ),
    "merge of one": ({"tokenizer__ggml__merges": ["he"]}, CheckpointError, "not a pair"),
    "token twice": (
        {"tokenizer__ggml__tokens": ["a"] * 262}, CheckpointError, "holds a token twice",
    ),
    "more tokens than rows": (
        {"tokenizer__ggml__tokens": [str(i) for i in range(300)]}, CheckpointError, "300 tokens",
    ),
    "alignment": ({"general__alignment": 7}, CheckpointError, "general.alignment"),
    "template": ({"tokenizer__chat_template": 5}, CheckpointError, "chat_template is no text"),
}  # fmt: skip


@pytest.mark.parametrize("case", METADATA)
def test_bad_metadata_is_refused_by_name(tmp_path: Path, case: str):
    extra, error, message = METADATA[case]
    path = write_gguf(tmp_path / "m.gguf", llama_metadata(**extra))
    with pytest.raises(error, match=message) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)


def test_other_architectures_are_refused_with_those_we_read(tmp_path: Path):
    path = write_gguf(tmp_path / "m.gguf", arch="mamba")
    with pytest.raises(UnsupportedModelError, match="'mamba' is not supported — supported: llama"):
        open_checkpoint(path)


def test_other_tensor_types_are_refused_with_those_we_read(tmp_path: Path):
    path = write_gguf(tmp_path / "m.gguf", kinds={"blk.0.ffn_up.weight": "MXFP4"})
    with pytest.raises(UnsupportedModelError, match=r"up.*MXFP4.*Q4_1"):
        open_checkpoint(path)


def test_a_tensor_no_llama_has_is_refused(tmp_path: Path):
    tensors = gguf_tensors() | {"blk.0.ffn_gate_inp.weight": np.zeros((2, 64), np.float32)}
    with pytest.raises(UnsupportedModelError, match="ffn_gate_inp"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors=tensors))


@pytest.mark.parametrize("factors", [[2.0] * 8, [0.0] * 8, [float("nan")] * 8])
def test_rope_factors_of_an_unknown_rule_are_refused(tmp_path: Path, factors):
    tensors = {"rope_freqs.weight": np.array(factors, np.float32)} | gguf_tensors()
    with pytest.raises(UnsupportedModelError, match="factors of a known rope scaling"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors=tensors))


def test_rope_factors_of_the_wrong_size_are_refused(tmp_path: Path):
    tensors = {"rope_freqs.weight": np.ones(9, np.float32)} | gguf_tensors()
    with pytest.raises(CheckpointError, match="rope_freqs"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors=tensors))


def test_two_files_in_a_folder_must_be_told_apart(tmp_path: Path):
    write_gguf(tmp_path / "a.gguf")
    write_gguf(tmp_path / "b.gguf")
    with pytest.raises(CheckpointError, match=r"2 \.gguf files"):
        open_checkpoint(tmp_path)


def header(*parts: bytes, version: int = 3, tensors: int = 0, values: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, values) + b"".join(parts)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def array(kind: int, count: int) -> bytes:
    return text(b"a") + struct.pack("<IIQ", 9, kind, count)


def tensor(name: bytes, *dims: int, kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


HOSTILE = {
    "empty": (b"", "not a GGUF file"),
    "magic alone": (b"GGUF", "ends early"),
    "version 1": (header(version=1), "version 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version"),
    "2^60 tensors": (header(tensors=1 << 60), "beyond the limits"),
    "2^60 values": (header(values=1 << 60), "beyond the limits"),
    "promised value": (header(values=1), "ends early"),
    "endless text": (header(struct.pack("<Q", 1 << 62), values=1), "ends early"),
    "endless array": (header(array(0, 1 << 62), values=1), "the limit is"),
    "array beyond the file": (header(array(10, 1 << 20), values=1), "ends early"),
    "texts beyond the file": (header(array(8, 1 << 20), values=1), "does not fit"),
    "nested arrays": (header(array(9, 1), bytes(64), values=1), "unknown value type 9"),
    "value type": (header(text(b"a"), struct.pack("<I", 77), values=1), "value type 77"),
    "key twice": (header(*[text(b"a") + struct.pack("<IB", 0, 1)] * 2, values=2), "twice"),
    "key not UTF-8": (header(text(b"\xff"), values=1), "not UTF-8"),
    "key of line breaks": (header(text(b"a\nb"), values=1), "is not a name"),
    "rank 9": (header(tensor(b"t", *[1] * 9), tensors=1), "9 dimensions"),
    "rank 0": (header(tensor(b"t"), tensors=1), "0 dimensions"),
    "huge shape": (header(tensor(b"t", 1 << 60), tensors=1), "bad shape"),
    "empty tensor": (header(tensor(b"t", 0), tensors=1), "bad shape"),
    "tensor type": (header(tensor(b"t", 4, kind=999), tensors=1), "tensor type 999"),
    "part of a block": (header(tensor(b"t", 33, kind=2), tensors=1), "bad shape"),
    "data missing": (header(tensor(b"t", 1 << 20), tensors=1), "tensors need"),
    "offset": (header(tensor(b"t", 4, offset=64), bytes(96), tensors=1), "expected 0"),
    "overlap": (
        header(tensor(b"t", 64), tensor(b"u", 64), bytes(999), tensors=2), "expected 256",
    ),
    "tensor twice": (
        header(tensor(b"t", 8), tensor(b"t", 8, offset=32), bytes(99), tensors=2), "twice",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_is_refused(tmp_path: Path, case: str):
    raw, message = HOSTILE[case]
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


def test_a_file_cut_in_its_data_is_refused(tmp_path: Path):
    path = write_gguf(tmp_path / "m.gguf")
    raw = path.read_bytes()
    path.write_bytes(raw[: -len(raw) // 3])
    with pytest.raises(SitscError, match="tensors need"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [("general.mystery", 1), ("general.base_model.0.weights", "x"), ("qwen2.rope.freq_base", 1e6)]
    + [("llama.attention.mystery", 2), ("adapter.type", "lora"), ("tokenizer.ggml.mystery", True)]
    + [("tokenizer.ggml.add_eos_token", True), ("mystery", 1)],
)
def test_keys_that_nobody_knows_are_told(key: str, value: object, tmp_path: Path):
    path = write_gguf(tmp_path / "m.gguf", llama_metadata(**{key: value}))
    (finding,) = lint_model(path).findings
    assert finding.level == "error" and f"unknown key '{key}'" in finding.what
    assert lint_model(path, (key,)).ok


def test_keys_that_change_nothing(tmp_path: Path):
    inert = {"general.name": "m", "general.sampling.top_k": 3, "general.base_model.0.url": "x"}
    inert |= {"tokenizer.ggml.add_eos_token": False, "tokenizer.ggml.fim_pre_token_id": 1}
    inert |= {"split.count": 1, "quantize.imatrix.file": "f", "general.languages": ["en"]}
    inert |= {"llama.vocab_size": 262, "general.type": "model"}
    assert lint_model(write_gguf(tmp_path / "m.gguf", llama_metadata(**inert))).ok


@pytest.mark.parametrize(
    ("key", "value", "kind", "message"),
    [
        ("llama.vocab_size", 261, CheckpointError, "vocab_size is 261, but the embedding has 262"),
        ("llama.vocab_size", "262", CheckpointError, "vocab_size is '262', but the embedding"),
        ("split.count", 2, UnsupportedModelError, "the file is one of 2 parts"),
        ("general.type", "adapter", UnsupportedModelError, "the file is no model but 'adapter'"),
    ],
)
def test_files_that_contradict_themselves_or_are_no_model(
    key: str, value: object, kind: type[SitscError], message: str, tmp_path: Path
):
    with pytest.raises(kind, match=message):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", llama_metadata(**{key: value})))
