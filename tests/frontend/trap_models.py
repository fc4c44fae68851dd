"""Tiny configs and folders that the tests of peculiarities change, and what is traced from them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, fx

from sitsc.core.interpret import (
    RandomTensors,
    run_graph,
    step_inputs,
    tensor_shapes,
)
from sitsc.core.weights import DTYPES
from sitsc.frontend.config_lint import lint_config
from sitsc.frontend.trace import trace
from sitsc.models.parameters import parameter_shapes

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


def write_tokenizer(root: Path, num_tokens: int, **settings: Any) -> None:
    vocab = {f"t{i}": i for i in range(num_tokens)}
    model_part = {"type": "WordLevel", "vocab": vocab, "unk_token": "t0"}
    document = {"version": "1.0", "added_tokens": [], "model": model_part}
    split = {"type": "Whitespace"}
    rest = dict.fromkeys(("normalizer", "post_processor", "decoder", "truncation", "padding"))
    (root / "tokenizer.json").write_text(json.dumps(document | rest | {"pre_tokenizer": split}))
    (root / "tokenizer_config.json").write_text(json.dumps(settings))
