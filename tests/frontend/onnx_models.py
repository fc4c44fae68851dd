"""Small models exported to ONNX by torch's two exporters, for tests of the importer."""

import logging
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
GPT2: dict[str, Any] = {
    "vocab_size": 97,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "qwen3": SIZES | {"head_dim": 16},
    "mistral": SIZES | {"sliding_window": 7},
    "gpt2": GPT2,
}
IDS = [(7 * i * i + 3 * i + 1) % 97 for i in range(30)]


@dataclass(frozen=True, slots=True)
class Case:
    """What is exported: inputs "ids", "mask", "full" (with positions) or "past", and how."""

    family: str
    inputs: str
    opset: int
    dynamo: bool
    attention: str = "sdpa"

    def __str__(self) -> str:
        how = "dynamo" if self.dynamo else "torchscript"
        return f"{self.family}-{self.inputs}-{self.opset}-{how}-{self.attention}"


class _Plain(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        return self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=False,
        ).logits


class _Past(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, *past: Tensor
    ) -> tuple[Tensor, ...]:
        from transformers import DynamicCache  # noqa: PLC0415

        model: Any = self.model
        cache = DynamicCache(config=model.config)
        for index in range(0, len(past), 2):
            cache.update(past[index], past[index + 1], index // 2)
        out = model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
        )
        pairs = [(layer.keys, layer.values) for layer in out.past_key_values.layers]
        return (out.logits, *(value for pair in pairs for value in pair))


def make_model(case: Case) -> Any:
    """The transformers model of a case, with seeded random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    config = AutoConfig.for_model(case.family, **CONFIGS[case.family])
    model = AutoModelForCausalLM.from_config(config, attn_implementation=case.attention).eval()
    for name, value in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(value, std=0.1)
    return model


def export(case: Case, folder: Path) -> Path:
    """Write model.onnx of a case into `folder`, as users export it."""
    folder.mkdir(parents=True, exist_ok=True)
    model, out = make_model(case), folder / "model.onnx"
    ids, positions = torch.tensor([IDS[:9], IDS[9:18]]), torch.arange(9).expand(2, 9)
    names = ["input_ids", "attention_mask", "position_ids"]
    outputs = ["logits"]
    if case.inputs == "past":
        past = [torch.randn(2, 2, 5, 16) for _ in range(4)]
        args = (ids, torch.ones(2, 14, dtype=torch.long), positions + 5, *past)
        kv = [f"{i}.{part}" for i in range(2) for part in ("key", "value")]
        names += [f"past_key_values.{name}" for name in kv]
        outputs += [f"present.{name}" for name in kv]
        module: nn.Module = _Past(model)
    else:
        count = {"ids": 1, "mask": 2, "full": 3}[case.inputs]
        args = (ids, torch.ones(2, 9, dtype=torch.long), positions)[:count]
        names, module = names[:count], _Plain(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            torch.onnx.export(
                module,
                args,
                str(out),
                opset_version=case.opset,
                input_names=names,
                output_names=outputs,
                **_free_sizes(case, names),
            )
        finally:
            logging.disable(logging.NOTSET)
    return out


def _free_sizes(case: Case, names: list[str]) -> dict[str, Any]:
    if not case.dynamo:
        axes = {name: {0: "batch", 1: "sequence"} for name in names[:3]}
        axes |= {name: {0: "batch", 2: "past"} for name in names[3:]}
        return {"dynamo": False, "dynamic_axes": axes}
    free = torch.export.Dim.DYNAMIC
    shapes: list[Any] = [{0: free, 1: free} for _ in names[:3]]
    if names[3:]:
        shapes.append(tuple({0: free, 2: free} for _ in names[3:]))
    return {"dynamo": True, "dynamic_shapes": tuple(shapes), "verbose": False}


def onnxruntime_logits(path: Path, ids: list[int]) -> Tensor:
    """Logits [tokens, vocabulary] of one sequence by onnxruntime; the past is empty."""
    import onnxruntime  # noqa: PLC0415

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feed: dict[str, Any] = {}
    for item in session.get_inputs():
        if item.name == "input_ids":
            feed[item.name] = np.array([ids])
        elif item.name == "attention_mask":
            feed[item.name] = np.ones((1, len(ids)), dtype=np.int64)
        elif item.name == "position_ids":
            feed[item.name] = np.arange(len(ids))[None]
        else:
            feed[item.name] = np.zeros((1, item.shape[1], 0, item.shape[3]), dtype=np.float32)
    return torch.from_numpy(session.run(["logits"], feed)[0])[0]
