"""Packages: a tiny model compiled once, run through kernels and shims, against plain torch.

The model is Qwen3 with a tied table: all kernels take part, the norms of q and k over rows that no
single stride covers, and rotary frequencies of eight values, which Inductor writes into the code.
"""

import ctypes
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from packages import PAGE_TOKENS, Package, Part, load_libraries, pools, step
from torch import Tensor, fx

from sitsc.codegen import cpu, cpu_package, cpu_shims
from sitsc.core.errors import CompileError
from sitsc.core.interpret import (
    RandomTensors,
    relative_error,
    run_graph,
    step_inputs,
    tensor_shapes,
)
from sitsc.core.weights import TensorSlice, WeightSpec, materialise
from sitsc.models.presets import preset
from sitsc.passes import CPU, FUSED
from sitsc.passes.base import PassContext
from sitsc.passes.runner import run_passes
from sitsc.runtime.package import load_package

CONFIG = {
    key: value
    for key, value in preset("tiny-llama-tied").items()
    if key not in ("architectures", "attention_bias", "mlp_bias", "torch_dtype")
} | {"model_type": "qwen3"}
LENGTHS = (1, 5, 16, 17, 33)
PAGES = ([3], [0], [9], [6, 10], [8, 2, 12])
IDS = [[(7 * i * i + 3 * i + k) % 250 for i in range(n)] for k, n in enumerate(LENGTHS)]
TOLERANCE = 1e-5
CONTEXT = PassContext("float32", "none", "float32", PAGE_TOKENS, "cpu")


@dataclass(frozen=True)
class Compiled:
    package: Package
    graph: fx.Graph
    weights: RandomTensors
    libraries: list[ctypes.CDLL]
    path: Path
    wanted: list[Tensor]

    def run(self, parts: list[Part], kv: dict[str, Tensor]) -> list[Tensor]:
        """Logits of each part of one step."""
        out = self.package.run(step(parts) | kv)
        return list(out.split([len(part.ids) for part in parts]))


