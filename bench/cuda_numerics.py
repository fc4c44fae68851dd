"""Logits of an artifact on the GPU beside transformers' with the same random weights.

`python bench/cuda_numerics.py ART PRESET -o OUT.json`. References: transformers in
bfloat16 (it shares our tensors) and in float32 (the same values upcast). Every token is forced, so
that all three see the same text; steps go through the CUDA graphs that serving replays.
"""

import argparse
import json
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sitsc.core.artifact import open_artifact
from sitsc.core.plan import Plan
from sitsc.core.serving.batch import StepBatch
from sitsc.models.presets import preset
from sitsc.runtime.cuda_executor import CudaExecutor, random_weights


@dataclass(frozen=True, slots=True)
class Case:
    """`sequences` prompts of `prompt` tokens, then `steps` forced decode steps of all of them."""

    sequences: int
    prompt: int
    steps: int


CASES = (Case(1, 512, 512), Case(8, 128, 32), Case(32, 64, 8), Case(64, 64, 8), Case(256, 16, 4))


# --- transformers -------------------------------------------------------------------------------


def checkpoint_tensors(plan: Plan, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our buffers as the tensors of the checkpoint, sharing memory."""
    found: dict[str, Tensor] = {}
    for spec in plan.model.parameters:
        row = 0
        for part in spec.sources:
            count = part.stop - part.start
            found[part.tensor] = weights[spec.name][row : row + count]
            row += count
    return found


def transformers_model(
    config: dict[str, Any], tensors: dict[str, Tensor], dtype: torch.dtype
) -> Any:
    """The model of a config over these tensors; shared when their dtype is `dtype`."""
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415  (seconds)

    known = {k: v for k, v in config.items() if k != "model_type"}
    wanted = AutoConfig.for_model(config["model_type"], **known)
    device = next(iter(tensors.values())).device
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(wanted, dtype=dtype, attn_implementation="sdpa")
    given = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    if wanted.tie_word_embeddings:
        given["lm_head.weight"] = given["model.embed_tokens.weight"]
    model.load_state_dict(given, assign=True)
    with torch.device(device):
        model.model.rotary_emb = type(model.model.rotary_emb)(config=wanted)
    return model.eval()


@torch.no_grad()
def reference_logits(model: Any, ids: Tensor, keep: int) -> Tensor:
    """float32 logits [sequences, keep, vocabulary] of the last `keep` positions of ids."""
    rows = [
        model(input_ids=part, logits_to_keep=keep, use_cache=False).logits.float()
        for part in ids.split(max(1, 4096 // ids.shape[1]))
    ]
    return torch.cat(rows)


# --- ours ---------------------------------------------------------------------------------------


def our_logits(executor: CudaExecutor, ids: Tensor, case: Case) -> tuple[Tensor, str, str]:
    """The same positions, by one prefill and then `steps` replays; the names of both regimes."""
    page = executor.plan.kv[0].page_tokens
    pages = -(-(case.prompt + case.steps) // page)
    order = torch.randperm(case.sequences * pages, generator=torch.Generator().manual_seed(3))
    tables = order.view(case.sequences, pages).tolist()
    prompts = ids[:, : case.prompt].tolist()
    batch = StepBatch(
        "prefill",
        tuple(range(case.sequences)),
        [token for row in prompts for token in row],
        [i * case.prompt for i in range(case.sequences + 1)],
        [0] * case.sequences,
        tables,
        [True] * case.sequences,
    )
    regime, rows = executor.prefill(batch)
    executor.stream.synchronize()
    found = [executor.logits(regime, rows).clone()]
    wanted = executor.decode_regime(case.sequences)
    for step in range(case.steps):
        at = case.prompt + step
        name = executor.set_decode(ids[:, at].tolist(), [at] * case.sequences, tables)
        executor.replay(name)
        executor.stream.synchronize()
        found.append(executor.logits(wanted, case.sequences).clone())
    return torch.stack(found, 1), regime.name, wanted.name


# --- comparison ---------------------------------------------------------------------------------


def compare(value: Tensor, reference: Tensor) -> dict[str, float]:
    """Errors of logits [rows, vocabulary], and how often both have the same best token.

    `beyond_rms` and `beyond_max`: rows whose margin between the reference's best two exceeds twice
    the root mean square or twice the largest error over all rows, and how many of them agree.
    """
    difference = value - reference
    best, second = reference.topk(2).values.unbind(-1)
    same = value.argmax(-1) == reference.argmax(-1)
    rms = float(difference.square().mean().sqrt())
    largest = float(difference.abs().max())
    row_errors = difference.norm(dim=-1) / reference.norm(dim=-1)
    found = {
        "relative": float(difference.norm() / reference.norm()),
        "worst_row": float(row_errors.max()),
        "max_over_max": largest / float(reference.abs().max()),
        "rows": len(value),
        "same": int(same.sum()),
        "mean_margin": float((best - second).mean()),
    }
    for name, error in (("rms", rms), ("max", largest)):
        clear = (best - second) > 2 * error
        found[f"error_{name}"] = error
        found[f"clear_{name}"] = int(clear.sum())
        found[f"clear_{name}_same"] = int((same & clear).sum())
    return found


def measure(executor: CudaExecutor, models: dict[str, Any], case: Case) -> dict[str, Any]:
    """All three against each other: the prefill's rows and the decode steps apart."""
    generator = torch.Generator().manual_seed(11)
    shape = (case.sequences, case.prompt + case.steps)
    ids = torch.randint(10, executor.plan.tokens.vocab_size, shape, generator=generator)
    ours, prefill, decode = our_logits(executor, ids, case)
    on_device = ids.to(ours.device)
    refs = {
        name: reference_logits(model, on_device, case.steps + 1) for name, model in models.items()
    }
    sides = {"ours": ours} | refs
    pairs = (("ours", "bf16"), ("ours", "fp32"), ("bf16", "fp32"))
    found: dict[str, Any] = {"prefill_regime": prefill, "decode_regime": decode}
    for part, span in (("prefill", slice(0, 1)), ("decode", slice(1, None))):
        found[part] = {
            f"{a} vs {b}": compare(sides[a][:, span].flatten(0, 1), sides[b][:, span].flatten(0, 1))
            for a, b in pairs
        }
    return found


def table(report: dict[str, Any]) -> list[str]:
    """A line a comparison."""
    lines = []
    for name, result in report["cases"].items():
        if "failed" in result:
            lines.append(f"{name}: {result['failed']}")
            continue
        for part in ("prefill", "decode"):
            for pair, v in result[part].items():
                lines.append(
                    f"{result[part + '_regime']:13} {pair:13} relative {v['relative']:.4f}, worst "
                    f"row {v['worst_row']:.4f}, max/max {v['max_over_max']:.4f}, same "
                    f"{v['same']}/{v['rows']}, clear (2 rms) {v['clear_rms_same']}/"
                    f"{v['clear_rms']}, (2 max) {v['clear_max_same']}/{v['clear_max']}"
                )
    return lines


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("preset", help="a name of sitsc models")
    parser.add_argument("-o", "--out", type=Path, required=True)
    options = parser.parse_args()
    start = time.perf_counter()
    artifact = open_artifact(options.artifact)
    plan = artifact.plan
    weights = random_weights(plan)
    executor = CudaExecutor(artifact, weights)
    executor.capture(sorted({executor.decode_regime(case.sequences).name for case in CASES}))
    tensors, config = checkpoint_tensors(plan, weights), preset(options.preset)
    models = {
        "bf16": transformers_model(config, tensors, torch.bfloat16),
        "fp32": transformers_model(config, tensors, torch.float32),
    }
    torch.cuda.synchronize()
    report: dict[str, Any] = {
        "about": "bench/cuda_numerics.py: logits, random weights, forced tokens",
        "hardware": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "plan": plan.sha256(),
        "ready_s": time.perf_counter() - start,
        "cases": {},
    }
    for case in CASES:
        name = f"bs{case.sequences}_prompt{case.prompt}_steps{case.steps}"
        try:
            report["cases"][name] = measure(executor, models, case)
        except Exception as failure:
            report["cases"][name] = {"failed": f"{type(failure).__name__}: {str(failure)[:300]}"}
            traceback.print_exc()
        torch.cuda.empty_cache()
        print(name, f"{time.perf_counter() - start:.1f} s", flush=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    print("\n".join(table(report)))


if __name__ == "__main__":
    main()
