"""The decoder of a model that has other parts too: its config and where its tensors lie.

In: a config.json with `text_config` (or an old flat one) and tensor headers. Out: the decoder's own
config, every key of its family filled in, and `Nested`. What other inputs than text need is left
out by named rules (sitsc/data/nested_keys.toml).
"""

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import Any

from torch import fx

from sitsc.core.errors import CheckpointError, ConfigError, SitscError, UnsupportedModelError
from sitsc.frontend.checkpoint_types import Nested, TensorInfo
from sitsc.frontend.config_knowledge import MODEL_TYPE, bad_value, knowledge, refuse_unknown
from sitsc.frontend.safe_files import shown

EMBEDDING = "embed_tokens.weight"
TIED = "tie_word_embeddings"
_MROPE = ("mrope_section", "mrope_interleaved")
_HEAD = {"logit_scale": 1.0, "logits_scaling": 1.0, "final_logit_softcapping": None}
_MOST_LAYERS = 4096


@cache
def nested_knowledge() -> dict[str, Any]:
    """The contents of nested_keys.toml."""
    return tomllib.loads((resources.files("sitsc") / "data" / "nested_keys.toml").read_text())


def is_nested(config: Mapping[str, Any]) -> bool:
    """Whether the decoder is a part of the model that a config describes."""
    if isinstance(config.get("text_config"), dict):
        return True
    entry = nested_knowledge()["models"].get(str(config.get("model_type")), {})
    return bool(entry.get("flat")) and "vision_config" in config


def open_nested(
    config: dict[str, Any], tensors: Mapping[str, TensorInfo]
) -> tuple[dict[str, Any], Nested]:
    """The decoder's config and place. Raises UnsupportedModelError, ConfigError, CheckpointError.

    Without tensors (a config alone) the names of the first layout stand for the file's.
    """
    entry = _entry(config)
    model, head = _layout(tensors)
    given = _given(config, entry)
    kind = given.get("model_type") or entry["text"]
    filled, remarks = _filled(str(kind), given)
    remarks += _plain_head(filled, str(config["model_type"]))
    filled[TIED] = _tied(config, given, entry, head in tensors)
    for key in ("dtype", "torch_dtype"):
        if config.get(key) is not None and given.get(key) is None:
            filled.pop("dtype", None)
            filled[key] = config[key]
    if config.get("eos_token_id") is not None:
        filled["eos_token_id"] = config["eos_token_id"]
    return filled, Nested(config, model, head, remarks)


def _entry(config: Mapping[str, Any]) -> dict[str, Any]:
    known, kind = nested_knowledge(), config.get("model_type")
    if not isinstance(kind, str) or kind not in known["models"]:
        because = known["refused"].get(kind) if isinstance(kind, str) else None
        raise UnsupportedModelError(
            f"model_type {shown(kind)} with its decoder in text_config is not supported",
            where="config.json",
            hint=because or f"supported: {', '.join(known['models'])}",
        )
    entry = known["models"][kind]
    names = config.get("architectures")
    if names is not None and names != [entry["architecture"]]:
        raise UnsupportedModelError(
            f"architectures is {shown(names)}", hint=f"supported: {entry['architecture']}"
        )
    return entry


def _layout(tensors: Mapping[str, TensorInfo]) -> tuple[str, str]:
    """(prefix of the decoder's tensors, name of its head) in the file."""
    layouts = nested_knowledge()["layouts"]
    found = [way for way in layouts if way["model"] + EMBEDDING in tensors]
    if tensors and len(found) != 1:
        raise CheckpointError(
            f"{len(found)} tensors could be the decoder's embedding",
            where="weights",
            hint=f"one of {', '.join(way['model'] + EMBEDDING for way in layouts)} is needed",
        )
    way = found[0] if found else layouts[0]
    head = next((name for name in way["head"] if name in tensors), way["head"][0])
    return way["model"], head


