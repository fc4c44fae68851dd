"""Pieces of files in one block: placed, merged, split, converted, by any number of threads."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sitsc.core.errors import ArtifactError
from sitsc.core.weights import DTYPES, TensorSlice, WeightSpec
from sitsc.runtime.weight_layout import WeightLayout, allocate_block
from sitsc.runtime.weight_reader import FileReader, Lanes, Piece, merged, split

shapes = st.one_of(st.tuples(st.integers(1, 40)), st.tuples(st.integers(1, 20), st.integers(1, 30)))
dtypes = st.sampled_from(["float32", "bfloat16", "float16", "int8"])


def spec(name: str, shape: tuple[int, ...], dtype: str) -> WeightSpec:
    return WeightSpec(name, "weight", (TensorSlice(name, 0, shape[0]),), shape, dtype, "plain", "")


@given(st.lists(st.tuples(shapes, dtypes), max_size=12))
def test_weights_lie_apart_aligned_and_in_order(kinds):
    specs = [spec(f"w{i}", shape, dtype) for i, (shape, dtype) in enumerate(kinds)]
    layout = WeightLayout.of(specs)
    end = 0
    for place, item in zip(layout.places, specs, strict=True):
        assert place.spec is item and place.offset % 64 == 0 and 0 <= place.offset - end < 64
        end = place.offset + item.nbytes
    assert 0 <= layout.nbytes - end < 64 and layout.nbytes % 64 == 0
    views = layout.views(allocate_block(layout, "cpu"))
    for index, item in enumerate(specs):
        views[item.name].fill_(index % 100 + 1)
    for index, item in enumerate(specs):
        assert views[item.name].shape == item.shape
        assert (views[item.name] == index % 100 + 1).all()


def test_neighbours_are_read_in_one_piece_and_others_are_not():
    pieces = [Piece(0, 64, 32, 128), Piece(0, 0, 64, 64), Piece(1, 96, 8, 160)]
    assert merged(pieces) == [Piece(0, 0, 96, 64), Piece(1, 96, 8, 160)]
    apart = [Piece(0, 0, 64, 0), Piece(0, 64, 64, 128), Piece(0, 130, 64, 192)]
    assert merged(apart) == apart
    wide = [Piece(0, 0, 64, 0, "float32", "bfloat16"), Piece(0, 64, 8, 32, "float32", "bfloat16")]
    assert merged(wide) == [Piece(0, 0, 72, 0, "float32", "bfloat16")]
    assert len(merged([wide[0], Piece(0, 64, 8, 32)])) == 2


@given(
    st.integers(0, 300),
    st.integers(1, 70),
    st.sampled_from([("uint8", "uint8"), ("float32", "bfloat16"), ("float16", "float32")]),
)
def test_parts_of_a_piece_are_the_whole(elements, most, kinds):
    dtype, to = kinds
    size, wide = DTYPES[dtype].itemsize, DTYPES[to].itemsize
    parts = split(Piece(3, 11, elements * size, 128, dtype, to), most)
    start, offset = 11, 128
    for part in parts:
        assert (part.file, part.start, part.offset) == (3, start, offset)
        assert 0 < part.count <= max(most, size) and part.count % size == 0
        start, offset = start + part.count, offset + part.count // size * wide
    assert (start, offset) == (11 + elements * size, 128 + elements * wide)


@pytest.mark.parametrize("lanes", [Lanes(1, 1 << 20), Lanes(8, 96), Lanes(3, 4096)])
def test_any_number_of_threads_reads_the_same(tmp_path: Path, lanes: Lanes):
    data = torch.randint(0, 256, (40_000,), dtype=torch.uint8)
    paths = [tmp_path / "a", tmp_path / "b"]
    paths[0].write_bytes(bytes(data[:25_000].tolist()))
    paths[1].write_bytes(bytes(data[25_000:].tolist()))
    pieces = [Piece(0, 5, 20_000, 64), Piece(1, 0, 15_000, 20_064), Piece(0, 20_100, 1, 40_000)]
    block = torch.full((40_064,), 77, dtype=torch.uint8)
    counts: list[int] = []
    FileReader(paths, pieces, lanes).run(block, counts.append)
    assert sum(counts) == 35_001
    assert torch.equal(block[64:20_064], data[5:20_005])
    assert torch.equal(block[20_064:35_064], data[25_000:])
    assert block[40_000] == data[20_100]
    assert (block[:64] == 77).all() and (block[35_064:40_000] == 77).all()


@pytest.mark.parametrize(("dtype", "to"), [("float32", "bfloat16"), ("float16", "bfloat16")])
def test_elements_are_converted(tmp_path: Path, dtype: str, to: str):
    values = torch.randn(1000).to(DTYPES[dtype])
    path = tmp_path / "f"
    path.write_bytes(b"odd" + values.view(torch.uint8).numpy().tobytes())
    block = torch.zeros(64 + 2000, dtype=torch.uint8)
    piece = Piece(0, 3, values.nbytes, 64, dtype, to)
    FileReader([path], [piece], Lanes(4, 100)).run(block, lambda count: None)
    assert torch.equal(block[64:].view(DTYPES[to]), values.to(DTYPES[to]))


def test_a_file_cut_short_is_told(tmp_path: Path):
    (tmp_path / "w").write_bytes(bytes(100))
    reader = FileReader([tmp_path / "w"], [Piece(0, 0, 200, 0)], Lanes(2, 64))
    with pytest.raises(ArtifactError, match="w has become shorter"):
        reader.run(torch.zeros(256, dtype=torch.uint8), lambda count: None)


def test_a_stopped_reader_reads_nothing(tmp_path: Path):
    (tmp_path / "w").write_bytes(bytes(1000))
    reader = FileReader([tmp_path / "w"], [Piece(0, 0, 1000, 0)], Lanes(2, 64))
    reader.stop()
    counts: list[int] = []
    reader.run(torch.zeros(1024, dtype=torch.uint8), counts.append)
    assert counts == []
