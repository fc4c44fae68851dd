import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from sitsc.core.errors import CheckpointError
from sitsc.frontend.checkpoint import open_checkpoint
from sitsc.frontend.safetensors_reader import DTYPES, read_header, read_span
from tests.frontend.checkpoint_files import safetensors_bytes, write_folder, write_shards

INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32) + (
    torch.int32,
    torch.uint64,
    torch.int64,
)


def test_every_dtype_is_read_back_bit_for_bit(tmp_path: Path):
    tensors = {
        name: (torch.arange(15).reshape(5, 3) % 2).to(dtype)
        if dtype in INTEGERS
        else torch.randn(5, 3).to(dtype)
        for name, dtype in DTYPES.items()
    }
    c = open_checkpoint(write_folder(tmp_path, tensors))
    assert {n: (i.dtype, i.shape, i.nbytes) for n, i in c.tensors.items()} == {
        n: (n, (5, 3), 15 * d.itemsize) for n, d in DTYPES.items()
    }
    for name, tensor in tensors.items():
        whole, part = c.read(name), c.read(name, (1, 4))
        assert whole.dtype == tensor.dtype
        assert torch.equal(whole.view(torch.uint8), tensor.view(torch.uint8))
        assert torch.equal(part.view(torch.uint8), tensor[1:4].contiguous().view(torch.uint8))


@given(shape=st.lists(st.integers(0, 7), max_size=4), data=st.data())
def test_row_ranges_of_odd_shapes(tmp_path_factory, shape, data):
    root = tmp_path_factory.mktemp("odd")
    tensor = torch.randn(shape).to(torch.bfloat16)
    # The odd-sized neighbour in front puts the tensor at any alignment.
    save_file({"a": torch.ones(3, dtype=torch.uint8), "t": tensor}, root / "model.safetensors")
    c = open_checkpoint(write_folder(root))
    assert torch.equal(c.read("t"), tensor)
    if shape:
        first = data.draw(st.integers(0, shape[0]))
        last = data.draw(st.integers(first, shape[0]))
        assert torch.equal(c.read("t", (first, last)), tensor[first:last])


def test_misaligned_data_is_read(tmp_path: Path):
    header = {"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    values = torch.tensor([1.5, -2.0])
    for pad in range(4):
        text = json.dumps(header) + " " * pad
        path = tmp_path / f"{pad}.safetensors"
        path.write_bytes(safetensors_bytes(text, values.numpy().tobytes()))
        assert torch.equal(read_span(path, read_header(path)["t"]), values)


def test_writing_to_a_tensor_leaves_the_file_alone(tmp_path: Path):
    c = open_checkpoint(write_folder(tmp_path, {"t": torch.ones(4)}))
    c.read("t").zero_()
    assert torch.equal(c.read("t"), torch.ones(4))


def test_shards_are_read_through_the_index(tmp_path: Path):
    c = open_checkpoint(write_shards(tmp_path))
    assert list(c.tensors) == ["a", "b", "c"]
    assert c.tensors["c"].file == "model-00002-of-00002.safetensors"
    assert torch.equal(c.read("a", (1, 2)), torch.tensor([[3.0, 4.0, 5.0]]))


def test_the_index_decides_and_stray_files_are_not_opened(tmp_path: Path):
    root = write_shards(tmp_path)
    (root / "model-00003-of-00002.safetensors").write_bytes(b"rubbish")
    assert list(open_checkpoint(root).tensors) == ["a", "b", "c"]


def test_one_file_of_any_name_needs_no_index(tmp_path: Path):
    root = write_folder(tmp_path)
    save_file({"t": torch.ones(1)}, root / "weights.safetensors")
    assert list(open_checkpoint(root).tensors) == ["t"]


def test_a_config_alone_opens_without_weights(tmp_path: Path):
    c = open_checkpoint(write_folder(tmp_path, eos_token_id=[7, 3]))
    assert not c.has_weights and c.format == "safetensors"
    assert c.tokenizer.eos_token_ids == (3, 7)
    with pytest.raises(CheckpointError, match="only a config"):
        c.read("model.norm.weight")


def test_rows_outside_a_tensor_are_refused(tmp_path: Path):
    c = open_checkpoint(write_folder(tmp_path, {"t": torch.ones(4), "s": torch.tensor(1.0)}))
    for name, rows in [("t", (0, 5)), ("t", (-1, 2)), ("t", (3, 2)), ("s", (0, 1))]:
        with pytest.raises(CheckpointError, match="outside"):
            c.read(name, rows)


def test_opening_reads_no_tensor_bytes(tmp_path: Path):
    # 1 TiB of hole: anything that touched the data would show.
    header = {"t": {"dtype": "F32", "shape": [1 << 28, 1 << 10], "data_offsets": [0, 1 << 40]}}
    raw = safetensors_bytes(header)
    path = write_folder(tmp_path) / "model.safetensors"
    path.write_bytes(raw)
    with path.open("r+b") as file:
        file.truncate(len(raw) + (1 << 40))
    c = open_checkpoint(tmp_path)
    assert c.tensors["t"].nbytes == 1 << 40
    assert c.read("t", ((1 << 28) - 2, 1 << 28)).abs().sum() == 0


def test_a_hub_cache_snapshot_may_link_into_its_blobs(tmp_path: Path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    write_folder(blobs, {"t": torch.ones(1)})
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).symlink_to(Path("../../blobs") / name)
    assert torch.equal(open_checkpoint(snapshot).read("t"), torch.ones(1))
