"""The README's table of measured figures, written from bench/results: no figure is typed by hand.

`python bench/summary.py` rewrites the part of README.md between its two markers.
"""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
GPU_MODELS = ("llama3-8b", "llama32-1b", "llama3-8b_tp2", "llama3-8b_pp2")
_RANKS = re.compile(r" (?:tp|pp)(\d+)$")  # of a model's name in results: on so many GPUs
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def cpu_lines(report: dict[str, Any]) -> list[str]:
    """SmolLM2 on the CPU, and the peers of the same run."""
    versions, text = report["versions"], []
    text += [
        f"SmolLM2-135M-Instruct, {report['hardware']}, torch {versions['torch']}, commit "
        f"{report['commit'][:9]}, {report['date']} (`sitsc bench`, `bench/peers_cpu.py`):",
        "",
        "| | decode, tokens/s | prefill of 512, ms | start to first token, s | peak memory "
        "/ weights | perplexity |",
        "|---|---|---|---|---|---|",
    ]
    for name, result in sorted(report["results"].items()):
        start = result["start"]
        text.append(
            f"| sitsc {name} | {result['decode'][0]['tokens_per_s']:.0f} "
            f"| {result['ttft_ms']['512']:.0f} | {start['first_token_s']:.2f} "
            f"| {start['peak_over_weights']:.2f} | {result['perplexity']:.2f} |"
        )
    for name, peer in sorted(report.get("peers", {}).items()):
        if "decode_tokens_per_s" in peer:
            prefill = f"{peer['ttft_512_ms']:.0f}" if "ttft_512_ms" in peer else ""
            text.append(f"| {name} | {peer['decode_tokens_per_s']:.0f} | {prefill} | | | |")
    return text


def gpu_lines(report: dict[str, Any]) -> list[str]:
    """One model on one GPU or two, through the engine, beside peers on such machines."""
    model, versions = report["model"], report["versions"]
    ranks = _RANKS.search(model)
    hardware = f"{ranks[1]} × {report['hardware']}" if ranks else report["hardware"]
    peers = [k for k, v in report.items() if k != "sitsc" and isinstance(v, dict) and model in v]
    text = [
        f"{model}, random weights, bf16, {hardware}, torch {versions['torch']}, commit "
        f"{report['commit'][:9]}, {report['date']} (`sitsc bench`: the engine, greedy; ms a "
        "token, ttft in ms, start in s):",
        "",
        "| | sitsc | of the limit |" + "".join(f" {peer} |" for peer in peers),
        "|---|---|---|" + "---|" * len(peers),
    ]
    for name, value in report["sitsc"][model].items():
        share = report["fraction_of_limit"].get(name)
        cells = [f"{value:.2f}", "" if share is None else f"{share:.2f}"]
        cells += [str(report[peer][model].get(name, "")) for peer in peers]
        text.append(f"| {name} | {' | '.join(cells)} |")
    return text


def main() -> None:
    """Rewrite the README's figures."""
    results = ROOT / "bench" / "results"
    parts = [
        cpu_lines(json.loads((results / "cpu_smollm2-135m.json").read_text())),
        *(gpu_lines(json.loads((results / f"h200_{m}.json").read_text())) for m in GPU_MODELS),
    ]
    body = "\n\n".join("\n".join(lines) for lines in parts)
    readme = ROOT / "README.md"
    text = readme.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    readme.write_text(f"{before}{BEGIN}\n{body}\n{END}{after}")


if __name__ == "__main__":
    main()
