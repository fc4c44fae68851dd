"""Peculiarities of checkpoint files, dtypes and keys from public bug reports, one test each.

Each either works as the reference does or is refused by an error that names key, value and what to
do.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sitsc.core.errors import (
    CheckpointError,
    ConfigError,
    OptionError,
    UnsupportedModelError,
)
from sitsc.core.options import CompileOptions
from sitsc.frontend.checkpoint import open_checkpoint
from sitsc.frontend.config_lint import lint_config
from sitsc.frontend.lint import lint_checkpoint
from sitsc.frontend.trace import trace
from tests.frontend.checkpoint_files import write_index, write_shards
from tests.frontend.test_config_lint import tiny
from tests.frontend.trap_models import (
    write_model,
)


def test_a_bfloat16_checkpoint_asked_for_in_float16(tmp_path: Path):
    large = torch.ones(128, 64, dtype=torch.bfloat16)
    large[3, 5] = -70000.0
    root = write_model(tmp_path, tiny(), model__layers__1__mlp__up_proj__weight=large)
    c = open_checkpoint(root)
    report = lint_checkpoint(c, dtype="float16", read_weights=True)
    (error,) = [f for f in report.findings if f.level == "error"]
    assert "model.layers.1.mlp.up_proj.weight holds 7.014e+04, float16 ends at 65504" in error.what
    by_headers = lint_checkpoint(c, dtype="float16").findings
    assert [f.level for f in by_headers] == ["warning"] and "overflow" in by_headers[0].what
    assert lint_checkpoint(c, dtype="bfloat16", read_weights=True).ok
    with pytest.raises(OptionError, match="--dtype 'float16' is unknown — one of auto, float32"):
        CompileOptions(dtype="float16")


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_no_numbers(value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sitsc.frontend.range_lint._BLOCK_ELEMENTS", 1 << 12)  # several blocks
    weight = torch.ones(128, 64, dtype=torch.bfloat16)
    weight[3, 5] = value
    root = write_model(tmp_path, tiny(), model__layers__1__mlp__up_proj__weight=weight)
    for dtype in ("auto", "bfloat16", "float16"):
        report = lint_checkpoint(open_checkpoint(root), dtype=dtype, read_weights=True)
        (error,) = [f for f in report.findings if f.level == "error"]
        assert f"mlp.up_proj.weight holds {abs(value)}" in error.what


@pytest.mark.parametrize("dtype", [torch.bool, torch.float8_e4m3fn])
def test_tensors_that_are_no_weights_are_named_not_read(dtype: torch.dtype, tmp_path: Path):
    odd = torch.ones(128, 64).to(dtype)
    root = write_model(tmp_path, tiny(), model__layers__1__mlp__up_proj__weight=odd)
    for kind in ("auto", "float16"):
        found = lint_checkpoint(open_checkpoint(root), dtype=kind, read_weights=True).findings
        assert "up_proj.weight is stored as" in found[0].what


def test_an_adapter_beside_the_weights_is_refused(tmp_path: Path):
    root = write_model(tmp_path, tiny())
    open_checkpoint(root)
    (root / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match="adapter, which would not be applied"):
        open_checkpoint(root)


def _remove(root: Path) -> None:
    (root / "model-00002-of-00002.safetensors").unlink()


def _swap(root: Path) -> None:
    write_index(root, a=1, b=2, c=2)


def _forget(root: Path) -> None:
    write_index(root, a=1, c=2)


def _promise(root: Path) -> None:
    write_index(root, a=1, b=1, c=2, d=2)


def _no_index(root: Path) -> None:
    (root / "model.safetensors.index.json").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_remove, "names shard model-00002-of-00002.safetensors, which is not there"),
        (_swap, "model-00001-of-00002.safetensors holds 'b', which the index does not"),
        (_forget, "model-00001-of-00002.safetensors holds 'b', which the index does not"),
        (_promise, "puts 'd' into model-00002-of-00002.safetensors, which has no such tensor"),
        (_no_index, "2 safetensors files and no model.safetensors.index.json"),
    ],
)
def test_index_and_shards_that_disagree(
    tmp_path: Path, damage: Callable[[Path], None], message: str
):
    damage(write_shards(tmp_path))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_a_stray_shard_is_not_looked_at_and_a_single_file_needs_no_index(tmp_path: Path):
    root = write_shards(tmp_path / "shards")
    (root / "model-00003-of-00003.safetensors").write_bytes(b"not a shard")
    assert sorted(open_checkpoint(root).tensors) == ["a", "b", "c"]
    single = write_model(tmp_path / "single", tiny())
    assert lint_checkpoint(open_checkpoint(single)).ok


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"])
def test_a_pickle_is_refused_by_name_and_never_opened(tmp_path: Path, name: str):
    (tmp_path / "config.json").write_text(json.dumps(tiny()))
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
    with pytest.raises(CheckpointError, match=f"{name}.*can run code.*convert to safetensors"):
        open_checkpoint(tmp_path)


def test_code_of_a_checkpoint_is_refused_by_name_and_never_run(tmp_path: Path):
    marker = tmp_path / "ran"
    code = {"AutoModelForCausalLM": "modeling_mine.Mine", "AutoConfig": "modeling_mine.Config"}
    root = write_model(tmp_path / "model", tiny(auto_map=code))
    (root / "modeling_mine.py").write_text(f"open({str(marker)!r}, 'w').write('x')")
    (finding,) = lint_checkpoint(open_checkpoint(root)).findings
    assert "auto_map" in finding.what and "never run" in finding.hint
    allowed = frozenset({"auto_map"})
    config = open_checkpoint(root).config
    lint_config(config, allowed)
    trace(config, torch.float32)
    assert not marker.exists()


def test_an_unknown_key_is_an_error_until_it_is_allowed():
    config = tiny(my_key=[1, 2])
    with pytest.raises(
        ConfigError, match=r"unknown key 'my_key' = \[1, 2\].*--allow-unknown-key my_key"
    ):
        lint_config(config)
    lint_config(config, frozenset({"my_key"}))
    lint_config(tiny(transformers_version="9.9", torchscript=False, use_cache=True))
