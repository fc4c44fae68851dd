"""Modules as plain functions: equal to eager execution, checked inputs, plan, run and verify."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sitsc
from sitsc.cli import main
from sitsc.core.errors import ArtifactError, OptionError, RequestError, UnsupportedModelError
from sitsc.core.plan import read_plan
from tests.api_modules import Encoder, Pair

SIZES = [(1, 1), (1, 17), (3, 5), (7, 40), (2, 2)]


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    torch.manual_seed(0)
    return Encoder().eval()


@pytest.fixture(scope="module")
def compiled(encoder: Encoder, tmp_path_factory: pytest.TempPathFactory) -> Any:
    batch = torch.export.Dim("batch")
    words = torch.export.Dim("words", max=40)
    sizes = {"ids": {0: batch, 1: words}, "mask": {0: batch, 1: words}}
    return sitsc.compile(
        encoder,
        example_inputs=_inputs(2, 9),
        dynamic_shapes=sizes,
        out=tmp_path_factory.mktemp("plain") / "encoder.sitsc",
    )


def _inputs(batch: int, words: int) -> tuple[Tensor, Tensor]:
    mask = torch.ones(batch, words, dtype=torch.bool)
    mask[-1, words // 2 + 1 :] = False
    return torch.randint(0, 60, (batch, words)), mask


@pytest.mark.parametrize("size", SIZES)
def test_outputs_equal_eager(size: tuple[int, int], encoder: Encoder, compiled: Any):
    ids, mask = _inputs(*size)
    with torch.no_grad():
        wanted = encoder(ids, mask)
    found = compiled.load()(ids, mask=mask)
    assert list(found) == ["hidden", "scores"]
    for name, value in found.items():
        assert (value - wanted[name]).abs().max() <= 1e-5


def test_it_is_exported_as_onnx(encoder: Encoder, compiled: Any, tmp_path: Path):
    import onnxruntime  # noqa: PLC0415

    compiled.export_onnx(tmp_path / "encoder.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "encoder.onnx"))
    assert [item.shape for item in session.get_inputs()] == [["batch", "words"]] * 2
    for size in SIZES:
        ids, mask = _inputs(*size)
        with torch.no_grad():
            wanted = encoder(ids, mask)
        feed = {"ids": ids.numpy(), "mask": mask.numpy()}
        for name, value in zip(("hidden", "scores"), session.run(None, feed), strict=True):
            assert (torch.from_numpy(value) - wanted[name]).abs().max() <= 1e-5


def test_the_plan_names_inputs_and_outputs(compiled: Any):
    plan = read_plan(compiled.text("plan.json"))
    launch = plan.regimes[0].groups[0].launches[0]
    assert plan.kind == "plain"
    assert [(a.name, a.dtype, a.shape) for a in launch.arguments] == [
        ("ids", "int64", ("batch", "words")),
        ("mask", "bool", ("batch", "words")),
    ]
    assert [(a.name, a.shape) for a in launch.outputs] == [
        ("hidden", ("batch", "words", 32)),
        ("scores", ("batch", 3)),
    ]
    assert plan.model.dimensions == {"batch_min": 1, "words_min": 1, "words_max": 40}
    ops = {row.op for row in plan.regimes[0].kernels}
    assert {"sitsc.fused_linear", "sitsc.packed_embedding"} <= ops


REFUSED = {
    "missing": (lambda f: f(_inputs(1, 3)[0]), "input mask is missing"),
    "unknown": (lambda f: f(*_inputs(1, 3), other=1), "input other is unknown"),
    "twice": (lambda f: f(*_inputs(1, 3), mask=1), "input mask is given twice"),
    "many": (lambda f: f(*_inputs(1, 3), 1), "3 inputs given"),
    "dtype": (lambda f: f(_inputs(1, 3)[0].int(), _inputs(1, 3)[1]), "torch.int32"),
    "rank": (lambda f: f(_inputs(1, 3)[0][0], _inputs(1, 3)[1]), r"compiled for \[batch, words\]"),
    "sizes": (lambda f: f(_inputs(2, 3)[0], _inputs(1, 3)[1]), "with batch = 2, words = 3"),
    "bound": (lambda f: f(*_inputs(1, 41)), "size words is 41, compiled for 1 to 40"),
    "kind": (lambda f: f([1, 2], _inputs(1, 3)[1]), "input ids is no tensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_inputs_are_refused(name: str, compiled: Any):
    call, message = REFUSED[name]
    with pytest.raises(RequestError, match=message):
        call(compiled.load())


def test_commands_know_a_plain_artifact(compiled: Any, capfd: pytest.CaptureFixture[str]):
    assert main(["plan", "show", str(compiled.root)]) == 0
    shown = capfd.readouterr().out
    assert "output    scores: float32 [batch, 3]" in shown
    assert "KV group" not in shown
    assert main(["verify", str(compiled.root)]) == 0
    capfd.readouterr()
    assert main(["run", str(compiled.root), "hello"]) == 2
    assert "plain function of (ids, mask)" in capfd.readouterr().err


def test_an_altered_weight_is_found(compiled: Any, tmp_path: Path):
    import shutil  # noqa: PLC0415

    copy = shutil.copytree(compiled.root, tmp_path / "copy")
    data = bytearray((copy / "weights.bin").read_bytes())
    data[100] ^= 1
    (copy / "weights.bin").write_bytes(data)
    with pytest.raises(ArtifactError, match=r"weights\.bin"):
        sitsc.load(copy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transposed_rows_ties_and_tuples(dtype: torch.dtype, tmp_path: Path):
    torch.manual_seed(1)
    model = Pair().to(dtype)
    x, ids = torch.randn(2, 12, 6).to(dtype), torch.randint(0, 20, (5,))
    made = sitsc.compile(model, example_inputs={"x": x, "ids": ids}, out=tmp_path / "pair")
    assert model.training
    names = [spec.name for spec in made.plan.model.parameters]
    assert sorted(names) == ["mix.bias", "mix.weight", "table.weight"]
    function: Any = sitsc.load(made.root)
    mixed, back, nothing = function(x, ids)
    assert nothing is None
    with torch.no_grad():
        for found, wanted in zip((mixed, back), model(x, ids), strict=False):
            allowed = 1e-5 if dtype == torch.float32 else 0.05
            assert (found.float() - wanted.float()).abs().max() <= allowed


class _Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x - 1


class _Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x + self.calls


class _Writes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2) + 1


class _Nested(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return {"a": (x, x + 1)}


class _Number(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x + 1, 3


ONE = torch.ones(2, 3)
UNSUPPORTED = {
    "branches": (_Branches(), (ONE,), "depends on the values of a tensor.*test_plain.py:"),
    "buffer": (_Counts(), (ONE,), "changes buffer calls"),
    "input": (_Writes(), (ONE,), "changes input x"),
    "nested": (_Nested(), (ONE,), "returns nested values"),
    "number": (_Number(), (ONE,), "returns 3 beside tensors"),
    "none given": (_Nested(), None, "no example inputs"),
    "list given": (_Nested(), ([ONE],), "input 0 is a list"),
    "meta": (nn.Linear(3, 3, device="meta"), (ONE,), "weight is on the meta device"),
    "complex": (nn.Linear(3, 3, dtype=torch.complex64), (ONE,), "complex64"),
    "fails": (nn.Linear(4, 3), (ONE,), "cannot be traced"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_cannot_be_compiled_is_told_in_one_line(name: str, tmp_path: Path):
    module, inputs, message = UNSUPPORTED[name]
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        sitsc.compile(module, example_inputs=inputs, out=tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_fixed_size_that_was_declared_free(tmp_path: Path):
    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.ones(4)

    with pytest.raises(UnsupportedModelError, match="declared free is not") as caught:
        sitsc.compile(
            Fixed(),
            example_inputs=torch.ones(2, 4),
            dynamic_shapes=({1: torch.export.Dim("width")},),
            out=tmp_path / "out",
        )
    assert "\n" not in str(caught.value)


OPTIONS = {
    "unknown": ({"colour": 1}, "no option 'colour'"),
    "target": ({"target": "h200"}, "do not compile for h200"),
    "int8": ({"weights": "int8"}, "is for checkpoints"),
    "unpacked": ({"pack": False}, "must be packed"),
    "tokenizer": ({"tokenizer": "x.json"}, "tokenizer does not fit"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_do_not_fit(name: str, tmp_path: Path):
    options, message = OPTIONS[name]
    with pytest.raises(OptionError, match=message):
        sitsc.compile(nn.Linear(3, 3), example_inputs=(ONE,), out=tmp_path / "out", **options)
