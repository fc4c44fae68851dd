"""Peculiarities of models and checkpoints from public bug reports, one test (or group) each.

Each either works as the reference does or is refused by an error that names key, value and what to
do. Those that only splitting over devices meets (heads, KV heads, vocabulary, intermediate size or
quantisation blocks by TP) belong to the partitioner.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, fx

from sitsc import packer
from sitsc.core.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    OptionError,
    RequestError,
    TokenizerError,
    UnsupportedModelError,
)
from sitsc.core.interpret import (
    RandomTensors,
    relative_error,
    run_graph,
    step_inputs,
    tensor_shapes,
)
from sitsc.core.options import CompileOptions
from sitsc.core.sampling import SamplingOptions
from sitsc.core.weights import DTYPES
from sitsc.frontend.checkpoint import open_checkpoint
from sitsc.frontend.config_lint import lint_config, lint_tensors
from sitsc.frontend.lint import lint_checkpoint
from sitsc.frontend.trace import trace
from sitsc.lowering import model_facts
from sitsc.models.parameters import parameter_shapes
from sitsc.runtime.chat import ChatTemplate
from sitsc.runtime.tokenizer import Tokenizer
from tests.frontend.checkpoint_files import write_index, write_shards
from tests.frontend.test_config_lint import infos, shapes_of, tiny

IDS = [(7 * i * i + 3 * i + 1) % 250 for i in range(40)]
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def model(kind: str, **changes: Any) -> dict[str, Any]:
    """A tiny config of a family; None leaves a key out."""
    config = SIZES | {"model_type": kind} | changes
    return {key: value for key, value in config.items() if value is not None}


def traced(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> fx.Graph:
    lint_config(config)
    return trace(config, dtype).graph


def logits(graph: fx.Graph) -> Tensor:
    weights = RandomTensors(tensor_shapes(graph))
    return run_graph(graph, weights, step_inputs(graph, IDS, 16))


def reference(config: dict[str, Any], graph: fx.Graph) -> Tensor:
    """Logits of transformers' model with the same weights, in float32."""
    import transformers  # noqa: PLC0415  (seconds)

    weights = RandomTensors(tensor_shapes(graph))
    values = json.loads(json.dumps({k: v for k, v in config.items() if k != "model_type"}))
    parsed = transformers.AutoConfig.for_model(config["model_type"], **values)
    made = transformers.AutoModelForCausalLM.from_config(
        parsed, attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for name, tensor in made.state_dict().items():
            if name in weights.shapes:
                tensor.copy_(weights.read(name, 0, tensor.shape[0]))
        return made(torch.tensor([IDS]), use_cache=False).logits[0]


def constants(graph: fx.Graph) -> dict[str, Tensor]:
    """Values that come from the config, by the name of the buffer."""
    found = {}
    for node in graph.find_nodes(op="placeholder"):
        spec = node.meta.get("weight")
        if spec is not None and spec.role == "constant":
            raw = torch.frombuffer(bytearray.fromhex(spec.data), dtype=DTYPES[spec.dtype])
            found[spec.name] = raw.reshape(spec.shape)
    return found


def frequencies(graph: fx.Graph) -> Tensor:
    """The rotary frequencies of a model that has one set of them."""
    (value,) = (v for name, v in constants(graph).items() if name.endswith("inv_freq"))
    return value


def cosine_factor(graph: fx.Graph) -> float:
    """What the cosines are multiplied with."""
    (cosine,) = graph.find_nodes(op="call_function", target=torch.ops.aten.cos.default)
    (scaled,) = (user for user in cosine.users if user.target is torch.ops.aten.mul.Tensor)
    return float(scaled.args[1])  # pyright: ignore[reportArgumentType]


def windows(graph: fx.Graph) -> list[int]:
    """The window of each layer; 0 for none."""
    target = torch.ops.sitsc.attention.default
    return [int(n.args[6]) for n in graph.nodes if n.target is target]


def write_model(root: Path, config: dict[str, Any], **tensors: Tensor | None) -> Path:
    """A folder with random weights; a keyword (__ for a dot) replaces a tensor, None removes it."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.json").write_text(json.dumps(config))
    made: dict[str, Any] = {
        name: torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
        for name, shape in parameter_shapes(config).items()
    }
    made |= {name.replace("__", "."): value for name, value in tensors.items()}
    save_file({n: t for n, t in made.items() if t is not None}, root / "model.safetensors")
    return root


# --- shapes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3"])
def test_head_dim_differs_from_hidden_by_heads(kind: str):
    config = model(kind, head_dim=24)
    tensors = infos(parameter_shapes(config))
    assert tensors["model.layers.0.self_attn.q_proj.weight"].shape == (96, 64)
    lint_tensors(config, tensors)
    with pytest.raises(ConfigError, match=r"calls for \[64, 64\].*check head_dim"):
        lint_tensors(config | {"head_dim": 16}, tensors)
    with pytest.raises(ConfigError, match="check head_dim"):
        lint_tensors({k: v for k, v in config.items() if k != "head_dim"}, tensors)


def test_head_dim_of_gemma_and_qwen3_has_the_familys_default():
    for kind, default in (("gemma", 256), ("qwen3", 128), ("gpt_oss", 64)):
        config = model(kind, num_local_experts=4 if kind == "gpt_oss" else None)
        like = config | {"head_dim": default, "model_type": "llama" if kind == "gemma" else kind}
        lint_tensors(config, infos(parameter_shapes(like)))
        with pytest.raises(ConfigError, match=rf"calls for \[64, {4 * default}\]"):
            lint_tensors(config, infos(parameter_shapes(like | {"head_dim": 16})))


# --- embeddings and vocabulary --------------------------------------------------------------------


def test_tied_embeddings_with_a_redundant_head_are_compared(tmp_path: Path):
    config = tiny(tie_word_embeddings=True)
    same = torch.ones(320, 64, dtype=torch.bfloat16)
    other = same.clone()
    other[319, 63] = 2.0
    names = {"model__embed_tokens__weight": same, "lm_head__weight": same.clone()}
    good = open_checkpoint(write_model(tmp_path / "good", config, **names))
    assert lint_checkpoint(good).left_out == {"lm_head.weight": "model.embed_tokens.weight"}
    packer._check_duplicates(good)  # pyright: ignore[reportPrivateUsage]
    names["lm_head__weight"] = other
    bad = open_checkpoint(write_model(tmp_path / "bad", config, **names))
    with pytest.raises(CheckpointError, match=r"two different ones.*to false"):
        packer._check_duplicates(bad)  # pyright: ignore[reportPrivateUsage]


def test_untied_flag_with_the_head_missing_is_never_tied_by_guess(tmp_path: Path):
    config = tiny(tie_word_embeddings=False)
    c = open_checkpoint(write_model(tmp_path, config, lm_head__weight=None))
    (finding,) = lint_checkpoint(c).findings
    assert "lm_head.weight is missing and tie_word_embeddings is false" in finding.what


def write_tokenizer(root: Path, num_tokens: int, **settings: Any) -> None:
    vocab = {f"t{i}": i for i in range(num_tokens)}
    model_part = {"type": "WordLevel", "vocab": vocab, "unk_token": "t0"}
    document = {"version": "1.0", "added_tokens": [], "model": model_part}
    split = {"type": "Whitespace"}
    rest = dict.fromkeys(("normalizer", "post_processor", "decoder", "truncation", "padding"))
    (root / "tokenizer.json").write_text(json.dumps(document | rest | {"pre_tokenizer": split}))
    (root / "tokenizer_config.json").write_text(json.dumps(settings))


def test_logits_wider_than_the_tokenizer_are_never_sampled(tmp_path: Path):
    write_tokenizer(write_model(tmp_path, tiny()), 300)
    c = open_checkpoint(tmp_path)
    assert lint_checkpoint(c).ok
    tokens = model_facts(c, CompileOptions()).tokens
    assert (tokens.vocab_size, tokens.logits_width) == (300, 320)


def test_a_tokenizer_wider_than_the_logits_is_refused(tmp_path: Path):
    write_tokenizer(write_model(tmp_path, tiny()), 321)
    (finding,) = [
        f for f in lint_checkpoint(open_checkpoint(tmp_path)).findings if f.level == "error"
    ]
    assert "1 tokens beyond the model's 320 rows, first 't320' = 320" in finding.what


# --- rope -----------------------------------------------------------------------------------------

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_every_spelling_of_rope_scaling_means_the_same():
    spellings: list[dict[str, Any]] = [
        {"rope_scaling": LLAMA3 | {"rope_type": "llama3"}},
        {"rope_scaling": LLAMA3 | {"type": "llama3"}},
        {"rope_scaling": LLAMA3 | {"type": "llama3", "rope_type": "llama3"}},
        {
            "rope_theta": None,
            "rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 10000.0},
        },
    ]
    values = [frequencies(traced(model("llama", **spelling))) for spelling in spellings]
    assert all(torch.equal(value, values[0]) for value in values)
    assert not torch.equal(values[0], frequencies(traced(model("llama"))))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, "contradict"),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "'ntk'.*known: default, linear"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_type = None"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "rope_theta at the top"),
        ({"rope_theta": None}, "given nowhere, and this family has no default"),
    ],
)
def test_rope_conflicts_unknown_types_and_a_missing_base(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        lint_config(model("qwen2", **changes))


def yarn(head_dim: int, base: float, factor: float, original: int) -> list[float]:
    """Frequencies of YaRN in double precision, from its definition: ramp between 32 and 1 turns."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(dimension(32)), 0), min(math.ceil(dimension(1)), head_dim - 1)
    found = []
    for i in range(head_dim // 2):
        plain = base ** (-2 * i / head_dim)
        ramp = min(max((i - low) / max(high - low, 0.001), 0.0), 1.0)
        found.append(plain / factor * ramp + plain * (1 - ramp))
    return found


def test_yarn_frequencies_and_attention_factor_to_a_millionth():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    graph = traced(model("llama", head_dim=32, rope_scaling=scaling))
    wanted = torch.tensor(yarn(32, 1e4, 4.0, 128), dtype=torch.float64)
    assert float((frequencies(graph).double() / wanted - 1).abs().max()) < 1e-6
    assert math.isclose(cosine_factor(graph), 0.1 * math.log(4.0) + 1, rel_tol=1e-6)
    given = traced(model("llama", rope_scaling=scaling | {"attention_factor": 1.25}))
    assert cosine_factor(given) == 1.25
    with_mscale = scaling | {"mscale": 0.8, "mscale_all_dim": 0.5}
    both = cosine_factor(traced(model("llama", rope_scaling=with_mscale)))
    ratio = (0.08 * math.log(4.0) + 1) / (0.05 * math.log(4.0) + 1)
    assert math.isclose(both, ratio, rel_tol=1e-6)


@pytest.mark.parametrize(
    ("kind", "changes", "rotated"),
    [
        ("stablelm", {}, 4),
        ("stablelm", {"partial_rotary_factor": 0.5}, 8),
        ("gpt_neox", {"num_key_value_heads": None}, 4),
        ("gpt_neox", {"num_key_value_heads": None, "rotary_pct": 1.0}, 16),
        ("glm4", {"head_dim": 16}, 8),
        ("phi3", {}, 16),
    ],
)
def test_partial_rotary_has_the_familys_default(kind: str, changes: dict[str, Any], rotated: int):
    assert len(frequencies(traced(model(kind, **changes)))) == rotated // 2


def test_layers_differ_in_rope_base_window_and_rope_at_all():
    inverted = model(
        "qwen2",
        num_hidden_layers=2,
        use_sliding_window=True,
        sliding_window=16,
        max_window_layers=1,
    )
    graph = traced(inverted)
    assert windows(graph) == [0, 16]  # the first max_window_layers layers see everything
    assert relative_error(logits(graph), reference(inverted, graph)) < 1e-5  # past the window
    unused = inverted | {"use_sliding_window": False}
    assert windows(traced(unused)) == [0, 0]
    types = ["sliding_attention", "full_attention"]
    bases = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    }
    gemma = model(
        "gemma3_text",
        num_hidden_layers=2,
        head_dim=16,
        layer_types=types,
        sliding_window=16,
        rope_theta=None,
        rope_parameters=bases,
        query_pre_attn_scalar=16,
    )
    graph = traced(gemma)
    assert windows(graph) == [16, 0]
    values = [v for n, v in constants(graph).items() if n.endswith("inv_freq")]
    assert sorted(round(float(v[-1]) ** (-8 / 7)) for v in values) == [10000, 1000000]


def test_layers_without_rope():
    config = model("smollm3", num_hidden_layers=2, no_rope_layers=[1, 0])
    graph = traced(config)
    assert relative_error(logits(graph), reference(config, graph)) < 1e-5
    other = logits(traced(config | {"no_rope_layers": [1, 1]}))
    assert relative_error(other, logits(graph)) > 1e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["sliding_attention"]}, "one for each of 2 layers"),
        ({"layer_types": ["chunked_attention"] * 2}, "known: full_attention, sliding_attention"),
        ({"layer_types": ["sliding_attention"] * 2, "use_sliding_window": False}, "use_sliding"),
        ({"sliding_window": -4}, "sliding_window = -4"),
    ],
)
def test_layer_types_that_make_no_sense(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        lint_config(model("qwen2", num_hidden_layers=2, **changes))


# --- multipliers ----------------------------------------------------------------------------------

MULTIPLIERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma2": (
        {"head_dim": 16, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}
        | {"query_pre_attn_scalar": 24, "tie_word_embeddings": True},
        {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.0}
        | {"query_pre_attn_scalar": 8},
    ),
    "granite": (
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 4.0}
        | {"attention_multiplier": 0.1},
        {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0}
        | {"attention_multiplier": 0.5},
    ),
    "cohere": (
        {"logit_scale": 0.25, "layer_norm_eps": 1e-5, "tie_word_embeddings": True},
        {"logit_scale": 1.0},
    ),
}


