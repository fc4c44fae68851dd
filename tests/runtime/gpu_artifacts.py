"""A small artifact of a GPU target, made in seconds: a real plan, few launches, real cubins."""

from dataclasses import replace
from functools import cache
from pathlib import Path

from sitsc.core import artifact as files
from sitsc.core.artifact import Artifact, ArtifactWriter, Manifest
from sitsc.core.canonical import canonical_json
from sitsc.core.kernel_meta import KernelMeta, kernel_folder
from sitsc.core.options import CompileOptions
from sitsc.core.packing import write_weights
from sitsc.core.plan import Plan
from sitsc.core.records import to_value
from sitsc.models.random_checkpoint import write_random
from sitsc.pipeline import inspect, plan_checkpoint
from sitsc.runtime.random_rows import RandomRows
from tests import cuda_kernels

OPTIONS = CompileOptions(
    target="h200", dtype="bfloat16", max_context=512, max_batch=16, kv_tokens=4096
)


def checkpoint(folder: Path, dtype: str = "bfloat16", shard_bytes: int = 4 << 30) -> Path:
    """A folder of random weights of tiny-llama."""
    return write_random("tiny-llama", folder, dtype=dtype, shard_bytes=shard_bytes)


@cache
def plan_of(model: Path, options: CompileOptions = OPTIONS) -> Plan:
    """The plan of a checkpoint."""
    return plan_checkpoint(inspect(model, options), options).plan


@cache
def cubins(sm: int, folder: Path) -> dict[str, tuple[bytes, KernelMeta]]:
    """Compiled test kernels, once."""
    return cuda_kernels.compile_all(sm, folder)


def few_launches(plan: Plan, names: tuple[str, ...] = ("add", "large_matmul")) -> Plan:
    """The plan with one launch group that launches these kernels."""
    regime = plan.regimes[0]
    group = regime.groups[0]
    launch = next(one for one in group.launches if one.kind == "kernel")
    launches = tuple(replace(launch, kernel=name, template=name) for name in names)
    regime = replace(regime, groups=(replace(group, launches=launches),))
    return replace(plan, regimes=(regime, *(replace(r, groups=()) for r in plan.regimes[1:])))


def write_gpu_artifact(
    out: Path, plan: Plan, kernels: dict[str, tuple[bytes, KernelMeta]], *, packed: bool = True
) -> Artifact:
    """An artifact with these kernels, its weights inside at random where `packed`."""
    sm = int(plan.target.isa.removeprefix("sm_"))
    with ArtifactWriter(out) as writer:
        for name, (cubin, meta) in kernels.items():
            writer.path(f"{kernel_folder(sm)}/{name}.cubin").write_bytes(cubin)
            writer.path(f"{kernel_folder(sm)}/{name}.json").write_text(meta.text())
        if packed:
            specs = plan.model.parameters
            rows = RandomRows(specs, 3)
            index = write_weights(specs, rows.read, writer.path(files.WEIGHTS), lambda n: None)
            writer.path(files.WEIGHTS_INDEX).write_text(canonical_json(to_value(index)))
        manifest = Manifest(
            files.SCHEMA, plan.target.name, plan.sha256(), plan.runs(), {}, packed, "", {}
        )
        return writer.finish(plan, manifest)
