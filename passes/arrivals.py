"""The requests of a workload, one by one: from a file, or drawn at a rate.

In: the text of a workload file (docs/partition.md), or a rate, a count and a seed. Out: arrivals in
seconds with token counts, always the same for a seed. Knows no model.
"""

import json
import math
import random
from dataclasses import dataclass
from statistics import fmean, median

from sitsc.core.errors import OptionError
from sitsc.core.serving.simulator import Arrival
from sitsc.passes.workloads import Workload, read_workload

REQUESTS, MOST_REQUESTS = 200, 1_000_000
_MEDIAN, _SPREAD, _SHORTEST, _LONGEST = 512, 0.8, 16, 4096  # prompts: a log-normal, cut
_SLOWEST, _FASTEST, _LAST = 1e-3, 1e6, 1e9  # requests a second; seconds
_OUTPUTS = (32, 256)  # even between both


@dataclass(frozen=True, slots=True)
class Requests:
    """A workload to replay. With `concurrency` so many at once, whatever the arrivals say."""

    arrivals: tuple[Arrival, ...]
    concurrency: int = 0

    @property
    def rate(self) -> float:
        """Requests a second of an open loop; infinite when all come at once."""
        span = self.arrivals[-1].at - self.arrivals[0].at
        return (len(self.arrivals) - 1) / span if span > 0 else math.inf

    def summary(self) -> Workload:
        """What a partition search asks of it: lengths, and how many at once."""
        prompts = sorted(a.prompt_tokens for a in self.arrivals)
        output = max(1, round(fmean(a.output_tokens for a in self.arrivals)))
        middle = round(median(prompts))
        octiles = tuple(prompts[(2 * i + 1) * len(prompts) // 16] for i in range(7))
        lengths = (*octiles, prompts[-1])
        if self.concurrency or math.isinf(self.rate):
            at_once = self.concurrency or len(prompts)
            return Workload(middle, output, min(at_once, len(prompts)), prompts=lengths)
        return Workload(middle, output, rate=self.rate, prompts=lengths)


def draw(
    count: int,
    rate: float,
    seed: int,
    *,
    concurrency: int = 0,
    prompt_tokens: int = 0,
    output_tokens: int = 0,
) -> Requests:
    """`count` requests: arrivals a Poisson process of `rate`, lengths as chats have them.

    Prompts are log-normal around 512 tokens, 16 to 4,096 of them; outputs even between 32 and 256;
    `prompt_tokens` and `output_tokens` above 0 are for all alike. The same seed gives the same
    lengths at any rate, and arrivals that scale with it. Raises OptionError.
    """
    check(count, rate, concurrency)
    for name, tokens in (("--prompt", prompt_tokens), ("--output", output_tokens)):
        if tokens < 0:
            raise OptionError(f"{name} {tokens}", hint="1 token or more, 0 for lengths as drawn")
    if not rate and not concurrency:
        raise OptionError("a workload needs a rate", hint="--rate, --concurrency or --workload")
    gaps, prompts, outputs = (random.Random(f"{seed} {name}") for name in ("at", "in", "out"))
    now, found = 0.0, []
    for _ in range(count):
        now += gaps.expovariate(1.0) / rate if rate else 0.0
        length = round(_MEDIAN * math.exp(prompts.gauss(0.0, _SPREAD)))
        length = min(_LONGEST, max(_SHORTEST, length))
        output = outputs.randint(*_OUTPUTS)
        found.append(Arrival(now, prompt_tokens or length, output_tokens or output))
    return Requests(tuple(found), concurrency)


def read_requests(
    text: str, where: str, *, count: int = 0, rate: float = 0.0, seed: int = 0, concurrency: int = 0
) -> Requests:
    """The requests of a workload file. Raises OptionError naming `where`.

    A list is taken as it is (`count` of 0: all of it); of sizes `count` alike requests come, at the
    file's rate or concurrency unless `rate` or `concurrency` says otherwise.
    """
    sizes = read_workload(text, where)
    value = json.loads(text)
    if isinstance(value, list):
        if rate:
            raise OptionError(f"--rate beside the arrivals of {where}", hint="leave --rate out")
        found = sorted((_arrival(one, where) for one in value), key=lambda a: a.at)
        check(count or len(found), 0.0, concurrency)
        return Requests(tuple(found[:count] if count else found), concurrency)
    rate = rate or (0.0 if concurrency else sizes.rate)
    at_once = concurrency or (0 if rate else sizes.concurrency)
    drawn = draw(count or REQUESTS, rate, seed, concurrency=at_once)
    same = (Arrival(a.at, sizes.prompt_tokens, sizes.output_tokens) for a in drawn.arrivals)
    return Requests(tuple(same), at_once)


def check(count: int, rate: float, concurrency: int) -> None:
    """Raises OptionError for what no workload can be; 0 means left out for the last two."""
    if not 1 <= count <= MOST_REQUESTS:
        raise OptionError(
            f"--requests {count} is outside 1..{MOST_REQUESTS}", hint=f"such as {REQUESTS}"
        )
    if rate and not _SLOWEST <= rate <= _FASTEST:
        raise OptionError(
            f"--rate {rate:g} is outside {_SLOWEST:g}..{_FASTEST:g}", hint="requests a second"
        )
    if concurrency < 0:
        raise OptionError(f"--concurrency {concurrency}", hint="1 or more requests at once")
    if rate and concurrency:
        raise OptionError("--rate beside --concurrency", hint="one of both")


def _arrival(request: dict[str, object], where: str) -> Arrival:
    """One of a list that `read_workload` has accepted."""
    at, length, prompt = request.get("at", 0.0), request.get("prompt_tokens"), request.get("prompt")
    output = request["max_tokens"]
    assert isinstance(at, int | float | str) and isinstance(output, int)
    if not 0 <= float(at) <= _LAST:
        raise OptionError(f"a request at {at} s", where=where, hint=f"0 to {_LAST:g} seconds")
    if not isinstance(length, int):
        assert isinstance(prompt, list | str)
        length = len(prompt)
    return Arrival(float(at), length, output)
