"""Reading the kernels that build_kernels.py wrote, where there is no compiler."""

from pathlib import Path

from sitsc.core.kernel_meta import KernelMeta, kernel_folder, read_kernel_meta


def read_kernels(folder: Path, sm: int) -> dict[str, tuple[bytes, KernelMeta]]:
    """Cubin and metadata by name: the function's, and the size of a matrix product."""
    found: dict[str, tuple[bytes, KernelMeta]] = {}
    for path in sorted((folder / kernel_folder(sm)).glob("*.cubin")):
        meta = read_kernel_meta(path.with_suffix(".json").read_text(), path.name)
        size = {32: "small_", 64: "large_"}.get(int(meta.constants.get("BM", 0)), "")
        found[size + meta.function] = (path.read_bytes(), meta)
    assert found, f"no kernels of sm_{sm} in {folder}"
    return found
