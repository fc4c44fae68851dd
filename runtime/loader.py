"""Loading an artifact: checked, placed and ready to generate; compiles nothing.

In: an artifact folder. Out: a `Session` with engine, tokenizer and chat template. Checksums of all
files are verified in the background while the rest loads, and before anything is given out.
"""

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from sitsc.core import artifact as files
from sitsc.core.artifact import Artifact, check_files, check_target, open_artifact
from sitsc.core.errors import ArtifactError, TokenizerError
from sitsc.core.serving.scheduler import SchedulerLimits
from sitsc.runtime.chat import ChatTemplate
from sitsc.runtime.checkpoint_weights import read_checkpoint
from sitsc.runtime.cpu_executor import CpuExecutor
from sitsc.runtime.engine import Engine
from sitsc.runtime.memory import read_weights
from sitsc.runtime.tokenizer import Tokenizer

TARGET = "cpu"


@dataclass(frozen=True, slots=True)
class Session:
    """Everything needed to serve one artifact; `timeline` holds seconds a phase of loading took."""

    artifact: Artifact
    engine: Engine
    executor: CpuExecutor
    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    timeline: dict[str, float]

    def chat_prompt(self, messages: list[dict[str, str]]) -> str:
        """Messages as the text that the model expects. Raises TokenizerError without a template."""
        if self.template is None:
            raise TokenizerError(
                "this model has no chat template", hint="run without --chat to complete text"
            )
        return self.template.render(messages)


class _Timeline:
    """Seconds of each phase, which sum to the whole."""

    def __init__(self) -> None:
        self.phases: dict[str, float] = {}
        self._last = time.perf_counter()

    def mark(self, phase: str) -> None:
        now = time.perf_counter()
        self.phases[phase] = self.phases.get(phase, 0.0) + now - self._last
        self._last = now


def load(
    root: Path | str,
    *,
    weights: Path | None = None,
    verify: bool = True,
    progress: Callable[[float], None] = lambda share: None,
) -> Session:
    """Load an artifact. Raises ArtifactError, PlanError or TargetError before anything runs."""
    timeline = _Timeline()
    artifact = open_artifact(root)
    check_target(artifact, TARGET)
    timeline.mark("open")
    with _checked(artifact, verify):
        tokenizer = _tokenizer(artifact)
        template = _template(artifact)
        give_back_memory()
        timeline.mark("tokenizer")
        placed = _weights(artifact, weights, progress)
        timeline.mark("weights")
    timeline.mark("verify")
    executor = CpuExecutor(artifact, placed)
    engine = make_engine(artifact, executor, tokenizer)
    timeline.mark("executor")
    return Session(artifact, engine, executor, tokenizer, template, timeline.phases)


def give_back_memory() -> None:
    """Return what the allocator holds but nothing uses: half of what reading a tokenizer took."""
    with contextlib.suppress(OSError, AttributeError):  # a C library without malloc_trim
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def _checked(artifact: Artifact, verify: bool) -> Iterator[None]:
    """Compare checksums in the background; an altered file wins over what fails because of it."""
    with ThreadPoolExecutor(1) as pool:
        checking = pool.submit(check_files, artifact) if verify else None
        try:
            yield
        finally:
            if checking is not None:
                checking.result()


def make_engine(artifact: Artifact, executor: CpuExecutor, tokenizer: Tokenizer | None) -> Engine:
    """The engine with the limits of the plan."""
    plan = artifact.plan
    limits = SchedulerLimits(
        max_batch=plan.schedule.max_batch,
        max_step_tokens=plan.schedule.max_step_tokens,
        prefill_chunk_tokens=plan.schedule.prefill_chunk_tokens,
        max_context=plan.tokens.max_context,
    )
    return Engine(
        executor,
        tokenizer,
        limits,
        num_pages=plan.memory.kv_pages,
        page_tokens=plan.kv[0].page_tokens,
        vocab_size=plan.tokens.vocab_size,
        logits_width=plan.tokens.logits_width,
        eos_ids=plan.tokens.eos_token_ids,
    )


def _weights(
    artifact: Artifact, folder: Path | None, progress: Callable[[float], None]
) -> dict[str, Tensor]:
    if artifact.manifest.packed:
        if folder is not None:
            raise ArtifactError("this artifact holds its weights", hint="leave out --weights")
        return read_weights(artifact)
    place = folder or Path(artifact.manifest.checkpoint_hint)
    if not str(place) or not place.is_dir():
        raise ArtifactError(
            "this artifact holds no weights", hint="name the checkpoint folder with --weights DIR"
        )
    return read_checkpoint(artifact, place, progress)


def _tokenizer(artifact: Artifact) -> Tokenizer | None:
    if not artifact.has(files.TOKENIZER):
        return None
    return Tokenizer.from_file(artifact.file(files.TOKENIZER))


def _template(artifact: Artifact) -> ChatTemplate | None:
    if not artifact.has(files.CHAT_TEMPLATE):
        return None
    return ChatTemplate(artifact.text(files.CHAT_TEMPLATE), artifact.json(files.SPECIAL))
