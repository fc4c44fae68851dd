"""One kernel to machine code, in this process, on a machine without a GPU.

In: a kernel instance and an architecture number (90). Out: a cubin and its metadata, the same bytes
wherever they are built. Triton's switches in the environment have no effect. Imports little: this
is all that a process of the compile pool loads besides Triton.
"""

import contextlib
import importlib.metadata
import io
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from sitsc.codegen.triton_source import KernelSource, import_text
from sitsc.core.errors import CompileError
from sitsc.core.kernel_meta import KernelMeta

# Switches of Triton and ptxas that change code; only those set here hold while compiling.
_SWITCHES = ("DISABLE_LLVM_OPT", "DISABLE_PTXAS_OPT", "PTXAS_OPTIONS", "USE_IR_LOC")
_ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\S+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
# What a kernel between ranks does once to each word: sent or read twice, it would be taken for the
# next call's. The compiler does it twice where it wants the value in two layouts of threads.
_ONCE = {
    "arrived": "ld.relaxed.sys.global.v4.b32",
    "send16": "st.relaxed.sys.global.v4.b32",
}
_TILE_HINT = (
    "a tile of the target's table (sitsc/data/tiles) is to be tuned anew (sitsc tune build);"
    " any other is a fault of the rule that chose it: please report model and target"
)
_FILE_REGISTERS, _MOST_REGISTERS = 65536, 255  # of a multiprocessor and of a thread, sm_80 to 120
_DESCRIPTOR = re.compile(r"tensordesc<bf16\[([\d,]+)\]>")


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """The machine code of one kernel (an ELF file) and what a launch needs to know."""

    cubin: bytes
    metadata: KernelMeta


@dataclass(frozen=True, slots=True)
class _Resources:
    """What the assembler reported about one kernel; sizes in bytes a thread."""

    arch: str
    registers: int
    stack_bytes: int
    spill_bytes: int


def triton_version() -> str:
    """The version of Triton that compiles. Raises CompileError when there is none."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        raise CompileError("Triton is not installed", hint="pip install sitsc[compile]") from None


def compile_unchecked(source: KernelSource, sm: int) -> CompiledKernel:
    """Compile one kernel in this process for compute capability `sm` (80, 89, 90, 100, 120).

    Where the assembler would rather spill than have less threads at once, it is told to take the
    registers that there are. Raises CompileError naming kernel and tile when Triton refuses it;
    limits are not checked.
    """
    kernel = _compiled(source, sm)
    meta = kernel.metadata
    most = min(_MOST_REGISTERS, _FILE_REGISTERS // (32 * meta.num_warps) // 8 * 8)
    if source.registers or not meta.spill_bytes or meta.registers >= most:
        return kernel
    return _compiled(source, sm, most)


def _compiled(source: KernelSource, sm: int, registers: int = 0) -> CompiledKernel:
    """One kernel, with at most so many registers a thread; 0: as its source says."""
    triton_version()
    log, limited = io.StringIO(), replace(source, registers=registers or source.registers)
    with tempfile.TemporaryDirectory(prefix="sitsc-triton-") as folder, _environment(folder):
        with contextlib.redirect_stdout(log):
            compiled = _compile(limited, sm)
        ptxas = _ptxas_version(sm)
    _check_once(source, compiled.asm["ttgir"])
    metadata = _metadata(source, sm, compiled.metadata._asdict(), log.getvalue(), ptxas)
    return CompiledKernel(compiled.asm["cubin"], metadata)


def check_limits(meta: KernelMeta, shared_limit_bytes: int) -> None:
    """Raises CompileError for spilled registers, too much shared memory, another architecture."""
    where = _where(meta.template, meta.function, meta.constants, meta.num_warps, meta.num_stages)
    if meta.spill_bytes:
        raise CompileError(
            f"sm_{meta.sm} kernel spills {meta.spill_bytes} bytes of registers a thread",
            where=where,
            hint=_TILE_HINT,
        )
    if meta.shared_bytes > shared_limit_bytes:
        raise CompileError(
            f"sm_{meta.sm} kernel needs {meta.shared_bytes} bytes of shared memory,"
            f" the limit is {shared_limit_bytes}",
            where=where,
            hint=_TILE_HINT,
        )
    if meta.arch.rstrip("af") != f"sm_{meta.sm}":
        raise CompileError(f"asked for sm_{meta.sm}, the assembler made {meta.arch}", where=where)


@contextlib.contextmanager
def _environment(cache_folder: str) -> Iterator[None]:
    """Triton's environment while it compiles: no line numbers (they embed paths), own cache."""
    before = {n: v for n, v in os.environ.items() if n.startswith("TRITON_") or n in _SWITCHES}
    for name in before:
        del os.environ[name]
    ours = {
        "TRITON_DISABLE_LINE_INFO": "1",
        "TRITON_DUMP_PTXAS_LOG": "1",
        "TRITON_CACHE_DIR": cache_folder,
    }
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)
        os.environ.update(before)


def _compile(source: KernelSource, sm: int) -> Any:
    """Triton's compiled kernel. Any failure inside Triton becomes a CompileError."""
    import triton  # noqa: PLC0415  (an optional dependency that only compiling needs)
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.runtime import cache as triton_cache  # noqa: PLC0415

    where = source_name(source)
    # Triton's key of its cache, which is new and empty here, is a hash of all of Triton: seconds.
    triton_cache.triton_key = triton_version
    try:
        function = getattr(import_text(source.text), source.name)
        program = _program(function, source)
        options = {
            "num_warps": source.num_warps,
            "num_stages": source.num_stages,
            "launch_pdl": source.pdl,
            "launch_cooperative_grid": source.cooperative,
            "enable_fp_fusion": True,
        }
        options |= {"maxnreg": source.registers} if source.registers else {}
        return triton.compile(program, target=GPUTarget("cuda", sm, 32), options=options)
    except CompileError:
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = (lines[-1] if lines else "no message")[:300]
        raise CompileError(
            f"Triton cannot compile this for sm_{sm}: {type(error).__name__}: {reason}",
            where=where,
            hint="compile it alone to see Triton's own message",
        ) from error


