"""Lint of text encoders: what every key and tensor is to the compiler, and all problems.

In: an opened checkpoint of an encoder. Out: a `LintReport`. Reads headers only.
"""

from sitsc.core.errors import SitscError
from sitsc.frontend.checkpoint_types import Checkpoint
from sitsc.frontend.encoder import read_pooling
from sitsc.frontend.encoder_checks import (
    build,
    declared_keys,
    key_problems,
    key_use,
    tensor_uses,
)
from sitsc.frontend.lint import ERROR, Finding, KeyUse, LintReport
from sitsc.frontend.safe_files import shown
from sitsc.frontend.tokenizer_lint import tokenizer_problems


def lint_encoder(checkpoint: Checkpoint, allow: frozenset[str]) -> LintReport:
    """All findings about a checkpoint of an encoder."""
    config = checkpoint.config
    declared = declared_keys(config["model_type"])
    keys = []
    for key, value in sorted(config.items()):
        use = key_use(key, value, declared)
        use = "allowed" if key in allow and use == "unknown" else use
        keys.append(KeyUse(key, shown(value), use))
    problems = list(key_problems(config, allow))
    counts: dict[str, int] = {}
    left_out: dict[str, str] = {}
    if not problems:
        try:
            left_out, problems = tensor_uses(build(config), checkpoint)
            problems += tokenizer_problems(checkpoint)[0]
            read_pooling(checkpoint.root, 1 << 20)
        except SitscError as error:
            problems.append(error)
        counts = {"consumed": len(checkpoint.tensors) - len(left_out)}
        for rule in left_out.values():
            counts[f"ignored: {rule}"] = counts.get(f"ignored: {rule}", 0) + 1
    findings = tuple(Finding(ERROR, e.what, e.where, e.hint) for e in problems)
    return LintReport(str(config["model_type"]), tuple(keys), counts, left_out, findings)
