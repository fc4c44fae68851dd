"""The library of CPU kernels: its workspace, its variants and how it is compiled."""

import ctypes
from pathlib import Path

import pytest
import torch
from cpu_checks import INT8, packed

from sitsc.codegen.cpu_kernels import KernelSpec, compile_library, render, workspace_bytes
from sitsc.core.errors import CompileError


def test_workspace(kernels):
    spec = KernelSpec()
    sizes = [(1, 1, 1, 1, 1, 1, 1), (512, 1536, 49152, 1, 9, 64, 8192), (7, 8000, 9, 7, 32, 80, 99)]
    names = ("tokens", "max_k", "max_n", "seqs", "q_heads", "head_dim", "max_context")
    for size in sizes:
        ours = workspace_bytes(spec, **dict(zip(names, size, strict=True)))
        assert kernels.library.sitsc_cpu_workspace_bytes(*size) == ours
    tokens, n, k = 200, 64, 500
    x, norm, out = torch.randn(tokens, k), torch.randn(k), torch.empty(tokens, n)
    weight, scale, _ = packed(torch.randn(n, k), INT8)
    fields = dict(x=x, x_stride=k, x_dtype=0, tokens=tokens, n=n, k=k, weight=weight, scale=scale)
    fields |= dict(weight_dtype=2, prologue=1, norm_weight=norm, eps=1e-5, out=out, out_stride=n)
    size = workspace_bytes(
        spec, tokens=tokens, max_k=k, max_n=n, seqs=1, q_heads=1, head_dim=1, max_context=1
    )
    space = torch.zeros(size + 64, dtype=INT8)
    offset = 3  # not aligned, on purpose
    pointer = ctypes.c_void_p(space.data_ptr() + offset)
    assert kernels.library.sitsc_cpu_set_workspace(pointer, size) == 0
    assert kernels.linear(**fields) == 0
    assert not space[size + offset :].any() and not space[:offset].any()
    expected = out.clone()
    assert kernels.library.sitsc_cpu_set_workspace(pointer, 1000) == 0
    assert kernels.error(kernels.linear(**fields)) == "workspace too small"
    assert kernels.library.sitsc_cpu_set_workspace(None, 0) == 0
    assert kernels.linear(**fields) == 0
    assert torch.equal(out, expected)


def test_isa_names(library):
    assert not library.select_isa("z80")
    assert library.select_isa(None)
    assert library.error(99) == "unknown error code"


def test_render_is_deterministic():
    assert render(KernelSpec()) == render(KernelSpec())
    assert render(KernelSpec(row_tile=5)) != render(KernelSpec())


def test_compile_error_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(CompileError, match="error"):
        compile_library({"a.cpp": "int f( {"}, tmp_path / "a.so")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CompileError, match="no-such-compiler"):
        compile_library({"a.cpp": "int f() { return 1; }"}, tmp_path / "a.so")
    assert list(tmp_path.iterdir()) == []


def test_compile_gives_the_same_bytes(tmp_path: Path):
    sources = {"a.cpp": "namespace { int g = 3; } int f() { return g; }"}
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        compile_library(sources, tmp_path / name / "lib.so")
    assert (tmp_path / "one/lib.so").read_bytes() == (tmp_path / "two/lib.so").read_bytes()
