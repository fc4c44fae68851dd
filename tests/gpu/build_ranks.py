"""Artifacts of one small model for one, two and four ranks: `python -m tests.gpu.build_ranks DIR`.

Needs no GPU; test_ranks_gpu.py reads the folder (SITSC_GPU_RANKS).
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

from sitsc.core.options import CompileOptions

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = CONFIG | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
# (tp, pp, ep) by name; those of experts are compared with "experts", all others with "one".
DEGREES = {"one": (1, 1, 1), "tp2": (2, 1, 1), "pp2": (1, 2, 1), "tp2pp2": (2, 2, 1)}
DEGREES |= {"experts": (1, 1, 1), "experts_tp2ep2": (2, 1, 2)}


def build(folder: Path, target: str = "h200") -> None:
    """Compile the same weights for each of DEGREES."""
    from sitsc.models.random_checkpoint import write_random  # noqa: PLC0415  (what compiling needs)
    from sitsc.pipeline import compile_model  # noqa: PLC0415  (as above)

    with tempfile.TemporaryDirectory() as place:
        dense = write_random(CONFIG, Path(place) / "dense")
        experts = write_random(EXPERTS, Path(place) / "experts")
        for name, (tp, pp, ep) in DEGREES.items():
            model = experts if name.startswith("experts") else dense
            options = CompileOptions(
                target=target, tp=tp, pp=pp, ep=ep, max_batch=16, max_context=512
            )
            compile_model(model, folder / name, options)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
