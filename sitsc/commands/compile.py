"""`sitsc compile`: a checkpoint becomes an artifact."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from sitsc.commands import golden_use
from sitsc.commands.output import (
    Json,
    Phases,
    bytes_text,
    phases,
    print_json,
    remark,
    workload_text,
)
from sitsc.core.errors import OptionError
from sitsc.core.options import CompileOptions
from sitsc.core.parallel import Partition

_Model = Annotated[
    Path,
    typer.Argument(help="A model folder (config.json and safetensors), a .gguf or a .onnx file."),
]
_Out = Annotated[Path | None, typer.Option("-o", "--out", help="New folder. [MODEL-TARGET.sitsc]")]
_Target = Annotated[str, typer.Option(help="What to compile for.")]
_Dtype = Annotated[str, typer.Option(help="auto, float32 or bfloat16.")]
_Weights = Annotated[str, typer.Option(help="Quantise weights: none or int8.")]
_Residual = Annotated[
    str, typer.Option(help="GPU: the residual stream: auto (float32), float32 or bfloat16.")
]
_MaxContext = Annotated[
    int, typer.Option(help="Tokens of one request; 0: as the model says, 8192 at most.")
]
_MaxBatch = Annotated[int, typer.Option(help="Sequences in one step.")]
_Chunk = Annotated[int, typer.Option(help="Prompt tokens of one sequence in one step.")]
_KvTokens = Annotated[int, typer.Option(help="Tokens in the KV pool; 0: two full contexts.")]
_PageTokens = Annotated[int, typer.Option(help="Tokens of a KV page; 0: 16 on CPUs, 64 on GPUs.")]
_Pack = Annotated[
    bool | None,
    typer.Option(
        "--pack/--no-pack",
        help="Weights inside the artifact or not; by default below 2 GiB and when quantised.",
    ),
]
_Tp = Annotated[int, typer.Option(help="Ranks that share every layer (tensor parallel).")]
_Pp = Annotated[int, typer.Option(help="Stages of layers, each on its own ranks (pipeline).")]
_Ep = Annotated[int, typer.Option(help="Of the TP ranks, groups that share whole experts.")]
_Slo = Annotated[str, typer.Option(help="Several devices: limits, such as ttft=200,tpot=20 (ms).")]
_Workload = Annotated[
    Path | None, typer.Option(help="Several devices: a JSON file of prompts and outputs.")
]
_Check = Annotated[
    bool, typer.Option("--check", help="Execute a small model before and after every pass.")
]
_Allowed = Annotated[
    list[str] | None, typer.Option(help="A key of config.json to ignore; repeatable.")
]
_Golden = Annotated[
    Path | None, typer.Option(help="Take the options of this file of sitsc golden.")
]
_Strict = Annotated[
    bool, typer.Option("--golden-strict", help="Fail where the golden file is stale.")
]
_Dump = Annotated[
    Path | None, typer.Option(help="Folder for the text of the graph after every pass.")
]


def compile(  # the CLI name; the builtin is not used in this package
    context: typer.Context,
    model: _Model,
    out: _Out = None,
    target: _Target = "cpu",
    dtype: _Dtype = "auto",
    weights: _Weights = "none",
    kv_dtype: _Dtype = "auto",
    residual: _Residual = "auto",
    max_context: _MaxContext = 0,
    max_batch: _MaxBatch = 8,
    prefill_chunk_tokens: _Chunk = 512,
    kv_tokens: _KvTokens = 0,
    page_tokens: _PageTokens = 0,
    pack: _Pack = None,
    tp: _Tp = 1,
    pp: _Pp = 1,
    ep: _Ep = 1,
    slo: _Slo = "",
    workload: _Workload = None,
    check: _Check = False,
    allow_unknown_key: _Allowed = None,
    dump: _Dump = None,
    golden: _Golden = None,
    golden_strict: _Strict = False,
    as_json: Json = False,
) -> None:
    """Compile MODEL into an artifact; needs no weights in memory and no device."""
    values: dict[str, Any] = {
        "target": target,
        "dtype": dtype,
        "weights": weights,
        "kv_dtype": kv_dtype,
        "residual": residual,
        "max_context": max_context,
        "max_batch": max_batch,
        "prefill_chunk_tokens": prefill_chunk_tokens,
        "kv_tokens": kv_tokens,
        "page_tokens": page_tokens,
        "pack": pack,
        "tp": tp,
        "pp": pp,
        "ep": ep,
        "slo": slo,
        "workload": "" if workload is None else workload_text(workload),
        "allow_unknown_keys": tuple(allow_unknown_key or ()),
    }
    _refuse_preset(model)
    if golden is None:
        if golden_strict:
            raise OptionError(
                "--golden-strict without --golden", hint="name a file, or leave it out"
            )
        options = CompileOptions(**values)
        made = compile_to(model, out or default_out(model, target), options, check=check, dump=dump)
    else:
        used = golden_use.use(golden, _given(context, values), golden_strict)
        held, place = used.before(model), out or default_out(model, used.place)
        made = used.after(compile_to(model, place, used.options, check=check, dump=dump), held)
    if as_json:
        print_json(made)
    else:
        print("\n".join(summary_lines(made)))


def _given(context: typer.Context, values: dict[str, Any]) -> dict[str, Any]:
    """The options that stand on the command line."""
    named = golden_use.given_on_command_line(context)
    if "allow_unknown_key" in named:
        named.add("allow_unknown_keys")
    return {name: value for name, value in values.items() if name in named}


def default_out(model: Path, target: str) -> Path:
    """MODEL-TARGET.sitsc in the current folder."""
    name, target = model.resolve().name, target.replace(":", "x")
    return Path(f"{name.removesuffix('.gguf').removesuffix('.onnx')}-{target}.sitsc")


def compile_to(
    model: Path,
    out: Path,
    options: CompileOptions,
    *,
    check: bool = False,
    dump: Path | None = None,
) -> dict[str, Any]:
    """Compile with progress on a terminal; what came of it as plain values."""
    start = time.perf_counter()
    warnings: list[str] = []
    with phases() as shown:
        shown.report("open", 0.0)
        from sitsc.pipeline import compile_model  # noqa: PLC0415  (imports torch: a second)

        artifact = compile_model(
            model, out, options, shown.report, check=check, dump=dump, warn=warnings.append
        )
        shown.end()
    for text in warnings:
        remark(f"warning: {text}")
    seconds = round(time.perf_counter() - start, 3)
    return describe(artifact, shown) | {"warnings": warnings, "seconds": seconds}


def _refuse_preset(model: Path) -> None:
    """A preset's name in place of a path is a likely mistake: say what to do instead."""
    from sitsc.models.presets import PRESETS  # noqa: PLC0415

    if str(model) in PRESETS and not model.exists():
        hint = f"sitsc models random {model} -o DIR writes a checkpoint of it"
        raise OptionError(f"{model} is a preset, not a model folder", hint=hint)


