import hashlib
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from sitsc.frontend.checkpoint import Checkpoint, open_checkpoint
from sitsc.frontend.config_lint import lint_config, lint_tensors
from sitsc.models.presets import PRESETS, preset
from sitsc.models.random_checkpoint import write_random

TINY = [name for name in PRESETS if name.startswith("tiny-")]


def digests(root: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(root.iterdir())}


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_checkpoint_is_whole_and_its_activations_are_sane(tmp_path: Path, name: str):
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    c = open_checkpoint(write_random(name, tmp_path))
    lint_config(c.config)
    lint_tensors(c.config, c.tensors)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(tmp_path)("What is a plan?", return_tensors="pt").input_ids
    out = model(ids, output_hidden_states=True)
    assert all(0.05 < h.std() < 20 for h in out.hidden_states)
    assert 0.3 < out.logits.std() < 5
    for parameter, value in model.named_parameters():
        assert torch.equal(on_disk(c, parameter).float(), value)


def on_disk(c: Checkpoint, parameter: str) -> torch.Tensor:
    """A parameter of transformers' model from the tensors of the file."""
    if parameter in c.tensors:
        return c.read(parameter)
    parameter = (
        parameter.replace(".mlp.", ".block_sparse_moe.")
        if "mixtral" in c.config["model_type"]
        else parameter
    )
    if not parameter.endswith(("gate_up_proj", "down_proj")):
        return c.read(parameter)
    path, name = parameter.rsplit(".", 1)
    mixtral = "block_sparse" in path
    names = ("w1", "w3") if mixtral else ("gate_proj", "up_proj")
    if name == "down_proj":
        names = ("w2",) if mixtral else ("down_proj",)
    count = c.config.get("num_local_experts") or c.config["num_experts"]
    parts = [torch.cat([c.read(f"{path}.{e}.{n}.weight") for n in names]) for e in range(count)]
    return torch.stack(parts)


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(tmp_path: Path):
    seeds = {"a": 1, "b": 1, "c": 2}
    a, b, c = (write_random("tiny-odd", tmp_path / n, seed=s) for n, s in seeds.items())
    assert digests(a) == digests(b)
    changed = {n for n, d in digests(a).items() if digests(c)[n] != d}
    assert changed == {"model.safetensors"}


@given(shard_bytes=st.integers(1, 90_000))
def test_shards_hold_the_same_values_as_one_file(tmp_path_factory, shard_bytes: int):
    root = tmp_path_factory.mktemp("shards")
    whole = open_checkpoint(write_random("tiny-odd", root / "whole"))
    split = open_checkpoint(write_random("tiny-odd", root / "split", shard_bytes=shard_bytes))
    assert whole.tensors.keys() == split.tensors.keys()
    assert all(torch.equal(whole.read(n), split.read(n)) for n in whole.tensors)
    sizes: dict[str, list[int]] = {}
    for info in split.tensors.values():
        sizes.setdefault(info.file, []).append(info.nbytes)
    assert all(sum(s) <= shard_bytes or len(s) == 1 for s in sizes.values())
    assert (root / "split" / "model.safetensors.index.json").exists() is (len(sizes) > 1)


@pytest.mark.parametrize("name", ["llama3-8b", "llama32-1b", "smollm2-135m", "qwen3-30b-a3b"])
def test_headers_of_a_large_model_take_no_disk(tmp_path: Path, name: str):
    c = open_checkpoint(write_random(name, tmp_path, headers_only=True))
    lint_config(c.config)
    lint_tensors(c.config, c.tensors)
    nbytes = sum(info.nbytes for info in c.tensors.values())
    assert nbytes > 250e6
    assert sum(p.stat().st_blocks * 512 for p in tmp_path.iterdir()) < 1 << 23
    if name == "llama3-8b":
        assert nbytes == 16_060_522_496 and len({i.file for i in c.tensors.values()}) > 1


def test_layers_cut_a_model_short(tmp_path: Path):
    c = open_checkpoint(write_random("smollm2-135m", tmp_path, layers=1, headers_only=True))
    assert c.config["num_hidden_layers"] == 1
    lint_tensors(c.config, c.tensors)


def test_expert_weights_are_written(tmp_path: Path):
    config = preset("qwen3-30b-a3b") | {
        "hidden_size": 32,
        "moe_intermediate_size": 24,
        "num_experts": 3,
        "num_hidden_layers": 2,
        "head_dim": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 260,
        "bos_token_id": 258,
        "eos_token_id": [259, 0],
    }
    c = open_checkpoint(write_random(config, tmp_path, dtype="float32"))
    lint_tensors(c.config, c.tensors)
    assert c.read("model.layers.1.mlp.experts.2.down_proj.weight").shape == (32, 24)
    assert c.tokenizer.eos_token_ids == (0, 259)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-odd"])
@given(text=st.text())
def test_any_text_can_be_encoded(tmp_path_factory, name: str, text: str):
    tokenizer = written_tokenizer(tmp_path_factory, name)
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert all(i < preset(name)["vocab_size"] for i in ids)


def written_tokenizer(tmp_path_factory, name: str) -> Tokenizer:
    root = tmp_path_factory.getbasetemp() / f"tokenizer-{name}"
    if not root.exists():
        write_random(name, root, headers_only=True)
    return Tokenizer.from_file(str(root / "tokenizer.json"))


def test_special_tokens_sit_at_the_ids_of_the_config(tmp_path: Path):
    c = open_checkpoint(write_random("llama3-8b", tmp_path, headers_only=True))
    files = c.tokenizer
    assert (files.bos_token_id, files.eos_token_ids) == (128000, (128001,))
    assert files.tokenizer_json is not None and files.chat_template is not None
    tokenizer = Tokenizer.from_str(files.tokenizer_json.decode())
    assert tokenizer.encode("<|im_end|>").ids == [128001]
    assert len(tokenizer.encode("<|im_start|>").ids) == 1


def test_mistakes_are_told(tmp_path: Path):
    with pytest.raises(ValueError, match="there are llama3-8b"):
        write_random("llama4", tmp_path)
    with pytest.raises(ValueError, match="float8"):
        write_random("tiny-llama", tmp_path, dtype="float8")
    with pytest.raises(ValueError, match="mamba"):
        write_random({"model_type": "mamba"}, tmp_path)
    with pytest.raises(ValueError, match="vocabulary of 258"):
        write_random(preset("tiny-llama") | {"vocab_size": 258}, tmp_path)


def test_a_preset_is_a_copy():
    preset("tiny-llama31")["rope_scaling"]["factor"] = 0
    assert preset("tiny-llama31")["rope_scaling"]["factor"] == 8.0
    json.dumps(PRESETS)
