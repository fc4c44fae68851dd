"""Models whose decoder is one of several parts: it alone is compiled, by named rules."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from sitsc import lowering, packer
from sitsc.commands.lint import lines
from sitsc.core.errors import CheckpointError, ConfigError, SitscError, UnsupportedModelError
from sitsc.core.interpret import relative_error, run_graph, step_inputs
from sitsc.core.options import CompileOptions
from sitsc.frontend.checkpoint import Checkpoint, open_checkpoint
from sitsc.frontend.config_lint import config_problems
from sitsc.frontend.lint import check, lint_checkpoint
from sitsc.frontend.nested import is_nested, nested_knowledge, open_nested, outer_problems
from sitsc.models.random_tokenizer import write_tokenizer
from sitsc.pipeline import compile_model
from sitsc.runtime.loader import load
from sitsc.runtime.score import iterate_logits
from tests.frontend.nested_models import MODELS, logits_of, save_nested

IDS = [(7 * i * i + 3 * i + 1) % 250 + 4 for i in range(45)]
NONE: frozenset[str] = frozenset()


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    """A small Gemma 3 with its vision tower, and the logits of all of it for IDS."""
    folder = tmp_path_factory.mktemp("nested") / "gemma3"
    return folder, logits_of(save_nested("gemma3", folder), IDS)


def graph_logits(checkpoint: Checkpoint) -> Tensor:
    """Logits of the traced graph with the tensors that it names in the file."""
    options = CompileOptions(dtype="float32")
    dtypes = lowering.resolve_dtypes(checkpoint.config, options)
    module = lowering.trace_checkpoint(checkpoint, dtypes, options, 128)

    class Weights:
        def read(self, name: str, start: int, stop: int) -> Tensor:
            return checkpoint.read(name, (start, stop))

    return run_graph(module.graph, Weights(), step_inputs(module.graph, IDS, 16))


def changed(folder: Path, out: Path, **changes: Any) -> Path:
    """A copy of a model with another config.json; a key of None is left out."""
    out.mkdir()
    config = json.loads((folder / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not None}
    (out / "config.json").write_text(json.dumps(config))
    (out / "model.safetensors").hardlink_to(folder / "model.safetensors")
    return out


def test_the_artifact_of_gemma3_computes_what_the_whole_model_does(gemma: Any, tmp_path: Path):
    folder, wanted = gemma
    write_tokenizer(folder, {"vocab_size": 320, "bos_token_id": 0, "eos_token_id": 2})
    options = CompileOptions(dtype="float32", max_context=64, max_batch=2, prefill_chunk_tokens=16)
    made = compile_model(folder, tmp_path / "artifact", options)
    session = load(made.root)
    ours = torch.cat(list(iterate_logits(session.executor, IDS)))
    assert relative_error(ours, wanted) < 1e-5
    assert "hello" in session.chat_prompt([{"role": "user", "content": "hello"}])
    names = [s.tensor for spec in made.plan.model.parameters for s in spec.sources]
    assert names and all(name.startswith("language_model.model.") for name in names)


def test_lint_names_what_is_left_out(gemma: Any):
    report = lint_checkpoint(open_checkpoint(gemma[0]))
    assert report.ok and report.tensors["consumed"] == 28
    text = "\n".join(lines(report, keys=True))
    assert "32 ignored: vision_part" in text and "2 ignored: projector" in text
    uses = {key.key: key.use for key in report.keys}
    assert uses["vision_config"] == "not for text" and uses["text_config"] == "consumed"
    assert uses["query_pre_attn_scalar"] == "consumed"


def test_keys_that_nobody_knows_are_errors_outside_and_inside(gemma: Any, tmp_path: Path):
    folder, _ = gemma
    outside = open_checkpoint(changed(folder, tmp_path / "a", my_scale=2.0))
    with pytest.raises(ConfigError, match=r"unknown key 'my_scale'.*--allow-unknown-key my_scale"):
        check(outside, NONE)
    check(outside, frozenset({"my_scale"}))
    text = json.loads((folder / "config.json").read_text())["text_config"]
    inside = changed(folder, tmp_path / "b", text_config=text | {"my_scale": 2.0})
    with pytest.raises(ConfigError, match="unknown key 'my_scale'"):
        check(open_checkpoint(inside), NONE)
    quantised = changed(folder, tmp_path / "c", quantization_config={"bits": 4})
    with pytest.raises(ConfigError, match="quantised checkpoints are not read yet"):
        check(open_checkpoint(quantised), NONE)


def test_keys_that_the_file_leaves_out_are_those_of_the_decoders_class(tmp_path: Path):
    """Published files of Gemma 3 give six keys of their decoder."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    out = tmp_path / "published"
    out.mkdir()
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    whole |= {"eos_token_id": [1, 106], "text_config": text, "torch_dtype": "bfloat16"}
    whole |= {"vision_config": {"hidden_size": 1152}, "mm_tokens_per_image": 256}
    (out / "config.json").write_text(json.dumps(whole))
    found = open_checkpoint(out)
    check(found, NONE)
    assert found.config["num_attention_heads"] == 8 and found.config["head_dim"] == 256
    assert found.config["layer_types"][:6] == ["sliding_attention"] * 5 + ["full_attention"]
    rope = found.config["rope_parameters"]
    assert rope["full_attention"]["factor"] == 8.0 and rope["full_attention"]["rope_theta"] == 1e6
    assert rope["sliding_attention"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert found.config["eos_token_id"] == [1, 106] and found.config["tie_word_embeddings"]
    assert found.config["torch_dtype"] == "bfloat16" and "dtype" not in found.config


def test_a_head_in_the_file_is_its_own_unless_someone_ties_it(gemma: Any, tmp_path: Path):
    folder, _ = gemma
    tensors = load_file(folder / "model.safetensors")
    head = {"language_model.lm_head.weight": torch.randn(320, 64)}
    config = json.loads((folder / "config.json").read_text())
    text = {k: v for k, v in config["text_config"].items() if k != "tie_word_embeddings"}
    for name, tied in (("tied", True), ("free", None)):
        out = changed(folder, tmp_path / name, text_config=text, tie_word_embeddings=tied)
        (out / "model.safetensors").unlink()
        save_file(tensors | head, out / "model.safetensors")
    free = open_checkpoint(tmp_path / "free")
    check(free, NONE)
    assert free.config["tie_word_embeddings"] is False
    with pytest.raises(CheckpointError, match=r"ties language_model\.lm_head\.weight to lang"):
        packer._check_duplicates(open_checkpoint(tmp_path / "tied"))
    lost = changed(folder, tmp_path / "lost", text_config=text, tie_word_embeddings=False)
    with pytest.raises(ConfigError, match=r"lm_head\.weight is missing and tie_word_embeddings"):
        check(open_checkpoint(lost), NONE)


def test_tensors_of_no_known_part_are_errors(gemma: Any, tmp_path: Path):
    out = changed(gemma[0], tmp_path / "stray")
    tensors = load_file(gemma[0] / "model.safetensors")
    (out / "model.safetensors").unlink()
    save_file(tensors | {"resampler.weight": torch.ones(2)}, out / "model.safetensors")
    with pytest.raises(ConfigError, match=r"1 unexpected tensors, first 'resampler\.weight'"):
        check(open_checkpoint(out), NONE)
    save_file({"some.weight": torch.ones(2)}, out / "model.safetensors")
    with pytest.raises(CheckpointError, match="0 tensors could be the decoder's embedding"):
        open_checkpoint(out)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "paligemma"}, "paligemma.*sees its prompt both ways"),
        ({"model_type": "mllama"}, "mllama.*attend to the image"),
        ({"model_type": "llama4"}, "llama4.*in chunks"),
        ({"model_type": "my_vlm"}, "my_vlm.*supported: gemma3, llava"),
        ({"model_type": ["gemma3"]}, "model_type .* is not supported"),
        ({"model_type": "gemma3", "architectures": ["X"]}, "supported: Gemma3ForCond"),
        ({"model_type": "llava", "text_config": {"model_type": "mamba"}}, "num_attention"),
        ({"model_type": "llava", "text_config": {"model_type": "../x"}}, "text_config.model_type"),
        ({"model_type": "gemma3", "text_config": {"num_hidden_layers": 10**12}}, "hidden_layers"),
        ({"model_type": "gemma3", "text_config": {"hidden_size": [1]}}, "text_config cannot be"),
    ],
)
def test_models_that_are_refused_by_name(config: dict[str, Any], message: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {}} | config))
    with pytest.raises((UnsupportedModelError, ConfigError), match=message):
        check(open_checkpoint(tmp_path), NONE)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