@pytest.mark.parametrize("kind", MULTIPLIERS)
def test_softcaps_and_multipliers_are_consumed(kind: str):
    given, others = MULTIPLIERS[kind]
    config = model(kind, **given)
    graph = traced(config)
    found = logits(graph)
    assert relative_error(found, reference(config, graph)) < 1e-5
    for key, value in others.items():
        assert relative_error(logits(traced(config | {key: value})), found) > 1e-4, key


@pytest.mark.parametrize(
    "key", ["attn_logit_softcapping", "embedding_multiplier", "residual_multiplier", "logit_scale"]
)
def test_a_multiplier_that_the_family_does_not_read_is_an_error(key: str):
    with pytest.raises(ConfigError, match=f"unknown key '{key}'"):
        lint_config(model("llama", **{key: 2.0}))


def test_gemma_scales_its_embedding_and_norms_as_the_reference_rounds():
    graph = traced(model("gemma", hidden_size=96, head_dim=16), torch.bfloat16)
    (scale,) = (v for name, v in constants(graph).items() if name.endswith("embed_scale"))
    assert scale.dtype == torch.bfloat16 and float(scale) == 9.8125 != math.sqrt(96)
    adds = graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    one_plus = [n for n in adds if n.args[1] == 1.0]
    assert len(one_plus) == 3  # 1 + w of each norm …
    assert all(n.meta["val"].dtype == torch.float32 for n in one_plus)  # … in float32


