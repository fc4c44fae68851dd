"""Loading an artifact: checked, placed and ready to generate; compiles nothing.

In: an artifact folder. Out: a `Session` with engine, tokenizer and chat template. Checksums of all
files are verified in the background while the rest loads, and before anything is given out. What
only GPUs need is imported for an artifact of a GPU target.
"""

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sitsc.core import artifact as files
from sitsc.core import env
from sitsc.core.artifact import Artifact, check_files, check_target, open_artifact
from sitsc.core.errors import ArtifactError, RankError, TokenizerError
from sitsc.core.memory_budget import Room, needed_bytes
from sitsc.core.memory_changes import check_memory
from sitsc.core.plan import PLAIN, Plan
from sitsc.core.serving.limits import limits_of
from sitsc.runtime.chat import ChatTemplate
from sitsc.runtime.checkpoint_weights import read_checkpoint
from sitsc.runtime.cpu_executor import CpuExecutor
from sitsc.runtime.cpu_weights import random_weights as random_cpu_weights
from sitsc.runtime.engine import Engine
from sitsc.runtime.load_request import AnyExecutor, Loading, LoadRequest, Timeline, weights_folder
from sitsc.runtime.memory import read_weights
from sitsc.runtime.sampler import Sampler
from sitsc.runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from sitsc.runtime.cuda_rank_steps import CudaRankSteps
    from sitsc.runtime.rank_steps import RankSteps
    from sitsc.runtime.ranks import World

TARGET = "cpu"
GPU = "sm_"


@dataclass(frozen=True, slots=True)
class Session:
    """Everything needed to serve one artifact.

    `timeline` holds the seconds of each phase of loading, which sum to the whole; `beside` those of
    what went on at the same time.
    """

    artifact: Artifact
    engine: Engine
    executor: Any  # a LogitsExecutor or StepExecutor, with what its kind of target has besides
    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    timeline: dict[str, float]
    beside: dict[str, float] = field(default_factory=dict)
    ranks: "RankSteps | CudaRankSteps | None" = None

    @property
    def follows(self) -> bool:
        """Whether this process is a rank that only computes what rank 0 tells it: `serve`."""
        return self.ranks is not None and self.ranks.rank > 0

    def serve(self) -> None:
        """Compute steps of rank 0 until it ends. Raises RankError, ExecutionError."""
        assert self.ranks is not None
        self.ranks.serve()

    def close(self) -> None:
        """Let the other ranks end, if there are any."""
        if self.ranks is not None:
            self.ranks.close()

    def chat_prompt(self, messages: list[dict[str, str]]) -> str:
        """Messages as the text that the model expects. Raises TokenizerError without a template."""
        if self.template is None:
            raise TokenizerError(
                "this model has no chat template", hint="run without --chat to complete text"
            )
        return self.template.render(messages)


class _CpuLoading:
    """An artifact on its way to the CPU: its weights are read at once, its code not yet."""

    def __init__(self, artifact: Artifact, request: LoadRequest) -> None:
        self._artifact, self._request = artifact, request
        self._folder = weights_folder(artifact, request)
        if limit := request.memory_limit:
            need = needed_bytes(artifact.plan)
            room = Room(max(need, limit), max(need, limit), limit)
            check_memory(artifact.plan, room, "this machine", artifact.root.name)

    def weights(self) -> dict[str, Tensor]:
        """All weights, from the artifact, the checkpoint or at random."""
        if self._request.random_weights:
            return random_cpu_weights(self._artifact.plan)
        if self._folder is None:
            return read_weights(self._artifact)
        return read_checkpoint(self._artifact, self._folder, self._request.progress)


