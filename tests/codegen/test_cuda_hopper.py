"""The Gluon prefill attention as machine code, without a GPU, and which kernel a target takes."""

import re
from typing import Any

import pytest

from sitsc.codegen import aot, aot_kernel
from sitsc.codegen.cuda import CudaProvider
from sitsc.codegen.cuda_attention import Heads
from sitsc.codegen.cuda_attention_hopper import packed_heads, tile
from sitsc.codegen.cuda_candidates import prefill_candidates
from sitsc.codegen.cuda_templates import Sizes, grid, instance
from sitsc.codegen.triton_source import KernelSource
from sitsc.core.errors import CompileError
from sitsc.core.hardware import load_target
from sitsc.core.kernels import KernelInfo

NAME = "attention_prefill_hopper"
HEADS = {
    "8b": Heads(32, 8, 128, 64, 128**-0.5),
    "1b": Heads(32, 8, 64, 64, 64**-0.5),
    "pages of 16": Heads(32, 8, 128, 16, 128**-0.5),
    "window, sinks": Heads(64, 8, 64, 64, 1 / 8, window=128, sinks=True),
    "256, window, cap": Heads(16, 8, 256, 64, 1 / 16, window=1024, softcap=50.0),
}


def source_of(op: Heads, **tile_too: int) -> KernelSource:
    return instance(NAME, op, **(tile(op) | tile_too))


def prefill(target: str, heads: dict[str, Any], tokens: int = 512, sequences: int = 8):
    """The kernels that a provider chooses for a target."""
    limits = load_target(target).cuda
    assert limits is not None
    shape = {"q_heads": 32, "kv_heads": 8, "head_dim": 128, "page_tokens": 64, "scale": 0.1}
    shape |= {"rope_style": "half", "rotary_dim": 0, "window": 0, "softcap": 0.0, "sinks": False}
    shape |= {"tokens": tokens, "sequences": sequences, "context": 0, "angle_dtype": "bf16"}
    provider = CudaProvider(target, limits)
    found = provider.attention(shape | heads, "prefill")
    return found, [provider.sources[info.key] for info in found]


def test_kernels_do_not_spill_fit_and_are_the_same_bytes(tmp_path, monkeypatch):
    sources = [source_of(op) for op in HEADS.values()]
    metas = aot.compile_kernels(sources, 90, tmp_path / "a")
    assert all(meta.spill_bytes == 0 and meta.num_warps == 12 for meta in metas)
    for op, meta in zip(HEADS.values(), metas, strict=True):
        boxes = [item["block_size"] for item in meta.tensor_maps]
        assert boxes == [[128 // op.group, op.group, 64], [op.page_tokens, 64]]
    monkeypatch.setenv("SITSC_CACHE", str(tmp_path / "another"))
    aot.compile_kernels(sources[:1], 90, tmp_path / "b")
    name = f"kernels/sm_90/{metas[0].key}.cubin"
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_nothing_is_read_before_the_wait_and_all_products_are_of_warp_groups():
    text = aot_kernel._compile(source_of(HEADS["8b"]), 90).asm["ptx"]
    assert text.count("griddepcontrol.wait") == 1
    before = text[: text.index("griddepcontrol.wait")]
    assert not re.search(r"ld\.global|st\.global|cp\.async|atom|red\.", before)
    assert "wgmma.mma_async" in text and "mma.sync" not in text and "cp.async.bulk" in text


@pytest.mark.parametrize(
    ("group", "pack"), [(1, 1), (2, 2), (3, 1), (4, 4), (6, 2), (7, 1), (12, 4), (128, 128)]
)
def test_heads_in_a_tile(group, pack):
    op = Heads(2 * group, 2, 64, 64, 0.1)
    assert packed_heads(op) == pack
    source = source_of(op)
    assert source.constants["TOKENS"] == 128 // pack
    blocks = -(-1000 // (128 // pack)) + 3
    assert grid(source, Sizes(1000, 3)) == (blocks * 2 * group // pack, 1, 1)
    assert grid(source, Sizes(1000, 3, programs=5)) == (5, 1, 1)


@pytest.mark.parametrize(
    ("target", "heads", "sequences", "template"),
    [
        ("h200", {}, 256, NAME),
        ("h100", {"head_dim": 64, "page_tokens": 16, "sinks": True, "window": 128}, 8, NAME),
        ("h200", {"head_dim": 256, "q_heads": 8, "softcap": 50.0}, 8, NAME),
        ("h200", {"head_dim": 80}, 8, "attention_prefill"),
        ("h200", {}, 300, "attention_prefill"),
        ("a100", {}, 8, "attention_prefill"),
        ("b200", {"head_dim": 256}, 8, "attention_prefill"),
        ("l40s", {"head_dim": 256, "window": 1024}, 8, "attention_prefill"),
    ],
)
def test_each_target_takes_a_kernel_that_it_has(target, heads, sequences, template):
    found, sources = prefill(target, heads, sequences=sequences)
    assert [info.template for info in found] == ["kv_write", template]
    assert all(s.constants["BLOCK_SEQ"] >= sequences for s in sources)
    attend: KernelInfo = found[1]
    if template == NAME:
        assert attend.tile["programs"] == 132 and attend.num_counters == 1
        assert len(attend.grid) == 1 and int(attend.grid[0]) <= 132
    else:
        assert attend.num_counters == 0


@pytest.mark.parametrize("target", ["a100", "l40s", "rtxpro6000"])
def test_the_first_tile_of_other_targets_does_not_spill(target, tmp_path):
    limits = load_target(target).cuda
    assert limits is not None
    sources = []
    for op in (HEADS["8b"], Heads(16, 4, 256, 64, 0.1)):
        first = prefill_candidates(op, limits)[0]
        sources.append(instance(first.template, op, pdl=limits.sm >= 90, **first.tile))
    metas = aot.compile_kernels(sources, limits.sm, tmp_path)
    assert all(meta.spill_bytes == 0 for meta in metas)


@pytest.mark.parametrize(
    ("op", "more"),
    [
        (Heads(8, 8, 96, 64, 0.1), {"block_n": 128, "queries": 1}),
        (Heads(8, 8, 128, 48, 0.1), {}),
        (Heads(8, 8, 128, 64, 0.1), {"block_n": 32}),
        (Heads(8, 8, 128, 64, 0.1), {"q_row": 1000}),
    ],
)
def test_heads_without_a_kernel_are_refused(op, more):
    with pytest.raises(CompileError):
        source_of(op, **more)