def _given(config: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    """The decoder's keys as the file has them."""
    text = config.get("text_config")
    if isinstance(text, dict):
        return dict(text)
    keys = nested_knowledge()["keys"]
    outer = set(keys["other_inputs"]) | {"architectures", "model_type", "text_config", TIED}
    return {key: value for key, value in config.items() if key not in outer}


def _filled(kind: str, given: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """All keys of the decoder as transformers' class of `kind` has them, and remarks."""
    layers = given.get("num_hidden_layers")
    if not MODEL_TYPE.fullmatch(kind):
        raise ConfigError(f"text_config.model_type is {shown(kind)}", where="config.json")
    if layers is not None and not (type(layers) is int and 0 < layers <= _MOST_LAYERS):
        raise ConfigError(f"text_config.num_hidden_layers is {shown(layers)}", where="config.json")
    from transformers import AutoConfig, logging  # noqa: PLC0415  (seconds)

    logging.set_verbosity_error()
    values = {key: value for key, value in given.items() if key != "model_type"}
    remarks = _plain_mrope(values)
    try:
        parsed = AutoConfig.for_model(kind, **json.loads(json.dumps(values)))
        filled = json.loads(parsed.to_json_string(use_diff=False))
    except Exception as error:  # transformers checks values in many ways and by many classes
        raise ConfigError(
            f"text_config cannot be read as {kind}: {' '.join(str(error).split())[:200]}",
            where="config.json",
        ) from error
    for key in ("architectures", "transformers_version"):
        filled.pop(key, None)
    if "dtype" not in given and "torch_dtype" not in given:
        filled.pop("dtype", None)
    filled["model_type"] = nested_knowledge()["same"].get(kind, kind)
    return filled, remarks


def _plain_mrope(values: dict[str, Any]) -> tuple[str, ...]:
    """Rope over three axes as plain rope: of text, all three are the token's own position."""
    found = False
    for key in ("rope_scaling", "rope_parameters"):
        entry = values.get(key)
        if not isinstance(entry, dict) or not any(part in entry for part in _MROPE):
            continue
        found = True
        entry = {k: v for k, v in entry.items() if k not in _MROPE}
        entry = {
            k: "default" if k in ("type", "rope_type") and v == "mrope" else v
            for k, v in entry.items()
        }
        plain = set(entry) <= {"type", "rope_type"} and set(entry.values()) <= {"default"}
        values[key] = None if plain and key == "rope_scaling" else entry
    said = "mrope is compiled as plain rope: all axes of a text's token have the same position"
    return (said,) if found else ()


def _plain_head(filled: dict[str, Any], kind: str) -> tuple[str, ...]:
    """Neutral values for what a decoder by itself does to logits: the whole model does not."""
    found = []
    for key, neutral in _HEAD.items():
        if filled.get(key) not in (None, neutral):
            filled[key] = neutral
            found.append(f"{key} is left out: logits of {kind} are those of its head alone")
    return tuple(found)


def _tied(
    config: Mapping[str, Any], given: Mapping[str, Any], entry: Mapping[str, Any], head: bool
) -> bool:
    """Whether embedding and head are one: as said anywhere, else by the file and the default."""
    said = [source[TIED] for source in (config, given) if isinstance(source.get(TIED), bool)]
    return any(said) if said else not head and bool(entry.get("tied"))


def outer_uses(nested: Nested) -> dict[str, str]:
    """Keys of the outer config with what becomes of them."""
    keys, common = nested_knowledge()["keys"], knowledge()["common"]
    flat = "text_config" not in nested.outer
    uses = {}
    for key, value in nested.outer.items():
        if key in keys["consumed"]:
            uses[key] = "consumed"
        elif key in keys["other_inputs"]:
            uses[key] = "not for text"
        elif key in common["inert"] or value is None:
            uses[key] = "inert"
        elif key in common["refused"]:
            uses[key] = "refused"
        elif value in common["only"].get(key, ()):
            uses[key] = "inert at this value"
        elif not flat:
            uses[key] = "unknown"
    return uses


def outer_problems(nested: Nested, allow: frozenset[str]) -> list[SitscError]:
    """A key of the outer config that nobody knows, unless `allow` names it."""
    found: list[SitscError] = []
    for key, use in outer_uses(nested).items():
        if use not in ("unknown", "refused"):
            continue
        if key in allow:
            continue
        try:
            if use == "refused":
                raise bad_value(key, nested.outer[key], knowledge()["common"]["refused"][key])
            refuse_unknown(key, nested.outer[key], allow)
        except SitscError as error:
            found.append(error)
    return found


def place_weights(graph: fx.Graph, nested: Nested) -> None:
    """Let the weights of a decoder's graph name the tensors of its file."""
    for node in graph.find_nodes(op="placeholder"):
        spec = node.meta.get("weight")
        if spec is not None:
            sources = tuple(replace(s, tensor=nested.name(s.tensor)) for s in spec.sources)
            node.meta["weight"] = replace(spec, sources=sources)


def ignored_part(name: str) -> str | None:
    """The rule that leaves out a tensor of another part than the decoder, if there is one."""
    return next((rule for rule, part in _ignored().items() if part.fullmatch(name)), None)


@cache
def _ignored() -> dict[str, re.Pattern[str]]:
    rules = nested_knowledge()["ignored"]
    return {
        rule: re.compile("|".join(re.sub(r"\.(?!\*)", r"\\.", part) for part in parts))
        for rule, parts in rules.items()
    }
