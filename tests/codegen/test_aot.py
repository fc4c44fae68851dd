"""Kernels to cubins: every architecture, the same bytes, limits, the cache, and what is refused."""

import dataclasses
import json
from pathlib import Path

import pytest

from sitsc.codegen import aot
from sitsc.codegen.aot_kernel import check_limits, read_report
from sitsc.codegen.triton_source import KernelSource, import_text, render
from sitsc.core.errors import CompileError, TargetError
from sitsc.core.hardware import load_target, shared_memory_bytes, target_names
from sitsc.core.kernel_meta import KernelMeta, read_kernel_meta
from tests import cuda_kernels

TARGETS = {"a100": 80, "l40s": 89, "h100": 90, "h200": 90, "b200": 100, "rtxpro6000": 120}


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SITSC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def compile_one(source: KernelSource, sm: int, folder: Path) -> KernelMeta:
    return aot.compile_kernels([source], sm, folder, jobs=1)[0]


@pytest.mark.parametrize("sm", [80, 89, 100, 120])
def test_every_architecture(sm, tmp_path):
    sources = [cuda_kernels.small_matmul(), cuda_kernels.step(pdl=sm >= 90)]
    dot, step = aot.compile_kernels(sources, sm, tmp_path)
    assert (dot.sm, dot.arch.rstrip("a"), dot.function) == (sm, f"sm_{sm}", "matmul")
    assert 0 < dot.shared_bytes <= shared_memory_bytes(sm)
    assert dot.spill_bytes == 0 and dot.registers > 8
    assert step.pdl == (sm >= 90)
    assert [p.suffix for p in sorted((tmp_path / f"kernels/sm_{sm}").iterdir())] == [
        *(".cubin", ".json", ".py") * 2
    ]


def test_same_bytes_in_other_processes_and_from_the_cache(tmp_path, monkeypatch):
    sources = list(cuda_kernels.all_kernels(90).values())
    shares: list[float] = []
    first = aot.compile_kernels([*sources, sources[0]], 90, tmp_path / "a", shares.append)
    assert [meta.key for meta in first] == [s.key() for s in [*sources, sources[0]]]
    assert shares == [0.2, 0.4, 0.6, 0.8, 1.0]
    # Nothing is compiled again: without Triton's pool the cache must do.
    monkeypatch.setattr(aot, "ProcessPoolExecutor", None)
    assert aot.compile_kernels(sources, 90, tmp_path / "b") == first[:-1]
    monkeypatch.undo()
    monkeypatch.setenv("SITSC_CACHE", str(tmp_path / "another"))
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "0")
    monkeypatch.setenv("DISABLE_PTXAS_OPT", "1")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    aot.compile_kernels(sources[::-1], 90, tmp_path / "c", jobs=1)
    assert files(tmp_path / "a") == files(tmp_path / "b") == files(tmp_path / "c")
    assert len(files(tmp_path / "a")) == 15


def test_metadata_says_what_a_launch_needs(tmp_path):
    source = cuda_kernels.large_matmul()
    meta = compile_one(source, 90, tmp_path)
    path = tmp_path / "kernels/sm_90" / f"{source.key()}.json"
    assert read_kernel_meta(path.read_text()) == meta
    assert path.with_suffix(".py").read_text() == source.text
    assert meta.arguments == source.arguments and meta.constants == source.constants
    assert 48 * 1024 < meta.shared_bytes <= shared_memory_bytes(90)
    assert (meta.num_warps, meta.num_stages, meta.num_ctas) == (4, 4, 1)
    assert (meta.scratch_bytes, meta.profile_bytes, meta.tensor_maps) == (0, 0, ())
    assert not meta.pdl and not meta.cooperative
    assert meta.triton.startswith("3.") and int(meta.ptxas.split(".")[0]) >= 12


def test_a_damaged_cache_entry_is_compiled_again(tmp_path, empty_cache):
    source = cuda_kernels.add()
    compile_one(source, 80, tmp_path / "a")
    (cubin,) = empty_cache.rglob("*.cubin")
    cubin.write_bytes(cubin.read_bytes()[:-1])
    compile_one(source, 80, tmp_path / "b")
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_spilled_registers_are_refused(tmp_path, empty_cache):
    source = cuda_kernels.matmul(256, 256, 32, 4, 2)
    with pytest.raises(CompileError, match=r"spills \d+ bytes.*matmul BM=256 BN=256") as caught:
        compile_one(source, 80, tmp_path)
    assert "report model and target" in str(caught.value)
    assert not list(tmp_path.rglob("kernels/sm_80/*"))


