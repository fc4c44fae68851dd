"""Checks of text encoders of transformers (BERT): keys of the config and tensors, each by a rule.

In: an opened checkpoint. Out: uses and problems, all of them; `encoder.load_encoder` raises the
first, `encoder_lint` shows the whole. Reads headers only.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from sitsc.core.errors import CheckpointError, ConfigError, SitscError, UnsupportedModelError
from sitsc.frontend.checkpoint_types import Checkpoint
from sitsc.frontend.config_knowledge import knowledge, refuse_unknown
from sitsc.frontend.safe_files import shown
from sitsc.frontend.tensor_lint import kind_problems

# The one value of a key of transformers that is computed.
ONLY: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": ("absolute", None),
    "is_decoder": (False, None),
    "add_cross_attention": (False, None),
}
INERT = ("architectures", "gradient_checkpointing", "classifier_dropout")
INERT += ("attention_probs_dropout_prob", "hidden_dropout_prob", "initializer_range")
RULES = {
    "pooler.": "the pooler is no part of the vectors",
    "cls.": "the head for masked words is no part of the vectors",
    "embeddings.position_ids": "positions are counted",
}


def key_use(key: str, value: Any, declared: set[str]) -> str:
    """As `config_knowledge.use_of`, of an encoder."""
    if key in ONLY:
        return "inert at this value" if value in ONLY[key] else "wrong value"
    if key in INERT or key in knowledge()["common"]["inert"]:
        return "inert"
    return "consumed" if key in declared or key in ("dtype", "torch_dtype") else "unknown"


def declared_keys(kind: str) -> set[str]:
    """The keys that transformers' config class of a family declares."""
    from transformers import AutoConfig  # noqa: PLC0415  (heavy)

    return {*AutoConfig.for_model(kind).to_dict(), "model_type"}


def key_problems(config: dict[str, Any], allow: frozenset[str]) -> Iterator[SitscError]:
    """Errors about keys of a config."""
    declared = declared_keys(config["model_type"])
    for key, value in config.items():
        use = key_use(key, value, declared)
        if use == "wrong value":
            only = " or ".join(repr(item) for item in ONLY[key])
            yield ConfigError(
                f"{key} = {shown(value)} cannot be used",
                where="config.json",
                hint=f"only {only}: an encoder sees all tokens, at learned positions",
            )
        if use == "unknown":
            try:
                refuse_unknown(key, value, allow)
            except ConfigError as error:
                yield error


def build(config: dict[str, Any]) -> nn.Module:
    """The model of a config without weights, on the meta device. Raises UnsupportedModelError."""
    from transformers import AutoConfig, AutoModel  # noqa: PLC0415  (heavy)

    kind = config["model_type"]
    given = {k: v for k, v in config.items() if k not in ("dtype", "torch_dtype", "model_type")}
    try:
        parsed = AutoConfig.for_model(kind, **given)
        with torch.device("meta"):
            return AutoModel.from_config(
                parsed, add_pooling_layer=False, attn_implementation="sdpa", dtype=torch.float32
            )
    except Exception as error:  # transformers checks values by many classes
        text = " ".join(str(error).split())[:200]
        raise UnsupportedModelError(f"{kind} cannot be built: {text}") from error


def own_names(checkpoint: Checkpoint) -> dict[str, str]:
    """Names of the tensors without the family's prefix, and as they are in the file."""
    kind = checkpoint.config["model_type"]
    return {name.removeprefix(f"{kind}."): name for name in checkpoint.tensors}


def tensor_uses(
    model: nn.Module, checkpoint: Checkpoint
) -> tuple[dict[str, str], list[SitscError]]:
    """(tensor → rule by which it is left out, errors): each is used or known by a rule."""
    own, left_out = own_names(checkpoint), {}
    wanted = {name: tuple(value.shape) for name, value in model.named_parameters()}
    errors: list[SitscError] = []
    for name, shape in wanted.items():
        if name not in own or checkpoint.tensors[own[name]].shape != shape:
            what = f"tensor {name} of shape {list(shape)} is not in the checkpoint"
            errors.append(CheckpointError(what, where=checkpoint.root.name))
        else:
            errors += kind_problems(checkpoint.tensors[own[name]])
    for name, stored in own.items():
        if name in wanted:
            continue
        rule = next((rule for start, rule in RULES.items() if name.startswith(start)), "")
        if rule:
            left_out[stored] = rule
        else:
            where = checkpoint.root.name
            errors.append(CheckpointError(f"tensor {shown(name)} has no use", where=where))
    return left_out, errors
