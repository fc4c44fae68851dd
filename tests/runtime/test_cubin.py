"""Reading cubins: every architecture, and no damage that raises anything but ArtifactError."""

import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sitsc.codegen.aot import compile_kernels
from sitsc.core.errors import ArtifactError
from sitsc.core.kernel_meta import read_kernel_meta
from sitsc.runtime.cubin import Parameter, read_cubin
from tests import cuda_kernels

ARCHITECTURES = (80, 89, 90, 100, 120)
CUBINS: dict[int, bytes] = {}


@pytest.fixture(autouse=True, scope="module")
def cubins(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One kernel for each form of the file: the old one, and that of sm_100 and later."""
    folder: Path = tmp_path_factory.mktemp("cubins")
    for sm in ARCHITECTURES:
        compile_kernels([cuda_kernels.add()], sm, folder)
        (path,) = folder.glob(f"kernels/sm_{sm}/*.cubin")
        CUBINS[sm] = path.read_bytes()


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_parameters_threads_and_architecture(sm):
    cubin = read_cubin(CUBINS[sm])
    assert cubin.sm == sm and set(cubin.kernels) == {"add"}
    kernel = cubin.kernels["add"]
    offsets = [(0, 8), (8, 8), (16, 8), (24, 4), (28, 4), (32, 8), (40, 8)]
    assert kernel.parameters == tuple(Parameter(*item) for item in offsets)
    assert (kernel.parameter_bytes, kernel.num_threads) == (48, 128)
    assert 120 <= kernel.cuda_version < 200


def read_or_refuse(data: bytes) -> None:
    """Any bytes are read, or refused by the one error; what is read lies within its buffer."""
    try:
        cubin = read_cubin(data)
    except ArtifactError as error:
        assert "\n" not in str(error)
        return
    for kernel in cubin.kernels.values():
        assert all(p.offset + p.size <= kernel.parameter_bytes for p in kernel.parameters)


@settings(deadline=None, max_examples=200)
@given(sm=st.sampled_from(ARCHITECTURES), share=st.floats(0, 1, exclude_max=True))
def test_every_truncation_is_refused(sm, share):
    data = CUBINS[sm]
    with pytest.raises(ArtifactError):
        # The section table, or what follows it, ends the file: nothing may be missing.
        read_cubin(data[: int(share * len(data) * 0.9)])
    read_or_refuse(data[: int(share * len(data))])


@settings(deadline=None, max_examples=400)
@given(
    sm=st.sampled_from(ARCHITECTURES),
    flips=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(1, 255)), min_size=1, max_size=8),
    table=st.booleans(),
)
def test_flipped_bytes_never_crash(sm, flips, table):
    data = bytearray(CUBINS[sm])
    (start,) = struct.unpack_from("<Q", data, 0x28)
    # Half of the damage hits what is read: the headers and attributes, not machine code.
    places = [*range(64), *range(start, len(data)), *range(data.find(b"\x04\x37"), len(data))]
    for at, mask in flips:
        data[places[at % len(places)] if table else at % len(data)] ^= mask
    read_or_refuse(bytes(data))


@settings(deadline=None, max_examples=100)
@given(head=st.integers(0, 64), tail=st.binary(max_size=300))
def test_random_bytes_after_a_header_never_crash(head, tail):
    read_or_refuse(CUBINS[90][:head] + tail)


@settings(deadline=None, max_examples=100)
@given(
    sm=st.sampled_from(ARCHITECTURES),
    section=st.integers(0, 30),
    field=st.sampled_from([0, 4, 24, 32]),
    value=st.sampled_from([0, 1, 63, 2**31, 2**32 - 1]),
)
def test_section_fields_out_of_range_never_crash(sm, section, field, value):
    data = bytearray(CUBINS[sm])
    (start,) = struct.unpack_from("<Q", data, 0x28)
    (count,) = struct.unpack_from("<H", data, 0x3C)
    struct.pack_into("<I", data, start + 64 * (section % count) + field, value)
    read_or_refuse(bytes(data))


def test_what_is_no_cubin_is_refused():
    for data in (b"", b"\x7fELF", bytes(64), b"\x7fELF\x02\x01" + bytes(100)):
        with pytest.raises(ArtifactError, match="not a usable cubin"):
            read_cubin(data)


@pytest.mark.parametrize("text", ["", "{}", "[1]", "nonsense", '{"key": 1}', "[" * 100_000])
def test_damaged_metadata_is_refused(text):
    with pytest.raises(ArtifactError, match="metadata cannot be read"):
        read_kernel_meta(text)
