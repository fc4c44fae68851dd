"""`sitsc export`: an artifact as a file that other programs run."""

from pathlib import Path
from typing import Annotated

import typer

from sitsc.commands.output import Json, bytes_text, phases, print_json
from sitsc.core.errors import OptionError


def export(
    artifact: Annotated[Path, typer.Argument(help="The folder that sitsc compile wrote.")],
    onnx: Annotated[bool, typer.Option("--onnx", help="As an ONNX model.")] = False,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="The file to write; default NAME.onnx.")
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="The checkpoint of an artifact without its weights.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the graph of ARTIFACT with its weights; those of 512 MiB and more beside it."""
    if not onnx:
        raise OptionError("name the format to export to", hint="--onnx")
    from sitsc.core.artifact import open_artifact  # noqa: PLC0415  (imports torch)
    from sitsc.export import export_onnx  # noqa: PLC0415
    from sitsc.runtime.checkpoint_weights import outside_rows  # noqa: PLC0415

    opened = open_artifact(artifact)
    place = out or Path(f"{artifact.resolve().name.removesuffix('.sitsc')}.onnx")
    rows = outside_rows(opened, weights)
    with phases() as shown:
        written = export_onnx(opened, place, rows, lambda share: shown.report("weights", share))
    sizes = {str(path): path.stat().st_size for path in written}
    if as_json:
        print_json({"files": sizes})
    else:
        print("\n".join(f"{path}: {bytes_text(size)}" for path, size in sizes.items()))
