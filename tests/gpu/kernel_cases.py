"""The CUDA kernels at real shapes: what is compiled for the GPU tests and how each is checked.

`python -m tests.gpu.kernel_cases DIR [SM]` compiles all of them where Triton is, without a GPU.
Names say model, operation, tokens or sequences, and tile.
"""

import sys
from pathlib import Path
from typing import Any

from sitsc.codegen.cuda_attention import Heads
from sitsc.codegen.cuda_linear import Linear
from sitsc.codegen.triton_source import KernelSource
from tests.attention_checks import DecodeCheck, RaggedCheck
from tests.gpu.experts_cases import experts_checks
from tests.gpu.hopper_cases import hopper_checks
from tests.gpu.scaled_cases import scaled_checks
from tests.gpu.wide_cases import wide_checks
from tests.kernel_checks import (
    AdvanceCheck,
    GatherCheck,
    GluCheck,
    KernelCheck,
    LinearCheck,
    PlaceCheck,
    RmsNormCheck,
    RopeTableCheck,
    SpreadNormCheck,
    Tile,
)

EPS = 1e-5
VOCABULARY = 128256


def _linears(hidden: int, inner: int, qkv: int) -> dict[str, Linear]:
    """The linear operations of a Llama of these sizes."""
    return {
        "qkv": Linear(qkv, hidden, norm=True, eps=EPS),
        "o": Linear(hidden, hidden, epilogue="residual"),
        "gate_up": Linear(inner, hidden, norm=True, eps=EPS, epilogue="glu"),
        "down": Linear(hidden, inner, epilogue="residual"),
        "lm_head": Linear(VOCABULARY, hidden, norm=True, eps=EPS, out_dtype="fp32"),
    }


MODELS = {"8b": _linears(4096, 14336, 6144), "1b": _linears(2048, 8192, 3072)}
HEADS = {
    "8b": Heads(32, 8, 128, 64, 128**-0.5),
    "1b": Heads(32, 8, 64, 64, 64**-0.5),
}
# Tiles that won on an H200, or stand for another way through the same template.
GEMV: dict[str, dict[str, tuple[Tile, int]]] = {
    "8b": {
        "qkv": ({"block_n": 2, "block_k": 4096}, 396),
        "o": ({"block_n": 4, "block_k": 4096, "num_warps": 8}, 264),
        "gate_up": ({"block_n": 2, "block_k": 4096, "num_warps": 8}, 256),
        "down": ({"block_n": 4, "block_k": 2048, "split": 7}, 75),
        "lm_head": ({"block_n": 2, "block_k": 4096}, 528),
    },
    "1b": {
        "qkv": ({"block_n": 4, "block_k": 2048, "stages": 5}, 264),
        "o": ({"block_n": 4, "block_k": 2048}, 264),
        "gate_up": ({"block_n": 4, "block_k": 2048, "stages": 3}, 342),
        "down": ({"block_n": 2, "block_k": 4096, "split": 2, "stages": 5}, 147),
        "lm_head": ({"block_n": 4, "block_k": 2048}, 526),
    },
}
MORE_GEMV: dict[str, tuple[str, Linear, int, Tile, int]] = {
    "8b down, all columns": (
        "gemv",
        MODELS["8b"]["down"],
        1,
        {"block_n": 2, "block_k": 2048, "num_warps": 8},
        132,
    ),
    "8b o, streamed": (
        "gemv",
        MODELS["8b"]["o"],
        2,
        {"block_n": 2, "block_k": 4096, "stages": 3},
        264,
    ),
    "8b qkv, walked": ("gemv_walk", MODELS["8b"]["qkv"], 1, {"block_n": 8, "block_k": 512}, 0),
    "8b qkv, 3 tokens": (
        "gemv",
        MODELS["8b"]["qkv"],
        3,
        {"block_n": 2, "block_k": 2048, "num_warps": 8},
        264,
    ),
    "odd shape": (
        "gemv",
        Linear(1537, 1000, True, EPS, 1.0, "glu", "gelu_tanh", True),
        1,
        {"block_n": 4, "block_k": 1024},
        132,
    ),
    "odd shape, gelu": (
        "gemv_walk",
        Linear(1537, 1000, epilogue="glu", activation="gelu_erf", bias=True),
        2,
        {"block_n": 4, "block_k": 512, "depth": 2},
        0,
    ),
}
SKINNY: dict[str, Tile] = {
    "qkv": {"block_n": 64, "block_k": 128, "split": 2, "stages": 4},
    "o": {"block_n": 64, "block_k": 128, "split": 4, "stages": 4},
    "gate_up": {"block_n": 64, "block_k": 128, "stages": 3},
    "down": {"block_n": 64, "block_k": 128, "split": 4, "stages": 4},
    "lm_head": {"block_n": 64, "block_k": 128, "stages": 3},
}