def _check_once(source: KernelSource, program: str) -> None:
    """Raises CompileError where Triton's `program` sends or reads words of ranks more than once."""
    for function, instruction in _ONCE.items():
        if f"def {function}(" not in source.text:
            continue
        body = source.text.split(f"def {function}(", 1)[1].split("@triton.jit", 1)[0]
        calls = len(re.findall(rf"\b{function}\(", source.text)) - 1
        wanted, found = calls * body.count(instruction), program.count(instruction)
        if found != wanted:
            raise CompileError(
                f"the compiler made {found} exchanges of words between ranks out of {wanted}",
                where=source_name(source),
                hint="another number of warps, so that a thread has one word",
            )


def _program(function: Any, source: KernelSource) -> Any:
    """Triton's description of what to compile: function, types, constants, alignments."""
    from triton.compiler import ASTSource  # noqa: PLC0415
    from triton.runtime.jit import JITFunction  # noqa: PLC0415

    where = source_name(source)
    if not isinstance(function, JITFunction):
        raise CompileError(
            "Triton was imported for its interpreter in this process",
            where=where,
            hint="unset TRITON_INTERPRET, or compile in a pool",
        )
    types, names = dict(source.arguments), list(function.arg_names)
    if missing := [n for n in names if n not in types and n not in source.constants]:
        raise CompileError(f"argument {missing[0]} has neither type nor constant", where=where)
    ordered = [name for name in names if name in types]
    if ordered != list(types) or set(source.constants) - set(names):
        shown = f"arguments {list(types)} and constants {sorted(source.constants)}"
        raise CompileError(f"{shown} are not those of the function: {names}", where=where)
    kind = ASTSource
    if function.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as kind  # noqa: PLC0415

        types = {name: _with_layout(kind) for name, kind in types.items()}
    signature = {name: types.get(name, "constexpr") for name in names}
    aligned = [i for i, name in enumerate(names) if name in source.aligned]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    return kind(function, signature, dict(source.constants), attributes)


def _with_layout(kind: str) -> str:
    """The type of a bfloat16 tensor descriptor as Gluon wants it, with the layout of its tile."""
    if (found := _DESCRIPTOR.fullmatch(kind)) is None:
        return kind
    from triton.experimental.gluon import language as gl  # noqa: PLC0415

    box = [int(size) for size in found[1].split(",")]
    default: Any = gl.NVMMASharedLayout.get_default_for
    layout = default(box, gl.bfloat16)
    return f"tensordesc<bf16[{found[1]}],{layout!r}>"


def _ptxas_version(sm: int) -> str:
    from triton.backends.nvidia.compiler import get_ptxas  # noqa: PLC0415

    return str(get_ptxas(sm).version)


def _metadata(
    source: KernelSource, sm: int, found: dict[str, Any], log: str, ptxas: str
) -> KernelMeta:
    """Our metadata from Triton's and from the assembler's report."""
    used = read_report(log, found["name"])
    return KernelMeta(
        key=source.key(),
        template=source.template,
        function=found["name"],
        sm=sm,
        arch=used.arch,
        arguments=source.arguments,
        aligned=source.aligned,
        constants=source.constants,
        num_warps=found["num_warps"],
        num_stages=found["num_stages"],
        num_ctas=found["num_ctas"],
        shared_bytes=found["shared"],
        scratch_bytes=found.get("global_scratch_size") or 0,
        scratch_align=found.get("global_scratch_align") or 1,
        profile_bytes=found.get("profile_scratch_size") or 0,
        profile_align=found.get("profile_scratch_align") or 1,
        tensor_maps=tuple(dict(item) for item in found.get("tensordesc_meta") or ()),
        pdl=source.pdl,
        cooperative=source.cooperative,
        registers=used.registers,
        spill_bytes=used.spill_bytes,
        stack_bytes=used.stack_bytes,
        triton=triton_version(),
        ptxas=ptxas,
    )


def read_report(log: str, function: str) -> _Resources:
    """What the assembler's log says about `function`. Raises CompileError when it is not there."""
    entry, registers = _ENTRY.search(log), _REGISTERS.search(log)
    frames = [tuple(map(int, found)) for found in _STACK.findall(log)]
    if not entry or entry[1] != function or not frames or not registers:
        raise CompileError(
            f"the assembler reported no registers and spills of {function}",
            hint="use Triton 3.6 to 3.8",
        )
    stack, stored, loaded = (max(sizes) for sizes in zip(*frames, strict=True))
    return _Resources(entry[2], int(registers[1]), stack, max(stored, loaded))


def source_name(source: KernelSource) -> str:
    """Kernel and tile in a few words, for errors and progress."""
    return _where(
        source.template, source.name, source.constants, source.num_warps, source.num_stages
    )


def _where(
    template: str, function: str, constants: dict[str, Any], num_warps: int, num_stages: int
) -> str:
    tile = " ".join(f"{name}={value}" for name, value in constants.items())
    return f"{template}: {function} {tile} warps={num_warps} stages={num_stages}"
