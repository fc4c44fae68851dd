"""sitsc.export: artifacts as files of other programs. Reads artifacts; needs no compiler."""

from collections.abc import Callable
from pathlib import Path

from sitsc.core.artifact import Artifact
from sitsc.core.errors import OptionError
from sitsc.core.weights import ReadRows, materialise


def export_onnx(
    artifact: Artifact,
    out: Path,
    rows: ReadRows | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> list[Path]:
    """Write an artifact as an ONNX model; the files that were written, data first.

    `rows` reads the checkpoint of an artifact whose weights lie outside. Raises SitscError.
    """
    try:
        from sitsc.export.onnx_export import write_onnx  # noqa: PLC0415  (needs onnx)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("onnx", "google"):
            raise
        raise OptionError(
            "exporting needs the package onnx", hint="pip install onnx (or sitsc[compile])"
        ) from error
    read = None if rows is None else lambda spec: materialise(spec, rows)
    return write_onnx(artifact, out, read, progress)
