"""`sitsc tune`: candidates for a target's tile table, built without a GPU and measured on one."""

import contextlib
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sitsc.commands.output import Json, bytes_text, phases, print_json, table_lines
from sitsc.core.errors import ArtifactExistsError, OptionError

if TYPE_CHECKING:
    from sitsc.core.links import Link
    from sitsc.core.tiles import TileTable
    from sitsc.runtime.tune import SubjectResult

app = typer.Typer(help="Measure which kernels and tiles are best, and write a target's table.")
_SHOWN_DROPS = 3
_TOKENS = "1,2,4,8,16,32,64,128"


@app.command("build")
def build(
    target: Annotated[str, typer.Argument(help="What to compile for, such as h200.")],
    model: Annotated[str, typer.Option(help="A preset (sitsc models list) or a model folder.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="New folder.")],
    tokens: Annotated[str, typer.Option(help="Sequences of a step, 1 to 256.")] = _TOKENS,
    most: Annotated[int, typer.Option(help="Kernels for each layer and token count.")] = 24,
    tp: Annotated[int, typer.Option(help="For one of so many ranks that share the layers.")] = 1,
    table: Annotated[
        Path | None, typer.Option(help="Choices to begin with, else the target's own table.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compile candidate kernels for MODEL's decode steps; needs no GPU."""
    counts = _counts(tokens)
    if most < 1:
        raise OptionError(f"--most {most} is not allowed", hint="1 or more")
    if out.exists() and any(out.iterdir()):
        raise ArtifactExistsError(f"{out} is not empty", hint="choose another -o")
    with model_folder(model) as folder, phases() as shown:
        shown.report("open", 0.0)
        from sitsc.pipeline import build_candidates  # noqa: PLC0415  (imports torch: a second)

        begin = None if table is None else _table(table)
        made, refused = build_candidates(folder, target, counts, most, out, shown.report, begin, tp)
        shown.end()
    kernels = len(list(out.rglob("*.cubin")))
    found: dict[str, Any] = {
        "folder": str(out),
        "target": target,
        "layers": len(made.subjects),
        "tokens": list(counts),
        "kernels": kernels,
        "cases": sum(len(chain.cases) for chain in made.chains),
        "bytes": sum(path.stat().st_size for path in out.rglob("*") if path.is_file()),
        "refused": [str(error) for error in refused],
    }
    if as_json:
        print_json(found)
        return
    print(
        f"{out}  {kernels} kernels, {found['cases']} alternatives for {found['layers']} layers,"
        f" {bytes_text(found['bytes'])}; {len(refused)} left out"
    )
    for error in refused[:_SHOWN_DROPS]:
        print(f"  {error}")


@app.command("run")
def run(
    folder: Annotated[Path, typer.Argument(help="What sitsc tune build wrote.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The table; kept for other layers.")],
    seconds: Annotated[float, typer.Option(help="For the step of each token count.")] = 15.0,
    tokens: Annotated[str, typer.Option(help="Of these counts alone.")] = "",
) -> None:
    """Try the candidates in whole decode steps on this GPU, and write the best to a table."""
    from sitsc.runtime import tune  # noqa: PLC0415  (imports torch)

    def report(result: "SubjectResult") -> None:
        print("  ".join(_cells(result)), flush=True)
        for dropped in result.dropped[:_SHOWN_DROPS]:
            print(f"  dropped: {dropped}", flush=True)

    results = tune.run(folder, out, seconds, report, _counts(tokens) if tokens else ())
    print("\n".join(["", *table_lines([_HEADER, *map(_cells, results)], left=1)]))
    measured, dropped = sum(r.measured for r in results), sum(len(r.dropped) for r in results)
    print(f"{out}  {measured} candidates measured, {dropped} dropped")


@app.command("links")
def links(
    out: Annotated[Path, typer.Option("-o", "--out", help="The link's file, for --link.")],
    backend: Annotated[str, typer.Option(help="gloo or nccl; by default what there is.")] = "",
    ranks: Annotated[int, typer.Option(help="Processes; 0: every GPU, or 2 on a CPU.")] = 0,
    seconds: Annotated[float, typer.Option(help="For each collective and size.")] = 0.3,
    like: Annotated[
        str, typer.Option(help="Link to keep unmeasured figures of; by default the GPU's, or gloo.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Measure collectives between this machine's devices, and write latency and bandwidth.

    NCCL and gloo are measured; kernels of ours between GPUs keep the figures of the link --like.
    """
    import torch  # noqa: PLC0415

    from sitsc.core.disk import disk_errors  # noqa: PLC0415
    from sitsc.core.links import completed, link_text, load_link, measured_link  # noqa: PLC0415
    from sitsc.core.records import to_value  # noqa: PLC0415
    from sitsc.runtime.link_probe import GLOO, NCCL, measure_links  # noqa: PLC0415

    if not seconds > 0:
        raise OptionError(f"--seconds {seconds}", hint="more than 0")
    gpus = torch.cuda.device_count()
    backend = backend or (NCCL if gpus > 1 else GLOO)
    ranks = ranks or (gpus if backend == NCCL else 2)
    usual = load_link(like) if like else None  # refused before anything is measured
    points = measure_links(backend, ranks, seconds=seconds)
    source = f"measured by sitsc tune links: {backend}, {ranks} ranks, {_hardware(backend)}, "
    source += f"torch {torch.__version__}, {datetime.now(UTC):%Y-%m-%d}"
    title = f"{backend} between {ranks} ranks of one host"
    rows = [(p.collective, p.nbytes, p.seconds) for p in points]
    found = measured_link(out.stem, title, ranks, rows, source)
    if usual is None and (name := _own_link(backend)):
        usual = load_link(name)
    link = found if usual is None else completed(found, usual)
    with disk_errors(out):
        out.write_text(link_text(link))
    if as_json:
        print_json(to_value(link))
        return
    cells = [
        [name, f"{1e6 * a.latency_s:.1f}", f"{a.bytes_per_s / 1e9:.2f}", str(len(a.points))]
        for name, a in found.algorithms.items()
    ]
    rest = [name for name in link.algorithms if name not in found.algorithms]
    lines = table_lines([["algorithm", "µs a message", "GB/s", "points"], *cells])
    print("\n".join([*lines, *kept_lines(backend, rest, usual)]))
    print(f"{out}  median error of the fit {100 * link.error:.0f} %")


def _own_link(backend: str) -> str:
    """The link of this machine's kind; "" for a GPU that is no target."""
    from sitsc.core.hardware import load_target, target_of_gpu  # noqa: PLC0415

    data = target_of_gpu(_hardware(backend)) if backend == "nccl" else load_target("cpu")
    return "" if data is None else data.host.link


def kept_lines(backend: str, names: list[str], usual: "Link | None") -> list[str]:
    """What was not measured, and whose figures stand in its place."""
    if usual is None:
        return ["nothing is kept of another link: --like names one, such as nvlink or pcie4"]
    if not names:
        return []
    text = [f"not measured, as in the link {usual.name}: {', '.join(names)}"]
    if backend == "nccl":
        text.append("artifacts sum, gather and send by kernels of ours, not by what was measured")
    return text


def _hardware(backend: str) -> str:
    import torch  # noqa: PLC0415

    from sitsc.commands.machine import hardware_name  # noqa: PLC0415

    return torch.cuda.get_device_name() if backend == "nccl" else hardware_name()


_HEADER = ["layer", "tokens", "its µs", "step µs", "before", "with library"]
_HEADER += ["carve-out", "measured", "dropped", "not tried", "tile"]


def _cells(result: "SubjectResult") -> list[str]:
    """A result as the cells of a row."""
    library = "–" if result.library is None else f"× {result.library:.3f}"
    return [
        result.subject.name(),
        str(result.tokens),
        " ".join(f"{us:.1f}" for us in result.own_us.values()),
        " ".join(f"{us:.0f}" for us in result.step_us.values()),
        f"× {result.gain:.3f}",
        library,
        str(result.carveout),
        str(result.measured),
        str(len(result.dropped)),
        str(result.unmeasured),
        f"{result.best.kernel} {_tile(result.best.tile)}",
    ]


def _tile(tile: dict[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in tile.items())


def _table(path: Path) -> "TileTable":
    """The table in a file. Raises OptionError when it cannot be read, PlanError for other text."""
    from sitsc.core.tiles import read_table  # noqa: PLC0415

    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--table: {error}", hint="name a file of sitsc tune run") from None
    return read_table(text, str(path))


def _counts(text: str) -> tuple[int, ...]:
    """Token counts in order. Raises OptionError."""
    from sitsc.core.tuning import MOST_TOKENS  # noqa: PLC0415

    try:
        found = sorted({int(part) for part in text.replace(",", " ").split()})
    except ValueError:
        found = []
    if not found or found[0] < 1 or found[-1] > MOST_TOKENS:
        raise OptionError(f"--tokens {text!r} is not a list of counts", hint="such as 1,8,32,64")
    return tuple(found)


@contextlib.contextmanager
def model_folder(model: str) -> Iterator[Path]:
    """The folder of a model; a preset gets one with headers alone for the time being."""
    from sitsc.models.presets import PRESETS  # noqa: PLC0415
    from sitsc.models.random_checkpoint import write_random  # noqa: PLC0415  (imports torch)

    if model not in PRESETS or Path(model).exists():
        yield Path(model)
        return
    with tempfile.TemporaryDirectory(prefix="sitsc-tune-") as folder:
        yield write_random(model, Path(folder) / model, headers_only=True)
