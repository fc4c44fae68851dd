"""The Python API: a cheap import, paths, models of transformers in memory, and its guide."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sitsc
from sitsc.core.artifact import Artifact
from sitsc.core.errors import ArtifactError, CheckpointError, OptionError
from sitsc.core.sampling import SamplingOptions

GUIDE = Path(__file__).parents[1] / "docs" / "python-api.md"
CHEAP = "import sys, sitsc; sys.exit('torch' in sys.modules or 'sitsc.api' in sys.modules)"


def test_the_import_is_cheap():
    assert subprocess.run([sys.executable, "-c", CHEAP]).returncode == 0
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        sitsc.nothing  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_a_path_compiles_as_on_the_command_line(
    tiny_checkpoint: Path, tiny_artifact: Path, tmp_path: Path
):
    made = sitsc.compile(tiny_checkpoint, out=tmp_path / "tiny")
    assert isinstance(made, Artifact)
    assert made.manifest.files == sitsc.load(tiny_artifact).artifact.manifest.files
    session: Any = made.load(verify=False)
    assert session.engine.generate_batch([[1, 2]], SamplingOptions(max_tokens=2))[0].error is None


def test_paths_that_do_not_fit(tmp_path: Path):
    with pytest.raises(CheckpointError):
        sitsc.compile(tmp_path / "nothing", out=tmp_path / "out")
    with pytest.raises(OptionError, match="example_inputs does not fit"):
        sitsc.compile(tmp_path, example_inputs=torch.ones(1), out=tmp_path / "out")
    with pytest.raises(ArtifactError):
        sitsc.load(tmp_path / "nothing")


def test_a_language_model_of_transformers_in_memory(tmp_path: Path):
    from transformers import Qwen2Config, Qwen2ForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=120,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    model: Any = Qwen2ForCausalLM(config).eval()
    ids = [3, 5, 8, 13, 21, 34, 55, 89]
    session: Any = sitsc.compile(model, out=tmp_path / "qwen").load()
    assert [p.name for p in tmp_path.iterdir()] == ["qwen"]
    [answer] = session.engine.generate_batch([ids], SamplingOptions(max_tokens=20))
    wanted = model.generate(
        torch.tensor([ids]), max_new_tokens=20, do_sample=False, eos_token_id=None
    )
    assert len(set(answer.token_ids)) > 3
    assert list(answer.token_ids) == wanted[0, len(ids) :].tolist()


def test_an_encoder_of_transformers_is_a_plain_function(tmp_path: Path):
    from transformers import BertConfig, BertModel  # noqa: PLC0415

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    model: nn.Module = BertModel(config).eval()
    batch, words = torch.export.Dim("batch"), torch.export.Dim("words", max=64)
    ids = torch.randint(0, 100, (2, 7))
    example = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    shapes = {name: {0: batch, 1: words} for name in example}
    made = sitsc.compile(
        model, example_inputs=example, dynamic_shapes=shapes, out=tmp_path / "bert"
    )
    function: Any = made.load()
    for size in ((1, 1), (3, 11), (5, 64)):
        ids = torch.randint(0, 100, size)
        mask = torch.ones_like(ids)
        mask[-1, size[1] // 2 + 1 :] = 0
        with torch.no_grad():
            wanted = model(input_ids=ids, attention_mask=mask)
        found = function(ids, mask)
        assert list(found) == ["last_hidden_state", "pooler_output"]
        for name, value in found.items():
            assert (value - wanted[name]).abs().max() <= 1e-5


def test_the_code_of_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.S | re.M)
    assert len(blocks) == 3
    names: dict[str, Any] = {"__name__": "guide"}
    for block in blocks:
        exec(compile(block, GUIDE.name, "exec"), names)
    assert {p.name for p in tmp_path.iterdir()} == {"pooled.sitsc", "tiny.sitsc"}