def describe(artifact: Any, shown: Phases) -> dict[str, Any]:
    """The figures of a finished artifact; `cached` when no code was generated."""
    plan = artifact.plan
    own, p = plan.of_rank(0), plan.parallel
    partition = Partition(p.tp, p.pp, p.ep)
    return {
        "artifact": str(artifact.root),
        "target": plan.target.name,
        "kind": plan.kind,
        "numerics": {"dtype": plan.numerics.dtype, "weights": plan.numerics.weights},
        "plan": artifact.manifest.plan,
        "runs": artifact.manifest.runs,
        "packed": artifact.manifest.packed,
        "tokenizer": artifact.has("tokenizer.json"),
        "weights_bytes": plan.memory.weights_bytes,
        "kv_bytes": plan.memory.kv_bytes,
        "kv_tokens": own.memory.kv_pages * own.kv[0].page_tokens if own.kv else 0,
        "ranks": plan.num_ranks,
        "partition": partition.text(),
        "arena_bytes": plan.memory.arena_bytes,
        "predictions": {
            name: {"value": p.value, "unit": p.unit, "error": p.error}
            for name, p in plan.predictions.items()
        },
        "cached": "codegen" not in shown.seconds,
        "phases": {phase: round(seconds, 3) for phase, seconds in shown.seconds.items()},
    }


def summary_lines(made: dict[str, Any]) -> list[str]:
    """The summary for people."""
    inside = "" if made["packed"] else ", outside: name the checkpoint with sitsc run --weights"
    how = "from the cache" if made["cached"] else "compiled"
    plain = made["kind"] == "plain"
    predicted = made["predictions"]["plain" if plain else "tpot_decode_1"]
    unit = "a call with the example inputs" if plain else "a token at batch 1"
    pool = f"KV pool    {bytes_text(made['kv_bytes'])}, {made['kv_tokens']} tokens"
    missing = ["tokenizer  none in the model folder: sitsc run cannot read text with this artifact"]
    return [
        f"{made['artifact']}  {how} in {made['seconds']:.1f} s for {made['target']}",
        f"plan       {made['plan']}",
        *(golden_use.summary(made["golden"]) if "golden" in made else []),
        *([f"ranks      {made['ranks']}: {made['partition']}"] if made["ranks"] > 1 else []),
        f"weights    {bytes_text(made['weights_bytes'])}{inside}",
        *([] if plain else [pool]),
        f"arena      {bytes_text(made['arena_bytes'])}",
        f"predicted  {predicted['value']:.2f} {predicted['unit']} {unit}"
        f" (± {100 * predicted['error']:.0f} %)",
        *([] if made["tokenizer"] or plain else missing),
    ]
