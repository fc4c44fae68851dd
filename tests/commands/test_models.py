"""`sitsc models`: the list of presets, and random checkpoints written whole or not at all."""

import json
from pathlib import Path

import pytest

from sitsc.frontend.checkpoint import open_checkpoint
from sitsc.models.presets import PRESETS
from tests.commands.command_line import call


def test_list(capfd):
    rows = json.loads(call(capfd, "models", "list", "--json").out)["presets"]
    assert {row["name"] for row in rows} == set(PRESETS)
    by_name = {row["name"]: row for row in rows}
    assert by_name["llama3-8b"]["parameters"] == 8_030_261_248
    assert by_name["smollm2-135m"]["parameters"] == 134_515_008
    text = call(capfd, "models", "list").out
    assert all(name in text for name in PRESETS)


def test_random(tmp_path: Path, capfd):
    out = tmp_path / "made" / "model"
    arguments = ("models", "random", "tiny-qwen2", "--layers", 1, "--dtype", "fp32", "--seed", 3)
    made = json.loads(call(capfd, *arguments, "-o", out, "--json").out)
    assert made["folder"] == str(out) and made["dtype"] == "float32" and made["layers"] == 1
    checkpoint = open_checkpoint(out)
    assert checkpoint.config["num_hidden_layers"] == 1
    assert {info.dtype for info in checkpoint.tensors.values()} == {"F32"}
    call(capfd, *arguments, "-o", out).refused(2, "exists already")
    assert [path.name for path in out.parent.iterdir()] == ["model"]


def test_headers_alone_take_no_disk(tmp_path: Path, capfd):
    out = tmp_path / "big"
    assert call(capfd, "models", "random", "llama3-8b", "-o", out, "--headers-only").code == 0
    assert sum(path.stat().st_blocks for path in out.iterdir()) * 512 < 1 << 24
    assert sum(info.nbytes for info in open_checkpoint(out).tensors.values()) > 16e9


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["llama9"], "no preset 'llama9'"),
        (["tiny-llama", "--dtype", "int2"], "int2"),
        (["tiny-llama", "--layers", "0"], "--layers 0"),
        (["tiny-llama", "--layers", "-4"], "--layers -4"),
    ],
)
def test_refused(tmp_path: Path, arguments: list[str], part: str, capfd):
    call(capfd, "models", "random", *arguments, "-o", tmp_path / "out").refused(2, part)
    assert list(tmp_path.iterdir()) == []
