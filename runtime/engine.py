"""Requests in, text out: schedule → execute → sample → settle, one step at a time.

Owns the scheduler and each request's text; knows nothing of how a step is computed. Every request
gets exactly one output with a finish reason, whatever fails.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from sitsc.core.errors import ExecutionError, RequestError, SitscError
from sitsc.core.sampling import SamplingOptions
from sitsc.core.serving.batch import StepBatch
from sitsc.core.serving.kv_blocks import PagePool
from sitsc.core.serving.request import FinishReason, Request
from sitsc.core.serving.scheduler import Scheduler, SchedulerLimits
from sitsc.runtime.sampler import Sampler, SamplerRow
from sitsc.runtime.stop import AnswerText
from sitsc.runtime.tokenizer import Detokenizer, Tokenizer

MaskFunction = Callable[[Sequence[int]], torch.Tensor | None]


class Executor(Protocol):
    """Computes one step of the model."""

    def execute(self, batch: StepBatch) -> torch.Tensor:
        """Logits [sampled rows, width] on the CPU, in the order of the True of `batch.sample`."""
        ...


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
    text: AnswerText | None
    mask: MaskFunction | None


class Engine:
    """Serves requests over one executor. Not thread-safe: one thread calls `step`."""

    def __init__(
        self,
        executor: Executor,
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
        self._sessions: dict[int, _Session] = {}
        self._ready: list[Output] = []  # outputs made outside of a step, given out by the next
        self._mail: dict[int, deque[Output]] = {}  # outputs of requests that `generate` reads

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._sessions or self._ready)

    def add_request(
        self,
        prompt: str | Sequence[int],
        options: SamplingOptions | None = None,
        mask: MaskFunction | None = None,
    ) -> int:
        """Queue a prompt (text or ids); its request id.

        `mask` is called with the generated ids before each draw and says which ids are allowed
        (bool [width], or None for all). Raises `RequestError`, `CapacityError`.
        """
        options = SamplingOptions() if options is None else options
        request = self.scheduler.add(self._prompt_ids(prompt), options)
        row = SamplerRow.begin(options, request.token_ids, len(request.prompt_ids))
        text = None
        if self.tokenizer is not None:
            text = AnswerText(Detokenizer(self.tokenizer), options.stop, options.min_tokens)
        self._sessions[request.id] = _Session(request, row, text, mask)
        return request.id

    def step(self) -> list[Output]:
        """Advance every running request; new outputs, also of requests aborted or failed before."""
        outputs = self._ready + self._advance()
        self._ready = []
        return [output for output in outputs if not self._posted(output)]

    def abort(self, request_id: int) -> None:
        """End a request; the next step gives out its last output. Ended ones are left alone."""
        if self.scheduler.abort(request_id) is not None:
            self._ready.append(self._ended(request_id, "abort"))

    def generate(
        self, prompt: str | Sequence[int], options: SamplingOptions | None = None
    ) -> Iterator[Output]:
        """The outputs of one prompt as they come; closing the iterator aborts the request."""
        request_id = self.add_request(prompt, options)
        mail = self._mail[request_id] = deque()
        output = None
        try:
            while output is None or output.finish_reason is None:
                while not mail:
                    self._ready += self.step()
                output = mail.popleft()
                yield output
        finally:
            self.abort(request_id)
            self._ready = [left for left in self._ready if left.request_id != request_id]
            del self._mail[request_id]

    def generate_batch(
        self,
        prompts: Sequence[str | Sequence[int]],
        options: SamplingOptions | Sequence[SamplingOptions] | None = None,
    ) -> list[Completion]:
        """All answers, in the order of the prompts. A refused prompt is an error of its own."""
        many = [options] * len(prompts) if not isinstance(options, Sequence) else options
        parts: list[list[Output]] = []
        mine: dict[int, list[Output]] = {}
        for prompt, option in zip(prompts, many, strict=True):
            outputs: list[Output] = []
            parts.append(outputs)
            try:
                mine[self.add_request(prompt, option)] = outputs
            except RequestError as error:
                outputs.append(Output(-1, finish_reason="error", error=error))
        others: list[Output] = []
        while any(not outputs or not outputs[-1].finish_reason for outputs in mine.values()):
            for output in self.step():
                mine.get(output.request_id, others).append(output)
        self._ready += others
        return [_joined(outputs) for outputs in parts]

    def _prompt_ids(self, prompt: str | Sequence[int]) -> Sequence[int]:
        if not isinstance(prompt, str):
            bad = next((i for i in prompt if not 0 <= i < self.sampler.vocab_size), None)
            if bad is not None:
                raise RequestError(
                    f"token id {bad} is not in the vocabulary",
                    hint=f"ids run from 0 to {self.sampler.vocab_size - 1}",
                )
            return prompt
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer", hint="give token ids, not text")
        if not prompt:
            raise RequestError("the prompt is empty", hint="give some text")
        return self.tokenizer.encode(prompt)

    def _advance(self) -> list[Output]:
        batch = self.scheduler.schedule()
        if batch is None:
            return []
        try:
            sampled = self._sample(self.executor.execute(batch), batch.sampled_ids)
        except Exception as error:
            return self._failed(batch, error)
        except BaseException as error:  # an interrupt: the requests end, the engine stays usable
            self._ready += self._failed(batch, error)
            raise
        return self._settle(batch, sampled)

    def _sample(self, logits: torch.Tensor, request_ids: Sequence[int]) -> list[int | RequestError]:
        rows: list[SamplerRow] = []
        for request_id in request_ids:
            session = self._sessions[request_id]
            if session.mask is not None:
                session.row.mask = session.mask(session.request.generated_ids)
            rows.append(session.row)
        return [*self.sampler.sample(logits, rows)]

    def _settle(self, batch: StepBatch, sampled: Sequence[int | RequestError]) -> list[Output]:
        """Tell text from tokens, end what has ended, and say so."""
        stopped: list[int] = []
        errors: dict[int, RequestError] = {}
        texts: dict[int, str] = {}
        tokens: list[int] = []
        for request_id, token in zip(batch.sampled_ids, sampled, strict=True):
            if isinstance(token, RequestError):
                errors[request_id] = token
                tokens.append(-1)
                continue
            tokens.append(token)
            texts[request_id] = self._text(self._sessions[request_id], token, stopped)
        self.scheduler.end(errors, "error")
        self.scheduler.settle(batch, tokens, stopped)
        outputs = [self._ended(i, "error", error) for i, error in errors.items()]
        for request_id, token in zip(batch.sampled_ids, tokens, strict=True):
            if request_id in texts:
                reason = self._sessions[request_id].request.finish_reason
                outputs.append(Output(request_id, texts[request_id], (token,), reason))
                if reason is not None:
                    del self._sessions[request_id]
        return outputs

    def _text(self, session: _Session, token: int, stopped: list[int]) -> str:
        if session.text is None:
            return ""
        reason = session.request.ending_with(token, self.eos_ids)
        text, stops = session.text.push(token, reason)
        if stops:
            stopped.append(session.request.id)
        return text

    def _failed(self, batch: StepBatch, cause: BaseException) -> list[Output]:
        error = ExecutionError(f"the step failed: {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        return [self._ended(r.id, "error", error) for r in self.scheduler.drop(batch)]

    def _ended(
        self, request_id: int, reason: FinishReason, error: SitscError | None = None
    ) -> Output:
        del self._sessions[request_id]
        return Output(request_id, finish_reason=reason, error=error)

    def _posted(self, output: Output) -> bool:
        """Put an output aside for the `generate` that waits for it, if there is one."""
        mail = self._mail.get(output.request_id)
        if mail is not None:
            mail.append(output)
        return mail is not None


def _joined(outputs: Sequence[Output]) -> Completion:
    ids = tuple(token for output in outputs for token in output.token_ids)
    last = outputs[-1]
    assert last.finish_reason is not None
    return Completion("".join(o.new_text for o in outputs), ids, last.finish_reason, last.error)