KEYS = st.sampled_from(
    ["hidden_size", "num_hidden_layers", "num_attention_heads", "layer_types", "rope_scaling"]
    + ["rope_parameters", "model_type", "vocab_size", "sliding_window", "dtype", "eos_token_id"]
    + ["tie_word_embeddings", "text_config", "vision_config", "my_key"]
)


@settings(max_examples=60)
@given(st.sampled_from(sorted(MODELS)), st.dictionaries(KEYS, JSON), st.dictionaries(KEYS, JSON))
def test_any_config_is_read_or_refused(kind: str, outer: dict[str, Any], inner: dict[str, Any]):
    config = {"model_type": kind, "text_config": inner} | outer
    try:
        if is_nested(config):
            found, nested = open_nested(config, {})
            assert all(isinstance(p, SitscError) for p in outer_problems(nested, NONE))
            assert all(isinstance(p, SitscError) for p in config_problems(found, NONE))
    except SitscError:
        pass


def test_an_old_flat_config_of_qwen2_vl(tmp_path: Path):
    whole = {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "vocab_size": 320,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "sliding_window": 32768,
        "use_sliding_window": False,
        "max_position_embeddings": 512,
        "max_window_layers": 2,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "vision_start_token_id": 3,
        "image_token_id": 3,
        "vision_config": {"depth": 1},
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    found = open_checkpoint(tmp_path)
    (warning,) = check(found, NONE)[:1]
    assert "mrope is compiled as plain rope" in warning
    assert found.config["model_type"] == "qwen2" and found.config["tie_word_embeddings"]
    assert found.config["rope_parameters"] == {"rope_type": "default", "rope_theta": 1000000.0}
    (tmp_path / "config.json").write_text(json.dumps(whole | {"my_key": 1}))
    with pytest.raises(ConfigError, match="unknown key 'my_key'"):
        check(open_checkpoint(tmp_path), NONE)


def test_every_model_is_tried():
    assert set(MODELS) == set(nested_knowledge()["models"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "gemma3"])
def test_the_graph_computes_what_the_whole_model_does(kind: str, tmp_path: Path):
    wanted = logits_of(save_nested(kind, tmp_path), IDS)
    checkpoint = open_checkpoint(tmp_path)
    report = lint_checkpoint(checkpoint)
    assert report.ok, report.findings
    assert relative_error(graph_logits(checkpoint), wanted) < 1e-5
