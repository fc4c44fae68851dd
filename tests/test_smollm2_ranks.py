"""SmolLM2's weights over ranks in processes of their own, gloo between them: the tokens of one.

It has 9 query heads and 3 KV heads, which TP 3 divides and TP 2 does not. The whole model with each
partition takes minutes and is marked slow; its first layers do for every run of the tests.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from sitsc.core.errors import PartitionError
from sitsc.core.options import CompileOptions
from sitsc.frontend.checkpoint import Checkpoint, open_checkpoint
from sitsc.pipeline import compile_model
from tests.test_smollm2 import PROMPTS, model_file

LAYERS, TOKENS = 4, 8
TP, PP = 3, 2
CUTS = [(TP, 1), (1, PP), (TP, PP)]


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(model_file())


@pytest.fixture(scope="module")
def short(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's first layers, in float32."""
    folder = tmp_path_factory.mktemp("short")

    def wanted(name: str) -> bool:
        return not name.startswith("model.layers.") or int(name.split(".")[2]) < LAYERS

    weights = {n: checkpoint.read(n).float().contiguous() for n in checkpoint.tensors if wanted(n)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = checkpoint.config | {"num_hidden_layers": LAYERS, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    assert checkpoint.tokenizer.tokenizer_json is not None
    (folder / "tokenizer.json").write_bytes(checkpoint.tokenizer.tokenizer_json)
    return folder


def compiled(model: Path, out: Path, **degrees: Any) -> Path:
    return compile_model(model, out, CompileOptions(dtype="float32", **degrees)).root


def answer(artifact: Path, *options: object) -> list[int]:
    """The tokens that `sitsc run` gives."""
    command = [sys.executable, "-m", "sitsc.cli", "run", artifact, PROMPTS[0], "--json"]
    command += ["--max-tokens", TOKENS, *options]
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["token_ids"]


def test_first_layers_give_the_tokens_of_one_rank(short: Path, tmp_path: Path):
    wanted = answer(compiled(short, tmp_path / "one"))
    assert len(wanted) == TOKENS
    cut = compiled(short, tmp_path / "cut", tp=TP, pp=PP)
    assert answer(cut, "--nproc", TP * PP) == wanted


@pytest.mark.slow
def test_the_whole_model_gives_the_tokens_of_one_rank(tmp_path: Path):
    wanted = answer(compiled(model_file(), tmp_path / "one"))
    for tp, pp in CUTS:
        cut = compiled(model_file(), tmp_path / f"tp{tp}pp{pp}", tp=tp, pp=pp)
        assert answer(cut, "--nproc", tp * pp) == wanted, (tp, pp)


def test_heads_that_do_not_divide(short: Path, tmp_path: Path):
    with pytest.raises(PartitionError, match="9 query heads do not divide by TP 2") as error:
        compiled(short, tmp_path / "two", tp=2)
    assert "valid TP: 1, 3" in error.value.hint
    assert not (tmp_path / "two").exists()