def _linear_checks() -> dict[str, KernelCheck]:
    found: dict[str, KernelCheck] = {}
    for model, tiles in GEMV.items():
        for name, (tile, programs) in tiles.items():
            op = MODELS[model][name]
            found[f"{model} {name}, 1 token"] = LinearCheck("gemv", op, 1, tile, programs)
    for name, (template, op, tokens, tile, programs) in MORE_GEMV.items():
        found[name] = LinearCheck(template, op, tokens, tile, programs)
    for name, tile in SKINNY.items():
        op = MODELS["8b"][name]
        for tokens, block_t, more in (
            (7, 16, {"ahead": True}),
            (31, 32, {"ahead": False, "prefetch_bytes": 1024}),
            (64, 64, {"ahead": name == "o", "stages": 4, "block_k": 64}),
        ):
            wanted = tile | {"block_t": block_t} | more
            found[f"8b {name}, {tokens} tokens"] = LinearCheck("skinny", op, tokens, wanted)
    odd = Linear(1537, 1000, True, EPS, 1.0, "glu", "relu", True)
    tile = {"block_n": 64, "block_k": 64, "block_t": 16, "split": 3, "stages": 3}
    found["odd shape, 5 tokens"] = LinearCheck("skinny", odd, 5, tile)
    found["odd shape, ahead"] = LinearCheck("skinny", odd, 16, tile | {"ahead": True})
    in_place = tile | {"split": 2, "ahead": True}
    op = Linear(1000, 1536, epilogue="residual")
    found["in place"] = LinearCheck("skinny", op, 9, in_place, in_place=True)
    return found


def _attention_checks() -> dict[str, KernelCheck]:
    split: dict[str, Any] = {"splits": 16, "merge": "reduce"}
    last: dict[str, Any] = {"splits": 16, "merge": "last", "share": 2}
    tile = {"block": 64, "stages": 4}
    mixed = ((0, 700), (1000, 1), (333, 129), (8191, 1), (0, 1))
    prefill = {"block_m": 128, "block_n": 64, "stages": 3}
    small = Heads(6, 2, 96, 16, 0.1, rope="interleaved", rotary_dim=64, angle_dtype="fp32")
    capped = Heads(16, 8, 256, 16, 1 / 16, window=1024, softcap=50.0)
    sinks = Heads(64, 8, 64, 16, 1 / 8, window=128, sinks=True)
    found: dict[str, KernelCheck] = {}
    for model, op in HEADS.items():
        found[f"{model} decode, short"] = DecodeCheck(op, (128, 5, 0, -1), tile)
        found[f"{model} decode, long"] = DecodeCheck(op, (8192, 77), tile, **split)
        found[f"{model} decode, merged"] = DecodeCheck(op, (8192, 64, 77, 700, -1), tile, **last)
        found[f"{model} ragged"] = RaggedCheck(op, mixed, prefill, padding=3)
    for name, op, block, rows in (
        ("80", Heads(40, 8, 80, 16, 0.1), 64, 64),
        ("112", Heads(10, 2, 112, 16, 0.1, rotary_dim=56), 64, 64),
        ("96 interleaved", small, 64, 64),
        ("256, window and cap", capped, 32, 64),
        ("sinks", sinks, 64, 128),
        ("no rope", Heads(8, 8, 64, 16, 0.125, rope="none"), 64, 64),
    ):
        narrow = {"block": block, "stages": 3}
        wide = {"block_m": rows, "block_n": block, "stages": 2}
        found[f"head dim {name}, decode"] = DecodeCheck(op, (2000, 63, 64, -1), narrow, **split)
        found[f"head dim {name}, merged"] = DecodeCheck(op, (2000, 63, 64, -1), narrow, **last)
        found[f"head dim {name}, ragged"] = RaggedCheck(op, mixed, wide, padding=1)
    return found


GLU = Linear(14336, 4096, True, EPS, 0.0, "glu", x_dtype="fp32")
SPREAD_TILE = {"ahead": True, "block_t": 8, "block_n": 64, "block_k": 128, "stages": 3}


def _row_checks() -> dict[str, KernelCheck]:
    return {
        "rms_norm": RmsNormCheck(130, 4096),
        "rms_norm with parts": RmsNormCheck(7, 2880, parts=4, offset=1.0),
        "norm of several programs": SpreadNormCheck(GLU, 8, SPREAD_TILE, blocks=8, parts=4),
        "norm of several programs, split": SpreadNormCheck(GLU, 7, SPREAD_TILE | {"split": 2}),
        "embedding": GatherCheck(64, VOCABULARY, 4096),
        "embedding, scaled": GatherCheck(3, 1000, 2304, scale=48.0),
        "rope table": RopeTableCheck((0, 1, 8191, 131071, 1048575, 77), 128),
        "rope table, interleaved": RopeTableCheck((5, 130000), 64, "interleaved", 1.2, "fp32"),
        "glu": GluCheck(130, 14336),
        "advance": AdvanceCheck(tuple(range(-1, 255))),
        "place": PlaceCheck(200, 8192),
    }


def all_checks() -> dict[str, KernelCheck]:
    """Every check by name."""
    found = _linear_checks() | _attention_checks() | _row_checks()
    return found | experts_checks() | scaled_checks()


def all_sources(sm: int) -> list[KernelSource]:
    """Every kernel that the checks launch on this architecture; dependent launch from sm_90 on."""
    checks = all_checks() | (hopper_checks() | wide_checks() if sm == 90 else {})
    found = [source for check in checks.values() for source in check.sources(sm >= 90)]
    return list({source.key(): source for source in found}.values())


def main(folder: Path, sm: int) -> None:
    """Compile for one architecture and say what was written."""
    from sitsc.codegen.aot import compile_kernels  # noqa: PLC0415  (not where the GPU is)

    metas = compile_kernels(all_sources(sm), sm, folder)
    for meta in metas:
        print(
            f"{meta.function} {meta.constants}: {meta.registers} registers, {meta.shared_bytes} B"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 90)
