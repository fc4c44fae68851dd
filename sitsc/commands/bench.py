"""`sitsc bench`: decode, TTFT, start-up and memory of artifacts, written as evidence."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sitsc.commands import bench_cuda
from sitsc.commands.bench_cpu import cpu_actual
from sitsc.commands.bench_cuda import GpuOptions
from sitsc.commands.generation import load_session
from sitsc.commands.machine import environment
from sitsc.commands.output import MemoryLimit, size_bytes
from sitsc.commands.ranks import follows, start_ranks
from sitsc.core.actual import Actual, actual_of_report, actual_place, keep_actual
from sitsc.core.disk import disk_errors
from sitsc.core.errors import OptionError

if TYPE_CHECKING:
    from sitsc.core.artifact import Artifact

_FEWEST_STEPS = 8


def bench(
    artifacts: Annotated[list[Path], typer.Argument(help="artifact folders")],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="file to write (GPU: or an existing folder)")
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(help="decode batch sizes")] = None,
    context: Annotated[list[int] | None, typer.Option(help="decode contexts, tokens")] = None,
    prompt: Annotated[list[int] | None, typer.Option(help="prompt lengths for TTFT")] = None,
    steps: Annotated[
        int, typer.Option(help="decode steps a measurement (CPU 128, GPU 192)", min=0)
    ] = 0,
    text: Annotated[Path | None, typer.Option(help="CPU: perplexity on this text")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="GPU: fewer steps and repeats")] = False,
    weights: Annotated[Path | None, typer.Option(help="GPU: the checkpoint folder")] = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="GPU: random weights")
    ] = False,
    memory_limit: MemoryLimit = None,
    nvtx: Annotated[bool, typer.Option("--nvtx", help="GPU: mark steps for a profiler")] = False,
    peers: Annotated[
        Path | None, typer.Option(help="GPU: figures of others, compared by key")
    ] = None,
    model: Annotated[
        str, typer.Option(help="GPU: the model's name in results and peers; else the folder's")
    ] = "",
    nproc: Annotated[
        int, typer.Option(help="start so many ranks here, for an artifact of several; 0: be one")
    ] = 0,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="GPU: also the time of each kernel class of a step")
    ] = False,
    actual: Annotated[
        Path | None, typer.Option(help="where to keep what was measured; default ART.actual.json")
    ] = None,
    port: Annotated[int, typer.Option(help="where the ranks of --nproc meet; 0: a free port")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Measure artifacts on this machine: for the CPU several at once, for a GPU one."""
    if nproc or port:
        if len(artifacts) > 1:
            raise OptionError("ranks measure one artifact", hint="one call an artifact")
        raise typer.Exit(start_ranks(artifacts[0], nproc, port))
    if follows():
        more: dict[str, Any] = {"random_weights": random_weights}
        more["memory_limit"] = size_bytes(memory_limit)
        load_session(artifacts[0], weights, **more).session.serve()
        return
    if 0 < steps < _FEWEST_STEPS:
        raise OptionError(f"--steps {steps} is below {_FEWEST_STEPS}", hint="128 is usual")
    gpu = GpuOptions(
        batches=tuple(batch or ()),
        contexts=tuple(context or ()),
        prompts=tuple(prompt or ()),
        steps=steps,
        quick=quick,
        weights=weights,
        random_weights=random_weights,
        memory_limit=size_bytes(memory_limit),
        nvtx=nvtx,
        peers=peers,
        model=model,
        kernels=kernels,
    )
    if actual is not None and len(artifacts) > 1:
        raise OptionError("--actual is for one artifact", hint="one call an artifact")
    from sitsc.core.artifact import open_artifact  # noqa: PLC0415  (torch: seconds)

    opened = [open_artifact(root) for root in artifacts]
    if any(one.plan.target.isa.startswith("sm_") for one in opened):
        if len(opened) > 1 or text is not None:
            raise OptionError(
                "an artifact for a GPU is measured alone, without --text",
                hint="one call an artifact",
            )
        _bench_gpu(opened[0], gpu, out, actual, as_json)
        return
    if gpu.only_gpu:
        raise OptionError(f"{gpu.only_gpu} is for artifacts of GPUs", hint="leave it out")
    _bench_cpu(artifacts, batch, context, prompt, steps or 128, text, out, actual, as_json)


def _bench_gpu(
    artifact: "Artifact",
    options: GpuOptions,
    out: Path | None,
    actual: Path | None,
    as_json: bool,
) -> None:
    report = bench_cuda.measure_gpu(artifact, options, environment())
    if out is not None:
        bench_cuda.write(report, out)
    if as_json:
        print(json.dumps(report))
    else:
        bench_cuda.show(report)
    measured = actual_of_report(report, artifact.plan.runs())
    keep_actual(measured, actual or actual_place(artifact.root))


