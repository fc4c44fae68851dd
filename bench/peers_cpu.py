"""Peers on this CPU, in the same run: transformers, OpenVINO GenAI, llama.cpp; one model.

`python bench/peers_cpu.py MODEL.gguf -o bench/results/cpu_smollm2-135m.json` adds a "peers"
section. An engine that is not installed is left out by name. OpenVINO GenAI and llama-cpp-python
may live in another environment: name its Python with --python.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers

from sitsc.frontend.checkpoint import open_checkpoint
from sitsc.runtime.measure import random_ids

DECODE_TOKENS, PROMPT_TOKENS = 128, 512


def transformers_figures(model: str, dtype: str) -> dict[str, float]:
    """Decode tokens/s after a 128-token prompt, and milliseconds of a 512-token prefill."""
    checkpoint = open_checkpoint(model)
    config = transformers.LlamaConfig(**checkpoint.config)
    with torch.device("meta"):
        net = transformers.LlamaForCausalLM(config)
    weights = {n: checkpoint.read(n).to(getattr(torch, dtype)) for n in checkpoint.tensors}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    net.load_state_dict(weights, assign=True)
    net.model.rotary_emb = type(net.model.rotary_emb)(config)
    net.eval()
    ids = torch.tensor([random_ids(PROMPT_TOKENS, config.vocab_size)])
    with torch.no_grad():
        prefill = []
        for _ in range(5):
            start = time.perf_counter()
            net(ids, use_cache=True, logits_to_keep=1)
            prefill.append(time.perf_counter() - start)
        out = net(ids[:, :128], use_cache=True)
        cache, token, rates = out.past_key_values, out.logits[:, -1:].argmax(-1), []
        for _ in range(2):
            start = time.perf_counter()
            for _ in range(DECODE_TOKENS // 2):
                out = net(token, past_key_values=cache, use_cache=True)
                token = out.logits[:, -1:].argmax(-1)
            rates.append(DECODE_TOKENS / 2 / (time.perf_counter() - start))
    return {"decode_tokens_per_s": max(rates), "ttft_512_ms": min(prefill) * 1e3}


OPENVINO = """
import json, sys, time
import openvino_genai as genai
pipe = genai.LLMPipeline(sys.argv[1], "CPU")
config = genai.GenerationConfig(
    max_new_tokens=128, ignore_eos=True, do_sample=False, apply_chat_template=False
)
best = 0.0
for _ in range(4):
    result = pipe.generate(["The history of the world is long and "], config)
    best = max(best, result.perf_metrics.get_throughput().mean)
print(json.dumps({"decode_tokens_per_s": best, "version": genai.__version__}))
"""
LLAMA_CPP = """
import json, sys, time
import llama_cpp
net = llama_cpp.Llama(sys.argv[1], n_ctx=2048, n_threads=2, verbose=False)
best, prefill = 0.0, 1e9
ids = list(range(20, 20 + 512))
for _ in range(4):
    net.reset()
    start = time.perf_counter(); net.eval(ids); prefill = min(prefill, time.perf_counter() - start)
    net.reset(); net.eval(ids[:128]); token = 42
    start = time.perf_counter()
    for _ in range(128):
        net.eval([token]); token = net.sample(temp=0.0)
    best = max(best, 128 / (time.perf_counter() - start))
found = {"decode_tokens_per_s": best, "ttft_512_ms": prefill * 1e3}
print(json.dumps(found | {"version": llama_cpp.__version__}))
"""


def other(python: str, script: str, model: str) -> dict[str, object]:
    """The figures that a script prints in another environment, or why there are none."""
    done = subprocess.run(
        [python, "-c", script, model], capture_output=True, text=True, check=False
    )
    if done.returncode:
        return {"left_out": (done.stderr.strip().splitlines() or ["failed"])[-1][:200]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    """Measure the peers and add them to a results file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--python", default=sys.executable)
    options = parser.parse_args()
    peers = {
        "transformers_float32": transformers_figures(options.model, "float32"),
        "transformers_bfloat16": transformers_figures(options.model, "bfloat16"),
        "openvino_genai_gguf": other(options.python, OPENVINO, options.model),
        "llama_cpp_q4_1": other(options.python, LLAMA_CPP, options.model),
    }
    kept = json.loads(options.out.read_text()) if options.out.is_file() else {}
    ours = {k: r["decode"][0]["tokens_per_s"] for k, r in kept.get("results", {}).items()}
    ratios = {
        f"{name} over {peer}": rate / figures["decode_tokens_per_s"]
        for name, rate in ours.items()
        for peer, figures in peers.items()
        if "decode_tokens_per_s" in figures
    }
    options.out.write_text(
        json.dumps(kept | {"peers": peers, "decode_ratio": ratios}, indent=1, sort_keys=True) + "\n"
    )
    print(json.dumps({"peers": peers, "decode_ratio": ratios}, indent=1))


if __name__ == "__main__":
    main()