def test_norms_of_q_and_k_per_head_and_over_the_full_width():
    for kind, width in (("qwen3", 16), ("olmo2", 64)):
        config = model(kind, head_dim=16 if kind == "qwen3" else None)
        graph = traced(config)
        shapes = tensor_shapes(graph)
        assert shapes["model.layers.0.self_attn.q_norm.weight"] == (width,)
        lint_tensors(config, infos(shapes))
        assert relative_error(logits(graph), reference(config, graph)) < 1e-5


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (model("qwen2"), "model__layers__0__self_attn__q_proj__bias", "q_proj.bias"),
        (tiny(attention_bias=True), "model__layers__1__self_attn__o_proj__bias", "o_proj.bias"),
        (tiny(mlp_bias=True), "model__layers__1__mlp__up_proj__bias", "up_proj.bias"),
    ],
)
def test_biases_in_config_and_checkpoint_agree(config: dict[str, Any], change: str, message: str):
    lint_tensors(config, shapes_of(config))
    with pytest.raises(ConfigError, match=f"missing, first .*{message}"):
        lint_tensors(config, shapes_of(config, **{change: None}))
    with pytest.raises(ConfigError, match=r"unexpected tensors, first .*proj\.bias"):
        lint_tensors(tiny(), shapes_of(tiny(), **{change: (64,)}))


