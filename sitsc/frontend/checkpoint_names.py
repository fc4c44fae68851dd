"""What checkpoints call their tensors where transformers' modules call them otherwise.

In: a name in the module and the model_type. Out: the name on disk. Each kind listed here is saved
by transformers, opened and compared in tests/frontend/test_other_families.py or has an entry.
"""

# Pairs (in the module, on disk) of a kind, each applied to what the one before has made.
_RENAMED: dict[str, tuple[tuple[str, str], ...]] = {
    "ernie4_5_moe": ((".mlp.gate.moe_statics.", ".mlp.moe_statics."),),
    "exaone": (
        ("model.embed_tokens.", "transformer.wte."),
        ("model.layers.", "transformer.h."),
        ("model.norm.", "transformer.ln_f."),
        (".self_attn.o_proj.", ".self_attn.out_proj."),
        (".self_attn.", ".attn.attention."),
        (".input_layernorm.", ".ln_1."),
        (".post_attention_layernorm.", ".ln_2."),
        (".mlp.gate_proj.", ".mlp.c_fc_0."),
        (".mlp.up_proj.", ".mlp.c_fc_1."),
        (".mlp.down_proj.", ".mlp.c_proj."),
    ),
    "exaone_moe": ((".mlp.gate.e_score_correction_bias", ".mlp.e_score_correction_bias"),),
    "gpt_neox": (("lm_head.", "embed_out."),),
    "granitemoe": (
        (".experts.gate_up_proj", ".input_linear.weight"),
        (".experts.down_proj", ".output_linear.weight"),
        (".block_sparse_moe.router.weight", ".block_sparse_moe.router.layer.weight"),
    ),
    "mimo_v2_flash": ((".self_attn.sinks", ".self_attn.attention_sink_bias"),),
    "minimax_m2": ((".mlp.", ".block_sparse_moe."),),
    "mixtral": ((".mlp.", ".block_sparse_moe."),),
    "phimoe": ((".mlp.router.", ".mlp.gate."), (".mlp.", ".block_sparse_moe.")),
}
_RENAMED["granitemoeshared"] = _RENAMED["granitemoe"]

# How gate, up and down of one expert are called.
_PLAIN_NAMES = ("gate_proj", "up_proj", "down_proj")
_NUMBERED = ("w1", "w3", "w2")
_EXPERT_NAMES = {"minimax_m2": _NUMBERED, "mixtral": _NUMBERED, "phimoe": _NUMBERED}
# Kinds with one tensor for all experts, [experts, out, in], gate above up.
_STACKED = ("granitemoe", "granitemoeshared")


def renamed(name: str, kind: str) -> str:
    """The checkpoint's name of a parameter of a model of `kind`."""
    for old, new in _RENAMED.get(kind, ()):
        name = name.replace(old, new)
    return name


def is_renamed(kind: str) -> bool:
    """Whether it is known here what checkpoints of `kind` call otherwise."""
    return kind in _RENAMED


def expert_names(kind: str) -> tuple[str, str, str]:
    """What gate, up and down of one expert are called."""
    return _EXPERT_NAMES.get(kind, _PLAIN_NAMES)


def experts_in_one(kind: str) -> bool:
    """Whether one tensor holds the matrices of all experts."""
    return kind in _STACKED
