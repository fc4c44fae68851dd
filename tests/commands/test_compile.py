"""`sitsc compile`: what it makes and prints, and every kind of model that it refuses."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sitsc.cli import main
from sitsc.models.random_checkpoint import write_random
from tests.commands.command_line import call, spawn
from tests.frontend.checkpoint_files import real_gguf


def test_json_of_a_second_compile(
    tiny_checkpoint: Path, tiny_artifact: Path, tmp_path: Path, capfd
):
    """The same model again comes from the cache, byte for byte the same."""
    out = tmp_path / "again"
    made = json.loads(call(capfd, "compile", tiny_checkpoint, "-o", out, "--json").out)
    manifest = json.loads((tiny_artifact / "manifest.json").read_text())
    assert made["cached"] and made["seconds"] < 20 and made["packed"]
    assert made["plan"] == manifest["plan"] and made["runs"] == manifest["runs"]
    assert made["artifact"] == str(out) and made["target"] == "cpu"
    assert made["weights_bytes"] == (out / "weights.bin").stat().st_size
    assert {"value", "unit", "error"} == set(made["predictions"]["tpot_decode_1"])
    assert json.loads((out / "manifest.json").read_text()) == manifest
    assert [p.name for p in tmp_path.iterdir()] == ["again"]


def test_the_summary_and_the_default_place(
    tiny_checkpoint: Path, tiny_artifact: Path, tmp_path: Path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    result = call(capfd, "compile", tiny_checkpoint)
    assert (result.code, result.err) == (0, "")
    plan = json.loads((tiny_artifact / "manifest.json").read_text())["plan"]
    for part in ("model-cpu.sitsc", plan, "KV pool", "arena", "predicted"):
        assert part in result.out
    assert call(capfd, "verify", "model-cpu.sitsc").code == 0
    call(capfd, "compile", tiny_checkpoint).refused(2, "model-cpu.sitsc exists", "another -o")


@pytest.fixture(scope="module")
def unpacked(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model` and its artifact `out`, compiled once with every rare option."""
    folder = tmp_path_factory.mktemp("unpacked")
    model = Path(shutil.copytree(tiny_checkpoint, folder / "model"))
    set_config(model, secret_scaling=2.0)
    options = ["--no-pack", "--check", "--allow-unknown-key", "secret_scaling"]
    places = ["-o", str(folder / "out"), "--dump", str(folder / "graphs")]
    assert main(["compile", str(model), *places, *options]) == 0
    return folder


def test_weights_may_stay_outside(unpacked: Path, tiny_artifact: Path, tmp_path: Path):
    """With `--no-pack` they are read from the checkpoint; the answers are the same."""
    assert not (unpacked / "out" / "weights.bin").exists()
    inside = spawn("run", tiny_artifact, "hello", "--max-tokens", 8)
    assert spawn("run", unpacked / "out", "hello", "--max-tokens", 8) == inside
    moved = Path(shutil.copytree(unpacked / "model", tmp_path / "moved"))
    weights = ("--weights", moved)
    assert spawn("run", unpacked / "out", "hello", "--max-tokens", 8, *weights) == inside
    (moved / "model.safetensors").unlink()
    call_again = spawn("run", unpacked / "out", "hello", *weights)
    call_again.refused(2, "lacks model.safetensors")


def test_dump_writes_the_graph_of_every_pass(unpacked: Path):
    texts = sorted(path.name for path in (unpacked / "graphs").iterdir())
    assert texts[0] == "00_trace.txt" and len(texts) > 10
    assert "paged_attention" in (unpacked / "graphs" / texts[-1]).read_text()


def test_dumps_that_cannot_be_written(tiny_checkpoint: Path, tmp_path: Path, capfd):
    """A folder that cannot be made, one that is a file, and a text whose name is taken."""
    (tmp_path / "file").write_text("")
    (tmp_path / "taken" / "00_trace.txt").mkdir(parents=True)
    for place in (Path("/proc/nope"), tmp_path / "file", tmp_path / "taken"):
        result = call(capfd, "compile", tiny_checkpoint, "-o", tmp_path / "out", "--dump", place)
        result.refused(2, f"cannot write {place}", "another folder for --dump")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "taken"]


def test_only_the_allowed_key_is_ignored(model: Path, tmp_path: Path, capfd):
    set_config(model, secret_scaling=2.0, other_secret=1)
    allowed = ("--allow-unknown-key", "secret_scaling")
    call(capfd, "compile", model, "-o", tmp_path / "out", *allowed).refused(2, "other_secret")


@pytest.mark.parametrize(
    ("option", "value", "part"),
    [
        ("--target", "h900", "one of: "),
        ("--target", "h200", "compute in bfloat16"),
        ("--dtype", "int3", "one of auto"),
        ("--weights", "int1", "one of none, int8"),
        ("--kv-dtype", "fp7", "one of auto"),
        ("--max-context", "-1", "outside 0.."),
        ("--max-context", "600", "beyond the model's 512"),
        ("--max-batch", "0", "outside 1..1024"),
        ("--max-batch", "2000", "outside 1..1024"),
        ("--prefill-chunk-tokens", "1", "outside 16.."),
        ("--kv-tokens", "-5", "outside 0.."),
        ("--kv-tokens", "100", "cannot hold one sequence"),
    ],
)
def test_nonsense_options(
    tiny_checkpoint: Path, tmp_path: Path, option: str, value: str, part: str, capfd
):
    out = tmp_path / "out"
    result = call(capfd, "compile", tiny_checkpoint, "-o", out, option, value)
    result.refused(2, part, " — ")
    assert list(tmp_path.iterdir()) == []


