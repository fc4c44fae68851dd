"""Golden configurations: a choice with its evidence, as a TOML file that people read.

In: a record, or the text of a file; what is true today. Out: the other form, or why a record is
stale. Knows no model and no device. docs/golden.md tells the format.
"""

import tomllib
from dataclasses import dataclass, fields, replace
from datetime import date
from statistics import fmean
from typing import Any

from sitsc.core.canonical import sha256_hex
from sitsc.core.errors import GoldenError, OptionError, PlanError
from sitsc.core.options import CompileOptions
from sitsc.core.records import from_value, to_value
from sitsc.core.toml_text import rounded, toml_text

SCHEMA = 1
EXPIRES_DAYS = 90
NOT_STORED = ("slo", "workload", "devices", "pack")  # options that only lead to others, or to none
_HINT = "make it again with sitsc golden"
Value = int | bool | str | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GoldenAsked:
    """The question: a workload as sitsc.passes.workloads has it; limits in ms, 0 for none."""

    prompt_tokens: int
    output_tokens: int
    concurrency: int
    rate: float
    prompts: tuple[int, ...]
    ttft_ms: float
    tpot_ms: float

    @property
    def context(self) -> int:
        """Tokens before a sequence in the middle of its output, on average."""
        return round(fmean(self.prompts or (self.prompt_tokens,))) + self.output_tokens // 2

    def slo_text(self) -> str:
        """ "TTFT 200 ms and TPOT 20 ms"."""
        pairs = (("TTFT", self.ttft_ms), ("TPOT", self.tpot_ms))
        return " and ".join(f"{name} {value:g} ms" for name, value in pairs if value) or "no limit"


@dataclass(frozen=True, slots=True)
class Figures:
    """What a candidate reaches.

    TTFT of a lone prompt, the time between tokens of the full batch alone and with the prompts of
    others in between, a sequence from its prompt to its last token; tokens/s of all replicas.
    """

    ttft_ms: float
    tpot_ms: float
    loaded_tpot_ms: float
    cycle_ms: float
    tokens_per_s: float

    def misses(self, asked: GoldenAsked) -> float:
        """How many times over its limit the worse of both is; at most 1 when both hold."""
        pairs = ((self.ttft_ms, asked.ttft_ms), (self.loaded_tpot_ms, asked.tpot_ms))
        return max((value / limit for value, limit in pairs if limit), default=0.0)


@dataclass(frozen=True, slots=True)
class GoldenMeasured:
    """Figures of one replica through the engine, and where they come from.

    TPOT of `sequences` with `context` tokens each on average. `weights` is "checkpoint" or
    "random". What is of several replicas or under load follows from them.
    """

    figures: Figures
    sequences: int
    context: float
    weights: str
    hardware: str
    versions: dict[str, str]
    commit: str
    date: str


@dataclass(frozen=True, slots=True)
class GoldenCandidate:
    """A configuration that has a plan: its own options, digests, figures.

    `not_measured` says why there are no measured figures. Errors are relative.
    """

    name: str
    replicas: int
    options: dict[str, Value]
    plan: str
    runs: str
    decode_buckets: tuple[int, ...]
    prefill_buckets: tuple[int, ...]
    memory_bytes: int
    predicted: Figures
    ttft_error: float
    tpot_error: float
    not_measured: str
    measured: GoldenMeasured | None

    @property
    def figures(self) -> Figures:
        """Measured where they are, else predicted."""
        return self.predicted if self.measured is None else self.measured.figures


@dataclass(frozen=True, slots=True)
class GoldenRejected:
    """A configuration that was not taken, why, and the smallest change that would do ("": none)."""

    name: str
    reason: str
    change: str


@dataclass(frozen=True, slots=True)
class GoldenModel:
    """`fingerprint` covers config and tensor headers, and not what nothing compiled depends on.

    Of a preset the name is enough to make it again.
    """

    name: str
    preset: bool
    architecture: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Golden:
    """A golden configuration: `options` are those of the candidate `chosen` (from 0).

    `data` holds the digests of the files that predictions and kernels come from, `compiler` the
    versions that made the plans. `expires` is the first day on which it is stale.
    """

    schema: int
    made: date
    expires: date
    digest: str
    commit: str
    chosen: int
    model: GoldenModel
    target: str
    devices: int
    options: dict[str, Value]
    asked: GoldenAsked
    data: dict[str, str]
    compiler: dict[str, str]
    candidates: tuple[GoldenCandidate, ...]
    rejected: tuple[GoldenRejected, ...]

    @property
    def best(self) -> GoldenCandidate:
        """What was chosen."""
        return self.candidates[self.chosen]

    @property
    def status(self) -> str:
        """How sure the choice is, in words."""
        count = sum(c.measured is not None for c in self.candidates)
        if self.best.measured is None:
            return "predicted, not measured"
        return "measured" if count == len(self.candidates) else "measured in part"

    def text(self) -> str:
        """The canonical text; its digest covers all of the record."""
        return _comment(self) + toml_text(_values(replace(self, digest=digest_of(self))))

    def compile_options(self) -> CompileOptions:
        """The options of `sitsc compile`. Raises OptionError."""
        return compile_options(self.options)


