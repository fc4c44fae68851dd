"""The C++ CPU kernels: templates/cpu_*.j2 rendered, then compiled by g++ to one shared library.

A `KernelSpec` goes in; `render` gives the sources as text, `compile_library` the library, the same
bytes for the same text and compiler. The ABI is templates/cpu_abi.h.j2. Never loads the library.
"""

import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from sitsc.core.errors import CompileError

HEADERS = ("abi", "common", "rows", "dots", "linear", "moe", "attend", "softmax", "attention")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
FLAGS += (
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-Wall",
    "-Wno-psabi",
    "-Wno-ignored-attributes",
)


@dataclass(frozen=True, slots=True)
class Isa:
    """One variant: the CPU features that it needs on x86; elsewhere only the first one runs."""

    name: str
    features: tuple[str, ...]

    @property
    def unit(self) -> str:
        """The source file of this variant."""
        return f"cpu_unit_{self.name}.cpp"

    @property
    def flags(self) -> list[str]:
        """The compiler flags of this variant on x86."""
        return [f"-m{feature}" for feature in self.features]


_AVX2 = ("avx2", "fma", "bmi", "bmi2")
_AVX512 = _AVX2 + ("avx512f", "avx512bw", "avx512vl", "avx512dq")
ISAS = (
    Isa("generic", _AVX2),
    Isa("avx512", _AVX512),
    Isa("avx512_bf16", _AVX512 + ("avx512vnni", "avx512bf16")),
)


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """What the templates are rendered with. Tiles are for AVX-512; the generic ones are fixed."""

    page_tokens: int = 16
    max_head_dim: int = 1024
    row_tile: int = 6  # rows of x in registers at once
    block_tile: int = 4  # blocks of 16 outputs in registers at once
    token_block: int = 48  # rows whose sums stay in L1 while k goes by
    k_chunk: int = 2048  # k whose weights of `block_tile` blocks stay in L2
    sum_steps: int = 256  # steps summed in registers before the row's sum is touched
    quant_group: int = 128  # k that share a scale of the int16 activations
    chunk_tokens: int = 64  # keys of one softmax part
    query_rows: int = 48  # query rows of one attention unit
    split_tokens: int = 8  # up to this many new tokens, chunks of keys are shared among threads
    few_tokens: int = 4  # up to this many, each thread prepares all rows, weights are one stream
    private_bytes: int = 65536  # stack for that
    serial_bytes: int = 65536  # weight bytes * tokens below which one thread does it all
    serial_elements: int = 16384  # the same for row kernels, elements
    serial_attention: int = 65536  # the same for attention, multiplications
    max_experts: int = 1024  # of one layer
    expert_rows: int = 4  # what reading the weights of an expert costs, in rows of arithmetic


def render(spec: KernelSpec) -> dict[str, str]:
    """The sources by file name; the same text for the same spec, everywhere."""
    environment = Environment(
        loader=PackageLoader("sitsc.codegen", "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    sources = {}
    for name in HEADERS:
        template = environment.get_template(f"cpu_{name}.h.j2")
        sources[f"cpu_{name}.h"] = template.render(spec=spec)
    dispatch = environment.get_template("cpu_dispatch.cpp.j2")
    sources["cpu_dispatch.cpp"] = dispatch.render(spec=spec, isas=ISAS)
    unit = environment.get_template("cpu_unit.cpp.j2")
    for isa in ISAS:
        sources[isa.unit] = unit.render(spec=spec, isa=isa)
    return sources


def workspace_bytes(
    spec: KernelSpec,
    *,
    tokens: int,
    max_k: int,
    max_n: int,
    seqs: int,
    q_heads: int,
    head_dim: int,
    max_context: int,
) -> int:
    """Scratch bytes that cover every call up to these sizes: `sitsc_cpu_workspace_bytes`.

    `max_k` is the longest input row of a linear, `head_dim` the larger of the K and V head sizes.
    `max_n` and `seqs` do not matter today.
    """
    del max_n, seqs
    linear = tokens * (_round_up(max_k, 64) * 4 + (max_k // spec.quant_group + 1) * 4 + 64)
    chunks = max_context // spec.chunk_tokens + 1
    part_bytes = (_round_up(head_dim, 16) + 16) * 4
    attention = min(tokens, spec.split_tokens) * q_heads * chunks * part_bytes
    return _round_up(max(linear, attention), 64) + 128


def moe_workspace_bytes(
    *, tokens: int, top_k: int, experts: int, hidden: int, intermediate: int
) -> int:
    """Scratch bytes of one mixture-of-experts call of any dtype, at most."""
    rows = tokens * top_k
    wide = _round_up(hidden, 64) + 2 * _round_up(intermediate, 64) + _round_up(hidden, 16)
    scales = (hidden + intermediate) // 64 + 2
    return rows * 4 * (4 + wide + scales) + (experts + 1) * 4 + 12 * 64


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def compile_library(sources: dict[str, str], out_path: Path) -> None:
    """Compile `sources` to the shared library `out_path`, which appears only when complete.

    The compiler is `CXX`, else g++. Load the library after `import torch`: it uses the OpenMP
    runtime that is already there. Raises CompileError with the compiler's first error.
    """
    compiler = os.environ.get("CXX") or "g++"
    out_path = Path(out_path).absolute()
    with tempfile.TemporaryDirectory(dir=out_path.parent, prefix=".cpu_kernels_") as folder:
        for name, text in sources.items():
            Path(folder, name).write_text(text)
        units = sorted(name for name in sources if name.endswith(".cpp"))
        x86 = _wait(compiler, _start(compiler, ["-dumpmachine"], folder)).startswith("x86_64")
        extra = {isa.unit: isa.flags for isa in ISAS} if x86 else {}
        jobs = [
            _start(compiler, [*FLAGS, *extra.get(unit, ()), "-c", unit, "-o", f"{unit}.o"], folder)
            for unit in units
        ]
        for job in jobs:
            _wait(compiler, job)
        link = ["-shared", "-fopenmp", "-Wl,--build-id=none", "-Wl,-s", "-o", "kernels.so"]
        _wait(compiler, _start(compiler, link + [f"{unit}.o" for unit in units], folder))
        os.replace(Path(folder, "kernels.so"), out_path)


def _start(compiler: str, arguments: list[str], folder: str) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(
            [*compiler.split(), *arguments],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    except OSError as error:
        hint = "install g++ or set CXX"
        raise CompileError(f"cannot run the C++ compiler {compiler}: {error}", hint=hint) from None


def _wait(compiler: str, job: subprocess.Popen[str]) -> str:
    output, _ = job.communicate()
    if job.returncode == 0:
        return output
    lines = output.splitlines() or ["no message"]
    first = next((line for line in lines if "error" in line), lines[-1])
    raise CompileError(f"{compiler} failed: {first}", hint="g++ 11 or newer is needed")
