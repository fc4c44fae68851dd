"""The sampling kernels at a real vocabulary: `python -m tests.gpu.sampling_cases DIR [SM]` compiles
them for test_sampling_gpu.py where Triton is, without a GPU.
"""

import sys
from pathlib import Path

import torch

from sitsc.codegen.triton_source import KernelSource
from sitsc.core.sampling import SamplingOptions
from tests.sampling_checks import Case, DeviceRows

VOCABULARY, EOS = 128256, (128001, 128008, 128009)


def drawing(**options: float) -> SamplingOptions:
    """Options of a row that draws."""
    return SamplingOptions(**({"temperature": 1.0} | options))  # pyright: ignore[reportArgumentType]


CASES = {
    "plain": Case(SamplingOptions()),
    "penalty": Case(SamplingOptions(repetition_penalty=1.3), prompt=tuple(range(0, 4000, 7))),
    "min_tokens": Case(SamplingOptions(min_tokens=5)),
    "mask": Case(SamplingOptions(), allowed=tuple(range(11, 128256, 997))),
    "temperature": Case(drawing(), seed=1),
    "top_k": Case(drawing(top_k=50), seed=2),
    "top_p": Case(drawing(top_p=0.9), seed=3),
    "top_k, top_p": Case(drawing(top_k=50, top_p=0.9), seed=4),
    "top_k 5000": Case(drawing(top_k=5000, temperature=2.0), seed=5),
    "top_p 0.99, flat": Case(drawing(top_p=0.99, temperature=5.0), seed=6),
    "min_p": Case(drawing(min_p=0.02, temperature=1.5), seed=7),
    "cold": Case(drawing(temperature=0.1, top_k=50), seed=8),
    "all": Case(
        drawing(top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.1, min_tokens=3),
        allowed=tuple(range(0, 128256, 3)),
        prompt=tuple(range(0, 3000, 3)),
        seed=9,
    ),
}


def scores(kind: str, rows: int, seed: int = 0) -> torch.Tensor:
    """Logits [rows, VOCABULARY] on the CPU: of random weights, or peaked as a trained model's."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(rows, VOCABULARY, generator=generator)
    if kind == "flat":
        return made
    heads = torch.randint(VOCABULARY, (rows, 100), generator=generator)
    high = 14 * torch.rand(rows, 100, generator=generator)
    return (made * 2.5).scatter_add_(1, heads, high)


def all_sources(sm: int) -> list[KernelSource]:
    """The kernels of the tests; dependent launch from sm_90 on."""
    rows = DeviceRows(VOCABULARY, [CASES["plain"]], eos_ids=EOS)
    return rows.sources(pdl=sm >= 90)


def main(folder: Path, sm: int) -> None:
    """Compile for one architecture and say what was written."""
    from sitsc.codegen.aot import compile_kernels  # noqa: PLC0415  (not where the GPU is)

    for meta in compile_kernels(all_sources(sm), sm, folder):
        print(f"{meta.function}: {meta.registers} registers, {meta.shared_bytes} B")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 90)
