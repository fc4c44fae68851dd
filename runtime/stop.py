"""What of an answer is shown, and where stop strings end it.

Stop strings are found across token boundaries, and the result does not depend on where the
boundaries lie.
"""

from collections.abc import Sequence

from sitsc.runtime.tokenizer import Detokenizer


class StopMatcher:
    """Holds text back while it may be the beginning of a stop string, cuts it before one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Text that can be shown now, and whether a stop string was completed.

        The stop string that ends first counts, the longest of those that end there.
        """
        if not self._stop or not text:
            return text, False
        self._held += text
        ends = [(at + len(s), -len(s)) for s in self._stop if (at := self._held.find(s)) >= 0]
        if ends:
            end, negative_length = min(ends)
            shown, self._held = self._held[: end + negative_length], ""
            return shown, True
        cut = len(self._held) - self._num_pending()
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, False

    def flush(self) -> str:
        """What was held back, when no text follows."""
        held, self._held = self._held, ""
        return held

    def _num_pending(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = min(len(self._held), max(map(len, self._stop)) - 1)
        for length in range(longest, 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0


class AnswerText:
    """The visible text of one answer, from its ids."""

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str], min_tokens: int = 0) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stop)
        self._min_tokens = min_tokens  # a stop string completed before is shown as text
        self._num_tokens = 0

    def push(self, token_id: int, reason: str | None) -> tuple[str, bool]:
        """New text, and whether a stop string ends the answer at this token.

        `reason` is why the token itself ends the answer: the text of an end-of-text token
        ("stop") is not shown.
        """
        self._num_tokens += 1
        text = "" if reason == "stop" else self._detokenizer.push(token_id)
        if reason is not None:
            text += self._detokenizer.flush()
        if self._num_tokens < self._min_tokens:
            return text, False
        shown, stopped = self._matcher.push(text)
        if reason is not None and not stopped:
            shown += self._matcher.flush()
        return shown, stopped

    def flush(self) -> str:
        """The text still held, when the answer is broken off."""
        return self._matcher.flush() + self._detokenizer.flush()
