"""Attention of the families' heads and sampling of their vocabularies, for every GPU, as code.

The tiles are those that a provider chooses; no kernel spills or needs more shared memory than there
is. Without a GPU.
"""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from sitsc.codegen.aot import compile_kernels
from sitsc.codegen.cuda import CudaProvider
from sitsc.codegen.cuda_attention_hopper import supported
from sitsc.codegen.cuda_sampling import sample_draw
from sitsc.codegen.triton_source import KernelSource
from sitsc.core.hardware import load_target, shared_memory_bytes

TARGETS = ("a100", "l40s", "h200", "b200", "rtxpro6000")
GROUPS, HEAD_DIMS = (1, 3, 4, 5, 7, 8), (64, 80, 96, 112, 128, 256)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 1024},
    "cap": {"softcap": 50.0, "window": 1024},
    "sinks": {"sinks": True, "window": 128},
}
FEW = {  # group, head_dim, variant, kind: those that were near a limit, half a second each
    "a100": ((7, 128, "plain", "prefill"), (5, 80, "cap", "prefill")),
    "l40s": ((7, 128, "cap", "prefill"), (4, 256, "sinks", "prefill")),
    "h200": (
        (7, 80, "sinks", "decode"),
        (3, 96, "window", "prefill"),
        (4, 256, "sinks", "prefill"),
    ),
    "b200": ((7, 128, "sinks", "prefill"), (5, 256, "cap", "prefill")),
    "rtxpro6000": (
        (7, 128, "plain", "prefill"),
        (5, 80, "cap", "prefill"),
        (3, 64, "window", "prefill"),
        (3, 256, "sinks", "prefill"),
    ),
}
VOCABULARIES = (128, 320, 1000, 32000, 32001, 50257, 50295, 128257, 151665, 256000)


def shape_of(group: int, head_dim: int, variant: str, sequences: int = 8) -> dict[str, Any]:
    shape = {"q_heads": 4 * group, "kv_heads": 4, "head_dim": head_dim, "rotary_dim": head_dim}
    shape |= {"rope_style": "half", "page_tokens": 64, "scale": head_dim**-0.5, "window": 0}
    shape |= {"softcap": 0.0, "sinks": False, "sequences": sequences, "angle_dtype": "bf16"}
    return shape | {"tokens": 520, "context": 1024} | VARIANTS[variant]


def check(target: str, sources: list[KernelSource], folder: Path) -> None:
    """What `compile_kernels` refuses is said again here: it is the promise."""
    limits = load_target(target).cuda
    assert limits is not None
    room = shared_memory_bytes(limits.sm)
    for meta in compile_kernels(sources, limits.sm, folder):
        assert meta.spill_bytes == 0 and meta.shared_bytes <= room, meta


def provider_of(target: str) -> CudaProvider:
    limits = load_target(target).cuda
    assert limits is not None
    return CudaProvider(target, limits)


@pytest.mark.parametrize("target", TARGETS)
def test_few_heads_of_every_kind(target, tmp_path):
    provider = provider_of(target)
    for *heads, kind in FEW[target]:
        provider.attention(shape_of(*heads), kind)
    names = ("attention_prefill", "attention_decode", "attention_prefill_hopper")
    check(target, [s for s in provider.sources.values() if s.name in names], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "kind"), list(product(TARGETS, ("prefill", "decode"))))
def test_all_heads(target, kind, tmp_path):
    provider = provider_of(target)
    for heads in product(GROUPS, HEAD_DIMS, VARIANTS):
        for sequences in (1, 64) if kind == "decode" else (8,):
            provider.attention(shape_of(*heads, sequences), kind)
    check(target, list(provider.sources.values()), tmp_path)


@pytest.mark.parametrize(
    ("group", "variant", "taken"),
    [(2, "sinks", False), (4, "sinks", False), (8, "sinks", True), (4, "cap", True)],
)
def test_which_wide_heads_hopper_has_registers_for(group, variant, taken):
    heads = CudaProvider.heads(shape_of(group, 256, variant))
    assert supported(heads, 90) == taken


def draw(vocabulary: int, target: str, advance: int = 1) -> KernelSource:
    pdl = provider_of(target).pdl
    return sample_draw(vocabulary=vocabulary, eos_ids=(2,), pdl=pdl, advance=advance)


def test_draws_of_an_odd_vocabulary(tmp_path):
    check("rtxpro6000", [draw(50257, "rtxpro6000")], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["l40s", "b200", "rtxpro6000"])
def test_draws_of_all_vocabularies(target, tmp_path):
    sources = [draw(*size) for size in product(VOCABULARIES, [target], (0, 1))]
    check(target, sources, tmp_path)
