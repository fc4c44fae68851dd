"""`sitsc bench` of an artifact for a GPU: start, decode grid, prompts, beside peers and limits."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sitsc.commands.bench_report import (
    HEADER,
    Row,
    decode_key,
    peer_figures,
    report_value,
    start_phases,
    table_rows,
    ttft_key,
)
from sitsc.commands.generation import settle_memory
from sitsc.core import env
from sitsc.core.disk import disk_errors
from sitsc.core.errors import ExecutionError, OptionError

if TYPE_CHECKING:
    from sitsc.core.artifact import Artifact

GRID = ((1, 128), (1, 8192), (8, 128), (32, 1024), (128, 512), (256, 512))
PROMPTS = (512, 2048, 8192)
STEPS, QUICK_STEPS = 192, 48
REPEATS, QUICK_REPEATS = 5, 2
_WIDTH = 100


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """What to measure of a GPU artifact, and with which weights; empty lists: the usual rows."""

    batches: tuple[int, ...] = ()
    contexts: tuple[int, ...] = ()
    prompts: tuple[int, ...] = ()
    steps: int = 0
    quick: bool = False
    weights: Path | None = None
    random_weights: bool = False
    memory_limit: int | None = None
    nvtx: bool = False
    peers: Path | None = None
    model: str = ""
    kernels: bool = False

    def check(self) -> None:
        """Raises OptionError for sizes that nothing can have."""
        for name in ("batches", "contexts", "prompts"):
            if any(size < 1 for size in getattr(self, name)):
                option = {"batches": "batch", "contexts": "context", "prompts": "prompt"}[name]
                raise OptionError(f"--{option} {min(getattr(self, name))}", hint="at least 1")

    @property
    def only_gpu(self) -> str:
        """An option that was given and means nothing for a CPU artifact, or ""."""
        given = {
            "--quick": self.quick,
            "--weights": self.weights,
            "--random-weights": self.random_weights,
            "--memory-limit": self.memory_limit,
            "--nvtx": self.nvtx,
            "--peers": self.peers,
            "--model": self.model,
            "--kernels": self.kernels,
        }
        return next((name for name, value in given.items() if value), "")

    @property
    def grid(self) -> tuple[tuple[int, int], ...]:
        """(batch, context) of the decode rows."""
        if not self.batches and not self.contexts:
            return GRID
        return tuple((b, c) for b in self.batches or (1,) for c in self.contexts or (128,))

    @property
    def decode_steps(self) -> int:
        """Steps of a decode row."""
        return self.steps or (QUICK_STEPS if self.quick else STEPS)

    @property
    def repeats(self) -> int:
        """Prompts of a TTFT row, and starts."""
        return QUICK_REPEATS if self.quick else REPEATS


def read_peers(path: Path | None) -> dict[str, Any]:
    """A peers file. Raises OptionError."""
    if path is None:
        return {}
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise OptionError(f"{path} holds no peers: {error}", hint="name another file") from None
    if not isinstance(value, dict):
        raise OptionError(f"{path} holds no peers", hint="an object of engines and models")
    return value


def results_file(out: Path, target: str, model: str) -> Path:
    """The file to write: `out`, or <target>_<model>.json where it is a folder."""
    return out / f"{target}_{model}.json" if out.is_dir() else out


def measure_gpu(artifact: "Artifact", options: GpuOptions, facts: dict[str, Any]) -> dict[str, Any]:
    """Measure everything on this GPU; the value of the results file. Raises SitscError."""
    import torch  # noqa: PLC0415

    from sitsc.runtime.cuda_measure import device_facts, measure_ceilings  # noqa: PLC0415
    from sitsc.runtime.loader import load  # noqa: PLC0415

    options.check()
    peers = read_peers(options.peers)
    _check_here(artifact, options)
    ceilings = measure_ceilings()
    several = bool(artifact.plan.stages)
    start = {} if several else _start(artifact.root, options)
    session = load(
        artifact.root,
        weights=options.weights,
        random_weights=options.random_weights,
        memory_limit=options.memory_limit,
    )
    if several:
        timeline = session.timeline
        start = {"timeline_s": timeline, "first_token_s": sum(timeline.values())}
    detail: dict[str, Any] = {"start": start | {"phases_s": start_phases(start)}}
    model = options.model or artifact.root.name.removesuffix(".sitsc")
    figures = peer_figures(peers, model)
    settle_memory()
    rows, skipped = measure_rows(session, options, ceilings, detail)
    kernels = _kernels(session, rows, detail, skipped) if options.kernels else {}
    session.close()
    rows.append(Row("load_s" if several else "start_s", start["first_token_s"]))
    peer = next(iter(figures.values()), {})
    rows = [Row(r.key, r.value, r.limit, r.step, peer.get(r.key)) for r in rows]
    memory = artifact.plan.memory
    detail["memory"] = {
        "planned_bytes": memory.total_bytes,
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }
    facts = facts | device_facts() | {"ceilings": ceilings, "plan": artifact.plan.sha256()}
    facts |= {"target": artifact.plan.target.name, "built_with": _built_with(artifact)}
    report = report_value(model, facts, rows, skipped, figures, detail)
    return report | ({"kernels_us": kernels} if kernels else {})


def _check_here(artifact: "Artifact", options: GpuOptions) -> None:
    """What loading checks first, before anything is measured. Raises SitscError."""
    from sitsc.runtime.cuda_loading import start_torch  # noqa: PLC0415  (torch: seconds)
    from sitsc.runtime.cuda_preflight import check_here  # noqa: PLC0415
    from sitsc.runtime.load_request import LoadRequest, weights_folder  # noqa: PLC0415
    from sitsc.runtime.loader import check_decoder  # noqa: PLC0415
    from sitsc.runtime.ranks import place_of  # noqa: PLC0415

    check_decoder(artifact)
    own = artifact.of_rank(place_of(artifact.plan)[0]) if artifact.plan.stages else artifact
    weights_folder(own, LoadRequest(options.weights, options.random_weights))
    start_torch(check_here(own, options.memory_limit, env.local_rank()))


def _built_with(artifact: "Artifact") -> dict[str, str]:
    """Versions of what compiled the artifact, those of its kernels included."""
    names = (n for n in artifact.manifest.files if n.startswith("kernels/") and n.endswith(".json"))
    meta = artifact.json(first) if (first := next(names, "")) else {}
    kernels = {key: str(meta[key]) for key in ("triton", "ptxas") if key in meta}
    return artifact.manifest.built_with | kernels


def measure_rows(
    session: Any, options: GpuOptions, ceilings: dict[str, float], detail: dict[str, Any]
) -> tuple[list[Row], dict[str, str]]:
    """Decode and TTFT rows, and why others were left out; `detail` gets all figures of each."""
    from sitsc.runtime.cuda_measure import nvtx_range  # noqa: PLC0415
    from sitsc.runtime.engine_measure import measure_tpot, measure_ttft, no_range  # noqa: PLC0415
    from sitsc.runtime.step_limits import (  # noqa: PLC0415
        Ceilings,
        decode_limit_ms,
        prefill_limit_ms,
    )

    plan, mark = session.artifact.plan, nvtx_range if options.nvtx else no_range
    most = Ceilings(ceilings["read_TBps"] * 1e12, ceilings["matmul_8192_bf16_TFLOPs"] * 1e12)
    rows: list[Row] = []
    skipped: dict[str, str] = {}
    for batch, context in options.grid:
        key = decode_key(batch, context)
        try:
            found = measure_tpot(session, batch, context, options.decode_steps, mark)
        except OptionError as error:
            skipped[key] = str(error)
            continue
        detail[key] = asdict(found)
        rows.append(Row(key, found.tpot_ms, decode_limit_ms(plan, batch, found.mean_context, most)))
    for tokens in options.prompts or PROMPTS:
        try:
            first = measure_ttft(session, tokens, options.repeats, mark)
        except OptionError as error:
            skipped[ttft_key(tokens)] = str(error)
            continue
        detail[ttft_key(tokens)] = asdict(first)
        rows.append(Row(ttft_key(tokens), first.median_ms, prefill_limit_ms(plan, tokens, most)))
    return _with_steps(session, rows, detail), skipped


def _with_steps(session: Any, rows: list[Row], detail: dict[str, Any]) -> list[Row]:
    """Decode rows with the time of their step alone, where the executor can replay one."""
    from sitsc.runtime.cuda_measure import measure_step  # noqa: PLC0415

    if not hasattr(session.executor, "replay") or session.ranks is not None:
        return rows
    plan, found = session.artifact.plan, []
    for row in rows:
        d, step = detail[row.key], None
        if "tpot_ms" in d:
            room = plan.memory.kv_pages // d["batch"] * plan.kv[0].page_tokens
            middle = min(round(d["mean_context"]) - 28, room - 64, plan.tokens.max_context - 64)
            if middle > 0:
                step = measure_step(session.executor, plan, d["batch"], middle)
        found.append(Row(row.key, row.value, row.limit, step))
    return found


def _kernels(
    session: Any, rows: list[Row], detail: dict[str, Any], skipped: dict[str, str]
) -> dict[str, dict[str, float]]:
    """µs of each kernel class in a step of every decode row, or in `skipped` why not."""
    if not hasattr(session.executor, "replay") or session.ranks is not None:
        skipped["kernels"] = "of one rank that replays graphs alone"
        return {}
    try:
        return measure_kernel_rows(session, rows, detail)
    except ExecutionError as error:
        skipped["kernels"] = str(error)
        return {}


def measure_kernel_rows(
    session: Any, rows: list[Row], detail: dict[str, Any]
) -> dict[str, dict[str, float]]:
    """µs of each kernel class in a step of every decode row. Raises ExecutionError."""
    from sitsc.runtime.kernel_times import measure_kernels  # noqa: PLC0415

    plan, found = session.artifact.plan, {}
    for row in rows:
        d = detail.get(row.key, {})
        if "tpot_ms" in d:
            room = plan.memory.kv_pages // d["batch"] * plan.kv[0].page_tokens
            context = min(round(d["mean_context"]), room - 64, plan.tokens.max_context - 64)
            if context > 0:
                found[row.key] = measure_kernels(session.executor, plan, d["batch"], context)
    return found


def _start(root: Path, options: GpuOptions) -> dict[str, Any]:
    """The fastest of a few starts of a process, by phases."""
    from sitsc.commands.bench import probe  # noqa: PLC0415  (it imports this module)

    extra: list[str] = []
    if options.random_weights:
        extra.append("--random-weights")
    if options.weights is not None:
        extra += ["--weights", str(options.weights)]
    if options.memory_limit is not None:
        extra += ["--memory-limit", str(options.memory_limit)]
    return probe(root, 1 if options.quick else 3, extra)


def show(report: dict[str, Any]) -> None:
    """Print the table, the start and the memory."""
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    model = report["model"]
    engines = [k for k, v in report.items() if k != "sitsc" and isinstance(v, dict) and model in v]
    peer = report[engines[0]][model] if engines else {}
    limits, steps = report["limit"], report["step_ms"]
    rows = [
        Row(key, value, limits.get(key), steps.get(key), peer.get(key))
        for key, value in report["sitsc"][model].items()
    ]
    title = f"{model} on {report['hardware']}" + (f", peer {engines[0]}" if engines else "")
    table = Table(title=title)
    for index, name in enumerate(HEADER):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
    for cells in table_rows(rows, {}):
        table.add_row(*cells)
    console = Console(soft_wrap=True)
    console.width = max(console.width, _WIDTH)
    console.print(table)
    for key, why in report["skipped"].items():
        console.print(f"skipped {key}: {why}")
    phases = report["detail"]["start"]["phases_s"]
    console.print("start: " + ", ".join(f"{k} {v:.2f}" for k, v in phases.items()) + " s")
    memory = report["detail"]["memory"]
    share = memory["peak_bytes"] / memory["planned_bytes"]
    console.print(f"memory: peak {memory['peak_bytes']} bytes, {share:.3f} of the plan's")


def write(report: dict[str, Any], out: Path) -> Path:
    """Write the results file; its path."""
    path = results_file(out, report["target"], report["model"])
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")
    return path