def compile_options(stored: dict[str, Value]) -> CompileOptions:
    """Stored options as those of the compiler. Raises OptionError for unknown names and values."""
    known = {f.name: type(f.default) for f in fields(CompileOptions) if f.name not in NOT_STORED}
    for name, value in stored.items():
        if name not in known:
            raise OptionError(f"unknown option {name!r}", hint=f"one of {', '.join(known)}")
        if type(value) is not known[name]:
            raise OptionError(f"option {name} is {value!r}, no {known[name].__name__}")
    return CompileOptions(**stored)  # pyright: ignore[reportArgumentType]


def stored_options(options: CompileOptions) -> dict[str, Value]:
    """The options as a file holds them."""
    names = [f.name for f in fields(CompileOptions) if f.name not in NOT_STORED]
    return {name: getattr(options, name) for name in names}


def digest_of(golden: Golden) -> str:
    """SHA-256 of the canonical text without a digest."""
    return sha256_hex(toml_text(_values(replace(golden, digest=""))).encode())


def _values(golden: Golden) -> dict[str, Any]:
    return to_value(golden)


def _comment(golden: Golden) -> str:
    devices = golden.target + (f":{golden.devices}" if golden.devices > 1 else "")
    lines = [
        f"The configuration of {golden.model.name} for {devices}: {golden.best.name}",
        f"({golden.status}; {golden.asked.slo_text()}). sitsc golden made it and makes it again;",
        "sitsc compile --golden takes it. Not to be edited: the digest covers all but comments.",
    ]
    return "".join(f"# {_shown(line)}\n" for line in lines)


def _shown(line: str) -> str:
    """In a comment names are for people: what cannot be printed is a question mark."""
    return "".join(char if char.isprintable() else "?" for char in line)


# --- reading ------------------------------------------------------------------------------------


def read_golden(text: str, where: str = "golden.toml") -> Golden:
    """The record of a file's text. Raises GoldenError naming `where`."""
    try:
        value = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, ValueError, RecursionError) as error:
        raise GoldenError(f"not TOML: {error}", where=where, hint=_HINT) from None
    if value.get("schema") != SCHEMA:
        what = (
            f"a golden configuration of schema {value.get('schema')!r}, this version reads {SCHEMA}"
        )
        raise GoldenError(what, where=where, hint=_HINT)
    try:
        golden = from_value(Golden, _filled(value), "golden")
        _check(golden)
    except (PlanError, OptionError) as error:
        place = f"{where}, {error.where}" if error.where else where
        raise GoldenError(error.what, where=place, hint=error.hint or _HINT) from None
    except ValueError as error:  # a number that has no canonical form
        raise GoldenError(str(error), where=where, hint=_HINT) from None
    return golden


def _filled(value: dict[str, Any]) -> dict[str, Any]:
    """The value with what TOML leaves out: figures that nobody measured."""
    found = value.get("candidates")
    if isinstance(found, list):
        items = [{"measured": None} | c if isinstance(c, dict) else c for c in found]
        value["candidates"] = items
    return value


def _check(golden: Golden) -> None:
    """Raises GoldenError for a record that was edited, PlanError or OptionError for nonsense."""
    if not 0 <= golden.chosen < len(golden.candidates):
        raise PlanError(f"chosen is {golden.chosen} of {len(golden.candidates)} candidates")
    if golden.digest != digest_of(golden):
        raise PlanError(
            "it was edited: the digest is another",
            hint=f"{_HINT}, or give what differs to sitsc compile beside --golden",
        )
    golden.compile_options()


# --- staleness ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Now:
    """What is true today; "" and None are not compared."""

    today: date
    fingerprint: str = ""
    target: str = ""
    data: dict[str, str] | None = None
    plan: str = ""
    runs: str = ""


def stale_reasons(golden: Golden, now: Now) -> tuple[str, ...]:
    """Why a golden configuration is stale, one line each; none for a fresh one.

    The plan of another model or target is another anyway, and not told; it comes last.
    """
    found = []
    other = now.fingerprint not in ("", golden.model.fingerprint)
    other |= now.target not in ("", golden.target)
    if now.today >= golden.expires:
        found.append(f"it expired on {golden.expires}")
    own = golden.model
    if now.fingerprint and now.fingerprint != own.fingerprint:
        change = f"config fingerprint {own.fingerprint[:12]} → {now.fingerprint[:12]}"
        found.append(f"it is for another model, {own.name} ({change})")
    if now.target and now.target != golden.target:
        found.append(f"it is for another target, {golden.target} and not {now.target}")
    elif now.data is not None:
        names = sorted({n for n, _ in golden.data.items() ^ now.data.items()})
        found += [f"{name} is no more what it was" for name in names]
    if now.plan and not other and now.plan != golden.best.plan:
        how = "it runs otherwise" if now.runs != golden.best.runs else "it only predicts otherwise"
        change = f"{golden.best.plan[:12]} → {now.plan[:12]}"
        found.append(f"the compiler makes another plan ({change}): {how}")
    return tuple(found)


# --- finishing ----------------------------------------------------------------------------------


def without_measuring(golden: Golden, reason: str) -> Golden:
    """The record, saying of each candidate why it was not measured."""
    found = tuple(replace(one, not_measured=reason) for one in golden.candidates)
    return finished(replace(golden, candidates=found))


def finished(golden: Golden) -> Golden:
    """The record with its digest, and floats as its text has them."""
    golden = from_value(Golden, _rounded(to_value(golden)), "golden")
    return replace(golden, digest=digest_of(golden))


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return rounded(value) if isinstance(value, float) else value