@pytest.fixture(scope="module")
def compiled(traced: Any, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """The package, and what the traced graph gives for each sequence alone."""
    folder = tmp_path_factory.mktemp("package")
    module = traced(CONFIG, "float32")
    weights = RandomTensors(tensor_shapes(module.graph))
    wanted = [
        run_graph(module.graph, weights, step_inputs(module.graph, ids, PAGE_TOKENS)) for ids in IDS
    ]
    run_passes(module, CPU, CONTEXT)
    libraries = load_libraries()
    path = folder / "step.pt2"
    package = Package(module.graph, weights, path)
    return Compiled(package, module.graph, weights, libraries, path, wanted)


def _all_equal(got: list[Tensor], wanted: list[Tensor]) -> None:
    for one, other in zip(got, wanted, strict=True):
        assert relative_error(one, other) < TOLERANCE


def test_each_sequence_alone(compiled: Compiled):
    for ids, pages, wanted in zip(IDS, PAGES, compiled.wanted, strict=True):
        _all_equal(compiled.run([Part(ids, 0, pages)], pools(compiled.graph, 13)), [wanted])


def test_ragged_sequences_in_one_step(compiled: Compiled):
    parts = [Part(ids, 0, pages) for ids, pages in zip(IDS, PAGES, strict=True)]
    _all_equal(compiled.run(parts, pools(compiled.graph, 13)), compiled.wanted)
    _all_equal(compiled.run(parts[::-1], pools(compiled.graph, 13)), compiled.wanted[::-1])


def test_decoding_after_a_prefill_is_one_longer_prefill(compiled: Compiled):
    """All sequences token by token in one batch, the longer ones going on alone."""
    kv, got = pools(compiled.graph, 13), [[] for _ in IDS]
    cut = [max(1, n - 4) for n in LENGTHS]
    parts = [Part(ids[:c], 0, pages) for ids, c, pages in zip(IDS, cut, PAGES, strict=True)]
    for place, part in enumerate(compiled.run(parts, kv)):
        got[place].append(part)
    for turn in range(4):
        live = [i for i, c in enumerate(cut) if c + turn < LENGTHS[i]]
        parts = [Part([IDS[i][cut[i] + turn]], cut[i] + turn, PAGES[i]) for i in live]
        for i, part in zip(live, compiled.run(parts, kv), strict=True):
            got[i].append(part)
    _all_equal([torch.cat(parts) for parts in got], compiled.wanted)


def test_a_prefill_in_chunks_beside_a_decode(compiled: Compiled):
    kv, ids, pages = pools(compiled.graph, 13), IDS[4], PAGES[4]
    other = IDS[3]
    first = compiled.run([Part(other[:16], 0, PAGES[3]), Part(ids[:7], 0, pages)], kv)
    second = compiled.run([Part(other[16:], 16, PAGES[3]), Part(ids[7:26], 7, pages)], kv)
    third = compiled.run([Part(ids[26:], 26, pages)], kv)
    _all_equal([torch.cat((first[0], second[0]))], [compiled.wanted[3]])
    _all_equal([torch.cat((first[1], second[1], third[0]))], [compiled.wanted[4]])


def test_only_the_rows_asked_for_come_out(compiled: Compiled):
    parts = [Part(ids, 0, pages) for ids, pages in zip(IDS, PAGES, strict=True)]
    values = step(parts) | pools(compiled.graph, 13)
    values["logit_rows"] = torch.tensor([71, 0, 5])
    out = compiled.package.run(values)
    wanted = torch.cat(compiled.wanted)[[71, 0, 5]]
    assert relative_error(out, wanted) < TOLERANCE


def test_pages_of_others_stay_as_they_are(compiled: Compiled):
    kv = pools(compiled.graph, 13)
    compiled.run([Part(IDS[1], 0, PAGES[1])], kv)
    (name,) = kv
    written = ~kv[name].isnan().flatten(1).all(1)
    assert written.nonzero().flatten().tolist() == PAGES[1]


def test_the_package_holds_no_weights(compiled: Compiled):
    with zipfile.ZipFile(compiled.path) as package:
        data = {name: package.read(name) for name in package.namelist()}
    for tensor in compiled.package.weights.values():
        start = tensor.flatten()[:16].numpy().tobytes()
        assert not [name for name, text in data.items() if start in text]


def test_the_package_holds_no_source_and_no_time(compiled: Compiled):
    """Only the library and metadata, without a path of the machine that built it."""
    with zipfile.ZipFile(compiled.path) as package:
        items = package.infolist()
        texts = {i.filename: package.read(i) for i in items if not i.filename.endswith(".so")}
    assert {i.date_time for i in items} == {(1980, 1, 1, 0, 0, 0)}
    assert {i.compress_type for i in items} == {zipfile.ZIP_STORED}
    assert len(items) == len(texts) + 1
    assert not [name for name in texts if name.endswith((".cpp", ".h", ".o"))]
    places = (b"torchinductor", str(Path(torch.__file__).parent).encode())
    assert not [name for name, text in texts.items() if any(place in text for place in places)]


def test_the_runtime_loads_the_package(compiled: Compiled):
    runner = load_package(compiled.path)
    names = set(runner.get_constant_names_to_original_fqns().values())
    assert set(compiled.package.weights) <= names


def test_weights_can_be_replaced_where_they_lie(compiled: Compiled):
    """The package reads the memory it was given, and keeps no copy."""
    (key,) = [
        key
        for key in compiled.package.weights
        if key.endswith("_norm_weight") and "layers" not in key
    ]
    weight = compiled.package.weights[key]
    kept, part = weight.clone(), [Part(IDS[1], 0, PAGES[1])]
    weight.mul_(2)
    try:
        doubled = compiled.run(part, pools(compiled.graph, 13))[0]
    finally:
        weight.copy_(kept)
    assert relative_error(doubled, 2 * compiled.wanted[1]) < TOLERANCE


def test_short_constants_are_in_the_code(compiled: Compiled):
    specs = [n.meta["weight"] for n in compiled.graph.nodes if "weight" in n.meta]
    short = [spec for spec in specs if spec.role == "constant"]
    assert [spec.shape for spec in short] == [(8,)]
    assert cpu_package.weight_key(short[0].name) not in compiled.package.loader.get_constant_fqns()


def test_a_bad_token_is_an_error_that_the_shim_explains(compiled: Compiled):
    told = ctypes.CDLL(
        None
    ).sitsc_shim_error  # of the shims that were loaded first, as for packages
    told.restype = ctypes.c_char_p
    with pytest.raises(RuntimeError):
        compiled.run([Part([10**6], 0, [0])], pools(compiled.graph, 13))
    assert b"packed_embedding: " in told()
    assert told() == b""


# --- without compiling a package ----------------------------------------------------------------


def _weight(graph: fx.Graph, name: str, *shape: int) -> fx.Node:
    node = graph.placeholder(name)
    source = (TensorSlice(name, 0, shape[0]),)
    node.meta["weight"] = WeightSpec(name, "weight", source, shape, "float32", "plain", "")
    return node


def test_a_short_weight_is_refused():
    graph = fx.Graph()
    graph.output(_weight(graph, "layers.0.bias", 8))
    with pytest.raises(CompileError, match=r"weight layers\.0\.bias has only 8 values"):
        cpu_package.cpu_module(graph)


def test_two_weights_of_one_key_are_refused():
    graph = fx.Graph()
    first, second = _weight(graph, "a.b", 9, 9), _weight(graph, "a_b", 9, 9)
    graph.output(graph.call_function(torch.add, (first, second)))
    with pytest.raises(CompileError, match="a_b"):
        cpu_package.cpu_module(graph)


def test_a_failing_compiler_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta |= {"input": "x", "dims": ("tokens",), "val": torch.zeros(4)}
    graph.output(graph.call_function(torch.add, (node, "text")))
    with pytest.raises(CompileError, match="AOTInductor failed: "):
        cpu_package.compile_package(graph, tmp_path / "step.pt2")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CompileError, match="no-such-compiler") as error:
        cpu_shims.compile_shims(tmp_path / "shims.so")
    assert "install g++" in str(error.value)
    monkeypatch.setenv("CXX", "g++ -fno-such-flag")
    with pytest.raises(CompileError, match="error"):
        cpu_shims.compile_shims(tmp_path / "shims.so")
    assert list(tmp_path.iterdir()) == []


