"""Residual sums scaled for the next norm, and folded columns, at real shapes; see kernel_cases."""

from sitsc.codegen.cuda_linear import Linear
from tests.kernel_checks import KernelCheck, LinearCheck, Tile
from tests.scaled_checks import ScaledCheck, ScaledGatherCheck

EPS = 1e-5
FOLD: Tile = {"ahead": True, "fold": 2, "block_n": 32, "block_k": 128, "stages": 6}
GLU: Tile = {"ahead": True, "block_n": 64, "block_k": 128, "stages": 3}
STREAM: Tile = {"block_n": 4, "block_k": 2048, "stages": 3}
REGISTERS: Tile = {"block_n": 2, "block_k": 4096, "num_warps": 8}
WALK: Tile = {"block_n": 8, "block_k": 512}


def _sum(rows: int, columns: int) -> Linear:
    return Linear(rows, columns, epilogue="residual", out_dtype="fp32")


def _normed(rows: int, columns: int, offset: float = 0.0, epilogue: str = "store") -> Linear:
    return Linear(rows, columns, True, EPS, offset, epilogue, x_dtype="fp32")


def scaled_checks() -> dict[str, KernelCheck]:
    """Every check by name."""
    o, down, gate_up = _sum(4096, 4096), _sum(4096, 14336), _normed(14336, 4096, 0.0, "glu")
    small, one = {"block_t": 8}, ("gemv", "gemv")
    more = {"block_k": 256, "stages": 4, "block_t": 8}
    four = FOLD | small | {"block_n": 16, "fold": 4}
    found: dict[str, KernelCheck] = {
        "8b o scaled, 7 tokens": ScaledCheck(o, gate_up, 7, FOLD | small, GLU | small),
        "8b down scaled, 8 tokens": ScaledCheck(
            down, _normed(6144, 4096), 8, FOLD | more, GLU | small, in_place=True
        ),
        "8b o scaled, 16 tokens": ScaledCheck(
            o, gate_up, 16, FOLD | {"block_t": 16}, GLU | {"block_t": 16}
        ),
        "8b o scaled, folded 4 times": ScaledCheck(o, gate_up, 8, four, GLU | small),
        "3584 rows scaled": ScaledCheck(
            _sum(3584, 3584), _normed(4608, 3584, 1.0), 5, FOLD | small, GLU | small
        ),
        "1b o scaled, 1 token": ScaledCheck(
            _sum(2048, 2048), _normed(8192, 2048, 0.0, "glu"), 1, STREAM, STREAM, one, 256
        ),
        "1b down scaled, 1 token": ScaledCheck(
            _sum(2048, 8192),
            _normed(3072, 2048),
            1,
            {"block_n": 2, "block_k": 4096, "stages": 3},
            STREAM,
            one,
            342,
        ),
        "8b down scaled, 2 tokens": ScaledCheck(
            down, _normed(6144, 4096), 2, WALK, WALK, ("gemv_walk", "gemv_walk")
        ),
        "8b o scaled, registers": ScaledCheck(
            o, gate_up, 1, {"block_n": 2, "block_k": 4096}, REGISTERS, one, 264
        ),
        "embedding scaled": ScaledGatherCheck(8, 4096, 128, offset=1.0),
        "embedding scaled, 1 row": ScaledGatherCheck(1, 2048, 342, 48.0, out_dtype="bf16"),
        "8b down folded": LinearCheck("skinny", down, 8, FOLD | more, in_place=True),
        "8b gate_up folded": LinearCheck(
            "skinny", Linear(14336, 4096, epilogue="glu"), 8, FOLD | small | {"stages": 3}
        ),
    }
    return found
