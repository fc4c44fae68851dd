"""A first measurement of a CUDA artifact with random weights: correctness, decode, TTFT.

`python bench/cuda_step.py ART -o OUT.json [--quick]`, on the GPU; needs no compiler. The reference
is plain torch with the same weights, accumulating in fp32 and rounding where the model rounds.
"""

import argparse
import json
import statistics
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sitsc.core.artifact import open_artifact
from sitsc.core.plan import Plan
from sitsc.core.serving.batch import StepBatch
from sitsc.runtime.cuda_executor import CudaExecutor, carveout, random_weights

LAYER = "model.layers.{}."


def reference(plan: Plan, weights: dict[str, Tensor], ids: list[int]) -> Tensor:
    """Logits [tokens, vocabulary] in fp32 of one sequence."""
    d = plan.model.dimensions
    heads, kv_heads = d["num_attention_heads"], plan.kv[0].kv_heads
    dim, eps = plan.kv[0].head_dim, 1e-5
    inv = weights["model.rotary_emb.inv_freq"]
    x = weights["model.embed_tokens.weight"][torch.tensor(ids, device="cuda")]
    angle = torch.arange(len(ids), device="cuda")[:, None].float() * inv
    angle = torch.cat((angle, angle), -1)
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()

    def norm(x: Tensor, w: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return w * wide.bfloat16()

    def rope(x: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat((-high, low), -1) * sin[:, None]

    for i in range(d["num_hidden_layers"]):
        at = LAYER.format(i)
        h = norm(x, weights[at + "input_layernorm.weight"])
        qkv = h @ weights[at + "self_attn.q_proj+k_proj+v_proj.weight"].t()
        q, k, v = qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], -1)
        q, k = rope(q.view(-1, heads, dim)), rope(k.view(-1, kv_heads, dim))
        v = v.view(-1, kv_heads, dim)
        o = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            is_causal=True,
            enable_gqa=True,
        )[0].transpose(0, 1)
        x = x + o.reshape(len(ids), -1) @ weights[at + "self_attn.o_proj.weight"].t()
        h = norm(x, weights[at + "post_attention_layernorm.weight"])
        gate, up = (h @ weights[at + "mlp.gate_proj+up_proj.weight"].t()).chunk(2, -1)
        x = x + (torch.nn.functional.silu(gate) * up) @ weights[at + "mlp.down_proj.weight"].t()
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return (norm(x, weights["model.norm.weight"]) @ head.t()).float()


def error(a: Tensor, b: Tensor) -> float:
    """max|a - b| / max|b|."""
    return float((a.float() - b.float()).abs().max() / b.float().abs().max())


