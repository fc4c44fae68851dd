"""Requests in, text out: schedule → submit → collect → settle.

Owns the scheduler and each request's text; knows nothing of how a step is computed. Where the
executor allows it, the next step is submitted before the last one is read. Every request gets
exactly one output with a finish reason, whatever fails.
"""

from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sitsc.core.errors import ExecutionError, RequestError, SitscError
from sitsc.core.sampling import SamplingOptions
from sitsc.core.serving.batch import StepBatch
from sitsc.core.serving.kv_blocks import PagePool
from sitsc.core.serving.request import FinishReason, Request, check_vocabulary
from sitsc.core.serving.scheduler import Scheduler, SchedulerLimits
from sitsc.runtime.sampler import Sampler, SamplerRow
from sitsc.runtime.steps import HostSteps, LogitsExecutor, StepExecutor
from sitsc.runtime.stop import AnswerText
from sitsc.runtime.tokenizer import Tokenizer

MaskFunction = Callable[[Sequence[int]], torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Output:
    """What a step added to one request; the last output of a request has a finish reason."""

    request_id: int
    new_text: str = ""
    token_ids: tuple[int, ...] = ()  # new ones, end-of-text token included
    finish_reason: FinishReason | None = None
    error: SitscError | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    error: SitscError | None = None


@dataclass(slots=True)
class _Session:
    """The runtime's side of a request."""

    request: Request
    row: SamplerRow
    text: AnswerText | None  # None without a tokenizer
    mask: MaskFunction | None


@dataclass(frozen=True, slots=True)
class _Draw:
    """What one row of a step came to: a token and its text, or an error."""

    session: _Session
    token: int
    text: str = ""
    stopped: bool = False
    error: RequestError | None = None


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step that was submitted; `refused` rows failed before it."""

    batch: StepBatch
    step: Any
    refused: dict[int, RequestError]


class Engine:
    """Serves requests over one executor. Not thread-safe: one thread calls it."""

    def __init__(
        self,
        executor: LogitsExecutor | StepExecutor,
        tokenizer: Tokenizer | None,
        limits: SchedulerLimits,
        *,
        num_pages: int,
        page_tokens: int,
        vocab_size: int,
        logits_width: int | None = None,
        eos_ids: Collection[int] = (),
    ) -> None:
        self.executor, self.tokenizer = executor, tokenizer
        self.eos_ids = frozenset(eos_ids)
        self.scheduler = Scheduler(limits, PagePool(num_pages, page_tokens), self.eos_ids)
        self.sampler = Sampler(vocab_size, logits_width, self.eos_ids)
        self.steps: StepExecutor = (
            executor if isinstance(executor, StepExecutor) else HostSteps(executor, self.sampler)
        )
        self._flights: deque[_Flight] = deque()
        self._sessions: dict[int, _Session] = {}  # of all requests without a last output
        self._ready: list[Output] = []  # made outside of a step, given out by the next one
        self._mail: dict[int, deque[Output]] = {}  # of requests that `generate` waits for

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._sessions or self._ready or self._flights)

    def add_request(
        self,
        prompt: str | Sequence[int],
        options: SamplingOptions | None = None,
        *,
        add_bos: bool = True,
        mask: MaskFunction | None = None,
    ) -> int:
        """Queue a prompt, text or ids; its request id. Chat text wants `add_bos=False`.

        `mask` is called with the generated ids before each draw and says which ids are allowed
        (bool [width], or None for all). Raises `RequestError`, `CapacityError`.
        """
        options = SamplingOptions() if options is None else options
        text = None
        if self.tokenizer is not None:
            text = AnswerText(self.tokenizer.detokenizer(), options.stop, options.min_tokens)
        elif options.stop:
            raise RequestError("stop strings need a tokenizer", hint="this model has none")
        request = self.scheduler.add(self._prompt_ids(prompt, add_bos), options)
        row = SamplerRow.begin(options, request.token_ids, len(request.prompt_ids))
        self._sessions[request.id] = _Session(request, row, text, mask)
        return request.id

    def step(self) -> list[Output]:
        """Advance every running request; new outputs, those of requests ended between too."""
        outputs = self._ready + self._advance()
        self._ready = []
        return [output for output in outputs if not self._posted(output)]

    def abort(self, request_id: int) -> None:
        """End a request; the next step gives out its last output. Ended ones are left alone."""
        if self.scheduler.abort(request_id) is not None:
            self._ready.append(self._ended(request_id, "abort"))

    def generate(
        self,
        prompt: str | Sequence[int],
        options: SamplingOptions | None = None,
        *,
        add_bos: bool = True,
        mask: MaskFunction | None = None,
    ) -> Generator[Output, None, None]:
        """The outputs of one prompt as they come; closing the iterator aborts the request."""
        request_id = self.add_request(prompt, options, add_bos=add_bos, mask=mask)
        mail = self._mail[request_id] = deque()
        output = None
        try:
            while output is None or output.finish_reason is None:
                while not mail:
                    self._keep(self.step())
                output = mail.popleft()
                yield output
        finally:
            self._leave(request_id)

    def generate_batch(
        self,
        prompts: Sequence[str | Sequence[int]],
        options: SamplingOptions | Sequence[SamplingOptions] | None = None,
    ) -> list[Completion]:
        """All answers, in the order of the prompts. A refused prompt is an error of its own."""
        each = options if isinstance(options, Sequence) else [options] * len(prompts)
        answers: list[deque[Output]] = []
        ids: list[int] = []
        try:
            for prompt, option in zip(prompts, each, strict=True):
                mail: deque[Output] = deque()
                answers.append(mail)
                try:
                    ids.append(self.add_request(prompt, option))
                    self._mail[ids[-1]] = mail
                except RequestError as error:
                    mail.append(Output(-1, finish_reason="error", error=error))
            while any(not mail or mail[-1].finish_reason is None for mail in answers):
                self._keep(self.step())
        finally:
            for request_id in ids:
                self._leave(request_id)
        return [_joined(outputs) for outputs in answers]

    def _prompt_ids(self, prompt: str | Sequence[int], add_bos: bool) -> list[int]:
        if not isinstance(prompt, str):
            ids = list(prompt)
        elif self.tokenizer is None:
            raise RequestError("this model has no tokenizer", hint="give token ids, not text")
        elif not prompt:
            raise RequestError("the prompt is empty", hint="give some text")
        else:
            ids = self.tokenizer.encode(prompt, add_bos)
        check_vocabulary(ids, self.sampler.vocab_size)
        return ids

    def _advance(self) -> list[Output]:
        """Submit a step if one may start now, then settle the oldest if it must be waited for."""
        masked = any(session.mask is not None for session in self._sessions.values())
        ahead = 0 if masked else self.steps.num_ahead
        outputs: list[Output] = []
        while len(self._flights) > ahead:  # a request with a mask came while steps ran ahead
            outputs += self._land()
        batch = self.scheduler.schedule(alone=not ahead)
        if batch is not None:
            try:
                self._submit(batch)
            except BaseException as error:
                outputs += self._failed(batch, error)
        if self._flights and (batch is None or len(self._flights) > ahead):
            outputs += self._land()
        return outputs

    def _submit(self, batch: StepBatch) -> None:
        sessions = [self._sessions[request_id] for request_id in batch.sampled_ids]
        refused: dict[int, RequestError] = {}
        for session in sessions:
            if session.mask is not None:
                try:
                    session.row.mask = session.mask(session.request.generated_ids)
                except Exception as error:
                    refused[session.request.id] = _caused("the mask failed", error)
        step = self.steps.submit(batch, [session.row for session in sessions])
        self._flights.append(_Flight(batch, step, refused))

    def _land(self) -> list[Output]:
        """Wait for the oldest step and settle it."""
        flight = self._flights[0]
        try:
            draws = self._collect(flight)
        except BaseException as error:
            return self._failed(flight.batch, error)
        self._flights.popleft()
        return self._settle(flight.batch, draws)

    def _collect(self, flight: _Flight) -> list[_Draw | None]:
        """What each row came to; None where the request ended meanwhile."""
        sampled = self.steps.collect(flight.step)
        draws: list[_Draw | None] = []
        for request_id, token in zip(flight.batch.sampled_ids, sampled, strict=True):
            session = self._sessions.get(request_id)
            token = flight.refused.get(request_id, token)
            draws.append(None if session is None else self._read(session, token))
        return draws

    def _read(self, session: _Session, token: int | RequestError) -> _Draw:
        """The text of a drawn token."""
        if isinstance(token, RequestError):
            return _Draw(session, -1, error=token)
        if session.text is None:
            return _Draw(session, token)
        try:
            reason = session.request.ending_with(token, self.eos_ids)
            text, stopped = session.text.push(token, reason)
        except Exception as error:
            return _Draw(session, -1, error=_caused("the text cannot be decoded", error))
        return _Draw(session, token, text, stopped)

    def _settle(self, batch: StepBatch, draws: Sequence[_Draw | None]) -> list[Output]:
        """Tell the scheduler, and say what came of each row."""
        live = [draw for draw in draws if draw is not None]
        errors = [draw.session.request.id for draw in live if draw.error is not None]
        stopped = [draw.session.request.id for draw in live if draw.stopped]
        self.scheduler.end(errors, "error")
        self.scheduler.settle(batch, [draw.token if draw else -1 for draw in draws], stopped)
        outputs: list[Output] = []
        for draw in live:
            request = draw.session.request
            if draw.error is not None:
                outputs.append(self._ended(request.id, "error", draw.error))
                continue
            outputs.append(Output(request.id, draw.text, (draw.token,), request.finish_reason))
            if request.finish_reason is not None:
                self._remove(request.id)
        return outputs

    def _failed(self, batch: StepBatch, cause: BaseException) -> list[Output]:
        """End what the step, and all others that were submitted, were for.

        After an interrupt the outputs wait for the next step; the engine stays usable.
        """
        error = _caused("the step failed", cause)
        batches = [flight.batch for flight in self._flights]
        self._flights.clear()
        if not any(one is batch for one in batches):
            batches.append(batch)
        ended = [request for one in batches for request in self.scheduler.drop(one)]
        failed = [self._ended(request.id, "error", error) for request in ended]
        if isinstance(cause, Exception):
            return failed
        self._ready += failed
        raise cause

    def _remove(self, request_id: int) -> _Session:
        self.steps.forget(request_id)
        return self._sessions.pop(request_id)

    def _ended(
        self, request_id: int, reason: FinishReason, error: SitscError | None = None
    ) -> Output:
        """The last output of a request that ended without a token, with the text still held."""
        session = self._remove(request_id)
        text = session.text.flush() if session.text is not None else ""
        return Output(request_id, text, finish_reason=reason, error=error)

    def _posted(self, output: Output) -> bool:
        """Put an output aside for the `generate` that waits for it, if there is one."""
        mail = self._mail.get(output.request_id)
        if mail is not None:
            mail.append(output)
        return mail is not None

    def _keep(self, outputs: list[Output]) -> None:
        """Outputs of other requests: the next step of the caller gives them out."""
        self._ready += outputs

    def _leave(self, request_id: int) -> None:
        """Nobody waits for this request any more."""
        self.abort(request_id)
        self._ready = [output for output in self._ready if output.request_id != request_id]
        self._mail.pop(request_id, None)


def _caused(what: str, cause: BaseException) -> ExecutionError:
    error = ExecutionError(f"{what}: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error


def _joined(outputs: Iterable[Output]) -> Completion:
    *_, last = outputs
    assert last.finish_reason is not None
    text = "".join(output.new_text for output in outputs)
    ids = tuple(token for output in outputs for token in output.token_ids)
    return Completion(text, ids, last.finish_reason, last.error)