def _bench_cpu(
    artifacts: list[Path],
    batch: list[int] | None,
    context: list[int] | None,
    prompt: list[int] | None,
    steps: int,
    text: Path | None,
    out: Path | None,
    actual: Path | None,
    as_json: bool,
) -> None:
    from sitsc.runtime.measure import measure_read_bandwidth  # noqa: PLC0415  (torch: seconds)

    kept = _read_results(out)
    if text is not None and not text.is_file():
        raise OptionError(f"no such text: {text}", hint="give a plain text file")
    bandwidth = measure_read_bandwidth()
    report = environment() | {"ceilings": {"read_bytes_per_s": bandwidth}}
    results: dict[str, Any] = {}
    places: list[tuple[Actual, Path]] = []
    for index, root in enumerate(artifacts):
        busy(f"measuring {root.name}", index, len(artifacts))
        result = _one(root, batch or [1], context or [128], prompt or [512], steps, text, bandwidth)
        name = result.pop("name")
        places.append((cpu_actual(result, root.name, steps, report), actual or actual_place(root)))
        results[name if name not in results else f"{name} {result['plan'][:8]}"] = result
        if not as_json:
            print(_line(result))
    merged = kept | report | {"results": kept.get("results", {}) | results}
    if out is not None:
        with disk_errors(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(merged, indent=1, sort_keys=True) + "\n")
    if as_json:
        print(json.dumps(report | {"results": results}))
    for measured, place in places:
        keep_actual(measured, place)


def busy(what: str, done: int, whole: int) -> None:
    """A line about what is being measured, on a terminal only."""
    if sys.stderr.isatty():
        print(f"{what} ({done + 1} of {whole}) …", file=sys.stderr)


def _read_results(out: Path | None) -> dict[str, Any]:
    """Earlier results that are kept. Raises OptionError for a file that is none."""
    if out is None or not out.is_file():
        return {}
    try:
        value = json.loads(out.read_text())
    except ValueError as error:
        raise OptionError(f"{out} holds no results: {error}", hint="name another file") from None
    if not isinstance(value, dict):
        raise OptionError(f"{out} holds no results", hint="name another file")
    return value


def _one(
    root: Path,
    batches: list[int],
    contexts: list[int],
    prompts: list[int],
    steps: int,
    text: Path | None,
    bandwidth: float,
) -> dict[str, Any]:
    from sitsc.core.artifact import open_artifact  # noqa: PLC0415  (torch: seconds)
    from sitsc.runtime.loader import load  # noqa: PLC0415
    from sitsc.runtime.measure import (  # noqa: PLC0415
        measure_decode,
        measure_kernel_step,
        measure_ttft,
    )
    from sitsc.runtime.score import perplexity  # noqa: PLC0415

    session = load(root)
    plan = open_artifact(root).plan  # of all ranks
    several = session.ranks is not None
    decode = [measure_decode(session, b, c, steps) for b in batches for c in contexts]
    limit_ms = plan.memory.weights_bytes / bandwidth * 1e3
    result = {
        "name": f"{plan.numerics.dtype}{'-int8' if plan.numerics.weights == 'int8' else ''}",
        "plan": plan.sha256(),
        "runs": plan.runs(),
        "planned_bytes": plan.memory.total_bytes,
        "target": plan.target.name,
        "isa": session.executor.library.isa,
        "decode": [asdict(d) for d in decode],
        "launch_ms": None if several else measure_kernel_step(session, contexts[0], steps),
        "limit_ms": limit_ms,
        "fraction_of_limit": limit_ms / decode[0].median_ms,
        "ttft_ms": {str(tokens): measure_ttft(session, tokens, 5) for tokens in prompts},
        "start": {"ranks_load_s": sum(session.timeline.values())} if several else probe(root),
    }
    if text is not None and session.tokenizer is not None:
        if several:
            raise OptionError("--text is for one rank", hint="leave it out")
        ids = session.tokenizer.encode(text.read_text(), True)
        result |= {"perplexity": perplexity(session.executor, ids, 1024), "text_tokens": len(ids)}
    session.close()
    return result


def probe(root: Path, repeats: int = 3, extra: Sequence[str] = ()) -> dict[str, Any]:
    """Start a process that answers once, a few times; the report of the fastest start.

    Raises the SitscError that such a process ended with.
    """
    from sitsc.runtime.probe import error_of  # noqa: PLC0415

    reports = []
    for _ in range(repeats):
        command = [
            sys.executable,
            "-m",
            "sitsc.runtime.probe",
            str(root),
            str(time.time_ns()),
            "32",
            *extra,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise error_of(done.stdout, done.stderr, f"a process that runs {root.name}")
        reports.append(json.loads(done.stdout.strip().splitlines()[-1]))
    best = min(reports, key=lambda r: r["first_token_s"])
    best["peak_over_weights"] = best["peak_bytes_above_torch"] / best["weights_bytes"]
    return best


def _line(result: dict[str, Any]) -> str:
    rows = [
        f"bs {d['batch']} ctx {d['context']}: {d['median_ms']:.2f} ms a step (best "
        f"{d['best_ms']:.2f}, p95 {d['p95_ms']:.2f}), {d['tokens_per_s']:.1f} tokens/s"
        for d in result["decode"]
    ]
    rows.append(f"fraction of the limit {result['fraction_of_limit']:.2f}")
    rows += [f"TTFT {tokens} tokens: {value:.1f} ms" for tokens, value in result["ttft_ms"].items()]
    start = result["start"]
    rows.append(
        f"loaded in {start['ranks_load_s']:.2f} s"
        if "ranks_load_s" in start
        else f"first token {start['first_token_s']:.2f} s after start, peak memory "
        f"{start['peak_over_weights']:.2f} x weights above torch"
    )
    if "perplexity" in result:
        rows.append(f"perplexity {result['perplexity']:.4f} on {result['text_tokens']} tokens")
    return "\n".join(rows)
