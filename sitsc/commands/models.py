"""`sitsc models`: the presets there are, and random checkpoints of them for tests."""

import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from sitsc.commands.output import (
    Json,
    busy,
    bytes_text,
    count_text,
    print_json,
    table_lines,
)
from sitsc.core.errors import OptionError

app = typer.Typer(help="Model presets and random checkpoints of them.")
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_COLUMNS = (
    ("layers", "num_hidden_layers"),
    ("hidden", "hidden_size"),
    ("heads", "num_attention_heads"),
    ("kv_heads", "num_key_value_heads"),
    ("intermediate", "intermediate_size"),
    ("experts", "num_experts"),
    ("vocabulary", "vocab_size"),
    ("context", "max_position_embeddings"),
)


@app.command("list")
def list_presets(as_json: Json = False) -> None:
    """List the presets with their dimensions and number of parameters."""
    from sitsc.models.presets import PRESETS  # noqa: PLC0415

    rows = [_row(name, config) for name, config in PRESETS.items()]
    if as_json:
        print_json({"presets": rows})
        return
    header = ["preset", "parameters", *(label for label, _ in _COLUMNS), "tied"]
    cells = [
        [row["name"], count_text(row["parameters"])]
        + [str(row[label]) for label, _ in _COLUMNS]
        + ["yes" if row["tied"] else "no"]
        for row in rows
    ]
    print("\n".join(table_lines([header, *cells])))


def _row(name: str, config: dict[str, Any]) -> dict[str, Any]:
    from sitsc.models.parameters import parameter_shapes  # noqa: PLC0415

    parameters = sum(math.prod(shape) for shape in parameter_shapes(config).values())
    row: dict[str, Any] = {"name": name, "parameters": parameters}
    row |= {label: config.get(key, 0) for label, key in _COLUMNS}
    return row | {"family": config["model_type"], "tied": config["tie_word_embeddings"]}


@app.command("random")
def write_random_checkpoint(
    preset: Annotated[str, typer.Argument(help="A name of sitsc models list.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="New folder.")],
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    layers: Annotated[int | None, typer.Option(help="Cut the model to so many layers.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same bytes.")] = 0,
    headers_only: Annotated[
        bool, typer.Option("--headers-only", help="Real headers over a hole: takes no disk.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write a checkpoint of PRESET with random weights."""
    if layers is not None and layers < 1:
        raise OptionError(f"--layers {layers} is not allowed", hint="1 or more")
    settings = {"seed": seed, "dtype": _SHORT.get(dtype, dtype), "layers": layers}
    with busy("writing"):
        written = _write(preset, out, settings | {"headers_only": headers_only})
    nbytes = sum(path.stat().st_size for path in written.iterdir())
    if as_json:
        print_json({"folder": str(written), "preset": preset, "bytes": nbytes, **settings})
    else:
        print(f"{written}  {preset}, random weights, {bytes_text(nbytes)}")


def _write(preset: str, out: Path, settings: dict[str, Any]) -> Path:
    """Write to a temporary folder beside `out`, then move: whole or not at all."""
    from sitsc.core.artifact import disk_errors  # noqa: PLC0415  (imports torch)
    from sitsc.models.random_checkpoint import write_random  # noqa: PLC0415

    if os.path.lexists(out):
        raise OptionError(f"{out} exists already", hint="choose another -o, or remove it first")
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}.partial-"))
        try:
            os.rename(write_random(preset, work / "checkpoint", **settings), out)
        except ValueError as error:
            raise OptionError(str(error), hint="see sitsc models list") from error
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return out
