"""The sampling kernels at a real vocabulary as machine code, without a GPU."""

import pytest

from sitsc.codegen.aot import compile_kernels
from sitsc.codegen.cuda import CudaProvider
from sitsc.codegen.cuda_templates import Sizes, grid
from sitsc.core.hardware import load_target
from tests.codegen.test_cuda_compiled import order, ptx
from tests.gpu.sampling_cases import EOS, VOCABULARY, all_sources
from tests.sampling_checks import KERNELS


@pytest.mark.parametrize("sm", [80, 90, 120])
def test_no_spills(sm, tmp_path) -> None:
    metas = compile_kernels(all_sources(sm), sm, tmp_path)
    assert [meta.spill_bytes for meta in metas] == [0] * 4


@pytest.mark.parametrize("index", range(4))
def test_nothing_is_read_before_the_wait(index) -> None:
    found = order(all_sources(90)[index])
    assert found.waits == 1 and not found.before


def test_penalties_are_rounded_as_on_the_cpu() -> None:
    """A product is not fused into the difference that follows, and divisions are exact."""
    text = ptx(all_sources(90)[2], 90)
    assert "div.rn.f32" in text and "div.full" not in text
    assert "ftz" not in text.replace("ex2.approx.ftz", "")


def test_the_provider_makes_them() -> None:
    limits = load_target("h200").cuda
    assert limits is not None
    provider = CudaProvider("h200", limits)
    for name in KERNELS:
        shape = {"vocabulary": VOCABULARY, "eos_ids": EOS, "count": "sequences"}
        shape |= {} if name == "sample_draw" else {"parts": 8}
        info = provider.make(name, **shape)
        assert info.grid == (("sequences",) if name == "sample_draw" else ("sequences", 8))
        assert info.arguments == provider.sources[info.key].arguments
        assert grid(provider.sources[info.key], Sizes(rows=3))[0] == 3