# --- experts and attention of other kinds ---------------------------------------------------------

DEEPSEEK = {
    "num_hidden_layers": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring_func": "softmax"}, "only 'sigmoid' is supported"),
        ({"topk_method": "greedy"}, "only 'noaux_tc' is supported"),
        ({"moe_layer_freq": 2}, "only 1 is supported"),
        ({"num_experts_per_tok": 5}, "there are 4 experts"),
        ({"n_group": 3}, "must divide the 4 experts"),
        ({"topk_group": 3}, "there are 2 groups"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob"),
        ({"routed_scaling_factor": 0.0}, "routed_scaling_factor = 0.0"),
        ({"n_shared_expert": 1}, "unknown key 'n_shared_expert'"),
    ],
)
def test_options_of_experts_that_are_not_understood(changes: dict[str, Any], message: str):
    lint_config(model("deepseek_v3", **DEEPSEEK))
    with pytest.raises(ConfigError, match=message):
        lint_config(model("deepseek_v3", **DEEPSEEK | changes))


def test_normalising_and_scaling_of_expert_weights_are_consumed():
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = model("qwen3_moe", head_dim=16, norm_topk_prob=True, **moe)
    found = logits(traced(config))
    assert relative_error(logits(traced(config | {"norm_topk_prob": False})), found) > 1e-3
    deep = model("deepseek_v3", routed_scaling_factor=2.5, norm_topk_prob=True, **DEEPSEEK)
    scaled = logits(traced(deep))
    assert relative_error(logits(traced(deep | {"routed_scaling_factor": 1.0})), scaled) > 1e-4


