"""Tiny models whose decoder is one of several parts, saved as transformers saves them."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_TEXT: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "depth": 1,
    "embed_dim": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
    "mlp_ratio": 2,
}
_IMAGE_IDS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index") + (
    "boi_token_index",
    "eoi_token_index",
    "vision_start_token_id",
    "vision_end_token_id",
)
_SLIDING = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}


def _mrope(*section: int, **more: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": list(section)}
    return {"rope_parameters": rope | more}


# Outer model_type and what its decoder has beyond the sizes.
MODELS: dict[str, dict[str, Any]] = {
    "gemma3": {"query_pre_attn_scalar": 24} | _SLIDING,
    "llava": {"model_type": "llama"},
    "llava_next": {"model_type": "mistral", "sliding_window": 16},
    "llava_onevision": {},
    "vipllava": {},
    "mistral3": {},
    "qwen2_vl": _mrope(2, 3, 3),
    "qwen2_5_vl": _mrope(2, 3, 3),
    "qwen3_vl": _mrope(4, 2, 2, mrope_interleaved=True),
    "internvl": {},
    "idefics3": {},
    "smolvlm": {},
    "aya_vision": _SLIDING | {"logit_scale": 0.25},
    "cohere2_vision": _SLIDING | {"logit_scale": 0.25},
}


def nested_config(kind: str) -> Any:
    """The configuration of a tiny model of `kind`."""
    import transformers  # noqa: PLC0415  (seconds)

    usual = transformers.AutoConfig.for_model(kind)
    vision = usual.vision_config
    parts: dict[str, Any] = {
        "text_config": _TEXT | {"model_type": usual.text_config.model_type} | MODELS[kind],
        "vision_config": {"model_type": vision.model_type}
        | {key: value for key, value in _VISION.items() if hasattr(vision, key)},
    }
    ids = {key: 3 for key in _IMAGE_IDS if hasattr(usual, key)}
    return transformers.AutoConfig.for_model(kind, **parts, **ids)


def save_nested(kind: str, folder: Path) -> Any:
    """Save a tiny random model and return it; norms are away from one."""
    import transformers  # noqa: PLC0415  (seconds)

    torch.manual_seed(0)
    model: Any = transformers.AutoModelForImageTextToText.from_config(
        nested_config(kind), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            vector = parameter.ndim == 1
            scale = 0.3 if vector else parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn_like(parameter) * scale + float(vector))
    model.save_pretrained(folder)
    return model


def logits_of(model: Any, ids: list[int]) -> Tensor:
    """Logits [ids, vocabulary] of the whole model, given text alone."""
    mask = torch.ones(1, len(ids), dtype=torch.long)
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), attention_mask=mask).logits[0]
