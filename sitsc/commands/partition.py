"""`sitsc partition`: which TP, PP, EP and DP for a model on N devices, predicted and explained."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sitsc.commands.output import Json, phases, print_json, workload_text
from sitsc.commands.tune import model_folder
from sitsc.core.disk import disk_errors
from sitsc.core.errors import OptionError

if TYPE_CHECKING:
    from sitsc.partition_pipeline import Workload


def partition(
    model: Annotated[str, typer.Argument(help="A preset (sitsc models list) or a model.")],
    target: Annotated[str, typer.Option(help="What each device is, such as h200.")] = "h200",
    devices: Annotated[int, typer.Option(help="How many devices, 1 to 1024.")] = 8,
    nodes: Annotated[int, typer.Option(help="Nodes that the devices are on, alike.")] = 1,
    link: Annotated[
        str,
        typer.Option(help="Inside a node: nvlink, pcie, gloo …; the target's by default."),
    ] = "",
    between: Annotated[str, typer.Option(help="Between nodes: infiniband, ethernet.")] = "",
    slo: Annotated[
        str, typer.Option(help="The most ms, of an idle TTFT and a loaded TPOT: ttft=200,tpot=20.")
    ] = "",
    workload: Annotated[
        Path | None, typer.Option(help="Requests, or sizes and a rate, as JSON; see the guide.")
    ] = None,
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 0,
    output: Annotated[int, typer.Option(help="Tokens of an output.")] = 0,
    concurrency: Annotated[int, typer.Option(help="Requests at once, on all devices.")] = 0,
    overlap: Annotated[
        bool, typer.Option(help="Hypothetical: sums of prompts hidden behind computing.")
    ] = False,
    ideal: Annotated[
        bool,
        typer.Option(help="Hypothetical: the best collectives that the links allow."),
    ] = False,
    max_context: Annotated[
        int, typer.Option(help="The longest sequence; 0: the model's, up to 8192.")
    ] = 0,
    top: Annotated[int, typer.Option(help="Rows of a table.")] = 10,
    plot: Annotated[
        Path | None, typer.Option(help="Write the Pareto plot to this PNG file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Rank every partition of MODEL over the devices; compiles nothing and needs none of them."""
    from sitsc import partition_pipeline as pipeline  # noqa: PLC0415
    from sitsc.core.options import CompileOptions  # noqa: PLC0415

    if top < 1:
        raise OptionError(f"--top {top}", hint="1 or more")
    if plot is not None and plot.suffix.lower() != ".png":
        raise OptionError(f"--plot {plot} is no PNG file", hint="name it something.png")
    load = _workload(workload, prompt, output, concurrency)
    asked = pipeline.Asked(
        devices,
        nodes,
        link,
        between,
        overlap,
        load,
        pipeline.read_slo(slo) if slo else pipeline.Slo(),
        ideal,
    )
    options = CompileOptions(target=target, max_context=max_context)
    pipeline.check(target, asked)
    with model_folder(model) as folder, phases() as shown:
        record = pipeline.record_model(folder, options, shown.report)
        if workload is not None or prompt or output:
            load.check_context(record.max_context)
        shown.report("search", 0.0)
        made = pipeline.report(record, target, asked)
        shown.end()
    from sitsc.commands.partition_view import plot_png, show  # noqa: PLC0415

    if plot is not None:
        with disk_errors(plot):
            plot.write_bytes(plot_png(made))
    if as_json:
        print_json(pipeline.report_value(made))
        return
    show(made, top)


def _workload(path: Path | None, prompt: int, output: int, concurrency: int) -> "Workload":
    """The workload of a file or of sizes. Raises OptionError."""
    from sitsc.partition_pipeline import Workload, read_workload  # noqa: PLC0415

    if path is None:
        usual = Workload()
        return Workload(
            prompt or usual.prompt_tokens,
            output or usual.output_tokens,
            concurrency or usual.concurrency,
        )
    for name, size in (("prompt", prompt), ("output", output), ("concurrency", concurrency)):
        if size:
            raise OptionError(f"--{name} beside --workload", hint="the file says it, leave one out")
    return read_workload(workload_text(path), path.name)
