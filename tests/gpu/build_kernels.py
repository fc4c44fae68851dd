"""Writes the kernels of the GPU tests to a folder: `python -m tests.gpu.build_kernels DIR [SM]`.

They are built where Triton is, without a GPU, and tested where the GPU is, without Triton.
"""

import sys
from pathlib import Path

from tests import cuda_kernels


def main(folder: Path, sm: int) -> None:
    """Compile for one architecture and say what was written."""
    for name, (cubin, meta) in cuda_kernels.compile_all(sm, folder).items():
        print(f"{name}: {len(cubin)} bytes, {meta.shared_bytes} bytes of shared memory")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 90)
