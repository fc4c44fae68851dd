"""Records of models in the cache: one for each model and its options, whole, and quick to read."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sitsc import record_cache
from sitsc.core.options import CompileOptions
from sitsc.passes.model_record import ModelRecord, Op
from sitsc.record_cache import FOLDER, recorded
from tests.commands.command_line import call

QUERY = ("partition", "tiny-llama", "--max-context", 512, "--prompt", 96, "--output", 16)
MOST_SECONDS = 0.75  # of processor time beyond a start that prints the version
GPU = CompileOptions(target="h200")
# Runs a command line, then says which of the heavy packages it has imported.
SCRIPT = """
import sys
from sitsc.cli import main
assert main(sys.argv[1:]) == 0
print([name for name in ("torch", "transformers", "numpy") if name in sys.modules])
"""


def made(name: str = "one") -> ModelRecord:
    """A record with a number that six digits do not hold."""
    op = Op(name, "linear", "column", "tokens", "", 10, 10, 1 / 3, 2.0, 1e18 + 1, "bfloat16")
    return ModelRecord(name, (op,), ((op, op),), (0, 0, 0), (), 64, 256, 512)


class Maker:
    """Makes records and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> ModelRecord:
        self.count += 1
        return made(f"number {self.count}")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache: the folder of its records."""
    monkeypatch.setenv("SITSC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / FOLDER


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """What looks like the folder of a model."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"hidden_size": 64}))
    header = b'{"a": 1}'
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"1234")
    return folder


def test_a_record_is_made_once(cache: Path, model: Path):
    maker = Maker()
    first = recorded(model, GPU, maker)
    assert recorded(model, GPU, maker) == first == made("number 1")
    assert recorded(model, replace(GPU, target="h100"), maker) == first  # GPUs have one graph
    assert maker.count == 1 and len(list(cache.iterdir())) == 1


def edit(folder: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    path = folder / name
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("config.json", lambda raw: raw.replace(b"64", b"65")),
        ("model.safetensors", lambda raw: raw.replace(b"a", b"b")),
        ("model.safetensors", lambda raw: raw + b"5"),
    ],
)
def test_another_model_has_another_record(cache: Path, model: Path, name: str, change: Any):
    maker = Maker()
    recorded(model, GPU, maker)
    edit(model, name, change)
    assert recorded(model, GPU, maker).architecture == "number 2"
    (model / "tokenizer.json").write_text("{}")
    assert recorded(model, GPU, maker).architecture == "number 3"


def test_values_of_weights_do_not_count(cache: Path, model: Path):
    maker = Maker()
    recorded(model, GPU, maker)
    edit(model, "model.safetensors", lambda raw: raw[:-1] + b"5")
    assert recorded(model, GPU, maker).architecture == "number 1"


@pytest.mark.parametrize(
    "change",
    [{"max_context": 256}, {"target": "cpu"}, {"residual": "bfloat16"}, {"kv_dtype": "float32"}],
)
def test_other_options_have_another_record(cache: Path, model: Path, change: dict[str, Any]):
    maker = Maker()
    recorded(model, GPU, maker)
    recorded(model, replace(GPU, **change), maker)
    assert maker.count == 2


def test_other_source_makes_another_record(cache: Path, model: Path, monkeypatch: Any):
    maker = Maker()
    recorded(model, GPU, maker)
    monkeypatch.setattr("sitsc.build_info.source_digest", lambda: "another")
    recorded(model, GPU, maker)
    monkeypatch.setattr("sitsc.build_info.tools", lambda: {"torch": "another"})
    recorded(model, GPU, maker)
    assert maker.count == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw[: len(raw) // 2],
        lambda raw: raw.replace(b"bfloat16", b"bfloat17", 1),
        lambda raw: b"",
        lambda raw: b"[1]",
        lambda raw: b"\xff\xfe",
        lambda raw: b'{"sha256": 1, "record": 2}',
    ],
)
def test_a_damaged_record_is_made_anew(cache: Path, model: Path, change: Any):
    maker = Maker()
    recorded(model, GPU, maker)
    (entry,) = cache.iterdir()
    edit(cache, entry.name, change)
    assert recorded(model, GPU, maker).architecture == "number 2"
    assert recorded(model, GPU, maker).architecture == "number 2" and maker.count == 2


def test_a_record_of_another_form_is_made_anew(cache: Path, model: Path):
    """One whose digest is right, but which has a field that no record has."""
    maker = Maker()
    recorded(model, GPU, maker)
    (entry,) = cache.iterdir()
    text = json.dumps({"colour": "red"})
    whole = {"sha256": record_cache.sha256_hex(text.encode()), "record": text}
    entry.write_text(json.dumps(whole))
    assert recorded(model, GPU, maker).architecture == "number 2"


def test_a_cache_that_cannot_be_written_is_no_reason_to_refuse(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("SITSC_CACHE", str(tmp_path / "file"))
    maker = Maker()
    assert [recorded(model, GPU, maker).architecture for _ in range(2)] == ["number 1", "number 2"]


def test_what_is_no_model_is_not_kept(cache: Path, tmp_path: Path):
    maker = Maker()
    assert recorded(tmp_path / "nothing", GPU, maker).architecture == "number 1"
    assert not cache.exists()


def test_the_oldest_go(cache: Path, model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(record_cache, "_MOST_ENTRIES", 2)
    maker = Maker()
    for context in (0, 16, 32):
        recorded(model, replace(GPU, max_context=context), maker)
        for path in cache.iterdir():  # a second older each time
            os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 1))
    recorded(model, GPU, maker)
    assert maker.count == 4 and len(list(cache.iterdir())) == 2


def seconds(*arguments: object) -> tuple[float, str]:
    """Processor seconds of a fresh process, and what it printed last."""

    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = used()
    command = [sys.executable, "-c", SCRIPT, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return used() - before, done.stdout.splitlines()[-1]


def test_a_second_query_is_answered_at_once(cache: Path, capfd: pytest.CaptureFixture[str]):
    """By `partition`, and by `simulate` from the same record: no torch, no half a minute."""
    first = call(capfd, *QUERY, "--json")
    assert first.code == 0, first.err
    assert len(list(cache.iterdir())) == 1
    again = call(capfd, *QUERY, "--json")
    assert json.loads(again.out) == json.loads(first.out)
    bare = min(seconds("--version")[0] for _ in range(3))
    runs = [seconds(*QUERY) for _ in range(3)]
    assert {imported for _, imported in runs} == {"[]"}
    assert min(spent for spent, _ in runs) - bare <= MOST_SECONDS
    one = ("simulate", "tiny-llama", "--max-context", 512, "--workload")
    load = cache.parent / "load.json"
    load.write_text(json.dumps({"prompt_tokens": 96, "output_tokens": 16}))
    assert "torch" not in seconds(*one, load)[1]
    assert len(list(cache.iterdir())) == 1