def check(
    executor: CudaExecutor, weights: dict[str, Tensor], lengths: list[int], steps: int
) -> dict[str, Any]:
    """Prefill of ragged sequences, then decode steps, against the reference."""
    plan, page = executor.plan, executor.plan.kv[0].page_tokens
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(10, 100000, (n,), generator=generator).tolist() for n in lengths]
    tables, at = [], 0
    for n in lengths:
        pages = -(-(n + steps + 1) // page)
        tables.append(list(range(at, at + pages))[::-1])
        at += pages
    starts = [0]
    for n in lengths:
        starts.append(starts[-1] + n)
    batch = StepBatch(
        "prefill",
        tuple(range(len(lengths))),
        [i for p in prompts for i in p],
        starts,
        [0] * len(lengths),
        tables,
        [True] * len(lengths),
    )
    regime, rows = executor.prefill(batch)
    executor.stream.synchronize()
    logits = executor.logits(regime, rows).clone()
    wanted = torch.stack([reference(plan, weights, p)[-1] for p in prompts])
    found = {"prefill_error": error(logits, wanted), "prefill_regime": regime.name}
    ids = logits.argmax(-1).tolist()
    name = executor.set_decode(ids, lengths, tables)
    executor.stream.synchronize()
    whole = [[*p, i] for p, i in zip(prompts, ids, strict=True)]
    errors, same = [], True
    for _ in range(steps):
        executor.replay(name)
        executor.stream.synchronize()
        got = executor.logits(next(r for r in plan.regimes if r.name == name), len(lengths)).clone()
        want = torch.stack([reference(plan, weights, w)[-1] for w in whole])
        errors.append(error(got, want))
        sampled = executor.sampled(len(lengths)).tolist()
        same = same and sampled == got.argmax(-1).tolist()
        for w, i in zip(whole, sampled, strict=True):
            w.append(i)
    return found | {"decode_errors": errors, "sampled_is_argmax": same, "decode_regime": name}


def time_decode(
    executor: CudaExecutor, batch: int, context: int, steps: int = 40
) -> dict[str, float]:
    """Median milliseconds of a decode step with `batch` sequences of `context` tokens."""
    page = executor.plan.kv[0].page_tokens
    width = -(-(context + 2 * steps + 40) // page)
    if batch * width > executor.plan.memory.kv_pages:
        return {"error": 0.0}
    order = torch.randperm(batch * width, generator=torch.Generator().manual_seed(0)).tolist()
    tables = [order[i * width : (i + 1) * width] for i in range(batch)]
    name = executor.set_decode([100 + i for i in range(batch)], [context] * batch, tables)
    for _ in range(8):
        executor.replay(name)
    executor.stream.synchronize()
    times = []
    for _ in range(4):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(executor.stream)
        for _ in range(steps // 4):
            executor.replay(name)
        b.record(executor.stream)
        b.synchronize()
        times.append(a.elapsed_time(b) / (steps // 4))
    return {"ms": statistics.median(times), "best_ms": min(times)}


def time_prefill(executor: CudaExecutor, tokens: int, repeats: int = 4) -> dict[str, float]:
    """Milliseconds from the request to its logits on the device, host work included."""
    page = executor.plan.kv[0].page_tokens
    table = list(range(-(-tokens // page)))
    ids = torch.randint(10, 100000, (tokens,)).tolist()
    batch = StepBatch("prefill", (0,), ids, [0, tokens], [0], [table], [True])
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        executor.prefill(batch)
        executor.stream.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return {"ms": statistics.median(times), "best_ms": min(times), "first_ms": times[0]}


def time_kernels(executor: CudaExecutor, name: str) -> dict[str, float]:
    """Microseconds of each launch of a regime's layers, alone in a graph of many."""
    regime = next(r for r in executor.plan.regimes if r.name == name)
    sizes = regime.sizes | {"sequence_pages": executor._width}
    found: dict[str, float] = {}
    groups = [g for g in regime.groups if g.layers] + [regime.groups[-2], regime.groups[-1]]
    for group in groups:
        for index, launch in enumerate(group.launches):
            layers = group.layers or (None,)
            bound = [
                executor._bind(
                    launch, n, 0 if n is None else executor._place(n), sizes, carveout(regime)
                )
                for n in layers
            ]
            bound = bound if len(bound) > 1 else bound * 8
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(executor.stream):
                bound[0](executor.stream.cuda_stream)
                executor.stream.synchronize()
                graph.capture_begin()
                for step in bound:
                    step(executor.stream.cuda_stream)
                graph.capture_end()
                graph.replay()
                a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                a.record(executor.stream)
                for _ in range(5):
                    graph.replay()
                b.record(executor.stream)
            b.synchronize()
            label = f"{group.name}.{index}.{launch.template or launch.kernel}"
            found[label] = a.elapsed_time(b) / 5 / len(bound) * 1e3
    return found


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    start = time.perf_counter()
    report: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    artifact = open_artifact(options.artifact)
    plan = artifact.plan
    report["plan"] = plan.sha256()
    weights = random_weights(plan)
    torch.cuda.synchronize()
    report["weights_s"] = time.perf_counter() - start
    executor = CudaExecutor(artifact, weights)
    executor.capture()
    torch.cuda.synchronize()
    report["ready_s"] = time.perf_counter() - start

    def attempt(name: str, call: Any) -> None:
        try:
            report[name] = call()
        except Exception as failure:
            report[name] = {"failed": f"{type(failure).__name__}: {str(failure)[:300]}"}
            traceback.print_exc()
        print(name, json.dumps(report[name]), flush=True)

    for lengths in ([1], [100], [17, 5, 64, 33], [130] * 8, [40] * 33):
        attempt(
            f"check_{len(lengths)}x{lengths[0]}", lambda n=lengths: check(executor, weights, n, 3)
        )
    for pool in executor.memory.pools.values():
        pool.view(torch.bfloat16).normal_()
    grid = [(1, 128), (1, 8192), (2, 128), (4, 128), (8, 128), (16, 128), (32, 1024), (64, 512)]
    grid += [(128, 512), (256, 512)]
    for batch, context in grid:
        attempt(
            f"decode_bs{batch}_ctx{context}", lambda b=batch, c=context: time_decode(executor, b, c)
        )
    for tokens in (512, 2048, 8192):
        attempt(f"ttft_{tokens}", lambda t=tokens: time_prefill(executor, t))
    if not options.quick:
        for name in ("decode_1", "decode_8", "decode_32", "decode_64"):
            attempt(f"kernels_{name}", lambda n=name: time_kernels(executor, n))
    report["peak_bytes"] = torch.cuda.max_memory_allocated()
    report["planned_bytes"] = plan.memory.total_bytes
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
