"""CUDA kernels at real shapes as machine code, without a GPU: they fit, and wait in time."""

from dataclasses import replace

import pytest

from sitsc.codegen.aot import compile_kernels
from sitsc.codegen.cuda_attention import Heads
from sitsc.codegen.cuda_candidates import prefill_candidates, split_counts
from sitsc.codegen.cuda_linear import Linear
from sitsc.codegen.cuda_templates import Sizes, candidates, grid, instance
from sitsc.codegen.triton_source import KernelSource, import_text
from sitsc.core.errors import CompileError
from sitsc.core.hardware import CudaLimits, load_target
from tests.codegen.ptx_order import Order, read_order
from tests.gpu.kernel_cases import HEADS, MODELS, all_checks

# What no kernel of a decode step writes, or writes only after the last that reads it.
OLD = {"w_ptr", "norm_ptr", "bias_ptr", "inv_freq_ptr", "sinks_ptr", "next_norm_ptr"}
OLD |= {"block_table_ptr", "context_lens_ptr", "query_start_ptr"}
CHOSEN = (
    "8b qkv, 1 token",
    "8b o, 1 token",
    "8b gate_up, 1 token",
    "8b down, 1 token",
    "8b lm_head, 1 token",
    "8b down, all columns",
    "8b o, streamed",
    "8b qkv, walked",
    "1b down, 1 token",
    "1b gate_up, 1 token",
    "8b qkv, 7 tokens",
    "8b gate_up, 7 tokens",
    "8b down, 31 tokens",
    "8b o, 64 tokens",
    "odd shape, ahead",
    "8b decode, long",
    "8b decode, merged",
    "head dim 80, decode",
    "8b ragged",
    "rms_norm with parts",
    "embedding",
    "rope table",
    "glu",
    "advance",
    "place",
    "8b o scaled, 7 tokens",
    "3584 rows scaled",
    "1b down scaled, 1 token",
    "8b down scaled, 2 tokens",
    "8b o scaled, registers",
    "embedding scaled, 1 row",
    "experts of qwen3, 7 tokens",
    "experts of gpt-oss, 3 tokens",
    "experts in groups, 33 tokens",
)
SOURCES = {
    f"{name} {source.name}": source
    for name in CHOSEN
    for source in all_checks()[name].sources(pdl=True)
}


def ptx(source: KernelSource, sm: int) -> str:
    import triton  # noqa: PLC0415
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.compiler import ASTSource  # noqa: PLC0415

    function = getattr(import_text(source.text), source.name)
    types = dict(source.arguments)
    signature = {name: types.get(name, "constexpr") for name in function.arg_names}
    aligned = [i for i, name in enumerate(function.arg_names) if name in source.aligned]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    options = {"num_warps": source.num_warps, "num_stages": source.num_stages}
    program = ASTSource(function, signature, dict(source.constants), attributes)
    target = GPUTarget("cuda", sm, 32)
    return triton.compile(program, target=target, options=options | {"launch_pdl": True}).asm["ptx"]


def order(source: KernelSource) -> Order:
    return read_order(ptx(source, 90), [name for name, _ in source.arguments])


@pytest.mark.parametrize("name", SOURCES)
def test_before_the_wait_only_what_is_old_is_read(name):
    source = SOURCES[name]
    found = order(source)
    assert found.waits == 1
    allowed = OLD | ({"kv_ptr"} if source.name == "attention_decode" else set())
    for kind, argument in found.before:
        assert argument in allowed, f"{kind} of {argument} before the wait"
        assert not kind.startswith(("st.", "atom", "red"))
    if source.name.startswith(("gemv", "skinny_ahead")):
        assert any(argument == "w_ptr" for _, argument in found.before), "no weights ahead"
    if source.name == "attention_decode":
        assert any(argument == "kv_ptr" for _, argument in found.before), "no keys ahead"
    assert any(kind.startswith("st.") for kind, _ in found.after)


