"""How one request wants its tokens drawn and when it ends: plain data, validated once.

The defaults are greedy decoding without filters. Used by the scheduler, the sampler and the CLI.
"""

import math
from dataclasses import dataclass

from sitsc.core.errors import OptionError

MIN_TEMPERATURE = 1e-4  # below it, logits divided by the temperature overflow fp32
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Options of one request; raises `OptionError` naming the option, its value and its range.

    `max_tokens` and `min_tokens` count generated tokens. `temperature` 0 takes the best token
    (filters then change nothing). `top_k` 0, `top_p` 1, `min_p` 0 and `repetition_penalty` 1
    switch the respective step off. `seed` None draws a new seed. `ignore_eos` goes on past
    end-of-text tokens; stop strings still count.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0

    def __post_init__(self) -> None:
        _whole("max_tokens", self.max_tokens, 1)
        _whole("min_tokens", self.min_tokens, 0)
        _whole("top_k", self.top_k, 0)
        if self.seed is not None:
            _whole("seed", self.seed, 0)
        _number("temperature", self.temperature, 0, 100)
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise _error("temperature", self.temperature, f"0 (greedy) or {MIN_TEMPERATURE} to 100")
        _number("top_p", self.top_p, 0, 1, open_low=True)
        _number("min_p", self.min_p, 0, 1)
        _number("repetition_penalty", self.repetition_penalty, 0, 100, open_low=True)
        if not isinstance(self.ignore_eos, bool):
            raise _error("ignore_eos", self.ignore_eos, "true or false")
        if self.min_tokens > self.max_tokens:
            raise _error("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        _stop_strings(self.stop)

    @property
    def is_greedy(self) -> bool:
        """Whether the best token is taken without drawing."""
        return self.temperature == 0


def _error(option: str, value: object, allowed: str) -> OptionError:
    return OptionError(f"{option}={value!r} is not allowed", hint=f"{option} must be {allowed}")


def _whole(option: str, value: object, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value < 2**63:
        raise _error(option, value, f"a whole number, {low} or more and below 2**63")


def _number(option: str, value: object, low: float, high: float, open_low: bool = False) -> None:
    """Refuse all but finite numbers in [low, high], or in (low, high] with `open_low`."""
    fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not fits or not low <= value <= high or (open_low and value == low):  # pyright: ignore[reportOperatorIssue]
        allowed = f"above {low} and at most {high}" if open_low else f"from {low} to {high}"
        raise _error(option, value, f"a number {allowed}")


def _stop_strings(stop: object) -> None:
    if not isinstance(stop, tuple) or not all(isinstance(text, str) for text in stop):
        raise _error("stop", stop, "a tuple of strings")
    if len(stop) > MAX_STOP_STRINGS:
        raise _error("stop", f"{len(stop)} strings", f"at most {MAX_STOP_STRINGS} strings")
    for text in stop:
        if not 0 < len(text) <= MAX_STOP_CHARS:
            shown = text if len(text) < 20 else f"a string of {len(text)} characters"
            raise _error("stop", shown, f"strings of 1 to {MAX_STOP_CHARS} characters")