def load(
    root: Path | str,
    *,
    weights: Path | None = None,
    random_weights: bool = False,
    verify: bool = True,
    memory_limit: int | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> Session:
    """Load an artifact; `memory_limit` is the most bytes of device memory that may be used.

    Raises ArtifactError, PlanError, TargetError, DeviceError or MemoryPlanError before anything
    runs, and on a GPU before weights are read.
    """
    timeline = Timeline()
    artifact = open_artifact(root)
    check_decoder(artifact)
    timeline.mark("open")
    request = LoadRequest(weights, random_weights, verify, memory_limit, progress)
    if artifact.plan.stages:
        return _load_rank(artifact, request, timeline)
    if env.launched_rank() is not None:
        raise RankError("the artifact is for one rank", hint="start it without torchrun or --nproc")
    load_on = _load_gpu if artifact.plan.target.isa.startswith(GPU) else _load_cpu
    executor, tokenizer, template = load_on(artifact, request, timeline)
    engine = make_engine(artifact, executor, tokenizer)
    timeline.mark("executor")
    return Session(
        artifact, engine, executor, tokenizer, template, timeline.phases, timeline.beside
    )


def _load_rank(artifact: Artifact, request: LoadRequest, timeline: Timeline) -> Session:
    """One rank of several: it meets the others, then loads what is its own."""
    from sitsc.runtime import ranks  # noqa: PLC0415  (torch.distributed: only where it is used)

    world = ranks.join(artifact.plan)
    timeline.mark("meet")
    own = artifact.of_rank(world.rank)
    if own.plan.target.isa.startswith(GPU):
        from sitsc.runtime.cuda_rank_steps import CudaRankSteps  # noqa: PLC0415  (where GPUs are)

        executor, tokenizer, template = _load_gpu(own, request, timeline, world)
        steps = CudaRankSteps(executor, world)
    else:
        from sitsc.runtime.rank_steps import RankSteps  # noqa: PLC0415  (as ranks)

        executor, tokenizer, template = _load_cpu(own, request, timeline, world.tp_rank)
        stage = artifact.plan.stages[world.stage]
        steps = RankSteps(executor, stage, world, _sampler(artifact.plan))
    engine = make_engine(own, steps, tokenizer)
    timeline.mark("executor")
    return Session(
        own, engine, executor, tokenizer, template, timeline.phases, timeline.beside, steps
    )


def check_decoder(artifact: Artifact) -> None:
    """Raises ArtifactError for a plain artifact: it generates no text."""
    if artifact.plan.kind == PLAIN:
        names = ", ".join(a.name for a in artifact.plan.regimes[0].groups[0].launches[0].arguments)
        raise ArtifactError(
            f"the artifact is a plain function of ({names}): it has no engine",
            where=artifact.root.name,
            hint="sitsc run --embed for an encoder; sitsc.load(path) gives the function",
        )


_Loaded = tuple[AnyExecutor, Tokenizer | None, ChatTemplate | None]


def _load_cpu(
    artifact: Artifact, request: LoadRequest, timeline: Timeline, tp_rank: int = 0
) -> tuple[CpuExecutor, Tokenizer | None, ChatTemplate | None]:
    check_target(artifact, TARGET)
    loading = _CpuLoading(artifact, request)
    with checked(artifact, request.verify):
        tokenizer, template = _text_files(artifact)
        give_back_memory()
        timeline.mark("tokenizer")
        placed = loading.weights()
        timeline.mark("weights")
    timeline.mark("verify")
    return CpuExecutor(artifact, placed, tp_rank), tokenizer, template


def _load_gpu(
    artifact: Artifact, request: LoadRequest, timeline: Timeline, world: "World | None" = None
) -> tuple[Any, Tokenizer | None, ChatTemplate | None]:
    from sitsc.runtime.cuda_loading import CudaLoading  # noqa: PLC0415  (only where a GPU is)

    loading: Loading = CudaLoading(artifact, request, timeline, world)
    try:
        with checked(artifact, request.verify):
            tokenizer, template = _text_files(artifact)
            timeline.mark("tokenizer")
            executor = loading.finish(timeline)
    except BaseException:
        loading.stop()
        raise
    timeline.mark("verify")
    return executor, tokenizer, template


def give_back_memory() -> None:
    """Return what the allocator holds but nothing uses: half of what reading a tokenizer took."""
    with contextlib.suppress(OSError, AttributeError):  # a C library without malloc_trim
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def checked(artifact: Artifact, verify: bool) -> Iterator[None]:
    """Compare checksums in the background; an altered file wins over what fails because of it."""
    with ThreadPoolExecutor(1) as pool:
        checking = pool.submit(check_files, artifact) if verify else None
        try:
            yield
        finally:
            if checking is not None:
                checking.result()


def make_engine(artifact: Artifact, executor: AnyExecutor, tokenizer: Tokenizer | None) -> Engine:
    """The engine with the limits of the plan."""
    plan = artifact.plan
    return Engine(
        executor,
        tokenizer,
        limits_of(plan),
        num_pages=plan.memory.kv_pages,
        page_tokens=plan.kv[0].page_tokens,
        vocab_size=plan.tokens.vocab_size,
        logits_width=plan.tokens.logits_width,
        eos_ids=plan.tokens.eos_token_ids,
    )


def _sampler(plan: Plan) -> Sampler:
    tokens = plan.tokens
    return Sampler(tokens.vocab_size, tokens.logits_width, tokens.eos_token_ids)


def _text_files(artifact: Artifact) -> tuple[Tokenizer | None, ChatTemplate | None]:
    return _tokenizer(artifact), _template(artifact)


def _tokenizer(artifact: Artifact) -> Tokenizer | None:
    if not artifact.has(files.TOKENIZER):
        return None
    return Tokenizer.from_file(artifact.file(files.TOKENIZER))


def _template(artifact: Artifact) -> ChatTemplate | None:
    if not artifact.has(files.CHAT_TEMPLATE):
        return None
    return ChatTemplate(artifact.text(files.CHAT_TEMPLATE), artifact.json(files.SPECIAL))
