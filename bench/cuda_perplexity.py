"""Perplexity of an artifact on the GPU beside float32 on the CPU, on the project's own text.

`python bench/cuda_perplexity.py reference MODEL -o REF.json` where the model is (transformers, on
the CPU), then `python bench/cuda_perplexity.py gpu ART REF.json -o OUT.json` where the GPU is: half
of the text as a prefill, then one forced decode step a token.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
TEXTS = ("docs/gpu.md", "README.md")
HALF = 512


def reference(model: Path) -> dict[str, Any]:
    """Token ids, perplexity of their second half, and the best next token of each position."""
    import transformers  # noqa: PLC0415  (seconds; not where the GPU is)

    from sitsc.frontend.checkpoint import open_checkpoint  # noqa: PLC0415

    checkpoint = open_checkpoint(model)
    config = transformers.AutoConfig.for_model(**checkpoint.config)
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(config)
    weights = {name: checkpoint.read(name).float() for name in checkpoint.tensors}
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    made.load_state_dict(weights, assign=True)
    made.model.rotary_emb = type(made.model.rotary_emb)(config)
    text = "".join((ROOT / name).read_text() for name in TEXTS)
    assert checkpoint.tokenizer.tokenizer_json is not None
    tokenizer = _tokenizer(checkpoint.tokenizer.tokenizer_json)
    ids = tokenizer.encode(text, add_special_tokens=False).ids[: 2 * HALF + 1]
    with torch.no_grad():
        logits = made.eval()(torch.tensor([ids[:-1]])).logits[0].float()
    return {
        "ids": ids,
        "perplexity": _perplexity(logits[HALF:], ids[HALF + 1 :]),
        "best": logits[HALF:].argmax(-1).tolist(),
        "texts": list(TEXTS),
    }


def on_gpu(artifact: Path, told: dict[str, Any]) -> dict[str, Any]:
    """The same figure by the steps that serving replays."""
    from cuda_numerics import Case, our_logits  # noqa: PLC0415  (beside this file)

    from sitsc.runtime.loader import load  # noqa: PLC0415

    session = load(artifact)
    ids = torch.tensor([told["ids"][:-1]])
    case = Case(1, HALF, HALF)
    logits, prefill, decode = our_logits(session.executor, ids, case)
    found = logits[0, 1:].float().cpu()
    perplexity = _perplexity(found, told["ids"][HALF + 1 :])
    return {
        "about": f"bench/cuda_perplexity.py: {HALF} forced tokens after a prefill of {HALF}",
        "hardware": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "plan": session.executor.plan.sha256(),
        "texts": told["texts"],
        "gpu_perplexity": perplexity,
        "cpu_float32_perplexity": told["perplexity"],
        "ratio": perplexity / told["perplexity"],
        "same_best": int((found.argmax(-1) == torch.tensor(told["best"])).sum()),
        "tokens": len(found),
        "regimes": [prefill, decode],
    }


def _perplexity(logits: torch.Tensor, ids: list[int]) -> float:
    return math.exp(torch.nn.functional.cross_entropy(logits, torch.tensor(ids)).item())


def _tokenizer(data: bytes) -> Any:
    from tokenizers import Tokenizer  # noqa: PLC0415

    return Tokenizer.from_buffer(data)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    first, second = commands.add_parser("reference"), commands.add_parser("gpu")
    first.add_argument("model", type=Path)
    second.add_argument("artifact", type=Path)
    second.add_argument("reference", type=Path)
    for each in (first, second):
        each.add_argument("-o", "--out", type=Path, required=True)
    options = parser.parse_args()
    if options.command == "reference":
        found = reference(options.model)
    else:
        found = on_gpu(options.artifact, json.loads(options.reference.read_text()))
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print({key: value for key, value in found.items() if key not in ("ids", "best")})


if __name__ == "__main__":
    main()
