"""Text encoders: token ids and a mask to one vector a text, as a module with real weights.

In: a checkpoint of BERT, or an ONNX graph of an encoder, and what its folder says of pooling
(modules.json of sentence-transformers). Out: a module of (input_ids, attention_mask).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sitsc.core.errors import CheckpointError, ConfigError, UnsupportedModelError
from sitsc.frontend.checkpoint_types import Checkpoint
from sitsc.frontend.config_knowledge import knowledge, refuse_unknown
from sitsc.frontend.safe_files import is_plain_name, read_bytes, read_json_object, shown

FAMILIES = ("bert",)
HIDDEN = ("last_hidden_state", "token_embeddings")
POOLED = "sentence_embedding"
_SKIPPED = ("pooler.", "cls.", "embeddings.position_ids")
_MOST_TOKENS = 512
_ABSOLUTE = {"position_embedding_type": "absolute"}  # the only one that is computed


@dataclass(frozen=True, slots=True)
class Pooling:
    """How token vectors become one: "mean" over the mask or "cls"; then to length one or not."""

    mode: str = "mean"
    normalise: bool = True
    max_tokens: int = _MOST_TOKENS


def is_encoder(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is an encoder that is compiled to give vectors."""
    if checkpoint.program is not None:
        return any(name in (*HIDDEN, POOLED) for name in checkpoint.program.file.outputs)
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


class _Onnx(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        names = model.program.file.outputs
        self.index = next(names.index(n) for n in (POOLED, *HIDDEN) if n in names)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        known = {"input_ids": input_ids, "attention_mask": attention_mask}
        known["token_type_ids"] = torch.zeros_like(input_ids)
        inputs = {}
        for item in self.model.program.file.inputs:
            if item.name not in known:
                raise UnsupportedModelError(
                    f"input {shown(item.name)} is not known",
                    hint="input_ids, attention_mask and token_type_ids are, for an encoder",
                )
            inputs[item.name] = known[item.name].to(item.dtype)
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
    from transformers import AutoConfig, AutoModel  # noqa: PLC0415  (heavy)

    config = {k: v for k, v in checkpoint.config.items() if k not in ("dtype", "torch_dtype")}
    kind = config.pop("model_type")
    declared = AutoConfig.for_model(kind).to_dict()
    inert = {*knowledge()["common"]["inert"], "architectures", "gradient_checkpointing"}
    for key, value in config.items():
        if _ABSOLUTE.get(key) == value:
            continue
        if key not in declared and key not in inert:
            refuse_unknown(key, value, allow)
    if config.get("is_decoder"):
        raise UnsupportedModelError("an encoder with is_decoder is a decoder", where="config.json")
    try:
        parsed = AutoConfig.for_model(kind, **config)
        with torch.device("meta"):
            model = AutoModel.from_config(
                parsed, add_pooling_layer=False, attn_implementation="sdpa", dtype=torch.float32
            )
    except Exception as error:  # transformers checks values by many classes
        text = " ".join(str(error).split())[:200]
        raise UnsupportedModelError(f"{kind} cannot be built: {text}") from error
    return _filled(model, checkpoint, kind)


def _filled(model: Any, checkpoint: Checkpoint, kind: str) -> nn.Module:
    """The model with the checkpoint's weights; every tensor is used or of a head not needed."""
    own = {name.removeprefix(f"{kind}."): name for name in checkpoint.tensors}
    wanted = {name: value.shape for name, value in model.named_parameters()}
    for name, shape in wanted.items():
        if name not in own or checkpoint.tensors[own[name]].shape != tuple(shape):
            raise CheckpointError(
                f"tensor {name} of shape {list(shape)} is not in the checkpoint",
                where=checkpoint.root.name,
            )
    for name in own:
        if name not in wanted and not name.startswith(_SKIPPED):
            raise CheckpointError(f"tensor {shown(name)} has no use", where=checkpoint.root.name)
    model.to_empty(device="cpu")
    values = {name: checkpoint.read(own[name]).float().clone() for name in wanted}
    model.load_state_dict(values, strict=False)
    for name, buffer in model.named_buffers():
        rising = name.endswith("position_ids")
        buffer.copy_(torch.arange(buffer.shape[-1]) if rising else torch.zeros_like(buffer))
    return model
