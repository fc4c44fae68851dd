"""Small Triton kernels for the tests of the compiler and of the launcher, with their references."""

from pathlib import Path

from sitsc.codegen.aot import compile_kernels
from sitsc.codegen.triton_source import KernelSource
from sitsc.core.kernel_meta import KernelMeta, kernel_folder, read_kernel_meta

TEXT = '''import triton
import triton.language as tl


@triton.jit
def add(x_ptr, y_ptr, out_ptr, count, scale, BLOCK: tl.constexpr):
    """out = scale * x + y, float32 [count]."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count, other=0.0)
    y = tl.load(y_ptr + at, mask=at < count, other=0.0)
    tl.store(out_ptr + at, scale * x + y, mask=at < count)


@triton.jit
def matmul(a_ptr, b_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """c = a b: bfloat16 [M, K] and [K, N] to float32 [M, N]."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        a_mask = (m < M)[:, None] & (k < K)[None, :]
        b_mask = (k < K)[:, None] & (n < N)[None, :]
        a = tl.load(a_ptr + m[:, None] * K + k[None, :], mask=a_mask, other=0.0)
        b = tl.load(b_ptr + k[:, None] * N + n[None, :], mask=b_mask, other=0.0)
        total = tl.dot(a, b, total)
    mask = (m < M)[:, None] & (n < N)[None, :]
    tl.store(c_ptr + m[:, None] * N + n[None, :], total, mask=mask)


@triton.jit
def step(x_ptr, out_ptr, count: tl.int64, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out = 2 x + 1, int32 [count]; a chain of these is right only in order."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + at, mask=at < count, other=0)
    tl.store(out_ptr + at, 2 * x + 1, mask=at < count)


@triton.jit
def copy_tiles(x, out, ROWS: tl.constexpr, COLS: tl.constexpr):
    """out = x, bfloat16 [rows, cols], by tensor descriptors: the copy engine checks the edges."""
    row, col = tl.program_id(0) * ROWS, tl.program_id(1) * COLS
    out.store([row, col], x.load([row, col]))
'''


def add(block: int = 256) -> KernelSource:
    """A kernel over vectors with a float argument."""
    return KernelSource(
        name="add",
        template="test",
        text=TEXT,
        arguments=(
            ("x_ptr", "*fp32"),
            ("y_ptr", "*fp32"),
            ("out_ptr", "*fp32"),
            ("count", "i32"),
            ("scale", "fp32"),
        ),
        constants={"BLOCK": block},
        aligned=("x_ptr", "y_ptr", "out_ptr"),
        num_warps=4,
        num_stages=1,
        pdl=False,
    )


def matmul(rows: int, cols: int, depth: int, num_warps: int, num_stages: int) -> KernelSource:
    """A matrix product with a tile of rows x cols x depth; K and N divisible by 16."""
    return KernelSource(
        name="matmul",
        template="test",
        text=TEXT,
        arguments=(
            ("a_ptr", "*bf16"),
            ("b_ptr", "*bf16"),
            ("c_ptr", "*fp32"),
            ("M", "i32"),
            ("N", "i32"),
            ("K", "i32"),
        ),
        constants={"BM": rows, "BN": cols, "BK": depth},
        aligned=("a_ptr", "b_ptr", "c_ptr", "N", "K"),
        num_warps=num_warps,
        num_stages=num_stages,
        pdl=False,
    )


def small_matmul() -> KernelSource:
    """A matrix product within 48 KiB of shared memory."""
    return matmul(32, 32, 32, 4, 2)


def large_matmul() -> KernelSource:
    """A matrix product that needs more than 48 KiB of shared memory on every architecture."""
    return matmul(64, 64, 64, 4, 4)


def step(pdl: bool) -> KernelSource:
    """One step of a chain, launched while the one before still runs where `pdl`."""
    return KernelSource(
        name="step",
        template="test",
        text=TEXT,
        arguments=(("x_ptr", "*i32"), ("out_ptr", "*i32"), ("count", "i64")),
        constants={"BLOCK": 128, "PDL": pdl},
        aligned=("x_ptr", "out_ptr"),
        num_warps=4,
        num_stages=1,
        pdl=pdl,
    )


def copy_tiles() -> KernelSource:
    """A kernel with tensor descriptors, for sm_90 and later."""
    return KernelSource(
        name="copy_tiles",
        template="test",
        text=TEXT,
        arguments=(("x", "tensordesc<bf16[32,64]>"), ("out", "tensordesc<bf16[32,64]>")),
        constants={"ROWS": 32, "COLS": 64},
        aligned=(),
        num_warps=4,
        num_stages=1,
        pdl=False,
    )


def all_kernels(sm: int) -> dict[str, KernelSource]:
    """The kernels that the launcher is tested with, by name."""
    kernels = {
        "add": add(),
        "small_matmul": small_matmul(),
        "large_matmul": large_matmul(),
        "step": step(pdl=sm >= 90),
    }
    return kernels | ({"copy_tiles": copy_tiles()} if sm >= 90 else {})


def compile_all(sm: int, folder: Path) -> dict[str, tuple[bytes, KernelMeta]]:
    """Cubin and metadata of each of `all_kernels`, compiled or from the cache, by name."""
    kernels = all_kernels(sm)
    compile_kernels(list(kernels.values()), sm, folder)
    return read_all(sm, folder)


def read_all(sm: int, folder: Path) -> dict[str, tuple[bytes, KernelMeta]]:
    """What `compile_all` wrote to a folder."""
    found = {}
    for name, source in all_kernels(sm).items():
        path = folder / kernel_folder(sm) / f"{source.key()}.cubin"
        found[name] = (path.read_bytes(), read_kernel_meta(path.with_suffix(".json").read_text()))
    return found
