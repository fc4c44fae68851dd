"""`sitsc simulate`: a workload replayed on a model's partition or an artifact's plan, no device."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sitsc.commands.output import Json, phases, print_json, workload_text
from sitsc.commands.plan import read
from sitsc.commands.tune import model_folder
from sitsc.core import plan_file
from sitsc.core.errors import OptionError

if TYPE_CHECKING:
    from sitsc.simulate_pipeline import Requests

_MANIFEST, _TARGET = "manifest.json", "h200"


def simulate(
    model: Annotated[
        str,
        typer.Argument(
            help="A preset, a model, an artifact or a plan (.json, .json.xz).", metavar="MODEL"
        ),
    ],
    target: Annotated[
        str, typer.Option(help="What each device is, h200 unless said; an artifact says it.")
    ] = "",
    devices: Annotated[int, typer.Option(help="How many, 1 to 1024; 0: as degrees say.")] = 0,
    nodes: Annotated[int, typer.Option(help="Nodes that the devices are on, alike.")] = 1,
    link: Annotated[str, typer.Option(help="Inside a node, as for partition.")] = "",
    between: Annotated[str, typer.Option(help="Between nodes: infiniband, ethernet.")] = "",
    tp: Annotated[int, typer.Option(help="Tensor parallel; no degrees: the best of all.")] = 0,
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 0,
    ep: Annotated[int, typer.Option(help="Groups of whole experts.")] = 0,
    dp: Annotated[int, typer.Option(help="Replicas, of an artifact too.")] = 0,
    workload: Annotated[
        Path | None, typer.Option(help="Requests, or sizes with a rate, as JSON.")
    ] = None,
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt; 0: as drawn.")] = 0,
    output: Annotated[int, typer.Option(help="Tokens of an output; 0: as drawn.")] = 0,
    rate: Annotated[float | None, typer.Option(help="Requests a second on all replicas.")] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Requests at once: one comes when another ends.")
    ] = None,
    requests: Annotated[int | None, typer.Option(help="How many; 200 when drawn.")] = None,
    seed: Annotated[int, typer.Option(help="Of arrivals and lengths.")] = 0,
    max_batch: Annotated[int, typer.Option(help="Sequences of a replica; 0: the usual.")] = 0,
    chunk: Annotated[int, typer.Option(help="Tokens of a prompt in a step; 0: 2048.")] = 0,
    kv_tokens: Annotated[int, typer.Option(help="Of a replica; 0: what fits.")] = 0,
    max_context: Annotated[
        int, typer.Option(help="The longest sequence; 0: the model's, up to 8192.")
    ] = 0,
    as_json: Json = False,
) -> None:
    """Replay a workload with the server's own scheduler; percentiles, utilisation, KV pages."""
    from sitsc import simulate_pipeline as pipeline  # noqa: PLC0415
    from sitsc.core.options import CompileOptions  # noqa: PLC0415
    from sitsc.partition_pipeline import Asked, check  # noqa: PLC0415

    for name, degree in (("--tp", tp), ("--pp", pp), ("--ep", ep), ("--dp", dp)):
        if not 0 <= degree <= 1024:
            raise OptionError(f"{name} {degree} is outside 1..1024", hint="or leave it out")
    load = _requests(workload, rate, concurrency, requests, seed, prompt, output)
    degrees, sizes = pipeline.Degrees(tp, pp, ep, dp), pipeline.Sizes(max_batch, chunk, kv_tokens)
    if _is_plan(Path(model)):
        told = (target, devices, tp, pp, ep, max_batch, chunk, kv_tokens, max_context)
        if any((*told, nodes != 1, link, between)):
            what = "the plan of an artifact says its target and sizes"
            raise OptionError(what, hint="only --dp is free")
        made = pipeline.of_plan(read(Path(model)), max(1, dp), load)
    else:
        count = degrees.partition(devices).num_ranks if degrees.given else devices or 1
        asked = Asked(count, nodes, link, between)
        target = target or _TARGET
        check(target, asked)
        options = CompileOptions(target=target, max_context=max_context)
        with model_folder(model) as folder, phases() as shown:
            record = pipeline.record_model(folder, options, shown.report)
            made = pipeline.of_model(record, target, asked, degrees, sizes, load, shown.report)
            shown.end()
    if as_json:
        print_json(pipeline.report_value(made))
        return
    from sitsc.commands.simulate_view import show  # noqa: PLC0415  (rich: a tenth of a second)

    show(made)


def _is_plan(place: Path) -> bool:
    named = place.name.endswith((plan_file.PLAIN, plan_file.COMPRESSED))
    return (place / _MANIFEST).exists() or (place.is_file() and named)


def _requests(
    workload: Path | None,
    rate: float | None,
    concurrency: int | None,
    requests: int | None,
    seed: int,
    prompt: int,
    output: int,
) -> "Requests":
    """The requests of a file, or drawn. Raises OptionError."""
    from sitsc.simulate_pipeline import REQUESTS, draw, read_requests  # noqa: PLC0415

    if rate is not None and not rate > 0:
        raise OptionError(f"--rate {rate:g} is no rate", hint="requests a second, above 0")
    if concurrency is not None and concurrency < 1:
        raise OptionError(f"--concurrency {concurrency}", hint="1 or more requests at once")
    if requests is not None and requests < 1:
        raise OptionError(f"--requests {requests}: nothing to replay", hint="1 or more")
    if workload is None:
        return draw(
            requests or REQUESTS,
            rate or 0.0,
            seed,
            concurrency=concurrency or 0,
            prompt_tokens=prompt,
            output_tokens=output,
        )
    for name, size in (("prompt", prompt), ("output", output)):
        if size:
            raise OptionError(f"--{name} beside --workload", hint="the file says it, leave one out")
    return read_requests(
        workload_text(workload),
        workload.name,
        count=requests or 0,
        rate=rate or 0.0,
        seed=seed,
        concurrency=concurrency or 0,
    )
