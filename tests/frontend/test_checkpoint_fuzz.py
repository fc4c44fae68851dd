"""Random damage to small valid files: a clean error or a checkpoint, nothing else, and quickly."""

import time
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from sitsc.core.errors import CheckpointError, ConfigError, UnsupportedModelError
from sitsc.frontend.checkpoint import open_checkpoint
from sitsc.frontend.config_lint import lint_config, lint_tensors
from tests.frontend.checkpoint_files import gguf_tensors, write_folder, write_gguf

CLEAN = (CheckpointError, ConfigError, UnsupportedModelError)


@cache
def valid_file(kind: str) -> bytes:
    if kind == "safetensors":
        return save({"model.a": torch.randn(3, 5), "b": torch.ones(7, dtype=torch.bfloat16)})
    with TemporaryDirectory() as folder:
        return write_gguf(Path(folder) / "m.gguf", tensors=gguf_tensors(tied=True)).read_bytes()


@cache
def header_bytes(kind: str) -> int:
    """How much of the file to aim at: its header, and a little of the data."""
    return 220 if kind == "safetensors" else 9_000


def open_damaged(kind: str, raw: bytes) -> None:
    """Open, check and read whatever the bytes now say; only clean errors may come out."""
    with TemporaryDirectory() as folder:
        if kind == "safetensors":
            path = write_folder(Path(folder))
            (path / "model.safetensors").write_bytes(raw)
        else:
            path = Path(folder) / "m.gguf"
            path.write_bytes(raw)
        start = time.monotonic()
        try:
            c = open_checkpoint(path)
            for name in c.tensors:
                c.read(name)
            if kind == "gguf":
                lint_config(c.config)
                lint_tensors(c.config, c.tensors)
        except CLEAN as error:
            assert "\n" not in str(error)
        assert time.monotonic() - start < 1.0


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_flipped_bytes(kind, data):
    raw = bytearray(valid_file(kind))
    where = st.integers(0, min(len(raw), header_bytes(kind)) - 1)
    for position in data.draw(st.lists(where, min_size=1, max_size=6)):
        raw[position] = data.draw(st.integers(0, 255))
    open_damaged(kind, bytes(raw))


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_cut_or_lengthened_files(kind, data):
    raw = valid_file(kind)
    if data.draw(st.booleans()):
        limit = data.draw(st.sampled_from([len(raw), header_bytes(kind)]))
        raw = raw[: data.draw(st.integers(0, limit - 1))]
    else:
        at = data.draw(st.integers(0, len(raw)))
        raw = raw[:at] + data.draw(st.binary(min_size=1, max_size=40)) + raw[at:]
    open_damaged(kind, raw)


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_words_replaced_by_extreme_numbers(kind, data):
    """Lengths and counts are where a reader allocates or loops: aim at whole 4 and 8 byte words."""
    raw = bytearray(valid_file(kind))
    width = data.draw(st.sampled_from([4, 8]))
    at = data.draw(st.integers(0, header_bytes(kind) - width))
    value = data.draw(
        st.sampled_from([0, 1, 1 << 20, 1 << 30, (1 << 31) - 1, (1 << 32) - 1])
        | st.integers(0, (1 << (8 * width)) - 1)
    )
    raw[at : at + width] = (value & ((1 << (8 * width)) - 1)).to_bytes(width, "little")
    open_damaged(kind, bytes(raw))


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
@settings(max_examples=40, deadline=None)
@given(raw=st.binary(max_size=300))
def test_noise(kind, raw):
    open_damaged(kind, raw)
    open_damaged(kind, valid_file(kind)[:24] + raw)