def test_tensors_of_the_next_token_prediction_layer_are_left_out_by_name():
    config = model("deepseek_v3", num_nextn_predict_layers=1, **DEEPSEEK)
    shapes: dict[str, tuple[int, ...]] = dict(tensor_shapes(traced(config)))
    shapes |= {"model.layers.2.eh_proj.weight": (64, 128), "model.layers.2.enorm.weight": (64,)}
    result = lint_tensors(config, infos(shapes))
    assert set(result.rules.values()) == {"next_token_prediction_layer"}
    with pytest.raises(ConfigError, match=r"unexpected.*layers\.2"):
        lint_tensors(config | {"num_nextn_predict_layers": 0}, infos(shapes))


def test_attention_sinks_and_mla_are_traced_and_other_mixers_refused_by_name():
    sinks = model("gpt_oss", num_local_experts=4, num_experts_per_tok=2, head_dim=16)
    target = torch.ops.sitsc.attention.default
    assert all(n.args[3] is not None for n in traced(sinks).nodes if n.target is target)
    mla = traced(model("deepseek_v3", **DEEPSEEK))
    assert sum(n.target is target for n in mla.nodes) == 2
    for kind in ("mamba", "jamba", "recurrent_gemma"):
        with pytest.raises((UnsupportedModelError, ConfigError)):
            traced({"model_type": kind, **{k: v for k, v in SIZES.items() if "rope" not in k}})


