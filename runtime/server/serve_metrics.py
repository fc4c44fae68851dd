"""Prometheus metrics of the server, in a registry of their own.

Times are seen from the HTTP side, so that queueing and sending count. Seconds and tokens.
"""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from sitsc.runtime.server.engine_client import Load

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKEN = (0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.012, 0.016, 0.025, 0.05, 0.1, 0.25, 1)
_WHOLE = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class ServeMetrics:
    """What was served so far. `load` is asked when metrics are read."""

    def __init__(self, model: str, load: Callable[[], Load], num_pages: int) -> None:
        self._registry = CollectorRegistry()
        self._model = model
        self._requests = self._counter("requests", "HTTP requests for answers", "status")
        self._answers = self._counter("answers", "Answers that ended", "reason")
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts that were taken")
        self._tokens = self._counter("generated_tokens", "Tokens of answers")
        self._first = self._histogram("ttft_seconds", "Request to first token", _FIRST)
        self._between = self._histogram(
            "tpot_seconds", "Time per output token after the first, a mean an answer", _TOKEN
        )
        self._whole = self._histogram("request_seconds", "Request to its end", _WHOLE)
        self._gauge("running", "Sequences in the batch", lambda: load().running)
        self._gauge("waiting", "Sequences that wait for room", lambda: load().waiting)
        self._gauge("kv_pages", "KV pages of the plan", lambda: num_pages)
        self._gauge("kv_pages_free", "KV pages that nobody holds", lambda: load().free_pages)

    def text(self) -> bytes:
        """All metrics as Prometheus reads them."""
        return generate_latest(self._registry)

    def ended(self, status: int, seconds: float) -> None:
        """A request for answers ended with an HTTP status (499: its client left)."""
        self._requests.labels(self._model, str(status)).inc()
        self._whole.labels(self._model).observe(seconds)

    def prompt(self, num_tokens: int) -> None:
        """Prompts of so many tokens were taken."""
        self._prompt.labels(self._model).inc(num_tokens)

    def token(self, num_tokens: int) -> None:
        """Tokens of an answer came."""
        self._tokens.labels(self._model).inc(num_tokens)

    def first(self, seconds: float) -> None:
        """The first token of an answer came."""
        self._first.labels(self._model).observe(seconds)

    def answer(self, reason: str, seconds: float, num_tokens: int) -> None:
        """An answer ended, `seconds` after its first token."""
        self._answers.labels(self._model, reason).inc()
        if num_tokens > 1:
            self._between.labels(self._model).observe(seconds / (num_tokens - 1))

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"sitsc_{name}", what, ("model", *labels), registry=self._registry)

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            f"sitsc_{name}", what, ("model",), buckets=buckets, registry=self._registry
        )

    def _gauge(self, name: str, what: str, value: Callable[[], float]) -> None:
        gauge = Gauge(f"sitsc_{name}", what, ("model",), registry=self._registry)
        gauge.labels(self._model).set_function(value)
