"""What is asked of a partition: a workload, and limits on how long it may take.

In: the text of a workload file, or of `--slo`. Out: frozen records. A workload is a closed loop of
`concurrency` requests, or an open one of `rate` requests a second.
"""

import json
import math
import statistics
from dataclasses import dataclass
from typing import Any

from sitsc.core.errors import OptionError

PROMPT, OUTPUT, CONCURRENCY = 2048, 256, 32
_QUANTILES = 8
_HINT = (
    'a list of {"prompt_tokens": n, "max_tokens": n, "at": s} or one object with prompt_tokens, '
    "output_tokens and concurrency or rate"
)


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts of `prompt_tokens` in the middle, `output_tokens` each; `prompts` are quantiles.

    `rate` is requests a second, 0 for a closed loop of `concurrency` requests.
    """

    prompt_tokens: int = PROMPT
    output_tokens: int = OUTPUT
    concurrency: int = CONCURRENCY
    rate: float = 0.0
    prompts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raises OptionError for sizes that nothing can have."""
        sizes = ("prompt_tokens", "output_tokens", "concurrency")
        if any(getattr(self, name) < 1 for name in sizes) or self.rate < 0:
            raise OptionError("a workload of less than one token or request", hint="1 or more")

    @property
    def lengths(self) -> tuple[int, ...]:
        """Prompt lengths that stand for all."""
        return self.prompts or (self.prompt_tokens,)

    @property
    def context(self) -> int:
        """Tokens before a sequence in the middle of its output, on average."""
        return round(statistics.fmean(self.lengths)) + self.output_tokens // 2

    @property
    def most_tokens(self) -> int:
        """Tokens that the longest sequence keeps."""
        return max(self.lengths) + self.output_tokens

    @property
    def asked(self) -> str:
        """ "32 at once", or "70 a second"."""
        return f"{self.rate:.3g} a second" if self.rate > 0 else f"{self.concurrency} at once"

    def check_context(self, tokens: int) -> None:
        """Raises OptionError when the longest sequence is longer than a context of `tokens`."""
        if self.most_tokens > tokens:
            raise OptionError(
                f"the longest sequence of the workload has {self.most_tokens} tokens, prompt and "
                f"output, and the context {tokens}",
                hint=f"--max-context {self.most_tokens}, or shorter requests",
            )

    @property
    def mean_tokens(self) -> float:
        """Tokens that a sequence keeps on average, each at its end."""
        return statistics.fmean(self.lengths) + self.output_tokens


@dataclass(frozen=True, slots=True)
class Slo:
    """The longest TTFT and TPOT in milliseconds; None where there is no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def misses(self, ttft_ms: float, tpot_ms: float) -> float:
        """How many times over its limit the worse of both is; at most 1 when both hold."""
        pairs = ((ttft_ms, self.ttft_ms), (tpot_ms, self.tpot_ms))
        return max((value / limit for value, limit in pairs if limit is not None), default=0.0)

    def text(self) -> str:
        """ "TTFT 50 ms and TPOT 2 ms"."""
        pairs = (("TTFT", self.ttft_ms), ("TPOT", self.tpot_ms))
        return " and ".join(f"{n} {v:g} ms" for n, v in pairs if v is not None) or "no limit"


def counted(count: int, noun: str) -> str:
    """ "1 device", "8 devices"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def read_slo(text: str) -> Slo:
    """ "ttft=200,tpot=20" in milliseconds. Raises OptionError."""
    found: dict[str, float] = {}
    for part in text.replace(" ", "").split(","):
        name, _, value = part.partition("=")
        try:
            number = float(value.lower().removesuffix("ms"))
        except ValueError:
            number = math.nan
        if name.lower() not in ("ttft", "tpot") or not 0 < number < math.inf:
            raise OptionError(f"--slo {text!r} cannot be read", hint="such as ttft=200,tpot=20")
        limit = f"{name.lower()}_ms"
        if limit in found:
            raise OptionError(f"--slo {text!r} says {name.lower()} twice", hint="leave out one")
        found[limit] = number
    return Slo(**found)


def read_workload(text: str, where: str) -> Workload:
    """The workload of a file's text. Raises OptionError naming `where`."""
    try:
        value = json.loads(text)
        if isinstance(value, list) and value:
            return _of_requests(value)
        if isinstance(value, dict) and "prompt_tokens" in value:
            return _of_sizes(value)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise OptionError(f"no workload: {reason}", where=where, hint=_HINT) from None
    raise OptionError("no workload in this file", where=where, hint=_HINT)


def _of_sizes(value: dict[str, Any]) -> Workload:
    known = {"prompt_tokens", "output_tokens", "concurrency", "rate"}
    if unknown := sorted(set(value) - known):
        raise ValueError(f"unknown key {unknown[0]!r}")
    rate = float(value.get("rate", 0.0))
    if not 0 <= rate < math.inf:
        raise ValueError(f"a rate of {rate}")
    usual = {"output_tokens": OUTPUT, "concurrency": CONCURRENCY} | value
    names = ("prompt_tokens", "output_tokens", "concurrency")
    prompt, output, concurrency = (_count(usual[name], name) for name in names)
    return Workload(prompt, output, concurrency, rate)


def _of_requests(requests: list[Any]) -> Workload:
    for request in requests:
        if not isinstance(request, dict):
            raise ValueError(f"{request!r} is no request")
    prompts = sorted(_length(request) for request in requests)
    outputs = [_count(request["max_tokens"], "max_tokens") for request in requests]
    times = [float(request.get("at", 0.0)) for request in requests]
    if wrong := [at for at in times if not 0 <= at < math.inf]:
        raise ValueError(f"a request at {wrong[0]:g} s")
    span = max(times) - min(times)
    middle = [
        prompts[min(len(prompts) - 1, int((i + 0.5) / _QUANTILES * len(prompts)))]
        for i in range(_QUANTILES)
    ]
    rate = (len(requests) - 1) / span if span > 0 else 0.0
    return Workload(
        prompt_tokens=round(statistics.median(prompts)),
        output_tokens=max(1, round(statistics.fmean(outputs))),
        concurrency=len(requests) if rate == 0 else CONCURRENCY,
        rate=rate,
        prompts=(*middle[:-1], prompts[-1]),
    )


def _length(request: dict[str, Any]) -> int:
    if "prompt_tokens" in request:
        return _count(request["prompt_tokens"], "prompt_tokens")
    return _count(len(request["prompt"]), "prompt")


def _count(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is {value!r}, no count")
    return value