# --- dtypes ---------------------------------------------------------------------------------------


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


# --- files ----------------------------------------------------------------------------------------


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


# --- tokenizer and requests -----------------------------------------------------------------------


def test_end_tokens_are_the_union_of_all_that_name_one(tmp_path: Path):
    root = write_model(tmp_path, tiny(eos_token_id=[3, 4]))
    (root / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 5]}))
    write_tokenizer(root, 320, eos_token="t9")
    c = open_checkpoint(root)
    assert c.tokenizer.eos_token_ids == (3, 4, 5, 9)
    assert model_facts(c, CompileOptions()).tokens.eos_token_ids == (3, 4, 5, 9)


def test_special_tokens_that_do_not_exist(tmp_path: Path):
    root = write_model(tmp_path, tiny(eos_token_id=999))
    write_tokenizer(root, 320, eos_token="</s>", bos_token="t1")
    findings = lint_checkpoint(open_checkpoint(root)).findings
    text = " | ".join(f"{f.level}: {f.what}" for f in findings)
    assert "error: every EOS id (999) is beyond the model's 320 rows" in text
    assert "warning: eos_token '</s>' is not a token of tokenizer.json" in text
    assert "warning: eos_token_id 999 in config.json is outside the 320 rows" in text


def test_without_a_chat_template_chat_is_refused_and_completion_works(tmp_path: Path):
    root = write_model(tmp_path, tiny())
    write_tokenizer(root, 320)
    files = open_checkpoint(root).tokenizer
    assert files.chat_template is None and files.tokenizer_json is not None
    assert Tokenizer(files.tokenizer_json).encode("t7 t8") == [7, 8]
    with pytest.raises(TokenizerError, match=r"no chat template.*plain completion works"):
        ChatTemplate.from_config({})


def test_bos_is_added_once_to_plain_text_and_never_to_a_rendered_template(tmp_path: Path):
    root = write_model(tmp_path, tiny())
    template = "{{ bos_token }} {% for m in messages %}{{ m.content }}{% endfor %}"
    write_tokenizer(root, 320, bos_token="t1", add_bos_token=True, chat_template=template)
    files = open_checkpoint(root).tokenizer
    assert files.tokenizer_json is not None and files.chat_template is not None
    tokenizer = Tokenizer(files.tokenizer_json)
    assert tokenizer.encode("t7") == [1, 7]
    text = ChatTemplate(files.chat_template, files.special_tokens).render(
        [{"role": "user", "content": "t7"}]
    )
    assert tokenizer.encode(text, add_bos=False) == [1, 7]


def test_an_empty_or_too_long_prompt_fails_alone():
    from tests.runtime.test_engine import engine  # noqa: PLC0415  (builds a model)

    made = engine(context=16)
    for prompt, error, message in [
        ("", RequestError, "the prompt is empty"),
        ([], RequestError, "empty"),
        ([5] * 99, CapacityError, "99"),
    ]:
        with pytest.raises(error, match=message):
            made.add_request(prompt)
    (answer,) = made.generate_batch(["a"], SamplingOptions(max_tokens=2))
    assert answer.error is None and len(answer.token_ids) == 2


# --- keys -----------------------------------------------------------------------------------------


def test_an_unknown_key_is_an_error_until_it_is_allowed():
    config = tiny(my_key=[1, 2])
    with pytest.raises(
        ConfigError, match=r"unknown key 'my_key' = \[1, 2\].*--allow-unknown-key my_key"
    ):
        lint_config(config)
    lint_config(config, frozenset({"my_key"}))
    lint_config(tiny(transformers_version="9.9", torchscript=False, use_cache=True))
