"""The policy of `sitsc plan diff`: how much worse a plan may be, and what was allowed until when.

In: TOML with `limits` by figure, `decisions` by section, `models` with both for some models, and
`allow` entries with a reason and an expiry date; a `PlanDiff` and today's date. Out: a `Verdict`.
Raises PolicyError for keys, figures and sections that do not exist.
"""

import difflib
import math
import re
import tomllib
from dataclasses import dataclass, field
from datetime import date
from typing import Any

from sitsc.core.diff.change import SECTIONS, Change, Figure, PlanDiff
from sitsc.core.errors import PlanError, PolicyError
from sitsc.core.plan import Plan
from sitsc.core.records import from_value

FIGURES = ("tpot", "ttft", "throughput", "cold_start", "kv_tokens", "memory")
_PARTS = ("weights", "kv", "arena", "package", "graph", "slack", "total")
_ONE = re.compile(r"(tpot_decode|ttft_prefill)_[1-9][0-9]*")
_ALLOW, _REFUSE, _ANY = "allow", "refuse", "any"
_KEYS = {"limits": {}, "decisions": {}, "models": [], "allow": []}
_UNKNOWN = "which this plan does not have"
_HINT = "docs/plan-diff.md shows a policy"


@dataclass(frozen=True, slots=True)
class Rules:
    """Limits by figure as relative worsening (None: any), sections whose changes are refused."""

    limits: dict[str, float | None] = field(default_factory=dict)
    refused: dict[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelRules:
    """Rules for plans whose facts are these: architecture, model_type, target or a dimension."""

    match: dict[str, int | str]
    rules: Rules


@dataclass(frozen=True, slots=True)
class Allowance:
    """Something that may be outside until `expires`, that day included.

    `what` is a figure or a section, `where` words that a change's line must have, `up_to` the most
    by which a figure may be worse (None: any).
    """

    what: str
    where: str
    up_to: float | None
    reason: str
    expires: date
    match: dict[str, int | str]


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy as read."""

    rules: Rules
    models: tuple[ModelRules, ...]
    allow: tuple[Allowance, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is outside of the policy, what was allowed and why, and remarks about the policy."""

    outside: tuple[str, ...]
    allowed: tuple[str, ...]
    remarks: tuple[str, ...]

    @property
    def within(self) -> bool:
        """Whether nothing is outside."""
        return not self.outside


# --- reading ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Entry:
    what: str
    where: str
    up_to: str
    reason: str
    expires: date
    match: dict[str, int | str]


@dataclass(frozen=True, slots=True)
class _Model:
    match: dict[str, int | str]
    limits: dict[str, str]
    decisions: dict[str, str]


@dataclass(frozen=True, slots=True)
class _File:
    limits: dict[str, str]
    decisions: dict[str, str]
    models: tuple[_Model, ...]
    allow: tuple[_Entry, ...]


def read_policy(text: str, where: str = "policy.toml") -> Policy:
    """The policy of a text. Raises PolicyError."""
    try:
        value = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PolicyError(f"not TOML: {error}", where=where, hint=_HINT) from None
    try:
        file = from_value(_File, _filled(value), "policy")
    except PlanError as error:
        place = f"{where}, {error.where}"
        raise PolicyError(error.what, where=place, hint=_HINT) from None
    models = tuple(ModelRules(m.match, _rules(m.limits, m.decisions, where)) for m in file.models)
    allow = tuple(_allowance(entry, where) for entry in file.allow)
    for one in models:
        if not one.match:
            raise PolicyError("models without match", where=where, hint="or use [limits]")
    return Policy(_rules(file.limits, file.decisions, where), models, allow)


def _filled(value: dict[str, Any]) -> dict[str, Any]:
    """The value with what may be left out."""
    more: dict[str, dict[str, Any]] = {
        "models": {"match": {}, "limits": {}, "decisions": {}},
        "allow": {"where": "", "up_to": _ANY, "match": {}},
    }
    filled = _KEYS | value
    for name, usual in more.items():
        if isinstance(filled[name], list):
            items = filled[name]
            filled[name] = [usual | item if isinstance(item, dict) else item for item in items]
    return filled


def _rules(limits: dict[str, str], decisions: dict[str, str], where: str) -> Rules:
    for name in limits:
        _check_figure(name, where)
    for name, word in decisions.items():
        if name not in SECTIONS:
            known = ", ".join(SECTIONS)
            raise PolicyError(f"unknown section {name!r}", where=where, hint=f"one of {known}")
        if word not in (_ALLOW, _REFUSE):
            what = f"decisions.{name} is {word!r}"
            raise PolicyError(what, where=where, hint=f"{_ALLOW!r} or {_REFUSE!r}")
    return Rules(
        {name: _share(text, f"limits.{name}", where) for name, text in limits.items()},
        {name: word == _REFUSE for name, word in decisions.items()},
    )


def _allowance(entry: _Entry, where: str) -> Allowance:
    if entry.what not in SECTIONS:
        _check_figure(entry.what, where, SECTIONS)
    if not entry.reason.strip():
        raise PolicyError(f"no reason for {entry.what}", where=where, hint="say why it is allowed")
    up_to = _share(entry.up_to, f"up_to of {entry.what}", where)
    if up_to is not None and entry.what in SECTIONS and entry.what not in FIGURES:
        what = f"up_to of {entry.what}: a section has no amount"
        raise PolicyError(what, where=where, hint="where = '…' narrows it")
    return Allowance(entry.what, entry.where, up_to, entry.reason, entry.expires, entry.match)


def _check_figure(name: str, where: str, others: tuple[str, ...] = ()) -> None:
    part = name.removeprefix("memory.") if name.startswith("memory.") else ""
    if name not in FIGURES and part not in _PARTS and not _ONE.fullmatch(name):
        known = ", ".join((*FIGURES, "memory.weights", "tpot_decode_4", *others))
        raise PolicyError(f"unknown figure {name!r}", where=where, hint=f"such as {known}")


def _share(text: str, what: str, where: str) -> float | None:
    """The share that "2.5 %" is; None for "any"."""
    if text == _ANY:
        return None
    found = re.fullmatch(r"\s*(\d{1,6}(?:\.\d{1,6})?)\s*%\s*", text)
    if found is None:
        raise PolicyError(f"{what} is {text!r}", where=where, hint="such as '2.5 %', or 'any'")
    return float(found[1]) / 100


# --- judging ------------------------------------------------------------------------------------


def judge(policy: Policy, diff: PlanDiff, facts: dict[str, int | str], today: date) -> Verdict:
    """Hold a comparison against a policy; `facts` are those of plan B, from `facts_of`."""
    rules = _for(policy, facts)
    outside: list[str] = []
    allowed: list[str] = []
    remarks: list[str] = []
    used: set[int] = set()
    for name, text, excess in _violations(rules, diff):
        found = [
            (index, entry)
            for index, entry in enumerate(policy.allow)
            if _covers(entry, name, text, excess) and _matches(entry.match, facts)
        ]
        used |= {index for index, _ in found}
        valid = [entry for _, entry in found if entry.expires >= today]
        if valid:
            entry = max(valid, key=lambda entry: entry.expires)
            allowed.append(f"{text}: {entry.reason} (until {entry.expires})")
            continue
        outside.append(text)
        for _, entry in found:
            remarks.append(f"the allowance for {entry.what} ended on {entry.expires}")
    for index, entry in enumerate(policy.allow):
        if index not in used and _matches(entry.match, facts):
            remarks.append(f"the allowance for {entry.what} ({entry.reason}) is not needed")
    remarks += _unknown_names(policy, facts)
    return Verdict(tuple(outside), tuple(allowed), tuple(dict.fromkeys(remarks)))


def facts_of(plan: Plan) -> dict[str, int | str]:
    """What `match` of a policy can name; of a plan that was read in part, what there is."""
    facts: dict[str, int | str] = {}
    if plan.model is not None:  # pyright: ignore[reportUnnecessaryComparison]
        facts |= {"architecture": plan.model.architecture, "model_type": plan.model.model_type}
        facts |= plan.model.dimensions
    if plan.target is not None:  # pyright: ignore[reportUnnecessaryComparison]
        facts["target"] = plan.target.name
    return facts


def _for(policy: Policy, facts: dict[str, int | str]) -> Rules:
    """The rules for a model: later entries win."""
    limits, refused = dict(policy.rules.limits), {"comparison": True} | policy.rules.refused
    for one in policy.models:
        if _matches(one.match, facts):
            limits |= one.rules.limits
            refused |= one.rules.refused
    return Rules(limits, refused)


def _matches(match: dict[str, int | str], facts: dict[str, int | str]) -> bool:
    return all(facts.get(name) == value for name, value in match.items())


def _unknown_names(policy: Policy, facts: dict[str, int | str]) -> list[str]:
    """Names that no rule can match by in this plan: another model's, or misspelt."""
    matches = [one.match for one in policy.models] + [entry.match for entry in policy.allow]
    names = dict.fromkeys(name for match in matches for name in match if name not in facts)
    found = []
    for name in names:
        near = difflib.get_close_matches(name, facts, 1)
        meant = f"; it has {near[0]!r}" if near else ""
        found.append(f"match names {name!r}, {_UNKNOWN}{meant}")
    return found


def unknown_name(remark: str) -> str:
    """The name that a remark of `judge` says a plan does not have, or ""."""
    name, found, _ = remark.partition(f", {_UNKNOWN}")
    return name if found else ""


def _violations(rules: Rules, diff: PlanDiff) -> list[tuple[str, str, float]]:
    """(figure or section, what is outside in a line, how much worse); a section has no amount."""
    found = []
    for figure in diff.figures:
        limit = _limit(rules, figure)
        if limit is not None and figure.worse > limit:
            text = f"{figure.name} {100 * figure.relative:+.3g} %, limit {100 * limit:g} %"
            found.append((figure.name, text, figure.worse))
    for change in diff.changes:
        if rules.refused.get(change.section, False):
            found.append((change.section, _line(change), math.inf))
    return found


def _line(change: Change) -> str:
    return f"{change.section}: {change.text}"


def _names(figure: str) -> tuple[str, ...]:
    """Names by which a figure is found, the most exact first."""
    group = figure.partition(".")[0] if figure == "memory.total" else figure.partition("_")[0]
    return (figure, group) if group in FIGURES else (figure,)


def _limit(rules: Rules, figure: Figure) -> float | None:
    for name in _names(figure.name):
        if name in rules.limits:
            return rules.limits[name]
    return None


def _covers(entry: Allowance, name: str, text: str, excess: float) -> bool:
    if entry.what not in _names(name) or entry.where not in text:
        return False
    return entry.up_to is None or excess <= entry.up_to