def test_declarations_follow_the_schemas():
    text = cpu_shims.declaration("rms_norm")
    assert text == (
        "AOTITorchError aoti_torch_cpu_rms_norm(AtenTensorHandle x, AtenTensorHandle* weight, "
        "double eps, double offset, AtenTensorHandle* ret0)"
    )
    rendered = cpu_shims.render()["cpu_shims.cpp"]
    assert all(cpu_shims.declaration(name) in rendered for name in cpu_shims.SHIMMED)
    assert cpu_shims.render() == cpu_shims.render()


def test_shims_are_the_same_bytes_every_time(tmp_path: Path):
    cpu_shims.compile_shims(tmp_path / "again.so")
    assert (tmp_path / "again.so").read_bytes() == (cpu.libraries() / "shims.so").read_bytes()


def test_operators_without_a_kernel_are_their_references(traced: Any):
    """Before packing only norms and attention have kernels; the module computes the same."""
    module = traced(CONFIG | {"intermediate_size": 50}, "float32")
    weights = RandomTensors(tensor_shapes(module.graph))
    run_passes(module, FUSED, CONTEXT)
    plain = cpu_package.cpu_module(module.graph)
    called = {str(n.target) for n in plain.graph.nodes if n.op == "call_function"}
    ours = {name for name in called if name.startswith("sitsc")}
    assert ours == {"sitsc.rms_norm.default", "sitsc.paged_attention.default", "sitsc.keep.default"}
    for node in module.graph.find_nodes(op="placeholder"):
        if (spec := node.meta.get("weight")) is not None:
            plain.get_buffer(cpu_package.weight_key(spec.name)).copy_(
                materialise(spec, weights.read)
            )
    values = step_inputs(module.graph, IDS[3], PAGE_TOKENS)
    wanted = run_graph(module.graph, weights, {k: v.clone() for k, v in values.items()})
    nodes = module.graph.find_nodes(op="placeholder")
    out = plain(*[values[node.meta["input"]] for node in nodes if "input" in node.meta])
    assert relative_error(out, wanted) < TOLERANCE


def test_an_operator_that_nothing_can_run_is_refused(traced: Any):
    with pytest.raises(CompileError, match=r"sitsc\.attention\.default has no CPU kernel"):
        cpu_package.cpu_module(traced(CONFIG, "float32").graph)
