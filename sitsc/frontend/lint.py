"""Everything that can be said about a model before compiling it, in one report.

In: an opened checkpoint and what was asked for. Out: `LintReport`: the use of every key of
config.json, of every tensor, and findings. `check` raises the first error instead.
"""

from dataclasses import dataclass
from typing import Any

from sitsc.core.errors import SitscError
from sitsc.frontend.checkpoint_types import Checkpoint, Nested
from sitsc.frontend.config_knowledge import canonical, family_of, use_of
from sitsc.frontend.config_lint import config_problems
from sitsc.frontend.nested import outer_problems, outer_uses
from sitsc.frontend.range_lint import dtype_warnings, range_problems
from sitsc.frontend.safe_files import shown
from sitsc.frontend.tensor_lint import TensorLint, family_shapes, tensor_problems
from sitsc.frontend.tokenizer_lint import tokenizer_problems

ERROR, WARNING = "error", "warning"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: "error" or "warning", what, where, and what to do."""

    level: str
    what: str
    where: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class KeyUse:
    """A key of config.json: its value, shortened, and what becomes of it."""

    key: str
    value: str
    use: str


@dataclass(frozen=True, slots=True)
class LintReport:
    """`tensors`: use → how many; `left_out`: tensor → the rule, or the tensor that it copies."""

    model_type: str
    keys: tuple[KeyUse, ...]
    tensors: dict[str, int]
    left_out: dict[str, str]
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether the model can be compiled as far as its files tell."""
        return not any(f.level == ERROR for f in self.findings)


def lint_checkpoint(
    checkpoint: Checkpoint,
    allow: frozenset[str] = frozenset(),
    dtype: str = "auto",
    *,
    read_weights: bool = False,
) -> LintReport:
    """All findings about a checkpoint; `read_weights` looks for numbers that overflow `dtype`."""
    nested = checkpoint.nested
    keys = key_uses(checkpoint.config, allow)
    errors = list(config_problems(checkpoint.config, allow))
    warnings: list[str] = []
    if nested is not None:
        keys = (*_outer_uses(nested, allow), *keys)
        errors = outer_problems(nested, allow) + errors
        warnings += nested.remarks
    tensors, left_out = {}, {}
    if not errors:
        family = family_of(checkpoint.config)
        if family.get("untested"):
            warnings.append(
                f"model_type {shown(checkpoint.config['model_type'])} is not tested: it is "
                "compiled as transformers has it"
            )
        more, tensors, left_out = _tensors(checkpoint, family)
        errors += more
        for part in (tokenizer_problems(checkpoint),):
            errors += part[0]
            warnings += part[1]
        errors += range_problems(checkpoint, dtype, read_weights)
        warnings += dtype_warnings(checkpoint, dtype)
    findings = [Finding(ERROR, e.what, e.where, e.hint) for e in errors]
    findings += [Finding(WARNING, text) for text in warnings]
    kind = checkpoint.config.get("model_type")
    return LintReport(str(kind), keys, tensors, left_out, tuple(findings))


def check(checkpoint: Checkpoint, allow: frozenset[str], dtype: str = "auto") -> list[str]:
    """Raise the first error of a checkpoint; its warnings. Reads headers only."""
    nested = checkpoint.nested
    for problem in outer_problems(nested, allow) if nested is not None else ():
        raise problem
    for problem in config_problems(checkpoint.config, allow):
        raise problem
    family = family_of(checkpoint.config)
    errors, _, _ = _tensors(checkpoint, family)
    more, warnings = tokenizer_problems(checkpoint)
    for problem in [*errors, *more]:
        raise problem
    remarks = nested.remarks if nested is not None else ()
    return [*remarks, *warnings, *dtype_warnings(checkpoint, dtype)]


def key_uses(config: dict[str, Any], allow: frozenset[str]) -> tuple[KeyUse, ...]:
    """The use of every key of the config."""
    try:
        family: dict[str, Any] = family_of(config)
    except SitscError:
        return ()
    uses = []
    for key, value in sorted(config.items()):
        use = use_of(key, value, family)
        allowed = key in allow and use in ("unknown", "refused")
        uses.append(KeyUse(key, shown(value), "allowed" if allowed else use))
    return tuple(uses)


def _outer_uses(nested: Nested, allow: frozenset[str]) -> list[KeyUse]:
    """The use of every key around the decoder's own."""
    return [
        KeyUse(key, shown(nested.outer[key]), "allowed" if key in allow else use)
        for key, use in sorted(outer_uses(nested).items())
    ]


def _tensors(
    checkpoint: Checkpoint, family: dict[str, Any]
) -> tuple[list[SitscError], dict[str, int], dict[str, str]]:
    """(errors, use → count, tensor → why it is left out) of a config that is without errors."""
    if not checkpoint.has_weights:
        return [], {}, {}
    config = checkpoint.config
    named = canonical(config, family)
    try:
        expected = family_shapes(config, named, family, checkpoint.tensors)
    except SitscError as error:
        return [error], {}, {}
    result, errors = tensor_problems(named, expected, checkpoint.tensors, checkpoint.nested)
    return errors, _counts(result, checkpoint), result.rules | result.duplicates


def _counts(result: TensorLint, checkpoint: Checkpoint) -> dict[str, int]:
    left = len(result.duplicates) + len(result.ignored)
    counts = {"consumed": len(checkpoint.tensors) - left, "tied copy": len(result.duplicates)}
    for rule in result.rules.values():
        counts[f"ignored: {rule}"] = counts.get(f"ignored: {rule}", 0) + 1
    return counts