def test_a_preset_is_no_path(tmp_path: Path, capfd):
    call(capfd, "compile", "llama3-8b").refused(2, "sitsc models random llama3-8b")
    golden = ("--golden", tmp_path / "llama3-8b.h200.toml")
    call(capfd, "compile", "llama3-8b", *golden).refused(2, "is a preset, not a model folder")
    call(capfd, "compile", tmp_path / "nothing").refused(2, "no such model")


@pytest.fixture
def model(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the small model, to be spoilt."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "model"))


def set_config(model: Path, **values: object) -> None:
    config = json.loads((model / "config.json").read_text()) | values
    (model / "config.json").write_text(json.dumps(config))


def shard(model: Path) -> None:
    """Split the weights into shards with an index."""
    config = json.loads((model / "config.json").read_text())
    write_random(config, model, dtype="float32", shard_bytes=100_000)
    (model / "model.safetensors").unlink()


def absent_shard(model: Path) -> None:
    shard(model)
    next(model.glob("model-00002-*.safetensors")).unlink()


def truncated_shard(model: Path) -> None:
    shard(model)
    path = next(model.glob("model-00002-*.safetensors"))
    path.write_bytes(path.read_bytes()[:-100])


def truncated_file(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def no_json(model: Path) -> None:
    (model / "config.json").write_text("{")


SPOILT: dict[str, tuple[Callable[[Path], None], str]] = {
    "index names an absent file": (absent_shard, "which is not there"),
    "truncated shard": (truncated_shard, "model-00002"),
    "truncated file": (truncated_file, "model.safetensors"),
    "config is no JSON": (no_json, "config.json"),
    "no config": (lambda model: (model / "config.json").unlink(), "no config.json"),
    "unknown architecture": (
        lambda model: set_config(model, model_type="mamba9", architectures=["Mamba9ForCausalLM"]),
        "mamba9",
    ),
    "unknown key": (lambda model: set_config(model, secret_scaling=2.0), "secret_scaling"),
    "dimensions do not fit": (lambda model: set_config(model, hidden_size=72), "64"),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_bad_checkpoints(model: Path, tmp_path: Path, kind: str, capfd):
    spoil, part = SPOILT[kind]
    spoil(model)
    call(capfd, "compile", model, "-o", tmp_path / "out").refused(2, part)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("size", [0, 3, 100, 5000])
def test_a_damaged_gguf(tmp_path: Path, size: int, capfd):
    path = tmp_path / "model.gguf"
    real = real_gguf()
    start = real.open("rb").read(5000) if real else b"GGUF" + bytes([3, 0, 0, 0]) + b"\xff" * 4992
    path.write_bytes(start[:size])
    call(capfd, "compile", path, "-o", tmp_path / "out").refused(2, "model.gguf")
    assert [item.name for item in tmp_path.iterdir()] == ["model.gguf"]


def test_packing_what_cannot_be_packed(model: Path, tmp_path: Path, capfd):
    out = tmp_path / "out"
    if (real := real_gguf()) is not None:
        call(capfd, "compile", real, "-o", out, "--no-pack").refused(2, "GGUF")


@pytest.mark.parametrize("how", [(), ("--pack",), ("--weights", "int8"), ("--target", "h200")])
def test_a_folder_without_weights(model: Path, tmp_path: Path, how: tuple[str, ...], capfd):
    (model / "model.safetensors").unlink()
    result = call(capfd, "compile", model, "-o", tmp_path / "out", *how)
    result.refused(2, "holds no weights [model]", "--no-pack plans from config.json alone")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_config_alone_is_compiled_on_demand(model: Path, tmp_path: Path, capfd):
    (model / "model.safetensors").unlink()
    made = call(capfd, "compile", model, "-o", tmp_path / "out", "--no-pack", "--json")
    assert made.code == 0 and not json.loads(made.out)["packed"]
    call(capfd, "run", tmp_path / "out", "hello").refused(2, "lacks model.safetensors")


def test_a_model_without_a_tokenizer(model: Path, tmp_path: Path, capfd):
    """The summary says it; with a tokenizer it says nothing of it."""
    whole = call(capfd, "compile", model, "-o", tmp_path / "whole")
    assert whole.code == 0 and "tokenizer" not in whole.out
    (model / "tokenizer.json").unlink()
    bare = call(capfd, "compile", model, "-o", tmp_path / "bare")
    assert (bare.code, bare.err) == (0, "")
    assert len(bare.out.splitlines()) == len(whole.out.splitlines()) + 1
    assert "tokenizer  none in the model folder" in bare.out
    spawn("run", tmp_path / "bare", "hello").refused(2, "no tokenizer")


@pytest.mark.parametrize("index", ["{", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 5}}'])
def test_outside_weights_with_a_damaged_index(unpacked: Path, tmp_path: Path, index: str, capfd):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    result = call(capfd, "run", unpacked / "out", "hello", "--weights", tmp_path)
    result.refused(2, "index.json is damaged")
