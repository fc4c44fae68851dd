"""Text encoders: token ids and a mask to one vector a text, as a module with real weights.

In: a checkpoint of BERT, or an ONNX graph of an encoder, and what its folder says of pooling
(modules.json of sentence-transformers). Out: a module of (input_ids, attention_mask).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sitsc.core.errors import CheckpointError, ConfigError, SitscError, UnsupportedModelError
from sitsc.frontend.checkpoint_types import Checkpoint
from sitsc.frontend.encoder_checks import build, key_problems, own_names, tensor_uses
from sitsc.frontend.safe_files import is_plain_name, read_bytes, read_json_object, shown

FAMILIES = ("bert",)
HIDDEN = ("last_hidden_state", "token_embeddings")
POOLED = ("sentence_embedding", "embeddings")
INPUTS = ("input_ids", "attention_mask", "token_type_ids")
_MOST_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Pooling:
    """How token vectors become one: "mean" over the mask or "cls"; then to length one or not."""

    mode: str = "mean"
    normalise: bool = True
    max_tokens: int = _MOST_TOKENS


def is_encoder(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is an encoder that is compiled to give vectors."""
    if checkpoint.program is not None:
        return any(name in (*HIDDEN, *POOLED) for name in checkpoint.program.file.outputs)
    return checkpoint.config.get("model_type") in FAMILIES


def read_pooling(root: Path, most: int) -> Pooling:
    """What modules.json says; without one the mean, normalised. Raises CheckpointError."""
    most = min(most, _MOST_TOKENS)
    if (root / "sentence_bert_config.json").exists():
        length = read_json_object(root, "sentence_bert_config.json").get("max_seq_length")
        most = min(most, length) if type(length) is int and length > 0 else most
    if not (root / "modules.json").exists():
        return Pooling(max_tokens=most)
    kinds = {str(m.get("type")).split(".")[-1]: m for m in _modules(root)}
    if unknown := set(kinds) - {"Transformer", "Pooling", "Normalize"}:
        raise UnsupportedModelError(
            f"modules.json has {shown(sorted(unknown)[0])}", hint="Pooling and Normalize are known"
        )
    mode = _mode(root, kinds["Pooling"].get("path")) if "Pooling" in kinds else "mean"
    return Pooling(mode, "Normalize" in kinds, most)


def _modules(root: Path) -> list[dict[str, Any]]:
    import json  # noqa: PLC0415

    try:
        value = json.loads(read_bytes(root, "modules.json"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError("modules.json is no JSON", where=root.name) from error
    if not isinstance(value, list) or not all(isinstance(m, dict) for m in value):
        raise CheckpointError("modules.json is no list of modules", where=root.name)
    return value


def _mode(root: Path, name: Any) -> str:
    """The pooling that a folder inside of the model's says. Raises CheckpointError, ConfigError."""
    inside = isinstance(name, str) and is_plain_name(name)
    if not inside or not (root / name).resolve().is_relative_to(root.resolve()):
        raise CheckpointError(f"{shown(name)} is no folder of the model", where="modules.json")
    config = read_json_object(root / name, "config.json")
    chosen = [key for key, value in config.items() if key.startswith("pooling_mode") and value]
    known = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
    if len(chosen) != 1 or chosen[0] not in known:
        raise ConfigError(
            f"pooling {shown(chosen)}", where=name, hint="mean_tokens and cls_token are known"
        )
    return known[chosen[0]]


class Encoder(nn.Module):
    """(input_ids, attention_mask), both [batch, tokens] int64, to embeddings [batch, width]."""

    def __init__(self, model: nn.Module, pooling: Pooling) -> None:
        super().__init__()
        self.model, self.pooling = model, pooling

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        """Vectors of whole texts; what the mask leaves out does not count."""
        hidden = self.model(input_ids, attention_mask)
        if hidden.dim() == 3:
            hidden = self._pool(hidden, attention_mask)
            if self.pooling.normalise:
                hidden = hidden / hidden.norm(dim=-1, keepdim=True).clamp_min(1e-12)
        return {"embeddings": hidden}

    def _pool(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        if self.pooling.mode == "cls":
            return hidden[:, 0]
        mask = attention_mask.to(hidden.dtype)[..., None]
        return (hidden * mask).sum(1) / mask.sum(1).clamp_min(1e-9)


class _Transformers(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask, return_dict=False)[0]


def unknown_inputs(program: Any) -> list[SitscError]:
    """Errors about inputs of an ONNX encoder that are not known."""
    return [
        UnsupportedModelError(
            f"input {shown(item.name)} is not known", hint=f"{', '.join(INPUTS)} are, of an encoder"
        )
        for item in program.file.inputs
        if item.name not in INPUTS
    ]


class _Onnx(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        for problem in unknown_inputs(model.program):
            raise problem
        self.model = model
        names = model.program.file.outputs
        self.index = next(names.index(n) for n in (*POOLED, *HIDDEN) if n in names)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        known = (input_ids, attention_mask, torch.zeros_like(input_ids))
        values = dict(zip(INPUTS, known, strict=True))
        inputs = {i.name: values[i.name].to(i.dtype) for i in self.model.program.file.inputs}
        return self.model(inputs)[self.index]


def load_encoder(checkpoint: Checkpoint, allow: frozenset[str]) -> Encoder:
    """The module of an encoder with its weights in float32. Raises SitscError."""
    most = int(checkpoint.config.get("max_position_embeddings") or _MOST_TOKENS)
    pooling = read_pooling(checkpoint.root, most)
    if checkpoint.program is not None:
        from sitsc.frontend.onnx_module import OnnxModule  # noqa: PLC0415

        read = {name: checkpoint.read(name) for name in checkpoint.tensors}
        return Encoder(_Onnx(OnnxModule(checkpoint.program, torch.float32, read)), pooling).eval()
    return Encoder(_Transformers(_transformers(checkpoint, allow)), pooling).eval()


def _transformers(checkpoint: Checkpoint, allow: frozenset[str]) -> nn.Module:
    """The model with the checkpoint's weights; every key and tensor is used or known."""
    for problem in key_problems(checkpoint.config, allow):
        raise problem
    model: Any = build(checkpoint.config)
    for problem in tensor_uses(model, checkpoint)[1]:
        raise problem
    own = own_names(checkpoint)
    model.to_empty(device="cpu")
    values = {
        name: checkpoint.read(own[name]).float().clone() for name, _ in model.named_parameters()
    }
    model.load_state_dict(values, strict=False)
    for name, buffer in model.named_buffers():
        rising = name.endswith("position_ids")
        buffer.copy_(torch.arange(buffer.shape[-1]) if rising else torch.zeros_like(buffer))
    return model