def test_the_order_of_a_kernel_that_waits_too_late_is_found():
    source = SOURCES["8b o, streamed gemv_stream"]
    body = source.text.replace(
        "        next_residual0 = residual0\n",
        "        residual0 = tl.load(residual_ptr + rows, mask=inside, other=0.0)\n",
        1,
    ).replace("next_residual0", "residual0")
    assert body != source.text
    late = order(replace(source, text=body)).before
    assert "residual_ptr" in {argument for _, argument in late}


def test_kernels_neither_spill_nor_need_too_much_shared_memory(tmp_path):
    metas = compile_kernels(list(SOURCES.values()), 90, tmp_path)
    assert all(meta.spill_bytes == 0 for meta in metas)


SMALL: list[tuple[str, Linear | Heads, dict]] = [
    ("gemv", MODELS["8b"]["qkv"], {"tokens": 1, "block_n": 2, "block_k": 4096}),
    ("gemv", MODELS["1b"]["o"], {"tokens": 2, "block_n": 4, "block_k": 2048, "stages": 3}),
    ("skinny", MODELS["8b"]["down"], {"block_t": 16, "block_n": 64, "block_k": 64, "split": 4}),
    (
        "attention_decode",
        HEADS["8b"],
        {"block": 32, "stages": 3, "merge": "last", "max_splits": 16},
    ),
    ("attention_prefill", HEADS["8b"], {"block_m": 64, "block_n": 32, "stages": 2}),
]


@pytest.mark.parametrize("sm", [80, 89, 100, 120])
def test_other_architectures(sm, tmp_path):
    sources = []
    for template, op, tile in SMALL:
        more = {"stages": 4, "ahead": True} if template == "skinny" else {}
        sources.append(instance(template, op, pdl=sm >= 90, **(tile | more)))
    assert all(meta.spill_bytes == 0 for meta in compile_kernels(sources, sm, tmp_path))


def test_without_dependent_launch_nothing_waits():
    for check in all_checks().values():
        for source in check.sources(pdl=False):
            assert "gdc_" not in source.text and "prefetch" not in source.text
            assert not source.pdl


def gpu() -> CudaLimits:
    limits = load_target("h200").cuda
    assert limits is not None
    return limits


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 16, 33, 64])
def test_candidates_can_be_instantiated(model, tokens):
    for name, op in MODELS[model].items():
        found = candidates(op, tokens, gpu())
        assert 5 < len(found) < 500, f"{len(found)} tiles for {name}"
        for candidate in found:
            more = {"tokens": tokens} if candidate.template == "wide" else {}
            source = instance(candidate.template, op, **candidate.tile, **more)
            for programs in candidate.programs or (0,):
                assert grid(source, Sizes(programs=programs))[0] <= 132 * 1024
            assert bool(candidate.programs) == (candidate.template == "gemv")
    assert not candidates(MODELS[model]["o"], 257, gpu())


@pytest.mark.parametrize("model", HEADS)
def test_candidates_of_attention(model):
    decode, prefill = candidates(HEADS[model], 1, gpu()), prefill_candidates(HEADS[model], gpu())
    assert len(decode) > 5 and len(prefill) > 3
    for candidate in (*decode, *prefill):
        instance(candidate.template, HEADS[model], **candidate.tile)
    assert split_counts(HEADS[model], 1, gpu()) == (33, 16, 64, 1)
    assert split_counts(HEADS[model], 256, gpu()) == (1,)


def test_errors_name_what_does_not_fit():
    op = Linear(64, 64, norm=True, eps=1e-5)
    with pytest.raises(CompileError, match="all columns"):
        instance("gemv", op, tokens=1, block_n=2, block_k=32, split=2)
    with pytest.raises(CompileError, match="no kernel template 'matmul'"):
        instance("matmul")
    with pytest.raises(CompileError, match="block_m"):
        instance("gather", columns=3, block_m=4)
    with pytest.raises(CompileError, match="no 'swish'"):
        instance("gemv_walk", Linear(1, 1, activation="swish"), tokens=1, block_n=1, block_k=1)
    with pytest.raises(CompileError, match="multiple"):
        instance("kv_write", Heads(6, 4, 16, 16, 1.0))
