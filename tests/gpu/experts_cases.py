"""Mixture-of-experts layers at real shapes, with the tiles of the rule for an H200."""

from tests.experts_checks import Experts, ExpertsCheck
from tests.kernel_checks import KernelCheck

QWEN3 = Experts(128, 8, 2048, 768)
MIXTRAL = Experts(8, 2, 4096, 14336)
GPT_OSS = Experts(32, 4, 2880, 2880, True, "swiglu_clamped", route={"scoring": "softmax_chosen"})
_SIGMOID = {"scoring": "sigmoid", "groups": 8, "group_top": 4, "scaling": 2.5}
DEEPSEEK = Experts(256, 8, 1024, 512, residual=False, route=_SIGMOID)


def experts_checks() -> dict[str, KernelCheck]:
    """Every check by name."""
    found: dict[str, KernelCheck] = {
        f"experts of qwen3, {tokens} tokens": ExpertsCheck(QWEN3, tokens) for tokens in (1, 7, 64)
    }
    return found | {
        "experts of qwen3, 1000 tokens": ExpertsCheck(QWEN3, 1000, idle=24, y_dtype="bf16"),
        "experts of mixtral, 1 token": ExpertsCheck(MIXTRAL, 1),
        "experts of mixtral, 500 tokens": ExpertsCheck(MIXTRAL, 500, y_dtype="bf16"),
        "experts of gpt-oss, 3 tokens": ExpertsCheck(GPT_OSS, 3, idle=1),
        "experts in groups, 33 tokens": ExpertsCheck(DEEPSEEK, 33, correction=True),
    }