def test_shared_memory_above_the_limit_is_refused(tmp_path):
    source = cuda_kernels.matmul(128, 128, 64, 8, 5)
    assert compile_one(source, 90, tmp_path).shared_bytes > shared_memory_bytes(89)
    with pytest.raises(CompileError, match=r"sm_89 .* shared memory, the limit is 101376.*BM=128"):
        compile_one(source, 89, tmp_path)


def test_another_architecture_than_asked_for_is_refused(tmp_path):
    meta = compile_one(cuda_kernels.add(), 90, tmp_path)
    check_limits(meta, 0)
    with pytest.raises(CompileError, match="asked for sm_90, the assembler made sm_89"):
        check_limits(dataclasses.replace(meta, arch="sm_89"), 0)


def test_an_architecture_without_data_is_refused(tmp_path):
    with pytest.raises(TargetError, match="no target has sm_75"):
        compile_one(cuda_kernels.add(), 75, tmp_path)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"text": cuda_kernels.TEXT.replace("scale * x", "scale * nothing")}, "nothing"),
        ({"name": "nowhere"}, "nowhere"),
        ({"constants": {}}, "BLOCK has neither type nor constant"),
        ({"constants": {"BLOCK": 256, "EXTRA": 1}}, "are not those of the function"),
        ({"constants": {"BLOCK": 255}}, "power of 2"),
    ],
)
def test_what_triton_cannot_compile_is_named(change, what, tmp_path):
    source = dataclasses.replace(cuda_kernels.add(), **change)
    with pytest.raises(CompileError, match=what) as caught:
        compile_one(source, 80, tmp_path)
    assert source.name in str(caught.value) and "\n" not in str(caught.value)


def test_report_without_registers_is_refused():
    with pytest.raises(CompileError, match="no registers and spills of add"):
        read_report("nothing of use", "add")
    log = """ptxas info    : Compiling entry function 'add' for 'sm_90a'
ptxas info    : Function properties for helper
    64 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Function properties for add
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 24 registers, used 1 barriers"""
    used = read_report(log, "add")
    assert (used.arch, used.registers, used.stack_bytes, used.spill_bytes) == ("sm_90a", 24, 64, 12)


def test_the_key_covers_every_field():
    source = cuda_kernels.add()
    changes = {
        "name": "other",
        "template": "other",
        "text": "other",
        "arguments": (("x_ptr", "*bf16"),),
        "constants": {"BLOCK": 512},
        "aligned": (),
        "num_warps": 8,
        "num_stages": 2,
        "pdl": True,
        "cooperative": True,
        "registers": 64,
    }
    assert set(changes) == {field.name for field in dataclasses.fields(source)}
    keys = {dataclasses.replace(source, **{name: value}).key() for name, value in changes.items()}
    assert len(keys | {source.key()}) == len(changes) + 1


def test_text_is_imported_once_and_read_back(empty_cache):
    text = "VALUE = 41 + 1\n"
    module = import_text(text)
    assert module.VALUE == 42 and module is import_text(text)
    assert module.__file__ is not None and Path(module.__file__).read_text() == text


def test_a_template_that_does_not_exist_is_named():
    with pytest.raises(CompileError, match=r"cuda_nothing\.py\.j2"):
        render("cuda_nothing.py.j2")


@pytest.mark.parametrize("name", target_names())
def test_targets_hold_all_that_plans_use(name):
    data = load_target(name)
    keys = json.loads(json.dumps(list(data.target.ceilings)))
    needed = {"read_bytes_per_s", "bfloat16_flops", "float32_flops", "launch_seconds"}
    assert needed | {"weights_load_bytes_per_s", "int8_flops"} <= set(keys)
    assert all(c.value > 0 and c.source for c in data.target.ceilings.values())
    assert (data.cuda.sm if data.cuda else None) == TARGETS.get(name)
    if data.cuda:
        assert data.target.isa == f"sm_{data.cuda.sm}" and data.target.memory_bytes > 4e10
